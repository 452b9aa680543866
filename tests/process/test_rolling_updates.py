"""Weight swaps of two samplers, one after the other (`schedule.rolling_updates`) or at any time."""

from __future__ import annotations

import itertools
import signal
from collections import defaultdict
from functools import partial

import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from tests.harness.train_process import LEARNING, Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
WORDS = (
    *LEARNING,
    "--config.schedule.steps=5000",
    "--config.schedule.alpha=2",
    "--config.sampling.max_tokens=48",
    "--config.schedule.weight_swap=drain",
    "--config.sampler.count=2",
    "--config.sampler.mesh.tensor=1",
)
CHANGES = 5  # of each sampler
Spans = dict[str, list[tuple[float, float]]]  # sampler → from when to when it was at other weights, in order


def changes(rows: list[dict]) -> Spans:
    """For each sampler the spans from fetching weights to swapping them in, without the first, which all do at once."""
    found: Spans = defaultdict(list)
    begun: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["kind"] == "span" and row["what"] == "fetch":
            begun[row["role"], row["version"]] = row["t0"]
        elif row["kind"] == "span" and row["what"] == "weight_swap":
            found[row["role"]].append((begun[row["role"], row["version"]], row["t1"]))
    return {role: spans[1:] for role, spans in found.items()}


def at_once(found: Spans) -> int:
    """The number of weight changes of one sampler during a change of the other."""
    return sum(
        a < d and c < b for one, two in itertools.combinations(found.values(), 2) for a, b in one for c, d in two
    )


def further(rows: list[dict], known: Spans) -> bool:
    """True if both samplers have swapped weights twice since `known`."""
    found = changes(rows)
    return all(len(found.get(role, [])) >= len(known.get(role, [])) + 2 for role in ("sampler-0", "sampler-1"))


@pytest.mark.soak
@pytest.mark.parametrize("rolling", [1, 0])
def test_samplers_change_their_weights_one_after_the_other_or_at_once(free_run_dir, rolling):
    with Train(free_run_dir, *WORDS, f"--config.schedule.rolling_updates={rolling}") as train:
        train.until_step(1)
        train.until(
            lambda rows: sum(len(spans) >= CHANGES for spans in changes(rows).values()) == 2, "changes of both samplers"
        )
        train.until(lambda rows: rolling or at_once(changes(rows)), "changes at once")
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=2)
        found = changes(train.rows)
        assert set(found) == {"sampler-0", "sampler-1"}
        assert (at_once(found) > 0) == (rolling == 0), found
        mixed = train.query("SELECT COUNT(*) FROM members WHERE state = 'done' AND newest_step > oldest_step")[0][0]
        assert mixed == 0, "a request was sampled at several versions, although engines drain before a weight swap"


@pytest.mark.soak
def test_a_sampler_that_is_killed_holds_the_other_up_no_longer_than_it_takes_to_come_back(free_run_dir):
    """Twice the deadline of a transfer, ten minutes here, is what a turn of one that stays away would take."""
    words = (
        "--config.schedule.rolling_updates=1",
        "--config.transfer.deadline_s=300",
        "--config.supervisor.backoff_s=0.1",
    )
    with Train(free_run_dir, *WORDS, *words) as train:
        for kill in range(3):
            train.until_step(3 * kill + 1)
            train.role("sampler").send_signal(signal.SIGKILL)
            train.until(partial(further, known=changes(train.rows)), f"weights of both after kill {kill + 1}")
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=2)
        assert train.report()["restarts"] == 3
