"""Which backend this is, and what its devices hold."""

from __future__ import annotations

from typing import Literal

import jax
from jax.sharding import Mesh

from jaxroll.errors import ConfigError

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
