"""Whole runs with a healthy and a bad sampler: the healthy one takes over failed members; the bad one is rested.

benchmarks/faults/neighbours.py measures the speed of such runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from jaxroll.policy.limiter import SLOW
from tests.harness.train_process import ROOT, Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]
BAD, GOOD = "sampler-1", "sampler-0"
WORDS = (
    "--config.sft.steps=0",
    "--config.evaluator.every=0",
    "--config.sampler.count=2",
    "--config.schedule.alpha=2",
    "--config.schedule.steps=100000",
    "--config.schedule.straggler=wait",
)
PLAYED = 24  # concurrent members of a sampler with this config


def resting(rows: list[dict]) -> dict:
    """The store's newest row about resting samplers."""
    return next((row["backoff"] for row in reversed(rows) if row["kind"] == "store"), {})


def inspected(train: Train, *words: str) -> str:
    """The output of `jaxroll inspect`."""
    line = [sys.executable, "-m", "jaxroll", "inspect", str(train.run_dir), *words]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("env", "error"),
    [("fails_at_once", "a library is missing"), ("fails_late", "cannot be reached"), ("slow", SLOW)],
)
def test_a_bad_sampler_rests_and_is_reported_and_no_group_dies(free_run_dir: Path, env: str, error: str) -> None:
    with Train(free_run_dir, *WORDS, f"--config.task.env=tests.harness.envs.bad_sampler:{env}") as train:
        train.until(lambda rows: BAD in resting(rows), "the bad sampler's rest in the store's rows")
        train.until_step(last_step(train.rows) + 6)
        assert set(json.loads(inspected(train, "--json"))["backoff"]) == {BAD}, "a live run shows it"
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=2)
        assert not any(GOOD in resting([row]) for row in train.rows), "the healthy one never rests"
        found = json.loads(inspected(train, "--json"))
        assert set(found["backoff"]) == {BAD} and error in found["backoff"][BAD]["error"]
        assert "holders in back-off or with failures" in (page := inspected(train)) and BAD in page
        assert train.query("SELECT COUNT(*) FROM groups WHERE state = 'DEAD'") == [(0,)]
        assert train.report()["restarts"] == 0
        failed = train.query("SELECT position FROM log WHERE kind = 'member_failed' ORDER BY position")
        if env == "slow":
            assert failed == []
            return
        assert len(failed) <= 3 * PLAYED, "after two full rounds the bad sampler must get one member at a time"
        taken_over = train.query(
            "SELECT COUNT(*) FROM members m JOIN failures f USING (group_id, member) WHERE m.state = 'done'"
        )
        assert taken_over[0][0] > 0, "the healthy sampler finished no failed member"
