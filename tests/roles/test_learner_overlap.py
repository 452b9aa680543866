"""Overlap of the learner's steps: publishing and claiming ahead while the devices compute, and errors meanwhile."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from jaxroll.errors import Closed, InfraError, NotReady, StaleClient, TransferError
from jaxroll.records import Version, VersionRef
from jaxroll.roles.learner import LearnerSession
from jaxroll.roles.weights import BackgroundPublisher
from jaxroll.sim.network import run

NEVER = object()  # a claim without an answer
V1 = Version(0, 1)


def version_ref(version: Version) -> VersionRef:
    return VersionRef(version, "tcp", "here", "d")


def ended(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)
    return future


class Store:
    """Records its calls; `answers` are the replies to claims, in order; a claim ahead may wait for its answer."""

    def __init__(self, *answers: Any) -> None:
        self.calls: list[Any] = []
        self.answers, self.asked, self.known = list(answers), [], list[Any]()
        self.may_publish, self.cancelled = asyncio.Event(), False
        self.may_publish.set()

    async def publish(self, ref: VersionRef) -> None:
        await self.may_publish.wait()
        self.calls.append(("publish", ref.version.step))

    async def ack(self, version: Version) -> None:
        self.calls.append(("ack", version.step))

    async def report(self, rows: list[dict[str, Any]]) -> None:
        self.calls += [("row", row["step"], row["publish_s"] >= 0) for row in rows]

    async def claim(self, lineage: int, step: int, wait_s: float, *, ahead: bool = False, **more: Any) -> Any:
        self.asked.append(step)
        self.known.append(more.get("known"))
        answer = self.answers.pop(0)
        if answer is NEVER:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled = True
        if isinstance(answer, Exception):
            raise answer
        return answer


class Publisher:
    """Finishes with the result of the transfer, or with its error."""

    sent_bytes = 0

    def __init__(self, store: Any) -> None:
        self._store = store

    def finish(self, version: Version, started: Future[VersionRef]) -> VersionRef:
        return started.result()

    def drop_older(self, version: Version) -> None:
        assert self._store.calls[-1] == ("publish", version.step), "dropped while it was the published version"


def background(store: Any) -> BackgroundPublisher:
    stub: Any = Publisher(store)
    return BackgroundPublisher(store, stub, in_place)


async def in_place(job: Any) -> Any:
    return job()


def row(step: int) -> dict[str, Any]:
    return {"step": step, "t1": 0.0}


def test_a_step_is_published_then_acknowledged_then_reported_and_after_the_one_before() -> None:
    async def job() -> None:
        store = Store()
        publisher = background(store)
        store.may_publish.clear()
        await publisher.publish(Version(0, 0), row(1), ended(version_ref(V1)))
        await asyncio.sleep(1.0)
        publisher.check()
        assert store.calls == [], "the learner goes on meanwhile"
        store.may_publish.set()
        await publisher.publish(V1, row(2), None)  # one that is not published
        await publisher.settle()
        await publisher.close()
        assert store.calls == [("publish", 1), ("ack", 0), ("row", 1, True), ("ack", 1), ("row", 2, True)]

    run(job())


@pytest.mark.parametrize("then", ["settle", "check", "publish"])
def test_a_failed_publication_is_raised_and_nothing_is_acknowledged(then: str) -> None:
    async def job() -> None:
        store = Store()
        publisher = background(store)
        await publisher.publish(Version(0, 0), row(1), ended(TransferError("the disk is full")))
        await asyncio.sleep(1.0)  # the one before is over
        with pytest.raises(TransferError, match="disk is full"):
            if then == "publish":
                await publisher.publish(V1, row(2), None)
            elif then == "settle":
                await publisher.settle()
            else:
                publisher.check()
        await publisher.close()
        assert store.calls == []

    run(job())


def session(store: Store, *, steps: int = 4) -> LearnerSession:
    """A learner with its store and its publisher only."""
    made = LearnerSession.__new__(LearnerSession)
    bare: Any = made
    bare.store, bare.background, bare._stop, bare._end = store, background(store), threading.Event(), "finished"
    bare.config = SimpleNamespace(schedule=SimpleNamespace(steps=steps), learner=SimpleNamespace(streaming=False))
    bare._loop, bare._on_device, bare._seeding = asyncio.get_running_loop(), in_place, None
    return made


TRAINER: Any = SimpleNamespace(prepare=lambda claim: f"{claim} packed", prepares_ahead=True)
BUSY: Any = SimpleNamespace(is_done=lambda: False)
DONE: Any = SimpleNamespace(is_done=lambda: True)


def test_a_failed_publication_ends_the_wait_for_a_batch() -> None:
    """With α = 0 no batch comes without the new weights: the learner would wait until the store aborts the run."""

    async def job() -> None:
        store = Store(NotReady("not leased"), NotReady("not leased"), NotReady("not leased"))
        learner = session(store)
        await learner.background.publish(Version(0, 0), row(1), ended(TransferError("the disk is full")))
        await asyncio.sleep(1.0)
        with pytest.raises(TransferError, match="disk is full"):
            await learner._claim(TRAINER, V1)
        assert store.asked == [1]

    run(job())


def claimed_ahead(store: Store, running: Any, trainer: Any = TRAINER, *, stop: bool = False, steps: int = 4) -> Any:
    async def job() -> Any:
        learner = session(store, steps=steps)
        if stop:
            learner._stop.set()
        ready = await learner._claim_ahead(trainer, V1, running)
        await asyncio.sleep(0.0)
        return ready

    return run(job())


def test_the_next_batch_is_packed_while_the_devices_compute() -> None:
    assert claimed_ahead(Store("claim 1"), BUSY) == "claim 1 packed"


@pytest.mark.parametrize("answer", [NotReady("no"), Closed("data"), InfraError("the store is away")])
def test_a_failed_claim_ahead_is_repeated_by_the_next_claim(answer: Exception) -> None:
    assert claimed_ahead(Store(answer), BUSY) is None


def test_a_refused_claim_ahead_is_raised() -> None:
    with pytest.raises(StaleClient):
        claimed_ahead(Store(StaleClient("another learner began")), BUSY)


def test_a_claim_ahead_is_cancelled_when_the_step_is_done() -> None:
    """And not before: the step takes ten seconds."""
    store = Store(NEVER)
    running = SimpleNamespace(is_done=lambda: asyncio.get_running_loop().time() >= 10.0)
    assert claimed_ahead(store, running) is None
    assert store.cancelled, "the store would hold an abandoned call"


def test_a_claim_ahead_is_cancelled_with_the_step_that_waits_for_it() -> None:
    store = Store(NEVER)

    async def job() -> None:
        running = SimpleNamespace(is_done=lambda: False)
        step = asyncio.ensure_future(session(store)._claim_ahead(TRAINER, V1, running))
        await asyncio.sleep(1.0)
        assert store.asked == [1] and not store.cancelled
        step.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert store.cancelled

    run(job())


def test_a_claim_ahead_is_not_awaited_after_a_stop_request() -> None:
    assert claimed_ahead(Store(NEVER), BUSY, stop=True) is None


@pytest.mark.parametrize("why", ["the last step", "a model must be asked"])
def test_nothing_is_claimed_ahead_that_cannot_be_packed(why: str) -> None:
    trainer: Any = SimpleNamespace(prepares_ahead=why == "the last step")
    store = Store()
    assert claimed_ahead(store, BUSY, trainer, steps=1 if why == "the last step" else 4) is None
    assert store.asked == []


def test_finished_groups_are_streamed_until_the_batch_is_complete() -> None:
    def some(*groups: int, whole: bool = False) -> Any:
        return SimpleNamespace(whole=whole, groups=[SimpleNamespace(group=group) for group in groups])

    async def job() -> None:
        parts = some(1), some(2, 4), some(1, 2, 3, 4, whole=True)
        store = Store(parts[0], NotReady("group 3 is not finished"), parts[1], parts[2])
        learner, streamed = session(store), list[Any]()
        config: Any = learner.config
        config.learner.streaming = True
        trainer: Any = SimpleNamespace(prepare=lambda claim: claim, stream=streamed.append)
        work = await learner._claim(trainer, V1)
        assert work is not None and work.ready is parts[2] and streamed == [*parts[:2]]
        assert [*map(list, store.known)] == [[], [1], [1], [1, 2, 4]]

    run(job())
