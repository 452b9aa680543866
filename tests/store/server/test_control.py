"""A person's control of a run: pause and resume of its leases, a checkpoint after the next claim."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll import metrics
from jaxroll.errors import Closed, InfraError, NoCredit, StaleClient, StoreRefusal, Unauthorized
from jaxroll.records import Version
from jaxroll.sim import network
from jaxroll.store.client import StoreClient
from jaxroll.store.messages import ProfileOrder
from jaxroll.tools import profile
from tests.harness.store.builders import configured
from tests.harness.virtual_run import VirtualRun

V0 = Version(0, 0)
WOKEN_S = 10.0  # much less than a held call waits, much more than a wake-up takes


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
            assert await asyncio.wait_for(held, WOKEN_S) and not (await person.status())["paused"]

    run(acts())


def test_in_a_paused_run_members_on_their_way_to_another_sampler_arrive(
    tmp_path: Path, small: SimpleNamespace, run
) -> None:
    config = small.configured()

    async def acts() -> None:
        async with (
            small.opened(tmp_path, config) as (_, sampler),
            small.connected(tmp_path, config, "sampler", "sampler-1") as other,
            small.connected(tmp_path, config, "supervisor") as person,
        ):
            keys = small.keys(await sampler.lease(V0, 2, 5.0))
            await sampler.release(keys, "sampler-1")
            await person.control("pause")
            moved = small.keys(await other.lease(V0, 4, reserved=True))
            assert [key[:2] for key in moved] == [key[:2] for key in keys]
            with pytest.raises(NoCredit, match="paused"):
                await other.lease(V0, 4)

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
            await learner.publish(small.version_ref(Version(0, 1)))
            await learner.ack(V0)
            assert not (await learner.claim(0, 1, 5.0)).checkpoint_wanted
            await learner.durable(Version(0, 1))
            assert not (await learner.claim(0, 1, 5.0)).checkpoint_wanted
            first = await learner.begin(Version(0, 0), "again")
            await learner.publish(small.version_ref(first))
            for key in small.keys(await sampler.lease(first, 64, 5.0)):
                await sampler.put(small.finished(*key, (first, 3)))
            assert not (await learner.claim(1, 0, 5.0)).checkpoint_wanted, "the same step of a fork needs none"

    run(acts())


def test_a_pause_is_no_stall_and_what_stalls_afterwards_is(tmp_path: Path) -> None:
    """In virtual time: a store whose clock jumps takes it for a suspension of its machine, which is no stall either."""

    async def acts() -> None:
        async with VirtualRun(configured(stall_s=20.0, stall_abort_s=30.0), tmp_path) as at:
            at.learner()
            person = await at.client("supervisor", "ui")
            await person.control("pause")
            await asyncio.sleep(100.0)
            assert not at.store.keeper.state.closed
            paused = [row for row in at.store.metrics.written() if row.get("paused")]
            assert paused and all(row["waits"]["user"] == "has paused the run" for row in paused)
            await person.control("resume")
            await asyncio.sleep(25.0)
            assert not at.store.keeper.state.closed, "the time of the pause does not count"
            assert not at.store.metrics.written()[-1].get("paused")
            await asyncio.sleep(10.0)
            assert at.store.keeper.state.closed.startswith("stalled")

    network.run(acts(), 1000.0)


def test_a_paused_run_that_is_over_says_so_to_its_samplers(tmp_path: Path) -> None:
    async def acts() -> None:
        async with VirtualRun(configured(steps=3), tmp_path) as at:
            at.sampler()
            idle, person = await at.client("sampler", "sampler-1"), await at.client("supervisor", "ui")
            assert await at.learner() == 0
            await person.control("pause")
            with pytest.raises(Closed, match="finished"):
                await idle.lease(Version(0, 3), 4)

    network.run(acts(), 1000.0)


def test_each_control_is_in_the_audit_with_its_caller(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    async def acts() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "supervisor", "ui") as person:
            for action in ("pause", "resume", "checkpoint"):
                await person.control(action)

    run(acts())
    with sqlite3.connect(tmp_path / "store.db") as db:
        noted = db.execute("SELECT who, detail FROM audit WHERE what = 'Control'").fetchall()
    assert [detail for _, detail in noted] == ["pause", "resume", "checkpoint"]
    assert {who for who, _ in noted} == {"ui"}


def test_a_profile_is_wanted_of_its_role_until_that_one_ends_it_or_its_time_is_over(tmp_path: Path) -> None:
    """In virtual time. Each reply to the role has it until it has begun, so that a lost reply loses nothing."""
    given: dict[str, list[str]] = {"learner": [], "sampler": []}

    def row(state: str) -> dict[str, object]:
        return {"t": 0.0, "role": "learner", "kind": "profile", "request": "first", "state": state, "steps": 3}

    async def acts() -> None:
        async with VirtualRun(configured(), tmp_path) as at:
            person = await at.client("supervisor", "profile")
            learner, sampler = await at.client("learner", "learner"), await at.client("sampler", "sampler-0")
            learner.on_profile = lambda order: given["learner"].append(order.request)
            sampler.on_profile = lambda order: given["sampler"].append(order.request)
            first, second = (ProfileOrder("learner", name, 3, 60.0) for name in ("first", "second"))
            with pytest.raises(StoreRefusal, match="no such role in this run; there are none yet"):
                await person.profile(first)
            await learner.status()
            await sampler.status()
            stranger = await at.client("sampler", "sampler-7")
            stranger._raw.run_id = "another"
            with pytest.raises(StaleClient):
                await stranger.status()
            with pytest.raises(StoreRefusal, match=r"there are learner, sampler-0$"):
                await person.profile(ProfileOrder("profile", "first", 3, 60.0))
            with pytest.raises(Unauthorized):
                await sampler.profile(first)
            await person.profile(first)
            with pytest.raises(StoreRefusal, match="another profile of learner is under way"):
                await person.profile(second)
            for _ in range(2):
                await sampler.status()
                await learner.status()
            await learner.report([row("started")])
            await learner.status()
            assert given == {"learner": ["first"] * 2, "sampler": []}, "a role that it ends would record it again"
            with pytest.raises(StoreRefusal, match="another profile of learner is under way"):
                await person.profile(second)
            await learner.report([row("ended")])
            await person.profile(second)
            await asyncio.sleep(60.0)
            await learner.status()
            assert given == {"learner": ["first"] * 2, "sampler": []}, "no longer than its command waits"
            await person.profile(second)
            await learner.status()
            assert given["learner"][2:] == ["second"]
            await learner.report([row("ended")])  # of the first, which took longer than its command waited
            assert given["learner"][3:] == ["second"]

    network.run(acts(), 1000.0)


def test_an_order_ends_with_the_process_that_has_it(tmp_path: Path) -> None:
    """In virtual time. A role that a profile ends would record it again after every restart."""
    given: list[str] = []

    async def acts() -> None:
        async with VirtualRun(configured(), tmp_path) as at:
            person = await at.client("supervisor", "profile")

            async def started() -> StoreClient:
                learner = await at.client("learner", "learner")
                learner.on_profile = lambda order: given.append(order.request)
                await learner.status()
                return learner

            await (await started()).aclose()
            await person.profile(order("first"))
            learner = await started()
            assert given == ["first"], "the process that has ended did not have it"
            await learner.aclose()
            waiting = asyncio.ensure_future(profile.recorded(person, at.store.metrics.written, order("second")))
            with pytest.raises(StoreRefusal, match="under way"):
                await waiting
            await started()
            assert given == ["first"]
            (row,) = (row for row in at.store.metrics.written() if row["kind"] == "profile")
            assert metrics.checked_row(row) and (row["request"], row["state"]) == ("first", "failed")
            waiting = asyncio.ensure_future(profile.recorded(person, at.store.metrics.written, order("third")))
            await asyncio.sleep(1.0)
            await (await started()).aclose()
            await started()
            with pytest.raises(InfraError, match="learner: the role started again before the end of its trace"):
                await waiting
            assert given == ["first", "third"]

    network.run(acts(), 1000.0)


def test_ctrl_c_of_the_command_withdraws_its_order(tmp_path: Path) -> None:
    """In virtual time. Otherwise its role records it, and refuses the next one until its time is over."""
    given: list[tuple[str, bool]] = []

    async def acts() -> None:
        async with VirtualRun(configured(), tmp_path) as at:
            learner, person = await at.client("learner", "learner"), await at.client("supervisor", "profile")
            learner.on_profile = lambda order: given.append((order.request, order.withdrawn))
            await learner.status()

            async def interrupted(name: str) -> None:
                command = asyncio.ensure_future(profile.recorded(person, at.store.metrics.written, order(name)))
                await asyncio.sleep(1.0)
                await learner.status()
                command.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await command
                await learner.status()

            await interrupted("first")
            await interrupted("second")
            assert given == [("first", False), ("first", True), ("second", False), ("second", True)]
            row = {"t": 0.0, "role": "learner", "kind": "profile", "request": "second", "steps": 3}
            await learner.report([row | {"state": "started"}])
            assert given[-1] == ("second", True), "it began before it knew"
            with pytest.raises(StoreRefusal, match="under way"):
                await person.profile(order("third"))
            await learner.report([row | {"state": "ended"}])
            await person.profile(order("third"))

    network.run(acts(), 1000.0)


def order(name: str) -> ProfileOrder:
    return ProfileOrder("learner", name, 3, 60.0)
