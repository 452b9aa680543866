"""Time between two tokens of one of 256 clients of the HTTP front end, in processor time of the server alone.

The crowd of benchmarks/serving.py without sockets, in one process: other work on the machine does not count, so that
runs under load can be compared. The clock is the processor time of the front end, with `SEND_S` for each write for
the kernel's `send`; it skips what the clients need, and the time in which nothing is to be done. Every
`STEP_S` a stub engine gives each request a token; a client asks again `ASK_S` after its answer. Aim: the p99 of the
crowd is at most twice that of one client alone.

    python -m benchmarks.crowd [--quick] [--rounds=3]
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import uvicorn
from uvicorn.server import ServerState

from benchmarks.lib.report import Runs, arguments, finish, percentile_ms, ratio, say, spread
from benchmarks.serving import (
    FLOOD,
    STEP_S,
    TEXT,
    TOKEN,
    VERSION,
    Sink,
    SteppedEngine,
    lengths_of,
    request,
    tokens_in,
    until_idle,
)
from jaxroll.engine.sequence import EngineStats
from jaxroll.rpc.protocol import make_full_collections_rare
from jaxroll.serving.http_answers import Served
from jaxroll.serving.http_requests import EngineLimits
from jaxroll.serving.http_server import FrontEnd

SEND_S, ASK_S, START_S = 17e-6, 0.3e-3, 1.0  # the first START_S are not measured: all clients ask at once


class Clock:
    """Processor time without that in `paused`, and with what is added to `skew`; calls at given times."""

    def __init__(self) -> None:
        self.skew = 0.0
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()

    def now(self) -> float:
        """Seconds."""
        return time.process_time() + self.skew

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call `call` in `delay_s`."""
        heapq.heappush(self._calls, (self.now() + delay_s, next(self._count), call))

    async def run(self, until_s: float) -> float:
        """Make the calls that are due after each pass of the event loop; return the seconds without work."""
        loop: Any = asyncio.get_running_loop()
        skipped = 0.0
        while self.now() < until_s:
            while self._calls[0][0] <= self.now():
                heapq.heappop(self._calls)[2]()
            if not loop._ready and (rest := self._calls[0][0] - self.now()) > 0:
                self.skew, skipped = self.skew + rest, skipped + rest
            await asyncio.sleep(0)
        return skipped


class Client(Sink):
    """A client that reads its answers at once: the time of each token, and the number of events."""

    def __init__(self, number: int, clock: Clock) -> None:
        super().__init__(number)
        self._clock, self._lengths, self.times, self.events = clock, lengths_of(number), list[float](), 0
        self.protocol: Any = None
        self.ends = False  # after its answer

    def ask(self) -> None:
        """Ask for the next answer."""
        self._wanted, self._got, self._read = next(self._lengths), 0, b""
        self.protocol.data_received(request(self._wanted, True))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        began = time.process_time()
        self._clock.skew += SEND_S
        new, self._read, ended = tokens_in(self._read + bytes(data), True)
        self.times += [self._clock.now()] * new
        self.events, self._got = self.events + (new > 0), self._got + new
        if ended:
            assert self._got == self._wanted, f"{self._got} of {self._wanted} tokens arrived"
            if not self.ends:
                self._clock.after(ASK_S, self.ask)
        self._clock.skew -= time.process_time() - began

    def close(self) -> None:
        """Nothing: the protocol closes a connection whose request is cancelled."""


def paced(count: int, seconds: float) -> dict[str, Any]:
    """Times between two tokens of `count` clients with a stream each."""

    async def run() -> dict[str, Any]:
        clock, engine = Clock(), SteppedEngine(count)
        model = Served("m", engine, EngineLimits(512, TEXT), lambda: VERSION, EngineStats, max_open=2 * FLOOD)
        app: Any = FrontEnd(model, TOKEN).app
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
        config.load()
        clients = [Client(number, clock) for number in range(count)]
        for one in clients:
            one.protocol = config.http_protocol_class(config, ServerState(), {})  # type: ignore[call-arg]
            one.protocol.connection_made(one)
            clock.after(0.0, one.ask)

        def step() -> None:
            engine.step()
            clock.after(STEP_S, step)

        clock.after(STEP_S, step)
        await clock.run(clock.now() + START_S)
        began, before = clock.now(), sum(one.events for one in clients)
        skipped = await clock.run(began + seconds)
        ended, events = clock.now(), sum(one.events for one in clients) - before
        for one in clients:
            one.ends = True
        while engine.step():
            await until_idle()
        await until_idle()
        gaps = [
            gap
            for one in clients
            for at, gap in zip(one.times[1:], np.diff(one.times), strict=True)
            if began < at <= ended
        ]
        return {
            "p50_ms": percentile_ms(gaps, 50),
            "p99_ms": percentile_ms(gaps, 99),
            "tokens_per_s": len(gaps) / (ended - began),
            "event_us": (ended - began - skipped) / events * 1e6,
        }

    return asyncio.run(run())


def main() -> None:
    """Alternate one client and the crowd, and print the results."""
    options = arguments(__doc__ or "").parse_args()
    started, seconds = time.monotonic(), 1.0 if options.quick else 3.0
    rounds = options.rounds or (1 if options.quick else 3)
    settings = {"clients": FLOOD, "step_s": STEP_S, "send_s": SEND_S, "seconds": seconds}
    make_full_collections_rare()  # as `http.serve` does
    runs = Runs("crowd", settings, options.runs_file, options.resume)
    found = runs.alternate({"quiet": partial(paced, 1, seconds), "crowd": partial(paced, FLOOD, seconds)}, rounds)
    p99 = {arm: [run["p99_ms"] for run in each] for arm, each in found.items()}
    slower = ratio(p99["crowd"], p99["quiet"])
    say(f"aims: {{'crowd over quiet, p99 ≤ 2': {slower['value'] <= 2}}}")
    shown = {arm: {name: spread([run[name] for run in each]) for name in each[0]} for arm, each in found.items()}
    result = {**settings, "rounds": rounds, "p99_over_quiet": slower, **shown}
    finish(result, command="python -m benchmarks.crowd", started=started)


if __name__ == "__main__":
    main()
