"""Members that are ready together travel together, and each gets its own answer."""

from __future__ import annotations

import asyncio

import pytest

from jaxroll.errors import Conflict, Fenced, InfraError, StoreRefusal
from jaxroll.rpc.protocol import CallRefusal
from jaxroll.store import client
from jaxroll.store.messages import PutAnswer, PutCall, PutReply


class Store:
    """Answers once `open` is set: b"x…" is not a member at all, b"f…" is fenced, everything else is taken."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, ...]] = []
        self.open = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, call: PutCall) -> PutReply:
        self.calls.append(call.members)
        await self.open.wait()
        if self.error is not None:
            raise self.error
        if any(body.startswith(b"x") for body in call.members):
            raise StoreRefusal("malformed message")
        return PutReply(tuple(self._answer(body) for body in call.members))

    def _answer(self, body: bytes) -> PutAnswer:
        return PutAnswer("", CallRefusal("FENCED", body.decode())) if body.startswith(b"f") else PutAnswer("OK")


async def started(puts: client.Puts, *bodies: bytes) -> list[asyncio.Task[str]]:
    """Puts under way, in this order."""
    tasks = [asyncio.ensure_future(puts.put(body)) for body in bodies]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def test_what_waits_goes_in_one_call() -> None:
    async def several() -> None:
        store = Store()
        puts = client.Puts(store)
        tasks = await started(puts, b"a")
        tasks += await started(puts, b"b", b"c")
        tasks += await started(puts, b"d")
        store.open.set()
        assert await asyncio.gather(*tasks) == ["OK"] * 4
        assert await puts.put(b"e") == "OK"
        assert store.calls == [(b"a",), (b"b", b"c", b"d"), (b"e",)]

    asyncio.run(several())


def test_a_call_is_bounded_in_bytes_and_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_CALL_BYTES", 5)
    monkeypatch.setattr(client, "MAX_PUTS", 3)

    async def bounded() -> None:
        store = Store()
        store.open.set()
        bodies = [b"aa", b"bb", b"cc", b"d", b"e", b"g", b"h", b"larger than all"]
        tasks = await started(client.Puts(store), *bodies)
        await asyncio.gather(*tasks)
        assert [body for call in store.calls for body in call] == bodies
        assert all(len(call) == 1 or (len(call) <= 3 and sum(map(len, call)) <= 5) for call in store.calls)
        assert max(map(len, store.calls)) == 3

    asyncio.run(bounded())


def test_each_member_has_its_own_answer_whatever_travels_with_it() -> None:
    async def mixed() -> None:
        store = Store()
        tasks = await started(client.Puts(store), b"a", b"f1", b"x", b"f2", b"b")
        store.open.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert (answers[0], answers[4]) == ("OK", "OK")
        assert [(type(answer), str(answer)) for answer in (answers[1], answers[3])] == [(Fenced, "f1"), (Fenced, "f2")]
        assert type(answers[2]) is StoreRefusal

    asyncio.run(mixed())


def test_no_call_waits_for_a_store_that_stays_away_or_a_client_that_closed() -> None:
    async def away() -> None:
        store = Store()
        store.error = InfraError("away")
        puts = client.Puts(store)
        tasks = [*(await started(puts, b"a")), *(await started(puts, b"b", b"c"))]
        store.open.set()
        assert [str(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == ["away"] * 3
        store.error = None
        assert await puts.put(b"d") == "OK", "the next one asks again"
        store.open.clear()
        tasks = await started(puts, b"e", b"g")
        await puts.close()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(answer) for answer in answers] == [InfraError] * 2
        with pytest.raises(InfraError, match="closed"):
            await puts.put(b"h")

    asyncio.run(away())


def test_a_cancelled_request_is_not_sent_and_delays_no_other() -> None:
    async def given_up() -> None:
        store = Store()
        puts = client.Puts(store)
        (sent,) = await started(puts, b"a")
        waiting, last = await started(puts, b"b", b"c")
        sent.cancel()
        waiting.cancel()
        await asyncio.sleep(0)
        store.open.set()
        assert await last == "OK"
        assert store.calls == [(b"a",), (b"c",)]

    asyncio.run(given_up())


def test_a_store_that_answers_for_others_is_no_store() -> None:
    async def short() -> None:
        async def one_answer(call: PutCall) -> PutReply:
            return PutReply((PutAnswer("", CallRefusal("CONFLICT", "x")),))

        tasks = await started(client.Puts(one_answer), b"a", b"b", b"c")
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(answer, InfraError) for answer in answers)
        assert all(isinstance(answer, (InfraError, Conflict)) for answer in answers)

    asyncio.run(short())
