"""Turns at the devices: one at a time, in the order of asking."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from jaxroll.roles.turns import Turn

LIMIT_S = 20.0


def until(seen: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not seen():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:g} s for {what}"
        time.sleep(0.001)


def asking(turn: Turn) -> int:
    """How many wait for it now."""
    return len(turn._asking)


def test_turns_are_had_in_the_order_in_which_they_were_asked_for() -> None:
    turn, had, threads = Turn(), [], []

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
    turn, had = Turn(), []

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
    turn, inside, entered, most = Turn(), [0], [0] * 8, [0]

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
    turn = Turn()
    for _ in range(2):
        try:
            with turn:
                raise ValueError
        except ValueError:
            continue
    with turn:
        assert asking(turn) == 0
