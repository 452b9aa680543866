"""Arrays between the host and devices that may belong to several processes.

Where a mesh spans processes, each of them calls with the same host arrays, brings the parts that its own devices hold,
and is given whole arrays back: what is computed from them is the same everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def placed(arrays: dict[str, np.ndarray], sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """`arrays` lying as `sharding` says; they may share the memory of those on the host."""
    if sharding.is_fully_addressable:
        return jax.device_put(arrays, sharding)
    return {name: placed_once(array, sharding) for name, array in arrays.items()}


def placed_once(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """One array, copied: the caller may donate what it gets, and write to what it gave."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding, may_alias=False)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.array(array[index]))


def moved(arrays: Sequence[jax.Array], targets: Sequence[jax.sharding.Sharding]) -> list[jax.Array]:
    """Each of `arrays` lying as its target says, themselves where they do already. All lie on one process's devices.

    Where a target's devices are all of an array's, or the first so many that they divide these, the devices exchange
    what is missing in one program (`jax.device_put` would go by way of the host); others go that way.
    """
    wide = [_widened(array.sharding, target) for array, target in zip(arrays, targets, strict=True)]
    there = [array.sharding.is_equivalent_to(target, array.ndim) for array, target in zip(arrays, targets, strict=True)]
    found = list(arrays)
    exchanged = {n: sharding for n, sharding in enumerate(wide) if sharding is not None and not there[n]}
    if exchanged:
        program = _exchange(tuple(exchanged.values()))
        for n, array in zip(exchanged, program([arrays[n] for n in exchanged]), strict=True):
            found[n] = _narrowed(array, targets[n])
    for n, array in enumerate(arrays):
        if wide[n] is None and not there[n]:
            found[n] = jax.device_put(array, targets[n])
    return found


def _widened(source: jax.sharding.Sharding, target: jax.sharding.Sharding) -> NamedSharding | None:
    """What gives the devices of `target` what it gives them, on all devices of `source`; None where these have another
    order, or do not begin with all of the target's."""
    if not (isinstance(source, NamedSharding) and isinstance(target, NamedSharding)):
        return None
    if not (isinstance(source.mesh, Mesh) and isinstance(target.mesh, Mesh)):
        return None
    have, want = list(source.mesh.devices.flat), list(target.mesh.devices.flat)
    if have[: len(want)] != want or len(have) % len(want):
        return None
    copies = len(have) // len(want)
    if copies == 1:
        return target
    devices = np.array(have).reshape(copies, *target.mesh.devices.shape)
    mesh = Mesh(devices, ("copies", *target.mesh.axis_names), axis_types=(AxisType.Auto,) * devices.ndim)
    return NamedSharding(mesh, target.spec)


def _narrowed(array: jax.Array, target: jax.sharding.Sharding) -> jax.Array:
    """The part of `array` on the devices of `target`, which it gives what they have."""
    if array.sharding == target:
        return array
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    parts = [shards[device] for device in target.addressable_devices_indices_map(array.shape)]
    return jax.make_array_from_single_device_arrays(array.shape, target, parts)


@functools.lru_cache(maxsize=16)
def _exchange(shardings: tuple[NamedSharding, ...]) -> Callable[[list[jax.Array]], Sequence[jax.Array]]:
    return jax.jit(lambda arrays: arrays, out_shardings=list(shardings))


def fetched(tree: Any) -> Any:
    """The arrays (of JAX) of `tree` whole, on the host.

    Every process must ask for what lies on several, in the same order; the first such question of a shape compiles.
    """
    return jax.tree.map(_fetched, tree) if _elsewhere(tree) else jax.device_get(tree)


def gathered(array: jax.Array) -> jax.Array:
    """`array` so that the devices of each process hold all of it together; itself where they do already.

    It stays split among the devices of a process as it was. Every process must call, in the same order.
    """
    sharding = array.sharding
    if sharding.is_fully_addressable or not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return array
    crossing = _axes_across_processes(sharding.mesh)
    parts = [_without(part, crossing) for part in sharding.spec]
    if parts == list(sharding.spec):
        return array
    return _resharding(NamedSharding(sharding.mesh, PartitionSpec(*parts)))(array)


def _axes_across_processes(mesh: Mesh) -> frozenset[str]:
    """The axes along which a step may lead to another process's device."""
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    firsts = {name: np.take(owners, [0], axis) for axis, name in enumerate(mesh.axis_names)}
    return frozenset(name for name, first in firsts.items() if (owners != first).any())


def _without(part: Any, axes: frozenset[str]) -> Any:
    """One entry of a PartitionSpec, less these axes."""
    if not isinstance(part, tuple):
        return None if part in axes else part
    return tuple(axis for axis in part if axis not in axes) if axes.intersection(part) else part


@functools.lru_cache(maxsize=64)
def _resharding(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=sharding)


def _elsewhere(tree: Any) -> bool:
    """True if some array lies in parts on another process's devices."""
    return any(not (leaf.is_fully_addressable or leaf.is_fully_replicated) for leaf in jax.tree.leaves(tree))


def _fetched(array: jax.Array) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(array, tiled=True) if _elsewhere(array) else array)
