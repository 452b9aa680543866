"""Device lock of colocated roles: one holder at a time, in the order of the requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from jaxroll.learner.trainer import Trainer
from jaxroll.roles.colocated import DeviceLock, LockedTrainer
from jaxroll.serving.engine_thread import EngineHost

LIMIT_S = 20.0


def until(seen: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not seen():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:g} s for {what}"
        time.sleep(0.001)


def waiting(lock: DeviceLock) -> int:
    """Number of threads that wait for the lock."""
    return len(lock._waiting)


def test_the_lock_is_granted_in_the_order_of_the_requests() -> None:
    lock, had, threads = DeviceLock(), [], []

    def ask(name: int) -> None:
        with lock:
            had.append(name)

    with lock:
        for name in range(5):
            threads.append(threading.Thread(target=ask, args=(name,), daemon=True))
            threads[-1].start()
            until(lambda: waiting(lock) == len(threads), f"{name} to ask")
    for thread in threads:
        thread.join(LIMIT_S)
    assert had == [0, 1, 2, 3, 4]


def test_holders_of_devices_of_their_own_share_the_lock_and_no_one_waits_for_ever() -> None:
    lock, had, leave = DeviceLock(), [], threading.Event()

    def ask(name: str, shared: bool) -> threading.Thread:
        def hold() -> None:
            with lock.shared if shared else lock:
                had.append(name)
                if shared:
                    leave.wait(LIMIT_S)

        made = threading.Thread(target=hold, daemon=True)
        made.start()
        return made

    threads = [ask("one", True), ask("two", True)]
    until(lambda: len(had) == 2, "both to have it at the same time")
    threads.append(ask("learner", False))
    until(lambda: waiting(lock) == 1, "the learner to ask")
    threads.append(ask("late", True))
    until(lambda: waiting(lock) == 2, "another one to ask after it")
    assert set(had) == {"one", "two"}
    leave.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert had[2:] == ["learner", "late"]
    with lock:
        assert not waiting(lock)


def test_a_second_request_comes_after_the_waiting_ones() -> None:
    """As an engine between two steps. A plain lock is nearly always acquired again by the thread that released it."""
    lock, had = DeviceLock(), []

    def other() -> None:
        with lock:
            had.append("other")

    with lock:
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        until(lambda: waiting(lock) == 1, "the other to ask")
    with lock:
        had.append("again")
    thread.join(LIMIT_S)
    assert had == ["other", "again"]


def test_the_lock_has_one_holder_and_every_request_is_granted() -> None:
    lock, inside, entered, most = DeviceLock(), [0], [0] * 8, [0]

    def work(name: int) -> None:
        for _ in range(200):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                entered[name] += 1
                time.sleep(0)  # another thread runs, and finds the lock taken
                inside[0] -= 1

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert (entered, most, waiting(lock)) == ([200] * 8, [1], 0)
    with lock:
        assert inside == [0], "the lock is free at the end"


def test_an_error_releases_the_lock() -> None:
    lock = DeviceLock()
    for _ in range(2):
        try:
            with lock:
                raise ValueError
        except ValueError:
            continue
    with lock:
        assert waiting(lock) == 0


READS = {"abstract_state", "base_digest", "await_step", "packed", "params", "prepares_ahead", "release", "train"}


def test_a_trainer_holds_the_lock_whenever_it_dispatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` calls the three parts of a step; `params` is for `publishable_params` only; `release` drops arrays."""
    public = {name for name in vars(Trainer) if not name.startswith("_")}
    dispatching = {name for name in vars(LockedTrainer) if not name.startswith("_")}
    assert public - dispatching == READS, "a new method of Trainer: does it dispatch to the devices?"
    lock, had = DeviceLock(), {}
    trainer = object.__new__(LockedTrainer)
    trainer._lock = lock
    for name in dispatching:
        monkeypatch.setattr(Trainer, name, lambda self, *_, name=name: had.update({name: bool(lock._holders)}) or name)
        words = () if name in ("publishable_params", "base_params") else (None,)
        assert getattr(trainer, name)(*words) in (name, None)
    assert had == dict.fromkeys(dispatching, True) and not bool(lock._holders)


def test_an_engine_holds_the_lock_for_every_step_and_job_and_not_while_idle() -> None:
    lock, seen = DeviceLock(), []

    class Engine:
        def stats(self) -> SimpleNamespace:
            return SimpleNamespace(tokens_decoded=len(seen))

        def step(self) -> bool:
            seen.append(("step", bool(lock._holders)))
            return len(seen) < 4

    host = EngineHost(Engine(), lock)  # pyright: ignore[reportArgumentType]
    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    try:
        assert host.call(lambda: bool(lock._holders)).result(LIMIT_S), "a job without the lock"
        until(lambda: len(seen) >= 4, "four steps")
        until(lambda: not bool(lock._holders), "an idle engine to release it")
        assert {taken for _, taken in seen} == {True}
    finally:
        host.stop()
        thread.join(LIMIT_S)
    assert not thread.is_alive()
