"""Placement searches equal brute force: workflows, replicas, divisions, allocations and dispatch on random tables."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pytest

from jaxroll.policy import placement, selection
from jaxroll.policy.placement import Cost, Devices, Plan, Replica, Vector, Workflow

DEVICES = 8
ALL_COUNTS = [(a, b) for a in range(DEVICES + 1) for b in range(DEVICES + 1 - a) if a + b]
Table = Mapping[Vector, float]
Edges = frozenset[tuple[int, int]]


def below(vector: Vector) -> Iterator[Vector]:
    return itertools.product(*(range(count + 1) for count in vector))


def minus(a: Vector, b: Vector) -> Vector:
    return tuple(x - y for x, y in zip(a, b, strict=True))


# --- workflows: every tree of cuts, listed without memory


def graphs(roles: int) -> list[Edges]:
    """All acyclic graphs whose edges lead to a later role."""
    pairs = list(itertools.combinations(range(roles), 2))
    return [frozenset(chosen) for size in range(len(pairs) + 1) for chosen in itertools.combinations(pairs, size)]


def tables(chance: random.Random, roles: int, devices: Vector) -> list[Table]:
    """Seconds by role and vector; a fifth of the entries does not fit."""
    return [
        {
            vector: chance.uniform(1, 10) if any(vector) and chance.random() > 0.2 else math.inf
            for vector in below(devices)
        }
        for _ in range(roles)
    ]


class Every:
    """Seconds and age of every plan of some roles on some devices, as two arrays. None is left out."""

    def __init__(self, given: Sequence[Table], edges: Edges, chunks: int, switch: float) -> None:
        self.given, self.edges, self.chunks, self.switch = given, edges, chunks, switch
        self.known: dict[tuple[frozenset[int], Vector], tuple[np.ndarray, np.ndarray]] = {}

    def plans(self, roles: frozenset[int], vector: Vector) -> tuple[np.ndarray, np.ndarray]:
        if (roles, vector) not in self.known:
            found = list(self.made(roles, vector))
            self.known[roles, vector] = tuple(map(np.concatenate, zip(*found, strict=True)))  # type: ignore[assignment]
        return self.known[roles, vector]

    def made(self, roles: frozenset[int], vector: Vector) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if len(roles) == 1:
            (role,) = roles
            yield np.array([min(self.given[role][part] for part in below(vector))]), np.array([0])
            return
        for chosen in (one for size in range(1, len(roles)) for one in itertools.combinations(sorted(roles), size)):
            first, second = frozenset(chosen), roles - set(chosen)
            if any((earlier, later) in self.edges for earlier in second for later in first):
                continue  # the first part would depend on the second
            dependent = any((earlier, later) in self.edges for earlier in first for later in second)
            yield from self.both(first, vector, second, vector, "shared")
            for part in below(vector):
                for kind in ("pipelined", "overlapped") if dependent else ("parallel",):
                    yield from self.both(first, part, second, minus(vector, part), kind)

    def both(
        self, first: frozenset[int], vector: Vector, second: frozenset[int], rest: Vector, kind: str
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        (a, m), (b, n) = self.plans(first, vector), self.plans(second, rest)
        a, b = (each.ravel() for each in np.meshgrid(a, b))
        m, n = (each.ravel() for each in np.meshgrid(m, n))
        if kind == "shared":
            yield a + b + self.switch, m + n
        elif kind == "pipelined":
            longest = np.maximum(a, b) / self.chunks
            yield sum([longest] * (self.chunks - 1), a / self.chunks + b / self.chunks), m + n
        else:
            yield np.maximum(a, b), m + n + 1 if kind == "overlapped" else np.maximum(m, n)


def least(roles: int, devices: Vector, given: Sequence[Table], edges: Edges, chunks: int, switch: float) -> list[float]:
    """The fewest seconds of an age of at most 0, 1 and 2, by brute force."""
    seconds, lag = Every(given, edges, chunks, switch).plans(frozenset(range(roles)), devices)
    return [float(seconds[lag <= bound].min()) for bound in range(3)]


def workflow(roles: int, edges: Edges, chunks: int, switch: float) -> Workflow:
    names = tuple(f"r{role}" for role in range(roles))
    after = {names[role]: [names[before] for before, later in edges if later == role] for role in range(roles)}
    return Workflow(names, after, chunks, switch)


def check_workflow(chance: random.Random, roles: int, devices: Vector, edges: Edges) -> None:
    given, chunks, switch = tables(chance, roles, devices), chance.choice([1, 2, 8]), chance.choice([0.0, 1.0])
    wanted = least(roles, devices, given, edges, chunks, switch)
    costs: dict[str, Cost] = {f"r{role}": table.__getitem__ for role, table in enumerate(given)}
    for alpha, seconds in enumerate(wanted):
        flow = workflow(roles, edges, chunks, switch)
        plan = placement.workflow_plan(flow, devices, costs, alpha)
        found = math.inf if plan is None else plan.seconds
        assert found == pytest.approx(seconds), (devices, sorted(edges), alpha)
        if plan is not None:
            check_plan(plan, flow, costs, alpha)


def check_plan(plan: Plan, flow: Workflow, costs: Mapping[str, Cost], alpha: int) -> None:
    """The tree has the seconds and the age that it states, and gives no device to two parts that work at once."""
    assert plan.lag <= alpha and sorted(role for leaf in plan.leaves() for role in leaf.roles) == sorted(flow.roles)

    def seconds(one: Plan) -> float:
        if one.kind == "role":
            return min(costs[one.roles[0]](part) for part in below(one.devices) if any(part))
        both = [part.devices for part in one.parts]
        used = one.devices if one.kind == "shared" else tuple(map(sum, zip(*both, strict=True)))
        assert used == one.devices and (one.kind != "shared" or both == [one.devices] * 2)
        first, second = map(seconds, one.parts)
        return placement.combined(one.kind, first, second, flow)

    assert seconds(plan) == pytest.approx(plan.seconds)


def test_a_workflow_plan_equals_brute_force_on_a_sample() -> None:
    chance = random.Random(1)
    small = [counts for counts in ALL_COUNTS if sum(counts) <= 4]
    for roles in (1, 2, 3, 4):
        for _ in range(8):
            check_workflow(chance, roles, chance.choice(small), chance.choice(graphs(roles)))
        check_workflow(chance, roles, (chance.randint(6, 8), 0), chance.choice(graphs(roles)))
    for devices in ((3, 5), (1, 7)):
        check_workflow(chance, 4, devices, chance.choice(graphs(4)))


@pytest.mark.soak
@pytest.mark.timeout(3600)  # 8 devices and 4 roles: 576 graphs and clusters, half a second of processor time each
@pytest.mark.parametrize("roles", [1, 2, 3, 4])
@pytest.mark.parametrize("total", range(1, DEVICES + 1))
def test_a_workflow_plan_equals_brute_force_on_every_shape(roles: int, total: int) -> None:
    chance = random.Random(f"{roles} {total}")
    for devices in ALL_COUNTS:
        for edges in graphs(roles) if sum(devices) == total else ():
            check_workflow(chance, roles, devices, edges)


def test_roles_that_depend_on_each_other_are_one_unit() -> None:
    flow = Workflow(("train", "env", "act"), {"env": ["act"], "act": ["env"], "train": ["act"]}, switch_s=0.5)
    assert placement.units(flow) == [("env", "act"), ("train",)]
    costs: dict[str, Cost] = {role: lambda used: 4.0 / sum(used) for role in flow.roles}
    plan = placement.workflow_plan(flow, (6,), costs, alpha=1)
    assert plan is not None and (plan.kind, plan.seconds, plan.lag) == ("overlapped", 2.5, 1)
    assert [(leaf.roles, leaf.devices) for leaf in plan.leaves()] == [(("env", "act"), (4,)), (("train",), (2,))]
    alone = placement.workflow_plan(flow, (6,), costs)
    assert alone is not None and (alone.kind, alone.lag) == ("shared", 0)


# --- replicas


def makespan(rates: Sequence[float], rollouts: int) -> float:
    """Seconds of equal rollouts, each given to the replica that would finish it first, which is optimal."""
    done = [0] * len(rates)
    for _ in range(rollouts):
        fastest = min(range(len(rates)), key=lambda index: (done[index] + 1) / rates[index])
        done[fastest] += 1
    return max(count / rate for count, rate in zip(done, rates, strict=True))


def least_rollout(kinds: Sequence[Replica], available: Vector, rollouts: int) -> float:
    best = math.inf
    for counts in itertools.product(*(range(available[kind.type] // kind.devices + 1) for kind in kinds)):
        used = [0] * len(available)
        for kind, count in zip(kinds, counts, strict=True):
            used[kind.type] += kind.devices * count
        if any(counts) and all(a <= b for a, b in zip(used, available, strict=True)):
            rates = [kind.rate for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
            best = min(best, makespan(rates, rollouts))
    return best


def check_rollout(chance: random.Random, available: Vector) -> None:
    sizes = [(kind, devices) for kind in range(2) for devices in (1, 2, 4)]
    kinds = [Replica(kind, devices, chance.uniform(0.1, 2.0) * devices) for kind, devices in chance.sample(sizes, 4)]
    rollouts = chance.randint(1, 12)
    plan, wanted = placement.rollout_plan(kinds, available, rollouts), least_rollout(kinds, available, rollouts)
    assert (math.inf if plan is None else plan.seconds) == pytest.approx(wanted)
    if plan is not None:
        assert sum(plan.rollouts) == rollouts
        taken = zip(kinds, plan.replicas, plan.rollouts, strict=True)
        assert all(done <= count * kind.rate * plan.seconds * (1 + 1e-9) for kind, count, done in taken)


def test_a_rollout_plan_equals_brute_force_on_a_sample() -> None:
    chance = random.Random(2)
    for available in chance.sample(ALL_COUNTS, 12):
        check_rollout(chance, available)


@pytest.mark.soak
def test_a_rollout_plan_equals_brute_force_on_every_cluster() -> None:
    chance = random.Random(3)
    for available in ALL_COUNTS:
        for _ in range(20):
            check_rollout(chance, available)


# --- divisions


def sides(types: Sequence[Devices], chance: random.Random) -> tuple[Cost, Cost]:
    """Seconds of training, bound by compute, and of rollout, bound by memory, with a share that does not scale."""
    work = chance.uniform(0.2, 5.0)
    fixed = chance.uniform(0.0, 0.1)

    def train_s(used: Vector) -> float:
        stages = sum(map(bool, used))
        return work * (1 + (stages - 1) / 8) / sum(n * one.flops for n, one in zip(used, types, strict=True)) + fixed

    def rollout_s(used: Vector) -> float:
        return 1.0 / sum(n * one.bytes_per_s for n, one in zip(used, types, strict=True)) + fixed

    return train_s, rollout_s


def drawn(chance: random.Random, most: int) -> list[Devices]:
    """Two or three types with at most this many devices in all."""
    while True:
        counts = [chance.randint(1, most) for _ in range(chance.choice([2, 3]))]
        if sum(counts) <= most:
            return [Devices(n, chance.uniform(1, 8), chance.uniform(1, 8), chance.uniform(1, 9), 4) for n in counts]


def check_division(chance: random.Random) -> float:
    types = drawn(chance, 10)
    train_s, rollout_s = sides(types, chance)
    found = placement.partition(types, train_s, rollout_s)
    counts = tuple(each.count for each in types)
    assert tuple(map(sum, zip(found.training, found.rollout, strict=True))) == counts
    assert found.seconds == max(train_s(found.training), rollout_s(found.rollout))
    best = min(
        max(train_s(used), rollout_s(minus(counts, used))) for used in below(counts) if any(used) and used != counts
    )
    assert placement.divided(counts, train_s, rollout_s).seconds == best
    return found.seconds / best


def test_a_partition_is_within_two_percent_of_the_best_on_a_sample() -> None:
    chance = random.Random(4)
    assert max(check_division(chance) for _ in range(60)) <= 1.02


@pytest.mark.soak
def test_a_partition_is_within_two_percent_of_the_best() -> None:
    chance = random.Random(5)
    assert max(check_division(chance) for _ in range(5000)) <= 1.02


def test_equal_devices_give_any_division_with_the_right_numbers() -> None:
    two = [Devices(6, 1.0, 1.0), Devices(6, 1.0, 1.0)]

    def inverse(work: float) -> Callable[[Vector], float]:
        return lambda used: work / sum(used)

    split = placement.partition(two, inverse(1.0), inverse(3.0))
    assert sum(split.training) == 3
    one = placement.partition([Devices(12, 1.0, 1.0)], inverse(1.0), inverse(3.0))
    assert split.seconds == one.seconds


# --- one type


def test_an_allocation_takes_the_least_time_and_then_the_fewest_devices() -> None:
    chance = random.Random(6)
    for devices in range(2, 12):
        generation = [chance.uniform(1, 9) for _ in range(devices + 1)]
        training = [chance.uniform(1, 9) for _ in range(devices + 1)]
        x, y = placement.allocate(devices, generation.__getitem__, training.__getitem__)
        every_pair = [(a, b) for a in range(1, devices + 1) for b in range(1, devices + 1) if a + b <= devices]
        assert max(generation[x], training[y]) == min(max(generation[a], training[b]) for a, b in every_pair)
        fewer = [(a, b) for a, b in every_pair if a + b < x + y]
        assert all(max(generation[a], training[b]) > max(generation[x], training[y]) for a, b in fewer)


def test_a_dispatch_equals_brute_force_and_does_not_split_equal_answers() -> None:
    chance = random.Random(7)
    for _ in range(50):
        lengths = [chance.lognormvariate(5, 1) for _ in range(chance.randint(10, 60))]
        instances, slots = chance.randint(1, 8), chance.choice([4, 16])
        token = sorted(chance.uniform(0.01, 0.1) for _ in range(slots + 1))
        found = selection.dispatch(lengths, instances, token.__getitem__, slots)
        ranked = sorted(lengths, reverse=True)
        long = math.ceil(0.2 * len(ranked))

        def group_s(members: int, number: int, length: float, token: list[float] = token, slots: int = slots) -> float:
            each = -(-members // number)
            return token[min(each, slots)] * length * -(-each // slots)

        tenth, half = ranked[len(ranked) // 10], ranked[len(ranked) // 2]
        options = [group_s(len(ranked), instances, tenth)]
        for number in range(1, instances):
            options.append(max(group_s(long, number, tenth), group_s(len(ranked) - long, instances - number, half)))
        assert found.seconds == pytest.approx(min(options))
        assert sorted(found.long + found.others) == list(range(len(lengths)))
        if found.long:
            assert min(lengths[i] for i in found.long) >= max(lengths[i] for i in found.others)
    even = selection.dispatch([100.0] * 32, 4, lambda batch: 0.01 + 0.01 * batch, 8)
    assert even.long == ()


def test_a_ranker_finds_long_answers_of_prompts_it_has_not_seen() -> None:
    chance = random.Random(8)

    def drawn_prompt() -> tuple[str, float]:
        digits = chance.randint(1, 12)
        return f"add {''.join(chance.choices('0123456789', k=digits))}", digits * 10 * chance.lognormvariate(0, 0.2)

    seen, held = [drawn_prompt() for _ in range(200)], [drawn_prompt() for _ in range(200)]
    predicted = selection.LengthRanker().fit(*zip(*seen, strict=True)).predict([prompt for prompt, _ in held])
    top = set(sorted(range(200), key=lambda index: -held[index][1])[:40])
    chosen = set(sorted(range(200), key=lambda index: -predicted[index])[:40])
    assert len(top & chosen) / 40 >= 0.6  # 0.2 by chance
