"""Weights handed over within a process, from devices to devices.

A published version is a copy on the learner's devices. The devices exchange what an engine wants elsewhere
(`placing.moved`, which goes by way of the host only where an engine has devices that the learner has not); an engine
whose shards and dtype are the learner's computes with that very copy. It is queued behind the step that made the
parameters and before the next, which may donate them. Only the newest is kept: the one before goes when the store knows
of it, but for the engines that compute with it.

Nothing is summed up on this way: nothing is read, written or sent.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Container, Mapping
from concurrent.futures import Future
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np

from jaxroll.errors import TransferError, VersionGone
from jaxroll.records import Version, VersionRef
from jaxroll.sharding import placing
from jaxroll.transfer import host_snapshot, manifest

NAME = "device"
Params = Mapping[str, jax.Array]


class DevicePublisher:
    """Publishes one version after another to the engines of this process; see `Publisher`, whose place it takes."""

    def __init__(self, dtype: str) -> None:
        self._dtype, self._address = dtype, uuid.uuid4().hex
        self._frozen: Params = {}
        self._guard = threading.Lock()
        self._kept: dict[Version, Params] = {}
        _OPEN[self._address] = self

    def freeze(self, version: Version, params: Params) -> None:
        """Let `params`, which nothing changes any more, be part of every version that is started from now on."""
        self._frozen = dict(params)

    def start(self, version: Version, params: Params) -> Future[VersionRef]:
        """The snapshot, there already. On return `params` may be donated."""
        copied = host_snapshot.copied(params, self._dtype)
        with self._guard:
            self._kept[version] = {**self._frozen, **copied}
        started: Future[VersionRef] = Future()
        started.set_result(VersionRef(version, NAME, self._address, ""))
        return started

    def finish(self, version: Version, started: Future[VersionRef]) -> VersionRef:
        """Where `version` can be had from now on, beside the one before it."""
        return started.result()

    def drop_older(self, version: Version) -> None:
        """Nobody is told of those before `version` any more: let go of them."""
        with self._guard:
            self._kept = {kept: params for kept, params in self._kept.items() if kept >= version}

    def publish(self, version: Version, params: Params) -> VersionRef:
        """Both halves, one after the other."""
        return self.finish(version, self.start(version, params))

    def kept(self, version: Version) -> Params:
        """The parameters of `version`. VersionGone if a newer one has taken its place, or it was never published."""
        with self._guard:
            if version not in self._kept:
                raise VersionGone(f"version {version} is not kept; {', '.join(map(str, self._kept)) or 'none'} is")
            return self._kept[version]

    def close(self) -> None:
        """Let go of what is kept. A second close does nothing."""
        _OPEN.pop(self._address, None)
        with self._guard:
            self._kept = {}


_OPEN: WeakValueDictionary[str, DevicePublisher] = WeakValueDictionary()  # of this process, by their addresses


class HandedOver:
    """Parameters on the publisher's devices, waiting for the flip; see `Staged`."""

    def __init__(
        self, params: Params, target: Mapping[str, jax.sharding.Sharding], wanted: Mapping[str, np.dtype]
    ) -> None:
        self._params: Params | None = params
        self._target, self._wanted = target, wanted
        self.fetched_bytes = sum(array.nbytes for array in params.values())

    def held(self, names: Container[str]) -> Mapping[str, Any]:
        """Nothing: what does not change is on the devices already."""
        del names
        return {}

    def place(self) -> dict[str, jax.Array]:
        """The parameters on the target mesh, in the dtypes that are wanted there. Call it once, on the JAX thread."""
        if self._params is None:
            raise TransferError("these parameters were placed before; fetch them again")
        params, self._params = self._params, None
        names = list(params)
        placed = placing.moved([params[n] for n in names], [self._target[n] for n in names])
        return manifest.cast(dict(zip(names, placed, strict=True)), self._wanted)


def hand_over(
    published: VersionRef,
    target: Mapping[str, jax.sharding.Sharding],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> HandedOver:
    """The parameters of a snapshot that a publisher of this process has. VersionGone if there is none, or it has
    another version; TransferError for shapes that do not fit."""
    publisher = _OPEN.get(published.address)
    if publisher is None:
        raise VersionGone(f"version {published.version} was published by a process that is gone, or by another one")
    params = publisher.kept(published.version)
    leaves = tuple(manifest.Leaf(name, tuple(a.shape), a.dtype.name, (), ()) for name, a in sorted(params.items()))
    manifest.check(manifest.Manifest(published.version, leaves), shapes)
    return HandedOver(params, target, {name: np.dtype(shape.dtype) for name, shape in shapes.items()})
