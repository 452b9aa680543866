"""One bad holder among healthy ones: no prompt dies of it, and the run is about as fast as without it. Virtual clock.

The core knows holders only: a sampler, an actor, and a sampler whose scoring worker is broken look alike to it. They
differ in how soon members fail, how many of them fail, and with which kind of failure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from statistics import fmean, median

import pytest

from jaxroll.errors import Closed, Fenced, NoCredit, NotReady
from jaxroll.policy.limiter import ALONE_S, LONGEST_S, SLOWER, TRIAL_FROM, TRIP
from jaxroll.records import Version, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core import leases
from jaxroll.store.core.admission import status, waits
from jaxroll.store.server.server import next_deadline_s
from tests.harness.store.machine import V0, Machine
from tests.harness.store.virtual_cluster import Cluster, Fault, Result, World


def uniform(low_s: float, high_s: float):
    return lambda rng: rng.uniform(low_s, high_s)


def half_ends_at_once(rng) -> float:
    """Every other answer is too long and ends without a step of its environment; the rest wait for a judge."""
    return 0.01 if rng.random() < 0.5 else rng.uniform(0.75, 1.25)


SEEDS = range(5)
WORLDS = {
    "the learner limits it": World(uniform(1.0, 4.0), uniform(0.9, 1.1), slots=64, steps=150),
    "the samplers limit it": World(uniform(2.0, 8.0), uniform(0.1, 0.2), slots=16, steps=150),
    "half of the members end at once": World(half_ends_at_once, uniform(0.9, 1.1), slots=64, steps=100),
}
NEIGHBOURS = {
    "a sampler that fails at once": {"fault": Fault()},
    "a sampler that fails late": {"fault": Fault(after=1.0)},
    "a sampler that fails very late": {"fault": Fault(after=5.0)},
    "a sampler whose environment is broken": {"fault": Fault(kind="DATA")},
    "a sampler whose environment is broken, and fails late": {"fault": Fault(after=1.0, kind="DATA")},
    "a sampler that answers three times slower": {"slower": 3.0},
    "a sampler that answers ten times slower": {"slower": 10.0},
    "a sampler that fails for a while": {"fault": Fault(from_s=20.0, until_s=60.0)},
    "an actor, a third of whose members are played by a broken sampler": {"fault": Fault(share=0.33)},
    "a sampler with one broken scoring worker of two": {"fault": Fault(after=1.0, share=0.5)},
    "a sampler whose environment fails half of the time": {"fault": Fault(after=1.0, share=0.5, kind="DATA")},
}


@cache
def alone(world: str, healthy: int, seed: int) -> Result:
    return Cluster(replace(WORLDS[world], samplers=healthy, seed=seed)).play()


def beside(world: str, healthy: int, seed: int, fault: Fault | None = None, slower: float = 1.0) -> Cluster:
    faults = () if fault is None else ((healthy, fault),)
    speeds = (1.0,) * healthy + (slower,)
    return Cluster(replace(WORLDS[world], samplers=healthy + 1, seed=seed, faults=faults, slower=speeds))


def rates_beside(neighbour: str, world: str, healthy: int, seeds: Iterable[int]) -> list[float]:
    """Rates relative to the rate without the bad holder; no group may die."""
    rates = []
    for seed in seeds:
        result, without = beside(world, healthy, seed, **NEIGHBOURS[neighbour]).play(), alone(world, healthy, seed)
        rates.append(round(result.steps_per_s / without.steps_per_s, 3))
        assert result.dead == 0, f"seed {seed}: {result.dead} groups died of {result.failed} failures"
        assert result.age_max <= 2
    return rates


@pytest.mark.parametrize("world", ["the samplers limit it", "half of the members end at once"])
@pytest.mark.parametrize("neighbour", ["a sampler that answers ten times slower"])
def test_a_bad_holder_costs_little(neighbour: str, world: str) -> None:
    """The soak test below has the whole table."""
    rates = rates_beside(neighbour, world, 1, [0])
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
    print(f"{neighbour}, {world}, {healthy} healthy: {rates}")
    assert min(rates) >= 0.9, f"{neighbour}, {healthy} healthy: of the rate without it {rates}"


BROKEN = (
    "a sampler that fails at once",
    "a sampler that fails late",
    "a sampler that fails very late",
    "a sampler whose environment is broken",
    "a sampler whose environment is broken, and fails late",
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.soak)])
def test_no_prompt_dies_while_only_broken_holders_are_ready(seeds: Iterable[int]) -> None:
    """One or two broken ones and up to three healthy ones, which arrive up to five minutes later, in any order."""
    rates = {seed: rate_after_broken_ones(random.Random(seed), seed) for seed in seeds}
    print(f"seeds {min(rates)} to {max(rates)}: {min(rates.values())} at least, median {median(rates.values())}")
    assert min(rates.values()) >= 0.9, rates


def rate_after_broken_ones(rng: random.Random, seed: int) -> float:
    """Rate relative to the rate of the healthy ones alone, once they have arrived; no group may die."""
    healthy, bad = rng.randint(1, 3), rng.randint(1, 2)
    kinds = ["good"] * healthy + ["bad"] * bad
    rng.shuffle(kinds)
    later_s = rng.choice((1.0, 10.0, 60.0, 300.0))
    ready_s = tuple(rng.uniform(0.0, 2.0) + (later_s if kind == "good" else 0.0) for kind in kinds)
    faults = tuple((i, NEIGHBOURS[rng.choice(BROKEN)]["fault"]) for i, kind in enumerate(kinds) if kind == "bad")
    world = replace(WORLDS["the samplers limit it"], steps=100, seed=seed)
    mixed = replace(world, samplers=len(kinds), faults=faults, ready_s=ready_s)
    result = Cluster(mixed, holders=len(kinds)).play(skipped=20)
    assert result.dead == 0, f"seed {seed}: {result.dead} groups died of {result.failed} failures: {mixed}"
    return round(result.steps_per_s / Cluster(replace(world, samplers=healthy)).play(skipped=20).steps_per_s, 3)


REDRAWN = (
    "a sampler that answers three times slower",
    "a sampler that fails late",
    "a sampler that fails for a while",
    "a sampler with one broken scoring worker of two",
    "a sampler whose environment fails half of the time",
)


@pytest.mark.soak
@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize("neighbour", REDRAWN)
def test_ends_of_slow_leases_shorten_the_trained_answers_by_less_than_a_hundredth(
    neighbour: str, sigma: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A member is drawn again after its lease ended as too slow, which replaces long answers by average ones."""
    length_s = lambda rng: rng.lognormvariate(math.log(4.0) - sigma**2 / 2, sigma)  # noqa: E731  # 4 s on average
    how, real, ended, ratios = NEIGHBOURS[neighbour], leases._too_slow, [], []
    faults, speeds = (((1, how["fault"]),) if "fault" in how else ()), (1.0, how.get("slower", 1.0))
    world = World(length_s, uniform(0.1, 0.2), 2, slots=16, steps=150, faults=faults, slower=speeds, redraws=True)
    for seed in range(3):
        means_s: list[float] = []
        for rule in (lambda *at: ended.extend(found := real(*at)) or found, lambda *_: []):
            monkeypatch.setattr(leases, "_too_slow", rule)
            means_s.append(fmean(Cluster(replace(world, seed=seed)).play(skipped=20).lengths_s))
        ratios.append(means_s[0] / means_s[1])
    with capsys.disabled():
        print(f"\n{neighbour}, sigma {sigma}: {ratios} with {len(ended)} ends")
    assert min(ratios) > 0.99
    assert ended or neighbour != REDRAWN[0], "the rule was not tried"


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
    m = Machine(**({"alpha": 4.0, "batch": 4, "size": 2, "steps": 50, "lease_s": 1000.0} | rules))
    m.start()
    for name in names:
        m.ask(ev.Arrive(name, f"{name}-1"))
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


def test_a_failed_member_goes_back_to_the_only_sampler() -> None:
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
    assert report["backoff"]["A"]["error"] == "it broke"
    assert "it broke" in waits(m.core.settings, m.state, now_s=m.now)["A"]
    assert m.lease(4, name="B"), "the others work on"
    m.now += 1.1
    assert len(m.lease(4, name="A")) == 4, "after the first rest it has all of its room"


def twice_rested(**rules) -> Machine:
    m = failing(**rules)
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


def slow_trial(share: float, *, awaited: bool = True, others: int = TRIP) -> tuple[Machine, ev.Key]:
    """A trial of A that has taken `share` of the longest time, and its member, after `others` members of B of 1 s each.

    `awaited`: the learner waits for it.
    """
    m = twice_rested(batch=8)
    for i in range(others):
        (key,) = m.lease(1, name="B")
        m.now += 1.0
        m.put(key, digest=f"b{i}")
    (trial,) = m.lease(4, name="A")
    if awaited:
        with pytest.raises(NotReady):
            m.claim(0)
    m.now += share * SLOWER * 1.0
    m.ask(ev.Tick())
    return m, trial


def test_a_trial_that_the_learner_waits_for_ends_when_it_takes_much_longer_than_the_members_of_others() -> None:
    m, (group, member, attempt) = slow_trial(1.01)
    assert m.state.holders["A"].rest_s == pytest.approx(1.01 * SLOWER * 2**TRIAL_FROM)
    with pytest.raises(NoCredit, match=r"resting: A .*it broke"):
        m.lease(1, name="A")
    assert m.ask(ev.Renew("A-1", ((group, member, attempt),))) == ((group, member, attempt),), "it is lost"
    assert (group, member, attempt + 1) in m.lease(20, name="B")
    with pytest.raises(Fenced):
        m.fail((group, member, attempt), "INFRA", digest="late")
    m.restart()
    assert m.state.holders["A"].rests == TRIAL_FROM + 1


def test_members_after_the_first_rest_end_likewise_and_count_as_failures() -> None:
    m = failing(batch=8)
    for key in m.lease(TRIP, name="A"):
        m.fail(key, "INFRA")
    for i in range(TRIP):
        (key,) = m.lease(1, name="B")
        m.now += 1.0
        m.put(key, digest=f"b{i}")
    wave = m.lease(TRIP + 1, name="A")
    with pytest.raises(NotReady):
        m.claim(0)
    m.now += 1.01 * SLOWER
    m.ask(ev.Tick())
    assert m.ask(ev.Renew("A-1", tuple(wave))) == tuple(wave), "the last one ends without prolonging the rest"
    health = m.state.holders["A"]
    assert (health.rests, health.failures) == (2, 0) and health.rest_s == pytest.approx(1.01 * SLOWER * 2)


def test_a_put_after_the_end_of_its_trial_counts_while_the_member_is_free() -> None:
    m, key = slow_trial(1.01)
    assert m.ask(ev.Renew("A-1", (key,))) == (key,)
    assert m.put(key) == "OK"


@pytest.mark.parametrize(
    ("share", "how"),
    [(0.99, {}), (9.0, {"awaited": False}), (9.0, {"others": TRIP - 1})],
    ids=["it is quick enough", "the learner does not wait", "the usual time is not known"],
)
def test_other_trials_go_on(share: float, how: dict) -> None:
    m, key = slow_trial(share, **how)
    assert m.ask(ev.Renew("A-1", (key,))) == ()
    assert m.state.holders["A"].rests == TRIAL_FROM


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
        m.ask(
            ev.Renew(
                "B-1",
                tuple(
                    (g, n, s.attempt)
                    for g, group in m.state.open.items()
                    for n, s in enumerate(group.slots)
                    if s.holder == "B"
                ),
            )
        )
    assert rests[:4] == [4.0, 8.0, 16.0, 32.0] and rests[-1] == LONGEST_S


def test_a_holder_that_comes_back_as_another_process_need_not_wait_but_is_on_trial() -> None:
    m = twice_rested()
    (key,) = m.lease(1, name="A")
    m.fail(key, "INFRA")
    with pytest.raises(NoCredit, match="resting"):
        m.lease(4, name="A")
    m.ask(ev.Arrive("A", "A-2"))
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
    m.ask(ev.Renew("B-1", ()))
    m.lease(1, name="B")
    m.put(keys[0], Version(0, 0))
    with pytest.raises(NoCredit, match=r"resting: A .*longer"):
        m.lease(4, name="A")


@pytest.mark.parametrize(
    ("before", "took_s", "tokens", "rests"),
    [(100, 1.0, 10, False), (10, 1.0, 10, False), (100, 60.0, 10, True), (100, 60.0, 600, False)],
    ids=["the longest of a batch before", "quick again", "slow now", "long now"],
)
def test_a_holder_of_longer_members_that_are_as_quick_a_token_is_not_slow(
    before: int, took_s: float, tokens: int, rests: bool
) -> None:
    """Members that begin together end in the order of length, so that A ends the longest while B ends the shortest."""
    m = failing(batch=16)

    def work(name: str, seconds: float, count: int, members: int) -> None:
        keys = m.lease(members, name=name)
        m.now += seconds
        for group, member, attempt in keys:
            m.ask(ev.PutMember(group, member, attempt, "d", 100, (VersionRun(V0, count),)))

    work("A", 10.0, before, TRIP)
    work("B", 1.0, 10, 2 * TRIP)
    work("A", took_s, tokens, 1)
    assert ("A" in m.state.holders) == rests


def test_members_of_less_than_a_second_are_never_slow() -> None:
    """Otherwise one holder that answers within milliseconds (its process may be gone) would make all others rest."""
    m = failing()
    for _ in range(5):
        for key in m.lease(2, name="B"):
            m.now += 0.001
            m.put(key, V0)
    keys = m.lease(2, name="A")
    m.now += 0.5
    m.ask(ev.Renew("B-1", ()))
    m.lease(1, name="B")
    m.put(keys[0], Version(0, 0))
    assert m.lease(4, name="A")


def test_a_failed_member_is_leased_elsewhere_at_once_and_rests_from_its_second_failure_on() -> None:
    """The back-off is for an outage that all holders see."""
    m = failing(("A", "B", "C"))
    for name in "BC":
        m.lease(1, name=name)
    (key,) = m.lease(1, name="A")
    m.fail(key, "INFRA")
    assert m.lease(1, name="B")[0] == (key[0], key[1], 2)
    m.fail((key[0], key[1], 2), "INFRA", digest="f2")
    assert (key[0], key[1], 3) not in m.lease(1, name="C")
    m.now += 1.1
    assert m.lease(1, name="C")[0] == (key[0], key[1], 3)


@pytest.mark.parametrize("kind", ["DATA", "INFRA"])
def test_failures_of_a_holder_without_success_use_up_no_retries_while_an_expected_one_is_missing(kind: str) -> None:
    m = failing(("A",), holders=2, data_retries=0, infra_retries=0)
    for attempt in range(1, 6):
        (key,) = m.lease(1, name="A")
        assert key == (0, 0, attempt)
        m.fail(key, kind, digest=f"{attempt}")
        m.now += LONGEST_S
    assert m.states() == {"PENDING": 1}


@pytest.mark.parametrize("holders", [2, 1], ids=["it has succeeded", "none is missing"])
def test_other_failures_use_up_retries(holders: int) -> None:
    m = failing(("A",), holders=holders, data_retries=1)
    if holders == 2:
        (key,) = m.lease(1, name="A")
        m.now += 1.0
        m.put(key)
    (group, member, _) = m.lease(1, name="A")[0]
    for attempt in (1, 2):
        m.fail((group, member, attempt), "DATA", digest=f"{attempt}")
        if attempt == 1:
            assert m.lease(1, name="A") == [(group, member, 2)]
    assert m.states().get("DEAD") == 1


def broken_in_part(kind: str = "INFRA", failures: int = 3) -> Machine:
    """A holder of whose last members some failed, none in a row, and an idle one."""
    m = failing(infra_retries=100, data_retries=100)
    for i in range(failures):
        fails, works = m.lease(2, name="A")
        m.put(works)
        m.fail(fails, kind)
        m.now += 1.0
        m.put(m.lease(1, name="B")[0], digest=f"d{i}")
    return m


def idle(m: Machine, name: str = "B") -> None:
    """It takes what there is, and asks for more."""
    m.lease(1000, name=name)
    with pytest.raises(NoCredit, match="window"):
        m.lease(1, name=name)


@pytest.mark.parametrize("kind", ["INFRA", "DATA"])
def test_a_holder_that_fails_too_often_gets_no_work_while_a_reliable_one_is_idle(kind: str) -> None:
    m = broken_in_part(kind)
    assert m.lease(1, name="A"), "no other holder is idle"
    idle(m)
    with pytest.raises(NoCredit, match=r"unreliable: .* of A failed, and B has room"):
        m.lease(4, name="A")
    assert status(m.core.settings, m.state)["unreliable"] == {"A": pytest.approx(0.13, abs=0.03)}
    m.now += 2000.0
    with pytest.raises(NoCredit, match="window"):  # B is gone, so it is the window alone
        m.lease(4, name="A")


def test_an_unreliable_holder_gets_work_when_the_idle_one_leaves() -> None:
    m = broken_in_part()
    m.lease(2, name="A")
    idle(m)
    with pytest.raises(NoCredit, match="unreliable"):
        m.lease(4, name="A")
    m.ask(ev.Leave("B", "B-1"))
    assert m.lease(4, name="A")


def test_a_new_process_under_the_name_of_an_unreliable_holder_gets_work() -> None:
    m = broken_in_part()
    m.lease(2, name="A")
    idle(m)
    m.ask(ev.Arrive("A", "A-2"))
    assert m.lease(1, name="A", session="A-2")


def test_data_failures_of_one_holder_alone_make_it_rest() -> None:
    m = failing(data_retries=100)
    m.put(m.lease(1, name="B")[0])
    for i in range(30):
        try:
            for key in m.lease(1, name="A"):
                m.fail(key, "DATA", digest=f"f{i}")
        except NoCredit as refusal:
            assert "resting: A" in str(refusal)
            return
        m.now += 0.1
        m.put(m.lease(1, name="B")[0], digest=f"d{i}")
    pytest.fail("A never rests")


def test_an_environment_that_fails_everywhere_rests_no_sampler_and_ends_the_run() -> None:
    m = failing(data_retries=1, dead_groups=20)
    for i in range(400):
        try:
            for name in "AB":
                for key in m.lease(2, name=name):
                    m.fail(key, "DATA", digest=f"{name}{i}")
        except Closed as refusal:
            assert "store.dead_limit" in str(refusal)
            break
        m.now += 0.1
    else:
        pytest.fail("the run goes on")
    assert not m.state.holders


def test_a_rewind_makes_no_healthy_holder_rest() -> None:
    """Members leased before the rewind are fenced, which is not a failure of their holder."""
    m = failing()
    m.fill(8)
    m.train(0)
    m.lease(1, name="B", version=Version(0, 1))
    keys = m.lease(8, name="A", version=Version(0, 1))
    assert m.start(Version(0, 0), session="L2") == Version(1, 0)
    for key in keys:
        for put in (lambda key=key: m.put(key, Version(0, 1)), lambda key=key: m.fail(key, "INFRA")):
            with pytest.raises(Fenced):
                put()
    assert not m.state.holders and not m.state.failing
    assert len(m.lease(8, name="A", version=Version(1, 0))) == 8


def test_the_next_deadline_is_not_a_rest_that_is_over() -> None:
    """Otherwise the store would tick without a pause until a sampler leases the member."""
    m = failing(("A",))
    (key,) = m.lease(1, name="A")
    m.fail(key, "INFRA")
    assert next_deadline_s(m.state, m.now) == m.now + 0.5
    assert next_deadline_s(m.state, m.now + 0.6) is None
