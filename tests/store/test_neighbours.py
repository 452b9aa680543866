"""One bad holder among healthy ones: no prompt dies of it, and the run is about as fast as without it. Virtual clock.

The core knows holders only: a sampler, an actor, and a sampler whose scoring worker is broken look alike to it. What
differs is how soon members break, how many of them, and with which kind of failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from jaxroll.errors import Closed, NoCredit
from jaxroll.records import Version
from jaxroll.schedule.health import ALONE_S, LONGEST_S, TRIP
from jaxroll.store import requests as rq
from jaxroll.store.waits import status, waits
from tests.store.machine import V0, Machine
from tests.store.virtual_cluster import Cluster, Fault, Result, World


def uniform(low_s: float, high_s: float):
    return lambda rng: rng.uniform(low_s, high_s)


SEEDS = range(5)
WORLDS = {
    "the learner limits it": World(uniform(1.0, 4.0), uniform(0.9, 1.1), slots=64, steps=150),
    "the samplers limit it": World(uniform(2.0, 8.0), uniform(0.1, 0.2), slots=16, steps=150),
}
NEIGHBOURS = {
    "a sampler that fails at once": {"fault": Fault()},
    "a sampler that fails late": {"fault": Fault(after=1.0)},
    "a sampler that answers three times slower": {"slower": 3.0},
    "a sampler that answers ten times slower": {"slower": 10.0},
    "a sampler that fails for a while": {"fault": Fault(from_s=20.0, until_s=60.0)},
}
PARTLY = {
    "an actor, a third of whose members are played by a broken sampler": Fault(share=0.33),
    "a sampler with one broken scoring worker of two": Fault(after=1.0, share=0.5),
}


@cache
def alone(world: str, healthy: int, seed: int) -> Result:
    return Cluster(replace(WORLDS[world], samplers=healthy, seed=seed)).play()


def beside(world: str, healthy: int, seed: int, fault: Fault | None = None, slower: float = 1.0) -> Cluster:
    faults = () if fault is None else ((healthy, fault),)
    speeds = (1.0,) * healthy + (slower,)
    return Cluster(replace(WORLDS[world], samplers=healthy + 1, seed=seed, faults=faults, slower=speeds))


def rates_beside(neighbour: str, world: str, healthy: int, seeds: Iterable[int]) -> list[float]:
    """Of the rate without the neighbour; no group may die."""
    rates = []
    for seed in seeds:
        result, without = beside(world, healthy, seed, **NEIGHBOURS[neighbour]).play(), alone(world, healthy, seed)
        rates.append(round(result.steps_per_s / without.steps_per_s, 3))
        assert result.dead == 0, f"seed {seed}: {result.dead} groups died of {result.failed} failures"
        assert result.age_max <= 2
    return rates


@pytest.mark.parametrize("neighbour", ["a sampler that fails at once", "a sampler that answers ten times slower"])
def test_a_bad_holder_costs_little(neighbour: str) -> None:
    """The soak test below has the whole table."""
    rates = rates_beside(neighbour, "the samplers limit it", 1, [0])
    assert rates[0] >= 0.9, rates


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("healthy", [1, 3])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_prompts_do_not_die_of_a_bad_holder_and_the_run_is_as_fast_as_without_it(
    neighbour: str, world: str, healthy: int
) -> None:
    rates = rates_beside(neighbour, world, healthy, SEEDS)
    assert sum(rates) / len(rates) >= 0.9, f"{neighbour}, {healthy} healthy: of the rate without it {rates}"


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("healthy", [1, 3])
@pytest.mark.parametrize("neighbour", PARTLY)
def test_prompts_do_not_die_of_a_holder_that_is_broken_in_part(neighbour: str, healthy: int) -> None:
    """It is not at rest, for much of its work is good; so the run may be slower than without it."""
    for seed in SEEDS:
        result = beside("the samplers limit it", healthy, seed, PARTLY[neighbour]).play()
        assert result.dead == 0, f"seed {seed}: {result.dead} groups died of {result.failed} failures"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_holder_that_recovers_works_again(seed: int) -> None:
    """It fails for 40 s; of what is leased in the second half of the run it gets its share."""
    world = replace(WORLDS["the samplers limit it"], steps=100)
    cluster = Cluster(replace(world, samplers=2, seed=seed, faults=((1, Fault(from_s=5.0, until_s=45.0)),)))
    leases: list[tuple[float, int]] = []
    original = cluster.lease

    def noted(sampler: int) -> None:
        before = cluster.leased[sampler]
        original(sampler)
        if sampler == 1:
            leases.append((cluster.now, cluster.leased[1] - before))

    cluster.lease = noted  # type: ignore[method-assign]
    result = cluster.play()
    late = sum(count for at, count in leases if at > result.seconds / 2)
    assert late > 0.3 * sum(cluster.leased) / 2, f"{late} of {sum(cluster.leased)} members in the second half"
    assert result.dead == 0


# --- the rule, request by request


def failing(names: tuple[str, ...] = ("A", "B"), **rules) -> Machine:
    m = Machine(alpha=4.0, batch=4, size=2, steps=50, lease_s=1000.0, **rules)
    m.start()
    for name in names:
        m.ask(rq.Arrive(name, f"{name}-1"))
    return m


def test_a_failed_member_goes_to_another_holder_while_one_is_there() -> None:
    m = failing()
    (key,) = m.lease(1, name="A")
    (other,) = m.lease(1, name="B")
    m.fail(key, "INFRA")
    m.now += 1.0
    assert (key[0], key[1], 2) not in m.lease(1, name="A"), "it failed it"
    assert m.lease(1, name="B") == [(key[0], key[1], 2)]
    m.put(other)


def test_a_failed_member_goes_back_when_nobody_else_is_there() -> None:
    m = failing(("A",))
    (key,) = m.lease(1, name="A")
    m.fail(key, "INFRA")
    m.now += 1.0
    assert m.lease(1, name="A") == [(key[0], key[1], 2)]


def test_a_failed_member_goes_to_anybody_once_all_have_failed_it() -> None:
    m = failing()
    m.lease(1, name="B")
    (key,) = m.lease(1, name="A")
    for attempt, name in enumerate("ABA", start=1):
        if attempt > 1:
            assert m.lease(1, name=name)[0] == (key[0], key[1], attempt)
        m.fail((key[0], key[1], attempt), "INFRA")
        m.now += 5.0


def test_a_holder_whose_members_keep_failing_rests_and_is_reported() -> None:
    m = failing()
    m.lease(1, name="B")
    for key in m.lease(TRIP, name="A"):
        m.fail(key, "INFRA")
    with pytest.raises(NoCredit, match=r"resting: A .*it broke"):
        m.lease(4, name="A")
    report = status(m.core.settings, m.state, now_s=m.now)
    assert report["resting"]["A"]["error"] == "it broke"
    assert "it broke" in waits(m.core.settings, m.state, now_s=m.now)["A"]
    assert m.lease(4, name="B"), "the others work on"
    m.now += 1.1
    assert len(m.lease(4, name="A")) == 4, "after the first rest it has all of its room"


def twice_rested() -> Machine:
    m = failing()
    m.lease(1, name="B")
    for _ in range(2):
        for key in m.lease(TRIP, name="A"):
            m.fail(key, "INFRA")
        m.now += 2.1
    return m


def test_after_its_second_rest_a_holder_is_tried_with_one_member_and_a_put_restores_it() -> None:
    m = twice_rested()
    (trial,) = m.lease(4, name="A")
    with pytest.raises(NoCredit, match="on trial"):
        m.lease(4, name="A")
    m.put(trial)
    assert len(m.lease(4, name="A")) == 4


def test_failed_trials_double_the_rest() -> None:
    m = twice_rested()
    rests = []
    for _ in range(12):
        m.lease(1, name="B", request="seen")
        (key,) = m.lease(1, name="A")
        m.fail(key, "INFRA", digest=f"{len(rests)}")
        health = m.state.holders["A"]
        rests.append(health.rest_s)
        m.now += health.rest_s + 0.1
        m.ask(rq.Renew("B-1", tuple((g, n, s.attempt) for g, group in m.state.open.items()
                                    for n, s in enumerate(group.slots) if s.holder == "B")))  # fmt: skip
    assert rests[:4] == [4.0, 8.0, 16.0, 32.0] and rests[-1] == LONGEST_S


def test_a_holder_that_comes_back_as_another_process_need_not_wait_but_is_on_trial() -> None:
    m = twice_rested()
    (key,) = m.lease(1, name="A")
    m.fail(key, "INFRA")
    with pytest.raises(NoCredit, match="resting"):
        m.lease(4, name="A")
    m.ask(rq.Arrive("A", "A-2"))
    assert len(m.lease(4, name="A", session="A-2")) == 1


def test_a_lone_holder_rests_no_longer_than_others_would_notice_and_goes_on() -> None:
    m = failing(("A",), infra_retries=100)
    for _ in range(60):
        try:
            for key in m.lease(4, name="A"):
                m.fail(key, "INFRA")
        except NoCredit:
            m.now += ALONE_S / 10
    assert "A" in m.state.holders
    m.now += ALONE_S + 0.1
    (trial,) = m.lease(4, name="A")
    m.put(trial)
    m.now += ALONE_S + 0.1
    assert m.lease(4, name="A"), "it recovered, and the run goes on"
    assert m.states().get("DEAD", 0) == 0


def test_a_lone_holder_that_never_recovers_is_named_as_what_is_waited_for() -> None:
    m = failing(("A",))
    for _ in range(400):
        try:
            for key in m.lease(4, name="A"):
                m.fail(key, "INFRA")
        except (NoCredit, Closed):
            m.now += 1.0
    assert "it broke" in waits(m.core.settings, m.state, now_s=m.now)["A"]


def test_rests_are_in_the_log() -> None:
    m = twice_rested()
    before = {name: (health.rests, health.rest_s, health.error) for name, health in m.state.holders.items()}
    m.restart()
    assert {name: (h.rests, h.rest_s, h.error) for name, h in m.state.holders.items()} == before
    assert len(m.lease(4, name="A")) == 1, "a store that starts again lets it be tried at once"


def test_the_slow_one_is_not_waited_for_while_a_quick_one_is_there() -> None:
    m = failing()
    for _ in range(5):
        for key in m.lease(2, name="B"):
            m.now += 1.0
            m.put(key, V0)
    keys = m.lease(2, name="A")
    m.now += 60.0
    m.ask(rq.Renew("B-1", ()))
    m.lease(1, name="B")
    m.put(keys[0], Version(0, 0))
    with pytest.raises(NoCredit, match=r"resting: A .*longer"):
        m.lease(4, name="A")
