"""The HTTP front end over a real engine: its tokens and log-probs, weight versions, pauses, freed slots."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import httpx2 as httpx
import numpy as np
import openai
import pytest

from jaxroll.engine.requests import Request
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version
from jaxroll.rpc.http import address, listen, serve
from jaxroll.serving import http_server
from jaxroll.serving.engine_thread import EngineHost, EngineProxy
from jaxroll.serving.http_answers import Served
from jaxroll.serving.http_requests import EngineLimits
from jaxroll.text.tokenizers import CharTokenizer

TOKEN, DEADLINE_S = "t", 120.0
V2 = Version(0, 2)
PROMPT = [5, 9, 9, 17]


class Gate(contextlib.AbstractContextManager):
    """Lets the stepping thread pass `permits` times with work, and always without work or once it is open."""

    def __init__(self, permits: int) -> None:
        self._permits = threading.Semaphore(permits)
        self.has_work: Callable[[], bool] = lambda: True

    def open(self) -> None:
        self._permits.release(1_000_000)

    def __enter__(self) -> None:
        if self.has_work():  # a slow client leaves the thread idle steps, which must not use the permits
            self._permits.acquire()

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.asynccontextmanager
async def over_http(b, gate: Gate):
    """A front end over the engine of `b`, whose thread passes `gate` before each step."""
    loop, host = asyncio.get_running_loop(), EngineHost(b.engine, gate)
    proxy = EngineProxy(host, loop)
    gate.has_work = lambda: b.engine.stats().active + b.engine.stats().queue_depth > 0
    text = CharTokenizer("".join(map(chr, range(40, 100))))
    assert text.vocab_size == 64
    served = Served("nano", proxy, EngineLimits(32, text), lambda: b.engine.version, b.engine.stats)
    front, listening = http_server.FrontEnd(served, TOKEN), listen("127.0.0.1", 0)
    thread = threading.Thread(target=host.run)
    thread.start()
    serving = asyncio.create_task(serve(front.app, listening))
    url = address("127.0.0.1", listening)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=DEADLINE_S) as api:
            yield SimpleNamespace(url=url, api=api, front=front, proxy=proxy, text=text)
    finally:
        gate.open()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        host.stop()
        await asyncio.to_thread(thread.join)


@pytest.fixture
def opened() -> Iterator[Gate]:
    gate = Gate(0)
    gate.open()
    yield gate


def run(job) -> None:
    asyncio.run(asyncio.wait_for(job, DEADLINE_S))


def test_tokens_and_logprobs_are_those_of_the_engine(bench, opened) -> None:
    b = bench()
    params = SamplingParams(15, 0.8, top_p=0.9, stop_tokens=(2, 7), seed=5)
    for member in range(3):
        b.add(Request(member, np.array(PROMPT, np.int32), GenerationKey(0, member), params))
    expected = [result.completion for _, result in sorted(b.finish().items())]

    async def check() -> None:
        async with over_http(b, opened) as http:
            sampling = {"n": 3, "max_tokens": 15, "temperature": 0.8, "top_p": 0.9, "stop_token_ids": [7], "seed": 5}
            body = {"token_ids": PROMPT, "sampling_params": sampling}
            choices = (await http.api.post("/inference/v1/generate", json=body)).json()["choices"]
            for choice, one in zip(choices, expected, strict=True):
                assert choice["token_ids"] == one.tokens.tolist() and choice["finish_reason"] == one.finish
                assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == one.logprobs.tolist()
                assert choice["weight_versions"] == [{"version": "0.1", "count": len(one.tokens)}]
            api = openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key=TOKEN, max_retries=0)
            asked = {"max_tokens": 15, "temperature": 0.8, "top_p": 0.9, "seed": 5, "logprobs": 1}
            more = {"stop_token_ids": [7], "return_token_ids": True}
            got: list[int] = []
            logprobs: list[float] = []
            async for chunk in await api.completions.create(
                model="nano", prompt=PROMPT, stream=True, extra_body=more, **asked
            ):
                got += chunk.choices[0].model_extra["token_ids"]
                logprobs += chunk.choices[0].logprobs.token_logprobs
            assert got == expected[0].tokens.tolist() and logprobs == expected[0].logprobs.tolist()
            await api.close()

    run(check())


async def _streaming(http, events: list[dict]) -> None:
    """Append the events of one long answer."""
    body = {"prompt": PROMPT, "max_tokens": 28, "stream": True, "ignore_eos": True, "return_token_ids": True}
    async with http.api.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(httpx.Response(200, content=line[6:]).json()["choices"][0])


async def _begun(b) -> None:
    while b.engine.stats().active < 1:
        await asyncio.sleep(0.002)


def test_a_pause_that_keeps_requests_continues_them_with_the_new_weights(bench) -> None:
    b, events = bench(), []

    async def check() -> None:
        async with over_http(b, gate := Gate(2)) as http:
            asking = asyncio.create_task(_streaming(http, events))
            await _begun(b)
            pausing = asyncio.create_task(http.proxy.pause("keep"))
            await asyncio.sleep(0)  # the command is in the queue of the engine
            gate.open()
            await pausing
            drawn = b.engine.stats().tokens_decoded
            b.swap(V2, 1)
            while b.engine.version != V2:
                await asyncio.sleep(0.002)
            assert b.engine.stats().tokens_decoded == drawn and not asking.done()
            assert (await http.api.get("/is_paused")).json() == {"is_paused": True}
            assert (await http.api.post("/resume")).json()["weight_version"] == "0.2"
            await asking

    run(check())
    runs = [(run["version"], run["count"]) for event in events for run in event["weight_versions"]]
    assert sum(count for _, count in runs) == 28 and sum(len(event["token_ids"]) for event in events) == 28
    assert {version for version, _ in runs} == {"0.1", "0.2"} and [v for v, _ in runs] == sorted(v for v, _ in runs)


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_other_pauses_end_what_runs_and_hold_what_comes_later(bench, mode: str) -> None:
    b, events = bench(), []

    async def check() -> None:
        async with over_http(b, gate := Gate(2)) as http:
            asking = asyncio.create_task(_streaming(http, events))
            await _begun(b)
            pausing = asyncio.create_task(http.proxy.pause(mode))
            await asyncio.sleep(0)
            gate.open()
            await pausing
            await asking
            while not b.engine.stats().suspended:  # the next step applies it, before it samples
                await asyncio.sleep(0.002)
            assert b.engine.stats().active == 0
            later = asyncio.create_task(http.api.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}))
            while http.front.counts.open == 0:
                await asyncio.sleep(0.002)
            assert not later.done() and b.engine.stats().queue_depth == 0
            await http.api.post("/resume")
            assert (await later).json()["usage"]["completion_tokens"] == 2

    run(check())
    tokens = sum(len(event["token_ids"]) for event in events)
    assert events[-1]["finish_reason"] == ("abort" if mode == "abort" else "length")
    assert 0 < tokens < 28 if mode == "abort" else tokens == 28


def test_a_client_that_disconnects_frees_the_slot_of_the_engine(bench) -> None:
    b = bench()
    before = b.engine.stats()

    async def check() -> None:
        async with over_http(b, gate := Gate(2)) as http:
            asking = asyncio.create_task(_streaming(http, []))
            await _begun(b)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            while http.front.counts.open:
                await asyncio.sleep(0.002)
            gate.open()
            while b.engine.stats().active:
                await asyncio.sleep(0.002)
            assert b.engine.stats().aborted == before.aborted + 1

    run(check())
