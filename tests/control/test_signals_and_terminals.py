"""Signals to the supervisor, and terminals that change, stop or close, with real processes that replace the roles."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest

from jaxroll import metrics
from tests.harness.stand_in_run import NAMES, PATIENCE_S, StandInRun, gone, until

pytestmark = pytest.mark.process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda signum: signum.name)
def test_an_interrupt_stops_in_order(run: StandInRun, signum: signal.Signals) -> None:
    run.start()
    run.all_up()
    run.process.send_signal(signum)
    code, out = run.finish()
    assert code == 130 and "Stopping in order: learner, evaluator, 2 samplers, store. Interrupt again to kill." in out
    terms = run.names("term")
    assert terms[:2] == ["learner", "evaluator"] and sorted(terms[2:4]) == ["sampler-0", "sampler-1"]
    assert terms[4:] == ["store"]
    assert "again" not in [kind for kind, *_ in run.lines()]


def test_a_role_that_will_not_leave_is_killed(run: StandInRun) -> None:
    run.start({"sampler-0": ["--stubborn"]}, stop_s=5.0)
    run.all_up()
    stubborn = run.pid("sampler-0")
    run.process.send_signal(signal.SIGINT)
    code, out = run.finish()
    assert code == 130 and "sampler-0 did not leave within 5 s" in out
    assert gone(stubborn) and run.names("term")[-1] == "store"


RINGING = """
import signal, time
from jaxroll.control.supervisor import WakeSignal
bell, rung, until_s = WakeSignal(), [], time.monotonic() + 2
signal.signal(signal.SIGALRM, lambda *_: (rung.append(1), bell.ring()))
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
while time.monotonic() < until_s:
    bell.wait(1e-5)
signal.setitimer(signal.ITIMER_REAL, 0)
print(len(rung))
"""


def test_an_interrupt_at_any_moment_does_not_wait_for_itself() -> None:
    done = subprocess.run([sys.executable, "-c", RINGING], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 100, "hardly interrupted at all"


def test_a_second_interrupt_kills(run: StandInRun) -> None:
    run.start({name: ["--stubborn"] for name in NAMES}, stop_s=60.0)
    run.all_up()
    run.process.send_signal(signal.SIGINT)
    until(lambda: "learner" in run.names("term"), "the effect of the first interrupt")
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 130
    assert all(gone(run.pid(name)) for name in NAMES)


def test_a_hang_up_never_kills(run: StandInRun) -> None:
    """A shell that ends sends SIGHUP twice, and a service manager SIGTERM in addition."""
    run.start({"learner": ["--linger=2"]}, stop_s=60.0)
    run.all_up()
    for signum in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        run.process.send_signal(signum)
        time.sleep(0.2)
    code, out = run.finish()
    assert code == 130 and "killed" not in out
    assert "end learner" in run.events.read_text(), "it had no time to end"
    assert run.names("term")[-1] == "store"


def test_under_nohup_a_hang_up_is_ignored(run: StandInRun) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does for its child
    try:
        run.start()
    finally:
        signal.signal(signal.SIGHUP, previous)
    run.all_up()
    run.process.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert run.process.poll() is None and run.names("term") == []
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 130


def test_a_run_whose_terminal_is_closed_ends_in_order(run: StandInRun) -> None:
    terminal, end = os.openpty()
    run.start({"learner": ["--linger=2"]}, stop_s=60.0, terminal=end)
    os.close(end)
    run.all_up()
    os.close(terminal)  # the kernel signals the session's leader and refuses further writes
    code = run.process.wait(timeout=PATIENCE_S)
    assert code == 130
    assert "end learner" in run.events.read_text(), "it had no time to end"
    assert run.names("term")[:2] == ["learner", "evaluator"] and run.names("term")[-1] == "store"


SIZES = ((50, 200), (24, 80), (5, 10), (1, 1), (0, 0), (1, 200), (50, 1), (65535, 65535), (24, 80))  # rows, columns


class Screen:
    """The reading end of a terminal, which records the output."""

    def __init__(self) -> None:
        self.master, self.end = os.openpty()
        self.shown = b""
        self._thread = threading.Thread(target=self._read, daemon=True)

    def read(self) -> None:
        """Start to read in a thread."""
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the last process on it has ended
            while data := os.read(self.master, 2**16):
                self.shown += data
        os.close(self.master)

    def resize(self, rows: int, columns: int) -> None:
        """Change the size; the kernel sends SIGWINCH to the processes in the foreground."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def train_step(run: StandInRun, step: int) -> None:
    """Append a metrics row as the learner does."""
    tracker = metrics.JsonlTracker(run.run_dir / "metrics.jsonl")
    now = time.time()
    tracker.log(
        {
            "t": now,
            "role": "learner",
            "kind": "step",
            "step": step,
            "t0": now,
            "t1": now,
            "train_s": 0.1,
            "wait_s": 0.1,
            "publish_s": 0.1,
            "age_hist": {"0": 1},
            "reward_mean": step / 1000,
        }
    )
    tracker.close()


def end_all(run: StandInRun) -> int:
    """Let all roles end; return the run's exit code."""
    run.learner_done.touch()
    run.evaluator_done.touch()
    return run.process.wait(timeout=PATIENCE_S)


def test_the_table_follows_a_terminal_whose_size_changes(run: StandInRun) -> None:
    screen = Screen()
    run.start(terminal=screen.end)
    os.close(screen.end)
    screen.read()
    run.all_up()
    for step in range(1, 4):
        train_step(run, step)
        for size in SIZES:
            screen.resize(*size)
            time.sleep(0.0 if step == 1 else 0.3)  # at first faster than it is drawn
    until(lambda: b"0.003" in screen.shown, "the third step on the screen")
    assert end_all(run) == 0
    assert b"Traceback" not in screen.shown
    assert [row for row in metrics.read(run.run_dir / "metrics.jsonl") if row["kind"] == "event"] == []


def test_a_run_ends_though_its_terminal_is_stopped(run: StandInRun) -> None:
    screen = Screen()
    run.start(terminal=screen.end)
    run.all_up()
    os.write(screen.master, b"\x13")  # Ctrl-S
    for step in range(1, 40):
        train_step(run, step)
    assert end_all(run) == 0
    os.close(screen.end)
    os.close(screen.master)


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_terminal_that_cannot_move_its_cursor_is_shown_lines(run: StandInRun, term: str | None) -> None:
    screen = Screen()
    run.start(terminal=screen.end, term=term)
    os.close(screen.end)
    screen.read()
    run.all_up()
    train_step(run, 1)
    until(lambda: b"step 1/5  reward 0.001" in screen.shown, "the step on the screen")
    assert end_all(run) == 0
    assert b"\x1b" not in screen.shown
