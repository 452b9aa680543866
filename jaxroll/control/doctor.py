"""`jaxroll doctor`: installed dependencies, the features that missing ones disable, and how to install them."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxroll.control import program, run_dir
from jaxroll.rpc import tls

CORE = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorstore", "ml-collections", "numpy",
        "grpcio", "ml-dtypes", "msgspec", "tokenizers", "rich", "tensorboardX", "jaxtyping",
        "starlette", "uvicorn")  # fmt: skip
PROBE_S = 90.0
DISK_NEEDED_GB = 1.2

# Runs in a child: asking JAX for devices takes them.
_PROBE = "import jax, json; print(json.dumps([jax.default_backend(), [str(d) for d in jax.devices()]]))"


@dataclass(frozen=True)
class Optional:
    """An optional dependency: the feature that is skipped without it, and how to install it."""

    name: str
    present: Callable[[], bool]
    skipped: str
    remedy: str


def _module(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


def _program(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name) is not None


def _environment(name: str) -> Callable[[], bool]:
    return Path(f".venv-{name}", "bin", "python").exists  # in the folder where doctor is asked


OPTIONAL = (
    Optional("reasoning-gym", _module("reasoning_gym"), "its tasks, and the demo", "pip install 'jaxroll[envs]'"),
    Optional("pyarrow", _module("pyarrow"), "Parquet files as a source of tasks", "pip install 'jaxroll[data]'"),
    Optional("jinja2", _module("jinja2"), "chat templates of Hugging Face folders", "pip install 'jaxroll[hf]'"),
    Optional("libtpu", _module("libtpu"), "TPUs, and compiling for them ahead of time (Linux x86-64)",
             "pip install 'jaxroll[tpu]'"),
    Optional("CUDA plugin", lambda: any(map(_module_found, ("jax_cuda12_plugin", "jax_cuda13_plugin"))), "NVIDIA GPUs",
             "pip install 'jaxroll[gpu]', or 'jaxroll[gpu-cuda12]' for older drivers"),
    Optional("pytest", _module("pytest"), "the tests", "pip install 'jaxroll[dev]', or `make test`"),
    Optional(".venv-torch", _environment("torch"), "comparisons with transformers in `make soak`", "make venv-torch"),
    Optional(".venv-tunix", _environment("tunix"), "benchmarks against google-tunix", "make venv-tunix"),
    Optional(".venv-trl", _environment("trl"), "comparisons of losses with TRL in `make soak`", "make venv-trl"),
    Optional(".venv-more", _environment("more"), "tests of adapters and trackers in `make soak`", "make venv-more"),
    Optional(".venv-jetstream", _environment("jetstream"), "tests with google-jetstream", "make venv-jetstream"),
    Optional("nvidia-smi", _program("nvidia-smi"), "finding NVIDIA GPUs", "comes with the NVIDIA driver"),
    Optional("gcloud", _program("gcloud"), "launch/tpu_vm.sh", "https://cloud.google.com/sdk"),
)  # fmt: skip


def _module_found(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def main() -> int:
    """Print the report; 0 when a run on the CPU can work here."""
    versions = run_dir.versions(CORE)
    absent = [name for name in CORE if name not in versions]
    print(f"python    {platform.python_version()} ({sys.executable})")
    print(f"machine   {platform.platform()}, {os.cpu_count()} cores, {_free_gb(Path.cwd()):.1f} GB free here")
    print(f"packages  {', '.join(f'{name} {version}' for name, version in versions.items())}")
    for name in absent:
        print(f"MISSING   {name}: nothing works without it. Get it: pip install jaxroll (or `make`)")
    for line in device_lines():
        print(f"devices   {line}")
    print(f"scoring   {scoring_doors()}")
    for line in certificate_lines():
        print(f"tls       {line}")
    for line in optional_lines():
        print(line)
    return 1 if absent or sys.version_info < (3, 11) else 0


def optional_lines(things: tuple[Optional, ...] = OPTIONAL) -> list[str]:
    """Installed optional parts; for missing ones, what is skipped and how to get it."""
    here = [thing.name for thing in things if thing.present()]
    lines = [f"here      {', '.join(here)}"] if here else []
    lines += [
        f"skipped   {thing.skipped}: no {thing.name}. Get it: {thing.remedy}" for thing in things if not thing.present()
    ]
    return lines


def certificate_lines(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Problems, present or near, of the certificates that JAXROLL_TLS names."""
    folder = environment.get(tls.TLS_VARIABLE, "").strip()
    if not folder:
        return []
    return tls.Material(Path(folder)).warnings(time.time()) or [f"{folder}: in order"]


def device_lines(python: str = sys.executable) -> list[str]:
    """The devices as JAX sees them (asked in a child), and as the machine has them."""
    lines = []
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, encoding="utf-8", errors="replace", timeout=PROBE_S, check=True
        )
        backend, names = json.loads(done.stdout.splitlines()[-1])
        lines.append(f"JAX uses {backend}: {', '.join(names)}")
    except subprocess.TimeoutExpired:
        lines.append(f"JAX did not answer within {PROBE_S:.0f} s: another process may hold the accelerator")
    except (subprocess.CalledProcessError, json.JSONDecodeError, IndexError, OSError) as error:
        words = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        lines.append(f"JAX does not start: {words[-1] if words else error}")
    gpus, chips = program.gpu_memories_mb(), program.tpu_chips()
    lines.append(f"the machine has {chips} TPU chips and {len(gpus)} NVIDIA GPUs{f' ({gpus[0]} MB)' if gpus else ''}")
    return lines


def scoring_doors(python: str = sys.executable) -> str:
    """The restrictions of scoring processes here; a child tries them out, because they are permanent."""
    try:
        done = subprocess.run(
            [python, "-m", "jaxroll.rewards.sandbox"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PROBE_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        return f"OPEN: everything (the probe failed: {error})"
    return done.stdout.strip()


def _free_gb(path: Path) -> float:
    return shutil.disk_usage(path).free / 1e9
