"""Staleness limiter: one inequality admits work, one bounds the age of trained tokens; adaptive window; lease holders.

B groups per claim, R redundant groups, v the published version, u the version a sampler serves, α the bound
(docs/store_contract.md, promise 7):

(a) admission: a group with `ahead` groups to be trained before it may be leased while

        ahead < ⌊(α + 1 − max(0, v − u))·B⌋ + R

    For a new prompt `ahead` is everything outstanding (leased + ready + claimed and not yet published + to be
    replayed), which is the form of the contract. A member that is leased again is earlier in the order, so its `ahead`
    is smaller: it is not refused credit that its own group already holds.

(b) delivery: no token with  trained step − sampled step > ⌈α⌉  is trained. With `lease_order` this follows from (a):
    a < x·B + R groups ahead are consumed in ⌈x⌉ − 1 further claims at most.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from jaxroll.errors import ConfigError
from jaxroll.records import Recent

# --- Circuit breaker for lease holders whose members keep failing. Pure functions from durations to a rest
#
# A holder (a sampler or an actor) that fails `TRIP` members in a row with INFRA rests: it gets no leases for a while.
# After the first rest it works as before; from the second on it gets one member at a time, as a trial. Each failed
# trial doubles the rest, a multiple of the time to fail, which bounds the cost of trials. A put halves the rests.
#
# Once a holder has rested, a member of it that the learner waits for counts as failed as soon as it takes `SLOWER`
# times as long as the members of others: its lease ends, and another holder gets it (`jaxroll.store.core.leases.tick`).
# Otherwise members that fail late would delay a claim by all the time that they take to fail. Members that were leased
# before the rest began belong to the same wave: their failures do not count again.
# Failures of a holder that never succeeded count against it alone while others may do better (`is_broken_alone`). One
# that succeeds, but much more slowly than they, goes on trial at once.

TRIP = 4  # members in a row
FIRST_S, LONGEST_S = 1.0, 600.0
ALONE_S = 30.0  # the longest rest when no other holder could do the work
TRIAL_FROM = 2  # rests
SLOWER = 2.5  # a holder is slow if the mean of its last members exceeds the others' median by this factor
SHORT_S = 1.0  # members this short delay no claim, however quick those of others are
SLOW = "its members take much longer than those of others"
UNRELIABLE = 0.1  # share of the last members that failed
BROKEN = 0.3  # share above which DATA failures count too, if other holders do not have them
_OF_ONE = 0.05  # weight of the newest member in that share
KEPT_BY_CLAIM = 0.99  # of the share, so that a holder without leases is tried again
MEAN_KEPT_BY_CLAIM = 0.995  # of the mean duration of a holder without leases: a trial of it delays a claim


def failing_share(before: float, *, failed: bool) -> float:
    """The share of the last members that failed, after one more member."""
    return (1 - _OF_ONE) * before + _OF_ONE * failed


class Health(msgspec.Struct):
    """Health of a holder: `failures` in a row since its last rest or put, and the `error` of the last one."""

    failures: int = 0
    rests: int = 0
    rest_s: float = 0.0
    rested_at_s: float | None = None  # start of its rest; None: not resting, or the store has restarted since
    error: str = ""

    @property
    def on_trial(self) -> bool:
        """True if the holder gets one member at a time."""
        return self.rests >= TRIAL_FROM

    def left_s(self, now_s: float, *, alone: bool) -> float:
        """The remaining rest in seconds; 0 if the holder may work."""
        if self.rested_at_s is None:
            return 0.0
        rest_s = min(self.rest_s, ALONE_S) if alone else self.rest_s
        return max(0.0, self.rested_at_s + rest_s - now_s)

    def next_rest_s(self, leased_at_s: float | None, now_s: float) -> float | None:
        """The rest after one more failure, of a member leased at `leased_at_s` (0: none); None if it does not count."""
        if self.is_of_older_wave(leased_at_s):
            return None
        if self.failures + 1 < (1 if self.on_trial else TRIP):
            return 0.0
        took_s = 0.0 if leased_at_s is None or not self.rests else now_s - leased_at_s
        return min(LONGEST_S, max(FIRST_S, took_s) * 2**self.rests)

    def is_of_older_wave(self, leased_at_s: float | None) -> bool:
        """True if a member leased at `leased_at_s` was leased before the rest began."""
        return self.rested_at_s is not None and leased_at_s is not None and leased_at_s <= self.rested_at_s

    def next_slow_rest_s(self, leased_at_s: float, took_s: float) -> float:
        """The rest of a slow holder whose members take `took_s`; 0 if this one was leased before its rest began."""
        if self.is_of_older_wave(leased_at_s):
            return 0.0
        return min(LONGEST_S, max(FIRST_S, took_s) * 2 ** (1 + max(TRIAL_FROM, self.rests)))

    def begin_slow_rest(self, rest_s: float, now_s: float) -> None:
        """Start a rest because of a slow put."""
        self.failures, self.rests = 0, max(TRIAL_FROM, self.rests + 1)
        self.rest_s, self.rested_at_s, self.error = rest_s, now_s, SLOW

    def note_failure(self, rest_s: float, error: str, now_s: float) -> None:
        """Count one more failure and start a rest of `rest_s` (0: none)."""
        self.failures, self.error = self.failures + 1, error
        if rest_s > 0:
            self.failures, self.rests, self.rest_s, self.rested_at_s = 0, self.rests + 1, rest_s, now_s

    def note_success(self) -> None:
        """Count a put: end the rest, reset the failures and halve the number of rests."""
        self.failures, self.rests, self.rested_at_s = 0, self.rests // 2, None


# --- Staleness limiter

_ROUNDING = 1e-9  # (0.1 + 1) * 30 is 33.000000000000004, and (0.7 + 1) * 10 may be one ulp short of 17


def max_age(alpha: float) -> int:
    """⌈α⌉, the greatest age of a trained token, in steps."""
    return math.ceil(alpha - _ROUNDING)


@dataclass(frozen=True)
class AgeLimiter:
    """Admission and delivery guards of a run. The constructor refuses settings that must deadlock."""

    alpha: float
    batch_groups: int
    redundant_groups: int = 0
    publish_every: int = 1
    buffer_groups: int = 0  # groups the store keeps until a durable checkpoint covers them; 0: no such limit
    intervals: bool = False  # no group of a claim begins before all groups of the claim before are finished

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ConfigError("schedule.alpha", self.alpha, "the age bound must be a number ≥ 0", "0 is synchronous.")
        if self.batch_groups < 1:
            raise ConfigError("schedule.groups_per_step", self.batch_groups, "a claim needs a group", "Use 1 or more.")
        if self.redundant_groups < 0:
            raise ConfigError("schedule.redundant_groups", self.redundant_groups, "it is negative", "0: none.")
        claims = math.floor(self.alpha + 1 + _ROUNDING)
        if not 1 <= self.publish_every <= claims:
            raise ConfigError(
                "schedule.publish_every",
                self.publish_every,
                f"more than alpha + 1 = {claims} claims between publications deadlocks: no lease is granted any more",
                f"Set it to a number from 1 to {claims}, or raise schedule.alpha.",
            )
        if self.buffer_groups and self.buffer_groups < self.window(0):
            raise ConfigError(
                "schedule.buffer_groups",
                self.buffer_groups,
                f"less than ⌊(alpha + 1) · groups_per_step⌋ + redundant_groups = {self.window(0)} deadlocks",
                f"Set it to {self.window(0)} or more, or to 0 for no limit but store.retention_mb.",
            )

    @property
    def max_age(self) -> int:
        """⌈α⌉, the greatest age of a trained token, in steps."""
        return max_age(self.alpha)

    def window(self, lag: int) -> int:
        """Groups that may be outstanding for a sampler `lag` ≥ 0 versions behind the published one."""
        groups = math.floor((self.alpha + 1 - max(0, lag)) * self.batch_groups + _ROUNDING)
        return groups + self.redundant_groups if groups > 0 else 0

    @property
    def least_window(self) -> int:
        """The smallest window without deadlock: all claims of one publication, and the redundant groups."""
        return self.publish_every * self.batch_groups + self.redundant_groups

    def admits(
        self, ahead: int, published_step: int, sampler_step: int, in_force: int | None = None, claims: int = 0
    ) -> bool:
        """True if a group with `ahead` groups before it may be sampled at `sampler_step` now (see `bound`)."""
        return ahead < self.bound(published_step, sampler_step, in_force, claims)

    def bound(self, published_step: int, sampler_step: int, in_force: int | None = None, claims: int = 0) -> int:
        """Groups that may be outstanding for a sampler with the weights of `sampler_step`.

        `in_force` is the adapted window, if it is smaller than the bound (see `Pace`). `claims` is the number of claims
        not yet published: if no further claim fits the bound, the R redundant groups would only grow too old.
        """
        lag = max(0, published_step - sampler_step)
        bound = self.window(lag) if self.window(lag + claims) > 0 else 0
        if self.intervals:  # a claim is made once its groups are finished, so one claim's groups may be unclaimed
            bound = min(bound, (claims + 1) * self.batch_groups)
        return bound if in_force is None else min(bound, in_force)

    def too_old(self, sampled_step: int, trained_step: int) -> bool:
        """True if a token sampled at `sampled_step` must not be trained at `trained_step`."""
        return trained_step - sampled_step > self.max_age


def groups_ahead(policy: str, place: int, total: int) -> int:
    """The number of the `total` unclaimed groups that may be trained before the one at position `place`."""
    return place if policy == "lease_order" else max(0, total - 1)


# --- in-flight window: `adaptive` is the smallest one that keeps the learner busy
#
# The age limiter bounds how far samplers may run ahead: the full window. A larger one than keeps the learner busy only
# makes tokens older. So it shrinks while the learner finds its claims ready and grows when it waits, between the groups
# that the next publication needs and the full window. Waiting is a share of the learner's time over about a hundred
# claims: below `TOLERATED`/2 the window shrinks, above `TOLERATED` it grows, which bounds the cost of trying a smaller
# one. If the learner would wait under any window, the full one stays. The rule depends on the logged claims only: how
# long the learner waited for each, and how long it worked before.

TOLERATED = 0.01  # share of its time that the learner may wait
_KEPT = 0.99  # decay of the past at each claim


@dataclass(frozen=True)
class Pace:
    """Adapted in-flight window: `groups` (0 before the first claim: the full window) and its statistics.

    It is constant for `hold` claims, until groups leased under it are claimed. `step` is the next increment, doubled
    while growing does not help."""

    groups: int = 0
    hold: int = 0
    step: int = 0
    waited_s: float = 0.0
    worked_s: float = 0.0

    @property
    def waiting_share(self) -> float:
        """The share of its recent time that the learner waited for claims."""
        return self.waited_s / whole if (whole := self.waited_s + self.worked_s) > 0 else 0.0


def adapted(pace: Pace, least: int, most: int, batch: int, waited_s: float, worked_s: float) -> Pace:
    """The pace after a claim for which the learner waited `waited_s` after working `worked_s` (0: unknown).

    `least` and `most` are the bounds of the window, `batch` the groups of a claim.
    """
    if pace.groups == 0:  # waits while the pipeline fills do not count
        return Pace(most, _settling(most, batch))
    groups = min(max(pace.groups, least), most)
    if worked_s <= 0:
        return replace(pace, groups=groups)
    waited_s = min(waited_s, worked_s)  # one long wait, as after a sampler's death, must not dominate the share
    past = (_KEPT * pace.waited_s + waited_s, _KEPT * pace.worked_s + worked_s)
    return _changed(replace(pace, groups=groups, waited_s=past[0], worked_s=past[1]), least, most, batch, waited_s > 0)


def _changed(pace: Pace, least: int, most: int, batch: int, waited: bool) -> Pace:
    if pace.hold > 0:
        return replace(pace, hold=pace.hold - 1)
    first_step = math.ceil(batch / 8)
    if waited and pace.waiting_share > TOLERATED:
        wider = min(most, pace.groups + max(first_step, pace.step))
        hold = _settling(wider, batch) if wider > pace.groups else 0
        return replace(pace, groups=wider, hold=hold, step=2 * max(first_step, pace.step) if hold else pace.step)
    if pace.waiting_share < TOLERATED / 2 and pace.groups > least:
        narrower = max(least, pace.groups - first_step)
        return replace(pace, groups=narrower, hold=_settling(pace.groups, batch), step=first_step)
    return pace if waited else replace(pace, step=first_step)


def _settling(groups: int, batch: int) -> int:
    """The number of claims until the groups that are in flight now have been claimed."""
    return math.ceil(groups / batch) + 1


# --- shares of scarce work, and the splitting of groups
#
#     share = ⌈work · capacity / (capacity + the others')⌉ − held   if there is less work than room, otherwise `room`
#
# Capacity is room and held leases; work is what is available and what they all hold. So a sampler that has its part
# leaves the rest to one that still fetches the new weights, until it holds less again. If members of a group stay
# `together` on one sampler, their prompt is computed once; `spread` over all with room they finish sooner. `auto` keeps
# them together unless samplers would be idle or the learner waits for that group. A sampler with room for a part of a
# group takes it, except with `together`: under load slots become free one by one.


class Rooms(NamedTuple):
    """Sums over samplers: members for which they have room, leases held, and idle samplers that fetch newer weights."""

    room: int = 0
    held: int = 0
    fetching: int = 0

    @classmethod
    def sum(cls, rooms: Iterable[Rooms]) -> Rooms:
        """The sums of all."""
        return cls(*map(sum, zip(*rooms, strict=True)))


@dataclass(frozen=True)
class Share:
    """Share of a sampler with `room` that holds `held` leases; `others` ask too. `available`: work. Unit: members."""

    room: int
    others: Rooms = field(default_factory=Rooms)
    available: int = 0
    replicate: str = "together"
    held: int = 0

    @property
    def is_scarce(self) -> bool:
        """True if there is less work than room."""
        return self.others.room > 0 and self.available < self.room + self.others.room

    @property
    def members(self) -> int:
        """The number of members that the sampler may take, so that all hold equal parts of their capacity.

        At least one, unless it is left to a sampler that fetches its weights.
        """
        if not self.is_scarce:
            return self.room
        capacity, held = self.room + self.held, self.held + self.others.held
        part = -(-(self.available + held) * capacity // (capacity + self.others.room + self.others.held))
        least = 0 if self.others.fetching and self.available else 1
        return min(self.room, max(least, part - self.held))

    def splits(self, awaited: bool) -> bool:
        """True if the members of a group are split between samplers; `awaited`: the learner waits for that group."""
        if self.others.room == 0 or self.replicate == "together":
            return False
        return self.replicate == "spread" or self.is_scarce or awaited

    def of_group(self, free: int, left: int, awaited: bool, *, begun: bool) -> int:
        """The number of a group's `free` members that the sampler may take with `left` of its share.

        A new group that stays together is taken whole, as far as there is room; one that has `begun` is split already.
        """
        if self.splits(awaited):
            return min(left, self._part(free))
        return min(free, left if begun else left + self.room - self.members)

    def _part(self, members: int) -> int:
        return -(-members * self.room // (self.room + self.others.room))


# --- durations and room of all holders

HUNGRY_S = 10.0  # a sampler with room asks again within this time
FETCHES_S = 60.0  # one without the newest weights has its share for so long after it worked


def _on_grid(value: float) -> float:
    """The nearest power of 2^(1/8), so that small changes change nothing; 0 for 0."""
    return 2.0 ** (round(8 * math.log2(value)) / 8) if value > 0 else 0.0


class HolderIndex:
    """Holders that have room and delay no claims, and the means of their durations in order.

    Those that are `behind` have room and fetch newer weights: they count in shares, and no slow holder yields to them.
    Each lease and put asks which are slow, have room, or are quicker; the index answers without a look at a thousand.
    It reads the tables by holder that it was made with: after a change, add the name to `dirty`, or call `set_room`.
    """

    def __init__(
        self,
        member_s: Mapping[str, float],
        recent_s: Mapping[str, Recent],
        hungry: Mapping[str, float],
        rooms: Mapping[str, int],
        failing: Mapping[str, float],
        behind: Mapping[str, float],
        leases: Callable[[str], int] = lambda name: 0,
    ) -> None:
        self._member_s, self._recent_s, self._hungry = member_s, recent_s, hungry
        self.dirty = set(recent_s)  # holders whose durations or failures changed
        self._slow_s = self._mean_tokens = 0.0  # members that take longer delay claims; 0: none
        self._means, self._mean_of = list[tuple[float, str]](), dict[str, float]()
        self._quick, self._alike = (0.0, 0.0, 0.0), True  # of the quickest: seconds, seconds per token, what it got
        self._leases, self._idle = leases, set[str]()  # number of leases held; those that have none and fetch weights
        self._rooms: dict[str, tuple[float, int, bool]] = {}  # name → asked at, room, fetches weights; in order of time
        self._good, self._good_sums = dict[str, Rooms](), [0, 0, 0]  # those of them that delay no claims
        self.set_failing(failing)
        for name, at_s in sorted({**hungry, **behind}.items(), key=lambda one: one[1]):
            self.set_room(name, at_s, rooms.get(name, 0), fetches=name in behind)

    def set_failing(self, failing: Mapping[str, float]) -> None:
        """Read this table of the shares of failed members from now on."""
        self._failing = failing
        self._sort()

    def limit(self, slow_s: float, mean_tokens: float, *, alike: bool = True) -> None:
        """Treat holders as slow whose members take over `slow_s` (0: none). `mean_tokens`: of all members (0: new);
        `alike`: all do the same work, so that the quickest of them says how long it takes."""
        self._settle()
        if (slow_s, mean_tokens, alike) != (self._slow_s, self._mean_tokens, self._alike):
            self._slow_s, self._mean_tokens, self._alike = slow_s, mean_tokens, alike
            self._sort()

    def is_slow(self, name: str) -> bool:
        """True if the last members of `name`, also at the mean length, took longer than the limit, and much longer than
        the quickest's: equals near the limit would leave all work to one of them."""
        recent, member_s, quick = self._recent_s.get(name, Recent()), self._member_s.get(name, 0.0), self._quick
        pace_s, more = recent.per_token_s, max(1.0, recent.mean_got / quick[2]) if quick[2] else 1.0
        if self._alike and (pace_s <= SLOWER * more * quick[1] if pace_s else member_s <= SLOWER * quick[0]):
            return False
        return 0.0 < self._slow_s < min(member_s, pace_s * self._mean_tokens or math.inf)

    def holds_up(self, name: str) -> bool:
        """True if `name` delays claims because it is slow or fails."""
        return self._failing.get(name, 0.0) > UNRELIABLE or self.is_slow(name)

    def set_room(self, name: str, at_s: float, room: int, *, fetches: bool = False) -> None:
        """Note that `name` asked at `at_s` with `room` for more members; `fetches`: it has the weights but one."""
        self.drop(name)
        self._rooms[name] = at_s, room, fetches
        self._place(name)

    def note_published(self, fetching: Collection[str]) -> None:
        """Note newer weights: of those with room, these had the newest weights before and fetch the new ones."""
        for name, (at_s, room, _) in self._rooms.items():
            self._rooms[name] = at_s, room, name in fetching
            self._place(name)

    def fetching(self) -> bool:
        """True if a holder without leases fetches weights; its time is not looked at."""
        self._settle()
        return bool(self._idle)

    def rooms_of(self, name: str) -> Rooms:
        """The room of one."""
        held = self._leases(name)
        _, room, fetches = self._rooms.get(name, (0.0, 0, False))
        return Rooms(room, held, int(fetches and not held))

    def quickest(self) -> Iterator[tuple[float, str]]:
        """The means of holders with at least `TRIP` members and their names, the shortest first."""
        self._settle()
        return iter(self._means)

    def from_mean(self, least_s: float) -> tuple[int, Iterator[str]]:
        """The number of holders in `quickest` whose mean is below `least_s`, and the names of the others."""
        self._settle()
        below = bisect_left(self._means, (least_s, ""))
        return below, (self._means[place][1] for place in range(below, len(self._means)))

    def with_room(self, but: str, now_s: float) -> Iterator[str]:
        """Holders other than `but` that delay no claims and were refused within `HUNGRY_S` as the window was full."""
        self._expire(now_s)
        return (name for name in self._good if name != but and now_s - self._hungry.get(name, -math.inf) <= HUNGRY_S)

    def rooms_of_others(self, but: str, now_s: float) -> Rooms:
        """The room of those that compete with `but`: of all, or without it those that delay no claims."""
        self._expire(now_s)
        if self.holds_up(but):
            return Rooms.sum(self.rooms_of(name) for name in self._rooms if name != but)
        return Rooms(*(whole - own for whole, own in zip(self._good_sums, self._good.get(but, Rooms()), strict=True)))

    def _settle(self) -> None:
        while self.dirty:
            self._update(self.dirty.pop())
        mean_s, name = self._means[0] if self._means else (0.0, "")
        first = self._recent_s.get(name, Recent())
        quick = (_on_grid(mean_s), _on_grid(first.per_token_s), _on_grid(first.mean_got))
        if quick != self._quick:
            self._quick = quick
            self._sort()

    def _update(self, name: str) -> None:
        recent = self._recent_s.get(name)
        mean_s = recent.mean_s if recent is not None and recent.count >= TRIP else None
        if (before_s := self._mean_of.get(name)) != mean_s:
            if before_s is not None:
                del self._means[bisect_left(self._means, (before_s, name))], self._mean_of[name]
            if mean_s is not None:
                insort(self._means, (mean_s, name))
                self._mean_of[name] = mean_s
        if name in self._rooms:
            self._place(name)

    def _expire(self, now_s: float) -> None:
        self._settle()
        # Time does not go back, so that an entry that is too old now is never needed again.
        while self._rooms and now_s - next(iter(self._rooms.values()))[0] > HUNGRY_S:
            self.drop(next(iter(self._rooms)))

    def drop(self, name: str) -> None:
        """Note that `name` has no room."""
        self._rooms.pop(name, None)
        self._place(name)

    def _place(self, name: str) -> None:
        before, rooms = self._good.pop(name, Rooms()), self.rooms_of(name) if name in self._rooms else Rooms()
        (self._idle.add if rooms.fetching else self._idle.discard)(name)
        after = Rooms() if self.holds_up(name) else rooms
        self._good_sums = [old + new - own for old, new, own in zip(self._good_sums, after, before, strict=True)]
        if after != Rooms():
            self._good[name] = after

    def _sort(self) -> None:
        for name in self._rooms:
            self._place(name)
