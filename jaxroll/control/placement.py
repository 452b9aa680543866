"""Which devices each role sees, as environment variables: pure functions of a config and an inventory.

DESIGN.md, "Placement", has the reasons. The names are those of the process list: learner, sampler-0, …, evaluator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxroll.config import Config
from jaxroll.config.rules import (
    COLOCATED,
    GPU_SHARE,
    Inventory,
    check_inventory,
    device_processes,
    learner_names,
    memory_fractions,
)

Env = dict[str, str]

# XLA aborts a CPU program whose devices do not all arrive within 40 s: too short when two roles share two cores.
CPU_COLLECTIVE_WARN_S = 120
CPU_COLLECTIVE_ABORT_S = 1200

# XLA on CPU takes all that a program needs anew in each call, of a training step hundreds of MB: in pages of 4 KB their
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
    """What every process is started with, whatever its devices."""
    return {
        "PYTHONUTF8": "1",  # files and output are UTF-8 whatever the locale
        "PYTHONUNBUFFERED": "1",  # a killed process leaves its last words in the log
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_COMPILATION_CACHE_DIR": cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
