"""Search over placements: which role gets which devices, in which order they work, and with how many replicas.

Pure functions over tables of costs. A vector counts devices by type. Four searches:

- `workflow_plan`: dynamic programming over the cuts of a workflow graph (RLinf, arXiv 2509.15965, algorithm 1). Roles
  share devices in turn, work on separate devices in a pipeline of chunks, or overlap at the price of staleness.
- `rollout_plan`: the replicas of rollout, by bisection over the step time with a knapsack for each time (AReaL-Hex,
  arXiv 2511.00796, whose integer programme has the same optimum).
- `partition`: devices of several types, divided between training and rollout by a graph partition whose share of the
  compute is found by bisection, and refined by exchanges (AReaL-Hex). `divided` tries all divisions.
- `allocate`: x + y ≤ n (StreamRL, arXiv 2504.15930, algorithm 1). Its algorithm 2 is `policy.selection.dispatch`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Vector = tuple[int, ...]
Cost = Callable[[Vector], float]
"""Seconds of a step's work on these devices; inf if it does not fit into their memory."""

Kind = Literal["role", "shared", "pipelined", "overlapped", "parallel"]


# --- dynamic programming over the cuts of a workflow


@dataclass(frozen=True)
class Workflow:
    """Roles, those on whose results each depends, and the rules of a step.

    `chunks`: parts of a batch that a pipeline passes on one by one. `switch_s`: seconds in which devices change between
    roles that share them. Roles that depend on each other in a cycle are one unit, which works in turn.
    """

    roles: tuple[str, ...]
    after: Mapping[str, Collection[str]] = field(default_factory=dict)
    chunks: int = 1
    switch_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A placement of roles, as a tree: its devices, the seconds of a step, and the steps of age that it adds.

    `role`: one unit, named by its roles. `shared`: the parts work in turn on all devices. `pipelined`: on separate
    devices, chunk by chunk. `overlapped`: on separate devices, the second part a step behind. `parallel`: parts that do
    not depend on each other.
    """

    kind: Kind
    devices: Vector
    seconds: float
    lag: int = 0
    roles: tuple[str, ...] = ()
    parts: tuple[Plan, ...] = ()

    def leaves(self) -> Iterator[Plan]:
        """The plans of the single units."""
        if self.kind == "role":
            yield self
        for part in self.parts:
            yield from part.leaves()


def combined(kind: Kind, first: float, second: float, workflow: Workflow) -> float:
    """Seconds of two parts under `kind`.

    A pipeline of c chunks takes (a + b) / c for the first chunk and max(a, b) / c for each of the others, which is
    max(a, b) + min(a, b) / c.
    """
    if kind == "shared":
        return first + second + workflow.switch_s
    return max(first, second) + (min(first, second) / workflow.chunks if kind == "pipelined" else 0.0)


def units(workflow: Workflow) -> list[tuple[str, ...]]:
    """The roles, those of a cycle together, in an order in which every unit follows those on which it depends."""
    reached = {role: {role} for role in workflow.roles}
    for _ in workflow.roles:
        for role in workflow.roles:
            for before in workflow.after.get(role, ()):
                reached[role] |= reached[before]
    found: list[tuple[str, ...]] = []
    for role in sorted(workflow.roles, key=lambda role: len(reached[role])):
        unit = tuple(other for other in workflow.roles if other in reached[role] and role in reached[other])
        if unit not in found:
            found.append(unit)
    return found


def workflow_plan(workflow: Workflow, devices: Vector, costs: Mapping[str, Cost], alpha: int = 0) -> Plan | None:
    """The plan with the fewest seconds, on at most `devices`, whose age is at most `alpha`; None if nothing fits.

    Exact: the time grows with |vectors|² · 3^units. For large clusters count machines instead of devices.
    """
    cuts = _Cuts(workflow, devices, costs, alpha)
    return cuts.plan((1 << len(units(workflow))) - 1, alpha, devices)


class _Cuts:
    """Tables of the fewest seconds by set of units (a bit mask), age and vector of devices, bottom up."""

    def __init__(self, workflow: Workflow, devices: Vector, costs: Mapping[str, Cost], alpha: int) -> None:
        self._workflow, self._units = workflow, units(workflow)
        self._shape = tuple(count + 1 for count in devices)
        self._edges = [
            sum(1 << other for other, unit in enumerate(self._units) if other != mine and self._depends(mine, unit))
            for mine in range(len(self._units))
        ]
        self._alone = [self._leaf(unit, costs) for unit in self._units]
        self._table: dict[tuple[int, int], np.ndarray] = {}
        for mask in sorted(range(1, 1 << len(self._units)), key=int.bit_count):
            for lag in range(alpha + 1):
                self._table[mask, lag] = self._fewest(mask, lag)

    def _depends(self, mine: int, others: tuple[str, ...]) -> bool:
        return any(before in others for role in self._units[mine] for before in self._workflow.after.get(role, ()))

    def _leaf(self, unit: tuple[str, ...], costs: Mapping[str, Cost]) -> np.ndarray:
        """Seconds of a unit on each vector, or on the part of it that is fastest: devices may stay idle."""
        table = np.full(self._shape, math.inf)
        for vector in itertools.product(*map(range, self._shape)):
            if any(vector):
                switches = self._workflow.switch_s * (len(unit) - 1)
                table[vector] = sum(costs[role](vector) for role in unit) + switches
        for axis in range(len(self._shape)):
            table = np.minimum.accumulate(table, axis=axis)
        return table

    def _cuts(self, mask: int) -> Iterator[tuple[int, int, bool]]:
        """Divisions of a set into one that depends on nothing of the other, the other, and whether it depends on it."""
        first = (mask - 1) & mask
        while first:
            second = mask ^ first
            if not any(self._edges[mine] & second for mine in range(len(self._units)) if first >> mine & 1):
                linked = any(self._edges[mine] & first for mine in range(len(self._units)) if second >> mine & 1)
                yield first, second, linked
            first = (first - 1) & mask

    def _choices(self, mask: int, lag: int) -> Iterator[tuple[Kind, tuple[int, int], tuple[int, int]]]:
        """Kinds of a cut, and set and age of both parts."""
        for first, second, linked in self._cuts(mask):
            for early in range(lag + 1):
                yield "shared", (first, early), (second, lag - early)
                if linked:
                    yield "pipelined", (first, early), (second, lag - early)
                    if early < lag:
                        yield "overlapped", (first, early), (second, lag - early - 1)
            if not linked:
                yield "parallel", (first, lag), (second, lag)

    def _fewest(self, mask: int, lag: int) -> np.ndarray:
        if mask.bit_count() == 1:
            return self._alone[mask.bit_length() - 1]
        table = np.full(self._shape, math.inf)
        for kind, first, second in self._choices(mask, lag):
            one, other = self._table[first], self._table[second]
            if kind == "shared":
                np.minimum(table, one + other + self._workflow.switch_s, out=table)
                continue
            for vector in itertools.product(*map(range, self._shape)):
                if not math.isfinite(one[vector]):
                    continue
                rest = other[tuple(slice(0, size - used) for size, used in zip(self._shape, vector, strict=True))]
                both = np.maximum(one[vector], rest)
                if kind == "pipelined":
                    both += np.minimum(one[vector], rest) / self._workflow.chunks
                target = table[tuple(slice(used, None) for used in vector)]
                np.minimum(target, both, out=target)
        return table

    def plan(self, mask: int, lag: int, devices: Vector) -> Plan | None:
        """The best plan of a set of units with this age, on these devices."""
        seconds = float(self._table[mask, lag][devices])
        if not math.isfinite(seconds):
            return None
        if mask.bit_count() == 1:
            return Plan("role", devices, seconds, roles=self._units[mask.bit_length() - 1])
        found = min(self._traced(mask, lag, devices), key=lambda each: (each[0], each[1]))
        _, _, kind, (first, vector, early), (second, rest, late) = found
        parts = tuple(self.plan(*part) for part in ((first, early, vector), (second, late, rest)))
        assert parts[0] is not None and parts[1] is not None
        lags = [part.lag for part in parts if part is not None]
        added = max(lags) if kind == "parallel" else sum(lags) + (kind == "overlapped")
        return Plan(kind, devices, seconds, added, parts=(parts[0], parts[1]))

    def _traced(self, mask: int, lag: int, devices: Vector) -> Iterator[tuple]:
        """Seconds of every choice for these devices, with its age and parts."""
        for kind, (first, early), (second, late) in self._choices(mask, lag):
            one, other = self._table[first, early], self._table[second, late]
            vectors = [devices] if kind == "shared" else itertools.product(*(range(count + 1) for count in devices))
            for vector in vectors:
                rest = devices if kind == "shared" else minus(devices, vector)
                seconds = combined(kind, float(one[vector]), float(other[rest]), self._workflow)
                yield seconds, early + late, kind, (first, vector, early), (second, rest, late)


# --- replicas of rollout


@dataclass(frozen=True)
class Replica:
    """A kind of replica: index of its type of device, number of devices, and rollouts per second."""

    type: int
    devices: int
    rate: float


@dataclass(frozen=True)
class RolloutPlan:
    """Number of replicas and of rollouts for each kind of replica, and the seconds of the slowest."""

    seconds: float
    replicas: tuple[int, ...]
    rollouts: tuple[int, ...]


def rollout_plan(kinds: Sequence[Replica], available: Vector, rollouts: int) -> RolloutPlan | None:
    """The replicas that finish `rollouts` whole rollouts first; None if no replica fits.

    In Θ seconds a replica finishes ⌊Θ · rate⌋ rollouts, so the most of all replicas is a knapsack over the devices.
    Bisection finds the least Θ.
    """
    usable = [kind for kind in kinds if kind.rate > 0 and kind.devices <= available[kind.type]]
    if not usable or rollouts <= 0:
        return RolloutPlan(0.0, (0,) * len(kinds), (0,) * len(kinds)) if rollouts <= 0 else None
    low, high = 0.0, rollouts / max(kind.rate for kind in usable) * (1 + 1e-9)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _knapsack(kinds, available, middle)[0] >= rollouts else (middle, high)
    total, counts = _knapsack(kinds, available, high)
    given = [count * _finished(kind, high) for kind, count in zip(kinds, counts, strict=True)]
    spare = total - rollouts
    for index in sorted(range(len(kinds)), key=lambda index: kinds[index].rate):  # the slowest give up the surplus
        given[index] -= (less := min(spare, given[index]))
        spare -= less
    taken = zip(kinds, counts, given, strict=True)
    seconds = max(math.ceil(done / count) / kind.rate for kind, count, done in taken if done)
    return RolloutPlan(seconds, counts, tuple(given))


def _finished(kind: Replica, seconds: float) -> int:
    return math.floor(seconds * kind.rate * (1 + 1e-12) + 1e-9)  # rounding must not lose a whole rollout


def _knapsack(kinds: Sequence[Replica], available: Vector, seconds: float) -> tuple[int, tuple[int, ...]]:
    """The most rollouts that replicas on `available` finish, and the numbers of replicas. Each type is on its own."""
    total, counts = 0, [0] * len(kinds)
    for type_, room in enumerate(available):
        mine = [(index, kind, _finished(kind, seconds)) for index, kind in enumerate(kinds) if kind.type == type_]
        best, last = [0] * (room + 1), [-1] * (room + 1)
        for used in range(1, room + 1):
            best[used] = best[used - 1]
            for index, kind, value in mine:
                if kind.devices <= used and best[used - kind.devices] + value > best[used]:
                    best[used], last[used] = best[used - kind.devices] + value, index
        total += best[room]
        while room > 0:
            if last[room] >= 0:
                counts[last[room]] += 1
            room -= kinds[last[room]].devices if last[room] >= 0 else 1
    return total, tuple(counts)


# --- division of devices between training and rollout


@dataclass(frozen=True)
class Devices:
    """A type of device for `partition`: number, FLOP/s, bytes/s of memory and of links, devices of one machine."""

    count: int
    flops: float
    bytes_per_s: float
    link_bytes_per_s: float = 1.0
    machine: int = 8


@dataclass(frozen=True)
class Division:
    """Devices that train, those that generate, and the seconds of the slower side; `tried` divisions were computed."""

    training: Vector
    rollout: Vector
    seconds: float
    tried: int


def minus(a: Vector, b: Vector) -> Vector:
    """The devices of `a` that are not in `b`."""
    return tuple(x - y for x, y in zip(a, b, strict=True))


class _Divisions:
    """The seconds of divisions, each computed once."""

    def __init__(self, counts: Vector, train_s: Cost, rollout_s: Cost) -> None:
        self.counts, self._train_s, self._rollout_s = counts, train_s, rollout_s
        self.sides: dict[Vector, tuple[float, float]] = {}

    def both(self, training: Vector) -> tuple[float, float]:
        if training not in self.sides:
            rest = minus(self.counts, training)
            self.sides[training] = (
                self._train_s(training) if any(training) else math.inf,
                self._rollout_s(rest) if any(rest) else math.inf,
            )
        return self.sides[training]

    def seconds(self, training: Vector) -> float:
        return max(self.both(training))

    def best(self, divisions: Iterable[Vector]) -> Division:
        training = min(divisions, key=self.seconds)
        return Division(training, minus(self.counts, training), self.seconds(training), len(self.sides))


def divided(counts: Vector, train_s: Cost, rollout_s: Cost) -> Division:
    """The best of all divisions: exhaustive, for small clusters."""
    return _Divisions(counts, train_s, rollout_s).best(itertools.product(*(range(count + 1) for count in counts)))


def partition(
    types: Sequence[Devices], train_s: Cost, rollout_s: Cost, between_bytes_per_s: float = 1.0, step: int = 1
) -> Division:
    """A division of all devices in steps of `step` that is close to the best, in O(log + exchanges) costs.

    The share γ of the compute that trains is found by bisection until the sides take equally long. Among
    divisions with a share next to γ, the one with the most bandwidth between training devices and the most memory
    bandwidth for rollout is taken. Exchanges of devices then improve the best divisions until none helps.
    """
    counts = tuple(each.count for each in types)
    known = _Divisions(counts, train_s, rollout_s)
    low, high = 0.0, 1.0
    starts = [tuple(count if kind == each else 0 for each, count in enumerate(counts)) for kind in range(len(counts))]
    for _ in range(2 + math.ceil(math.log2(sum(counts) + 1))):
        share = (low + high) / 2
        starts.append(training := _densest(types, share, between_bytes_per_s, step))
        training_s, generating_s = known.both(training)
        low, high = (low, share) if training_s < generating_s else (share, high)
    starts += [vector for kind in range(len(counts)) for vector in _crossing(known, kind, step)]
    best = sorted(set(starts), key=known.seconds)[: 2 + len(counts)]
    return known.best([_exchanged(known, start, step) for start in best])


def _densest(types: Sequence[Devices], share: float, between: float, step: int) -> Vector:
    """The division with a share of the compute next to `share` and the greatest sum of both bandwidth terms."""
    total = sum(each.count * each.flops for each in types)
    memory = sum(each.count * each.bytes_per_s for each in types)
    *others, last = types
    options = []
    for vector in itertools.product(*(range(0, each.count + 1, _stride(each.count, step)) for each in others)):
        flops = sum(used * each.flops for used, each in zip(vector, others, strict=True))
        number = round(max(0.0, share * total - flops) / last.flops / step) * step
        options.append((*vector, min(number, last.count)))
    links = [_links(types, vector, between) for vector in options]
    most = max(*links, 1e-30)
    finest = step * max(each.flops for each in types) / total

    def rank(option: tuple[Vector, float]) -> tuple[float, float]:
        vector, linked = option
        off = abs(sum(used * each.flops for used, each in zip(vector, types, strict=True)) / total - share)
        rest = sum((each.count - used) * each.bytes_per_s for used, each in zip(vector, types, strict=True))
        return round(off / finest), -(linked / most + rest / memory)

    return min(zip(options, links, strict=True), key=rank)[0]


def _stride(count: int, step: int) -> int:
    return step * max(1, count // (64 * step))


def _links(types: Sequence[Devices], vector: Vector, between: float) -> float:
    """Bandwidth over all pairs of training devices: of one machine by its links, of others by the network."""
    pairs = 0.0
    for used, each in zip(vector, types, strict=True):
        full, part = divmod(used, each.machine)
        pairs += (full * math.comb(each.machine, 2) + math.comb(part, 2)) * each.link_bytes_per_s
        pairs += (math.comb(used, 2) - full * math.comb(each.machine, 2) - math.comb(part, 2)) * between
    return pairs + between * sum(a * b for a, b in itertools.combinations(vector, 2))


def _crossing(known: _Divisions, kind: int, step: int) -> list[Vector]:
    """Both sides of the number at which training on this type alone becomes as fast as rollout on all others."""

    def only(number: int) -> Vector:
        return tuple(number if each == kind else 0 for each in range(len(known.counts)))

    low, high = 0, known.counts[kind] // step
    while high - low > 1:
        middle = (low + high) // 2
        training_s, generating_s = known.both(only(middle * step))
        low, high = (low, middle) if training_s <= generating_s else (middle, high)
    return [only(low * step), only(high * step)]


def _exchanged(known: _Divisions, start: Vector, step: int) -> Vector:
    """`start` after all exchanges that make it faster, of at most two units of each type; units shrink to `step`."""
    moves = list(itertools.product(range(-2, 3), repeat=len(start)))
    size = max(step, 1 << max(0, max(known.counts).bit_length() - 3))
    while True:
        near = [tuple(a + size * b for a, b in zip(start, move, strict=True)) for move in moves]
        near = [each for each in near if all(0 <= a <= b for a, b in zip(each, known.counts, strict=True))]
        better = min(near, key=known.seconds, default=start)
        if known.seconds(better) < known.seconds(start):
            start = better
        elif size <= step:
            return start
        else:
            size = max(step, size // 2)


# --- one type of device: x + y ≤ n


def allocate(devices: int, generation_s: Callable[[int], float], training_s: Callable[[int], float]) -> tuple[int, int]:
    """(x, y) with x + y ≤ devices and the least max(generation_s(x), training_s(y)); of equals, the fewest devices."""
    pairs = ((x, y) for x in range(1, devices) for y in range(1, devices - x + 1))
    return min(pairs, key=lambda pair: (max(generation_s(pair[0]), training_s(pair[1])), sum(pair)))
