"""Start of a learner, from the checkpoints on disk and the lineages of the store."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.errors import ConfigError
from jaxroll.learner import weights
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.models import families
from jaxroll.policy import selection
from jaxroll.policy.selection import NEW_LOG
from jaxroll.records import Cut, LogStart, Version
from jaxroll.store.core.state import Lineage, on_line


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Folders that look whole: 0.2, 0.4, 0.6 and 1.3, where lineage 1 left 0 at 2."""
    found = Checkpoints(tmp_path, kept=9)
    for version in (Version(0, 2), Version(0, 4), Version(0, 6), Version(1, 3)):
        (found.path(version) / "about").mkdir(parents=True)
    return found


LINES = (Lineage(), Lineage(0, 2, fork="first"))


def start_of(
    checkpoints: Checkpoints, lines: Sequence[Lineage], claims: int, fork: str | None, *, new_log: bool = False
) -> tuple[Version | None, str]:
    return selection.start_of(checkpoints, lines, claims, fork, partial(on_line, [*lines]), new_log)


def test_it_is_the_newest_on_the_line(checkpoints: Checkpoints) -> None:
    assert start_of(checkpoints, LINES, 9, None) == (Version(1, 3), "")
    assert start_of(checkpoints, (Lineage(), Lineage(0, 5)), 9, None)[0] == Version(1, 3)
    assert start_of(checkpoints, (*LINES, Lineage(0, 4, fork="b")), 9, None) == (Version(0, 4), ""), "6 was given up"


def test_a_log_that_does_not_know_the_checkpoints_is_refused(checkpoints: Checkpoints) -> None:
    """store.db is missing, or was put back from an old copy."""
    for lines, claims, fork in (
        (LINES[:1], 0, None),
        (LINES[:1], 9, None),
        (LINES[:1], 9, "0@second"),
        (LINES, 2, None),
    ):
        with pytest.raises(ConfigError, match=r"0001\.00000003.*store\.db.*Put back"):
            start_of(checkpoints, lines, claims, fork)
    shutil.rmtree(checkpoints.path(Version(1, 3)))
    with pytest.raises(ConfigError, match=r"0000\.00000006.*0 claims"):
        start_of(checkpoints, LINES[:1], 0, None)
    assert start_of(checkpoints, LINES[:1], 0, "0@second") == (None, "second"), "a fork gives up what comes later"
    assert start_of(checkpoints, LINES[:1], 6, None) == (Version(0, 6), "")


def test_a_new_log_begins_at_the_newest_checkpoint_only_if_it_is_asked_for_and_has_no_claim(
    checkpoints: Checkpoints,
) -> None:
    new = LINES[:1]
    with pytest.raises(ConfigError, match=r"store\.db.*Put back.* If it is lost, add --new-log"):
        start_of(checkpoints, new, 0, None)
    assert start_of(checkpoints, new, 0, None, new_log=True) == (Version(1, 3), NEW_LOG)
    with pytest.raises(ConfigError, match=r"If it is lost, move this one away and add --new-log"):
        start_of(checkpoints, new, 9, None, new_log=True)
    again = (*LINES, Lineage(1, 3, fork=NEW_LOG))
    assert start_of(checkpoints, again, 3, None, new_log=True) == (Version(1, 3), ""), "the learner died meanwhile"
    assert start_of(checkpoints, LINES, 9, None, new_log=True) == (Version(1, 3), ""), "the log is not lost"
    assert start_of(Checkpoints(checkpoints.folder / "none", 1), new, 0, None, new_log=True) == (None, "")


def test_a_resume_without_the_log_reports_the_losses(checkpoints: Checkpoints) -> None:
    log = LogStart(Cut(128, (130, 131), b"x", 150))
    rows = [{"kind": "store", "groups_in_flight": 7}, {"kind": "step", "step": 5}, {"kind": "step", "step": 9}]
    kept, lost = selection.lost_with_log(rows, Version(1, 3), log)
    assert "checkpoint 1.3" in kept and "step 3" in kept and "number 128 without the 2 later ones" in kept
    assert "steps 4 to 9" in lost and "(7 at the last report)" in lost and "150 groups" in lost
    assert "metrics" not in lost
    _, all_lost = selection.lost_with_log([], Version(1, 3), log)
    assert "no metrics are left" in all_lost and "the metrics;" in all_lost
    assert log.until(Version(1, 3), 3).lines == ((None, 0), (0, 3), (1, 3)), "lineages that only metrics have seen"


def test_a_fork_at_the_beginning_has_no_checkpoint_yet(checkpoints: Checkpoints) -> None:
    shutil.rmtree(checkpoints.path(Version(1, 3)))
    assert start_of(checkpoints, (Lineage(), Lineage(0, 0, fork="first")), 0, None) == (None, "")


@pytest.mark.parametrize(
    ("words", "version"),
    [("", (1, 3)), ("4", (0, 4)), ("3", (1, 3)), ("0.6", (0, 6)), ("1.3", (1, 3)), ("0", None), ("0.0", None)],
)
def test_a_fork_names_its_checkpoint(checkpoints: Checkpoints, words: str, version: tuple[int, int] | None) -> None:
    wanted = Version(*version) if version else None
    assert start_of(checkpoints, LINES, 9, f"{words}@second") == (wanted, "second")


@pytest.mark.parametrize("words", ["5", "1.4", "2.2", "x", "04"])
def test_what_is_not_there_is_refused_with_what_is(checkpoints: Checkpoints, words: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.2, 0\.4, 0\.6, 1\.3"):
        start_of(checkpoints, LINES, 9, f"{words}@second")


def test_a_fork_that_was_made_is_gone_on_with(checkpoints: Checkpoints) -> None:
    assert start_of(checkpoints, LINES, 9, "2@first") == (Version(1, 3), "")


def test_a_fork_without_a_name_is_a_new_one_every_time(checkpoints: Checkpoints) -> None:
    names = {start_of(checkpoints, LINES, 9, "2")[1] for _ in range(3)}
    assert len(names) == 3 and "" not in names


def test_a_warm_start_that_is_asked_for_is_not_done_without(tmp_path: Path) -> None:
    """Roles that are started separately do not make the warm start."""
    spec = families.spec("nano", vocab_size=32)
    asked, not_asked = (configs.parse({"sft": {"steps": steps}}) for steps in (5, 0))
    with pytest.raises(ConfigError, match=r"sft\.steps = 5.*not in .*warm.*jaxroll sft"):
        weights.initial_of_role(asked, tmp_path, spec)
    assert weights.initial_of_role(not_asked, tmp_path, spec) is None
