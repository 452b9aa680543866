"""Engine on a thread of its own, and requests to it from an event loop.

Threads: the *JAX thread* runs `EngineHost.run`: engine steps while there are requests, jobs of other threads between
them. The *loop thread* runs asyncio. `EngineHost.call` passes jobs from the loop to the JAX thread without blocking the
loop; completion callbacks pass results back.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from heapq import heappop, heappush
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from jaxroll.clock import unix_s
from jaxroll.engine.engine import Engine
from jaxroll.engine.requests import MaySample, OnTokens, Request, Result, TokenMask
from jaxroll.engine.sequence import EngineStats
from jaxroll.protocols import Completion, GenerationKey, SamplingParams

R = TypeVar("R")
PauseMode = Literal["abort", "wait", "keep"]
SPAN_GAP_S = 0.005  # decode steps closer than this are one busy span
SPAN_MAX_S = 1.0
IDLE_S = 0.5  # an engine without work looks for it this often, though new requests wake it


class BusySpans:
    """Busy intervals of the engine, merged; `take` returns the closed ones. Times are unix seconds."""

    def __init__(self) -> None:
        self._open: list[float] | None = None
        self._closed: queue.SimpleQueue[tuple[float, float, int]] = queue.SimpleQueue()

    def busy(self, t0: float, t1: float, tokens: int) -> None:
        """Add an interval from `t0` to `t1` in which the engine sampled `tokens`."""
        span = self._open
        if span is not None and t0 - span[1] <= SPAN_GAP_S and t1 - span[0] <= SPAN_MAX_S:
            span[1], span[2] = t1, span[2] + tokens
            return
        self.close()
        self._open = [t0, t1, tokens]

    def close(self) -> None:
        """End the open span."""
        if self._open is not None:
            t0, t1, tokens = self._open
            self._closed.put((t0, t1, int(tokens)))
            self._open = None

    def take(self) -> list[tuple[float, float, int]]:
        """The spans closed since the last call."""
        return _drain(self._closed)


class EngineHost:
    """Runs the engine on the thread that calls `run`; other threads use `call` and `wake`.

    Each step and each job holds `device_lock`, if other roles dispatch to the same devices.
    """

    def __init__(self, engine: Engine, device_lock: AbstractContextManager[object] | None = None) -> None:
        self.engine, self.spans, self._device_lock = engine, BusySpans(), device_lock or nullcontext()
        self.on_step: Callable[[], None] = lambda: None  # called by `run` after each step that did work
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        self._wake: Any = threading.Event()
        self._stopping = threading.Event()

    def call(self, job: Callable[[], R]) -> Future[R]:
        """The future result of `job`, run on the JAX thread between two steps."""
        future: Future[R] = Future()
        self._jobs.put((job, future))
        self._wake.set()
        return future

    def wake(self) -> None:
        """Wake the JAX thread after a request was added."""
        self._wake.set()

    def stop(self) -> None:
        """Make `run` return after the current step."""
        self._stopping.set()
        self._wake.set()

    def run(self) -> None:
        """Step the engine until `stop`."""
        tokens = self.engine.stats().tokens_decoded
        while not self._stopping.is_set():
            for job, future in _drain(self._jobs):
                with self._device_lock:
                    _settle(job, future)
            self._wake.clear()
            with self._device_lock:
                t0 = unix_s()
                worked = self.engine.step()
            if worked:
                now = self.engine.stats().tokens_decoded
                self.spans.busy(t0, unix_s(), now - tokens)
                tokens = now
                self.on_step()
            else:
                self.spans.close()
                if self._jobs.empty():
                    self._wake.wait(IDLE_S)

    async def run_on_loop(self, step_s: Callable[[EngineStats, EngineStats], float]) -> None:
        """`run` on the running event loop, whose clock is virtual: it does not move while a step computes.

        A step takes `step_s` of the counters before and after it. Call `call` and `wake` on the loop's thread only.
        """
        self._wake = asyncio.Event()
        while not self._stopping.is_set():
            for job, future in _drain(self._jobs):
                _settle(job, future)
            self._wake.clear()
            t0, before = unix_s(), self.engine.stats()
            if self.engine.step():
                after = self.engine.stats()
                await asyncio.sleep(step_s(before, after))
                self.spans.busy(t0, unix_s(), after.tokens_decoded - before.tokens_decoded)
                continue
            self.spans.close()
            if self._jobs.empty():
                await self._wake.wait()


def _settle(job: Callable[[], R], future: Future[R]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except Exception as error:  # noqa: BLE001 - the caller gets the error; the JAX thread continues
        future.set_exception(error)


class EngineProxy:
    """An `LLMProxy` over an engine in this process. `intervals` logs when each member's tokens were decoded.

    A request with a seed of its own belongs to no member.
    """

    def __init__(self, host: EngineHost, loop: asyncio.AbstractEventLoop) -> None:
        self._host, self._loop, self._ids = host, loop, itertools.count()
        self._intervals: list[tuple[int, int, float, float, int]] = []
        self._open: dict[int, asyncio.Future] = {}
        self._members: dict[int, tuple[int, int]] = {}  # by request
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._pieces: deque[tuple[OnTokens, Completion]] = deque()
        self.paused: PauseMode | None = None

    async def generate(
        self,
        prompt: np.ndarray,
        key: GenerationKey,
        params: SamplingParams,
        *,
        keep: bool = False,
        allowed: TokenMask | None = None,
        on_tokens: OnTokens | None = None,
        piece_tokens: int = 1,
        may_sample: MaySample | None = None,
        before: Completion | None = None,
    ) -> Completion:
        """The completion of `prompt`; cancelling the call aborts the request and discards its tokens.

        With `keep` its KV cache entries are kept, so that the next turn computes only new tokens. `allowed` is the
        request's token mask (`Request`); DataError if it allows no token or fails. `on_tokens` gets new tokens on the
        event loop while the request runs (`Request`); the completion holds them too. It begins with `before`, if given.
        Waits while generation is paused.
        """
        await self._admitting.wait()
        done: asyncio.Future = self._loop.create_future()
        pass_on = None if on_tokens is None else functools.partial(self._pass_on, on_tokens)
        request = Request(
            next(self._ids),
            prompt,
            key,
            params,
            keep=keep,
            allowed=allowed,
            on_tokens=pass_on,
            piece_tokens=piece_tokens,
            may_sample=may_sample,
            before=before,
        )

        def deliver(result: Result) -> None:
            self._loop.call_soon_threadsafe(_resolve, done, result)

        self._host.engine.add(request, deliver)
        self._open[request.id], self._members[request.id] = done, (key.group, key.member)
        self._host.wake()
        try:
            result = await done
        except asyncio.CancelledError:
            self._host.engine.abort(request.id, keep=False)
            self._host.wake()
            raise
        finally:
            del self._open[request.id], self._members[request.id]
        completion = result.completion
        if params.seed is None:
            sampled = len(completion.tokens) - (len(before.tokens) if before is not None else 0)
            self._intervals.append((key.group, key.member, result.t_start_s, result.t_end_s, sampled))
        return completion

    def generating(self) -> set[tuple[int, int]]:
        """The members (group, member) that have a request in the engine."""
        return set(self._members.values())

    async def pause(self, mode: PauseMode) -> None:
        """Stop generation until `resume`; returns when the engine samples nothing more. Weight swaps take effect.

        `keep`: running requests stay in their slots. `wait`: they end first. `abort`: they end now, with the tokens so
        far and finish "abort". With `wait` and `abort` later requests wait outside the engine. A `resume` meanwhile
        ends the call.
        """
        self.paused = mode
        if mode != "keep":
            self._admitting.clear()
        if mode == "wait":
            self._host.engine.resume()  # after a pause that kept requests, they could not end
        for id in list(self._open) if mode == "abort" else ():
            self._host.engine.abort(id, keep=True)
        self._host.wake()
        while mode != "keep" and self._open and self.paused == mode:
            await asyncio.wait(list(self._open.values()))
            await asyncio.sleep(0)  # lets the requests leave
        if self.paused == mode:
            self._host.engine.suspend()
            await asyncio.wrap_future(self._host.call(lambda: None))  # a dispatch under way has ended

    async def flush(self) -> None:
        """Pass all sampled tokens to the `on_tokens` of their requests, however few they are."""
        await asyncio.wrap_future(self._host.call(self._host.engine.stream))
        await asyncio.sleep(0)  # lets the pieces arrive

    def resume(self) -> None:
        """Continue after `pause`."""
        self.paused = None
        self._admitting.set()
        self._host.engine.resume()
        self._host.wake()

    def _pass_on(self, on_tokens: OnTokens, piece: Completion) -> None:
        # The stepping thread wakes the loop once for all pieces of a dispatch.
        self._pieces.append((on_tokens, piece))
        if len(self._pieces) == 1:  # otherwise the loop has been woken and has not taken them all
            self._loop.call_soon_threadsafe(self._deliver_pieces)

    def _deliver_pieces(self) -> None:
        while self._pieces:
            on_tokens, piece = self._pieces.popleft()
            on_tokens(piece)

    def take_intervals(self) -> list[tuple[int, int, float, float, int]]:
        """(group, member, start, end, tokens) of the generations that ended since the last call."""
        taken, self._intervals = self._intervals, []
        return taken


def _resolve(future: asyncio.Future, result: Result) -> None:
    if future.done():
        return
    if result.error is not None:
        future.set_exception(result.error)
    else:
        future.set_result(result)


def _drain(items: queue.SimpleQueue) -> list:
    taken = []
    while True:
        try:
            taken.append(items.get_nowait())
        except queue.Empty:
            return taken


# --- Fair order of an engine's clients


class _Line(Generic[R]):
    __slots__ = ("credit", "waiting")

    def __init__(self, credit: float, cost: float, item: R) -> None:
        self.credit, self.waiting = credit, deque(((cost, item),))


class FairQueue(Generic[R]):
    """Items of several clients, taken by deficit round robin (Shreedhar and Varghese, 1996).

    In each round every client gets items of `quantum` cost, so a new client waits for at most one round of the others.
    """

    def __init__(self, quantum: float) -> None:
        self._quantum, self._lines = quantum, dict[str, _Line[R]]()  # in the order of the round
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, client: str, cost: float, item: R) -> None:
        """Add an item behind those of the same client."""
        if line := self._lines.get(client):
            line.waiting.append((cost, item))
        else:
            self._lines[client] = _Line(self._quantum, cost, item)
        self._count += 1

    def pop(self) -> R:
        """Remove and return the next item. The queue has one."""
        while True:
            client, line = next(iter(self._lines.items()))
            cost, item = line.waiting[0]
            if cost <= line.credit:
                break
            line.credit += self._quantum
            self._lines[client] = self._lines.pop(client)  # to the end of the round
        line.credit -= cost
        line.waiting.popleft()
        if not line.waiting:
            del self._lines[client]
        self._count -= 1
        return item


class Admission:
    """Limits the requests that are in the engine to `limit`, and serves clients in turn. Belongs to one event loop.

    The engine serves its own queue in order of arrival; a client with many requests would fill it.
    """

    ROUND_TOKENS = 256  # of each client and round, prompt and answer

    def __init__(self, limit: int) -> None:
        self._free, self._waiting = limit, FairQueue[asyncio.Future[None]](self.ROUND_TOKENS)

    @property
    def waiting(self) -> int:
        """Requests that wait to be admitted."""
        return len(self._waiting)

    @asynccontextmanager
    async def admitted(self, client: str, tokens: int) -> AsyncIterator[None]:
        """Wait until a request of `client` with at most `tokens` tokens may enter the engine; count it."""
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.put(client, tokens, admitted)
        self._admit()
        try:
            await admitted
            yield
        finally:
            if not admitted.cancelled():  # otherwise `_admit` skips it
                self._free += 1
                self._admit()

    def _admit(self) -> None:
        while self._free and self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                self._free -= 1
                turn.set_result(None)


class _Lines:
    """Answers that wait for their turn: those of each client in order, the client served longest ago first."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[Callable[[], object]]] = {}
        self.order: list[tuple[int, str]] = []  # a heap of the turns at which the clients were served last


class WakeQueue:
    """Wakes answers that have new tokens: a few in each pass of the event loop, and the clients in turn.

    A stream that is woken late has more tokens then, and sends them in one event. So the work of a pass is bounded,
    however fast the engine is. The client that was served longest ago is next: in the order in which tokens arrive, one
    that was served just after a step of the engine would wait for the next step and for a whole round in addition.
    Answers that begin or end are woken before the others, because their clients wait for them (RFC 8290 does so with
    new flows); at most half of a pass is for them while others wait.
    """

    AT_ONCE = 8
    CLIENTS = 4096  # whose last turn is known; another client is last in its first round

    def __init__(self) -> None:
        self._urgent, self._others = _Lines(), _Lines()
        self._turn, self._passing = 0, False
        self._served: OrderedDict[int, int] = OrderedDict()  # by the hash: a name may be as long as a body

    def wake(self, client: str, wake: Callable[[], object], *, urgent: bool = False) -> None:
        """Call `wake` when it is the turn of `client`."""
        lines = self._urgent if urgent else self._others
        if line := lines.waiting.get(client):
            line.append(wake)
        else:
            lines.waiting[client] = deque((wake,))
            heappush(lines.order, (self._served.get(hash(client)) or self._next(), client))
        if not self._passing:
            self._passing = True
            asyncio.get_running_loop().call_soon(self._pass)

    def _next(self) -> int:
        self._turn += 1
        return self._turn

    def _pass(self) -> None:
        for turn in range(self.AT_ONCE):
            first, then = (self._urgent, self._others) if turn % 2 else (self._others, self._urgent)
            lines = first if first.order else then
            if not lines.order:
                break
            self._pop(lines)()
        self._passing = bool(self._urgent.order or self._others.order)
        if self._passing:
            asyncio.get_running_loop().call_soon(self._pass)

    def _pop(self, lines: _Lines) -> Callable[[], object]:
        client = heappop(lines.order)[1]
        line, now = lines.waiting[client], self._next()
        wake = line.popleft()
        if line:
            heappush(lines.order, (now, client))
        else:
            del lines.waiting[client]
        self._served[hash(client)] = now
        self._served.move_to_end(hash(client))
        if len(self._served) > self.CLIENTS:
            self._served.popitem(last=False)
        return wake
