"""What the learner does while its devices compute: telling, asking ahead; and what goes wrong meanwhile comes out."""

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
    """Writes down what it is told; `answers` are what claims are answered with, one after the other."""

    def __init__(self, *answers: Any) -> None:
        self.told: list[Any] = []
        self.answers, self.asked = list(answers), []
        self.may_publish = threading.Event()
        self.may_publish.set()

    def publish(self, what: VersionRef) -> None:
        assert self.may_publish.wait(LIMIT_S)
        self.told.append(("publish", what.version.step))

    def ack(self, version: Version) -> None:
        self.told.append(("ack", version.step))

    def report(self, rows: list[dict[str, Any]]) -> None:
        self.told += [("row", row["step"], row["publish_s"] >= 0) for row in rows]

    def claim(self, lineage: int, step: int, wait_s: float) -> Any:
        self.asked.append(step)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def claim_ahead(self, lineage: int, step: int, wait_s: float) -> Future[Any]:
        return self.answers.pop(0)


class Publisher:
    """Its weights are where they are said to be, or lost on the way."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def finish(self, version: Version, started: Future[VersionRef]) -> VersionRef:
        return started.result()

    def drop_older(self, version: Version) -> None:
        assert self._store.told[-1] == ("publish", version.step), "let go of the one before while others are told of it"


def telling(store: Any) -> BackgroundPublisher:
    publisher: Any = Publisher(store)
    return BackgroundPublisher(store, publisher)


def row(step: int) -> dict[str, Any]:
    return {"step": step, "t1": 0.0}


def test_a_step_is_published_then_acknowledged_then_reported_and_after_the_one_before() -> None:
    store = Store()
    teller = telling(store)
    store.may_publish.clear()
    teller.publish(Version(0, 0), row(1), ended(snapshot(V1)))
    teller.check()
    assert store.told == [], "the learner goes on meanwhile"
    store.may_publish.set()
    teller.publish(V1, row(2), None)  # one that is not published
    teller.settle()
    teller.close()
    assert store.told == [("publish", 1), ("ack", 0), ("row", 1, True), ("ack", 1), ("row", 2, True)]


@pytest.mark.parametrize("then", ["settle", "check", "tell"])
def test_what_went_wrong_comes_out_and_nothing_is_acknowledged(then: str) -> None:
    store = Store()
    teller = telling(store)
    teller.publish(Version(0, 0), row(1), ended(TransferError("the disk is full")))
    teller._worker.submit(lambda: None).result(LIMIT_S)  # the one before is over
    with pytest.raises(TransferError, match="disk is full"):
        teller.publish(V1, row(2), None) if then == "tell" else getattr(teller, then)()
    teller.close()
    assert store.told == []


def session(store: Store, *, steps: int = 4) -> LearnerSession:
    """A learner with its store, and nothing else of a life."""
    made = LearnerSession.__new__(LearnerSession)
    bare: Any = made
    bare.store, bare.teller, bare._stop, bare._end = store, telling(store), threading.Event(), "finished"
    bare.config = SimpleNamespace(schedule=SimpleNamespace(steps=steps))
    return made


TRAINER: Any = SimpleNamespace(prepare=lambda claim: f"{claim} laid out", prepares_ahead=True)
BUSY: Any = SimpleNamespace(is_done=lambda: False)
DONE: Any = SimpleNamespace(is_done=lambda: True)


def test_a_learner_that_waits_for_a_batch_hears_that_its_weights_were_not_published() -> None:
    """With α = 0 no batch can come without them: it would wait until the store gave the run up."""
    store = Store(NotReady("not leased"), NotReady("not leased"), NotReady("not leased"))
    learner = session(store)
    learner.teller.publish(Version(0, 0), row(1), ended(TransferError("the disk is full")))
    learner.teller._worker.submit(lambda: None).result(LIMIT_S)
    with pytest.raises(TransferError, match="disk is full"):
        learner._claim(TRAINER, V1)
    assert store.asked == [1]


def test_the_next_batch_is_laid_out_while_the_devices_compute() -> None:
    ready: Any = session(Store(ended("claim 1")))._ahead(TRAINER, V1, BUSY)
    assert ready == "claim 1 laid out"


@pytest.mark.parametrize("answer", [NotReady("no"), Closed("data"), InfraError("the store is away")])
def test_what_does_not_come_ahead_is_asked_for_again_and_costs_no_step(answer: Exception) -> None:
    assert session(Store(ended(answer)))._ahead(TRAINER, V1, BUSY) is None


def test_a_refusal_is_no_delay() -> None:
    with pytest.raises(StaleClient):
        session(Store(ended(StaleClient("another learner began"))))._ahead(TRAINER, V1, BUSY)


@pytest.mark.parametrize("why", ["the devices are through", "told to stop"])
def test_a_batch_that_comes_too_late_is_not_waited_for(why: str) -> None:
    asked: Future[Any] = Future()
    learner = session(Store(asked))
    if why == "told to stop":
        learner._stop.set()
    assert learner._ahead(TRAINER, V1, BUSY if why == "told to stop" else DONE) is None
    assert asked.cancelled(), "the store holds a call that nobody waits for"


@pytest.mark.parametrize("why", ["the last step", "a model must be asked"])
def test_nothing_is_asked_for_that_cannot_be_laid_out(why: str) -> None:
    trainer: Any = SimpleNamespace(prepares_ahead=why == "the last step")
    learner = session(Store(), steps=1 if why == "the last step" else 4)
    assert learner._ahead(trainer, V1, BUSY) is None, "the store would have no answer"
