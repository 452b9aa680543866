"""Walks through the roles, recorded in one process: an episode, from a claim to the optimizer, and a weight version.

Real: the sampler's session, loops, episodes, scoring pool, engine and weight sync over TCP; the learner's session and
trainer; the store's service and log. In memory: the connections to the store, and the checkpoints. A synchronous run
plays the three walks one after the other, so that no other work is recorded; metric reports are switched off.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxroll import config as configs
from jaxroll import wire
from jaxroll.clock import MonotonicClock
from jaxroll.config import Config, RoleArgs
from jaxroll.data.tasks import PromptPipeline
from jaxroll.envs import registry
from jaxroll.learner.trainer import Trainer
from jaxroll.records import Grant
from jaxroll.roles import build, learner, sampler
from jaxroll.roles import session as sessions
from jaxroll.roles.weights import RoleLog
from jaxroll.rpc import protocol
from jaxroll.rpc.client import Metadata
from jaxroll.serving import engine_thread
from jaxroll.serving.engine_thread import EngineProxy
from jaxroll.sim.network import MemoryServer, MemoryTransport, Network
from jaxroll.sim.world import MemoryCheckpoints, in_place
from jaxroll.store import messages as msg
from jaxroll.store.client import STORE_PATIENCE_S, StoreClient
from tests.harness.store.store_walks import PipelineFeed, store
from tests.harness.walks import Recorder

EPISODE, TRAINING, VERSION = "episode", "claim to optimizer", "weight version"
# The transport, the store's side of a call and the prompts that it reads ahead; `store_walks` records these.
STORE_SIDE = ("rpc/", "store/core/", "store/log/", "store/server/", "policy/", "data/", "metrics.py")
# Tasks that run meanwhile: the sampler asks for leases while weights arrive, and reports weights while it samples; the
# learner repeats its claim while an episode is longer than a long poll; the listener looks for stalled readers.
MEANWHILE = {
    VERSION: ("roles/sampler.py",),
    EPISODE: ("roles/weights.py", "roles/session.py", "roles/learner.py", "transfer/channel_tcp.py"),
    TRAINING: ("transfer/channel_tcp.py",),
}
STEPS = 3  # the walks of the last steps count: the first ones fill caches
NEVER_S = 3600.0


def config() -> Config:
    """A synchronous run of one group per step."""
    return configs.parse(
        {
            "model": {"size": "nano"},
            "sft": {"steps": 0},
            "task": {"heldout_items": 4},
            "sampling": {"max_tokens": 64},
            "schedule": {"alpha": 0.0, "steps": STEPS, "groups_per_step": 1, "group_size": 2},
            "sampler": {"slots": 2, "prefill_rows": 1, "prefill_buckets": [16], "scoring_workers": 1},
            "learner": {"micro_batch_rows": 1, "row_tokens": 128},
            "evaluator": {"every": 0},
            "transfer": {"channel": "tcp"},
        }
    )


class Walks:
    """The newest walk of each name; one at a time."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self.found = recorder, dict[str, dict[str, list[str]]]()
        self._current, self._walk = "", dict[str, list[str]]()

    def start(self, name: str) -> None:
        """Begin a walk; one that is still open is dropped."""
        self._current, self._walk = name, self._recorder.start()

    def stop(self, name: str) -> None:
        """Keep the walk, if it is the one that is open."""
        if self._current == name:
            self._recorder.stop()
            self._current, self.found[name] = "", self._walk

    def files(self) -> dict[str, list[str]]:
        """The files of each walk, without the store's side and without tasks that run meanwhile."""
        excluded = {name: STORE_SIDE + MEANWHILE[name] for name in self.found}
        return {
            name: [file for file in walk if not file.startswith(excluded[name])] for name, walk in self.found.items()
        }


class MarkedTransport(MemoryTransport):
    """A transport that starts a walk when a claim arrives at its role, and ends one when a put leaves it."""

    walks: Walks

    async def attempt(
        self, path: str, body: bytes, metadata: Metadata, deadline_s: float, *, asks_first: bool
    ) -> bytes:
        method = path.rpartition("/")[2]
        if method == "Put":
            self.walks.stop(EPISODE)
        answer = await super().attempt(path, body, metadata, deadline_s, asks_first=asks_first)
        if method == "Claim" and wire.decode(answer, protocol.Envelope).refusal is None:
            self.walks.start(TRAINING)
        return answer


def before(job: Callable[..., Any], mark: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        mark()
        return job(*args, **kwargs)

    return call


def after(job: Callable[..., Any], mark: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return job(*args, **kwargs)
        finally:
            mark()

    return call


def role_walks(run_dir: Path, patch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The files of the three walks, without those of the store's side."""
    # An idle engine that steps while weights arrive would be counted as part of their way.
    for module, name in ((sessions, "SEND_EVERY_S"), (sampler, "REPORT_EVERY_S"), (engine_thread, "IDLE_S")):
        patch.setattr(module, name, NEVER_S)
    args = RoleArgs(config(), run_dir)
    pool = registry.scoring_pool(args.config)
    pool.start()
    try:
        trainer, parts = build.trainer(args.config), _engine(args)
        trainer.warmup()
        parts.engine.warmup(None)  # compiles faster while no recorder is installed
        recorder = Recorder()
        walks, lease = Walks(recorder), StoreClient.lease

        async def marked(client: StoreClient, *arguments: Any) -> list[Grant]:
            if grants := await lease(client, *arguments):
                walks.start(EPISODE)
            return grants

        patch.setattr(StoreClient, "lease", marked)
        with recorder.installed():
            return asyncio.run(_play(args, pool, walks, trainer, parts))
    finally:
        pool.close()


def _engine(args: RoleArgs) -> build.Inference:
    spec = sampler.role_spec(args)
    return build.inference(
        args.config,
        "sampler",
        spec.mesh,
        slots=spec.slots,
        weight_swap=spec.weight_swap,
        token="",
        progress=RoleLog(spec.role, lambda row: None),
    )


async def _play(
    args: RoleArgs, pool: Any, walks: Walks, trainer: Trainer, parts: build.Inference
) -> dict[str, list[str]]:
    feed = PipelineFeed(PromptPipeline(args.config))
    with store(args.run_dir, args.config, feed, MonotonicClock()) as (service, prompts, keeper):
        network, server = Network(), MemoryServer()
        server.start(msg.SERVICE, service.methods(), lambda: keeper.state.position)
        filling = asyncio.ensure_future(prompts.fill(None))
        try:
            sampling = asyncio.ensure_future(
                _sample(args, pool, parts, _transport(network, server, "sampler-0", walks))
            )
            training = asyncio.ensure_future(_train(args, trainer, _transport(network, server, "learner", walks)))
            await asyncio.wait([sampling, training], return_when=asyncio.FIRST_COMPLETED)
            assert training.done() or sampling.exception() is None, sampling.exception()
            assert await training == 0
            await sampling
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
            await keeper.log.close()
    return walks.files()


def _transport(network: Network, server: MemoryServer, name: str, walks: Walks) -> MarkedTransport:
    transport = MarkedTransport(network, server, name)
    transport.walks = walks
    return transport


async def _train(args: RoleArgs, trainer: Trainer, transport: MarkedTransport) -> int:
    """The learner, with its JAX work on the event loop; its exit code."""
    walks = transport.walks
    trainer.dispatch_step = after(trainer.dispatch_step, lambda: walks.stop(TRAINING))  # type: ignore[method-assign]
    started = itertools.count()

    def start_version() -> None:
        if next(started) < STEPS:  # while the last version arrives, the roles end
            walks.start(VERSION)

    trainer.publishable_params = before(trainer.publishable_params, start_version)  # type: ignore[method-assign]
    client = await StoreClient.connect(
        transport, role="learner", name="learner", config_digest=args.config_digest, patience_s=STORE_PATIENCE_S
    )
    checkpoints: Any = MemoryCheckpoints()
    with build.publisher(args) as publisher:  # pyright: ignore[reportGeneralTypeIssues]
        session = learner.LearnerSession(
            args,
            client,
            checkpoints,
            publisher,
            lambda: trainer,
            stop=threading.Event(),
            on_device=in_place,
            on_thread=asyncio.to_thread,
        )
        try:
            return await session.run()
        finally:
            await session.close()
            await client.aclose()


async def _sample(args: RoleArgs, pool: Any, parts: build.Inference, transport: MarkedTransport) -> None:
    """The sampler, with its engine on a thread, until the run is closed."""
    session = sessions.EngineSession("sampler-0", args, pool, asyncio.get_running_loop(), transport)
    spec = sampler.role_spec(args)
    session.parts, engine, host = parts, parts.engine, parts.host
    session.proxy = EngineProxy(host, session.loop)
    engine.swap = after(engine.swap, lambda: transport.walks.stop(VERSION))  # type: ignore[method-assign]
    thread = threading.Thread(target=host.run, name="engine")
    thread.start()
    try:
        await session.run(lambda: asyncio.sleep(0), lambda: spec.play(session))
    finally:
        host.stop()
        await asyncio.to_thread(thread.join)
