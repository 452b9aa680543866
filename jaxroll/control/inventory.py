"""The accelerators of this machine, found without starting JAX (which would take them)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from jaxroll.config.rules import Inventory
from jaxroll.errors import ConfigError

PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
_TPU_DEVICES = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def find(platform: str, environ: Mapping[str, str] = os.environ) -> Inventory:
    """The devices that `platform` (auto, cpu, gpu, tpu) can use here; ConfigError when it is asked for and absent.

    `auto` obeys JAX_PLATFORMS, then takes TPU before GPU before CPU, each only if JAX's plugin for it is installed.
    """
    if platform == "auto":
        platform = _named(environ.get("JAX_PLATFORMS", "")) or _best(environ)
    if platform == "tpu":
        chips = tpu_chips()
        if not chips:
            raise ConfigError("placement.platform", "tpu", "no TPU chip on this machine", "Use 'auto' or 'cpu'.")
        return Inventory("tpu", chips=chips)
    if platform == "gpu":
        memories = visible_gpu_memories_mb(environ)
        if not memories:
            raise ConfigError("placement.platform", "gpu", "no NVIDIA GPU on this machine", "Use 'auto' or 'cpu'.")
        return Inventory("gpu", gpus=len(memories), gpu_memory_mb=min(memories))
    return Inventory("cpu")


def _named(jax_platforms: str) -> str:
    first = jax_platforms.split(",")[0].strip().lower()
    return {"cuda": "gpu", "rocm": "gpu"}.get(first, first)


def _best(environ: Mapping[str, str]) -> str:
    if importlib.util.find_spec("libtpu") and tpu_chips():
        return "tpu"
    if any(importlib.util.find_spec(name) for name in _CUDA_PLUGINS) and visible_gpu_memories_mb(environ):
        return "gpu"
    return "cpu"


def tpu_chips(pci: Path = PCI_DEVICES) -> int:
    """TPU chips on the PCI bus."""
    return sum(_read(device / "vendor") == _GOOGLE and _read(device / "device") in _TPU_DEVICES
               for device in pci.glob("*"))  # fmt: skip


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The GPUs that an outer CUDA_VISIBLE_DEVICES leaves us; empty when it says nothing."""
    return tuple(name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip())


def visible_gpu_memories_mb(environ: Mapping[str, str] = os.environ) -> list[int]:
    """Memory of every visible GPU, from nvidia-smi; empty when there is none."""
    if environ.get("CUDA_VISIBLE_DEVICES", None) in ("", "-1"):
        return []
    memories = gpu_memories_mb()
    wanted = [name for name in visible_gpus(environ) if name.isdigit()]
    return [memories[int(name)] for name in wanted if int(name) < len(memories)] if wanted else memories


def gpu_memories_mb() -> list[int]:
    """Memory of every NVIDIA GPU here."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in done.stdout.split() if line.isdigit()]
