"""Partitions between store, learner and samplers, in virtual time: nothing is lost, stored twice or trained too old."""

from __future__ import annotations

import asyncio
from pathlib import Path

from jaxroll.records import Version, VersionRef
from tests.harness.store.builders import configured
from tests.harness.virtual_run import VirtualRun
from tests.harness.virtual_time import run


def ref(version: Version) -> VersionRef:
    return VersionRef(version, "tcp", "here", "digest")


def test_a_sampler_fills_the_batches_of_a_run(tmp_path: Path) -> None:
    async def job() -> list[int]:
        async with VirtualRun(configured(), tmp_path) as at:
            learner = await at.client("learner")
            at.sampler()
            version = await learner.begin(None)
            await learner.publish(ref(version))
            found = []
            for step in range(4):
                claim = await learner.claim(0, step, 100.0)
                found += [group.group for group in claim.groups]
                await learner.ack(Version(0, step))
                await learner.publish(ref(Version(0, step + 1)))
            print("virtual", asyncio.get_running_loop().time())
            return found

    assert sorted(run(job())) == list(range(8))
