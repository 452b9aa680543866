"""A person's control of a run: pause and resume of its leases, a checkpoint after the next claim."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll.clock import ManualClock
from jaxroll.errors import NoCredit, Unauthorized
from jaxroll.records import Version

V0 = Version(0, 0)


def test_a_paused_run_grants_no_leases_and_ends_what_it_began(tmp_path: Path, small: SimpleNamespace, run, waiting):
    config = small.configured()

    async def acts() -> None:
        async with (
            small.opened(tmp_path, config) as (_, sampler),
            small.connected(tmp_path, config, "supervisor") as person,
        ):
            keys = small.keys(await sampler.lease(V0, 4, 5.0))
            with pytest.raises(Unauthorized):
                await sampler.control("pause")
            await person.control("pause")
            with pytest.raises(NoCredit, match="paused"):
                await sampler.lease(V0, 4, 0.0)
            assert (await person.status())["paused"]
            for key in keys:
                assert await sampler.put(small.finished(*key, (V0, 3))) == "OK"
            held = asyncio.ensure_future(sampler.lease(V0, 4, 30.0))
            await waiting("lease")
            assert not held.done()
            await person.control("resume")
            assert await held and not (await person.status())["paused"]

    run(acts())


def test_a_checkpoint_is_wanted_at_one_claim_until_it_is_durable(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(alpha=2.0)

    async def acts() -> None:
        async with (
            small.opened(tmp_path, config) as (learner, sampler),
            small.connected(tmp_path, config, "supervisor") as person,
        ):
            for key in small.keys(await sampler.lease(V0, 64, 5.0)):
                await sampler.put(small.finished(*key, (V0, 3)))
            assert not (await learner.claim(0, 0, 5.0)).checkpoint_wanted
            await person.control("checkpoint")
            assert (await learner.claim(0, 0, 5.0)).checkpoint_wanted  # also when it is asked for again
            assert (await learner.claim(0, 0, 5.0)).checkpoint_wanted
            await learner.publish(small.snapshot(Version(0, 1)))
            await learner.ack(V0)
            assert not (await learner.claim(0, 1, 5.0)).checkpoint_wanted
            await learner.durable(Version(0, 1))
            assert not (await learner.claim(0, 1, 5.0)).checkpoint_wanted

    run(acts())


def test_a_pause_is_no_stall(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config, clock = small.configured(stall_s=20.0, stall_abort_s=30.0), ManualClock()

    async def acts() -> None:
        async with (
            small.serving(tmp_path, config, clock=clock),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "supervisor") as person,
        ):
            await learner.publish(small.snapshot(await learner.begin(None)))
            await person.control("pause")
            for _ in range(3):
                await asyncio.sleep(1.1)  # the store looks at its clock every second
                clock.advance(25.0)
            assert not (await person.status())["closed"]
            await person.control("resume")
            await asyncio.sleep(1.1)
            assert not (await person.status())["closed"]

    run(acts())
