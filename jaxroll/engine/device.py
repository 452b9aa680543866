"""The device's side of an engine: its state, and the three things that can be done to it.

Every call dispatches one program and returns at once, except `decode`, which waits for the report: the only transfer
from device to host, one array a dispatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxroll.engine import packets, programs
from jaxroll.engine.packets import Sizes
from jaxroll.engine.requests import Request
from jaxroll.errors import TransferError
from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.models.params import Params
from jaxroll.protocols import Progress
from jaxroll.sharding.rules import Rules

_NEVER = np.iinfo(np.int32).max


class Device:
    """Slots, a cache and compiled programs on one mesh. Construction allocates, `warmup` compiles."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, rules: Rules, sizes: Sizes, *, seed: int, refill: int) -> None:
        self._name, self._sizes = spec.name, sizes
        self._shapes = {name: leaf.shape for name, leaf in model_params.abstract(spec).items()}
        self._programs = programs.build(spec, mesh, rules, sizes)
        self._state = self._programs.empty()
        place = lambda value: jax.device_put(value, self._programs.replicated)  # noqa: E731
        self._seed = place(jax.random.key(seed))
        # Placed once: a fresh scalar would be one more host-to-device copy in every dispatch.
        self._enough_free = {None: place(np.int32(_NEVER))} | {n: place(np.int32(n)) for n in range(1, refill + 1)}
        self._dtypes: dict[str, np.dtype] | None = None
        self._warm = 0

    def prefill(self, params: Params, bucket: int, entries: Sequence[tuple[int, int, Request]]) -> None:
        """Put requests into slots, with their first token drawn. An entry is (row, slot, request)."""
        packed = packets.pack(bucket, entries, self._sizes)
        self._state = self._programs.prefill[bucket](params, self._seed, self._state, packed)

    def decode(self, params: Params, until_free: int | None) -> packets.Report:
        """Up to `Sizes.chunk` steps, fewer once `until_free` slots are free (at most `refill`) or none is running."""
        self._state, report = self._programs.decode(params, self._seed, self._state, self._enough_free[until_free])
        return packets.read_report(np.asarray(report), self._sizes.chunk)

    def cancel(self, slots: Sequence[int]) -> None:
        """Make `slots` idle."""
        mask = np.zeros(self._sizes.slots, bool)
        mask[list(slots)] = True
        self._state = self._programs.cancel(self._state, mask)

    def warmup(self, params: Params, progress: Progress | None) -> None:
        """Compile every program for parameters like `params`, and run each once without effect."""
        self.check(params)
        self._dtypes = {name: leaf.dtype for name, leaf in params.items()}
        for bucket in self._sizes.buckets:
            _timed(progress, f"prefill of {bucket} tokens", lambda: self.prefill(params, bucket, []))  # noqa: B023
        _timed(progress, f"decode of {self._sizes.slots} slots", lambda: self.decode(params, 1))
        self.decode(params, None)
        _timed(progress, "cancel", lambda: self.cancel([]))
        self._warm = self._programs.compiled()

    def compiles(self) -> int:
        """Programs compiled since warm-up; 0 without a warm-up."""
        return self._programs.compiled() - self._warm if self._warm else 0

    def check(self, params: Params) -> None:
        """TransferError if `params` would not run in the compiled programs: says which parameter and why."""
        wanted = self._programs.params
        if params.keys() != wanted.keys():
            differing = sorted(params.keys() ^ wanted.keys())
            raise TransferError(f"these are not the parameters of {self._name}: missing or unknown {differing[:4]}")
        for name, sharding in wanted.items():
            leaf, known = params[name], self._dtypes
            if leaf.shape != self._shapes[name]:
                raise TransferError(f"parameter {name} has shape {leaf.shape}, the model has {self._shapes[name]}")
            if not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                raise TransferError(f"parameter {name} lies as {leaf.sharding}, this engine needs {sharding}")
            if known is not None and leaf.dtype != known[name]:
                raise TransferError(f"parameter {name} is {leaf.dtype}, this engine is compiled for {known[name]}")


def _timed(progress: Progress | None, what: str, work: Callable[[], object]) -> None:
    start_s = time.monotonic()
    if progress is not None:
        progress(f"compiling {what}")
    work()
    if progress is not None:
        progress(f"compiled {what}, {time.monotonic() - start_s:.1f} s")
