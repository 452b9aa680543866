"""Weight sync of an engine, publishing of a learner, progress messages and profiles.

Weights are fetched on a worker thread, then placed and swapped in on the JAX thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from jaxroll.clock import unix_s
from jaxroll.config import Config, TransferConfig
from jaxroll.errors import InfraError, TransferError
from jaxroll.records import Relay, Version, VersionRef
from jaxroll.rpc import protocol
from jaxroll.store.client import StoreClient
from jaxroll.store.messages import ProfileOrder, RelayState

if TYPE_CHECKING:  # these load JAX, which the loops of this module do not need
    from jax.sharding import Mesh

    from jaxroll.learner.state import Params
    from jaxroll.serving.engine_thread import EngineHost, EngineProxy
    from jaxroll.transfer.channel_device import DevicePublisher, HandedOver
    from jaxroll.transfer.channel_tcp import TcpSender
    from jaxroll.transfer.ends import Fetched, Publisher, Staged

RETRY_FIRST_S, RETRY_MAX_S = 0.2, 2.0
SWAP_POLL_S = 0.005
UPDATE_POLL_S = 0.05
STARVED_TRIES = 8  # about ten seconds


class WeightFetcher(Protocol):
    """Published weights on their way into an engine."""

    async def fetch(self, ref: VersionRef, *relays: Relay) -> Staged | HandedOver:
        """The parameters on the host, from the relays as far as possible. Raises TransferError and its kinds."""
        ...

    def place(self, staged: Staged | HandedOver) -> Params:
        """The parameters on the mesh; call it on the JAX thread."""
        ...


class SwapGate:
    """Members play while the weights stay, and weights change while no member plays (`schedule.weight_swap`).

    A change that waits goes first: members that come later begin after it. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._playing, self._changes = 0, 0
        self._is_changing = False
        self._moved = asyncio.Event()

    @contextlib.asynccontextmanager
    async def member(self, *, joins: bool = False) -> AsyncIterator[None]:
        """A member that plays from here to the end of the block; `joins`: a change that waits begins after it."""
        while self._is_changing if joins else self._changes:
            await self._moved.wait()
        self._playing += 1
        try:
            yield
        finally:
            self._playing -= 1
            self._wake()

    @contextlib.asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """A change of weights in this block, which begins when no member plays."""
        self._changes += 1
        self._wake()
        try:
            while self._playing or self._is_changing:
                await self._moved.wait()
            self._is_changing = True
            try:
                yield
            finally:
                self._is_changing = False
        finally:
            self._changes -= 1
            self._wake()

    async def drains(self) -> None:
        """Wait until a change waits for members that play."""
        while not (self._changes and self._playing):
            await self._moved.wait()

    def _wake(self) -> None:
        self._moved.set()  # wakes all current waiters; later ones wait for the next move
        self._moved = asyncio.Event()


@contextlib.asynccontextmanager
async def suspended(proxy: EngineProxy) -> AsyncIterator[None]:
    """Suspend the engine in this block, unless it is paused already; its requests keep their slots."""
    if proxy.paused is not None:
        yield
        return
    await proxy.pause("keep")
    try:
        yield
    finally:
        proxy.resume()


class WeightFollower:
    """Loads published parameters into the engine: fetches on a worker thread, places and swaps on the JAX thread.

    The first weights also compile the engine; `first` is set then. `version` is the version handed to the engine last:
    every token of a request that is added from now on is sampled at it or at a later one. With `in_force_s` a load ends
    when the engine computes with the new version (a `drain` takes a while), or after that time. `relay` is set where
    relays are used; it has the address of `listener` if this process is one. Fetched weights wait at `gate`, if members
    register there. `during_load` is a context that is entered for each load.
    """

    def __init__(
        self,
        host: EngineHost,
        arriving: WeightFetcher,
        progress: RoleLog,
        in_force_s: float = 0.0,
        relay: RelayState | None = None,
        listener: TcpSender | None = None,
    ) -> None:
        self._host, self._arriving, self._progress, self._in_force_s = host, arriving, progress, in_force_s
        self.first = asyncio.Event()
        self.version: Version | None = None
        self.serves_on = ""  # the address at which this sampler serves actors, which the store tells them
        self._changed = asyncio.Event()
        self.relay, self._listener, self.gate = relay, listener, SwapGate()
        self.during_load: Callable[[], contextlib.AbstractAsyncContextManager[None]] = contextlib.nullcontext

    def counts(self) -> dict[str, int]:
        """Bytes of weights that this process has sent to others since the start, if it is a relay."""
        return {} if self._listener is None else {"relay_sent_bytes": self._listener.sent_bytes}

    async def load(self, ref: VersionRef, relays: Sequence[Relay] = ()) -> None:
        """Fetch, verify and place weights; the engine swaps them in by its policy. Raises TransferError."""
        async with self.during_load():
            await self._load(ref, relays)

    async def _load(self, ref: VersionRef, relays: Sequence[Relay]) -> None:
        t0 = unix_s()
        staged = await self._arriving.fetch(ref, *relays)
        t1, size_bytes = unix_s(), staged.fetched_bytes
        sources = {} if self.relay is None else self._note(self.relay, ref.version, staged.sources)
        async with self.gate.change():
            try:
                await asyncio.wrap_future(self._host.call(lambda: self._install(ref.version, staged)))
            except TransferError:
                self.version = self._host.engine.version  # the version that waited is gone
                raise
            self.version = ref.version
        self.first.set()
        self._changed.set()  # wakes all current waiters; later ones wait for the next change
        self._changed = asyncio.Event()
        await self._await_swap(ref.version)
        self._progress.span("fetch", t0, t1, version=str(ref.version), size_bytes=size_bytes, **sources)
        self._progress.span("weight_swap", t1, unix_s(), version=str(ref.version))

    def _note(self, relay: RelayState, version: Version, sources: Sequence[Fetched]) -> Row:
        """Report relays that failed, in the log and at the next call of the store; a row's field: bytes by source."""
        for one in sources:
            if one.error:
                self._progress(
                    f"weights {version}: relay {one.source} failed after {one.size_bytes} bytes: {one.error}"
                )
        source, rate = "", 0.0
        if sources:
            most = max(sources, key=lambda one: one.size_bytes)
            source, rate = most.source, most.size_bytes / max(most.seconds, 1e-9)
        failed = tuple(one.source for one in sources if one.error)
        self.relay = msgspec.structs.replace(relay, source=source, bytes_per_s=rate, failed=failed)
        return {"sources": {one.source: one.size_bytes for one in sources}}

    async def _await_swap(self, version: Version) -> None:
        """Return when the engine computes with `version`, or after `in_force_s`: draining may take longer."""
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + self._in_force_s
        while now_s() < deadline_s and self._host.engine.stats().version != version:
            await asyncio.sleep(SWAP_POLL_S)

    async def other_than(self, known: Version | None, wait_s: float) -> Version | None:
        """The version, as soon as it differs from `known` or after `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.version == known:
                    await self._changed.wait()
        return self.version

    async def follow(self, store: StoreClient, *, wait_s: float = 30.0) -> None:
        """Keep the engine at the newest published version, forever.

        A failed transfer leaves the engine at its version (the store's limit on age then stops its leases). It is
        repeated after a pause that doubles, with the newest published version. Each kind of failure is reported once
        per version, and its end: a learner that is down for an hour costs one line.

        Raises InfraError if this process had no free file descriptor in `STARVED_TRIES` attempts in a row.
        """
        failing: VersionRef | None = None
        failures, starved, reported = 0, 0, ""
        while True:
            reply = await store.announced(
                self.version, wait_s, in_turn=True, serves_on=self.serves_on, relay=self.relay
            )
            ref = reply.ref
            if ref is None:
                continue
            if ref != failing:
                failing, failures, reported = ref, 0, ""
            try:
                await self.load(ref, reply.relays)
            except TransferError as error:
                failures += 1
                starved = starved + 1 if _no_descriptor(error) else 0
                if starved == STARVED_TRIES:  # this process may have leaked them; a new one has none open
                    raise InfraError(f"{error}. Raise the limit of open files (ulimit -n).") from error
                if reported != (reported := type(error).__name__):
                    self._progress(f"weights {ref.version}: {reported}: {error}")
                await asyncio.sleep(min(RETRY_FIRST_S * 2 ** (failures - 1), RETRY_MAX_S))
                continue
            starved = 0
            if failures:
                self._progress(f"weights {ref.version}: fetched at attempt {failures + 1}")

    def _install(self, version: Version, staged: Staged | HandedOver) -> None:
        engine = self._host.engine
        engine.drop_waiting_swap()  # superseded; its memory is free before more is taken
        params = self._arriving.place(staged)
        if self.version is None:
            self._progress.start("compiling the engine")
            engine.warmup(params)
            self._progress.end("compiling the engine")
        engine.swap(version, params)


def _no_descriptor(error: TransferError) -> bool:
    """True if this process's limit of open files is the cause, by the text: not every channel keeps the errno."""
    return os.strerror(errno.EMFILE) in str(error)


def weights_token(run_dir: Path) -> str:
    """The token that a weight transfer requires, derived from the run's secret; empty in a run without one."""
    secret = protocol.load(run_dir)
    return protocol.bearer(secret, "sampler") if secret else ""


def transfer_config(config: Config) -> TransferConfig:
    """The config of weight transfers: adapters and their base travel in float32 and are rounded after merging."""
    if config.learner.lora_publish == "merged":
        return config.transfer
    return dataclasses.replace(config.transfer, dtype="float32")


# --- Background publisher: publishes, acknowledges and reports a finished step while the next one is computed

Row = dict[str, Any]
OnThread = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs a blocking job elsewhere; its result


class BackgroundPublisher:
    """Publishes, acknowledges and reports finished steps, one at a time and in order, in a task of its own.

    `on_thread` runs a call that blocks until weights can be fetched.
    """

    def __init__(self, store: StoreClient, publisher: Publisher | DevicePublisher, on_thread: OnThread) -> None:
        self._store, self._publisher, self._on_thread = store, publisher, on_thread
        self._last: asyncio.Future[None] | None = None

    async def publish(self, trained: Version, row: Row, weights: Future[VersionRef] | None) -> None:
        """Report the claim of `trained` as trained, which made `weights` (None: none are published), in the background.

        Waits for the step before, and raises its error.
        """
        await self.settle()
        self._last = asyncio.ensure_future(self._publish(trained, row, weights))

    def check(self) -> None:
        """Raise the error of the last step if it has failed by now; does not wait."""
        if self._last is not None and self._last.done():
            last, self._last = self._last, None
            last.result()

    async def settle(self) -> None:
        """Wait until the last step is reported, and raise its error: a JaxRollError of the store or the transfer."""
        last, self._last = self._last, None
        if last is not None:
            await last

    async def close(self) -> None:
        """Wait for the current step; its error is not raised."""
        if self._last is not None:
            await asyncio.gather(self._last, return_exceptions=True)

    async def _publish(self, trained: Version, row: Row, weights: Future[VersionRef] | None) -> None:
        if weights is not None:
            made = Version(trained.lineage, trained.step + 1)
            await self._store.publish(await self._on_thread(lambda: self._publisher.finish(made, weights)))
            self._publisher.drop_older(made)
        await self._store.ack(trained)
        t, sent_bytes = unix_s(), self._publisher.sent_bytes
        await self._store.report([row | {"t": t, "publish_s": t - row["t1"], "weights_sent_bytes": sent_bytes}])


class UpdateBarrier:
    """Makes the learner wait until the samplers use a version, with `schedule.mode=async_controller` only.

    A sampler that does not within `limit_s` is not waited for again while it reports the same version.
    """

    def __init__(self, background: BackgroundPublisher, store: StoreClient, mode: str, limit_s: float) -> None:
        self.is_used, self._limit_s = mode == "async_controller", limit_s
        self._background, self._store = background, store
        self._late: dict[str, str] = {}  # sampler → the version that it had after a wait

    async def wait(self, version: Version) -> None:
        """Return when `version` is published and every sampler with weights uses it."""
        if not self.is_used:
            return
        await self._background.settle()
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + self._limit_s
        while True:
            held = (await self._store.status())["holders"]
            done = {str(version), str(None)}  # one without weights has no requests either
            behind = {who: at for who, at in held.items() if who.startswith("sampler-") and at not in done}
            if now_s() >= deadline_s:
                self._late = behind
            if all(self._late.get(who) == at for who, at in behind.items()):
                return
            await asyncio.sleep(UPDATE_POLL_S)


class RoleLog:
    """Reports the phases of a role: one line in its log and one metric row, at the start and at the end."""

    def __init__(self, role: str, emit: Callable[[Row], None]) -> None:
        self._role, self._emit, self._started = role, emit, {}

    def start(self, what: str) -> None:
        """Report that the phase `what` begins, which may take long."""
        self._started[what] = unix_s()
        self._report({"kind": "compile", "what": what, "state": "start"}, f"{what} …")

    def end(self, what: str) -> None:
        """Report that the phase `what` has ended."""
        seconds = (now_s := unix_s()) - self._started.pop(what, now_s)
        self._report({"kind": "compile", "what": what, "state": "end", "seconds": seconds}, f"{what}: {seconds:.1f} s")

    def devices(self, mesh: Mesh, attention: Mapping[str, str]) -> None:
        """Report the devices of this process, their mesh, and the attention implementation of each use."""
        platform, kind = mesh.devices.flat[0].platform, mesh.devices.flat[0].device_kind
        row = {"kind": "devices", "host": socket.gethostname(), "platform": platform, "mesh": dict(mesh.shape)}
        chosen = ", ".join(f"{use} {name}" for use, name in attention.items())
        line = f"{mesh.size} x {kind} ({platform}) as {dict(mesh.shape)}; attention: {chosen}"
        self._report(row | {"devices": f"{mesh.size} x {kind}", "attention": dict(attention)}, line)

    def span(self, what: str, t0: float, t1: float, **more: Any) -> None:
        """Report that `what` took from `t0` to `t1` (unix seconds), in the metrics only."""
        self._emit({"t": t1, "role": self._role, "kind": "span", "what": what, "t0": t0, "t1": t1, **more})

    def __call__(self, text: str) -> None:
        """Report an event."""
        self._report({"kind": "event", "text": text}, text)

    def _report(self, row: Row, line: str) -> None:
        print(f"{self._role}: {line}", flush=True)
        self._emit({"t": unix_s(), "role": self._role, **row})


# --- Profiles of a role: `jaxroll profile`

FREE_MB = 1024  # on the disk, below which no profile begins
_unwritten: list[Path] = []  # the trace that JAX could not write, in this process: before it does, it begins no other


class Profiler:
    """Records a trace of the next steps of this process when the store asks for one, and reports it as a row.

    Threads: any thread calls `ask`; one thread calls `step` before each step of its role. A trace that waits too long
    for its last step ends on a timer's thread. JAX records one trace of a process at a time, with all its threads.
    `order` is the one that is wanted or recorded, None without one.
    """

    def __init__(self, role: str, folder: Path, emit: Callable[[Row], None]) -> None:
        self._role, self._folder, self._emit = role, folder, emit
        self._lock = threading.Lock()
        self.order: ProfileOrder | None = None
        self._known, self._left, self._until_s = "", 0, 0.0
        self._began_s: float | None = None  # of the trace that is being recorded
        self._trace, self._timer = Path(), threading.Timer(0.0, lambda: None)

    def ask(self, order: ProfileOrder) -> None:
        """Record `order.steps` steps from the next one on, unless the order is known; end one that is withdrawn."""
        # A loop that waited would renew no leases. While a trace begins or is written, the store gives the order again.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if order.withdrawn and (self.order is None or self.order.request != order.request):
                return
            if order.withdrawn and self._began_s is None:
                self.order = None
            elif order.withdrawn:  # writing a trace takes long, and this may be the thread of a loop
                threading.Thread(target=self.close, args=(order.request,), daemon=True).start()
            elif order.request != self._known and self._began_s is None:
                self._known, self.order, self._left = order.request, order, order.steps
                self._until_s = time.monotonic() + order.limit_s
        finally:
            self._lock.release()

    def step(self) -> None:
        """Note that a step begins; call it on the thread that uses JAX."""
        if self.order is None:
            return
        with self._lock:
            if (order := self.order) is None:
                return
            if self._began_s is None:
                return self._begin(order)
            self._left -= 1
            if self._left <= 0:
                self._end(order)

    def close(self, request: str = "") -> None:
        """End the trace that is being recorded; with `request` no other one, which may have begun meanwhile."""
        with self._lock:
            if self.order is not None and request in ("", self.order.request):
                if self._began_s is not None:
                    self._end(self.order)
                self.order = None

    def _begin(self, order: ProfileOrder) -> None:
        import jax

        if (left_s := self._until_s - time.monotonic()) <= 0.0:
            self.order = None
            return
        self._trace = self._folder / f"{self._role}-{time.strftime('%Y%m%d-%H%M%S')}-{order.request[:8]}"
        try:
            self._trace.mkdir(parents=True)
            if (free_mb := shutil.disk_usage(self._trace).free >> 20) < FREE_MB:
                raise InfraError(f"{free_mb} MB are free at {self._folder}, a profile needs {FREE_MB} MB: make room")
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = int(order.python)
            if _unwritten:
                with contextlib.suppress(RuntimeError):  # newer versions of JAX keep none
                    jax.profiler.stop_trace()
            jax.profiler.start_trace(self._trace, profiler_options=options)
            while _unwritten:
                shutil.rmtree(_unwritten.pop(), ignore_errors=True)
        except Exception as error:  # noqa: BLE001 - the role goes on without a profile
            self._refuse(order, error)
            return
        self._began_s = time.monotonic()
        self._timer = threading.Timer(left_s, self.close, (order.request,))
        self._timer.daemon = True
        self._timer.start()
        self._row(order, "started", steps=order.steps)

    def _end(self, order: ProfileOrder) -> None:
        import jax

        assert self._began_s is not None, "a trace is being recorded"
        seconds, done = time.monotonic() - self._began_s, order.steps - self._left
        self._timer.cancel()
        self.order = self._began_s = None
        try:
            jax.profiler.stop_trace()
        except Exception as error:  # noqa: BLE001 - the role goes on
            self._refuse(order, error)
            _unwritten.append(self._trace)
            return
        self._row(order, "ended", steps=done, seconds=seconds)

    def _refuse(self, order: ProfileOrder, error: Exception) -> None:
        self.order = None
        shutil.rmtree(self._trace, ignore_errors=True)
        self._row(order, "failed", steps=0, reason=str(error)[:500])

    def _row(self, order: ProfileOrder, state: str, **more: Any) -> None:
        print(f"{self._role}: profile {state} {more.get('reason', self._trace)}", flush=True)
        row = {"kind": "profile", "request": order.request, "state": state, "folder": str(self._trace.absolute())}
        self._emit({"t": unix_s(), "role": self._role, "host": socket.gethostname(), **row, **more})
