"""Each refusal of a put for what it means: lost to another, malformed, or a defect that ends the role."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxroll.errors import Closed, Conflict, Fenced, InfraError, StaleClient, StoreRefusal, Unauthorized
from jaxroll.loop_thread import until_one_ends
from jaxroll.records import Failed, Finished, Member
from jaxroll.roles.sampler import Members
from jaxroll.rollout.episode import Transcript
from tests.harness.sampler_members import Store as Silent
from tests.harness.sampler_members import grant, members, settle


class Store(Silent):
    """Answers finished members with `refusal`, failed ones with OK, and keeps the latter."""

    def __init__(self, refusal: Exception, again: Exception | None = None) -> None:
        super().__init__()
        self.refusal, self.again, self.failed = refusal, again, list[Failed]()

    async def put(self, member: Member) -> str:
        if isinstance(member.outcome, Finished):
            raise self.refusal
        if self.again is not None:
            raise self.again
        self.failed.append(member.outcome)
        return "OK"


async def put_one(store: Any) -> Members:
    async def play(member: int, attempt: int, said: Transcript) -> Member:
        return Member(5, member, attempt, said.finished("stop", 0.0, {}))

    work = members(store, lambda grant: play)
    work.session.request_stop = lambda: None  # type: ignore[method-assign]
    work._start((5, 0, 1), work._begin(grant(5)))
    await settle()
    assert work.open == {}
    return work


def after(store: Store) -> Members:
    return asyncio.run(asyncio.wait_for(put_one(store), 20))


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (StoreRefusal("Put: malformed message: Expected `float`, got `null`"), "DATA"),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), "DATA"),
        (TypeError("Encoding objects of type X is unsupported"), "DATA"),
        (NotImplementedError("X does not travel"), "DATA"),
        (OverflowError("can't serialize ints >= 2**64"), "DATA"),
        (StaleClient("put 5.0.1: version 0.9 was never published"), "INFRA"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_member_that_the_store_cannot_take_is_put_as_a_failure(refusal: Exception, kind: str) -> None:
    work = after(store := Store(refusal))
    assert [failed.kind for failed in store.failed] == [kind]
    assert "the store refuses this member" in store.failed[0].error and type(refusal).__name__ in store.failed[0].error
    assert (work.refused, work.lost) == (1, 0)


@pytest.mark.parametrize("refusal", [Fenced("attempt 2 owns it"), Conflict("other bytes"), Closed("finished")])
def test_what_belongs_to_another_by_now_is_left_to_him(refusal: Exception) -> None:
    work = after(store := Store(refusal))
    assert store.failed == [] and (work.refused, work.lost) == (0, 0)


@pytest.mark.parametrize(
    "store",
    [
        Store(InfraError("patience is over")),
        Store(StaleClient("group 5 was never issued"), StaleClient("never issued")),
    ],
    ids=["store away", "a lease of another run"],
)
def test_a_member_that_cannot_be_put_is_counted_and_leased_again_in_time(store: Store) -> None:
    assert after(store).lost == 1


@pytest.mark.parametrize("refusal", [Unauthorized("wrong token"), AssertionError("a defect")])
def test_any_other_failure_of_a_member_ends_the_role(refusal: Exception) -> None:
    async def job() -> None:
        work = await put_one(Store(refusal))
        with pytest.raises(type(refusal)):
            await until_one_ends((work._raise_failure(),))

    asyncio.run(asyncio.wait_for(job(), 20))


def test_a_member_whose_task_foreign_code_cancels_is_counted() -> None:
    async def job() -> None:
        work = members(Silent())
        work._start((5, 0, 1), work._begin(grant(5)))
        await settle()
        work.open[5, 0, 1].cancel()
        await settle()
        assert (work.open, work.lost, work.aborted) == ({}, 1, 0)

    asyncio.run(asyncio.wait_for(job(), 20))
