"""Partitions between store, learner and samplers for longer than a lease, and a bad sampler, in virtual time.

The real loops run unchanged: see `tests.harness.virtual_run`.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxroll.config import Config
from jaxroll.errors import EXIT_INTERRUPTED, InfraError
from jaxroll.records import Message, Task, Version
from jaxroll.roles.evaluator import EvaluatorLoops
from jaxroll.sim.network import REPLIES, REQUESTS, run
from tests.harness.store.builders import configured
from tests.harness.virtual_run import ENV, Behaviour, VirtualRun

LEASE_S = 10.0
DIRECTIONS = {"both": (REQUESTS, REPLIES), "requests": (REQUESTS,), "replies": (REPLIES,)}


def small(**changes: Any) -> Config:
    """2 groups of 2 a step, with short leases, and without a warm start or an evaluator."""
    config = configured(**{"steps": 40, "lease_s": LEASE_S, "rpc_deadline_s": 3.0, "stall_s": 5.0} | changes)
    return replace(
        config,
        sft=replace(config.sft, steps=0),
        evaluator=replace(config.evaluator, every=0),
        learner=replace(config.learner, checkpoint_every=5),
        sampler=replace(config.sampler, slots=4),
    )


async def until_acked(at: VirtualRun, step: int, limit_s: float = 600.0) -> None:
    async with asyncio.timeout(limit_s):
        while at.store.keeper.state.acked < step:
            await asyncio.sleep(0.1)


def held_by(at: VirtualRun, name: str) -> set[int]:
    """The open groups of which `name` has leased members."""
    groups = at.store.keeper.state.open
    return {gid for gid, group in groups.items() if any(slot.holder == name for slot in group.slots)}


def assert_sound(at: VirtualRun, steps: int, alpha: int) -> None:
    """Every step was trained once per lineage, on other groups than all steps before it, within the bound on age."""
    assert [one.step for one in at.trained] == list(range(steps)), "each step once, in order"
    groups = [group for one in at.trained for group in one.groups]
    assert len(groups) == len(set(groups)) == 2 * steps, "no group is trained twice"
    assert max(one.age for one in at.trained) <= alpha
    assert at.store.status()["conservation_residual"] == 0


def test_a_run_trains_all_its_steps_in_order(tmp_path: Path) -> None:
    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            at.sampler()
            assert await at.learner() == 0
            assert asyncio.get_running_loop().time() < 60.0
            assert_sound(at, 40, 1)
            assert [v.step for v in at.checkpoints.versions()] == list(range(0, 41, 5))

    run(job())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("who", ["sampler-0", "learner"])
def test_a_partition_longer_than_a_lease_is_named_and_heals(
    tmp_path: Path, who: str, direction: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The store names the role that it waits for; the role's log says that the store is silent, and when it is back."""

    def told(what: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if what in record.getMessage()]

    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            at.sampler()
            training = at.learner()
            await until_acked(at, 3)
            at.network.cut(who, *DIRECTIONS[direction])
            await asyncio.sleep(2 * LEASE_S)
            stuck_at = at.store.keeper.state.acked
            assert stuck_at <= 6, "the run goes on without the peer"
            assert any(name.startswith(who.partition("-")[0]) for name in at.store.status()["waits"])
            silent = told("no answer from jaxroll.Store")
            assert len(silent) == 1 and silent[0].startswith(f"{who}: "), "once, and no other role"
            assert not told("answers again")
            at.network.heal(who)
            await until_acked(at, stuck_at + 1, limit_s=15.0)
            assert len(told(f"{who}: jaxroll.Store")) == len(told("answers again")) == 1
            assert await training == 0
            assert_sound(at, 40, 1)

    run(job())


def test_a_partition_that_does_not_heal_ends_the_run_with_the_missing_peer(tmp_path: Path) -> None:
    async def job() -> None:
        async with VirtualRun(small(stall_abort_s=60.0), tmp_path) as at:
            sampling = at.sampler()
            at.learner()
            await until_acked(at, 3)
            at.network.cut("learner")
            await sampling
            assert re.search("stalled.*learner", at.store.keeper.state.closed or "")
            assert asyncio.get_running_loop().time() < 100.0

    run(job(), limit_s=1000.0)


def test_leases_of_a_parted_sampler_go_to_the_other_one_and_its_late_results_are_refused(tmp_path: Path) -> None:
    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            at.sampler(0)
            at.sampler(1)
            training = at.learner()
            await until_acked(at, 3)
            while not (held := held_by(at, "sampler-0")):
                await asyncio.sleep(0.1)
            at.network.cut("sampler-0")
            state = at.store.keeper.state
            before = state.acked
            await asyncio.sleep(2 * LEASE_S)
            assert state.acked >= before + 8, "the other sampler takes over"
            assert not held & set(state.open), "and finishes the groups of the parted one"
            at.network.heal("sampler-0")
            assert await training == 0
            assert_sound(at, 40, 1)

    run(job())


def test_a_sampler_without_new_weights_samples_within_the_age_bound_and_then_waits(tmp_path: Path) -> None:
    """Only its transfers from the learner fail: it leases, renews and stores as before."""

    async def job() -> None:
        async with VirtualRun(small(alpha=2.0, stall_s=1000.0), tmp_path) as at:
            engine = Behaviour()
            at.sampler(behaviour=engine)
            training = at.learner()
            await until_acked(at, 5)
            engine.weights_reachable = False
            await asyncio.sleep(60.0)
            stuck_at = at.store.keeper.state.acked
            assert 5 < stuck_at <= 5 + 4, "two steps of age, and what was in flight"
            engine.weights_reachable = True
            assert await training == 0
            assert_sound(at, 40, 2)

    run(job())


def test_a_killed_store_goes_on_where_it_was(tmp_path: Path) -> None:
    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            at.sampler()
            training = at.learner()
            for step in (3, 9, 20):
                await until_acked(at, step)
                await at.store.stop()
                await asyncio.sleep(5.0)
                at.store.start()
            assert await training == 0
            assert_sound(at, 40, 1)

    run(job())


def test_a_learner_that_dies_is_replaced_from_its_durable_step(tmp_path: Path) -> None:
    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            at.sampler()
            first = at.learner()
            await until_acked(at, 8)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert await at.learner() == 0
            steps = [one.step for one in at.trained]
            again = steps.index(5, 6)
            assert steps[:again] == list(range(again)) and steps[again:] == list(range(5, 40)), "from checkpoint 5 on"
            of: dict[int, tuple[int, ...]] = {}
            for one in at.trained:
                assert of.setdefault(one.step, one.groups) == one.groups, "a replayed claim has the same groups"

    run(job())


@pytest.mark.parametrize("after_s", [0.0, 1.0], ids=["fails at once", "fails late"])
def test_a_bad_sampler_rests_and_no_group_dies(tmp_path: Path, after_s: float) -> None:
    async def job() -> None:
        async with VirtualRun(small(steps=60, alpha=2.0, straggler="wait"), tmp_path) as at:
            at.sampler(0)
            broken = InfraError("a library is missing")
            at.sampler(1, Behaviour(answer_s=lambda key: after_s, fails=lambda key: broken))
            training, rested = at.learner(), set()
            while not training.done():
                rested |= set(at.store.status()["backoff"])
                await asyncio.sleep(0.5)
            assert training.result() == 0 and rested == {"sampler-1"}, "and the healthy one never"
            assert_sound(at, 60, 2)
            assert at.store.sql("SELECT COUNT(*) FROM groups WHERE state = 'DEAD'") == [(0,)]
            failed = at.store.sql("SELECT COUNT(*) FROM log WHERE kind = 'member_failed'")[0][0]
            assert 3 <= failed <= 40, "after its trials it gets one member at a time"

    run(job())


def test_the_best_checkpoint_stays_and_only_versions_with_a_checkpoint_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accuracy peaks at step 10. The evaluator is cut off around the checkpoint of step 20."""
    tasks = [Task(0, (Message("user", "a"),), ENV, "{}", 0, f"{0:016x}")]
    config = small()
    config = replace(
        config, evaluator=replace(config.evaluator, every=5), learner=replace(config.learner, keep_best="accuracy")
    )

    measure = EvaluatorLoops._row

    async def peaking(self: EvaluatorLoops, version: Version) -> dict:
        return await measure(self, version) | {"accuracy": 1.0 - abs(version.step - 10) / 50}

    monkeypatch.setattr(EvaluatorLoops, "_row", peaking)

    async def job() -> None:
        async with VirtualRun(config, tmp_path) as at:
            at.checkpoints.kept = 2
            at.sampler()
            evaluating = at.evaluator(tasks)
            training = at.learner()
            await until_acked(at, 17)
            at.network.cut("evaluator")
            await until_acked(at, 22)
            at.network.heal("evaluator")
            assert await training == 0
            await evaluating
            steps = [row["step"] for row in at.store.metrics.rows if row.get("kind") == "eval"]
            assert {0, 10, 40} <= set(steps) and 20 not in steps and not any(step % 5 for step in steps)
            assert [v.step for v in at.checkpoints.versions()] == [10, 35, 40]

    run(job())


@pytest.mark.parametrize("link", [*DIRECTIONS, "weights"])
def test_an_evaluator_scores_every_due_version_and_its_partition_delays_no_role(tmp_path: Path, link: str) -> None:
    """It is cut off from the store, or from the learner's weights alone."""
    tasks = [Task(i, (Message("user", "a"),), ENV, "{}", i, f"{i:016x}") for i in range(4)]
    config = small()
    config = replace(config, evaluator=replace(config.evaluator, every=10))

    async def job() -> None:
        async with VirtualRun(config, tmp_path) as at:
            at.sampler()
            evaluating = at.evaluator(tasks, engine := Behaviour())
            training = at.learner()
            await until_acked(at, 15)
            if link == "weights":
                engine.weights_reachable = False
            else:
                at.network.cut("evaluator", *DIRECTIONS[link])
            cut_s = asyncio.get_running_loop().time()
            await until_acked(at, 32)
            assert asyncio.get_running_loop().time() - cut_s > 1.5 * LEASE_S
            if link == "weights":
                said = [
                    row["text"] for row in at.store.metrics.rows if row.get("role") == "evaluator" and "text" in row
                ]
                assert any(re.search(r"weights 0\.\d+: .*the learner cannot be reached", text) for text in said), said
            engine.weights_reachable = True
            at.network.heal("evaluator")
            assert await training == 0
            await evaluating
            assert_sound(at, 40, 1)
            rows = [row for row in at.store.metrics.rows if row.get("kind") == "eval"]
            assert [row["step"] for row in rows][:2] == [0, 10] and rows[-1]["step"] == 40
            assert all(row["accuracy"] == 1.0 and row["n"] == 4 for row in rows)

    run(job())


def test_a_run_stopped_before_its_last_evaluation_makes_it_when_it_is_resumed(tmp_path: Path) -> None:
    tasks = [Task(0, (Message("user", "a"),), ENV, "{}", 0, f"{0:016x}")]
    config = replace(small(steps=6), evaluator=replace(small().evaluator, every=10))

    async def job() -> None:
        async with VirtualRun(config, tmp_path) as at:
            at.sampler()
            training = at.learner()
            await until_acked(at, 6)
            await asyncio.sleep(5.0)
            assert not training.done(), "it serves the last weights until the evaluator has them"
            at.stop.set()
            assert await training == EXIT_INTERRUPTED
            at.stop.clear()
            resumed, evaluating = at.learner(), at.evaluator(tasks)
            assert await resumed == 0
            await evaluating
            assert [row["step"] for row in at.store.metrics.rows if row.get("kind") == "eval"] == [6]

    run(job())
