"""Relay tree: the peer from which each receiver of weights fetches a version.

`assign` and `sources` are pure. Every receiver fetches from one that was assigned before it, from one that holds the
version, or from the learner, also when it falls back: so no two wait for each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

LEARNER = "learner"
COPIES = 2  # that the learner sends at most while there is a peer that can serve
FANOUT = 2  # receivers of one relay at a time
ALTERNATIVES = 1  # further relays to try before the learner
SLOW = 1 / 3  # of the median bandwidth
AVOIDED_VERSIONS = 8  # for which a relay that failed a receiver gets no receivers

Assigned = Mapping[str, str]  # receiver → source, in the order of assignment


@dataclass(frozen=True)
class Receiver:
    """A receiver of weights. `serves`: others may fetch from it; `bytes_per_s`: measured, None if unknown."""

    name: str
    serves: bool = True
    site: str = ""
    bytes_per_s: float | None = None


def slow(receivers: Sequence[Receiver]) -> frozenset[str]:
    """The receivers with less than a third of the median bandwidth; the others would receive at theirs."""
    known = {one.name: one.bytes_per_s for one in receivers if one.bytes_per_s is not None}
    bound = SLOW * statistics.median(known.values()) if known else 0.0
    return frozenset(name for name, rate in known.items() if rate < bound)


def assign(
    receivers: Sequence[Receiver],
    asking: Collection[str],
    assigned: Assigned | None = None,
    holding: Collection[str] = (),
) -> dict[str, str]:
    """`assigned` and a source for each of `asking`, appended in order: fast relays first, as registered among equals.

    `receivers` are alive and in the order of registration; `holding` have all of the version. The learner sends one
    copy, or one to each of two sites, and a second copy to the first site only if all relays are slow. Receivers of a
    site fetch from one another. A receiver that cannot serve gets no receivers; if none can, all ask the learner. One
    that asks again gets a holder or the learner, because others may wait for it.
    """
    before = dict(assigned or {})
    tree = _Tree(receivers, {k: v for k, v in before.items() if k not in asking}, frozenset(holding))
    wanted = [one for one in receivers if one.name in asking]
    for one in sorted(wanted, key=lambda one: (not one.serves, one.name in tree.slow)):
        tree.assigned[one.name] = tree.holder(one) if one.name in before else tree.source(one)
    return tree.assigned


def sources(
    name: str, receivers: Sequence[Receiver], assigned: Assigned, holding: Collection[str] = ()
) -> tuple[str, ...]:
    """The sources of `name`, in the order in which to try them; the last one is the learner."""
    first = assigned[name]
    if first == LEARNER:
        return (LEARNER,)
    earlier = dict(list(assigned.items())[: list(assigned).index(name)])
    tree = _Tree(receivers, earlier, frozenset(holding))
    me = next(one for one in receivers if one.name == name)
    others = [one.name for one in tree.relays(me) if one.name != first]
    others.sort(key=lambda other: first in tree.path(other))  # these wait for `first`, too
    if first in holding:
        others = [name for name in others if name in holding]
    return (first, *others[:ALTERNATIVES], LEARNER)


class _Tree:
    """The assignments so far, among the living."""

    def __init__(self, receivers: Sequence[Receiver], assigned: dict[str, str], holding: frozenset[str]) -> None:
        self.assigned, self.slow = assigned, slow(receivers)
        self._alive = {one.name: one for one in receivers}
        self._position = {one.name: number for number, one in enumerate(receivers)}
        self._holding = holding & self._alive.keys()
        self._sites = len({one.site for one in receivers})

    def source(self, me: Receiver) -> str:
        """The source of a receiver that has none."""
        relays = self.relays(me)
        copies = sum(source == LEARNER and name in self._alive for name, source in self.assigned.items())
        near = [one.name for one in relays if one.site == me.site]
        holders = [one.name for one in relays if one.name in self._holding]
        if near or holders:
            return (near or holders)[0]
        if copies < min(self._sites, COPIES):
            return LEARNER
        if relays:
            return relays[0].name
        last_resort = [] if copies < COPIES else self.relays(me, also_slow=True)
        return last_resort[0].name if last_resort else LEARNER

    def holder(self, me: Receiver) -> str:
        """The best holder of the version; the learner if there is none."""
        return next((one.name for one in self.relays(me) if one.name in self._holding), LEARNER)

    def relays(self, me: Receiver, also_slow: bool = False) -> list[Receiver]:
        """The receivers that may serve `me`, the best first."""
        known = self.assigned.keys() | self._holding
        found = [
            one
            for name, one in self._alive.items()
            if name in known and name != me.name and one.serves and (also_slow or name not in self.slow)
        ]
        return sorted(found, key=lambda one: (one.site != me.site, *self._load(one.name), self._position[one.name]))

    def path(self, name: str) -> tuple[str, ...]:
        """The sources above `name`, as far as they do not hold the version."""
        above = []
        while name not in self._holding and (name := self.assigned.get(name, LEARNER)) != LEARNER and name not in above:
            above.append(name)
        return tuple(above)

    def _load(self, name: str) -> tuple[bool, int, int]:
        fed = sum(
            source == name and who in self._alive and who not in self._holding for who, source in self.assigned.items()
        )
        depth = 0 if name in self._holding else 1 + len(self.path(name))
        return fed >= FANOUT, depth, fed


class RelayTree:
    """The receivers that call the store, and the assignments of the newest version. In memory only."""

    def __init__(self) -> None:
        self._receivers: dict[str, Receiver] = {}
        self._address: dict[str, str] = {}
        self._avoided: dict[str, int] = {}  # relay that failed a receiver → versions for which it is not used
        self._version: Any = None
        self._assigned: dict[str, str] = {}
        self._informed: set[str] = set()  # of the newest version

    def report(
        self, name: str, address: str, site: str, fetched: tuple[str, float] | None, failed: Collection[str]
    ) -> None:
        """Note where `name` serves ('': it does not), its last fetch (source, bytes per second), and failed relays."""
        rate = self._receivers[name].bytes_per_s if name in self._receivers else None
        if self._address.get(name) != address:  # a new process
            self._avoided.pop(name, None)
            rate = None
        if fetched is not None and fetched[0] not in slow(list(self._receivers.values())):
            rate = fetched[1]  # from a slow source it says nothing about the receiver
        self._address[name], self._receivers[name] = address, Receiver(name, bool(address), site, rate)
        self._avoided |= {relay: AVOIDED_VERSIONS for relay in failed if relay in self._receivers}

    def sources(
        self, name: str, version: Any, *, present: Collection[str], waiting: Collection[str], holding: Collection[str]
    ) -> tuple[tuple[str, str], ...]:
        """The relays (name, address) from which `name` may fetch `version`, in order; then comes the learner.

        With the first call for a version, all of `waiting` are assigned: they are about to be informed. Receivers that
        are not `present` are forgotten. A second call of a receiver means that its fetch failed.
        """
        for gone in self._receivers.keys() - {*present, name}:
            del self._receivers[gone], self._address[gone]
        asking = {name} if name in self._informed or name not in self._assigned else set()
        if version != self._version:
            self._version, self._assigned, asking = version, {}, {name, *waiting}
            self._informed.clear()
            self._avoided = {relay: left - 1 for relay, left in self._avoided.items() if left > 1}
        self._informed.add(name)
        # Those to avoid do not serve.
        receivers = [
            replace(one, serves=one.serves and one.name not in self._avoided) for one in self._receivers.values()
        ]
        self._assigned = assign(receivers, asking, self._assigned, holding)
        found = sources(name, receivers, self._assigned, holding)
        return tuple((relay, self._address[relay]) for relay in found[:-1])
