"""Conversations whose sampler dies or leaves, in virtual time: others continue after the last completed turn."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxroll import wire
from jaxroll.config import Config
from jaxroll.envs import registry
from jaxroll.protocols import GenerationKey, StepResult
from jaxroll.records import MAX_STATE_BYTES, Finished, Member, Message, Partial, Task, Version, VersionRun
from jaxroll.roles.weights import SwapGate
from jaxroll.sim.network import run
from jaxroll.sim.world import TOKENIZER, Feed, MemoryLog
from jaxroll.store.log.replay import replay_log
from tests.harness.sampler_members import Store, members
from tests.harness.virtual_run import VirtualRun
from tests.roles import test_migration
from tests.roles.test_migration import FLUSH, LETTERS, Fleet, Generation, parts

TURNS, STEP_S = 5, 0.4
RESTORED = Counter[str]()


def reply(total: int, turn: int) -> str:
    """The message after a turn: it depends on all answers so far."""
    return "ab"[total % 2] * (1 + (total + turn) % 3)


class Talk:
    """Five turns; the replies and the reward depend on the characters of all answers."""

    step_limit_s = 60.0

    def __init__(self, pool: object, config: object) -> None:
        self.total = self.turn = 0

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        assert self.turn == 0, "an environment that was played begins again"
        return task.messages

    async def step(self, answer: str) -> StepResult:
        await asyncio.sleep(STEP_S)
        self.total, self.turn = self.total + len(answer), self.turn + 1
        if self.turn == TURNS:
            return StepResult(done=True, reward=float(self.total % 7))
        return StepResult(False, (Message("user", reply(self.total, self.turn)),), state=self.state())

    def state(self) -> bytes | None:
        return None

    async def close(self) -> None: ...


@registry.register("talk")
class Restorable(Talk):
    """A conversation that another sampler can continue."""

    def state(self) -> bytes | None:
        return b"%d %d" % (self.total, self.turn)

    async def restore(self, state: bytes) -> None:
        RESTORED["talk"] += 1
        await asyncio.sleep(STEP_S)
        self.total, self.turn = map(int, state.split())


@registry.register("fresh_talk")
class Fresh(Talk):
    """A conversation that begins again elsewhere."""


@registry.register("broken_talk")
class Broken(Restorable):
    """A conversation whose restoration fails when it is half done."""

    async def restore(self, state: bytes) -> None:
        self.turn = 3
        raise RuntimeError("no such snapshot")


@registry.register("large_talk")
class Large(Restorable):
    """A conversation whose state becomes too large in its second turn."""

    def state(self) -> bytes | None:
        return b"%d %d" % (self.total, self.turn) + b" " * (MAX_STATE_BYTES if self.turn > 1 else 0)


def drawn(key: GenerationKey, prompt: np.ndarray) -> list[int]:
    """The answer to a prompt that these random keys draw."""
    draw = random.Random(f"{key.group}/{key.member}/{key.salt}/{prompt.tolist()}")
    return [draw.choice(LETTERS) for _ in range(draw.randint(1, 24))] + [TOKENIZER.eos_id]


def undisturbed(key: GenerationKey) -> tuple[list[list[int]], float]:
    """The segments and the reward of a conversation that one sampler plays."""
    segments, total = [TOKENIZER.render((Message("user", "a"),))], 0
    for turn in range(1, TURNS + 1):
        answer = drawn(key, np.concatenate(segments))
        segments.append(answer)
        total += len(answer) - 1
        if turn < TURNS:
            segments.append(TOKENIZER.render((Message("user", reply(total, turn)),), first=False))
    return segments, float(total % 7)


def config(flush_tokens: int = FLUSH) -> Config:
    made = test_migration.config(flush_tokens)
    task = replace(made.task, max_episode_tokens=400)
    return replace(made, task=task, learner=replace(made.learner, row_tokens=512))


Damage = Callable[[VirtualRun], None]


async def played(
    folder: Path, env: str, seed: int = 0, ends: int = 12, damage: Damage | None = None, weight_swap: str = "keep_kv"
) -> Any:
    """A run with `ends` deaths and leaves: the fleet, the stored members, the store's status, the faults."""
    made = config()
    at = VirtualRun(replace(made, schedule=replace(made.schedule, weight_swap=weight_swap, alpha=2.0)), folder)
    at.store._feed = lambda: Feed(f"tests.roles.test_turn_migration:{env}")
    at.store._log = MemoryLog(keep_bytes=2**30)
    async with at:
        fleet = Fleet(at, seed, drawn)
        for _ in range(2):
            fleet.join()
        learner = at.learner(train_s=1.0)
        trouble = asyncio.ensure_future(fleet.trouble(ends))
        while not learner.done():
            if damage is not None:
                damage(at)
            await asyncio.wait([learner], timeout=0.5)
        assert learner.result() == 0
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)
        assert not (found := replay_log(at.store._log.connection)).violations, found.violations
        members = [wire.decode(body, Member) for (body,) in at.store.sql("SELECT body FROM payloads")]
        faults, last = Counter[str](), dict[str, dict[str, int]]()
        for row in at.store.metrics.written():
            if row.get("kind") == "stats":
                last[row["role"]] = row["env_faults"]
        for found in last.values():
            faults.update(found)
        assert at.store.sql("SELECT COUNT(*) FROM failures") == [(0,)], "a member failed"
        return fleet, members, at.store.status(), faults


def checked(made: list[Generation], members: list[Member]) -> None:
    """Every conversation is the undisturbed one, and its versions never go back."""
    assert members
    for one in members:
        assert isinstance(one.outcome, Finished)
        segments, reward = undisturbed(parts(made)[one.group, one.member][0].key)
        assert [segment.tokens.tolist() for segment in one.outcome.segments] == segments
        assert one.outcome.reward == reward
        assert all(a.version <= b.version for a, b in itertools.pairwise(one.outcome.versions))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))])
def test_conversations_go_on_after_their_last_completed_turn(tmp_path: Path, seed: int) -> None:
    RESTORED.clear()
    fleet, members, status, faults = run(played(tmp_path, "talk", seed))
    checked(fleet.made, members)
    assert fleet.ends == 12 and status["conservation_residual"] == 0 and not faults
    moved = 0
    for one in members:
        played_by = parts(fleet.made)[one.group, one.member]
        answers = [segment for segment in one.outcome.segments if segment.loss_mask.any()]  # type: ignore[union-attr]
        prompts = [
            len(np.concatenate([s.tokens for s in one.outcome.segments[: 2 * turn + 1]])) for turn in range(TURNS)
        ]  # type: ignore[union-attr]
        for before, after in itertools.pairwise(played_by):
            if before.by == after.by:
                continue
            turn, again = prompts.index(before.prompt), prompts.index(after.prompt)
            assert again >= turn, "a completed turn is played again"
            assert again > turn or before.end - after.start <= FLUSH + 1, "more than one flush is sampled again"
            kept = [set(answer.logprobs.tolist()) for answer in answers[:again]]
            assert all(-float(after.by) not in found for found in kept), "flushed turns are not kept verbatim"
            moved += again > 0
    assert moved > 3 and RESTORED["talk"] >= moved


def test_without_a_state_a_conversation_begins_again(tmp_path: Path) -> None:
    fleet, members, _, faults = run(played(tmp_path, "fresh_talk"))
    checked(fleet.made, members)
    first = len(TOKENIZER.render((Message("user", "a"),)))
    moves = [
        after
        for same in parts(fleet.made).values()
        for before, after in itertools.pairwise(same)
        if before.by != after.by
    ]
    assert moves and all(one.prompt == first for one in moves) and not faults


def test_a_conversation_that_cannot_be_restored_begins_again_and_is_counted(tmp_path: Path) -> None:
    fleet, members, _, faults = run(played(tmp_path, "broken_talk"))
    checked(fleet.made, members)
    assert faults["restore: RuntimeError: no such snapshot"] > 1


def test_a_state_that_is_too_large_is_not_kept(tmp_path: Path) -> None:
    fleet, members, status, faults = run(played(tmp_path, "large_talk"))
    checked(fleet.made, members)
    assert any(cause.startswith("state: N bytes") for cause in faults) and status["members_resumed"] > 0
    again = list[bool]()  # where they go on after the second turn, whose state was not kept
    for same in parts(fleet.made).values():
        prompts = sorted({one.prompt for one in same})
        moves = [(before, after) for before, after in itertools.pairwise(same) if before.by != after.by]
        again += [after.prompt == prompts[1] for before, after in moves if before.prompt in prompts[2:]]
    assert again and all(again), "with the state of the second turn that of the first was lost"


@pytest.mark.parametrize("damage", ["state", "body"])
def test_damaged_rows_cost_a_conversation_its_turns_only(tmp_path: Path, damage: str) -> None:
    broken = Counter[str]()

    def break_rows(at: VirtualRun) -> None:
        for group, member, start, body in at.store.sql("SELECT group_id, member, start, body FROM partials"):
            try:
                piece = wire.decode(body, Partial)
            except msgspec.DecodeError:
                continue
            if piece.turn is None or piece.turn.state == b"?":
                continue
            turn = msgspec.structs.replace(piece.turn, state=b"?")
            made = wire.encode(msgspec.structs.replace(piece, turn=turn)) if damage == "state" else b"\xc1"
            where = (made, group, member, start)
            update = "UPDATE partials SET body = ? WHERE group_id = ? AND member = ? AND start = ?"
            at.store._log.connection.execute(update, where)
            broken[damage] += 1

    fleet, members, _, faults = run(played(tmp_path, "talk", damage=break_rows))
    checked(fleet.made, members)
    assert broken[damage] > 10 and members
    assert (sum(faults.values()) > 0) is (damage == "state")


def versions(one: Member) -> int:
    """The number of versions of a member's tokens."""
    assert isinstance(one.outcome, Finished)
    return len({run.version for run in one.outcome.versions})


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))])
def test_with_one_version_per_trajectory_no_conversation_has_two(tmp_path: Path, seed: int) -> None:
    """Samplers die and leave, and others continue their conversations only at the same version."""
    fleet, members, status, _ = run(played(tmp_path, "talk", seed, weight_swap="trajectory"))
    checked(fleet.made, members)
    assert {versions(one) for one in members} == {1} and status["conservation_residual"] == 0
    assert len({one.outcome.versions[0].version for one in members}) > 4  # type: ignore[union-attr]


@pytest.mark.parametrize(("weight_swap", "kept"), [("trajectory", 0), ("keep_kv", 1)])
def test_weights_that_change_between_the_lease_and_the_start_end_flushed_answers(weight_swap: str, kept: int) -> None:
    """The store compares versions at the lease only."""
    work = members(Store())
    work.config.schedule.weight_swap = weight_swap  # type: ignore[misc]
    run_of = lambda version: (VersionRun(version, 1),)  # noqa: E731
    other, same = (
        Partial(0, 0, 1, 0, "", np.zeros(1, np.int32), np.zeros(1, np.float32), run_of(version))
        for version in (Version(0, 1), Version(0, 0))  # `work` has the latter
    )
    assert len(asyncio.run(work._continued((other,)))) == kept
    assert asyncio.run(work._continued((same,))) == (same,)


def test_without_it_conversations_have_several_versions(tmp_path: Path) -> None:
    _, members, _, _ = run(played(tmp_path, "talk", ends=0))
    assert max(map(versions, members)) > 1


def test_weights_wait_for_members_and_later_members_for_the_weights() -> None:
    gate, seen = SwapGate(), list[str]()

    async def member(name: str, seconds: float) -> None:
        async with gate.member():
            seen.append(name)
            await asyncio.sleep(seconds)
            seen.append(f"end of {name}")

    async def change() -> None:
        async with gate.change():
            seen.append("change")
            await asyncio.sleep(1.0)
            seen.append("end of change")

    async def job() -> None:
        jobs = [asyncio.ensure_future(member("a", 2.0)), asyncio.ensure_future(member("b", 4.0))]
        await asyncio.sleep(1.0)
        jobs.append(asyncio.ensure_future(change()))
        given_up = asyncio.ensure_future(change())
        await asyncio.sleep(0)
        jobs.append(asyncio.ensure_future(member("c", 1.0)))
        await asyncio.sleep(0.5)
        given_up.cancel()
        jobs[1].cancel()
        await asyncio.gather(*jobs, given_up, return_exceptions=True)

    run(job())
    assert seen == ["a", "b", "end of a", "change", "end of change", "c", "end of c"]
