"""Routing of requests and leases to pools of samplers by tag, and of weights from peer to peer. Pure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxroll.errors import ConfigError

# --- Pools of samplers by tag: affinity with fallback (hardware affinity in RollArt)
#
# Each source of prompts has a tag, and a pool of samplers serves some tags. Affinity is a priority and not exclusive: a
# sampler takes work of another pool at once if it has no other work and no sampler that serves this tag has room,
# because all are busy or none is there. Samplers without a pool serve all tags, work without one goes anywhere.
#
# Fairness: prompts become groups in the order of the stream in all pools, and claims take groups in
# that order. So a slow pool delays the learner, and none of its prompts waits longer than the in-flight window is deep.


@dataclass(frozen=True)
class Pools:
    """Pools by name. `of_source` is the pool of each source's tag, `of_sampler` that of each sampler; '': none."""

    names: tuple[str, ...] = ()
    of_source: tuple[str, ...] = ()
    of_sampler: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names)

    @classmethod
    def of(cls, given: Mapping[str, Any], tags: Sequence[str], samplers: int) -> Pools:
        """The pools of `placement.pools` for sources with these `tags`; ConfigError for malformed ones.

        The first samplers belong to the pool with the first name, the next ones to that with the second, and so on.
        """
        pool_of: dict[str, str] = {}
        of_sampler: list[str] = []
        for name, entry in sorted(given.items()):  # run.json does not keep their order
            key = f"placement.pools.{name}"
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
                raise ConfigError(key, name, "not a name", "Use 1 to 64 letters, digits, '-' and '_'.")
            if not isinstance(entry, Mapping) or set(entry) != {"samplers", "tags"}:
                raise ConfigError(key, entry, "not a pool", "Write dict(samplers=1, tags=['math']).")
            count, served = entry["samplers"], entry["tags"]
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ConfigError(f"{key}.samplers", count, "not a number of samplers", "Use 0 or more.")
            if not isinstance(served, list | tuple) or not served:
                raise ConfigError(f"{key}.tags", served, "a pool serves tags", "Write tags=['math'].")
            of_sampler += [name] * count
            for tag in served:
                if tag not in tags:
                    known = ", ".join(map(repr, dict.fromkeys(tags))) or "none"
                    raise ConfigError(f"{key}.tags", tag, "no source of task.mixture has this tag", f"Tags: {known}.")
                if tag in pool_of:
                    raise ConfigError(f"{key}.tags", tag, f"the pool {pool_of[tag]} serves it", "Name a tag once.")
                pool_of[tag] = name
        if len(of_sampler) > samplers:
            reason = f"{len(of_sampler)} samplers are in pools, and sampler.count is {samplers}"
            raise ConfigError("placement.pools", dict(given), reason, "Raise sampler.count, or lower those of pools.")
        return cls(
            tuple(sorted(given)), tuple(pool_of.get(tag, "") for tag in tags) if given else (), tuple(of_sampler)
        )

    def of_work(self, source: int) -> str:
        """The pool that prefers prompts of source number `source`; '' if any does."""
        return self.of_source[source] if source < len(self.of_source) else ""

    def of_role(self, role: str) -> str:
        """The pool of the sampler called `role`; '' for none."""
        number = role.rpartition("-")[2]
        index = int(number) if role.startswith("sampler-") and number.isdecimal() else len(self.of_sampler)
        return self.of_sampler[index] if index < len(self.of_sampler) else ""


def serves(own: str, work: str) -> bool:
    """True if a sampler of the pool `own` serves work of the pool `work`; '' is no pool."""
    return not own or not work or own == work


def may_help(work: str, with_room: Iterable[str]) -> bool:
    """True if any sampler may take work of the pool `work`: none of the pools `with_room` serves it."""
    return not any(serves(pool, work) for pool in with_room)


# --- Routing of an actor's conversations: pool, then the sampler of the group's last member, then the shortest queue
#
# A group kept together on one sampler has its prompt computed once; spread out it finishes sooner. `placement` has the
# same meaning for groups and samplers that request leases (`jaxroll.policy.limiter`).


@dataclass(frozen=True)
class SamplerLoad:
    """Conversations of a sampler, the number from which on they queue there, and the sampler's pool."""

    conversations: int
    room: float = math.inf
    pool: str = ""

    @property
    def is_full(self) -> bool:
        """True if one more conversation would queue."""
        return self.conversations >= self.room


def route(samplers: Mapping[str, SamplerLoad], last: str, placement: str, work: str = "") -> str:
    """The sampler for one more conversation of the pool `work`, out of all that have the weights for it.

    If each sampler of its pool is full (or there is none), those of other pools that are not full come into question.
    `last` is the sampler of the group's last member ('' for the first). `together` stays with it while it comes into
    question; `spread` takes the sampler with the fewest conversations, if possible one without a queue; `auto` stays
    unless another sampler is idle.
    """
    usual = {name: load for name, load in samplers.items() if serves(load.pool, work)}
    if all(load.is_full for load in usual.values()):
        usual = {name: load for name, load in samplers.items() if not load.is_full} or usual or dict(samplers)
    fewest = min(usual, key=lambda name: (usual[name].is_full, usual[name].conversations))
    if last not in usual or placement == "spread":
        return fewest
    return fewest if placement == "auto" and not usual[fewest].conversations else last


# --- Repack: samplers that wait for new weights give their last members to one another (Laminar)
#
# A sampler with one version per trajectory takes new weights when its last member has ended; until then most of its
# slots are idle. Members move to another such sampler at the same version as one parcel per sampler, and the empty one
# goes on with the new weights. A sampler that receives members never gives any away in the same plan, nor until it has
# reported them: its load would be counted without them.

MOVE_S = 10.0  # a move that is not finished by then has failed


@dataclass(frozen=True)
class Draining:
    """A sampler that waits for its `members` to end, at `version`; `tokens` are those in their KV caches.

    One that `leaves` the run gives its members and receives none.
    """

    version: Any
    members: int
    tokens: int = 0
    pool: str = ""
    leaves: bool = False


@dataclass(frozen=True)
class Room:
    """The members that a sampler decodes at once, and the tokens that its KV cache holds."""

    members: int
    tokens: float = math.inf


def repack(
    samplers: Mapping[str, Draining], room: Room, receiving: Mapping[str, Sequence[Draining]] | None = None
) -> dict[str, str]:
    """Moves that empty samplers: source → destination, of the same version and pool.

    Best fit: the smallest load goes first, to the destination that it fills most, and none is filled beyond `room`.
    `receiving` are the loads on their way to a sampler; it stays a destination.
    """
    loads = {name: (one.members, one.tokens) for name, one in samplers.items() if one.members}
    for name, coming in (receiving or {}).items():
        if name in loads:
            loads[name] = _sum(loads[name], *((one.members, one.tokens) for one in coming))
    received, moves = set(receiving or ()), dict[str, str]()
    for source in sorted(loads, key=lambda name: (*loads[name], name)):
        if source in received:
            continue
        one, merged = samplers[source], dict[str, tuple[int, int]]()
        for other in loads.keys() - moves.keys() - {source}:
            to = samplers[other]
            if (to.version, to.pool) == (one.version, one.pool) and not to.leaves:
                merged[other] = _sum(loads[other], loads[source])
        fits = [name for name, (members, tokens) in merged.items() if members <= room.members and tokens <= room.tokens]
        if fits:
            best = max(fits, key=lambda name: (merged[name], name))
            moves[source], loads[best] = best, merged[best]
            received.add(best)
    return moves


def _sum(*loads: tuple[int, int]) -> tuple[int, int]:
    return sum(members for members, _ in loads), sum(tokens for _, tokens in loads)


@dataclass
class _Move:
    to: str
    load: Draining
    until_s: float
    is_ordered: bool = False  # the source knows it
    is_given: bool = False  # the members wait for the destination
    is_taken: bool = False  # the destination knows


class Repacker:
    """The samplers that drain, and the moves under way. In memory only: a restarted store plans again."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._draining: dict[str, Draining] = {}
        self._valid_until_s: dict[str, float] = {}
        self._moves: dict[str, _Move] = {}  # by source

    def report(self, name: str, load: Draining, now_s: float, again_s: float = 0.0) -> bool:
        """Note a sampler that drains and plan again; True if there are new moves.

        Its next report is due within `again_s`; one that is overdue by `MOVE_S` takes no part any more.
        """
        self._valid_until_s[name] = now_s + again_s + MOVE_S
        for gone in [other for other in self._draining if self._valid_until_s[other] < now_s]:
            self.forget(gone)
        self._moves = {
            source: move
            for source, move in self._moves.items()
            if move.until_s > now_s and source != name and not (move.to == name and move.is_taken)
        }
        self._draining[name] = load
        coming: dict[str, list[Draining]] = {}
        for move in self._moves.values():
            coming.setdefault(move.to, []).append(move.load)
        moves = repack(self._draining, self._room, coming)
        for source, to in moves.items():
            self._moves[source] = _Move(to, self._draining.pop(source), now_s + MOVE_S)
        return bool(moves)

    def forget(self, name: str) -> None:
        """Note that the sampler has new weights or is gone."""
        self._draining.pop(name, None)
        self._valid_until_s.pop(name, None)

    def order(self, name: str) -> str:
        """The destination to which `name` has to give its members, once; '' if there is none."""
        move = self._moves.get(name)
        if move is None or move.is_ordered:
            return ""
        move.is_ordered = True
        return move.to

    def given(self, source: str, members: int) -> None:
        """Note that the source gave `members` of its members away."""
        if (move := self._moves.get(source)) is not None:
            move.load, move.is_given = replace(move.load, members=members), True

    def coming(self, name: str) -> bool:
        """True, once, if members wait for `name`."""
        given = [move for move in self._moves.values() if move.to == name and move.is_given and not move.is_taken]
        for move in given:
            move.is_taken = True
        return bool(given)


# --- Relay tree: the peer from which each receiver of weights fetches a version
#
# `assign` and `sources` are pure. Every receiver fetches from one that was assigned before it, from one that holds the
# version, or from the learner, also when it falls back: so no two wait for each other.

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
        # Relays that failed recently serve no one.
        receivers = [
            replace(one, serves=one.serves and one.name not in self._avoided) for one in self._receivers.values()
        ]
        self._assigned = assign(receivers, asking, self._assigned, holding)
        found = sources(name, receivers, self._assigned, holding)
        return tuple((relay, self._address[relay]) for relay in found[:-1])


# --- Update slots for rolling weight updates (`schedule.rolling_updates`), first come, first served
#
# A sampler holds a slot from the reply that names new weights until it asks again, which it does once its engine uses
# them or the transfer failed. A slot ends after `turn_s`, because its holder may have died. All slots are free after a
# restart of the store, so once up to twice `count` samplers may update.


class UpdateSlots:
    """At most `count` update slots at a time, each for at most `turn_s`; with `count` 0 every caller gets one."""

    def __init__(self, count: int, turn_s: float) -> None:
        self._count, self._turn_s = count, turn_s
        self._until_s: dict[str, float] = {}  # holder of a slot → time at which it ends at the latest
        self._waiting: dict[str, None] = {}  # names in the order of arrival

    @property
    def slot_s(self) -> float:
        """Seconds after which a slot ends at the latest."""
        return self._turn_s

    @property
    def unlimited(self) -> bool:
        """True if all callers get their slots at once."""
        return not self._count

    def over(self, name: str) -> bool:
        """End the slot of `name`; return True if it had one."""
        return self._until_s.pop(name, None) is not None

    def take(self, name: str, now_s: float) -> bool:
        """Give `name` a slot from `now_s` on and return True; if none is free, queue `name` and return False."""
        if not self._count:
            return True
        self._until_s = {who: until_s for who, until_s in self._until_s.items() if until_s > now_s}
        if name in self._until_s:
            return True  # an earlier call got the slot, but its reply was lost
        self._waiting.setdefault(name)
        free = self._count - len(self._until_s)
        if list(self._waiting).index(name) >= free:
            return False
        del self._waiting[name]
        self._until_s[name] = now_s + self._turn_s
        return True

    def leave(self, name: str) -> bool:
        """Remove `name` from the queue; return True if it was waiting."""
        if name not in self._waiting:
            return False
        del self._waiting[name]
        return True

    def next_end_s(self, now_s: float) -> float:
        """The time at which the next slot times out; infinite if there is none."""
        return min((until_s for until_s in self._until_s.values() if until_s > now_s), default=math.inf)
