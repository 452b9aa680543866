"""Signals that ask a role to stop: SIGTERM, SIGINT and SIGHUP, at any role that is started alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll import lifeline
from jaxroll.config import Config, RoleArgs
from jaxroll.learner import multihost
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.roles import colocated, learner
from jaxroll.roles import session as sessions

ROOT = Path(__file__).parents[2]
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the handlers of these signals after the test."""
    numbers = (*STOPS, signal.SIGUSR1)
    previous = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def sent(signum: signal.Signals, seen: Callable[[], bool]) -> bool:
    """True if `seen` becomes true after this process has got the signal."""
    os.kill(os.getpid(), signum)
    until_s = time.monotonic() + 10
    while not seen() and time.monotonic() < until_s:
        time.sleep(0.01)
    return seen()


@pytest.mark.parametrize("signum", STOPS, ids=lambda signum: signum.name)
def test_a_session_is_asked_to_stop(monkeypatch: pytest.MonkeyPatch, signum: signal.Signals) -> None:
    asked: list[int] = []
    monkeypatch.setattr(lifeline, "print_stacks_on_signal", lambda *_: None)
    interrupted = sessions.install_signal_handlers(SimpleNamespace(request_stop=lambda: asked.append(1)))  # type: ignore[arg-type]
    assert sent(signum, interrupted.is_set) and asked == [1]


def test_signals_to_a_session_that_has_ended_change_nothing(tmp_path: Path) -> None:
    """A role whose certificate was refused ended with a traceback and exit code 1: SIGTERM came after its loop."""
    loop = asyncio.new_event_loop()
    session = sessions.Session("actor-0", RoleArgs(Config(), tmp_path), ScoringPool(1), loop)
    interrupted = sessions.install_signal_handlers(session)
    loop.close()
    assert sent(signal.SIGTERM, interrupted.is_set)
    session.add_row({"kind": "stats"})
    os.kill(os.getpid(), signal.SIGUSR1)
    session.pool.close()


@pytest.mark.parametrize("signum", STOPS, ids=lambda signum: signum.name)
@pytest.mark.parametrize("role", [learner, colocated], ids=["learner", "colocated"])
def test_a_learner_is_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: object, signum: signal.Signals
) -> None:
    """It finishes its step, and leaves a checkpoint: tests/process/test_resume.py."""
    monkeypatch.setattr(multihost, "join", lambda *_: None)
    monkeypatch.setattr(colocated, "role_specs", lambda args: [])
    monkeypatch.setattr(lifeline, "print_stacks_on_signal", lambda *_: None)

    def run_learner(args: RoleArgs, stop: threading.Event, *_: object, **__: object) -> int:
        return 130 if sent(signum, stop.is_set) else 0

    monkeypatch.setattr(learner, "run_learner", run_learner)
    assert role.main(RoleArgs(Config(), tmp_path)) == 130  # type: ignore[attr-defined]


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asked: list[int] = []
    lifeline.on_stop(lambda: asked.append(1))
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert sent(signal.SIGTERM, lambda: bool(asked)) and asked == [1]


@pytest.mark.process
@pytest.mark.parametrize("signals", [STOPS[2:], (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM)], ids=["HUP", "thrice"])
def test_a_store_that_was_started_alone_ends_in_order(tmp_path: Path, signals: tuple[signal.Signals, ...]) -> None:
    words = [sys.executable, "-m", "jaxroll", "store", f"--config={ROOT / 'configs' / 'smoke.py'}", "--run=r"]
    store = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until_s = time.monotonic() + 60
        while not (tmp_path / "r" / "store.addr").exists() and time.monotonic() < until_s and store.poll() is None:
            time.sleep(0.05)
        for signum in signals:
            store.send_signal(signum)
        said, _ = store.communicate(timeout=60)
    finally:
        store.kill()
        store.wait(timeout=10)
    assert store.returncode == 0 and "store: stopped" in said and "Traceback" not in said, said
