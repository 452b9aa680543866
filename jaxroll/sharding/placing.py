"""Transfers between the host and devices, also for meshes that span several processes.

If a mesh spans several processes, each of them must call these functions with the same host arrays, and transfers the
shards of its own devices. Fetched arrays are whole on every process, so that all of them compute the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def placed(arrays: dict[str, np.ndarray], sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """`arrays` on the devices with `sharding`; they may alias the host arrays."""
    if sharding.is_fully_addressable:
        return jax.device_put(arrays, sharding)
    return {name: placed_once(array, sharding) for name, array in arrays.items()}


def placed_once(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A copy of `array` on the devices with `sharding`: it may be donated, and the host array may be changed."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding, may_alias=False)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.array(array[index]))


def moved(arrays: Sequence[jax.Array], targets: Sequence[jax.sharding.Sharding]) -> list[jax.Array]:
    """Each of `arrays` with its target sharding; an array that has it already is returned as it is.

    All devices must belong to this process. If a target's devices are all of an array's devices, or the first n of them
    where n divides their number, the devices exchange shards in one program (`jax.device_put` would copy through the
    host). Other arrays are copied by `jax.device_put`.
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
    """A sharding over all devices of `source` that has the shards of `target` on the devices of `target`.

    None if the devices of `source` do not begin with those of `target` in the same order.
    """
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
    """The part of `array` on the devices of `target`, as an array with that sharding."""
    if array.sharding == target:
        return array
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    parts = [shards[device] for device in target.addressable_devices_indices_map(array.shape)]
    return jax.make_array_from_single_device_arrays(array.shape, target, parts)


@functools.lru_cache(maxsize=16)
def _exchange(shardings: tuple[NamedSharding, ...]) -> Callable[[list[jax.Array]], Sequence[jax.Array]]:
    return jax.jit(lambda arrays: arrays, out_shardings=list(shardings))


def fetched(tree: Any) -> Any:
    """The JAX arrays of `tree` as whole host arrays.

    For arrays over several processes, every process must call this in the same order, and the first call per shape
    compiles a program.
    """
    return jax.tree.map(_fetched, tree) if _elsewhere(tree) else jax.device_get(tree)


def gathered(array: jax.Array) -> jax.Array:
    """`array`, resharded so that the devices of each process together hold all of it; unchanged if they do already.

    Its sharding among the devices of a process does not change. Every process must call this in the same order.
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
    """The mesh axes along which devices belong to different processes."""
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    firsts = {name: np.take(owners, [0], axis) for axis, name in enumerate(mesh.axis_names)}
    return frozenset(name for name, first in firsts.items() if (owners != first).any())


def _without(part: Any, axes: frozenset[str]) -> Any:
    """One entry of a PartitionSpec without `axes`."""
    if not isinstance(part, tuple):
        return None if part in axes else part
    return tuple(axis for axis in part if axis not in axes) if axes.intersection(part) else part


@functools.lru_cache(maxsize=64)
def _resharding(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=sharding)


def _elsewhere(tree: Any) -> bool:
    """True if a part of an array is only on devices of another process."""
    return any(not (leaf.is_fully_addressable or leaf.is_fully_replicated) for leaf in jax.tree.leaves(tree))


def _fetched(array: jax.Array) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(array, tiled=True) if _elsewhere(array) else array)


def zeroed(tree: Any) -> Any:
    """Zeros of the shapes of `tree`."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def shardings_of(tree: Any) -> Any:
    """The shardings of the leaves of `tree`."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
