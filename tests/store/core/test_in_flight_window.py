"""The window in force in the core: held to, logged, recovered, no deadlock; and what it buys, on a virtual clock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jaxroll import wire
from jaxroll.errors import NoCredit, NotReady
from jaxroll.records import Version
from jaxroll.store.core import admission, puts
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import status
from jaxroll.store.core.machine import Core
from jaxroll.store.core.state import State
from tests.harness.store.machine import Machine
from tests.harness.store.virtual_cluster import Cluster, Result, World, compared


def uniform(low_s: float, high_s: float):
    return lambda rng: rng.uniform(low_s, high_s)


def long_tailed(median_s: float, spread: float):
    """Log-normal: with a spread of 0.8 one in a hundred takes six times the median."""
    return lambda rng: rng.lognormvariate(0.0, spread) * median_s


STEP = uniform(0.9, 1.1)


def busy(steps: int, **rules) -> Machine:
    """A run in which the learner works one second and finds every claim ready."""
    m = Machine(alpha=2.0, size=1, steps=steps + 5, window="adaptive", **rules)
    m.start()
    for step in range(steps):
        fill(m, Version(0, step))
        m.train(step)
        m.ask(ev.Durable("L", Version(0, step + 1)))
        m.now += 1.0
    return m


def fill(m: Machine, version: Version) -> None:
    try:
        m.fill(100, version)
    except NoCredit:
        return


def test_the_window_in_force_is_what_leases_are_held_to() -> None:
    m = busy(40)
    report = status(m.core.settings, m.state)
    assert (report["in_flight_window"], report["in_flight_window_max"]) == (2, 6)
    assert report["learner_wait_share"] == 0.0
    fill(m, Version(0, 40))
    assert sum(m.states().get(name, 0) for name in ("READY", "LEASED", "PENDING")) == 2
    with pytest.raises(NoCredit, match="groups outstanding of 2 "):
        m.lease(1, Version(0, 40))


def test_it_is_in_the_log_and_in_a_compacted_state() -> None:
    m = busy(15)
    assert 0 < m.state.pace.groups < 6
    recovered = Core.recovered(m.core.settings, None, m.log, 5.0).state
    assert recovered.pace == m.state.pace
    assert wire.decode(wire.encode(m.state), State).pace == m.state.pace


def test_how_long_the_learner_waited_is_a_fact_of_the_claim() -> None:
    m = Machine(size=1, window="adaptive")
    m.start()
    m.fill(4)
    m.train(0)
    m.now += 3.0  # it works
    m.train(1)
    m.now += 2.0
    for _ in range(3):
        with pytest.raises(Exception, match="not leased yet"):
            m.claim(2)
        m.now += 0.5  # it waits
    m.fill(4, Version(0, 2))
    m.claim(2)
    claims = [event for event in m.log if isinstance(event, ev.Claimed)]
    assert [(c.waited_s, c.worked_s) for c in claims] == [(0.0, 0.0), (0.0, 3.0), (1.5, 2.0)]


def test_what_is_asked_ahead_is_not_waited_for() -> None:
    m = Machine(size=1, alpha=2.0, window="adaptive")
    m.start()
    m.fill(4)
    m.claim(0)
    m.now += 1.0  # it works, and asks meanwhile
    assert m.claim(1, ahead=True).step == 1, "before 0 is published or acknowledged"
    m.now += 1.0
    for _ in range(3):
        with pytest.raises(NotReady):
            m.claim(2, ahead=True)
        m.now += 0.5
    assert m.state.awaited_at_s is None
    with pytest.raises(NotReady):
        m.claim(2)
    m.now += 0.25  # now it has nothing else to do
    m.publish(Version(0, 1))
    m.fill(2, Version(0, 1))
    m.claim(2, ahead=True)
    claims = [event for event in m.log if isinstance(event, ev.Claimed)]
    assert [(c.waited_s, c.worked_s) for c in claims] == [(0.0, 0.0), (0.0, 1.0), (0.25, 2.5)]


def test_no_group_is_left_behind_for_a_claim_that_is_asked_ahead() -> None:
    m = Machine(size=3, alpha=2.0, straggler="shrink", straggler_deadline_s=5.0)
    m.start()
    late = m.lease(6)
    for key in late:
        if key[1] < 2:
            m.put(key)
    m.now += 6.0
    with pytest.raises(NotReady):
        m.claim(0, ahead=True)
    assert m.claim(0).step == 0, "who has nothing else to do takes what is there"


def test_two_claims_at_once_say_nothing_of_how_long_a_step_takes() -> None:
    m = Machine(size=1, alpha=2.0)
    m.start()
    m.fill(6)
    m.claim(0)
    m.now += 0.005
    m.claim(1, ahead=True)
    assert m.state.step_s == 0.0, "else every sampler counts as slow"
    m.now += 1.0
    m.publish(Version(0, 1))
    m.ask(ev.Ack("L", Version(0, 0)))
    m.claim(2, ahead=True)
    assert m.state.step_s == pytest.approx(1.0)


@pytest.mark.parametrize("who", ["store", "learner"])
def test_what_a_restart_makes_unknown_is_not_held_against_the_window(who: str) -> None:
    m = busy(15)
    fill(m, Version(0, 15))
    before = m.state.pace
    m.now += 1000.0
    if who == "store":
        m.restart()
    else:
        m.start(Version(0, 15))
    m.now += 3.0
    m.claim(15)
    assert m.state.pace == before


@pytest.mark.parametrize("rules", [{"publish_every": 2}, {"publish_every": 3}, {"redundant": 1}, {"batch": 5}])
def test_the_smallest_window_is_no_deadlock(rules: dict) -> None:
    batch, redundant = rules.get("batch", 2), rules.get("redundant", 0)
    limits = {"publish_every": rules.get("publish_every", 1), "redundant_groups": redundant}
    world = World(uniform(0.01, 0.02), STEP, samplers=1, slots=100, batch=batch, size=1, steps=150)
    result = Cluster(world, window="adaptive", **limits).play()
    least = limits["publish_every"] * batch + redundant
    assert least <= min(result.windows)


def test_a_full_window_keeps_no_pace() -> None:
    m = Machine(size=1)
    m.start()
    m.fill(4)
    m.train(0)
    assert m.state.pace.groups == 0
    assert status(m.core.settings, m.state)["in_flight_window"] == 4


# --- what it buys: class S, the core itself on a virtual clock (pytest -s prints the table)


def both(name: str, world: World) -> tuple[Result, Result]:
    """The world under the full window and under the adaptive one, which must cost neither throughput nor age."""
    full, adaptive = compared(world)
    print(f"\n{name}: ", end="")
    for result in (full, adaptive):
        print(
            f"{result.steps_per_s:.3f} steps/s, waiting {result.waiting_share:.3f}, age {result.age_mean:.2f}; ", end=""
        )
    assert max(full.age_max, adaptive.age_max) <= world.alpha
    assert (full.wasted, adaptive.wasted) == (0, 0)
    assert adaptive.steps_per_s >= 0.97 * full.steps_per_s
    assert adaptive.age_mean <= full.age_mean + 0.01
    return full, adaptive


@pytest.mark.parametrize("alpha", [2.0, 4.0])
def test_fast_samplers_give_the_same_throughput_at_a_lower_age(alpha: float) -> None:
    full, adaptive = both("fast", World(uniform(0.2, 0.4), STEP, alpha=alpha, steps=150))
    assert full.age_mean > alpha - 0.1, "a greedy window buys age"
    assert adaptive.age_mean < full.age_mean - 0.4


def test_where_overlap_needs_all_of_it_the_window_stays() -> None:
    """Null workloads: α = 1 needs both claims in flight, slow samplers keep the learner waiting at any window."""
    full, adaptive = both("fast, alpha 1", World(uniform(0.2, 0.4), STEP, alpha=1.0, steps=110))
    assert adaptive.age_mean > full.age_mean - 0.1
    _, adaptive = both("slow", World(uniform(0.8, 1.2), STEP, slots=12, steps=100))
    assert set(adaptive.windows) == {24}


def test_long_tails_cost_no_throughput() -> None:
    both("long tail", World(long_tailed(0.2, 0.8), STEP, steps=120))
    both("long tail, slow", World(long_tailed(0.5, 0.8), STEP, slots=12, steps=100))


def test_it_follows_when_the_samplers_become_slow() -> None:
    """Fast for a hundred steps, then four times slower: the window that sufficed no longer does."""
    world = World(uniform(0.2, 0.4), STEP, alpha=4.0, slots=100, steps=260)
    cluster = Cluster(world, window="adaptive")
    slow = replace(world, duration_s=uniform(1.2, 2.0))
    cluster.drawn_s = lambda what, *name: (
        what(random.Random(repr(name)))
        if len(name) == 1
        else (  # type: ignore[method-assign]
            slow if name[0] > 800 else world
        ).duration_s(random.Random(repr(name)))
    )
    result = cluster.play()
    assert max(result.windows[80:100]) < min(result.windows[200:])
    waited = sum(wait for at, wait in cluster.waits[200:])
    assert waited < 0.05 * 60


# --- samplers of unequal speed


def test_a_sampler_too_slow_for_the_window_gets_nothing_while_another_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two takes fifteen times as long; alone it would hold up every claim it has a member of."""
    world = World(uniform(0.2, 0.3), STEP, alpha=1.0, steps=100, slots=40, slower=(15.0, 1.0))
    ruled, spared = Cluster(world), Cluster(world)
    result = ruled.play()
    assert ruled.leased[0] < 0.1 * ruled.leased[1]
    assert status(ruled.core.settings, ruled.core.state)["slow"] == ["s0"]
    monkeypatch.setattr(admission, "is_slow", lambda *_: False)
    monkeypatch.setattr(puts, "_slow_rest_s", lambda *_: None)
    assert result.steps_per_s > 1.2 * spared.play().steps_per_s
    assert spared.leased[0] > 0.1 * spared.leased[1]


def test_a_slow_sampler_works_when_it_is_alone_or_everybody_is() -> None:
    alone = Cluster(World(uniform(3.0, 4.0), STEP, alpha=1.0, steps=30, samplers=1))
    alone.play(skipped=5)
    both_slow = Cluster(World(uniform(3.0, 4.0), STEP, alpha=1.0, steps=30, slots=16))
    both_slow.play(skipped=5)
    assert min(both_slow.leased) > 0.3 * max(both_slow.leased)


def test_hunger_ends_with_a_lease_with_other_reasons_and_with_time() -> None:
    m = Machine(alpha=1.0, size=1)
    m.start()
    m.fill(4)
    m.train(0)
    m.now += 1.0
    m.train(1)  # a step takes one second
    (slow,) = m.lease(1, Version(0, 2), name="slow")
    m.now += 9.0
    m.put(slow, Version(0, 2))
    m.fill(3, Version(0, 2))
    with pytest.raises(NoCredit, match="window"):
        m.lease(1, Version(0, 2), name="fast")
    m.train(2)
    with pytest.raises(NoCredit, match="slow: slow holds claims up, and fast has room"):
        m.lease(1, Version(0, 3), name="slow")
    assert m.lease(1, Version(0, 3), name="fast")
    assert m.lease(1, Version(0, 3), name="slow"), "no other sampler asks any more"
    with pytest.raises(NoCredit, match="window"):
        m.lease(1, Version(0, 3), name="fast")
    m.ask(ev.Release(((8, 0, 1),)))
    with pytest.raises(NoCredit, match="slow"):
        m.lease(1, Version(0, 3), name="slow")
    m.now += 11.0
    assert m.lease(1, Version(0, 3), name="slow"), "a sampler that does not ask again does not count"
