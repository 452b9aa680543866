"""The indexes of holders and of open groups answer as a scan of the tables and of all groups does."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from jaxroll.errors import NoCredit
from jaxroll.policy.limiter import HUNGRY_S, SHORT_S, SLOW, SLOWER, TRIP, UNRELIABLE, AgeLimiter, Health
from jaxroll.records import Recent, Task
from jaxroll.store.core import admission, puts, training
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings
from jaxroll.store.core.state import DONE, LEASED, Group, Slot, State
from tests.harness.store.machine import Machine
from tests.harness.store.virtual_cluster import Cluster, Fault, World

WORLDS = {
    "many": World(lambda rng: rng.lognormvariate(1.0, 0.8), lambda rng: 2.0, samplers=8, slots=6, batch=6, size=4),
    "scarce": World(lambda rng: rng.uniform(1.0, 3.0), lambda rng: 4.0, samplers=6, slots=24, batch=4, size=4),
    "aging": World(lambda rng: rng.lognormvariate(0.5, 1.0), lambda rng: 0.5, samplers=5, slots=8, batch=4, alpha=1.0),
}
FAULTS = (Fault(), Fault(after=1.0), Fault(after=1.0, share=0.2, kind="DATA"), Fault(from_s=5.0, until_s=30.0))


def others(settings: Settings, state: State, name: str, now_s: float) -> set[str]:
    """Present holders that get leases and are not on trial, by a look at each."""
    found = set()
    for other in state.seen_s:
        health = state.holders.get(other, Health())
        if other == name or now_s - state.seen_s[other] > max(admission.PRESENT_S, settings.lease_s):
            continue
        if not (health.on_trial or health.left_s(now_s, alone=False) > 0 or yields(settings, state, other, now_s)):
            found.add(other)
    return found


def yields(settings: Settings, state: State, name: str, now_s: float) -> bool:
    is_slow = admission.is_slow(settings, state, name)
    by_speed = is_slow and bool(with_room(settings, state, name, now_s))
    return by_speed or bool(admission.yields_to(settings, state, name, now_s))


def with_room(settings: Settings, state: State, but: str, now_s: float) -> dict[str, int]:
    """Room of the others that delay no claims and were refused lately, as the window was full."""
    hungry = {name for name, at_s in state.hungry.items() if name != but and now_s - at_s <= HUNGRY_S}
    return {name: state.rooms[name] for name in hungry if not admission.holds_up(settings, state, name)}


def competing(settings: Settings, state: State, name: str, now_s: float) -> dict[str, int]:
    """Room of the others that share scarce work with `name`: of all, if it delays claims itself."""
    asked = {other for other, at_s in (state.hungry | state.behind).items() if now_s - at_s <= HUNGRY_S} - {name}
    delays = admission.holds_up(settings, state, name)
    return {other: state.rooms[other] for other in asked if delays or not admission.holds_up(settings, state, other)}


def pace_s(mean: Recent) -> float:
    """Seconds per token of a member; 0 without members."""
    return mean.mean_s / mean.mean_tokens if mean.count else 0.0


def slow_rest_s(settings: Settings, state: State, slot: Slot, took_s: float, now_s: float, tokens: int) -> float | None:
    """The rest of a slow holder, from all means and all leases."""
    recent, health = state.recent_s.get(slot.holder, Recent()), state.holders.get(slot.holder, Health())
    keeps_up = None if recent.count + 1 >= TRIP or not (health.on_trial and health.error == SLOW) else 0.0
    there = others(settings, state, slot.holder, now_s)
    usual = {name: mean for name, mean in state.recent_s.items() if mean.count >= TRIP and name in there}
    if not usual or took_s <= 0 or slot.leased_at_s is None:
        return keeps_up
    if max(recent.mean_s, took_s) <= max(SHORT_S, SLOWER * min(mean.mean_s for mean in usual.values())):
        return keeps_up
    running: dict[str, list[float]] = {}
    for group in state.open.values():
        for s in group.slots:
            if s.status == LEASED and s.leased_at_s is not None and s is not slot:
                running.setdefault(s.holder, []).append(now_s - s.leased_at_s)
    its_s = puts._mean_at_least_s(recent, took_s, running.get(slot.holder, []))
    usual_s = median(puts._mean_at_most_s(mean, running.get(name, [])) for name, mean in usual.items())
    if its_s <= max(SHORT_S, SLOWER * usual_s):
        return keeps_up
    newest_s = took_s / max(tokens, recent.mean_tokens)
    running.setdefault(slot.holder, []).append(took_s)
    paces = {name: pace_s(mean) for name, mean in usual.items()}
    got = {
        name: max(1.0, mean.done + len(running.get(name, []))) for name, mean in [*usual.items(), (slot.holder, recent)]
    }
    for newest, others_s in (
        (newest_s, paces.values()),
        (newest_s / got[slot.holder], [pace / got[name] for name, pace in paces.items()]),
    ):
        if recent.count and newest <= SLOWER * median(others_s):
            return keeps_up
    return health.next_slow_rest_s(slot.leased_at_s, max(took_s, its_s))


def stale(settings: Settings, state: State, step: int) -> set[int]:
    """The groups whose oldest token (to mask: whose newest) is too old."""
    edge = min if settings.on_stale == "expire" else max
    found = set()
    for gid, group in state.open.items():
        steps = [run.version.step for slot in group.slots if slot.status == DONE for run in slot.runs]
        if steps and step - edge(steps) > math.ceil(settings.limiter.alpha):
            found.add(gid)
    return found


def assert_equal_answers(cluster: Cluster, request: Any) -> None:
    settings, state, now_s = cluster.core.settings, cluster.core.state, cluster.now
    names = {f"s{i}" for i in range(cluster.world.samplers)}
    if isinstance(request, ev.Lease):
        room, shared = (find(settings, state, request.name, now_s) for find in (with_room, competing))
        index = admission.by_holder(settings, state)
        assert set(index.with_room(request.name, now_s)) == room.keys()
        others_room = index.rooms_of_others(request.name, now_s)
        assert others_room.room == sum(shared.values())
        held = {other: len(state.index.leased_to(other)) for other in shared}
        assert others_room.held == sum(held.values())
        assert others_room.fetching <= sum(not held[other] for other in shared.keys() & state.behind.keys())
        for name in names:
            assert set(admission.others(settings, state, name, now_s)) == others(settings, state, name, now_s)
            leased = [s for g in state.open.values() for s in g.slots if s.status == LEASED and s.holder == name]
            assert sorted(map(id, state.index.leased_to(name))) == sorted(map(id, leased))
    elif isinstance(request, ev.PutMember) and (group := state.open.get(request.group)) is not None:
        slot = group.slots[request.member]
        took_s = puts._took_s(slot, now_s)
        tokens = sum(run.count for run in request.runs)
        expected = slow_rest_s(settings, state, slot, took_s, now_s, tokens)
        assert puts._slow_rest_s(settings, state, slot, took_s, now_s, tokens) == expected
    elif isinstance(request, ev.ClaimStep):
        assert training._stale(settings, state, request.step) == stale(settings, state, request.step)
        assert_equal_groups(state, settings.limiter.batch_groups)


def assert_equal_groups(state: State, batch: int) -> None:
    """Unfinished groups of the head, and the earliest first lease of one."""
    for oldest in (1, batch, len(state.open) + 1):
        lacking = [group for group in [*state.open.values()][:oldest] if not group.ready]
        assert state.index.unready(oldest) == (len(lacking), lacking[0] if lacking else None)
    leased_s = [at_s for group in state.open.values() if not group.ready and (at_s := group.leased_at_s) is not None]
    first = next(iter(state.index.begun.values()), None)
    assert (None if first is None else first.leased_at_s) == min(leased_s, default=None)


@pytest.mark.parametrize("on_stale", ["expire", "mask"])
@pytest.mark.parametrize("world", WORLDS)
def test_the_indexes_answer_as_a_look_at_all_does(world: str, on_stale: str) -> None:
    """In runs with slow, failing and recovering holders; tokens grow old where the order is `ready_first`."""
    rng = random.Random(world + on_stale)
    at = WORLDS[world]
    faults = tuple((i, rng.choice(FAULTS)) for i in range(at.samplers) if rng.random() < 0.25)
    slower = tuple(rng.choice((1.0, 1.0, 1.0, 1.5, 6.0)) for _ in range(at.samplers))
    rules = {"on_stale": on_stale, "order": "ready_first" if world == "aging" else "lease_order"}
    cluster = Cluster(replace(at, steps=8, faults=faults, slower=slower), **rules)
    handle = cluster.core.handle

    def checked(request: ev.Request, now_s: float) -> Any:
        assert_equal_answers(cluster, request)
        return handle(request, now_s)

    cluster.core.handle = checked  # type: ignore[method-assign]
    cluster.play(skipped=1)
    if world != "scarce":
        assert cluster.core.state.holders, "no holder was slow or failed"


def test_a_claim_that_forgives_a_holder_makes_its_room_count() -> None:
    m = Machine(alpha=1.0, batch=1, size=1)
    m.start()
    m.state.failing["A"] = 1.005 * UNRELIABLE
    for key in m.lease(9, name="B"):
        m.put(key)
    with pytest.raises(NoCredit, match="window"):
        m.lease(3, name="A")
    index = admission.by_holder(m.core.settings, m.state)
    assert index.rooms_of_others("B", m.now).room == 0, "it fails too often"
    m.claim(0)
    assert m.state.failing["A"] < UNRELIABLE
    assert index.rooms_of_others("B", m.now).room == 3
    assert index.rooms_of_others("B", m.now + HUNGRY_S + 1.0).room == 0, "it has not asked again"


def compared(rng: random.Random, holders: int, means_s: tuple[float, float]) -> tuple[State, Slot]:
    """A state with the means of some holders, of which some are absent or hold leases, and a lease of holder s0."""
    recent = {
        f"s{i}": Recent(
            rng.uniform(*means_s), rng.choice((TRIP - 1, TRIP, 20)), rng.uniform(1.0, 9.0), rng.choice((1.0, 3.0))
        )
        for i in range(holders)
    }
    seen = {name: rng.choice((100.0, 100.0, 100.0, 0.0)) for name in recent}
    seen = dict(sorted(seen.items(), key=lambda one: one[1]))
    slots = [Slot(LEASED, 1, name, name, leased_at_s=rng.uniform(80.0, 100.0)) for name in recent if rng.random() < 0.5]
    slot = Slot(LEASED, 1, "s0", "s0", leased_at_s=90.0)
    group = Group(0, Task(0, (), "env", "{}", 0, "q"), [slot, *slots])
    return State(open={0: group}, recent_s=recent, seen_s=seen), slot


def test_a_put_is_slow_exactly_if_the_median_of_all_others_says_so() -> None:
    rng, found = random.Random(5), set()
    settings = Settings(AgeLimiter(1.0, 4), group_size=4, steps=10)
    for _ in range(400):
        state, slot = compared(rng, rng.randint(1, 9), (2.0, 8.0))
        took_s, tokens = rng.uniform(3.0, 40.0), rng.randint(1, 9)
        expected = slow_rest_s(settings, state, slot, took_s, 100.0, tokens)
        assert puts._slow_rest_s(settings, state, slot, took_s, 100.0, tokens) == expected
        found.add(expected is None)
    assert found == {True, False}


def test_a_put_does_not_look_at_all_holders_because_a_few_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, looks = random.Random(6), []
    filtered = admission.holder_filter

    def counted(*arguments: Any) -> Any:
        is_other = filtered(*arguments)
        return lambda name: looks.append(name) or is_other(name)

    monkeypatch.setattr(admission, "holder_filter", counted)
    state, slot = compared(rng, 1000, (9.0, 11.0))
    state.recent_s |= {f"quick{i}": Recent(3.0, 20) for i in range(3)}
    state.seen_s |= {f"quick{i}": 100.0 for i in range(3)}
    state = State(open=state.open, recent_s=state.recent_s, seen_s=state.seen_s)
    assert puts._slow_rest_s(Settings(AgeLimiter(1.0, 4), group_size=4, steps=10), state, slot, 10.0, 100.0) is None
    assert 0 < len(looks) < 20
