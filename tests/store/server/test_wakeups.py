"""Waiting calls are woken once, in order, and thousands of them do not delay other calls."""

from __future__ import annotations

import asyncio

from jaxroll.store.server.keeper import Wakeups


def test_all_who_wait_are_woken_in_order_a_few_at_a_time() -> None:
    async def job() -> tuple[list[int], list[int]]:
        bell, turns, woken, at_turn = Wakeups(), 0, [], []

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async def waiter(number: int) -> None:
            assert await bell.wait("lease", 20.0)
            woken.append(number)
            at_turn.append(turns)

        jobs = [asyncio.ensure_future(waiter(number)) for number in range(1_000)]
        beside = asyncio.ensure_future(others())
        await asyncio.sleep(0.05)
        bell.notify("claim")
        await asyncio.sleep(0)
        assert not woken
        bell.notify("lease", "claim")
        late = asyncio.ensure_future(bell.wait("lease", 0.05))
        await asyncio.gather(*jobs)
        assert not await late, "it came after the notification"
        beside.cancel()
        return woken, at_turn

    woken, at_turn = asyncio.run(asyncio.wait_for(job(), 30.0))
    assert woken == list(range(1_000))
    assert max(at_turn.count(turn) for turn in set(at_turn)) <= 64


def test_a_wait_ends_with_its_time_and_leaves_nothing() -> None:
    async def job() -> None:
        bell = Wakeups()
        assert not await bell.wait("lease", 0.01)
        given_up = [asyncio.ensure_future(bell.wait("lease", 20.0)) for _ in range(200)]
        await asyncio.sleep(0)
        for one in given_up[:150]:
            one.cancel()
        bell.notify("lease")
        bell.notify("lease")
        assert [await one for one in given_up[150:]] == [True] * 50
        assert not any(bell._waiting.values())

    asyncio.run(asyncio.wait_for(job(), 30.0))


def test_who_asks_again_at_once_is_no_reason_either() -> None:
    """A run notifies many times while thousands wait, who all ask again."""

    async def job() -> list[int]:
        bell, woken = Wakeups(), [0]

        async def waiter() -> None:
            while True:
                assert await bell.wait("lease", 20.0)
                woken[-1] += 1

        jobs = [asyncio.ensure_future(waiter()) for _ in range(1_000)]
        await asyncio.sleep(0.05)
        for _ in range(200):
            bell.notify("lease")
            bell.notify("lease", "claim")
            woken.append(0)
            await asyncio.sleep(0)
        for one in jobs:
            one.cancel()
        return woken

    woken = asyncio.run(asyncio.wait_for(job(), 30.0))
    assert max(woken) <= 64 and sum(woken) > 64 * 150
