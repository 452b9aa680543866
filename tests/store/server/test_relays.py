"""The relays that the store names to receivers of weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxroll.records import Relay, Version
from jaxroll.store.messages import RelayState
from tests.harness.store.builders import relay_calls

WAIT_S = 10.0
V0, V1 = Version(0, 0), Version(0, 1)


@contextlib.asynccontextmanager
async def announcing(small: SimpleNamespace, folder: Path, names: str, **schedule: Any) -> AsyncIterator[Any]:
    """A learner that has published V0, and clients of the samplers `names` and of an evaluator."""
    config = small.configured(**schedule)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(small.serving(folder, config))
        calls = stack.enter_context(relay_calls())
        learner = await stack.enter_async_context(small.connected(folder, config, "learner"))
        clients = {
            name: await stack.enter_async_context(small.connected(folder, config, "sampler", name)) for name in names
        }
        evaluator = await stack.enter_async_context(small.connected(folder, config, "evaluator", "evaluator"))
        await learner.begin(None)

        async def announced(
            name: str, known: Version | None = None, wait_s: float = 0.0, **state: Any
        ) -> tuple[str, ...] | None:
            """The names of the relays; None without newer weights within `wait_s`, or WAIT_S for the first ones."""
            client, address = (clients[name], f"{name}:1") if name in clients else (evaluator, "")
            relay = RelayState(**{"address": address, **state})
            reply = await client.announced(known, WAIT_S if known is None else wait_s, in_turn=True, relay=relay)
            assert all(one == Relay(one.name, f"{one.name}:1") for one in reply.relays)
            return None if reply.ref is None else tuple(one.name for one in reply.relays)

        async def waiting(name: str, known: Version | None = None) -> asyncio.Task[tuple[str, ...] | None]:
            """A call that has reached the store and waits there."""
            before, call = len(calls), asyncio.create_task(announced(name, known, WAIT_S))
            while len(calls) == before and not call.done():
                await asyncio.sleep(0.001)
            return call

        yield SimpleNamespace(learner=learner, announced=announced, waiting=waiting, publish=learner.publish, **clients)


def test_those_that_wait_form_a_tree_and_a_late_one_joins_a_holder(tmp_path: Path, small, run) -> None:
    async def job() -> None:
        async with announcing(small, tmp_path, "abcd") as at:
            waiting = [await at.waiting(name) for name in "abc"]
            await at.publish(small.version_ref(V0))
            assert [await one for one in waiting] == [(), ("a",), ("a", "b")]
            for name in "ab":
                assert await at.announced(name, V0, source="learner", bytes_per_s=1e6) is None
            assert await at.announced("d") == ("b", "a"), "c still fetches from a"
            assert await at.announced("evaluator") == ("a", "b")

    run(job())


def test_a_relay_that_failed_is_not_named_again(tmp_path: Path, small, run) -> None:
    async def job() -> None:
        async with announcing(small, tmp_path, "ab") as at:
            await at.publish(small.version_ref(V0))
            assert await at.announced("a") == ()
            assert await at.announced("a", V0) is None
            assert await at.announced("b") == ("a",)
            assert await at.announced("b", failed=("a",)) == ()

    run(job())


def test_with_rolling_updates_each_one_finds_those_before_it(tmp_path: Path, small, run) -> None:
    async def job() -> None:
        async with announcing(small, tmp_path, "ab", rolling_updates=1) as at:
            await at.publish(small.version_ref(V0))
            for name in "ab":
                await at.announced(name)
                await at.announced(name, V0)
            await small.produce(at.a, V0, 4)
            await at.learner.claim(0, 0, WAIT_S)
            first, second = await at.waiting("b", V0), await at.waiting("a", V0)
            await at.publish(small.version_ref(V1))
            assert await first == (), "a, which registered first, does not have it while it waits for its turn"
            assert await at.announced("b", V1) is None
            assert await second == ("b",)

    run(job())


def test_a_receiver_that_tells_nothing_gets_the_learner(tmp_path: Path, small, run) -> None:
    async def job() -> None:
        async with announcing(small, tmp_path, "ab") as at:
            await at.publish(small.version_ref(V0))
            assert await at.announced("a") == ()
            assert (await at.b.announced(None, WAIT_S)).relays == ()

    run(job())
