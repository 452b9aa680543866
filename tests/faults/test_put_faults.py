"""Faults of puts: one sent 1000 times (10), other bytes under the same key (11), impossible versions (17)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxroll import wire
from jaxroll.errors import Conflict, StaleClient
from jaxroll.records import Member, Version, VersionRun
from jaxroll.rpc import protocol
from jaxroll.store.messages import Key, PutCall, PutReply
from tests.harness.cluster.cluster import LIMIT_S, ByHand, Cluster
from tests.harness.cluster.criteria import Row, judge
from tests.harness.cluster.scripted_sampler import finished

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
COPIES = 1000
CALLS = protocol.CALLS_PER_CONNECTION - 4  # leaves room for other calls on the connection
CALL_S = 20.0
SMALL = (
    "schedule.groups_per_step=2",
    "schedule.group_size=2",
    "schedule.alpha=1",
    "schedule.steps=4",
    "store.lease_s=60",
    "store.rpc_deadline_s=20",
)


def member(key: Key, *runs: tuple[Version, int]) -> Member:
    """A member with runs of (version, tokens)."""
    return Member(*key, finished(key, tuple(VersionRun(*run) for run in runs)))


async def at_once(hands: list[ByHand], copies: int, what: Member) -> set[str]:
    """The answers to `copies` equal puts, spread over several connections and in flight at the same time.

    On each connection, the first puts are separate concurrent calls, up to the limit; the others are sent as a sampler
    sends them, many in a call and one call after another.
    """
    body = wire.encode(what)
    calls = AtOnce(wire.encode(PutCall((body,))))
    alone = [calls.put(hand) for hand in hands for _ in range(CALLS)]
    together = [hands[i % len(hands)].store.put(what) for i in range(copies - len(alone))]
    answers = await asyncio.wait_for(asyncio.gather(*alone, *together), LIMIT_S)
    assert calls.most == len(alone) == CALLS * len(hands), "calls waited for each other"
    return set(answers)


class AtOnce:
    """Puts of one member, one per call; `most` is the largest number in flight at the same time."""

    def __init__(self, body: bytes) -> None:
        self._body, self._under_way, self.most = body, 0, 0

    async def put(self, hand: ByHand) -> str:
        """The answer."""
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        (answer,) = wire.decode(await hand.store._raw.call("Put", self._body, CALL_S), PutReply).answers
        self._under_way -= 1
        return answer.refusal.code if answer.refusal else answer.result


def puts_in_log(run: Cluster) -> int:
    """Records of puts."""
    return run.query("SELECT COUNT(*) FROM log WHERE kind = 'put'")[0][0]


def test_10_one_put_sent_a_thousand_times_counts_once(tmp_path: Path, note: Callable[[Row], None]) -> None:
    """They are sent while the group is open, again when it is claimed, and again when its claim is durable."""

    async def play(run: Cluster) -> None:
        async with run.by_hand("sampler-a") as a, run.by_hand("sampler-b") as b, run.by_hand("sampler-c") as c:
            version = (await a.store.published(None, LIMIT_S)).version  # type: ignore[union-attr]
            keys = await a.keys(version, 4)
            first = member(keys[0], (version, 100))
            assert await a.put(first) == "OK"
            assert await at_once([a, b, c], COPIES, first) == {"OK"}
            assert puts_in_log(run) == 1
            for key in keys[1:]:
                assert await a.put(member(key, (version, 100))) == "OK"
            await asyncio.to_thread(run.until, lambda: run.learned()[-1]["kind"] == "claim", "the claim")
            assert await at_once([a, b, c], COPIES, first) == {"OK"}
            run.allow(1)
            await asyncio.to_thread(run.until, lambda: run.status()["durable"] == 1, "the first durable step")
            assert await at_once([a, b, c], COPIES, first) == {"OK"}
            assert puts_in_log(run) == 4
            assert run.query("SELECT state FROM groups WHERE id = ?", (first.group,)) == [("TRIMMED",)]

    with Cluster(tmp_path / "run", *SMALL) as run:
        run.allow(1)
        run.learner(checkpoint_every=1, step_s=3.0)
        asyncio.run(play(run))
        run.allow(4)
        run.sampler("sampler-0")
        run.roles["learner"].kill()
        run.learner("learner-again")
        run.finish()
        note(judge(run, f"10 one put sent {3 * COPIES} times", 3 * COPIES, went_on_from=1))


def test_11_the_same_key_with_other_bytes_is_a_conflict(tmp_path: Path, note: Callable[[Row], None]) -> None:
    """In every state of the group; the bytes that were put first are trained."""

    async def play(run: Cluster) -> int:
        refused = 0
        async with run.by_hand("sampler-a") as a:
            version = (await a.store.published(None, LIMIT_S)).version  # type: ignore[union-attr]
            keys = await a.keys(version, 4)
            forged = member(keys[0], (version, 99))
            assert await a.put(member(keys[0], (version, 100))) == "OK"
            for reached in ("leased", "ready", "trained", "durable"):
                if reached == "ready":
                    for key in keys[1:]:
                        assert await a.put(member(key, (version, 100))) == "OK"
                if reached == "trained":
                    run.allow(1)
                    await asyncio.to_thread(run.until_acked, 1)
                if reached == "durable":
                    run.allow(2)
                    for key in await a.keys(Version(0, 1), 4):
                        assert await a.put(member(key, (Version(0, 1), 7))) == "OK"
                    await asyncio.to_thread(run.until, lambda: run.status()["durable"] == 2, "a durable step")
                with pytest.raises(Conflict):
                    await a.store.put(forged)
                refused += 1
            assert await a.put(member(keys[0], (version, 100))) == "OK", "the first bytes are refused"
        return refused

    with Cluster(tmp_path / "run", *SMALL) as run:
        run.allow(0)
        run.learner(checkpoint_every=2)
        refused = asyncio.run(play(run))
        run.allow(4)
        run.sampler("sampler-0")
        run.finish()
        note(judge(run, "11 same key, other bytes", refused, went_on_from=2))


def test_17_a_version_that_cannot_be_is_refused(tmp_path: Path, note: Callable[[Row], None]) -> None:
    """Versions from the future, going back, or of an unknown lineage are refused by name; the lease remains valid."""

    async def play(run: Cluster) -> int:
        async with run.by_hand("sampler-a") as a:
            first = await a.store.published(None, 60.0)
            assert first is not None
            for key in await a.keys(first.version, 4):
                assert await a.put(member(key, (first.version, 5))) == "OK"
            await asyncio.to_thread(run.until_acked, 1)
            keys = await a.keys(Version(0, 1), 2)
            old, new = Version(0, 0), Version(0, 1)
            impossible = (
                ("never published", ((Version(0, 9), 5),)),
                ("never published", ((old, 5), (Version(0, 2), 5))),
                ("never published", ((Version(3, 1), 5),)),
                ("after", ((new, 5), (old, 5))),
            )
            for why, runs in impossible:
                with pytest.raises(StaleClient, match=why):
                    await a.store.put(member(keys[0], *runs))
            with pytest.raises(StaleClient, match="never published"):
                await a.store.lease(Version(0, 9), 1, 0.0)
            for key in keys:
                assert await a.put(member(key, (old, 5), (new, 5))) == "OK"
            return len(impossible) + 1

    with Cluster(tmp_path / "run", *SMALL) as run:
        run.allow(1)
        run.learner()
        refused = asyncio.run(play(run))
        run.allow(4)
        run.sampler("sampler-0", slots=2)
        run.finish()
        note(judge(run, "17 put of an impossible version", refused, went_on_from=1))
