"""Device meshes, and the rules from logical axes to mesh axes (data, fsdp, expert, sequence, tensor)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import jax
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
        raise ConfigError("sharding.logical", logical, f"names {len(logical)} axes, the array has shape {shape}")
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
