"""`kill -9` of the whole run or of one role during rare events, which tests detect by the files that they make."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from jaxroll.run_paths import RunPaths
from tests.harness.train_process import LEARNING, START_S, UNEQUAL_MESHES, Train, assert_sound, differing, trained_again

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(1200)]
STEPS = 24
WORDS = (f"--config.schedule.steps={STEPS}", "--config.learner.checkpoint_every=3", "--config.supervisor.backoff_s=0.1")


def soon(seen: Callable[[], object], train: Train, what: str) -> None:
    """Poll `seen()` every millisecond until it is true; fail the test if that takes too long."""
    deadline, pause = time.monotonic() + START_S, threading.Event()
    while not seen():
        if time.monotonic() > deadline or train.process.poll() is not None:
            pytest.fail(f"waited for {what}\n{train.logs()}", pytrace=False)
        pause.wait(0.001)


def kill_everything(train: Train) -> None:
    """Kill the supervisor with SIGKILL, which its children do not outlive."""
    children = train.children()
    train.process.send_signal(signal.SIGKILL)
    train.process.wait(10)
    psutil.wait_procs(children, timeout=30)


def completed(run: Path, rows: list[dict]) -> None:
    """Complete the run with `--resume` and assert its invariants."""
    with Train(run, resume=True) as last:
        assert last.finish() == 0, last.logs()
        last.rows = rows + last.rows
        assert differing(trained_again(last.rows)) == {}
        assert_sound(last, steps=STEPS, alpha=1)


def test_killed_while_a_checkpoint_is_written_and_again_while_it_is_restored(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Train(run, *LEARNING, *WORDS) as first:
        first.until_step(4)
        soon(lambda: any((run / "checkpoints").glob("*.00000006.*tmp*")), first, "an unfinished checkpoint")
        kill_everything(first)
        first.rows += first._rows.rows()
    with Train(run, resume=True) as second:
        log = run / "logs" / "learner.log"
        soon(lambda: log.read_text().count("building the learner …") == 2, second, "a learner that restores")
        assert "restored version" not in log.read_text(), "the test is too slow"
        kill_everything(second)
    completed(run, first.rows)


def test_killed_in_the_warm_start_and_again_as_it_is_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("--config.evaluator.every=0", *UNEQUAL_MESHES, "--config.sft.steps=30", *WORDS)
    with Train(run, *words) as first:
        soon(lambda: "compiled learner accumulate" in first.logs(), first, "the first step of the warm start")
        kill_everything(first)
    assert not RunPaths(run).warm_start_done.exists()
    with Train(run, resume=True) as second:
        soon((run / "warm").exists, second, "the final write of the warm start")
        kill_everything(second)
    completed(run, [])


def test_a_store_killed_in_each_of_its_compactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is compacted after every 60 records, and each time the store is killed during it."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(OFTEN)
    monkeypatch.setenv("COMPACTING", str(tmp_path / "compacting"))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{Path(__file__).resolve().parents[2]}")
    run = tmp_path / "run"
    with Train(run, *LEARNING, *WORDS, "--config.supervisor.max_restarts=50") as train:
        for kill in range(4):
            before = set(tmp_path.glob("compacting.*"))
            soon(lambda before=before: set(tmp_path.glob("compacting.*")) - before, train, f"compaction {kill + 1}")
            train.role("store").send_signal(signal.SIGKILL)
        assert train.finish() == 0, train.logs()
        assert differing(trained_again(train.rows)) == {}
        assert_sound(train, steps=STEPS, alpha=1)
        assert train.report()["restarts"] >= 4


def test_a_learner_that_fails_and_cannot_close_what_it_uses_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that waits forever after a failed write: the role ends with the cause, and the next one goes on."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(STUCK)
    monkeypatch.setenv("STUCK_ONCE", str(tmp_path / "once"))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{Path(__file__).resolve().parents[2]}")
    with Train(tmp_path / "run", *LEARNING, *WORDS) as train:
        assert train.finish() == 0, train.logs()
        assert differing(trained_again(train.rows)) == {}
        assert_sound(train, steps=STEPS, alpha=1)
        assert train.report()["restarts"] == 1
        log = (tmp_path / "run" / "logs" / "learner.log").read_text()
        assert "a planted failure (ended, as closing took longer than 2 s)" in log and "stuck_in_close" in log, log


STUCK = '''
"""The first learner fails at a checkpoint, and the close of its checkpoints never returns."""
import os, sys, threading

if sys.orig_argv[1:4] == ["-m", "jaxroll", "learner"] and not os.path.exists(os.environ["STUCK_ONCE"]):
    from jaxroll import lifeline
    from jaxroll.errors import InfraError
    from jaxroll.learner.checkpoint import Checkpoints

    finished, lifeline.ClosingLimit.__init__.__defaults__ = Checkpoints.finished, (2.0,)

    def fails(self, *, wait):
        found = finished(self, wait=wait)
        if found and found[-1].step >= 6:
            open(os.environ["STUCK_ONCE"], "w").close()
            raise InfraError("a planted failure")
        return found

    def stuck_in_close(self):
        threading.Event().wait()

    Checkpoints.finished, Checkpoints.close = fails, stuck_in_close
'''

OFTEN = '''
"""A store that compacts its log after every 60 records and makes a file when each compaction begins."""
import os, sys

if sys.orig_argv[1:4] == ["-m", "jaxroll", "store"]:
    from jaxroll.store.log import commit_log as log
    from jaxroll.store.server import keeper

    compact, keeper.COMPACT_EVERY = log.Log.compact, 60

    def noted(self):
        open(f"{os.environ['COMPACTING']}.{os.getpid()}.{os.times().elapsed}", "w").close()
        compact(self)

    log.Log.compact = noted
'''
