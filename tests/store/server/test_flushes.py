"""Flush and Partial over RPC: pieces, their checks, who may read them, and their rows in the database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxroll import wire
from jaxroll.errors import InfraError, StaleClient, StoreRefusal
from jaxroll.protocols import Completion
from jaxroll.records import (
    MAX_STATE_BYTES,
    Failed,
    Member,
    Partial,
    TurnEnd,
    Version,
    VersionRef,
    VersionRun,
    prompt_digest,
)
from jaxroll.sim.network import run
from jaxroll.store import messages as msg
from jaxroll.store.client import StoreClient
from jaxroll.store.core import events as ev
from jaxroll.store.core.state import FlushedTokens
from jaxroll.store.flushes import HOLD_S, UNBOUNDED, Flushes, Stream, answers
from jaxroll.store.log import commit_log
from jaxroll.store.log.replay import replay_log
from tests.harness.store import recorded_log
from tests.harness.store.builders import configured
from tests.harness.virtual_run import VirtualRun

V0 = Version(0, 0)
PROMPT = np.arange(3, dtype=np.int32)
Job = Callable[[VirtualRun, StoreClient], Awaitable[None]]


def piece(first: int, count: int) -> Completion:
    tokens = np.arange(first, first + count, dtype=np.int32)
    return Completion(tokens, -tokens.astype(np.float32), (VersionRun(V0, count),), "")


def played(folder: Path, job: Job) -> None:
    """Run `job` with a sampler's client, after the first weights; then the log and the tables must agree."""

    async def whole() -> None:
        async with VirtualRun(configured(steps=5, lease_s=10.0), folder) as at:
            learner = await at.client("learner")
            await learner.begin(None)
            await learner.publish(VersionRef(V0, "tcp", "here", "d"))
            await job(at, await at.client("sampler", "sampler-0"))
            assert not (found := replay_log(at.store._log.connection)).violations, found.violations

    run(whole())


async def first_lease(store: StoreClient) -> tuple[int, int, int]:
    grant = (await store.lease(V0, 1, 5.0))[0]
    return (grant.group, *grant.members[0])


async def first_stream(store: StoreClient) -> tuple[tuple[int, int, int], Stream]:
    """A leased member, and the stream of its answer to PROMPT, in pieces of 4 tokens."""
    key = await first_lease(store)
    stream = store.stream(key, 4)
    assert stream.begin(PROMPT) is None
    return key, stream


def rows(at: VirtualRun) -> list[tuple]:
    return at.store.sql("SELECT member, start, tokens FROM partials ORDER BY group_id, member, start")


def test_another_sampler_reads_what_was_flushed(tmp_path: Path) -> None:
    async def job(at: VirtualRun, store: StoreClient) -> None:
        key, stream = await first_stream(store)
        for first in (0, 4):
            stream.add(piece(first, 4))
            await store.flushed()
        assert rows(at) == [(key[1], 0, 4), (key[1], 4, 4)]
        other = await at.client("sampler", "sampler-1")
        with pytest.raises(StaleClient, match="does not lease"):
            await other.partial(key)
        await store.leave()
        grant = (await other.lease(V0, 1, 5.0))[0]
        assert grant.resumed == ((key[1], 8),)
        again = (*key[:2], 2)
        (found,) = await other.partial(again)
        assert found.tokens.tolist() == list(range(8))
        assert found.logprobs.tolist() == [-float(i) for i in range(8)]
        assert found.versions == (VersionRun(V0, 4), VersionRun(V0, 4))
        stream.add(piece(8, 4))
        await store.flushed()
        assert len(rows(at)) == 2, "a sampler that left still flushes"
        mine = other.stream(again, 4, (found,))
        assert mine.begin(PROMPT + 1) is None, "the answer to another prompt is continued"
        mine.add(piece(0, 4))
        await other.flushed()
        assert rows(at) == [(key[1], 0, 4)], "the member was started again"

    played(tmp_path, job)


def test_a_stream_lets_its_engine_go_on_while_the_store_answers_in_time(tmp_path: Path) -> None:
    async def job(at: VirtualRun, store: StoreClient) -> None:
        woken = list[int]()
        key, stream = await first_stream(store)
        store.on_flushed(lambda: woken.append(stream.sent))
        assert (stream.may_sample(1), stream.may_sample(4), stream.may_sample(5)) == (3, 0, 0)
        at.network.cut("sampler-0")
        stream.add(piece(0, 2))
        await asyncio.sleep(HOLD_S - 0.1)
        assert stream.may_sample(4) == 0 and not woken
        await asyncio.sleep(0.2)
        assert stream.may_sample(4) == UNBOUNDED, "the store is late"
        at.network.heal("sampler-0")
        await store.flushed()
        assert woken == [2] and (stream.may_sample(4), stream.may_sample(6)) == (2, 0)
        stream.end_turn(piece(0, 3), [7], b"state")
        stream.begin(np.concatenate([PROMPT, np.arange(3), [7]]).astype(np.int32))
        assert stream.may_sample(1) == 2, "the turn before is not with the store yet"
        await store.flushed()
        assert stream.may_sample(1) == 3
        store.end_stream(key)
        assert stream.may_sample(4) == UNBOUNDED

    played(tmp_path, job)


def test_completed_turns_come_with_what_was_shown_and_the_state(tmp_path: Path) -> None:
    async def job(at: VirtualRun, store: StoreClient) -> None:
        key, stream = await first_stream(store)
        stream.add(piece(0, 4))
        stream.end_turn(piece(0, 6), [7, 8], b"one")
        second = np.concatenate([PROMPT, np.arange(6), [7, 8]]).astype(np.int32)
        stream.begin(second)
        stream.end_turn(piece(6, 1), [9], b"two")
        third = np.concatenate([second, [6, 9]]).astype(np.int32)
        stream.begin(third)
        stream.add(piece(7, 4))
        await store.flushed()
        assert rows(at) == [(key[1], 0, 4), (key[1], 4, 2), (key[1], 6, 1), (key[1], 7, 4)]
        found = await store.partial(key)
        assert [one.tokens.tolist() for one in found] == [[*range(6)], [6], [*range(7, 11)]]
        ends = [one.turn and (one.turn.shown.tolist(), one.turn.state) for one in found]
        assert ends == [([7, 8], b"one"), ([9], b"two"), None]
        assert store.stream(key, 4, found).begin(PROMPT) is None, "a complete answer is continued"
        assert store.stream(key, 4, found).turns(PROMPT + 1) == ()
        assert store.stream(key, 4, (found[0], found[2])).turns(PROMPT) == ()
        again = store.stream(key, 4, found)
        assert len(again.turns(PROMPT)) == 2 and again.sent == 7
        begun = again.begin(third)
        assert begun is not None and begun.tokens.tolist() == [*range(7, 11)] and again.sent == 11
        twice = store.stream(key, 4, found)
        assert len(twice.turns(PROMPT)) == 2 and twice.turns(PROMPT) == () and twice.sent == 0
        assert twice.begin(PROMPT) is None
        twice.add(piece(0, 4))
        await store.flushed()
        assert rows(at) == [(key[1], 0, 4)], "the member was started again"

    played(tmp_path, job)


def test_pieces_that_do_not_follow_one_another_are_no_answer() -> None:
    def part(start: int, prompt: str = "p") -> Partial:
        return Partial(0, 0, 1, start, prompt, np.zeros(2, np.int32), np.zeros(2, np.float32), (VersionRun(V0, 2),))

    assert [len(one.tokens) for one in answers([part(0), part(2)])] == [4]
    assert answers([part(0), part(4)]) == answers([part(2)]) == answers([part(0), part(2, "q")]) == ()


def test_rows_that_cannot_be_read_are_an_error_of_the_infrastructure(tmp_path: Path) -> None:
    async def job(at: VirtualRun, store: StoreClient) -> None:
        key = await flushed(store)
        at.store._log.connection.execute("UPDATE partials SET body = x'c1'")
        with pytest.raises(InfraError, match="flushed tokens of member"):
            await store.partial(key)

    played(tmp_path, job)


async def flushed(store: StoreClient) -> tuple[int, int, int]:
    """A leased member with four flushed tokens."""
    key, stream = await first_stream(store)
    stream.add(piece(0, 4))
    await store.flushed()
    return key


def test_a_member_that_a_lease_starts_again_leaves_no_rows(tmp_path: Path) -> None:
    async def job(at: VirtualRun, store: StoreClient) -> None:
        key = await flushed(store)
        await store.release([key])
        core = at.store.keeper.core
        core.settings = replace(core.settings, one_version=True)
        core.state.open[key[0]].slots[key[1]].flushed = FlushedTokens((VersionRun(Version(0, 1), 4),), 100)
        assert rows(at) and (await store.lease(V0, 1, 5.0))[0].resumed == ()
        assert not rows(at)

    played(tmp_path, job)


def test_failed_dropped_and_stored_members_leave_no_rows(tmp_path: Path) -> None:
    async def job(at: VirtualRun, store: StoreClient) -> None:
        failed, finished = await flushed(store), await flushed(store)
        assert len(rows(at)) == 2
        await store.put(Member(*failed, Failed("DATA", "it broke")))
        assert [row[0] for row in rows(at)] == [finished[1]]
        await store.put(recorded_log.finished(finished, V0))
        assert not rows(at)
        dropped = await flushed(store)
        for event in (ev.Shrunk(dropped[0], (dropped[1],), "x"), ev.Aborted(dropped[0], (dropped[1],), "failed")):
            deletes = [
                row for row in commit_log.statements(event, at.store.keeper.state, 1, 0.0) if "partials" in row[0]
            ]
            assert [values for _, values in deletes] == [dropped[:2]]

    played(tmp_path, job)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"logprobs": np.zeros(3, np.float32)}, "shapes"),
        ({"tokens": np.zeros(4, np.int64)}, "is int64"),
        ({"tokens": np.array([-1, 0, 0, 0], np.int32)}, "token id -1"),
        ({"logprobs": np.array([0, 0, 0, np.nan], np.float32)}, "not a finite number"),
        ({"versions": (VersionRun(V0, 3),)}, "versions cover 3"),
        ({"support": np.ones(4, np.uint8)}, "does not truncate"),
        ({"turn": TurnEnd(np.array([-7], np.int32), b"")}, "token id -7"),
        ({"turn": TurnEnd(np.zeros((2, 2), np.int32), b"")}, "shapes"),
        ({"turn": TurnEnd(np.zeros(1, np.int32), bytes(MAX_STATE_BYTES + 1))}, "turn.state"),
    ],
)
def test_malformed_pieces_are_refused(tmp_path: Path, change: dict, why: str) -> None:
    async def job(at: VirtualRun, store: StoreClient) -> None:
        key = await first_lease(store)
        made = Partial(*key, 0, prompt_digest(PROMPT), *msgspec.structs.astuple(piece(0, 4))[:3])
        body = wire.encode(msgspec.structs.replace(made, **change))
        with pytest.raises(StoreRefusal, match=why):
            await store._call("Flush", msg.PutCall((body,)), msg.FlushReply)
        assert rows(at) == []
        assert (await store._call("Flush", msg.PutCall((wire.encode(made),)), msg.FlushReply)).tokens == (4,)

    played(tmp_path, job)


@pytest.mark.parametrize("reply", [None, msg.FlushReply(()), msg.FlushReply((4, 4))], ids=["unreadable", "none", "two"])
def test_a_malformed_reply_ends_the_streams_of_its_call_only(reply: msg.FlushReply | None) -> None:
    replies = [reply, msg.FlushReply((4,))]

    async def call(_: msg.PutCall) -> msg.FlushReply:
        if (found := replies.pop(0)) is None:
            raise msgspec.ValidationError("Expected `array`, got `int`")
        return found

    async def job() -> None:
        flushes = Flushes(call)
        for member in (0, 1):
            stream = flushes.begin((0, member, 0), 4)
            assert stream.begin(PROMPT) is None
            stream.add(piece(0, 4))
            await flushes.idle()
            assert flushes.takes(stream) == (member == 1)
        assert stream.sent == 4

    run(job())


def test_a_piece_of_a_version_that_does_not_exist_ends_the_stream_only(tmp_path: Path) -> None:
    async def job(at: VirtualRun, store: StoreClient) -> None:
        key, stream = await first_stream(store)
        stream.add(msgspec.structs.replace(piece(0, 4), versions=(VersionRun(Version(0, 7), 4),)))
        await store.flushed()
        stream.add(piece(4, 4))
        await asyncio.wait_for(store.flushed(), 5.0)
        assert rows(at) == [] and await store.renew([key]) == []

    played(tmp_path, job)
