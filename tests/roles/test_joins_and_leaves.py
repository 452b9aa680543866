"""Samplers that join and leave a running run, in virtual time: the real loops run unchanged."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll import config as configs
from jaxroll import wire
from jaxroll.config import Config, PlacementConfig
from jaxroll.config.derived import actor_members
from jaxroll.errors import Closed, InfraError, StoreRefusal, Unauthorized
from jaxroll.records import Version
from jaxroll.roles import actor
from jaxroll.rpc.client import RawClient
from jaxroll.sim.network import run
from jaxroll.store import messages as msg
from jaxroll.store.core.state import Group, State
from jaxroll.store.server import keeper
from jaxroll.store.server.keeper import SILENCE_S
from tests.harness.store.builders import configured
from tests.harness.virtual_run import Behaviour, VirtualRun

STEPS = 15


def small(**changes: object) -> Config:
    """2 groups of 2 a step, with leases shorter than an answer may take, so that an unreturned lease delays the run."""
    config = configured(**{"steps": STEPS, "lease_s": 10.0, "rpc_deadline_s": 3.0} | changes)
    evaluator = replace(config.evaluator, every=0)
    return replace(
        config, sft=replace(config.sft, steps=0), evaluator=evaluator, sampler=replace(config.sampler, slots=4)
    )


def holders(at: VirtualRun) -> set[str]:
    """The names that hold a lease."""
    return {
        slot.holder for group in at.store.keeper.state.open.values() for slot in group.slots if slot.status == "leased"
    }


def changes(at: VirtualRun) -> list[tuple[str, str]]:
    """Joins and leaves in the metrics, with the first word of each."""
    rows = [row for row in at.store.metrics.written() if row.get("what") in ("join", "leave")]
    return [(row["role"], row["text"].partition(";")[0].partition(":")[0]) for row in rows]


async def joined(at: VirtualRun, session: str = "", protocol: int = wire.PROTOCOL_VERSION) -> msg.Joined:
    """The reply to a sampler that joins."""
    raw = RawClient(
        msg.SERVICE,
        at.transport("joining"),
        role="sampler",
        name="joining",
        token=None,
        patience_s=10.0,
        max_message_bytes=2**20,
    )
    raw.session = session or raw.session
    return wire.decode(await raw.call("Join", wire.encode(msg.Hello(protocol, "")), 5.0), msg.Joined)


async def fleet(at: VirtualRun, rng: random.Random, log: list[str]) -> None:
    """Random joins, leaves, impatient leaves and kills, down to no sampler at all for a while."""
    alive: list[int] = []
    while True:
        await asyncio.sleep(rng.expovariate(0.25))
        act = rng.choice(("join", "join", "leave", "hurry", "kill")) if alive else "join"
        if act == "join":
            if len(alive) == 4:
                continue
            index = (await joined(at)).index
            assert index not in alive
            answer_s = rng.choice((0.3, 2.0, 6.0))
            at.sampler(index, Behaviour(lambda key, s=answer_s: s, fetch_s=rng.choice((0.1, 3.0))))
            alive.append(index)
        else:
            index = alive.pop(rng.randrange(len(alive)))
            name = f"sampler-{index}"
            if act == "kill":
                await at.kill(name)
            else:
                at.sessions[name].request_stop(at_once=act == "hurry")
        log.append(f"{asyncio.get_running_loop().time():.1f} {act} {index}")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 60))])
def test_samplers_may_join_and_leave_at_any_time(tmp_path: Path, seed: int) -> None:
    async def job() -> None:
        rng, log = random.Random(seed), list[str]()
        placement = rng.choice(("auto", "together", "spread"))
        async with VirtualRun(small(alpha=rng.choice((0.0, 1.0, 2.0)), group_placement=placement), tmp_path) as at:
            at.args = replace(at.args, drain_s=rng.choice((0.0, 1.0, 8.0)))
            at.sampler()
            changing = asyncio.ensure_future(fleet(at, rng, log))
            training = at.learner()
            await asyncio.wait([training, changing], return_when="FIRST_COMPLETED")
            assert not changing.done(), changing.exception()
            changing.cancel()
            assert training.result() == 0, log
            trained = [one.step for one in at.trained]
            groups = [group for one in at.trained for group in one.groups]
            assert trained == list(range(STEPS)) and len(groups) == len(set(groups)) == 2 * STEPS, log
            assert max(one.age for one in at.trained) <= at.config.schedule.alpha, log
            status = at.store.status()
            assert status["conservation_residual"] == 0 and not status["counts"].get("dead"), (status, log)

    run(job(), 3600.0)


def test_a_run_may_start_without_samplers_and_be_without_them_again(tmp_path: Path) -> None:
    config = small()
    config = replace(config, sampler=replace(config.sampler, count=0))

    async def job() -> None:
        async with VirtualRun(config, tmp_path) as at:
            training = at.learner()
            for index in range(3):
                await asyncio.sleep(20.0)
                assert not training.done() and holders(at) == set()
                assert (await joined(at)).index == index
                at.sampler(index, Behaviour(lambda key: 1.0))
                if index < 2:
                    await asyncio.sleep(8.0)
                    await at.kill(f"sampler-{index}")
                    await asyncio.sleep(config.store.lease_s)
            assert await training == 0
            assert [one.step for one in at.trained] == list(range(STEPS)) and at.trained[-1].at_s > 60.0
            assert at.store.status()["conservation_residual"] == 0

    run(job())


async def has_leases(at: VirtualRun) -> None:
    """Wait until sampler 0, and no other, holds leases, and half a second more."""
    while holders(at) != {"sampler-0"}:
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)


def still_known(state: State, ids: Iterable[int]) -> list[Group]:
    """The groups with these ids that the store has not forgotten."""
    return [group for gid in ids if (group := state.find(gid)) is not None]


@pytest.mark.parametrize(("drain_s", "finishes"), [(30.0, True), (1.0, False), (0.0, False)])
def test_a_leaving_sampler_finishes_its_members_within_the_deadline_and_returns_the_others(
    tmp_path: Path, drain_s: float, finishes: bool
) -> None:
    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            at.args = replace(at.args, drain_s=drain_s)
            leaving = at.sampler(0, Behaviour(lambda key: 5.0))
            at.learner()
            await has_leases(at)
            attempts = {
                (group.id, m): slot.attempt
                for group in at.store.keeper.state.open.values()
                for m, slot in enumerate(group.slots)
                if slot.status == "leased"
            }
            asked_s, issued = asyncio.get_running_loop().time(), at.store.keeper.state.issued
            at.sessions["sampler-0"].request_stop()
            await leaving
            assert asyncio.get_running_loop().time() - asked_s <= drain_s + 0.5 and holders(at) == set()
            state = at.store.keeper.state
            assert state.issued == issued, "a sampler that leaves takes no further work"
            slots = [slot for group in still_known(state, {gid for gid, _ in attempts}) for slot in group.slots]
            assert {slot.status for slot in slots} == {"done" if finishes else "free"}
            assert changes(at) == [("sampler-0", "joined"), ("sampler-0", "left")]

    run(job())


def test_a_sampler_that_the_run_does_not_need_finishes_its_members_and_leases_no_more(tmp_path: Path) -> None:
    async def job() -> None:
        config = small()
        config = replace(config, sampler=replace(config.sampler, least_count=1))
        async with VirtualRun(config, tmp_path) as at:
            leaving = at.sampler(0, Behaviour(lambda key: 5.0))
            at.learner()
            await has_leases(at)
            state, fleet = at.store.keeper.state, at.store.fleet
            leased = {group.id: [slot.attempt for slot in group.slots] for group in state.open.values()}
            issued = state.issued
            assert fleet is not None and leased
            fleet._workers.surplus = {"sampler-0": state.sessions["sampler-0"]}
            at.store.keeper.wakeups.notify(keeper.LEASE)
            await asyncio.wait_for(leaving, 30.0)
            groups = still_known(state, leased)
            assert {slot.status for group in groups for slot in group.slots} == {"done"}
            assert {group.id: [slot.attempt for slot in group.slots] for group in groups} == leased
            assert state.issued == issued and not holders(at)
            assert changes(at) == [("sampler-0", "joined"), ("sampler-0", "left")]

    run(job())


def test_a_store_that_starts_again_knows_the_last_plan(tmp_path: Path) -> None:
    async def job() -> None:
        config = small()
        config = replace(config, sampler=replace(config.sampler, least_count=1))
        async with VirtualRun(config, tmp_path) as at:
            row = {"t": 0.0, "kind": "event", "what": "plan", "text": "plan", "needed": 3, "most": 5}
            at.store.metrics.log(row | {"role": "store"})
            at.store.metrics.log(row | {"role": "sampler-0", "needed": 9})  # not the store's
            await at.store.stop()
            at.store.start()
            assert at.store.fleet is not None
            assert at.store.fleet.facts() == {"needed": 3, "present": 0, "missing": 0, "leaving": 0}

    run(job())


def test_a_lease_whose_reply_was_lost_ends_when_its_holder_leaves(tmp_path: Path) -> None:
    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            at.learner()
            lost = await at.client("sampler", "sampler-5")
            while not holders(at):
                await asyncio.sleep(0.1)
                published = at.store.keeper.state.published
                if published is not None:
                    await lost.lease(published.version, 2)
            await lost.leave()
            assert holders(at) == set()
            with pytest.raises(StoreRefusal):
                await lost.lease(Version(0, 0), 1)

    run(job())


def test_a_silent_sampler_is_reported_once_and_again_when_it_is_back(tmp_path: Path) -> None:
    async def job() -> None:
        async with VirtualRun(small(steps=200), tmp_path) as at:
            at.sampler(0)
            at.sampler(1)
            at.learner()
            await asyncio.sleep(5.0)
            at.network.cut("sampler-1")
            await asyncio.sleep(SILENCE_S + 5.0)
            at.network.heal("sampler-1")
            await asyncio.sleep(20.0)
            await at.kill("sampler-0")
            await asyncio.sleep(SILENCE_S + 5.0)
            first = {("sampler-0", "joined"), ("sampler-1", "joined")}
            assert set(changes(at)[:2]) == first
            assert changes(at)[2:] == [("sampler-1", "is silent"), ("sampler-1", "is back"), ("sampler-0", "is silent")]

    run(job())


def test_the_store_gives_config_and_number_to_a_sampler_that_joins(tmp_path: Path) -> None:
    async def job() -> None:
        config = small()
        async with VirtualRun(config, tmp_path) as at:
            first, again, second = await joined(at, "one"), await joined(at, "one"), await joined(at, "two")
            assert (first.index, again.index, second.index) == (1, 1, 2), "a repeated call gets the same number"
            assert configs.digest(configs.parse(json.loads(first.config))) == configs.digest(config)
            await at.client("sampler", "sampler-7")
            assert (await joined(at)).index == 8
        colocated = replace(config, placement=replace(config.placement, colocated=True))
        async with VirtualRun(colocated, tmp_path) as at:
            with pytest.raises(StoreRefusal, match="colocated"):
                await joined(at)
            with pytest.raises(Unauthorized):
                await at.client("sampler", "sampler-1", config_digest="other")

    run(job())


def test_a_sampler_of_another_protocol_and_one_that_joins_in_a_loop_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_ARRIVALS", 3.0)
    monkeypatch.setattr(keeper, "_ARRIVALS_PER_S", 1e-6)

    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            with pytest.raises(Unauthorized, match="install the same JaxRoll"):
                await joined(at, protocol=wire.PROTOCOL_VERSION + 1)
            assert [(await joined(at)).index for _ in range(2)] == [1, 2]
            with pytest.raises(InfraError, match="too many processes join"):
                await joined(at)

    run(job())


def test_samplers_and_the_store_know_how_many_request_leases_and_where_they_serve(tmp_path: Path) -> None:
    """`together` depends on the number, and actors on the addresses."""

    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            training = at.learner()
            while at.store.keeper.state.published is None:
                await asyncio.sleep(0.1)
            version = at.store.keeper.state.published.version
            one, two = await at.client("sampler", "sampler-1"), await at.client("sampler", "sampler-2")
            await one.lease(version, 1)
            assert one.holders == 1, "the other one has requested none"
            await two.lease(version, 1)
            assert two.holders == 2
            await one.published(version, serves_on="a.example:1")
            assert (await one.status())["serving"] == {"sampler-1": "a.example:1"}
            await two.leave()
            await one.lease(version, 1)
            assert one.holders == 1
            await one.leave()
            assert (await two.status())["serving"] == {}
            training.cancel()

    run(job())


def test_a_late_leave_does_not_forget_the_process_that_took_the_name(tmp_path: Path) -> None:
    async def job() -> None:
        async with VirtualRun(small(), tmp_path) as at:
            former, now = await at.client("sampler", "sampler-1"), await at.client("sampler", "sampler-1")
            await now.published(None, serves_on="a.example:1")
            await former.leave()
            assert (await now.status())["serving"] == {"sampler-1": "a.example:1"}
            assert changes(at) == [("sampler-1", "joined"), ("sampler-1", "joined")]

    run(job())


def test_actors_use_samplers_that_join_until_they_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that serves elsewhere now is asked there; one that is reachable stays in any case."""
    monkeypatch.setattr(actor, "FIND_EVERY_S", 0.0)
    known, reachable, pools = {"sampler-0": "started"}, {"sampler-1"}, list[dict[str, str]]()
    samplers = SimpleNamespace(
        names=known.keys(), add=known.__setitem__, remove=known.pop, is_reachable=reachable.__contains__,
        set_pools=pools.append,
    )  # fmt: skip
    config = replace(small(), placement=PlacementConfig(actors=2))
    at = object.__new__(actor.ActorLoops)
    at.config, at.samplers, at._client = config, samplers, str  # type: ignore[assignment]
    at.members = SimpleNamespace(capacity=0, room=asyncio.Event())  # type: ignore[assignment]
    seen: list[tuple[dict[str, str], int]] = []
    statuses = iter(
        ({"sampler-1": "a"}, {"sampler-0": "x", "sampler-1": "b", "sampler-2": "c"}, {}, {"sampler-1": "b"})
    )

    async def status() -> dict[str, object]:
        seen.append((dict(known), at.members.capacity))
        serving = next(statuses, None)
        if serving is None:
            raise Closed("the end")
        return {"serving": serving, "pools": {"long": {"samplers": [*serving]}}}

    at.store = SimpleNamespace(status=status)  # type: ignore[assignment]
    with pytest.raises(Closed):
        asyncio.run(at._find_samplers())
    assert pools[0] == {"sampler-1": "long"}
    first = {"sampler-0": "started"}
    assert [names for names, _ in seen] == [
        first,
        first | {"sampler-1": "a"},
        first | {"sampler-1": "b", "sampler-2": "c"},
        first | {"sampler-1": "b"},
        first | {"sampler-1": "b"},
    ]
    assert [count for _, count in seen[1:]] == [actor_members(config, len(names)) for names, _ in seen[1:]]
    assert seen[1][1] < seen[2][1], "more samplers, more members"


def test_an_actor_has_room_for_a_group_as_long_as_there_is_a_sampler() -> None:
    """It leases whole groups: with less room it would lease none after most samplers have left."""
    config = replace(small(), placement=PlacementConfig(actors=20))
    group, found = config.schedule.members_per_group, [actor_members(config, count) for count in range(9)]
    assert found[0] == 0 and found[1] == group < found[8] and found == sorted(found)
