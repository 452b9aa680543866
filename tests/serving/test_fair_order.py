"""Order in which the clients of an HTTP front end are served. No test looks at a clock."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from functools import partial

import numpy as np
import pytest

from jaxroll.protocols import Completion, SamplingParams
from jaxroll.records import VersionRun
from jaxroll.serving.engine_thread import Admission, FairQueue, WakeQueue
from jaxroll.serving.http_answers import JoinedTokens, StreamedAnswer
from jaxroll.serving.http_requests import Wanted
from tests.harness.http_engine import TOKEN, V1, V2, Engine, served
from tests.serving.test_http import TEXT, connect, run


def taken(queue: FairQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_a_new_client_waits_for_one_item_of_each_other_client() -> None:
    queue = FairQueue[str](1)
    for number in range(100):
        queue.put("flood", 1, f"flood {number}")
        queue.put("second", 1, f"second {number}")
    first = [queue.pop() for _ in range(10)]
    queue.put("polite", 1, "polite")
    rest = taken(queue)
    assert rest.index("polite") <= 2
    for name in ("flood", "second"):  # nothing is lost, and a client's items keep their order
        assert [one for one in first + rest if one.startswith(name)] == [f"{name} {number}" for number in range(100)]


def test_clients_get_the_same_cost_in_each_round() -> None:
    queue = FairQueue[str](100)
    for _ in range(50):
        queue.put("long", 400, "long")
    for _ in range(200):
        queue.put("short", 50, "short")
    cost = Counter[str]()
    while len(queue) > 50:
        item = queue.pop()
        cost[item] += 400 if item == "long" else 50
        assert abs(cost["long"] - cost["short"]) <= 400 + 100  # one item and one round
    assert min(cost.values()) > 5_000


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "single answer"])
def test_a_polite_client_is_served_after_one_round_of_a_flood(stream: bool) -> None:
    async def check() -> None:
        engine = Engine(slots=1)
        engine.go.clear()
        async with served(engine, slots=1) as (url, front), connect(url, TOKEN) as api:

            def ask(user: str, tokens: int) -> asyncio.Task:
                body = {"prompt": "a", "user": user, "max_tokens": tokens, "stream": stream}
                return asyncio.create_task(api.post("/v1/completions", json=body))

            asking = [ask("flood", 150) for _ in range(12)]
            while front.counts.open < 12:
                await asyncio.sleep(0.005)
            asking.append(ask("polite", 2))
            while front.counts.open < 13:
                await asyncio.sleep(0.005)
            before = len(engine.asked)
            assert before == 2  # one in the slot, and one that follows it
            engine.go.set()
            assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 13
        order = [params.max_tokens for _, _, params in engine.asked]
        assert order.index(2) <= before + Admission.ROUND_TOKENS // 150 + 1

    run(check())


def test_a_flood_cannot_take_the_open_answers_of_others() -> None:
    async def check() -> None:
        engine = Engine(slots=1)
        engine.go.clear()
        async with served(engine, max_open=4) as (url, front), connect(url, TOKEN) as api:

            def ask(user: str) -> asyncio.Task:
                return asyncio.create_task(api.post("/v1/completions", json={"prompt": "a", "user": user}))

            asking = [ask("flood") for _ in range(4)]
            while front.counts.open < 4:
                await asyncio.sleep(0.005)
            assert (await ask("flood")).status_code == 429
            asking.append(ask("polite"))
            while front.counts.open < 5:
                await asyncio.sleep(0.005)
            engine.go.set()
            assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 5
            assert not front.counts.of_client

    run(check())


def test_servers_freeze_the_objects_of_the_imports_once() -> None:
    async def check() -> None:
        counts = []
        for _ in range(2):
            kept = [[] for _ in range(1000)]
            async with served(Engine()) as (url, _), connect(url, TOKEN) as api:
                assert (await api.get("/health")).status_code == 200
                counts.append(gc.get_freeze_count())
            del kept
        assert counts[0] == counts[1] > 10_000

    run(check())


def test_a_cancelled_request_takes_no_place_and_gives_its_own_back() -> None:
    async def check() -> None:
        admission, order = Admission(1), list[str]()
        leave = asyncio.Event()

        async def ask(name: str) -> None:
            async with admission.admitted(name, 10):
                order.append(name)
                await leave.wait()

        asking = [asyncio.create_task(ask(name)) for name in ("runs", "waits", "next", "last")]
        await asyncio.sleep(0)
        assert order == ["runs"] and admission.waiting == 3
        asking[1].cancel()
        await asyncio.sleep(0)
        asking[0].cancel()  # "next" gets the place, and is cancelled before it runs
        await asyncio.sleep(0)
        asking[2].cancel()
        await asyncio.gather(*asking[:3], return_exceptions=True)
        leave.set()
        await asyncio.gather(asking[3])
        assert order == ["runs", "last"] and admission.waiting == 0

    run(check())


def test_streams_are_woken_a_few_at_a_time_and_the_clients_in_turn() -> None:
    async def check() -> None:
        turns, woken = WakeQueue(), list[str]()
        for _ in range(255):
            turns.wake("flood", lambda: woken.append("flood"))
        turns.wake("polite", lambda: woken.append("polite"))
        await asyncio.sleep(0)
        assert len(woken) == WakeQueue.AT_ONCE and woken.index("polite") == 1
        while len(woken) < 256:
            await asyncio.sleep(0)

    run(check())


def test_the_client_that_was_served_longest_ago_is_next(monkeypatch) -> None:
    async def check() -> None:
        monkeypatch.setattr(WakeQueue, "CLIENTS", 2)
        turns, woken = WakeQueue(), list[str]()

        async def after(*clients: str) -> list[str]:
            woken.clear()
            for client in clients:
                turns.wake(client, partial(woken.append, client))
            await asyncio.sleep(0)
            return woken

        assert await after("a", "b") == ["a", "b"]
        assert await after("c", "b", "a") == ["a", "b", "c"]  # in its first round "c" is last
        assert await after("d", "a", "c", "b") == ["b", "c", "d", "a"]  # the turn of "a" is forgotten
        assert (await after("d"), await after("e")) and await after("e", "a", "d") == ["d", "e", "a"]  # "a", as before

    run(check())


def test_the_name_of_a_client_is_not_kept_after_its_turn() -> None:
    async def check() -> None:
        turns, woken, name = WakeQueue(), list[str](), "user " + "x" * 1000
        before = sys.getrefcount(name)
        turns.wake(name, partial(woken.append, "served"))
        await asyncio.sleep(0)
        assert woken == ["served"] and sys.getrefcount(name) == before

    run(check())


@pytest.mark.parametrize("urgent", [False, True])
def test_answers_of_one_client_are_all_woken_in_their_order(urgent: bool) -> None:
    async def check() -> None:
        turns, woken = WakeQueue(), list[int]()
        for number in range(3 * WakeQueue.AT_ONCE):
            turns.wake("a", partial(woken.append, number), urgent=urgent)
        for _ in range(3):
            await asyncio.sleep(0)
        assert woken == list(range(3 * WakeQueue.AT_ONCE))

    run(check())


def test_answers_that_begin_or_end_get_half_of_the_turns_while_others_wait() -> None:
    async def check() -> None:
        turns, woken = WakeQueue(), list[str]()
        for name in ("urgent", "other"):
            for _ in range(40):
                turns.wake(name, lambda name=name: woken.append(name), urgent=name == "urgent")
        await asyncio.sleep(0)
        assert Counter(woken) == {"urgent": WakeQueue.AT_ONCE // 2, "other": WakeQueue.AT_ONCE // 2}
        while len(woken) < 80:
            await asyncio.sleep(0)

    run(check())


def test_the_first_tokens_of_an_answer_and_its_end_pass_the_tokens_of_other_answers() -> None:
    async def check() -> None:
        turns, others = WakeQueue(), list[int]()
        for number in range(1000):
            turns.wake(f"other {number}", lambda number=number: others.append(number))
        arriving = JoinedTokens("a", turns)
        arriving.add(0, PIECES[0])
        assert await arriving.take() == [(0, PIECES[:1])]
        first = len(others)
        arriving.add(0, PIECES[1])  # waits for its turn
        waiting = asyncio.ensure_future(arriving.take())
        while len(others) < 500:
            await asyncio.sleep(0)
        assert first <= WakeQueue.AT_ONCE and not waiting.done()
        arriving.add(0, END)
        assert await waiting == [(0, [PIECES[1], END])] and len(others) <= 500 + 4 * WakeQueue.AT_ONCE

    run(check())


def test_tokens_that_arrive_before_their_turn_are_sent_together() -> None:
    async def check() -> None:
        turns = WakeQueue()
        arriving = JoinedTokens("a", turns)
        for piece in PIECES:
            arriving.add(0, piece)
        arriving.add(1, PIECES[0])
        assert dict(await arriving.take()) == {0: PIECES, 1: PIECES[:1]}
        for later in (PIECES[2], END):
            arriving.add(0, later)
        assert await arriving.take() == [(0, [PIECES[2], END])]
        arriving.add(0, OSError("gone"))
        with pytest.raises(OSError, match="gone"):
            await arriving.take()

    run(check())


def piece(tokens: list[int], *runs: VersionRun, finish: str = "") -> Completion:
    return Completion(np.array(tokens, np.int32), -np.array(tokens, np.float32), runs, finish)


PIECES = [
    piece([1], VersionRun(V1, 1)),
    piece([2, 3], VersionRun(V1, 1), VersionRun(V2, 1)),
    piece([4], VersionRun(V2, 1)),
]
END = piece([1, 2, 3, 4], VersionRun(V1, 4), finish="stop")


def test_pieces_that_are_sent_together_have_the_tokens_log_probs_and_versions_of_each() -> None:
    wanted = Wanted(([1],), 1, SamplingParams(4), stream=True, logprobs=True, token_ids=True)
    sent = StreamedAnswer(TEXT, wanted).add(PIECES)
    assert sent.tokens == [1, 2, 3, 4] and sent.logprobs == [-1.0, -2.0, -3.0, -4.0]
    assert sent.versions == (VersionRun(V1, 2), VersionRun(V2, 2)) and sent.finish is None
    assert StreamedAnswer(TEXT, wanted).add(PIECES[:1]).versions == (VersionRun(V1, 1),)
