"""One bad sampler, actor or scoring worker among healthy ones, on the real loops in virtual time.

No prompt dies of it, it is rested and reported, and the run is at most 10 % slower than with the healthy ones alone.
tests/store/core/test_bad_samplers has more kinds of faults on the store's core.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from jaxroll.config import Config
from jaxroll.policy.limiter import SLOW as SLOW_REASON
from jaxroll.sim.network import run
from tests.harness.store.builders import configured
from tests.harness.virtual_neighbours import (
    AT_ONCE,
    HEALTHY,
    LATE,
    SLOW,
    NeighbourRun,
    Result,
    prompts_of_neighbours,
)

STEPS, SKIPPED, AIM = 60, 10, 0.9
LEARNER_LIMITS, SAMPLERS_LIMIT = "the learner limits it", "the samplers limit it"
WORLDS = {LEARNER_LIMITS: 2.0, SAMPLERS_LIMIT: 0.1}  # seconds of a step
FAULTS = [AT_ONCE, LATE, SLOW]
SHORT = [(role, SAMPLERS_LIMIT, fault) for role, fault in (("sampler", AT_ONCE), ("sampler", SLOW), ("actor", LATE))]


def neighbours(samplers: int, actors: int = 0) -> Config:
    """4 groups of 4 a step; 24 members at a time in each sampler or actor."""
    config = configured(steps=STEPS, groups_per_step=4, group_size=4, alpha=2.0, straggler="wait", lease_s=30.0)
    holders = max(samplers, actors)
    return replace(
        config,
        sft=replace(config.sft, steps=0),
        evaluator=replace(config.evaluator, every=0),
        learner=replace(config.learner, checkpoint_every=20),
        placement=replace(config.placement, actors=actors),
        sampler=replace(config.sampler, count=samplers, slots=64, concurrent_episodes=24 * (holders if actors else 1)),
    )


def played(run_dir: Path, role: str, faults: tuple[str, ...], train_s: float) -> tuple[Result, dict]:
    """A run with a sampler or an actor for each of `faults`; its result and the reasons of those that rest."""
    actors = len(faults) if role == "actor" else 0

    async def job() -> tuple[Result, dict]:
        async with NeighbourRun(neighbours(1 if actors else len(faults), actors), run_dir) as at:
            for index, fault in enumerate((HEALTHY,) if actors else faults):
                at.sampler_with(index, fault)
            for index, fault in enumerate(faults if actors else ()):
                at.actor(index, fault)
            result = await at.result(train_s, SKIPPED)
            return result, at.store.status()["backoff"]

    with pytest.MonkeyPatch.context() as patch:
        prompts_of_neighbours(patch)
        return run(job())


@cache
def alone(run_dir: Path, role: str, healthy: int, train_s: float) -> float:
    return played(run_dir, role, (HEALTHY,) * healthy, train_s)[0].steps_per_s


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("neighbours")


@pytest.mark.parametrize("healthy", [1, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("role", "world", "fault"),
    [
        pytest.param(role, world, fault, marks=[] if (role, world, fault) in SHORT else pytest.mark.soak)
        for role in ("sampler", "actor")
        for world in WORLDS
        for fault in FAULTS
    ],
)
def test_a_bad_holder_rests_and_costs_less_than_a_tenth(
    folder: Path, role: str, world: str, fault: str, healthy: int
) -> None:
    found, reported = played(folder, role, (HEALTHY,) * healthy + (fault,), WORLDS[world])
    bad = f"{role}-{healthy}"
    assert found.dead == found.residual == 0, "no prompt died, and none is lost"
    assert found.rested == {bad}, "it rests, and no healthy one does"
    if bad in reported:
        reason = {AT_ONCE: "a library is missing", LATE: "cannot be reached", SLOW: SLOW_REASON}[fault]
        assert reason in reported[bad]["error"]
    rate = found.steps_per_s / alone(folder, role, healthy, WORLDS[world])
    print(f"{role}, {world}, {fault}, {healthy} healthy: {rate:.3f}")
    assert rate >= AIM, f"{rate:.3f} of the rate of the healthy alone"


def test_an_actor_that_hears_nothing_for_longer_than_a_lease_goes_on_afterwards(folder: Path) -> None:
    """Cut off from store and sampler, as a stopped process is: another actor takes over its members meanwhile."""

    async def job() -> tuple[Result, int, set[str]]:
        async with NeighbourRun(config := neighbours(1, 2), folder) as at:
            at.sampler_with(0)
            stopped, _ = at.actor(0), at.actor(1)
            training, state = at.learner(2.0), at.store.keeper.state
            await asyncio.sleep(20.0)
            held = {gid for gid, group in state.open.items() if any(s.holder == "actor-0" for s in group.slots)}
            before = state.acked
            at.network.cut("actor-0")
            await asyncio.sleep(1.5 * config.store.lease_s)
            during = state.acked - before
            assert held and not held & set(state.open), "the groups of the stopped one are finished"
            at.network.heal("actor-0")
            await asyncio.sleep(10.0)
            again = {slot.holder for group in state.open.values() for slot in group.slots}
            assert not stopped.done()
            return await at.result_of(training, SKIPPED), during, again

    with pytest.MonkeyPatch.context() as patch:
        prompts_of_neighbours(patch)
        found, during, again = run(job())
    assert found.dead == found.residual == 0
    assert during >= 5, "the run waited for it longer than for its leases"
    assert {"actor-0", "actor-1"} <= again, "it gets work again"


LONG = pytest.mark.soak
EARLY = [
    (AT_ONCE, 5.0, ("bad", "good", "good")),
    pytest.param(LATE, 60.0, ("bad", "good", "good"), marks=LONG),
    pytest.param(AT_ONCE, 60.0, ("good", "bad", "good"), marks=LONG),
    pytest.param(AT_ONCE, 300.0, ("bad", "good", "bad"), marks=LONG),
    pytest.param(LATE, 5.0, ("bad", "good", "bad"), marks=LONG),
    pytest.param(LATE, 300.0, ("good", "good", "bad"), marks=LONG),
    pytest.param(SLOW, 60.0, ("good", "bad", "good"), marks=LONG),
]


@pytest.mark.parametrize(("fault", "later_s", "order"), EARLY)
def test_prompts_do_not_die_of_a_bad_sampler_that_is_ready_long_before_the_others(
    folder: Path, fault: str, later_s: float, order: tuple[str, ...]
) -> None:
    """The rate is that after the arrival of the healthy ones, `later_s` and a little more after the bad ones."""
    train_s, healthy = WORLDS["the samplers limit it"], order.count("good")

    async def job() -> tuple[Result, int]:
        async with NeighbourRun(neighbours(len(order)), folder) as at:
            training = at.learner(train_s)
            for kind, at_s in (("bad", 0.0), ("good", later_s)):
                for index in (index for index, its in enumerate(order) if its == kind):
                    await asyncio.sleep(at_s - asyncio.get_running_loop().time())
                    at.sampler_with(index, fault if kind == "bad" else HEALTHY)
                    at_s += 3.0
            before = at.store.keeper.state.acked
            return await at.result_of(training, before + SKIPPED), before

    with pytest.MonkeyPatch.context() as patch:
        prompts_of_neighbours(patch)
        found, before = run(job())
    assert before <= STEPS // 2, "too few steps are left"
    assert found.dead == found.residual == 0, "no prompt died, and none is lost"
    assert found.rested == {f"sampler-{index}" for index, kind in enumerate(order) if kind == "bad"}
    rate = found.steps_per_s / alone(folder, "sampler", healthy, train_s)
    assert rate >= AIM, f"{rate:.3f} of the rate of the healthy alone"


def test_a_run_whose_environment_fails_on_all_samplers_ends_soon_after_the_last_one_has_arrived(folder: Path) -> None:
    """With an environment that fails on the samplers that came, and one that never comes, it ends as stalled."""
    for last_s in (60.0, math.inf):

        async def job(last_s: float = last_s) -> tuple[str, float]:
            async with NeighbourRun(neighbours(3), folder) as at:
                training = at.learner(1.0)
                for index, at_s in enumerate((0.0, 10.0, last_s)):
                    if at_s < math.inf:
                        await asyncio.sleep(at_s - asyncio.get_running_loop().time())
                        at.sampler_with(index, AT_ONCE)
                await asyncio.wait([training])
                return at.store.keeper.state.closed, asyncio.get_running_loop().time()

        with pytest.MonkeyPatch.context() as patch:
            prompts_of_neighbours(patch)
            closed, seconds = run(job())
        assert "a library is missing" in closed
        if last_s < math.inf:
            assert "store.dead_limit" in closed and "neighbour" in closed
            assert seconds < last_s + 120.0
        else:
            assert "sampler" in closed and seconds < 700.0


def scored(run_dir: Path, workers: int, fault: str, train_s: float) -> tuple[Result, int, int]:
    """A run with two samplers that score with two workers and with `workers`, of which one has a fault.

    Its result, and how many restarts of scoring workers and slow ones the second sampler has reported.
    """

    async def job() -> tuple[Result, int, int]:
        async with NeighbourRun(neighbours(2), run_dir) as at:
            at.sampler_with(0, workers=2)
            at.sampler_with(1, workers=workers, worker_fault=fault)
            result = await at.result(train_s, SKIPPED)
            stats = [row for row in at.store.metrics.rows if row.get("kind") == "stats" and row["role"] == "sampler-1"]
            return result, stats[-1]["scoring_restarts"], stats[-1]["scoring_slow"]

    with pytest.MonkeyPatch.context() as patch:
        prompts_of_neighbours(patch)
        return run(job())


@cache
def scored_alone(run_dir: Path, train_s: float) -> float:
    return scored(run_dir, 1, "", train_s)[0].steps_per_s


@pytest.mark.parametrize(
    "world", [pytest.param("the learner limits it", marks=pytest.mark.soak), "the samplers limit it"]
)
@pytest.mark.parametrize("fault", [AT_ONCE, pytest.param(LATE, marks=pytest.mark.soak), SLOW])
def test_a_bad_scoring_worker_costs_less_than_a_tenth(folder: Path, fault: str, world: str) -> None:
    found, restarts, slow = scored(folder, 2, fault, WORLDS[world])
    assert found.dead == found.residual == found.failed == 0, "no prompt died, and none is lost"
    assert not found.rested, "the store rests no sampler for one of its scoring workers"
    assert (restarts > 0) == (fault != SLOW), "workers that end are replaced, and the sampler reports it"
    assert slow > 0 or fault != SLOW, "a slow one rests, and the sampler reports it"
    rate = found.steps_per_s / scored_alone(folder, WORLDS[world])
    print(f"scoring worker, {world}, {fault}: {rate:.3f}")
    assert rate >= AIM, f"{rate:.3f} of the rate of the healthy alone"
