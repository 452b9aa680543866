"""Overlap of the learner's steps: publishing and claiming ahead while the devices compute, and errors meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from jaxroll.errors import Closed, InfraError, NotReady, StaleClient, TransferError
from jaxroll.records import Version, VersionRef
from jaxroll.roles.learner import LearnerSession
from jaxroll.roles.weights import BackgroundPublisher

LIMIT_S = 20.0
V1 = Version(0, 1)


def snapshot(version: Version) -> VersionRef:
    return VersionRef(version, "tcp", "here", "d")


def ended(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)
    return future


class Store:
    """Records its calls; `answers` are the replies to claims, in order."""

    def __init__(self, *answers: Any) -> None:
        self.calls: list[Any] = []
        self.answers, self.asked = list(answers), []
        self.may_publish = threading.Event()
        self.may_publish.set()

    def publish(self, what: VersionRef) -> None:
        assert self.may_publish.wait(LIMIT_S)
        self.calls.append(("publish", what.version.step))

    def ack(self, version: Version) -> None:
        self.calls.append(("ack", version.step))

    def report(self, rows: list[dict[str, Any]]) -> None:
        self.calls += [("row", row["step"], row["publish_s"] >= 0) for row in rows]

    def claim(self, lineage: int, step: int, wait_s: float) -> Any:
        self.asked.append(step)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def claim_ahead(self, lineage: int, step: int, wait_s: float) -> Future[Any]:
        return self.answers.pop(0)


class Publisher:
    """Finishes with the result of the transfer, or with its error."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def finish(self, version: Version, started: Future[VersionRef]) -> VersionRef:
        return started.result()

    def drop_older(self, version: Version) -> None:
        assert self._store.calls[-1] == ("publish", version.step), "dropped while it was the published version"


def background(store: Any) -> BackgroundPublisher:
    stub: Any = Publisher(store)
    return BackgroundPublisher(store, stub)


def row(step: int) -> dict[str, Any]:
    return {"step": step, "t1": 0.0}


def test_a_step_is_published_then_acknowledged_then_reported_and_after_the_one_before() -> None:
    store = Store()
    publisher = background(store)
    store.may_publish.clear()
    publisher.publish(Version(0, 0), row(1), ended(snapshot(V1)))
    publisher.check()
    assert store.calls == [], "the learner goes on meanwhile"
    store.may_publish.set()
    publisher.publish(V1, row(2), None)  # one that is not published
    publisher.settle()
    publisher.close()
    assert store.calls == [("publish", 1), ("ack", 0), ("row", 1, True), ("ack", 1), ("row", 2, True)]


@pytest.mark.parametrize("then", ["settle", "check", "publish"])
def test_a_failed_publication_is_raised_and_nothing_is_acknowledged(then: str) -> None:
    store = Store()
    publisher = background(store)
    publisher.publish(Version(0, 0), row(1), ended(TransferError("the disk is full")))
    publisher._worker.submit(lambda: None).result(LIMIT_S)  # the one before is over
    with pytest.raises(TransferError, match="disk is full"):
        publisher.publish(V1, row(2), None) if then == "publish" else getattr(publisher, then)()
    publisher.close()
    assert store.calls == []


def session(store: Store, *, steps: int = 4) -> LearnerSession:
    """A learner with its store and its publisher only."""
    made = LearnerSession.__new__(LearnerSession)
    bare: Any = made
    bare.store, bare.background, bare._stop, bare._end = store, background(store), threading.Event(), "finished"
    bare.config = SimpleNamespace(schedule=SimpleNamespace(steps=steps))
    return made


TRAINER: Any = SimpleNamespace(prepare=lambda claim: f"{claim} packed", prepares_ahead=True)
BUSY: Any = SimpleNamespace(is_done=lambda: False)
DONE: Any = SimpleNamespace(is_done=lambda: True)


def test_a_failed_publication_ends_the_wait_for_a_batch() -> None:
    """With α = 0 no batch comes without the new weights: the learner would wait until the store aborts the run."""
    store = Store(NotReady("not leased"), NotReady("not leased"), NotReady("not leased"))
    learner = session(store)
    learner.background.publish(Version(0, 0), row(1), ended(TransferError("the disk is full")))
    learner.background._worker.submit(lambda: None).result(LIMIT_S)
    with pytest.raises(TransferError, match="disk is full"):
        learner._claim(TRAINER, V1)
    assert store.asked == [1]


def test_the_next_batch_is_packed_while_the_devices_compute() -> None:
    ready: Any = session(Store(ended("claim 1")))._claim_ahead(TRAINER, V1, BUSY)
    assert ready == "claim 1 packed"


@pytest.mark.parametrize("answer", [NotReady("no"), Closed("data"), InfraError("the store is away")])
def test_a_failed_claim_ahead_is_repeated_by_the_next_claim(answer: Exception) -> None:
    assert session(Store(ended(answer)))._claim_ahead(TRAINER, V1, BUSY) is None


def test_a_refused_claim_ahead_is_raised() -> None:
    with pytest.raises(StaleClient):
        session(Store(ended(StaleClient("another learner began"))))._claim_ahead(TRAINER, V1, BUSY)


@pytest.mark.parametrize("why", ["the step is done", "a stop is requested"])
def test_a_batch_that_comes_too_late_is_not_waited_for(why: str) -> None:
    asked: Future[Any] = Future()
    learner = session(Store(asked))
    if why == "a stop is requested":
        learner._stop.set()
    assert learner._claim_ahead(TRAINER, V1, BUSY if why == "a stop is requested" else DONE) is None
    assert asked.cancelled(), "the store would hold an abandoned call"


@pytest.mark.parametrize("why", ["the last step", "a model must be asked"])
def test_nothing_is_claimed_ahead_that_cannot_be_packed(why: str) -> None:
    trainer: Any = SimpleNamespace(prepares_ahead=why == "the last step")
    learner = session(Store(), steps=1 if why == "the last step" else 4)
    assert learner._claim_ahead(trainer, V1, BUSY) is None, "the store would have no answer"
