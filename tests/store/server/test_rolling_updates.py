"""Update slots for rolling updates: a limited number, in order, and none is lost if its holder dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxroll.config.schema import TransferConfig
from jaxroll.errors import NotReady
from jaxroll.policy.routing import UpdateSlots
from jaxroll.records import Version

WAIT_S = 20.0
SOON_S = 0.3  # in which nothing is to happen
NAMES = ("a", "b", "c", "d")


def test_without_a_limit_everybody_may_at_any_time() -> None:
    turns = UpdateSlots(0, 10.0)
    assert all(turns.take(name, 0.0) for name in NAMES)
    assert not any(turns.over(name) for name in NAMES)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_turns_go_round_in_the_order_of_asking(count: int) -> None:
    turns = UpdateSlots(count, 10.0)
    assert [turns.take(name, 0.0) for name in NAMES] == [place < count for place in range(4)]
    assert turns.over("a") and not turns.over("a"), "over twice"
    assert not turns.take("a", 0.0), "who had it went before those who wait"
    for name in NAMES[count + 1 :]:
        assert not turns.take(name, 0.0), "a later one went first"
    assert turns.take(NAMES[count], 0.0)


def test_an_update_slot_expires_and_a_sampler_that_leaves_frees_its_own() -> None:
    turns = UpdateSlots(1, 10.0)
    assert turns.take("a", 5.0) and turns.next_end_s(5.0) == 15.0
    assert turns.take("a", 6.0), "it has its turn"
    assert turns.next_end_s(15.0) == float("inf"), "one that is over is waited for"
    assert not turns.take("b", 14.9) and not turns.take("c", 14.9)
    assert turns.leave("b") and not turns.leave("b")
    assert turns.take("c", 15.0), "the slot before has ended, and c is first in the queue"
    assert not turns.over("a"), "it was over by itself"
    assert turns.over("c") and turns.next_end_s(15.0) == float("inf")


@pytest.mark.parametrize("seed", range(20))
def test_at_random_never_too_many_and_all_come_on(seed: int) -> None:
    """Samplers hold, fail, die and come back: at most `count` slots; each waiting sampler that stays gets one."""
    chance, count, now_s = random.Random(seed), random.Random(seed).choice((1, 2)), 0.0
    turns, until_s, asked = UpdateSlots(count, 10.0), {}, dict.fromkeys(NAMES, 0)
    for _ in range(2000):
        now_s += chance.expovariate(1.0)
        until_s = {name: end_s for name, end_s in until_s.items() if end_s > now_s}
        name = chance.choice(NAMES)
        if name in until_s and chance.random() < 0.5:
            continue  # still at it
        turns.over(name)
        until_s.pop(name, None)
        if turns.take(name, now_s):
            until_s[name], asked[name] = now_s + 10.0, 0
        else:
            asked[name] += 1
        assert len(until_s) <= count
        assert asked[name] < 200, f"{name} never comes on"


@contextlib.asynccontextmanager
async def two_told(small: SimpleNamespace, folder: Path, turn_s: float) -> AsyncIterator[Any]:
    """A learner, samplers a and b that hold the first weights, an evaluator, and a publisher of the next weights."""
    config = dataclasses.replace(small.configured(rolling_updates=1), transfer=TransferConfig(deadline_s=turn_s))
    async with (
        small.serving(folder, config),
        small.connected(folder, config, "learner") as learner,
        small.connected(folder, config, "sampler", "a") as a,
        small.connected(folder, config, "sampler", "b") as b,
        small.connected(folder, config, "evaluator", "e") as e,
    ):
        await learner.begin(None)
        await learner.publish(small.version_ref(Version(0, 0)))
        for sampler in (a, b):  # a turn may take twice the time of a transfer
            assert await sampler.published(None, in_turn=True) == small.version_ref(Version(0, 0)), "the first weights"

        async def step(number: int) -> None:
            await small.produce(a, Version(0, number - 1), 4)
            await learner.claim(0, number - 1, WAIT_S)
            await learner.publish(small.version_ref(Version(0, number)))

        yield SimpleNamespace(learner=learner, a=a, b=b, e=e, step=step)


def test_two_samplers_get_the_new_version_one_after_the_other(tmp_path: Path, small: SimpleNamespace, run) -> None:
    """A slot ends with the next call; a caller that does not ask for one needs none."""
    v0, v1 = Version(0, 0), Version(0, 1)

    async def job() -> None:
        async with two_told(small, tmp_path, 10 * WAIT_S) as at:
            waiting = [asyncio.ensure_future(one.published(v0, WAIT_S, in_turn=True)) for one in (at.a, at.b)]
            await at.step(1)
            done, late = await asyncio.wait(waiting, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(late, timeout=SOON_S)
            assert [one.result() for one in done] == [small.version_ref(v1)], "one of them, and not both"
            assert not any(one.done() for one in late), "the other at the same time"
            assert await at.e.published(v0, WAIT_S) == await at.a.published(v0) == small.version_ref(v1)
            first, second = (at.a, at.b) if waiting[0] in done else (at.b, at.a)
            assert await first.published(v1, 0.0, in_turn=True) is None, "there is nothing newer"
            assert await asyncio.wait_for(late.pop(), WAIT_S) == small.version_ref(v1), "the first has it now"
            await at.step(2)
            assert await first.published(v1, 0.0, in_turn=True) is None, "it is the other's turn"
            assert await second.published(v0, 0.0, in_turn=True) == small.version_ref(Version(0, 2)), (
                "it could not have it"
            )

    run(job())


def test_a_turn_is_over_when_its_time_is_and_a_place_when_the_call_is(
    tmp_path: Path, small: SimpleNamespace, run
) -> None:
    v0, v1 = Version(0, 0), small.version_ref(Version(0, 1))

    async def job() -> None:
        async with two_told(small, tmp_path, 2.0) as at:
            await at.step(1)
            assert await at.a.published(v0, 0.0, in_turn=True) == v1
            began_s = time.monotonic()
            assert await at.b.published(v0, WAIT_S, in_turn=True) == v1, "a was waited for longer than its turn"
            assert SOON_S < time.monotonic() - began_s < 0.8 * WAIT_S, "not when the turn was over, but with the call"
            assert await at.a.published(v0, 0.05, in_turn=True) is None, "it is b's turn"
            assert await at.b.published(v0, 0.0, in_turn=True) == v1, "a's place was kept though a had gone"

    run(job())


def test_weights_of_a_lineage_that_ended_are_as_good_as_none(tmp_path: Path, small: SimpleNamespace, run) -> None:
    """No sampler may use them, so all fetch at once."""

    async def job() -> None:
        async with two_told(small, tmp_path, 10 * WAIT_S) as at:
            await at.step(1)
            assert await at.a.published(Version(0, 0), 0.0, in_turn=True) == small.version_ref(Version(0, 1))
            assert await at.b.published(Version(0, 0), 0.0, in_turn=True) is None, "it is a's turn"
            begun = await at.learner.begin(None)
            assert begun == Version(1, 0)
            await at.learner.publish(small.version_ref(begun))
            for sampler, known in ((at.b, Version(0, 0)), (at.a, Version(0, 1))):
                assert await sampler.published(known, 0.0, in_turn=True) == small.version_ref(begun)

    run(job())


@contextlib.asynccontextmanager
async def in_intervals(small: SimpleNamespace, folder: Path, config: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A learner and the sampler a, which has the first weights, of a run with `schedule.mode=interval`."""
    v0 = Version(0, 0)
    async with (
        small.serving(folder, config),
        small.connected(folder, config, "learner") as learner,
        small.connected(folder, config, "sampler", "a") as a,
    ):
        await learner.begin(None)
        await learner.publish(small.version_ref(v0))
        await a.published(v0, in_turn=True)
        yield learner, a


def test_with_intervals_a_batch_has_one_version_however_slow_samplers_and_fast_the_learner_are(
    tmp_path: Path, small: SimpleNamespace, run
) -> None:
    """Found with two busy cores: version 3 was published before batch 3 began, which then had its weights."""
    v0, v1, v2 = (Version(0, step) for step in range(3))
    config = small.configured(mode="interval", alpha=1.0)

    async def job() -> None:
        async with (
            in_intervals(small, tmp_path, config) as (learner, a),
            small.connected(tmp_path, config, "sampler", "b") as b,
        ):
            assert await b.published(None, in_turn=True) == small.version_ref(v0)
            await b.published(v0, in_turn=True)
            await small.produce(a, v0, 4)
            await learner.claim(0, 0, WAIT_S)
            await learner.publish(small.version_ref(v1))
            assert await a.published(v0, in_turn=True) is None, (
                "batch 1 has not begun, and it is sampled with version 0"
            )
            await small.produce(a, v0, 4)
            for sampler in (a, b):
                assert await sampler.published(v0, in_turn=True) == small.version_ref(v1), "batch 2 is next"
            await a.published(v1, in_turn=True)
            with pytest.raises(NotReady, match="weights of version 1"):
                await learner.claim(0, 1, 0.0)
            claim = asyncio.ensure_future(learner.claim(0, 1, WAIT_S))
            await b.published(v1, in_turn=True)
            await asyncio.wait_for(claim, WAIT_S)
            await learner.publish(small.version_ref(v2))
            assert await b.published(v1, in_turn=True) is None

    run(job())


def test_with_intervals_a_learner_does_not_wait_for_a_sampler_that_leaves(
    tmp_path: Path, small: SimpleNamespace, run
) -> None:
    v0, v1 = Version(0, 0), Version(0, 1)
    config = small.configured(mode="interval", alpha=1.0)

    async def job() -> None:
        async with in_intervals(small, tmp_path, config) as (learner, a):
            async with small.connected(tmp_path, config, "sampler", "b") as b:
                await b.published(v0, in_turn=True)
                await small.produce(a, v0, 4)
                await learner.claim(0, 0, WAIT_S)
                await learner.publish(small.version_ref(v1))
                await small.produce(a, v0, 4)
                assert await a.published(v0, in_turn=True) == small.version_ref(v1)
                await a.published(v1, in_turn=True)
                claim = asyncio.ensure_future(learner.claim(0, 1, WAIT_S))
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(claim), SOON_S)
                await b.leave()
            await asyncio.wait_for(claim, WAIT_S)

    run(job())


def test_with_intervals_a_sampler_that_gets_no_weights_is_waited_for_once(
    tmp_path: Path, small: SimpleNamespace, run
) -> None:
    """The wait begins when the batch is finished; claims that are not, or that are delivered again, do not wait."""
    v0 = Version(0, 0)
    config = small.configured(mode="interval", alpha=1.0, steps=20)
    config = dataclasses.replace(config, transfer=TransferConfig(deadline_s=1.0))

    async def job() -> None:
        async with (
            in_intervals(small, tmp_path, config) as (learner, a),
            small.connected(tmp_path, config, "sampler", "b") as b,
        ):
            await b.published(v0, in_turn=True)
            waits = []
            for step in range(4):
                version = Version(0, max(step - 1, 0))
                await a.published(version, in_turn=True)
                if step == 1:  # asked for long before the batch is finished
                    ahead = asyncio.ensure_future(learner.claim(0, step, 0.0, ahead=True))
                    with pytest.raises(NotReady, match="group"):
                        await ahead
                await small.produce(a, version, 4)
                await a.published(Version(0, step), in_turn=True)
                refusals, claimed = list[str](), False
                while not claimed:
                    try:
                        claimed = bool(await learner.claim(0, step, SOON_S))
                    except NotReady as error:
                        refusals.append(str(error))
                waits.append(any("has not the weights" in text for text in refusals))
                assert (await learner.claim(0, step, 0.0)).step == step
                await learner.publish(small.version_ref(Version(0, step + 1)))
            assert waits == [False, True, False, False]
            await b.published(Version(0, 3), in_turn=True)  # it follows again, and then a new process takes its name
            async with small.connected(tmp_path, config, "sampler", "b"):
                await small.produce(a, Version(0, 3), 4)
                await a.published(Version(0, 4), in_turn=True)
                await learner.claim(0, 4, 0.0)

    run(job())


def test_with_intervals_a_late_member_is_left_out_as_always(tmp_path: Path, small: SimpleNamespace, run) -> None:
    """A claim that waits for members is decided, and only one that could be delivered waits for weights."""
    v0, v1 = Version(0, 0), Version(0, 1)
    changes = {"mode": "interval", "straggler": "shrink", "straggler_deadline_s": 1.0, "group_size": 4, "steps": 20}
    config = small.configured(alpha=1.0, **changes)

    async def job() -> None:
        async with in_intervals(small, tmp_path, config) as (learner, a):
            await small.produce(a, v0, 8)
            await learner.claim(0, 0, WAIT_S)
            await learner.publish(small.version_ref(v1))
            leased = small.keys(await a.lease(v0, 8, 5.0))
            for key in leased[:-1]:
                await a.put(small.finished(*key, (v0, 2)))
            claim = await asyncio.wait_for(learner.claim(0, 1, WAIT_S), WAIT_S / 2)
            assert sorted(len(members) for _, members in small.contents(claim)) == [3, 4]

    run(job())
