"""Sharding: device meshes, the rules from logical axes to mesh axes, and transfers between the host and the devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError

AXES = ("data", "fsdp", "expert", "sequence", "tensor")


def build(
    cfg: MeshConfig,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """The mesh of the first `cfg.devices` of `devices` (default: all that this process sees).

    Its axes have type Auto: the compiler propagates shardings from the arguments, and a PartitionSpec is a hint.
    ConfigError for a size below one or for too few devices.
    """
    shape = (cfg.data, cfg.fsdp, cfg.expert, cfg.sequence, cfg.tensor)
    for axis, size in zip(AXES, shape, strict=True):
        if size < 1:
            raise ConfigError(f"mesh.{axis}", size, "an axis has at least one device", "Use 1 to leave it out.")
    available = list(jax.devices() if devices is None else devices)
    if len(available) < cfg.devices:
        raise ConfigError(
            "mesh",
            dict(zip(AXES, shape, strict=True)),
            f"needs {cfg.devices} devices, this process has {len(available)}",
            "Make the axes smaller, or on a CPU force more devices with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={cfg.devices}.",
        )
    return jax.make_mesh(shape, AXES, devices=available[: cfg.devices], axis_types=(AxisType.Auto,) * len(AXES))


def shards(mesh: Mesh) -> int:
    """The number of parts into which the mesh divides the rows of a batch."""
    return math.prod(mesh.shape[axis] for axis in ("data", "fsdp", "expert"))


# --- backend

Platform = Literal["cpu", "gpu", "tpu"]

HOST_MEMORY = "pinned_host"  # the kind of memory of a device that is memory of its host, as JAX names it
_PLATFORMS: dict[str, Platform] = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


def platform(mesh: Mesh | None = None) -> Platform:
    """The platform of the mesh's devices (also of a topology without hardware), or of the default backend."""
    name = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if name not in _PLATFORMS:
        raise ConfigError("placement.platform", name, "unknown JAX platform", f"Known: {', '.join(_PLATFORMS)}.")
    return _PLATFORMS[name]


def device_kind(mesh: Mesh) -> str:
    """The vendor's name of the devices, such as "TPU v5 lite"."""
    return mesh.devices.flat[0].device_kind


def memory_bytes(device: jax.Device) -> int | None:  # pyright: ignore[reportInvalidTypeForm]
    """Bytes that JAX may use on this device; None if the backend does not report it (CPU)."""
    stats = device.memory_stats()
    return None if not stats else stats.get("bytes_limit")


def memory_limit(mesh: Mesh) -> int | None:
    """The least `memory_bytes` of the mesh's devices; None if one of them reports none."""
    limits = [memory_bytes(device) for device in mesh.local_devices]
    return None if None in limits else min(limit for limit in limits if limit is not None)


def device_bytes(tree: Any, memory_kind: str | None = None) -> int:
    """The bytes of one device that the arrays of `tree` take; they may be abstract, with shardings.

    Counted are those outside of host memory, or those in `memory_kind`.
    """
    leaves = [
        leaf
        for leaf in jax.tree.leaves(tree)
        if leaf.size
        and (leaf.sharding.memory_kind == memory_kind if memory_kind else leaf.sharding.memory_kind != HOST_MEMORY)
    ]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * _itemsize(leaf.dtype) for leaf in leaves)


def _itemsize(dtype: Any) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.dtype(dtype).itemsize


# --- Logical axes to mesh axes. A parameter or activation names its logical axes; a table of rules maps them
#
# Learner and sampler run the same model and differ only in this table.

Rules = Mapping[str, tuple[str, ...] | None]
Logical = tuple[str | None, ...]

# Axes with the same rule for learner and sampler: heads, hidden units and vocabulary are sharded by tensor parallelism;
# norms, head dimensions and layers are never sharded.
_SHARED: dict[str, tuple[str, ...] | None] = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "head_dim": None,
    "layers": None,
    # Heads inside attention, which needs all tokens of a row: an all-to-all exchanges tokens for heads (DeepSpeed
    # Ulysses, arXiv 2309.14509). So every device has the same work, and any kernel can be used.
    "query_heads": ("tensor", "sequence"),
    "key_heads": ("tensor", "sequence"),
    "norm": None,
    "value": None,  # the single output of a critic
    "width": None,  # the residual stream of an activation; the same axis of a parameter is called "embed"
    "experts": ("expert",),
    "router": None,  # the experts, in the router's projection
    "rows": ("data", "fsdp", "expert"),
    "slots": ("data", "fsdp", "expert"),
}

LEARNER: Rules = MappingProxyType(
    _SHARED
    | {
        "tokens": ("sequence",),
        # The tokens of the residual stream between layers, of which tensor parallelism would keep copies
        # (V. Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022).
        "stream": ("sequence", "tensor"),
        "embed": ("fsdp", "expert", "sequence"),
        "expert_embed": ("fsdp", "sequence"),
    }
)
"""Rules of the learner: parameters sharded over all axes but data, rows of a batch over data, fsdp and expert, the
tokens of a row over sequence, and between layers over tensor, too.

For all but the experts themselves, the axis expert is a part of fsdp; for parameters, sequence is one as well.
"""

SAMPLER: Rules = MappingProxyType(_SHARED | dict.fromkeys(("tokens", "stream", "embed", "expert_embed")))
"""Rules of a sampler: parameters sharded over tensor, experts also over expert (no gather of parameters in a decode
step), slots over data, fsdp and expert.
"""


def spec(logical: Logical, rules: Rules) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes; ConfigError for an unknown axis or a collision.

    A collision means that two axes of the same array use the same mesh axis.
    """
    parts = tuple(_mesh_axes(name, rules) for name in logical)
    claimed = [axis for part in parts for axis in part]
    for axis in claimed:
        if claimed.count(axis) > 1:
            raise ConfigError("sharding.rules", logical, f"two axes use the mesh axis {axis!r}", "Unmap one of them.")
    return PartitionSpec(*(part or None for part in parts))


def sharding(mesh: Mesh, logical: Logical, rules: Rules, shape: tuple[int, ...]) -> NamedSharding:
    """The NamedSharding of an array of this shape; an axis that its mesh axes do not divide is left unsharded."""
    if len(logical) != len(shape):
        reason = f"names {len(logical)} axes, the array has shape {shape}"
        raise ConfigError("sharding.logical", logical, reason, "Name each axis of the array.")
    parts = spec(logical, rules)
    sized = zip(tuple(parts), shape, strict=True)
    return NamedSharding(
        mesh, PartitionSpec(*(part if size % _extent(mesh, part) == 0 else None for part, size in sized))
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding with a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_spec(rules: Rules) -> PartitionSpec:
    """The PartitionSpec of [rows, tokens] batches."""
    return spec(("rows", "tokens"), rules)


@dataclass(frozen=True)
class Layout:
    """A mesh with its rules, which together determine the shardings of a program's arrays."""

    mesh: Mesh
    rules: Rules

    def sharding(self, logical: Logical, shape: tuple[int, ...]) -> NamedSharding:
        """The NamedSharding of an array with these logical axes."""
        return sharding(self.mesh, logical, self.rules, shape)

    def constrain(self, array: jax.Array, logical: Logical) -> jax.Array:
        """`array`, with its sharding inside a jitted program constrained to the rules."""
        return jax.lax.with_sharding_constraint(array, self.sharding(logical, array.shape))


def _mesh_axes(name: str | None, rules: Rules) -> tuple[str, ...]:
    if name is None:
        return ()
    if name not in rules:
        raise ConfigError(
            "sharding.rules", name, "no rule for this logical axis", f"Known: {', '.join(sorted(rules))}."
        )
    return rules[name] or ()


def _extent(mesh: Mesh, part: str | tuple[str, ...] | None) -> int:
    axes = (part,) if isinstance(part, str) else part or ()
    return math.prod(mesh.shape[axis] for axis in axes)


# --- Transfers between the host and devices, also for meshes that span several processes
#
# If a mesh spans several processes, each of them must call these functions with the same host arrays, and transfers the
# shards of its own devices. Fetched arrays are whole on every process, so that all of them compute the same.


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


def own_shards(tree: Any) -> Any:
    """The JAX arrays of `tree` on the host: whole, or as the `OwnShards` of this process if others have shards, too."""
    if not _elsewhere(tree) and all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return jax.tree.map(OwnShards.of, tree)


def of_own_shards(tree: Any) -> Any:
    """`tree` of `own_shards` as it was passed there, but for whole arrays, which stay on the host."""
    return jax.tree.map(lambda leaf: leaf.placed() if isinstance(leaf, OwnShards) else leaf, tree)


@dataclass(frozen=True, eq=False)
class OwnShards:
    """Host copies of those shards of an array that are on devices of this process."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    shards: list[tuple[Any, np.ndarray]]  # with their devices

    @classmethod
    def of(cls, array: jax.Array) -> OwnShards:
        """The shards of `array`; waits for them."""
        shards = [(shard.device, np.array(shard.data)) for shard in array.addressable_shards]
        return cls(array.shape, array.sharding, shards)

    def placed(self) -> jax.Array:
        """The array; every process must call this."""
        arrays = [jax.device_put(data, device) for device, data in self.shards]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)


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


def axes_across_processes(mesh: Mesh) -> frozenset[str]:
    """The mesh axes along which devices belong to different processes."""
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    firsts = {name: np.take(owners, [0], axis) for axis, name in enumerate(mesh.axis_names)}
    return frozenset(name for name, first in firsts.items() if (owners != first).any())


def without(part: Any, axes: frozenset[str]) -> Any:
    """One entry of a PartitionSpec without `axes`."""
    if not isinstance(part, tuple):
        return None if part in axes else part
    return tuple(axis for axis in part if axis not in axes) if axes.intersection(part) else part


@functools.lru_cache(maxsize=64)
def resharding(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A compiled function that returns an array with `sharding`."""
    return jax.jit(lambda array: array, out_shardings=sharding)
