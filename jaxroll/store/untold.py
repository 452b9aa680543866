"""Leases that ended, until their holders have asked for them.

A courtesy: what is lost with an answer, or with the store, the holder learns when it renews.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxroll.store.endings import Ending
from jaxroll.store.guests import NAMES_KEPT, Recent
from jaxroll.store.messages import MAX_KEYS
from jaxroll.store.requests import Key


class Untold:
    """What holders have not been told yet, by session. Bounded in sessions and in leases of each."""

    def __init__(self) -> None:
        self._by_session: Recent[list[Key]] = Recent(NAMES_KEPT)

    def add(self, endings: Iterable[Ending]) -> None:
        """Keep these for their holders; of too many, the first ones."""
        for session, key in endings:
            if not self.has(session):
                self._by_session[session] = []
            if len(waiting := self._by_session[session]) < MAX_KEYS:
                waiting.append(key)

    def has(self, session: str) -> bool:
        """Whether there is something to tell."""
        return session in self._by_session

    def take(self, session: str) -> tuple[Key, ...]:
        """What is to be told, which is forgotten."""
        return tuple(self._by_session.pop(session, ()))
