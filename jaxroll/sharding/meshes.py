"""Device meshes with axes ("data", "fsdp", "tensor") of Auto type, and the backend that they are on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
from jax.sharding import AxisType, Mesh

from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError

AXES = ("data", "fsdp", "tensor")


def build(
    cfg: MeshConfig,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """The mesh of the first `cfg.devices` of `devices` (default: all that this process sees).

    Auto axes: the compiler propagates shardings from the arguments, and a PartitionSpec is a hint, not a type.
    Raises ConfigError for a size below one or for too few devices.
    """
    shape = (cfg.data, cfg.fsdp, cfg.tensor)
    for axis, size in zip(AXES, shape, strict=True):
        if size < 1:
            raise ConfigError(f"mesh.{axis}", size, "an axis has at least one device", "Use 1 to leave it out.")
    available = list(jax.devices() if devices is None else devices)
    if len(available) < cfg.devices:
        raise ConfigError(
            "mesh",
            dict(zip(AXES, shape, strict=True)),
            f"needs {cfg.devices} devices, {len(available)} are here",
            "Make the axes smaller, or on a CPU force more devices with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={cfg.devices}.",
        )
    return jax.make_mesh(shape, AXES, devices=available[: cfg.devices], axis_types=(AxisType.Auto,) * len(AXES))


# --- backend

Platform = Literal["cpu", "gpu", "tpu"]

_PLATFORMS: dict[str, Platform] = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


def platform(mesh: Mesh | None = None) -> Platform:
    """cpu, gpu or tpu: of the mesh's devices (also of a topology without hardware), else of this process's default."""
    name = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if name not in _PLATFORMS:
        raise ConfigError("placement.platform", name, "unknown JAX platform", f"Known: {', '.join(_PLATFORMS)}.")
    return _PLATFORMS[name]


def device_kind(mesh: Mesh) -> str:
    """The devices' name as their maker gives it, such as "TPU v5 lite"."""
    return mesh.devices.flat[0].device_kind


def memory_bytes(device: jax.Device) -> int | None:  # pyright: ignore[reportInvalidTypeForm]
    """Bytes that JAX may use on this device; None where the backend does not say (CPU)."""
    stats = device.memory_stats()
    return None if not stats else stats.get("bytes_limit")
