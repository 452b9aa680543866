"""The device channel: weights move within one process, from devices to devices.

A published version is a copy on the learner's devices. An engine with the learner's shardings and dtype uses this copy;
for other engines the devices exchange shards (`sharding.moved`, through the host only if an engine has devices that the
learner does not have). The copy is queued after the step that made the parameters and before the next step, which may
donate them. Only the newest version is kept: the previous one is dropped when the store has recorded the new one, and
its memory is freed when no engine uses it.

There are no checksums, because no bytes pass through files or sockets.
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

from jaxroll import sharding
from jaxroll.errors import TransferError, VersionGone
from jaxroll.records import Version, VersionRef
from jaxroll.transfer import manifest as manifests

NAME = "device"
Params = Mapping[str, jax.Array]


class DevicePublisher:
    """Publisher for the engines of this process; it has the interface of `ends.Publisher`."""

    def __init__(self, dtype: str) -> None:
        self._dtype, self._address = dtype, uuid.uuid4().hex
        self._frozen: Params = {}
        self._guard = threading.Lock()
        self._kept: dict[Version, Params] = {}
        _OPEN[self._address] = self

    def freeze(self, version: Version, params: Params) -> None:
        """Add `params`, which must not change any more, to every version that is started from now on."""
        self._frozen = dict(params)

    def start(self, version: Version, params: Params) -> Future[VersionRef]:
        """Copy `params`, which may be donated on return. The future is already done."""
        copied = manifests.copied(params, self._dtype)
        with self._guard:
            self._kept[version] = {**self._frozen, **copied}
        started: Future[VersionRef] = Future()
        started.set_result(VersionRef(version, NAME, self._address, ""))
        return started

    def finish(self, version: Version, started: Future[VersionRef]) -> VersionRef:
        """The address of `version`; the previous version stays available until `drop_older`."""
        return started.result()

    @property
    def sent_bytes(self) -> int:
        """0: nothing leaves the devices by this channel."""
        return 0

    def drop_older(self, version: Version) -> None:
        """Drop versions older than `version`, which the store does not give out any more."""
        with self._guard:
            self._kept = {kept: params for kept, params in self._kept.items() if kept >= version}

    def publish(self, version: Version, params: Params) -> VersionRef:
        """Start and finish publishing `version`."""
        return self.finish(version, self.start(version, params))

    def kept(self, version: Version) -> Params:
        """The parameters of `version`. VersionGone if it was dropped or never published."""
        with self._guard:
            if version not in self._kept:
                raise VersionGone(f"version {version} is not kept; {', '.join(map(str, self._kept)) or 'none'} is")
            return self._kept[version]

    def close(self) -> None:
        """Drop all versions. A second close does nothing."""
        _OPEN.pop(self._address, None)
        with self._guard:
            self._kept = {}


_OPEN: WeakValueDictionary[str, DevicePublisher] = WeakValueDictionary()  # publishers of this process, by address


class HandedOver:
    """Parameters on the publisher's devices, waiting for the weight swap; it has the interface of `ends.Staged`."""

    def __init__(
        self, params: Params, target: Mapping[str, jax.sharding.Sharding], wanted: Mapping[str, np.dtype]
    ) -> None:
        self._params: Params | None = params
        self._target, self._wanted, self.sources = target, wanted, ()
        self.fetched_bytes = sum(array.nbytes for array in params.values())

    def held(self, names: Container[str]) -> Mapping[str, Any]:
        """An empty mapping: frozen parameters are on the devices already."""
        del names
        return {}

    def place(self) -> dict[str, jax.Array]:
        """The parameters on the target mesh, in the dtypes of the engine. Call this once, on the JAX thread."""
        if self._params is None:
            raise TransferError("these parameters were placed before; fetch them again")
        params, self._params = self._params, None
        names = list(params)
        placed = sharding.moved([params[n] for n in names], [self._target[n] for n in names])
        return manifests.cast(dict(zip(names, placed, strict=True)), self._wanted)


def hand_over(
    published: VersionRef,
    target: Mapping[str, jax.sharding.Sharding],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> HandedOver:
    """The parameters of a version that a publisher of this process holds.

    VersionGone if no publisher of this process holds it; TransferError for shapes that do not match.
    """
    publisher = _OPEN.get(published.address)
    if publisher is None:
        raise VersionGone(f"version {published.version} was published by a process that is gone, or by another one")
    params = publisher.kept(published.version)
    leaves = tuple(manifests.Leaf(name, tuple(a.shape), a.dtype.name, (), ()) for name, a in sorted(params.items()))
    manifests.check(manifests.Manifest(published.version, leaves), shapes)
    return HandedOver(params, target, {name: np.dtype(shape.dtype) for name, shape in shapes.items()})
