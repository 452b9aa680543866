"""Placement: devices per role as environment variables, and the accelerators of this machine.

docs/design.md, "Placement", has the reasons. The names are those of the process list: learner, sampler-0, …, evaluator.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxroll.config import Config
from jaxroll.config.derived import COLOCATED, device_processes, learner_names, memory_fractions
from jaxroll.config.rules import GPU_SHARE, Inventory, check_inventory
from jaxroll.errors import ConfigError

Env = dict[str, str]

# XLA aborts a CPU program whose devices do not all arrive within 40 s: too short when two roles share two cores.
CPU_COLLECTIVE_WARN_S = 120
CPU_COLLECTIVE_ABORT_S = 1200

# XLA on CPU allocates all memory of a program in each call, of a training step hundreds of MB: in pages of 4 KB their
# first touch is a third of the step. From glibc 2.35 on malloc asks for large pages, where the kernel grants them.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

TPU_BASE_PORT = 8476
# Chips of one process as a rectangle of the host's grid, which counts along x first.
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def device_env(config: Config, inventory: Inventory, visible_gpus: Sequence[str] = ()) -> dict[str, Env]:
    """Environment by process name for all roles with devices; ConfigError when they do not fit.

    `visible_gpus` names the GPUs to hand out (an outer CUDA_VISIBLE_DEVICES); by default they are numbered from 0.
    """
    check_inventory(config, inventory)
    wanted = device_processes(config)
    if inventory.platform == "tpu":
        return tpu_env(wanted)
    if inventory.platform == "gpu":
        gpus = tuple(visible_gpus) or tuple(map(str, range(inventory.gpus)))
        return gpu_env(wanted, memory_fractions(config), gpus)
    envs = {name: cpu_env(devices, config.placement.cpu_threads) for name, devices in wanted.items()}
    for name in (COLOCATED,) if config.placement.colocated else learner_names(config):
        envs[name] |= HUGE_PAGES
    return envs


def cpu_env(devices: int = 1, threads: int = 1) -> Env:
    """`threads` worth of CPU that looks like `devices` devices.

    NPROC fixes XLA's thread pool, so that the bits do not depend on the visible cores.
    """
    count = str(threads)
    flags = [f"--xla_force_host_platform_device_count={devices}",
             f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={CPU_COLLECTIVE_WARN_S}",
             f"--xla_cpu_collective_call_terminate_timeout_seconds={CPU_COLLECTIVE_ABORT_S}",
             f"--xla_cpu_collective_timeout_seconds={CPU_COLLECTIVE_ABORT_S}"]  # fmt: skip
    return {"JAX_PLATFORMS": "cpu", "NPROC": count, "XLA_FLAGS": " ".join(flags), "OMP_NUM_THREADS": count,
            "OPENBLAS_NUM_THREADS": count, "MKL_NUM_THREADS": count}  # fmt: skip


def gpu_env(wanted: Mapping[str, int], shares: Mapping[str, float], gpus: Sequence[str]) -> dict[str, Env]:
    """GPUs of their own for every role while they last, else the same ones for all, by memory fractions."""
    if len(gpus) < sum(wanted.values()):
        return {name: _gpu(gpus[:count], shares[name]) for name, count in wanted.items()}
    envs, start = {}, 0
    for name, count in wanted.items():
        envs[name] = _gpu(gpus[start : start + count], GPU_SHARE)
        start += count
    return envs


def _gpu(gpus: Sequence[str], share: float) -> Env:
    return {
        "JAX_PLATFORMS": "cuda",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.2f}",
    }


def tpu_env(wanted: Mapping[str, int]) -> dict[str, Env]:
    """A rectangle of one host's chips for every role. Larger ones first, so that each block is aligned to its size."""
    envs, start = {}, 0
    ordered = sorted(wanted, key=lambda name: -wanted[name])  # stable: equals keep their order
    for offset, name in enumerate(ordered):
        chips = range(start, start + wanted[name])
        envs[name] = _tpu(chips, TPU_BASE_PORT + offset)
        start += wanted[name]
    return {name: envs[name] for name in wanted}


def _tpu(chips: range, port: int) -> Env:
    return {
        "JAX_PLATFORMS": "tpu",
        "TPU_VISIBLE_CHIPS": ",".join(map(str, chips)),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS[len(chips)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": str(port),
        "CLOUD_TPU_TASK_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def common_env(cache_dir: str) -> Env:
    """The environment variables of every process, for all kinds of devices."""
    return {
        "PYTHONUTF8": "1",  # files and output are UTF-8 in every locale
        "PYTHONUNBUFFERED": "1",  # a killed process leaves its last words in the log
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_COMPILATION_CACHE_DIR": cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


# --- accelerators of this machine, found without starting JAX (which would take them)

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
