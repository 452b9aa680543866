"""Builders of small stores: tasks, members, a prompt feeder, a server in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from jaxroll.config import Config, LearnerConfig, ScheduleConfig, StoreConfig, digest
from jaxroll.policy.routing import RelayTree
from jaxroll.records import (
    Claim,
    Failed,
    Finished,
    Grant,
    Member,
    Message,
    Segment,
    Task,
    Version,
    VersionRef,
    VersionRun,
)
from jaxroll.store.client import StoreClient
from jaxroll.store.server.server import serve

DEADLINE_S = 20.0


def task(index: int) -> Task:
    return Task(index, (Message("user", f"question {index}"),), "single_turn", "{}", index, f"{index:016x}")


def finished(group: int, member: int, attempt: int, *runs: tuple[Version, int], reward: float = 1.0) -> Member:
    """A member of four prompt tokens and as many sampled ones as `runs` counts; its tokens encode its key."""
    count = sum(n for _, n in runs)
    prompt = Segment(np.arange(4, dtype=np.int32), np.zeros(4, np.uint8), np.zeros(4, np.float32))
    tokens = np.full(count, group * 100 + member, np.int32)
    answer = Segment(tokens, np.ones(count, np.uint8), np.linspace(-1, 0, count, dtype=np.float32))
    versions = tuple(VersionRun(v, n) for v, n in runs)
    return Member(group, member, attempt, Finished((prompt, answer), "stop", reward, {"raw_score": reward}, versions))


def failed(group: int, member: int, attempt: int, kind: str, error: str = "injected") -> Member:
    return Member(group, member, attempt, Failed(kind, error))


def keys(grants: list[Grant]) -> list[tuple[int, int, int]]:
    return [(g.group, m, a) for g in grants for m, a in g.members]


def version_ref(version: Version, address: str = "here") -> VersionRef:
    return VersionRef(version, "tcp", address, "digest")


class Feed:
    """Prompts 0, 1, 2, …; `limit` of them. Remembers what it was asked to restore."""

    def __init__(self, limit: int | None = None) -> None:
        self.at, self.limit, self.restored = 0, limit, []

    def restore(self, state: bytes | None) -> None:
        self.restored.append(state)
        self.at = int(state) if state else 0

    async def next(self, count: int) -> list[tuple[Task, bytes]]:
        end = self.at + count if self.limit is None else min(self.at + count, self.limit)
        prompts = [(task(i), str(i + 1).encode()) for i in range(self.at, end)]
        self.at = end
        return prompts


def configured(**changes: Any) -> Config:
    """A config of 2 groups of 2 for 4 steps; keys of schedule and store may be changed."""
    schedule: dict[str, Any] = {"steps": 4, "groups_per_step": 2, "group_size": 2, "alpha": 1.0}
    store: dict[str, Any] = {"lease_s": 30.0}
    for key, value in changes.items():
        (schedule if key in ScheduleConfig.__dataclass_fields__ else store)[key] = value
    learner = LearnerConfig(row_tokens=10**6)  # members here are of any length
    return Config(schedule=ScheduleConfig(**schedule), store=StoreConfig(**store), learner=learner)


@contextlib.asynccontextmanager
async def serving(run_dir: Path, config: Config, feed: Any = None, **options: Any) -> AsyncIterator[str]:
    """A store in this process; its address."""
    loop = asyncio.get_running_loop()
    address: asyncio.Future[str] = loop.create_future()
    options = {"host": "127.0.0.1", "port": 0} | options
    job = asyncio.ensure_future(serve(config, run_dir, feed or Feed(), ready=address.set_result, **options))
    try:
        await asyncio.wait([address, job], return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE_S)
        if job.done():
            job.result()
        yield address.result()
    finally:
        job.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await job


@contextlib.contextmanager
def relay_calls() -> Iterator[list[str]]:
    """The names of the receivers whose calls for weights have reached a store in this process, in their order.

    On the store's event loop, a call in this list waits for weights or has been answered.
    """
    names, report = list[str](), RelayTree.report

    def noted(tree: RelayTree, name: str, *state: Any) -> None:
        names.append(name)
        report(tree, name, *state)

    with mock.patch.object(RelayTree, "report", noted):
        yield names


@contextlib.asynccontextmanager
async def connected(run_dir: Path, config: Config, role: str, name: str = "", **options: Any):
    """A client of the store in `run_dir`."""
    options = {"config_digest": digest(config), "patience_s": DEADLINE_S} | options
    client = await StoreClient.connect(run_dir / "store.addr", role=role, name=name or role, **options)
    try:
        yield client
    finally:
        await client.aclose()


@contextlib.asynccontextmanager
async def opened(run_dir: Path, config: Config) -> AsyncIterator[tuple[StoreClient, StoreClient]]:
    """The learner and a sampler of a store in this process, whose first weights are published."""
    async with (
        serving(run_dir, config),
        connected(run_dir, config, "learner") as learner,
        connected(run_dir, config, "sampler") as sampler,
    ):
        await learner.publish(version_ref(await learner.begin(None)))
        yield learner, sampler


async def produce(sampler: StoreClient, version: Version, members: int) -> list[tuple[int, int, int]]:
    """Lease and put at once."""
    leased = keys(await sampler.lease(version, members, 5.0))
    await asyncio.gather(*(sampler.put(finished(*key, (version, 3))) for key in leased))
    return leased


def contents(claim: Claim) -> list[tuple[int, list[int]]]:
    return [(g.group, [m.member for m in g.members]) for g in claim.groups]
