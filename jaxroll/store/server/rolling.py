"""Turns at changing weights (`schedule.rolling`): so many samplers at a time, who has waited longest first.

A sampler has its turn from when it is told of new weights until it asks for others, which it does when its engine
computes with them, or when it could not have them. A turn that lasts too long is over: whoever had it may be gone.
Nothing here is kept over a restart of the store: at worst two turns are one too many for once.
"""

from __future__ import annotations

import math


class Turns:
    """Up to `count` turns at a time, of at most `turn_s` each; a `count` of 0 gives one to everybody."""

    def __init__(self, count: int, turn_s: float) -> None:
        self._count, self._turn_s = count, turn_s
        self._until_s: dict[str, float] = {}  # who has a turn → when it is over at the latest
        self._waiting: dict[str, None] = {}  # in the order in which they came

    def over(self, name: str) -> bool:
        """The turn of `name` is over; whether it had one."""
        return self._until_s.pop(name, None) is not None

    def take(self, name: str, now_s: float) -> bool:
        """Whether `name` has a turn from `now_s` on. If not it has a place in the queue, until it has one or leaves."""
        if not self._count:
            return True
        self._until_s = {who: until_s for who, until_s in self._until_s.items() if until_s > now_s}
        if name in self._until_s:
            return True  # a call of it that nobody hears any more was given the turn
        self._waiting.setdefault(name)
        free = self._count - len(self._until_s)
        if list(self._waiting).index(name) >= free:
            return False
        del self._waiting[name]
        self._until_s[name] = now_s + self._turn_s
        return True

    def leave(self, name: str) -> bool:
        """`name` waits no longer; whether it did."""
        if name not in self._waiting:
            return False
        del self._waiting[name]
        return True

    def next_end_s(self, now_s: float) -> float:
        """When the next of the turns is over by itself; infinite when there is none."""
        return min((until_s for until_s in self._until_s.values() if until_s > now_s), default=math.inf)
