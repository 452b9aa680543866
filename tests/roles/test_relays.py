"""Weights from a learner through relays to several samplers: store, sockets and followers are real, engines are not."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxroll.config import TransferConfig
from jaxroll.records import Version
from jaxroll.roles.weights import RoleLog, WeightFollower
from jaxroll.store.messages import RelayState
from jaxroll.transfer.ends import FetchedParameters, Publisher, Receiver
from jaxroll.transfer.relay import RelaySender
from tests.harness.store.builders import configured, connected, produce, relay_calls, serving
from tests.harness.transfer_arrays import SHAPES, abstract_of, params_of, shardings_of, values_of

CONFIG = TransferConfig(channel="tcp", deadline_s=20.0, relay="tree")
TOKEN = "sampler." + "0" * 64
MESHES = [((1, 1, 2), "sampler"), ((1, 2, 2), "learner"), ((1, 1, 1), "replicated"), ((2, 2, 2), "sampler")]


class Sampler:
    """A follower with an engine that only stores its weights."""

    def __init__(self, name: str, number: int) -> None:
        self.listener = RelaySender(CONFIG, "127.0.0.1", token=TOKEN)
        receiver = Receiver(CONFIG, token=TOKEN, relay=self.listener.relay)
        arriving = FetchedParameters(receiver, shardings_of(*MESHES[number % len(MESHES)]), abstract_of(SHAPES))
        self.rows: list[dict] = []
        self.version, self.params = None, {}
        host: Any = SimpleNamespace(call=self._call, engine=self)
        progress = RoleLog(name, self.rows.append)
        self.follower = WeightFollower(
            host, arriving, progress, relay=RelayState(self.listener.address), listener=self.listener
        )

    def _call(self, job) -> Future:
        done: Future = Future()
        done.set_result(job())
        return done

    def warmup(self, params) -> None:
        """Compile nothing."""

    def drop_waiting_swap(self) -> None:
        """No swap waits."""

    def swap(self, version: Version, params) -> None:
        self.version, self.params = version, params

    def stats(self) -> Any:
        return SimpleNamespace(version=self.version)

    def fetches(self) -> list[dict[str, int]]:
        return [row["sources"] for row in self.rows if row.get("what") == "fetch"]

    def assert_holds(self, step: int) -> None:
        for name, value in values_of(step).items():
            assert np.asarray(self.params[name]).tobytes() == value.tobytes(), (step, name)


async def until_at(samplers: list[Sampler], step: int) -> None:
    async with asyncio.timeout(20):
        while not all(one.version == Version(0, step) for one in samplers):
            await asyncio.sleep(0.01)
    for one in samplers:
        one.assert_holds(step)


@pytest.mark.parametrize("count", [*(pytest.param(count, marks=pytest.mark.soak) for count in (2, 4)), 8])
def test_the_learner_sends_one_copy_and_a_dead_relay_costs_one_more(tmp_path: Path, count: int) -> None:
    config, sharding = configured(steps=20, alpha=8.0), shardings_of((1, 2, 2), "learner")
    samplers = [Sampler(f"sampler-{number}", number) for number in range(count)]
    size, sent = sum(4 * int(np.prod(shape)) for shape in SHAPES.values()), []

    async def job() -> None:
        # Each sampler has a process of its own otherwise, and the threads of one process are too few for all fetches.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4 * count))
        async with contextlib.AsyncExitStack() as stack:
            publisher = stack.enter_context(Publisher(CONFIG, tmp_path, token=TOKEN))
            await stack.enter_async_context(serving(tmp_path, config))
            calls = stack.enter_context(relay_calls())
            learner = await stack.enter_async_context(connected(tmp_path, config, "learner"))
            await learner.begin(None)
            following = []
            for number, one in enumerate(samplers):
                client = await stack.enter_async_context(connected(tmp_path, config, "sampler", f"sampler-{number}"))
                following.append(asyncio.ensure_future(one.follower.follow(client)))
            async with asyncio.timeout(20):
                while len(set(calls)) < count:  # until all of them wait for weights
                    await asyncio.sleep(0.01)
            player = await stack.enter_async_context(connected(tmp_path, config, "sampler", "player"))
            for step in range(4):
                if step:
                    await produce(player, Version(0, step - 1), 4)
                    await learner.claim(0, step - 1, 10.0)
                before = publisher.sent_bytes
                params = params_of(values_of(step), sharding)
                await learner.publish(await asyncio.to_thread(publisher.publish, Version(0, step), params))
                await until_at(samplers, step)
                async with asyncio.timeout(20):  # both are noted after the weights have arrived
                    while publisher.sent_bytes - before < size or any(len(one.fetches()) <= step for one in samplers):
                        await asyncio.sleep(0.01)
                sent.append(publisher.sent_bytes - before)
                if step == 1:
                    samplers[0].listener.close()  # the one next to the learner
            for one in following:
                one.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    try:
        asyncio.run(job())
    finally:
        for one in samplers:
            with contextlib.suppress(Exception):
                one.listener.close()
    by_learner = [sum("learner" in one.fetches()[step] for one in samplers) for step in range(4)]
    assert by_learner[:2] == [1, 1] and sent[0] == pytest.approx(sent[1], rel=0.1) and sent[0] > size
    assert all(copies <= 2 for copies in by_learner), by_learner
    assert sent[2] <= 2.2 * sent[1] and sent[3] <= 2.2 * sent[1]
    events = [row["text"] for one in samplers for row in one.rows if row.get("kind") == "event"]
    assert any("relay sampler-0 failed after 0 bytes: TransferError" in text for text in events), events
