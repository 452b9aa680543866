"""The HTTP front end and its engine: tokens per second with and without it, and the pace of one client in a flood.

The engine is a stub: a thread that adds a token to each running request every 10 ms. It has 64 slots, for 64 clients
that ask again after each answer of 32 to 96 tokens. They are in this process (`in_process`), or in another one and use
HTTP (`whole`: one response per answer; `stream`: events). Aim: at least 95 % of the tokens per second of `in_process`.
For the rest, the stub has 256 slots. One client reads its stream alone (`quiet`), together with one client of another
address with 255 streams (`flood`), and with 255 clients with a stream each (`crowd`). Aims: no token is lost, the
slowest stream of the flood gets at least half the tokens of the fastest, and the p99 time between two of the one's
tokens is at most 2 times that of `quiet`.

The processor time of an event and of a request is measured apart from all sockets: `cost` drives the front end by 64
connections in this process, a token at a time, with each parser of HTTP that is installed.

With `make venv-jetstream`, google-jetstream's own server streams from an equal stub, over gRPC (`jetstream`).

Clients would run on other machines, so their processor time is kept out as far as possible: the flood is read by one
process of low priority that only counts, and the one's times are those at which the kernel received its tokens.

    python -m benchmarks.serving [--quick] [--rounds=5] [--seconds=10]
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import multiprocessing
import os
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import psutil
import uvicorn
from uvicorn.server import ServerState

from benchmarks.lib.child import Child, python_of
from benchmarks.lib.report import Runs, arguments, finish, percentile_ms, ratio, say, spread
from jaxroll.engine.sequence import EngineStats
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Version, VersionRun
from jaxroll.rpc import http
from jaxroll.serving.engine_thread import PauseMode
from jaxroll.serving.http_answers import Served
from jaxroll.serving.http_requests import EngineLimits
from jaxroll.serving.http_server import FrontEnd
from jaxroll.text.tokenizers import CharTokenizer

TEXT, TOKEN, VERSION = CharTokenizer("abcdefgh"), "benchmark", Version(0, 1)
STEP_S, BATCH, FLOOD, ANSWER = 0.010, 64, 256, (32, 96)  # ANSWER: the fewest and the most tokens
HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
COSTS = 5
START_S = 1.0  # not measured: all clients ask at once
TEXTS = re.compile(f'"text":"({TEXT.decode([4])}*)"'.encode())
SO_TIMESTAMPNS = 35  # of Linux: the kernel's time of receipt comes with the bytes
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
                job.on_tokens(ONE)
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


ONE = completion(1, "")


def serve(slots: int, address: Connection) -> None:
    """Serve a stub engine over HTTP until this process is ended."""

    async def run() -> None:
        model = Served(
            "m", StubEngine(slots), EngineLimits(512, TEXT), lambda: VERSION, EngineStats, max_open=2 * FLOOD
        )
        listening = http.listen(HERE, 0)
        address.send(listening.getsockname()[1])
        await http.serve(FrontEnd(model, TOKEN).app, listening)

    asyncio.run(run())


class Client(asyncio.Protocol):
    """One client on one connection, which asks again after each answer until `until_s`; `times` of its tokens."""

    def __init__(self, client: int, stream: bool, until_s: float) -> None:
        self._lengths, self._stream, self._until_s = lengths_of(client), stream, until_s
        self._wanted, self._read, self._got = 0, b"", 0
        self.times: list[tuple[float, int]] = []  # time and number of tokens
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._wanted, self._read, self._got = next(self._lengths), b"", 0
        self._transport.write(request(self._wanted, self._stream))

    def data_received(self, data: bytes) -> None:
        self._read += data
        new, self._read, ended = tokens_in(self._read, self._stream)
        if new:
            self._got += new
            self.times.append((time.monotonic(), new))
        if not ended:
            return
        if self._got != self._wanted:
            self.done.set_exception(AssertionError(f"{self._got} of {self._wanted} tokens arrived"))
        elif time.monotonic() < self._until_s:
            return self._ask()
        else:
            self.done.set_result(None)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))


def request(tokens: int, stream: bool) -> bytes:
    """The bytes of a request for `tokens` tokens."""
    body = json.dumps({**BODY, "max_tokens": tokens, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def tokens_in(read: bytes, stream: bool) -> tuple[int, bytes, bool]:
    """The number of tokens in what was read of an answer, the bytes that are not read yet, and if it has ended."""
    if not stream:
        head, found, body = read.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head.lower()) if found else None
        if length is None or len(body) < int(length[1]):
            return 0, read, False
        return json.loads(body)["usage"]["completion_tokens"], b"", True
    complete = read.rfind(b"\n") + 1
    count = sum(map(len, TEXTS.findall(read, 0, complete)))
    return count, read[complete:], read.find(b"[DONE]", 0, complete) >= 0


def clients(
    port: int, count: int, stream: bool, seconds: float, host: str = HERE, nice: int = 0
) -> tuple[list[list[float]], float]:
    """The times of the tokens of each of `count` streams in this process, and its processor seconds per second.

    Streams of HERE are one client each; those of another host are one client.
    """
    os.nice(nice)

    async def run() -> list[list[float]]:
        loop, until_s = asyncio.get_running_loop(), time.monotonic() + seconds
        made = [
            (await loop.create_connection(partial(Client, each, stream, until_s), HERE, port, local_addr=(host, 0)))[1]
            for each in range(count)
        ]
        await asyncio.gather(*(one.done for one in made))
        return [[at for at, new in one.times for _ in range(new)] for one in made]

    before = time.process_time()
    return asyncio.run(run()), (time.process_time() - before) / seconds


def received(port: int, seconds: float) -> list[float]:
    """The times at which the kernel received the tokens of one client that streams."""
    lengths, until_s, times = lengths_of(0), time.monotonic() + seconds, list[float]()
    with socket.create_connection((HERE, port), timeout=60) as connection:
        connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        while time.monotonic() < until_s:
            wanted, got, read, ended = next(lengths), 0, b"", False
            connection.sendall(request(wanted, True))
            while not ended:
                data, stamps, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(16))
                assert data, "the server closed the connection"
                new, read, ended = tokens_in(read + data, True)
                got += new
                seconds_part, nanoseconds = struct.unpack("qq", stamps[0][2])
                times += [seconds_part + nanoseconds / 1e9] * new
            assert got == wanted, f"{got} of {wanted} tokens arrived"
    return times


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
        return {"tokens_per_s": rate(clients(port, BATCH, stream, seconds)[0], began, seconds)}


class Sink(asyncio.Transport):
    """The server's side of a connection whose client, at `port`, reads nothing; counts what is written."""

    def __init__(self, port: int) -> None:
        super().__init__({"peername": (HERE, port), "sockname": (HERE, 80)})
        self.writes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes += 1

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Nothing: nothing is read."""

    resume_reading = pause_reading


class SteppedEngine(StubEngine):
    """A stub that gives each request a token when `step` is called."""

    def _run(self) -> None:
        """No thread."""

    def step(self) -> bool:
        """False if no request runs any more."""
        self._running += self._waiting
        self._waiting.clear()
        for job in self._running:
            job.left[0] -= 1
        self._deliver([(job, job.left[0]) for job in self._running])
        self._running = [job for job in self._running if job.left[0]]
        return bool(self._running)


def cost(parser: str) -> dict[str, Any]:
    """Processor microseconds of a request with its first two tokens, and of each later event, without sockets.

    The least of `COSTS` measurements.
    """

    async def run() -> list[float]:
        engine = SteppedEngine(BATCH)
        model = Served("m", engine, EngineLimits(512, TEXT), lambda: VERSION, EngineStats, max_open=2 * BATCH)
        app: Any = FrontEnd(model, TOKEN).app
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", http=parser)
        config.load()
        made = [config.http_protocol_class(config, ServerState(), {}) for _ in range(BATCH)]  # type: ignore[call-arg]
        sinks = [Sink(port) for port in range(BATCH)]
        for protocol, sink in zip(made, sinks, strict=True):
            protocol.connection_made(sink)

        async def answers(tokens: int) -> float:
            began, before = time.process_time(), sum(sink.writes for sink in sinks)
            for protocol in made:
                protocol.data_received(request(tokens, True))
            await until_idle()
            while engine.step():
                await until_idle()
            await until_idle()
            events = sum(sink.writes for sink in sinks) - before
            assert events >= BATCH * tokens, f"{events} writes for {BATCH * tokens} tokens"
            return (time.process_time() - began) / BATCH * 1e6

        await answers(ANSWER[1])
        return [min([await answers(tokens) for _ in range(COSTS)]) for tokens in (2, ANSWER[1])]

    short, long = asyncio.run(run())
    return {"request_us": short, "event_us": (long - short) / (ANSWER[1] - 2)}


async def until_idle() -> None:
    """Return when the loop has nothing to do but this."""
    loop: Any = asyncio.get_running_loop()
    await asyncio.sleep(0)
    while loop._ready:
        await asyncio.sleep(0)


def rate(times: list[list[float]], began: float, seconds: float) -> float:
    """Tokens per second between `START_S` after `began` and the time at which clients stop to ask."""
    start, end = began + START_S, began + seconds
    return sum(start <= at < end for each in times for at in each) / (end - start)


def pace(others: int, host: str, seconds: float) -> dict[str, Any]:
    """Times between two tokens of one client, while `others` streams are read in a process of their own.

    These come from `host`.
    """
    spawn = multiprocessing.get_context("spawn")
    server = _Server(FLOOD)
    with server as port, ProcessPoolExecutor(1, mp_context=spawn) as pool:
        flood = pool.submit(clients, port, others, True, seconds + 4, host, 5)
        time.sleep(3)
        began, before = time.monotonic(), server.cpu_s()
        times = received(port, seconds)
        took_s, used = time.monotonic() - began, server.cpu_s() - before
        theirs, cost = flood.result()
    gaps, counts = np.diff(times).tolist(), [len(each) for each in theirs]
    return {
        "p50_ms": percentile_ms(gaps, 50),
        "p99_ms": percentile_ms(gaps, 99),
        "least_over_most": min(counts) / max(counts) if counts else 1.0,
        "tokens_per_s": sum(counts) / (seconds + 4) + len(times) / took_s,
        "server_cores": used / took_s,
        "flood_cores": cost,
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

    def cpu_s(self) -> float:
        """Processor seconds of the server so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

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
    parsers = ["h11", *(["httptools"] if importlib.util.find_spec("httptools") else [])]
    runs = Runs("serving", settings, options.runs_file, options.resume)
    peer = Child("benchmarks.engine.jetstream_arm", "jetstream", 1) if python_of("jetstream").exists() else None
    peers = {} if peer is None else {"jetstream": partial(peer.ask, str(seconds))}
    found = runs.alternate(
        {
            "in_process": partial(in_process, seconds),
            "whole": partial(over_http, False, seconds),
            "stream": partial(over_http, True, seconds),
            **peers,
            "quiet": partial(pace, 0, HERE, seconds),
            "flood": partial(pace, FLOOD - 1, ELSEWHERE, seconds),
            "crowd": partial(pace, FLOOD - 1, HERE, seconds),
            **{parser: partial(cost, parser) for parser in parsers},
        },
        rounds,
    )
    if peer is not None:
        peer.close()
    rates = {arm: [run["tokens_per_s"] for run in each] for arm, each in found.items() if arm not in parsers}
    p99 = {arm: [run["p99_ms"] for run in found[arm]] for arm in ("quiet", "flood", "crowd")}
    share = {arm: ratio(rates[arm], rates["in_process"]) for arm in ("whole", "stream", *peers)}
    slower = {arm: ratio(p99[arm], p99["quiet"]) for arm in ("flood", "crowd")}
    fair = {arm: min(run["least_over_most"] for run in found[arm]) for arm in slower}
    cores = {
        arm: {who: spread([run[f"{who}_cores"] for run in found[arm]]) for who in ("server", "flood")} for arm in p99
    }
    aims = {f"{arm} ≥ 0.95": share[arm]["value"] >= 0.95 for arm in ("whole", "stream")}
    aims |= {f"{arm} over quiet, p99 ≤ 2": slower[arm]["value"] <= 2 for arm in slower}
    aims |= {f"{arm}, least over most ≥ 0.5": fair[arm] >= 0.5 for arm in fair}
    say(f"aims: {aims}")
    finish(
        {
            **settings,
            "rounds": rounds,
            "of_in_process": share,
            "p99_over_quiet": slower,
            "aims": aims,
            "tokens_per_s": {arm: spread(each) for arm, each in rates.items()},
            "p99_ms": {arm: spread(each) for arm, each in p99.items()},
            "least_over_most": fair,
            "cores": cores,
            "cost": {
                parser: {name: spread([run[name] for run in found[parser]]) for name in ("request_us", "event_us")}
                for parser in parsers
            },
        },
        command="python -m benchmarks.serving",
        started=started,
    )


if __name__ == "__main__":
    main()
