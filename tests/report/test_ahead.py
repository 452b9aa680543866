"""The report's advice to raise α when the learner waits because of it, on runs worked out by hand."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxroll.report import page, record, summary
from jaxroll.report.record import ClaimTimes, LogFacts
from tests.harness.run_folder import make_run

PUBLISHED = tuple((100.0 + step, f"0.{step}") for step in range(20))
LINE = "α = 1 is too small: the learner waits unless α is at least 3"


def config(alpha: float = 1.0, **sampler: int) -> dict[str, Any]:
    schedule = {"alpha": alpha, "groups_per_step": 4, "group_size": 4, "redundant_members": 0}
    return {"schedule": schedule, "sampler": {"count": 1, "slots": 64, "concurrent_episodes": 0} | sampler}


def history(made_s: float = 2.1, waited_s: float = 0.5) -> LogFacts:
    """Twenty claims."""
    return LogFacts(claim_times=(ClaimTimes(waited_s, 1.0, made_s, made_s),) * 20, published=PUBLISHED)


def rows(window: int = 8) -> list[dict[str, Any]]:
    """Rows of samplers that receive a version 0.3 s after its publication, and the store's last in-flight window."""
    swaps = [
        {"kind": "span", "what": "weight_swap", "role": "sampler-0", "version": version, "t0": t + 0.2, "t1": t + 0.3}
        for t, version in PUBLISHED
    ]
    return [*swaps, {"kind": "store", "role": "store", "in_flight_window": window, "in_flight_window_max": 8}]


STEPS = [{"publish_s": 0.1, "train_s": 0.9, "wait_s": wait_s} for wait_s in (0.6, 0.1, 0.6, 0.6)]


def test_groups_that_take_longer_than_the_steps_that_alpha_gives_them_want_more() -> None:
    """0.1 s for publishing, 0.3 s to reach the sampler, 2.1 s for the members: 2.5 steps of one second each."""
    assert summary.weight_lag_s(rows(), history()) == pytest.approx(0.3)
    assert summary.alpha_wanted(rows(), STEPS, history(), config()) == 3
    assert summary.alpha_wanted(rows(), STEPS, history(), config(2.5)) == 3
    assert summary.alpha_wanted(rows(), STEPS, history(made_s=1.5), config()) == 2


@pytest.mark.parametrize(
    ("found", "settings", "window"),
    [
        pytest.param(history(), config(3.0), 8, id="alpha suffices"),
        pytest.param(history(waited_s=0.005), config(), 8, id="the learner hardly waits"),
        pytest.param(history(), config(), 6, id="the adaptive window is smaller than alpha allows"),
        pytest.param(history(), config(concurrent_episodes=32), 8, id="samplers have no room for more"),
        pytest.param(history(), config(0.0), 8, id="synchronous by choice"),
        pytest.param(replace(history(), claim_times=history().claim_times[:7]), config(), 8, id="too few claims"),
        pytest.param(LogFacts(), config(), 8, id="no log"),
    ],
)
def test_no_advice_when_alpha_is_not_the_reason(found: LogFacts, settings: dict[str, Any], window: int) -> None:
    assert summary.alpha_wanted(rows(window), STEPS, found, settings) is None
    assert summary.words(1.0, None) == ""


@pytest.mark.parametrize(("made_s", "shown"), [(2.1, True), (0.5, False)])
def test_the_advice_is_on_the_page_and_on_the_terminal(tmp_path: Path, made_s: float, shown: bool) -> None:
    run = record.load(make_run(tmp_path / "run", steps=20))
    run.config["sampler"]["concurrent_episodes"] = 1000
    run = replace(run, history=replace(run.history, claim_times=history(made_s).claim_times))
    figures, out = summary.summary(run), io.StringIO()
    page.show(run, figures, Console(file=out, width=120))
    assert figures["alpha_wanted"] == (3 if shown else None)
    assert (LINE in out.getvalue()) is shown
    assert (LINE in page.write_page(run, figures).read_text(encoding="utf-8")) is shown
