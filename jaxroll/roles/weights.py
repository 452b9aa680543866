"""Weights that arrive for an engine: fetched off the JAX thread, placed and swapped in on it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxroll.clock import unix_s
from jaxroll.errors import InfraError, TransferError
from jaxroll.learner import lora
from jaxroll.learner.lora import Lora
from jaxroll.models import params
from jaxroll.models.families import ModelSpec
from jaxroll.records import Version, VersionRef
from jaxroll.rpc import auth
from jaxroll.serving.engine_thread import EngineHost
from jaxroll.sharding.layout import Layout
from jaxroll.store.client import BlockingStore, StoreClient
from jaxroll.transfer.channel_device import DevicePublisher, HandedOver
from jaxroll.transfer.publish import Publisher
from jaxroll.transfer.receive import NOTHING_HELD, Receiver, Staged

if TYPE_CHECKING:
    from jax.sharding import Mesh


Params = dict[str, jax.Array]
RETRY_FIRST_S, RETRY_MAX_S = 0.2, 2.0
FLIP_POLL_S = 0.005
STARVED_TRIES = 8  # about ten seconds


class FullParameters:
    """Parameters that are published as the model computes with them."""

    def __init__(self, receiver: Receiver, spec: ModelSpec, layout: Layout) -> None:
        self._receiver, self._shapes = receiver, params.served(spec)
        self._target = params.shardings(spec, layout.mesh, layout.rules)

    def fetch(self, snapshot: VersionRef) -> Staged | HandedOver:
        """All of them, on the host. TransferError and its kinds; any thread may call it."""
        return self._receiver.fetch(snapshot, self._target, self._shapes)

    def place(self, staged: Staged | HandedOver) -> Params:
        """On the mesh; call it on the JAX thread."""
        return staged.place()


class AdaptedParameters:
    """Adapters that are published with what they are put on: the latter is fetched once, and held on the host.

    They are merged as the learner merges them (float32), and rounded after it: to `dtype`, that of published
    parameters, then to the engine's own. So it is nothing to an engine whether it is sent these or the merged ones.
    """

    def __init__(self, receiver: Receiver, spec: ModelSpec, layout: Layout, adapters: Lora, dtype: str) -> None:
        target, shapes = params.shardings(spec, layout.mesh, layout.rules), params.served(spec)
        self._receiver, self._base, self._held = receiver, params.abstract(spec), NOTHING_HELD
        self._target = target | lora.shardings(spec, layout, adapters)
        self._shapes = self._base | lora.abstract(spec, adapters)

        def merged(base: Params, upon: Params) -> Params:
            made = lora.merged(spec, layout, adapters, base, upon)
            return {name: _rounded(value, dtype).astype(shapes[name].dtype) for name, value in made.items()}

        self._merged = jax.jit(merged, out_shardings=target)

    def fetch(self, snapshot: VersionRef) -> Staged | HandedOver:
        """The adapters, and what is new of the rest; see `Whole`."""
        staged = self._receiver.fetch(snapshot, self._target, self._shapes, self._held)
        self._held = staged.held(self._base)
        return staged

    def place(self, staged: Staged | HandedOver) -> Params:
        """The merged parameters on the mesh; call it on the JAX thread."""
        placed = staged.place()
        return self._merged({name: placed.pop(name) for name in self._base}, placed)


def _rounded(value: jax.Array, dtype: str) -> jax.Array:
    """float32 `value` as it comes back from `dtype`. A cast there and back the compiler might leave out."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(value, info.nexp, info.nmant)


class WeightFollower:
    """Brings published parameters into the engine: fetch off both threads, place and swap on the JAX thread.

    The first weights also compile the engine; `first` is set then. `version` is what the engine was handed last: every
    token of a request that is added from now on is drawn at it or at a later one. With `in_force_s` a version has come
    when the engine computes with it (a `drain` takes its time), or that time is over.
    """

    def __init__(
        self,
        host: EngineHost,
        arriving: FullParameters | AdaptedParameters,
        progress: Progress,
        in_force_s: float = 0.0,
    ) -> None:
        self._host, self._arriving, self._progress, self._in_force_s = host, arriving, progress, in_force_s
        self.first = asyncio.Event()
        self.version: Version | None = None
        self._flipped = asyncio.Event()

    async def bring(self, snapshot: VersionRef) -> None:
        """Fetch, verify, place and hand `snapshot` to the engine, which flips by its policy. TransferError if not."""
        t0 = unix_s()
        staged = await asyncio.to_thread(self._arriving.fetch, snapshot)
        t1, size_bytes = unix_s(), staged.fetched_bytes
        await asyncio.wrap_future(
            self._host.call(lambda: self._install(snapshot.version, self._arriving.place(staged)))
        )
        self.version = snapshot.version
        self.first.set()
        self._flipped.set()  # wakes all who wait now; who comes later waits for the next flip
        self._flipped = asyncio.Event()
        await self._in_force(snapshot.version)
        self._progress.span("fetch", t0, t1, version=str(snapshot.version), size_bytes=size_bytes)
        self._progress.span("flip", t1, unix_s(), version=str(snapshot.version))

    async def _in_force(self, version: Version) -> None:
        """Return when the engine computes with `version`, or after `in_force_s`: what it drains may take longer."""
        deadline_s = time.monotonic() + self._in_force_s
        while time.monotonic() < deadline_s and self._host.engine.stats().version != version:
            await asyncio.sleep(FLIP_POLL_S)

    async def other_than(self, known: Version | None, wait_s: float) -> Version | None:
        """The version, as soon as it is not `known` or `wait_s` is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.version == known:
                    await self._flipped.wait()
        return self.version

    async def follow(self, store: StoreClient, *, wait_s: float = 30.0) -> None:
        """Keep the engine at the newest published version, forever.

        A transfer that fails leaves the engine where it is (the store's age limit then stops its leases) and is tried
        again after a pause that doubles, or with whatever was published meanwhile. It is said once for each snapshot
        and kind of failure, and again when it is over: a learner that is down for an hour costs one line.

        Raises InfraError when this process has had no free descriptor at `STARVED_TRIES` attempts in a row.
        """
        failing: VersionRef | None = None
        failures, starved, said = 0, 0, ""
        while True:
            snapshot = await store.published(self.version, wait_s, in_turn=True)
            if snapshot is None:
                continue
            if snapshot != failing:
                failing, failures, said = snapshot, 0, ""
            try:
                await self.bring(snapshot)
            except TransferError as error:
                failures += 1
                starved = starved + 1 if _no_descriptor(error) else 0
                if starved == STARVED_TRIES:  # it may have leaked them: a new process has them all
                    raise InfraError(f"{error}. Raise the limit of descriptors (ulimit -n).") from error
                if said != (said := type(error).__name__):
                    self._progress(f"weights {snapshot.version}: {said}: {error}")
                await asyncio.sleep(min(RETRY_FIRST_S * 2 ** (failures - 1), RETRY_MAX_S))
                continue
            starved = 0
            if failures:
                self._progress(f"weights {snapshot.version}: here at attempt {failures + 1}")

    def _install(self, version: Version, params: dict[str, jax.Array]) -> None:
        engine = self._host.engine
        if self.version is None:
            self._progress.start("compiling the engine")
            engine.warmup(params)
            self._progress.end("compiling the engine")
        engine.swap(version, params)


def _no_descriptor(error: TransferError) -> bool:
    """True if this process's own limit of open files is the cause. Not every channel keeps the number of an error."""
    return os.strerror(errno.EMFILE) in str(error)


def weights_token(run_dir: Path) -> str:
    """What a process shows to be given parameters, made from the run's secret; empty in a run without one."""
    secret = auth.load(run_dir)
    return auth.bearer(secret, "sampler") if secret else ""


# --- What a finished step is to the others, said behind the learner's back: the weights, the acknowledgement, the row
#
# The next step is computed meanwhile. Each step is said in the order of the contract, and none before the one before
# it.

Row = dict[str, Any]


class BackgroundPublisher:
    """Publishes, acknowledges and reports one step at a time, on a thread of its own."""

    def __init__(self, store: BlockingStore, publisher: Publisher | DevicePublisher) -> None:
        self._store, self._publisher = store, publisher
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="teller")
        self._last: Future[None] | None = None

    def publish(self, trained: Version, row: Row, weights: Future[VersionRef] | None) -> None:
        """Say that the claim of `trained` was trained, which made `weights` (None: none are published).

        Returns when the step before has been said, and raises what went wrong with that one.
        """
        self.settle()
        self._last = self._worker.submit(self._publish, trained, row, weights)

    def check(self) -> None:
        """Raise what went wrong, if something did by now; without waiting."""
        if self._last is not None and self._last.done():
            self.settle()

    def settle(self) -> None:
        """Wait until everything is said. Raises what went wrong: JaxRollError of the store's or the transfer's."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """End the thread, after what it is at."""
        self._worker.shutdown(wait=True)

    def _publish(self, trained: Version, row: Row, weights: Future[VersionRef] | None) -> None:
        if weights is not None:
            made = Version(trained.lineage, trained.step + 1)
            self._store.publish(self._publisher.finish(made, weights))
            self._publisher.drop_older(made)
        self._store.ack(trained)
        said = unix_s()
        self._store.report([row | {"t": said, "publish_s": said - row["t1"]}])


# --- Saying what a role is doing, so that nothing is silent for long


class Progress:
    """Says what a role is doing: one line in its log and one row in the metrics, at the start and at the end."""

    def __init__(self, role: str, emit: Callable[[Row], None]) -> None:
        self._role, self._emit, self._started = role, emit, {}

    def start(self, what: str) -> None:
        """`what` begins, and may take long."""
        self._started[what] = time.monotonic()
        self._say({"kind": "compile", "what": what, "state": "start"}, f"{what} …")

    def end(self, what: str) -> None:
        """`what` is over."""
        seconds = time.monotonic() - self._started.pop(what, time.monotonic())
        self._say({"kind": "compile", "what": what, "state": "end", "seconds": seconds}, f"{what}: {seconds:.1f} s")

    def devices(self, mesh: Mesh, attention: Mapping[str, str]) -> None:
        """What this process runs on, as which mesh, and what computes attention there, by use."""
        from jaxroll.sharding import layout  # loads JAX, which must come after a sampler's scoring pool

        platform, kind = layout.platform(mesh), layout.device_kind(mesh)
        row = {"kind": "devices", "platform": platform, "devices": f"{mesh.size} x {kind}", "mesh": dict(mesh.shape)}
        chosen = ", ".join(f"{use} {name}" for use, name in attention.items())
        line = f"{mesh.size} x {kind} ({platform}) as {dict(mesh.shape)}; attention: {chosen}"
        self._say(row | {"attention": dict(attention)}, line)

    def span(self, what: str, t0: float, t1: float, **more: Any) -> None:
        """`what` took from `t0` to `t1` (unix seconds); only the metrics hear of it."""
        self._emit({"t": t1, "role": self._role, "kind": "span", "what": what, "t0": t0, "t1": t1, **more})

    def __call__(self, text: str) -> None:
        """An event worth a line."""
        self._say({"kind": "event", "text": text}, text)

    def _say(self, row: Row, line: str) -> None:
        print(f"{self._role}: {line}", flush=True)
        self._emit({"t": unix_s(), "role": self._role, **row})
