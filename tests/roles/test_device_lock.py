"""Turns at the devices: one at a time, in the order of asking."""

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


def asking(turn: DeviceLock) -> int:
    """How many wait for it now."""
    return len(turn._asking)


def test_turns_are_had_in_the_order_in_which_they_were_asked_for() -> None:
    turn, had, threads = DeviceLock(), [], []

    def ask(name: int) -> None:
        with turn:
            had.append(name)

    with turn:
        for name in range(5):
            threads.append(threading.Thread(target=ask, args=(name,), daemon=True))
            threads[-1].start()
            until(lambda: asking(turn) == len(threads), f"{name} to ask")
    for thread in threads:
        thread.join(LIMIT_S)
    assert had == [0, 1, 2, 3, 4]


def test_who_asks_again_at_once_comes_after_those_who_wait() -> None:
    """As an engine between two steps. A plain lock is nearly always taken again by who has just let it go."""
    turn, had = DeviceLock(), []

    def other() -> None:
        with turn:
            had.append("other")

    with turn:
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        until(lambda: asking(turn) == 1, "the other to ask")
    with turn:
        had.append("again")
    thread.join(LIMIT_S)
    assert had == ["other", "again"]


def test_two_are_never_inside_and_none_is_forgotten() -> None:
    turn, inside, entered, most = DeviceLock(), [0], [0] * 8, [0]

    def work(name: int) -> None:
        for _ in range(200):
            with turn:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                entered[name] += 1
                time.sleep(0)  # lets another thread run, which finds the turn taken
                inside[0] -= 1

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert (entered, most, asking(turn)) == ([200] * 8, [1], 0)
    with turn:
        assert inside == [0], "free again after all"


def test_a_turn_ends_with_an_error_too() -> None:
    turn = DeviceLock()
    for _ in range(2):
        try:
            with turn:
                raise ValueError
        except ValueError:
            continue
    with turn:
        assert asking(turn) == 0


READS = {"abstract_state", "base_digest", "await_step", "packed", "params", "prepares_ahead", "train"}


def test_a_trainer_has_a_turn_whenever_it_gives_something_to_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` is the three halves one after the other; `params` is read by `publishable_params` alone."""
    public = {name for name in vars(Trainer) if not name.startswith("_")}
    dispatching = {name for name in vars(LockedTrainer) if not name.startswith("_")}
    assert public - dispatching == READS, "a new method of Trainer: does it give the devices something?"
    turn, had = DeviceLock(), {}
    trainer = object.__new__(LockedTrainer)
    trainer._turn = turn
    for name in dispatching:
        monkeypatch.setattr(Trainer, name, lambda self, *_, name=name: had.update({name: turn._taken}) or name)
        words = () if name in ("publishable_params", "base_params") else (None,)
        assert getattr(trainer, name)(*words) in (name, None)
    assert had == dict.fromkeys(dispatching, True) and not turn._taken


def test_an_engine_has_a_turn_for_every_step_and_every_job_and_none_while_it_waits() -> None:
    turn, seen = DeviceLock(), []

    class Engine:
        def stats(self) -> SimpleNamespace:
            return SimpleNamespace(tokens_decoded=len(seen))

        def step(self) -> bool:
            seen.append(("step", turn._taken))
            return len(seen) < 4

    host = EngineHost(Engine(), turn)  # pyright: ignore[reportArgumentType]
    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    try:
        assert host.call(lambda: turn._taken).result(LIMIT_S), "a job without a turn"
        until(lambda: len(seen) >= 4, "four steps")
        until(lambda: not turn._taken, "an idle engine to let go")
        assert {taken for _, taken in seen} == {True}
    finally:
        host.stop()
        thread.join(LIMIT_S)
    assert not thread.is_alive()
