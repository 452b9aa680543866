"""The HTTP front end and its engine: tokens per second with and without it, and the pace of one client in a flood.

The engine is a stub: a thread that adds a token to each running request every 10 ms. It has 64 slots, for 64 clients
that ask again after each answer of 32 to 96 tokens. They are in this process (`in_process`), or in another one and use
HTTP (`whole`: one response per answer; `stream`: an event per token). Aim: at least 95 % of the tokens per second of
`in_process`. For the flood, the stub has 256 slots and one client reads its stream alone (`quiet`), then together with
255 others (`flood`). Aims: no token is lost, the slowest client of the flood gets at least half the tokens of the
fastest, and the p99 time between two of the one's tokens is at most 2 times that of `quiet`.

    python -m benchmarks.serving [--quick] [--rounds=5] [--seconds=10]
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.report import Runs, arguments, finish, percentile_ms, ratio, say, spread
from jaxroll.engine.stats import EngineStats
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Version, VersionRun
from jaxroll.rpc import http
from jaxroll.serving.engine_thread import PauseMode
from jaxroll.serving.http_answers import Served
from jaxroll.serving.http_requests import Room
from jaxroll.serving.http_server import FrontEnd
from jaxroll.text.tokenizers import CharTokenizer

TEXT, TOKEN, VERSION = CharTokenizer("abcdefgh"), "benchmark", Version(0, 1)
STEP_S, BATCH, FLOOD, ANSWER = 0.010, 64, 256, (32, 96)  # ANSWER: the fewest and the most tokens
START_S = 1.0  # not measured: all clients ask at once
EVENT = f'"text":"{TEXT.decode([4])}"'.encode()
BODY = {"prompt": "abcdefgh", "temperature": 1.0, "ignore_eos": True}


class _Job(NamedTuple):
    tokens: int
    left: list[int]  # how many of them are to come
    on_tokens: Callable[[Completion], None] | None
    done: asyncio.Future[Completion]


class StubEngine:
    """`slots` requests run at once; every `STEP_S` each gets a token, on the thread of an engine."""

    paused: PauseMode | None = None

    def __init__(self, slots: int) -> None:
        self._slots, self._waiting, self._running = slots, deque[_Job](), list[_Job]()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    async def pause(self, mode: PauseMode) -> None:
        """Nothing: no client pauses this engine."""

    def resume(self) -> None:
        """Nothing, as for `pause`."""

    async def generate(
        self,
        prompt: np.ndarray,
        key: GenerationKey,
        params: SamplingParams,
        *,
        keep: bool = False,
        allowed: Any = None,
        on_tokens: Callable[[Completion], None] | None = None,
    ) -> Completion:
        """`params.max_tokens` tokens."""
        job = _Job(params.max_tokens, [params.max_tokens], on_tokens, self._loop.create_future())
        self._waiting.append(job)
        return await job.done

    def _run(self) -> None:
        while True:
            time.sleep(STEP_S)
            while self._waiting and len(self._running) < self._slots:
                self._running.append(self._waiting.popleft())
            for job in self._running:
                job.left[0] -= 1
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self._deliver, [(job, job.left[0]) for job in self._running])
            self._running = [job for job in self._running if job.left[0]]

    @staticmethod
    def _deliver(step: list[tuple[_Job, int]]) -> None:
        for job, left in step:
            if job.on_tokens is not None and left:
                job.on_tokens(completion(1, ""))
            elif not left and not job.done.done():
                job.done.set_result(completion(job.tokens, "length"))


def lengths_of(client: int) -> Iterator[int]:
    """The lengths of the answers that this client asks for, without end."""
    rng = np.random.default_rng(client)
    while True:
        yield int(rng.integers(*ANSWER))


def completion(count: int, end: str) -> Completion:
    """`count` tokens."""
    tokens = np.full(count, 4, np.int32)
    return Completion(tokens, np.zeros(count, np.float32), (VersionRun(VERSION, count),), end)


def serve(slots: int, address: Connection) -> None:
    """Serve a stub engine over HTTP until this process is ended."""

    async def run() -> None:
        model = Served("m", StubEngine(slots), Room(512, TEXT), lambda: VERSION, EngineStats, max_open=2 * FLOOD)
        listening = http.listen("127.0.0.1", 0)
        address.send(listening.getsockname()[1])
        await http.serve(FrontEnd(model, TOKEN).app, listening)

    asyncio.run(run())


async def asked(port: int, client: int, stream: bool, until_s: float) -> list[float]:
    """The times at which tokens of one client arrived, which asks again after each answer, on one connection."""
    lengths = lengths_of(client)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    times: list[float] = []
    while time.monotonic() < until_s:
        wanted = next(lengths)
        body = json.dumps({**BODY, "max_tokens": wanted, "stream": stream}).encode()
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        got = 0
        if stream:
            while size := int(await reader.readline(), 16):
                events = (await reader.readexactly(size + 2)).count(EVENT)
                got += events
                times += [time.monotonic()] * events
            await reader.readline()
        else:
            length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length"))
            got = json.loads(await reader.readexactly(int(length.split(b":")[1])))["usage"]["completion_tokens"]
            times += [time.monotonic()] * got
        assert got == wanted, f"{got} of {wanted} tokens arrived"
    writer.close()
    return times


def clients(port: int, count: int, stream: bool, seconds: float) -> list[list[float]]:
    """The times of each of `count` clients in this process."""

    async def run() -> list[list[float]]:
        until_s = time.monotonic() + seconds
        return list(await asyncio.gather(*(asked(port, each, stream, until_s) for each in range(count))))

    return asyncio.run(run())


def in_process(seconds: float) -> dict[str, Any]:
    """Tokens per second of the stub without HTTP."""

    async def run() -> list[list[float]]:
        engine, until_s = StubEngine(BATCH), time.monotonic() + seconds

        async def ask(client: int) -> list[float]:
            lengths, times = lengths_of(client), list[float]()
            while time.monotonic() < until_s:
                wanted = SamplingParams(next(lengths))
                done = await engine.generate(np.zeros(8, np.int32), GenerationKey(0, client), wanted)
                times += [time.monotonic()] * len(done.tokens)
            return times

        return list(await asyncio.gather(*(ask(client) for client in range(BATCH))))

    began = time.monotonic()
    return {"tokens_per_s": rate(asyncio.run(run()), began, seconds)}


def over_http(stream: bool, seconds: float) -> dict[str, Any]:
    """Tokens per second of `BATCH` clients in another process than the server's."""
    with _Server(BATCH) as port:
        began = time.monotonic()
        return {"tokens_per_s": rate(clients(port, BATCH, stream, seconds), began, seconds)}


def rate(times: list[list[float]], began: float, seconds: float) -> float:
    """Tokens per second between `START_S` after `began` and the time at which clients stop to ask."""
    start, end = began + START_S, began + seconds
    return sum(start <= at < end for each in times for at in each) / (end - start)


def pace(others: int, seconds: float) -> dict[str, Any]:
    """Times between two tokens of one client, while `others` read theirs in a process of their own."""
    spawn = multiprocessing.get_context("spawn")
    with _Server(FLOOD) as port, ProcessPoolExecutor(1, mp_context=spawn) as pool:
        flood = pool.submit(clients, port, others, True, seconds + 4)
        time.sleep(3)
        (times,) = clients(port, 1, True, seconds)
        counts = [len(each) for each in flood.result()]
    gaps = np.diff(times).tolist()
    return {
        "p50_ms": percentile_ms(gaps, 50),
        "p99_ms": percentile_ms(gaps, 99),
        "least_over_most": min(counts) / max(counts) if counts else 1.0,
    }


class _Server:
    """A server in a process of its own; entering returns its port."""

    def __init__(self, slots: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._here, there = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(slots, there), daemon=True)

    def __enter__(self) -> int:
        self._process.start()
        assert self._here.poll(60), "the server does not start"
        return self._here.recv()

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.join()


def main() -> None:
    """Alternate the arms and print the results."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of an arm")
    options = parser.parse_args()
    started, seconds = time.monotonic(), 3.0 if options.quick else options.seconds
    rounds = options.rounds or (1 if options.quick else 5)
    settings = {"step_s": STEP_S, "batch": BATCH, "flood": FLOOD, "answer_tokens": list(ANSWER), "seconds": seconds}
    runs = Runs("serving", settings, options.runs_file, options.resume)
    found = runs.alternate(
        {
            "in_process": partial(in_process, seconds),
            "whole": partial(over_http, False, seconds),
            "stream": partial(over_http, True, seconds),
            "quiet": partial(pace, 0, seconds),
            "flood": partial(pace, FLOOD - 1, seconds),
        },
        rounds,
    )
    rates = {arm: [run["tokens_per_s"] for run in found[arm]] for arm in ("in_process", "whole", "stream")}
    p99 = {arm: [run["p99_ms"] for run in found[arm]] for arm in ("quiet", "flood")}
    share = {arm: ratio(rates[arm], rates["in_process"]) for arm in ("whole", "stream")}
    fair, slower = min(run["least_over_most"] for run in found["flood"]), ratio(p99["flood"], p99["quiet"])
    aims = {f"{arm} ≥ 0.95": share[arm]["value"] >= 0.95 for arm in share}
    aims |= {"flood over quiet, p99 ≤ 2": slower["value"] <= 2, "least over most ≥ 0.5": fair >= 0.5}
    say(f"aims: {aims}")
    finish(
        {
            **settings, "rounds": rounds, "of_in_process": share, "p99_flood_over_quiet": slower, "aims": aims,
            "tokens_per_s": {arm: spread(each) for arm, each in rates.items()},
            "p99_ms": {arm: spread(each) for arm, each in p99.items()}, "least_over_most": fair,
        },
        command="python -m benchmarks.serving", started=started,
    )  # fmt: skip


if __name__ == "__main__":
    main()
