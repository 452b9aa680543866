"""Failures that users of other stacks have published, as whole runs. Each docstring names the public thread.

The loops of store, sampler and learner run unchanged under a virtual clock (`tests.harness.virtual_run`). `kill` ends
roles as `kill -9` does: what they had not sent is lost. test_published_failures plays the same failures on the store's
state machine.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxroll.config import Config
from jaxroll.envs import registry
from jaxroll.errors import ConfigError, InfraError
from jaxroll.protocols import GenerationKey
from jaxroll.records import Finished, Message, Task, Version, VersionRef
from jaxroll.sim.network import run
from jaxroll.sim.world import MemoryPublisher
from tests.harness import virtual_run
from tests.harness.store.builders import configured
from tests.harness.virtual_run import ENV, Behaviour, DelayTrainer, Instant, VirtualRun

STEPS, BATCH, CHECKPOINT_EVERY = 30, 2, 5
NEVER_S = 1e9


def small(**changes: Any) -> Config:
    """2 groups of 2 a step, a checkpoint every five steps, without a warm start or an evaluator."""
    config = configured(**{"steps": STEPS, "lease_s": 10.0, "rpc_deadline_s": 3.0, "stall_s": 5.0} | changes)
    return replace(
        config,
        sft=replace(config.sft, steps=0),
        evaluator=replace(config.evaluator, every=0),
        learner=replace(config.learner, checkpoint_every=CHECKPOINT_EVERY),
        sampler=replace(config.sampler, slots=8),
    )


async def until(condition: Callable[[], Any], limit_s: float = 1000.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.1)


def acked(at: VirtualRun) -> int:
    return at.store.keeper.state.acked


def ready(at: VirtualRun) -> list[int]:
    """The groups that are complete and wait to be claimed."""
    return [gid for gid, group in at.store.keeper.state.open.items() if group.ready]


def resumed(at: VirtualRun, engine: Behaviour, train_s: float = 1.0) -> asyncio.Future[int]:
    """Start everything again after `kill()`; the learner."""
    at.store.start()
    at.sampler(behaviour=engine)
    return at.learner(train_s)


def trained_prompts(at: VirtualRun) -> list[int]:
    """The prompts by the steps that trained them, sorted within a step: its groups come as they are finished."""
    rows = at.store.sql(
        "SELECT g.prompt_index FROM claim_groups c JOIN groups g ON g.id = c.group_id ORDER BY c.step, g.prompt_index"
    )
    return [index for (index,) in rows]


def assert_each_step_counts_once(at: VirtualRun, steps: int = STEPS) -> None:
    """No step is lost, every repetition of a step has the same groups, and no group is in two steps."""
    groups_of: dict[int, tuple[int, ...]] = {}
    for one in at.trained:
        assert groups_of.setdefault(one.step, one.groups) == one.groups, f"step {one.step} has another batch"
    assert sorted(groups_of) == list(range(steps))
    groups = [group for step in groups_of.values() for group in step]
    assert len(groups) == len(set(groups))
    assert at.store.status()["conservation_residual"] == 0
    assert acked(at) == steps


def test_a_resumed_run_goes_on_at_its_newest_whole_checkpoint_and_counts_no_step_twice(tmp_path: Path) -> None:
    """verl 7952: with asynchronous checkpoints the newest one is never recorded, and `auto` resume starts at step 0.

    verl 7933: the first step after a resume has the number of the one after it.
    """

    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            at.checkpoints.write_s = 3.5
            at.sampler()
            at.learner()
            await until(lambda: Version(0, 10) in at.checkpoints.writing)
            await at.kill()
            before = len(at.trained)
            assert await resumed(at, Behaviour()) == 0
            assert at.trained[before][:2] == (1, 5), "the checkpoint of step 10 was not whole, that of step 5 was"
            assert_each_step_counts_once(at)
            assert [one.step for one in at.trained[before:]] == list(range(5, STEPS)), "each once, from the sixth on"
            assert [v.step for v in at.checkpoints.versions()] == list(range(0, STEPS + 1, CHECKPOINT_EVERY))

    run(job())


def test_a_run_whose_log_is_lost_goes_on_after_its_checkpoint_with_the_prompts_of_the_lost_log(tmp_path: Path) -> None:
    """The whole machine of the store is lost, of which other stacks keep the position in the data in memory only."""

    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as lost:
            lost.sampler()
            lost.learner()
            await until(lambda: acked(lost) >= 2 * CHECKPOINT_EVERY + 3)
            await lost.kill()
            first = lost.checkpoints.versions()[-1].step
        async with VirtualRun(small(), tmp_path) as at:
            at.checkpoints = lost.checkpoints
            with pytest.raises(ConfigError, match="add --new-log"):
                await at.learner()
            at.args = replace(at.args, new_log=True)
            at.sampler()
            at.learner()
            await until(lambda: acked(at) >= first + 3)
            await at.kill()
            assert await resumed(at, Behaviour()) == 0, "the option is still there"
            assert at.trained[0][:2] == (1, first) and {one.step for one in at.trained} == {*range(first, STEPS)}
            assert trained_prompts(at) == list(range(first * BATCH, STEPS * BATCH))
            assert at.store.status()["conservation_residual"] == 0

    run(job())


def test_a_dropped_stale_group_holds_no_later_position_back(tmp_path: Path) -> None:
    """TRL 7274: one group that is dropped as stale pins the position that every later checkpoint saves.

    A run that resumes there generates and trains again all that came after it.
    """
    generated: list[int] = []

    def answer_s(key: GenerationKey) -> float:
        generated.append(key.group)
        return 8.0 if (key.group, key.member) == (1, 0) else 0.5

    async def job() -> None:
        async with VirtualRun(small(order="ready_first", straggler="wait"), tmp_path) as at:
            at.sampler(behaviour=(engine := Behaviour(answer_s)))
            at.learner()
            await until(lambda: acked(at) == 16)
            assert at.store.sql("SELECT state, reason FROM groups WHERE id = 1") == [("EXPIRED", "stale")]
            in_flight = set(at.store.keeper.state.open)
            await at.kill()
            before = set(generated)
            generated.clear()
            assert await resumed(at, engine) == 0
            assert_each_step_counts_once(at)
            assert before & set(generated) <= in_flight, "groups from before the checkpoint were generated again"
            issued = at.store.sql("SELECT prompt_index FROM groups WHERE reissue_of IS NULL ORDER BY id")
            assert [index for (index,) in issued] == list(range(len(issued))), "each prompt is issued once, in order"

    run(job())


def test_rollouts_in_the_buffer_are_trained_after_a_resume(tmp_path: Path) -> None:
    """OpenRLHF 1322: a checkpoint keeps the data's position and not the buffer: what was generated ahead is skipped.

    Its second half: the end of the data is not saved either, and the resumed run starts the data again. (Rollouts by
    weights that were lost with the learner are generated again; here the checkpoint has the newest weights.)
    """
    prompts, generated = 20, list[int]()

    def answer_s(key: GenerationKey) -> float:
        generated.append(key.group)
        return 0.1

    async def job() -> None:
        async with VirtualRun(small(alpha=4.0), tmp_path, prompts) as at:
            at.sampler(behaviour=(engine := Behaviour(answer_s)))
            at.learner(train_s=5.0)
            await until(lambda: acked(at) == 5 and Version(0, 5) in at.checkpoints.versions() and len(ready(at)) >= 4)
            buffered = ready(at)
            await at.kill()
            generated.clear()
            assert await resumed(at, engine, train_s=5.0) == 0
            assert_each_step_counts_once(at, prompts // BATCH)
            assert trained_prompts(at) == list(range(prompts)), "every prompt is trained once"
            assert not set(buffered) & set(generated), "the buffer is generated again"

    run(job())


@pytest.mark.parametrize("seed", range(3))
def test_no_prompt_is_skipped_or_repeated_when_everything_dies_at_any_instant(tmp_path: Path, seed: int) -> None:
    """NeMo-RL 3599: 675 of 736 prompts skipped, as the position of the data is saved without the work in flight.

    Long rollouts were lost most often, and the tail of a batch that fills a gap was discarded.
    """
    rng = random.Random(seed)
    kills = sorted(rng.uniform(2.0, 60.0) for _ in range(6))

    def answer_s(key: GenerationKey) -> float:
        return random.Random(repr((seed, key.group, key.member))).choice((0.2, 0.7, 1.5, 6.0))

    async def job() -> None:
        async with VirtualRun(small(alpha=2.0), tmp_path) as at:
            now_s, engine = asyncio.get_running_loop().time, Behaviour(answer_s)
            at.sampler(behaviour=engine)
            training = at.learner()
            for kill_s in kills:
                await asyncio.sleep(max(0.0, kill_s - now_s()))
                if rng.random() < 0.5:
                    await at.kill()
                    training = resumed(at, engine)
                else:
                    await at.kill("sampler-0")
                    at.sampler(behaviour=engine)
            assert await training == 0
            assert_each_step_counts_once(at)
            assert sorted(trained_prompts(at)) == list(range(BATCH * STEPS)), "each prompt is trained once"

    run(job())


def test_failed_generations_end_no_sampler(tmp_path: Path) -> None:
    """TRL 7176: a single generation that fails ends the rollout worker.

    NeMo-RL 3938: a prompt whose generations fail on every attempt leaves its step short forever.
    """
    tried: dict[tuple[int, int], int] = {}

    def fails(key: GenerationKey) -> Exception | None:
        tried[key.group, key.member] = attempt = tried.get((key.group, key.member), 0) + 1
        first = random.Random(repr((key.group, key.member))).random() < 0.2
        return InfraError("the engine refuses") if key.group == 7 or (first and attempt == 1) else None

    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            sampling = at.sampler(behaviour=Behaviour(lambda key: 0.5, fails=fails))
            training = at.learner()
            await until(training.done)
            assert await training == 0
            await sampling
            assert_each_step_counts_once(at)
            assert at.store.sql("SELECT id FROM groups WHERE state = 'DEAD'") == [(7,)]
            again = [key for key, attempts in tried.items() if attempts == 2 and key[0] != 7]
            assert len(again) >= 10, "members that failed once were tried again"
            dead = at.store.sql("SELECT prompt_index FROM groups WHERE id = 7")[0][0]
            assert trained_prompts(at) == [i for i in range(BATCH * STEPS + 1) if i != dead]

    run(job())


def test_a_straggler_delays_its_step_by_its_deadline_only_and_again_after_a_resume(tmp_path: Path) -> None:
    """NeMo-RL 3238: one rollout that never ends keeps its step from starting, and after a resume it does so again."""

    async def job() -> None:
        async with VirtualRun(small(group_size=3, straggler="shrink", straggler_deadline_s=20.0), tmp_path) as at:

            def answer_s(key: GenerationKey) -> float:
                ((prompt,),) = at.store.sql(f"SELECT prompt_index FROM groups WHERE id = {key.group}")
                return NEVER_S if (prompt, key.member) == (9, 1) else 0.5

            now_s, engine = asyncio.get_running_loop().time, Behaviour(answer_s)
            at.sampler(behaviour=engine)
            at.learner()
            await asyncio.sleep(12.0)
            assert acked(at) == at.store.keeper.state.next_claim == 4, "the step waits for prompt 9"
            await at.kill()
            at_s = now_s()
            assert await resumed(at, engine) == 0
            assert_each_step_counts_once(at)
            assert trained_prompts(at) == list(range(BATCH * STEPS))
            done = at.store.sql(
                "SELECT COUNT(*) FROM groups g JOIN members m ON m.group_id = g.id WHERE "
                "m.state = 'done' AND g.prompt_index = 9 AND g.claim_step IS NOT NULL"
            )
            assert done == [(2,)], "it is trained without the member that never ends"
            longest = max(b.at_s - a.at_s for a, b in zip(at.trained, at.trained[1:], strict=False) if a.at_s > at_s)
            assert 15.0 < longest < 25.0, "the deadline, and the time of a step"

    run(job())


def test_fast_samplers_do_not_end_before_the_last_version_is_published(tmp_path: Path) -> None:
    """prime-rl 3050: rollouts of quick environments end all steps of one side, and the other waits for it forever."""
    config = small()
    config = replace(config, evaluator=replace(config.evaluator, every=10))

    async def job() -> None:
        async with VirtualRun(config, tmp_path) as at:
            sampling = at.sampler(behaviour=Behaviour(lambda key: 0.01))
            evaluating = at.evaluator([Task(0, (Message("user", "a"),), ENV, "{}", 0, f"{0:016x}")])
            training = at.learner(train_s=10.0)
            while not training.done():
                state = at.store.keeper.state
                assert state.next_claim + len(ready(at)) / BATCH <= acked(at) + 2, "more than α + 1 steps ahead"
                await asyncio.sleep(1.0)
            assert await training == 0
            await asyncio.gather(sampling, evaluating)
            scores = [row["step"] for row in at.store.metrics.rows if row.get("kind") == "eval"]
            assert scores[-1] == STEPS, "the last version was there to fetch"

    run(job())


def test_fast_samplers_wait_instead_of_sampling_what_would_be_too_old(tmp_path: Path) -> None:
    """tinker-cookbook 822: the bound on age is kept by discarding rollouts, most of those of a fast sampler."""
    generated: list[tuple[int, int]] = []

    def answer_s(key: GenerationKey) -> float:
        generated.append((key.group, key.member))
        return 0.1

    async def job() -> None:
        async with VirtualRun(small(alpha=2.0), tmp_path) as at:
            at.sampler(behaviour=Behaviour(answer_s))
            assert await at.learner(train_s=10.0) == 0
            assert_each_step_counts_once(at)
            assert max(one.age for one in at.trained) == 2, "the sampler was as far ahead as the bound allows"
            assert at.store.sql("SELECT id FROM groups WHERE state IN ('EXPIRED', 'DEAD')") == []
            assert sorted(generated) == [(group, member) for group in range(BATCH * STEPS) for member in range(2)]

    run(job())


def test_slow_weight_transfers_stop_neither_rollouts_nor_training(tmp_path: Path) -> None:
    """Marin 8955: of 4,754 s of an asynchronous run, 2,096 s go by in weight transfers."""
    seconds: dict[float, float] = {}

    async def job(fetch_s: float) -> None:
        async with VirtualRun(small(alpha=2.0), tmp_path / f"{fetch_s}") as at:
            at.sampler(behaviour=Behaviour(lambda key: 2.0, fetch_s))
            assert await at.learner(train_s=5.0) == 0
            assert_each_step_counts_once(at)
            seconds[fetch_s] = at.trained[-1].at_s - at.trained[5].at_s

    for fetch_s in (0.1, 4.5):
        (tmp_path / f"{fetch_s}").mkdir()
        run(job(fetch_s))
    assert seconds[4.5] < 1.02 * seconds[0.1]


def test_a_resume_with_one_whole_batch_in_the_buffer_generates_the_batch_after_it(tmp_path: Path) -> None:
    """NeMo-RL 3066: a checkpoint has the batch of step N whole: after the resume, step N + 1 is generated by no one."""

    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            at.sampler(behaviour=(engine := Behaviour()))
            at.learner(train_s=5.0)
            await until(lambda: Version(0, 5) in at.checkpoints.versions() and at.store.keeper.state.next_claim == 6)
            assert not ready(at), "step 5 has its batch, and step 6 nothing"
            await at.kill()
            before = len(at.trained)
            training = resumed(at, engine, train_s=5.0)
            await until(lambda: ready(at))
            assert (acked(at), at.store.keeper.state.next_claim) == (5, 6), "step 6 is sampled while step 5 is trained"
            assert await training == 0
            assert_each_step_counts_once(at)
            assert [one.step for one in at.trained[before:]] == list(range(5, STEPS))

    run(job())


@pytest.mark.parametrize("claimed", [False, True])
def test_a_resume_trains_the_batch_in_its_buffer_before_the_next_one_is_complete(tmp_path: Path, claimed: bool) -> None:
    """NeMo-RL 3828: training waits until the batch of the next step is complete, too: a round of rollouts a resume."""
    steps, answer_s = 7, 1.0

    async def job() -> None:
        nonlocal answer_s
        async with VirtualRun(small(steps=steps), tmp_path) as at:
            state = lambda: at.store.keeper.state  # noqa: E731
            at.sampler(behaviour=(engine := Behaviour(lambda key: answer_s)))
            at.learner(train_s=5.0)
            await until(lambda: Version(0, 5) in at.checkpoints.versions())
            if not claimed:
                await at.kill("learner")
            await until(lambda: state().next_claim == 6 if claimed else len(ready(at)) == BATCH)
            await at.kill()
            before, answer_s = len(at.trained), 30.0
            start_s, training = asyncio.get_running_loop().time(), resumed(at, engine, train_s=5.0)
            assert (len(ready(at)), state().next_claim) == ((0, 6) if claimed else (BATCH, 5)), "of step 5 alone"
            assert await training == 0
            assert_each_step_counts_once(at, steps)
            assert [one.step for one in at.trained[before:]] == [5, 6]
            first_s, second_s = (one.at_s - start_s for one in at.trained[before:])
            assert first_s < 5.0 < 30.0 < second_s, "step 5 is trained while the batch of step 6 is sampled"

    run(job())


@pytest.mark.parametrize("first", ["sampler", "learner"])
def test_a_resumed_learner_publishes_its_weights_before_it_waits_for_rollouts(tmp_path: Path, first: str) -> None:
    """prime-rl 3004: the trainer waits for rollouts, and inference for the weights of the checkpoint, forever."""

    async def job() -> None:
        async with VirtualRun(small(alpha=0.0), tmp_path) as at:
            at.sampler(behaviour=(engine := Behaviour(lambda key: 3.0)))
            at.learner()
            await until(lambda: Version(0, 5) in at.checkpoints.versions() and not ready(at))
            await at.kill()
            before = len(at.trained)
            at.store.start()
            engine.weights_reachable = False  # the address is that of the learner that died

            class Publisher(MemoryPublisher):
                def publish(self, version: Version, params: object) -> VersionRef:
                    engine.weights_reachable = True
                    return super().publish(version, params)

            if first == "sampler":
                at.sampler(behaviour=engine)
                await asyncio.sleep(20.0)
            training = at.start_learner(DelayTrainer(1.0), Publisher())
            if first == "learner":
                await asyncio.sleep(20.0)
                at.sampler(behaviour=engine)
            assert await training == 0
            assert_each_step_counts_once(at)
            assert at.trained[before].step == 5

    run(job())


def test_no_token_is_sampled_before_the_learners_first_weights(tmp_path: Path) -> None:
    """tunix 2096: the rollouts of step 0 come from weights that the sampler made itself, and are scored and trained.

    Here each of two samplers waits for the weights of the learner, a long time, also one that starts again later.
    """
    answered: list[GenerationKey] = []

    def answer_s(key: GenerationKey) -> float:
        answered.append(key)
        return 1.0

    async def job() -> None:
        async with VirtualRun(small(stall_abort_s=600.0), tmp_path) as at:
            engines = [Behaviour(answer_s, fetch_s) for fetch_s in (0.1, 20.0)]
            for index, engine in enumerate(engines):
                at.sampler(index, engine)
            await asyncio.sleep(100.0)
            assert not answered
            training = at.learner()
            await until(lambda: acked(at) == 6)
            await at.kill("sampler-1")
            at.sampler(1, engines[1])
            assert await training == 0 and answered
            assert_each_step_counts_once(at)
            assert max(one.age for one in at.trained) <= 1 and at.trained[0].age == 0

    run(job())


HANGS = {"sampler": "sampler-0 ", "learner": "learner ", "no sampler": "samplers "}


@pytest.mark.parametrize("who", HANGS)
def test_a_run_that_hangs_ends_with_the_name_of_the_role_that_it_waits_for(tmp_path: Path, who: str) -> None:
    """verl 5815: an asynchronous run hangs, and no message names the process that it waits for."""

    def answer_s(key: GenerationKey) -> float:
        return NEVER_S if who == "sampler" and key.group >= 8 else 0.5

    async def job() -> None:
        async with VirtualRun(small(stall_abort_s=120.0, straggler="wait"), tmp_path) as at:
            if who != "no sampler":
                at.sampler(behaviour=Behaviour(answer_s))
            training = at.learner(NEVER_S if who == "learner" else 1.0)
            at_s = asyncio.get_running_loop().time()
            await until(lambda: at.store.keeper.state.closed)
            closed = at.store.keeper.state.closed
            assert re.search(r"stalled for 12\d s", closed), closed
            assert re.search("waited for: .*" + HANGS[who], closed), closed
            assert asyncio.get_running_loop().time() - at_s < 180.0
            events = [row["text"] for row in at.store.metrics.rows if row.get("what") == "stall"]
            assert events and all(re.search("waiting for: .*" + HANGS[who], text) for text in events)
            if who != "learner":
                await until(training.done)

    run(job())


@registry.register("delayed")
class Delayed(Instant):
    """Its first message may come some versions after the lease."""

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        await asyncio.sleep(7.0 if task.index % 5 == 1 else 0.0)
        return task.messages


@pytest.mark.parametrize("on_stale", ["mask", "expire"])
def test_the_age_of_a_token_is_that_of_the_weights_that_sampled_it(
    tmp_path: Path, on_stale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime 1781: no bound on staleness. slime 2278: the bound counts the version at which a group was scheduled.

    Some answers begin some versions after their lease, others span versions.
    """
    monkeypatch.setattr(virtual_run, "ENV", f"{__name__}:delayed")
    ages = list[tuple[int, int, bool]]()  # of each token: its age, its lease's, and whether it is trained
    leased: dict[tuple[int, int], int] = {}  # (group, member) → the published step

    class Ages(DelayTrainer):
        def dispatch_step(self, ready: Any) -> Any:
            for group in ready.claim.groups:
                for member in group.members:
                    assert isinstance(member.outcome, Finished)
                    steps = [run.version.step for run in member.outcome.versions for _ in range(run.count)]
                    (part,) = [part for part in member.outcome.segments if part.logprobs.any()]
                    now, of_lease = ready.claim.step, leased[member.group, member.member]
                    ages.extend((now - s, now - of_lease, bool(t)) for s, t in zip(steps, part.loss_mask, strict=True))
            return super().dispatch_step(ready)

    def answer_s(key: GenerationKey) -> float:
        return 7.0 if key.group % 5 == 3 and key.member == 0 else 0.5

    config = small(on_stale=on_stale, order="ready_first", straggler="wait", alpha=1.0)

    async def job() -> None:
        async with VirtualRun(config, tmp_path) as at:
            keeper = at.store.keeper
            decide = keeper.decide

            def noted(request: Any, *payload: Any) -> Any:
                reply = decide(request, *payload)
                for grant in getattr(reply, "grants", ()):
                    leased.update({(grant.group, m): keeper.state.published.version.step for m, _ in grant.members})
                return reply

            keeper.decide = noted  # type: ignore[method-assign]
            at.sampler(behaviour=Behaviour(answer_s))
            assert await at.start_learner(Ages(1.0), MemoryPublisher()) == 0
            assert_each_step_counts_once(at)
            state = keeper.state
            assert all(trained == (age <= 1) for age, _, trained in ages), "the bound is that of each token"
            assert any(since > 1 for age, since, trained in ages if trained), "sampled late, by new weights"
            masked = sum(not trained for *_, trained in ages)
            assert state.tokens_masked == masked
            assert (masked > 0) == (on_stale == "mask")
            if on_stale == "expire":
                assert at.store.sql("SELECT id FROM groups WHERE reason = 'stale'"), "their groups are dropped"

    run(job())
