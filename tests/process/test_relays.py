"""Relays as processes: a whole run in which samplers fetch from one another, and a relay that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import jax
import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from jaxroll.records import Version
from jaxroll.transfer.ends import Publisher
from tests.harness.programs import weight_relay
from tests.harness.store.builders import connected, produce, serving
from tests.harness.train_process import LEARNING, ROOT, Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
WORDS = (
    *LEARNING, "--config.schedule.steps=5000", "--config.schedule.alpha=2", "--config.sampler.count=2",
    "--config.transfer.channel=tcp", "--config.transfer.relay=tree",
)  # fmt: skip


def fetched(rows: list[dict], role: str) -> list[dict[str, int]]:
    """The bytes of each fetch of a sampler, by source."""
    found = [row for row in rows if row["kind"] == "span" and row["what"] == "fetch" and row["role"] == role]
    return [row["sources"] for row in found]


@pytest.mark.soak
def test_the_second_sampler_fetches_from_the_first(free_run_dir) -> None:
    with Train(free_run_dir, *WORDS) as train:
        train.until(lambda rows: last_step(rows) >= 8, "eight steps")
        train.until(
            lambda rows: all(len(fetched(rows, role)) >= 4 for role in ("sampler-0", "sampler-1")), "fetches of both"
        )
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=2)
    sources = [list(one) for role in ("sampler-0", "sampler-1") for one in fetched(train.rows, role)]
    relayed = [one for one in sources if one in (["sampler-0"], ["sampler-1"])]
    assert len(relayed) >= 3 and all(len(one) == 1 for one in sources), sources
    sent = [row["relay_sent_bytes"] for row in train.rows if row["kind"] == "stats" and "relay_sent_bytes" in row]
    assert max(sent) > 0
    steps = [row["weights_sent_bytes"] for row in train.rows if row["kind"] == "step"]
    assert steps == sorted(steps) and steps[-1] > 0


class Relay:
    """A process that follows the weights and serves them. `digests` of what it received, by step, and its rows."""

    def __init__(self, name: str, process: Process) -> None:
        self.name, self.process, self.digests, self.rows = name, process, dict[int, str](), list[dict]()
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, run_dir: Path, name: str, *words: str) -> Relay:
        env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
        program = [sys.executable, weight_relay.__file__, str(run_dir), name, *words]
        return cls(name, await asyncio.create_subprocess_exec(*program, stdin=PIPE, stdout=PIPE, env=env, cwd=ROOT))

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if line.startswith(b"{"):
                self.rows.append(json.loads(line))
            elif (words := line.split())[0].isdigit():
                self.digests[int(words[0])] = words[1].decode()

    def sources(self, step: int) -> dict[str, int]:
        """Bytes of the version, by source; empty before it is here."""
        return next((row["sources"] for row in self.rows if row.get("version") == f"0.{step}" and "sources" in row), {})

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reading


@pytest.mark.soak
@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_relay_that_is_killed_in_the_middle_of_an_array_is_skipped(tmp_path: Path, count: int) -> None:
    config, here = weight_relay.config(), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sent, size_bytes = list[int](), sum(value.nbytes for value in weight_relay.values(0).values())

    async def at(relays: list[Relay], step: int) -> None:
        async with asyncio.timeout(120):
            while not all(one.digests.get(step) and one.sources(step) for one in relays):
                await asyncio.sleep(0.02)
        assert {one.digests[step] for one in relays} == {weight_relay.digest(weight_relay.values(step))}

    async def job() -> tuple[Relay, list[Relay]]:
        async with contextlib.AsyncExitStack() as stack:
            publisher = stack.enter_context(Publisher(weight_relay.TRANSFER, tmp_path, token=weight_relay.TOKEN))
            await stack.enter_async_context(serving(tmp_path, config))
            learner = await stack.enter_async_context(connected(tmp_path, config, "learner"))
            player = await stack.enter_async_context(connected(tmp_path, config, "sampler", "player"))
            await learner.begin(None)
            relays, alive = list[Relay](), list[Relay]()
            for step in range(4):
                if step:
                    await produce(player, Version(0, step - 1), 4)
                    await learner.claim(0, step - 1, 10.0)
                before = publisher.sent_bytes
                params = jax.device_put(weight_relay.values(step), here)
                await learner.publish(await asyncio.to_thread(publisher.publish, Version(0, step), params))
                if not step:
                    for index in range(count):
                        relays.append(one := await Relay.start(tmp_path, f"sampler-{index}", "2"))
                        stack.push_async_callback(one.end)
                if step == 2:
                    dying = [asyncio.ensure_future(one.process.wait()) for one in relays]
                    await asyncio.wait(dying, timeout=120, return_when=asyncio.FIRST_COMPLETED)
                alive = [one for one in relays if one.process.returncode is None]
                await at(alive, step)
                got = sum(one.sources(step).get("learner", 0) for one in alive) + size_bytes * (step == 2)
                async with asyncio.timeout(20):  # the learner counts a batch after it has sent it
                    while publisher.sent_bytes - before < got:
                        await asyncio.sleep(0.01)
                sent.append(publisher.sent_bytes - before)
            (killed,) = [one for one in relays if one.process.returncode == -signal.SIGKILL]
            return killed, [one for one in relays if one is not killed]

    killed, others = asyncio.run(job())
    failed = [row["text"] for one in others for row in one.rows if f"relay {killed.name} failed" in row.get("text", "")]
    assert failed, "no receiver was reading from the relay that was killed"
    print(f"{count} receivers; copies sent by the learner: {[round(one / size_bytes, 2) for one in sent]}; {failed}")
    assert sent[1] == pytest.approx(size_bytes, rel=0.1) and sent[3] == pytest.approx(size_bytes, rel=0.1)
    assert sent[2] <= 2.2 * size_bytes
