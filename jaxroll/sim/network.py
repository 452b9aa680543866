"""Event loop on a virtual clock, and a network in memory between its clients and servers.

Real: the server's dispatch of a call (caller, intake, throttle) and the client's retries. Replaced: gRPC.
"""

from __future__ import annotations

import asyncio
import math
import queue
import selectors
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar

import grpc
import grpc.aio

from jaxroll.envs.threads import Threads
from jaxroll.errors import Closed, DataError, InfraError
from jaxroll.loop_thread import LoopThread
from jaxroll.policy.routing import LEARNER
from jaxroll.rewards.processes import Scored
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.rpc import server as rpc_server
from jaxroll.rpc.client import Metadata
from jaxroll.rpc.intake import Intake, RefusalThrottle
from jaxroll.rpc.protocol import PIECE_BYTES
from jaxroll.sim.costs import TransferCosts

# --- Event loop on a virtual clock: when no task is ready, the clock jumps to the next timer
#
# Code under test must take its time from the loop: `loop.time()`, `asyncio.sleep`, `asyncio.timeout`. Threads work only
# through `outside`, because the clock could jump while another one works. Work for an executor of its own is done in
# place and takes no time. Work for the default executor, where code waits for the outside world, is refused.

T = TypeVar("T")
LIMIT_S = 7 * 86400.0
OUTSIDE_S = 900.0  # of the real clock, for work of other threads


class Stuck(AssertionError):
    """Every task waits, and no timer is set: real code would hang forever."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: where a real selector would, it advances the clock."""

    now_s = 0.0

    def __init__(self, arrive: Callable[[], bool]) -> None:
        super().__init__()
        self._arrive = arrive

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See BaseSelector."""
        events = super().select(0)
        if events or timeout == 0 or self._arrive():
            return events
        if timeout is None:
            raise Stuck("all tasks wait for something that no timer and no other task will do")
        self.now_s += max(timeout, 0.0)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that starts at 0 s and never sleeps."""

    def __init__(self) -> None:
        self._outside: list[tuple[Future[Any], asyncio.Future[Any]]] = []
        self._jumping = _JumpingSelector(self._arrive)
        super().__init__(self._jumping)

    def outside(self, work: Future[T]) -> asyncio.Future[T]:
        """The result of `work`, which another thread does. It takes no virtual time.

        When nothing else is left to do at this time, the loop waits for all such work, and delivers the results in the
        order of these calls: they depend neither on the number of threads nor on their speed.
        """
        done = self.create_future()
        self._outside.append((work, done))
        return done

    def _arrive(self) -> bool:
        """Wait for the work of other threads; False if there was none. InfraError after `OUTSIDE_S`."""
        waiting, self._outside = self._outside, []
        for work, done in waiting:
            try:
                error = work.exception(OUTSIDE_S)
            except TimeoutError:
                raise InfraError(f"an environment or scorer did not answer within {OUTSIDE_S:g} s") from None
            if done.done():
                continue
            if error is None:
                done.set_result(work.result())
            else:
                done.set_exception(error)
        return bool(waiting)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._jumping.now_s))  # or a timer of this time is never due
        return self._jumping.now_s

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """Call `callback` when the clock shows `when`, and not the little earlier that asyncio's loop allows.

        Otherwise code that waits for the rest of a period, of 1e-15 s at last, would wait for it without end.
        """

        def due() -> None:
            self._jumping.now_s = max(self._jumping.now_s, when)
            callback(*args)

        return super().call_at(when, due, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """A future that is done: `func` runs at once. AssertionError for the default executor: see the module."""
        if executor is None:
            raise AssertionError(f"{func} on a thread, under a virtual clock")
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - as with an executor, the future raises it
            done.set_exception(error)
        return done


class InPlaceLoop(VirtualTimeLoop):
    """A virtual clock under which work for the default executor is done in place, too."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """See VirtualTimeLoop."""
        return super().run_in_executor(executor or self, func, *args)


class OrderedThreads(Threads):
    """`count` threads for the blocking calls of environments, whose results arrive in the order of the calls.

    They have no time limits: a call takes no virtual time.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._work_left: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._serve, name="environment", daemon=True).start()

    async def call(self, job: Callable[[], T], limit_s: float, what: str) -> T:
        """Run `job` on a thread; return its result or raise its exception."""
        loop, work = asyncio.get_running_loop(), Future[T]()
        assert isinstance(loop, VirtualTimeLoop)
        self._work_left.put((job, work))
        return await loop.outside(work)

    def _serve(self) -> None:
        while True:
            job, work = self._work_left.get()
            try:
                work.set_result(job())
            except BaseException as error:  # noqa: BLE001 - user code, and the thread must survive it
                is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                words = f"the environment raised {type(error).__name__}: {error}"
                work.set_exception(error if is_plain else DataError(words))


class OrderedPool(ScoringPool):
    """A scoring pool on a thread of its own; scores arrive in the order of the calls and take no virtual time."""

    _thread: LoopThread | None = None

    async def _scored(self, env_args: str, answer: str, grading: str) -> Scored:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self._thread = self._thread or LoopThread("scoring", math.inf)
        job = super()._scored(env_args, answer, grading)
        return await loop.outside(asyncio.run_coroutine_threadsafe(job, self._thread.loop))

    def close(self) -> None:
        """See ScoringPool."""
        if self._thread is not None:
            self._thread.close()
        super().close()


class LoopClock:
    """The running loop's clock, as the store takes it."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()


def run(
    job: Coroutine[Any, Any, T], limit_s: float = LIMIT_S, loop: Callable[[], VirtualTimeLoop] = VirtualTimeLoop
) -> T:
    """The result of `job` under a virtual clock. Stuck if it can never end, TimeoutError after `limit_s` virtual s."""

    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await job

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(bounded())


# --- Event loop on a virtual clock, and a network in memory between its clients and servers

LATENCY_S = 0.001
REQUESTS, REPLIES = "requests", "replies"


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class Network:
    """Links between named clients and a server. A cut link holds messages back until it is healed, as TCP does."""

    def __init__(self, latency_s: float = LATENCY_S, bytes_per_s: float = math.inf) -> None:
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._cuts: set[tuple[str, str]] = set()
        self._healed = asyncio.Event()
        self.delivered: Counter[tuple[str, str]] = Counter()  # (client, method) → requests that reached the server

    def cut(self, name: str, *directions: str) -> None:
        """Cut the link of `name` in these directions; without any, in both."""
        self._cuts |= {(name, direction) for direction in directions or (REQUESTS, REPLIES)}

    def heal(self, name: str) -> None:
        """Deliver what the link of `name` holds back."""
        self._cuts -= {(name, REQUESTS), (name, REPLIES)}
        self._healed.set()
        self._healed = asyncio.Event()

    def is_cut(self, name: str, direction: str) -> bool:
        return (name, direction) in self._cuts

    async def cross(self, name: str, direction: str, size_bytes: int = 0) -> None:
        """Return when a message of this size has crossed the link."""
        await asyncio.sleep(self._latency_s + size_bytes / self._bytes_per_s)
        while self.is_cut(name, direction):
            await self._healed.wait()


class _Aborted(Exception):
    """A handler ended its call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        super().__init__(details)


class _Context:
    """As much of a gRPC servicer context as the server uses."""

    def __init__(self, peer: str, body: bytes, deadline_s: float) -> None:
        self._peer, self._left, self._deadline_s = peer, memoryview(body), deadline_s

    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float:
        return self._deadline_s - asyncio.get_running_loop().time()

    async def read(self) -> bytes:
        piece, self._left = bytes(self._left[:PIECE_BYTES]), self._left[PIECE_BYTES:]
        return piece

    async def send_initial_metadata(self, metadata: Metadata) -> None: ...

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise _Aborted(code, details)


class MemoryServer:
    """The calls of one service. `methods` None: it is down, and calls fail at once."""

    def __init__(self) -> None:
        self._dispatcher: rpc_server._Dispatcher | None = None
        self._calls: set[asyncio.Task[bytes]] = set()

    def start(self, service: str, methods: Mapping[str, rpc_server.Method], position: Callable[[], int]) -> None:
        paths = {f"/{service}/{name}": method for name, method in methods.items()}
        self._dispatcher = rpc_server._Dispatcher(paths, None, RefusalThrottle(), Intake(2**20), position)

    def stop(self) -> None:
        """Go down: calls under way break off."""
        self._dispatcher = None
        for call in self._calls:
            call.cancel()

    def accept(self, name: str, path: str, body: bytes, metadata: Metadata, deadline_s: float) -> asyncio.Task[bytes]:
        """The call under way. AioRpcError when the server is down."""
        if self._dispatcher is None:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "the server is down")
        details: Any = SimpleNamespace(method=path, invocation_metadata=metadata)
        handler: Any = self._dispatcher.service(details)
        assert handler is not None, f"no method {path}"

        async def handle() -> bytes:
            async with asyncio.timeout_at(deadline_s):
                return await handler.stream_unary(None, _Context(name, body, deadline_s))

        call = asyncio.ensure_future(handle())
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call


class MemoryTransport:
    """The `Transport` of the client `name` to `server`."""

    def __init__(self, network: Network, server: MemoryServer, name: str) -> None:
        self._network, self._server, self._name, self.target = network, server, name, "memory"
        self.is_killed = False  # True: nothing that its process still does reaches the server

    async def attempt(
        self, path: str, body: bytes, metadata: Metadata, deadline_s: float, *, asks_first: bool
    ) -> bytes:
        if self.is_killed:
            raise Closed("this process was killed")
        until_s = asyncio.get_running_loop().time() + deadline_s
        limit = asyncio.timeout_at(until_s)
        try:
            async with limit:
                return await self._call(path, body, metadata, until_s)
        except TimeoutError as error:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline") from error

    async def _call(self, path: str, body: bytes, metadata: Metadata, until_s: float) -> bytes:
        await self._network.cross(self._name, REQUESTS, len(body))
        self._network.delivered[self._name, path.rpartition("/")[2]] += 1
        call = self._server.accept(self._name, path, body, metadata, until_s)
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            if not self._network.is_cut(self._name, REQUESTS):
                call.cancel()  # the cancellation reaches the server
            raise
        if call.cancelled():
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "the server went down")
        answered = call.exception() is None
        await self._network.cross(self._name, REPLIES, len(call.result()) if answered else 0)
        if isinstance(error := call.exception(), _Aborted):
            raise rpc_error(error.code, error.details)
        return call.result()

    async def diagnosis(self) -> None:
        return None

    def refresh(self) -> None: ...

    async def close(self) -> None: ...


# --- Weights on their way: bandwidths of senders and receivers


BEGIN_S = 5.0  # for which a receiver waits for a relay that has not begun to receive


class _Transfer:
    """A version on its way to one receiver: its sources, the one in use first, and the bytes that have arrived."""

    def __init__(self, version: Any, sources: list[str]) -> None:
        self.version, self.sources, self.arrived, self.rate = version, sources, 0.0, 0.0
        self.until_s = asyncio.get_running_loop().time() + BEGIN_S
        self.by_source = dict[str, float]()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Links:
    """The links between learner and samplers, on which weights travel.

    A sender divides its bandwidth equally among its receivers, a receiver takes at most its own. A relay passes on what
    it has, while it receives the rest. If it is lost, its receivers go on with their next source.
    """

    def __init__(self, costs: TransferCosts) -> None:
        self._costs, self._since_s = costs, 0.0
        self._moving: dict[str, _Transfer] = {}  # by receiver
        self._held: dict[str, Any] = {}  # the last version that a receiver has taken
        self._timer: asyncio.TimerHandle | None = None
        self.sent = dict[str, float]()  # bytes by sender

    async def fetch(self, receiver: str, version: Any, relays: list[str]) -> Any:
        """Return when `receiver` has `version`, with the bytes of each source. The learner comes after the relays."""
        costs, start_s = self._costs, asyncio.get_running_loop().time()
        if math.isinf(costs.sender_bytes_per_s) or not costs.size_bytes:  # nothing is shared
            await asyncio.sleep(costs.fetch_s)
            arrived = {LEARNER: costs.size_bytes}
            self.sent[LEARNER] = self.sent.get(LEARNER, 0.0) + costs.size_bytes
        else:
            await asyncio.sleep(costs.latency_s)
            arrived = await self._shared(receiver, version, [*relays, LEARNER])
        seconds = asyncio.get_running_loop().time() - start_s
        sources = [
            SimpleNamespace(source=source, size_bytes=round(count), seconds=seconds, error="")
            for source, count in arrived.items()
        ]
        return SimpleNamespace(fetched_bytes=sum(one.size_bytes for one in sources), sources=sources)

    async def _shared(self, receiver: str, version: Any, sources: list[str]) -> dict[str, float]:
        self._advance()
        self._moving[receiver] = transfer = _Transfer(version, sources)
        self._plan()
        try:
            await transfer.done
        except asyncio.CancelledError:
            self._advance()
            if self._moving.get(receiver) is transfer:
                del self._moving[receiver]
            self._plan()
            raise
        return transfer.by_source

    def lose(self, name: str) -> None:
        """Note that a receiver is gone, and with it what it passes on."""
        self._advance()
        self._moving.pop(name, None)
        self._held.pop(name, None)
        for transfer in self._moving.values():
            if name != LEARNER and name in transfer.sources:  # what the learner has published can be fetched after it
                if name == transfer.sources[0]:
                    transfer.until_s = asyncio.get_running_loop().time() + BEGIN_S
                transfer.sources.remove(name)
        self._plan()

    def _advance(self) -> None:
        """Move the bytes of the time since the last look."""
        now_s = asyncio.get_running_loop().time()
        for transfer in self._moving.values():
            count = min(transfer.rate * (now_s - self._since_s), self._costs.size_bytes - transfer.arrived)
            transfer.arrived += count
            for of in (transfer.by_source, self.sent) if count else ():
                of[transfer.sources[0]] = of.get(transfer.sources[0], 0.0) + count
        self._since_s = now_s

    def _plan(self) -> None:
        """Set the rates until the next change, and wake then."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        for name, transfer in list(self._moving.items()):
            # A rest that takes less than the clock can show would be waited for without end.
            left_s = (self._costs.size_bytes - transfer.arrived) / min(
                self._costs.bytes_per_s, self._costs.sender_bytes_per_s
            )
            if left_s <= max(2 * math.ulp(loop.time()), 1e-9 * self._costs.fetch_s):
                del self._moving[name]
                self._held[name] = transfer.version
                if not transfer.done.done():
                    transfer.done.set_result(None)
            elif not self._has_begun(transfer) and loop.time() >= transfer.until_s:
                del transfer.sources[0]
                transfer.until_s = loop.time() + BEGIN_S
        moving = list(self._moving.values())
        fed = Counter(transfer.sources[0] for transfer in moving if self._has_begun(transfer))
        for one in moving:
            share = self._costs.sender_bytes_per_s / max(1, fed[one.sources[0]])
            one.rate = min(share, self._costs.bytes_per_s) if self._has_begun(one) else 0.0
        for _ in moving:  # a rate passes down the tree by a receiver each time
            for one in moving:
                if (above := self._above(one)) is not None and one.arrived >= above.arrived * (1 - 1e-9):
                    one.rate = min(one.rate, above.rate)
        next_s = min((self._changes_s(one, loop.time()) for one in moving), default=math.inf)
        self._timer = loop.call_later(next_s, self._wake) if next_s < math.inf else None

    def _changes_s(self, one: _Transfer, now_s: float) -> float:
        """Seconds until it is complete, or has all that its source has; of one that waits, until it waits no more."""
        least_s = 2 * math.ulp(now_s)
        if not one.rate:
            return math.inf if self._has_begun(one) else max(0.0, one.until_s - now_s)
        left_s, above = (self._costs.size_bytes - one.arrived) / one.rate, self._above(one)
        if above is None or one.rate <= above.rate or one.arrived >= above.arrived * (1 - 1e-9):
            return max(least_s, left_s)
        return max(least_s, min(left_s, (above.arrived - one.arrived) / (one.rate - above.rate)))

    def _has_begun(self, one: _Transfer) -> bool:
        """True if its source is the learner, or has the version or receives it, which the store's tree orders."""
        source = one.sources[0]
        return source == LEARNER or self._held.get(source) == one.version or self._above(one) is not None

    def _above(self, transfer: _Transfer) -> _Transfer | None:
        """The transfer to the source, if that is still receiving this version."""
        above = self._moving.get(transfer.sources[0])
        return above if above is not None and above.version == transfer.version else None

    def _wake(self) -> None:
        self._advance()
        self._plan()
