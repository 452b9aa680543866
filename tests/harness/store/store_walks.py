"""Walks through the store, recorded in one process: from the dataset to a lease, one put, and one claim.

The store's real objects run on a disk without sockets: the calls enter at the methods of `StoreService`, where the RPC
server hands them over, and end with the encoded answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxroll import wire
from jaxroll.clock import Clock, ManualClock
from jaxroll.config import Config, digest
from jaxroll.data.tasks import PromptPipeline
from jaxroll.metrics import JsonlTracker
from jaxroll.policy.routing import UpdateSlots
from jaxroll.records import Task, Version
from jaxroll.rpc.server import Caller, Method
from jaxroll.store import messages as msg
from jaxroll.store.core.admission import Settings
from jaxroll.store.log.commit_log import Log
from jaxroll.store.log.schema import Audit
from jaxroll.store.server.keeper import Keeper, Workers
from jaxroll.store.server.service import PAGE_BYTES, PromptBuffer, StoreService
from tests.harness.store.builders import configured, finished, version_ref
from tests.harness.walks import Recorder

V0 = Version(0, 0)
TOOK_S = 10.0  # of a member, as of a real sampler


class PipelineFeed:
    """Feeder in the store's process: the real prompt pipeline without the child process around it."""

    def __init__(self, pipeline: PromptPipeline) -> None:
        self._pipeline = pipeline

    def restore(self, state: bytes | None) -> None:
        if state is not None:
            self._pipeline.restore(state)

    async def next(self, count: int) -> list[tuple[Task, bytes]]:
        return [(next(self._pipeline), self._pipeline.state()) for _ in range(count)]


class Calls:
    """The methods of a store, called as the RPC server calls them."""

    def __init__(self, methods: dict[str, Method], config: Config, run_id: str) -> None:
        self._methods, self._digest, self._run_id = methods, digest(config), run_id

    async def __call__(self, role: str, method: str, message: Any, reply: Any) -> Any:
        answer = await self.raw(role, method, wire.encode(message))
        return wire.decode(answer, reply)

    async def raw(self, role: str, method: str, body: bytes) -> bytes:
        caller = Caller(role, role, f"{role}-session", self._run_id, 60.0, self._digest)
        return await self._methods[method].handler(caller, body)


@contextmanager
def store(
    run_dir: Path, config: Config, feed: Any, clock: Clock
) -> Iterator[tuple[StoreService, PromptBuffer, Keeper]]:
    log = Log(run_dir)
    keeper = Keeper(Settings.of(config), log, clock)
    metrics = JsonlTracker(run_dir / "metrics.jsonl")
    prompts = PromptBuffer(feed, 2, lambda: None, lambda: None)
    audit = Audit(log.append, keeper.now_s)
    service = StoreService(
        keeper,
        prompts,
        metrics,
        audit,
        config_digest=digest(config),
        page_bytes=PAGE_BYTES,
        turns=UpdateSlots(0, 1.0),
        workers=Workers(config, keeper, metrics),
        vocab_size=lambda: 0,
    )
    try:
        yield service, prompts, keeper
    finally:
        service.close()
        metrics.close()


def store_walks(run_dir: Path) -> dict[str, dict[str, list[str]]]:
    """Record a lease (with the prompt that it issues), the put that completes its group, and a claim: files by name."""
    config, clock, recorder = configured(group_size=1), ManualClock(), Recorder()

    async def play() -> dict[str, dict[str, list[str]]]:
        with store(run_dir, config, PipelineFeed(PromptPipeline(config)), clock) as (service, prompts, keeper):
            call = Calls(service.methods(), config, keeper.run_id)
            filling = asyncio.ensure_future(prompts.fill(None))
            for role in ("learner", "sampler"):
                await call(role, "Hello", msg.Hello(wire.PROTOCOL_VERSION, digest(config)), msg.Welcome)
            await call("learner", "Begin", msg.BeginCall(None), msg.VersionCall)
            await call("learner", "Publish", version_ref(V0), msg.Done)
            walks: dict[str, dict[str, list[str]]] = {}
            for number in range(6):  # the first ones fill caches
                request = wire.encode(msg.LeaseCall(V0, 1, 5.0, f"request-{number}"))
                with recorder.walk() as walks["lease"]:
                    answer = await call.raw("sampler", "Lease", request)
                    await asyncio.sleep(0.05)  # the prompt is replaced by the next one of the dataset
                (grant,) = wire.decode(answer, msg.LeaseReply).grants
                clock.advance(TOOK_S)
                member = finished(grant.group, *grant.members[0], (V0, 3))
                body = wire.encode(msg.PutCall((wire.encode(member),)))
                with recorder.walk() as walks["put"]:
                    answer = await call.raw("sampler", "Put", body)
                assert wire.decode(answer, msg.PutReply).answers[0].result == "OK"
                if number == 3:
                    break
            with recorder.walk() as walks["claim"]:  # of the first step; its groups are stored by now
                answer = await call.raw("learner", "Claim", wire.encode(msg.ClaimCall(0, 0, 0.0)))
            assert wire.decode(answer, msg.ClaimPage).parts
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
            await keeper.log.close()
            return walks

    with recorder.installed():
        return asyncio.run(play())
