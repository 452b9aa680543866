"""The processes of a run as a value: the command, arguments, environment and devices of each.

`build` is pure: the supervisor runs its answer, the launchers print it, tests compare it with a golden file.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxroll import lifeline
from jaxroll.config import Config, RoleArgs
from jaxroll.config.derived import (
    COLOCATED,
    LEADERS,
    actor_names,
    device_processes,
    leader,
    learner_names,
    learner_samplers,
    memory_fractions,
    roles_with_devices,
)
from jaxroll.config.rules import GPU_SHARE, Inventory, check_inventory
from jaxroll.errors import ConfigError
from jaxroll.rpc.protocol import address
from jaxroll.run_paths import RunPaths


@dataclass(frozen=True)
class ProcessSpec:
    """One process. `env` is added to the parent's; `ready_file` exists once the process answers calls.

    `after` names processes whose ready file must exist before this one is started for the first time. Processes of one
    `gang` live together: when one of them dies, all are started again.
    """

    name: str
    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    ready_file: Path | None = None
    gang: str = ""
    optional: bool = False  # no end of this process ends the run, and it is not started again


def build(
    config: Config,
    run_dir: Path,
    inventory: Inventory,
    *,
    python: str,
    cache_dir: Path,
    visible_gpus: Sequence[str] = (),
) -> tuple[ProcessSpec, ...]:
    """The processes of the run in `run_dir` in starting order: store, learner, samplers, evaluator, actors. With
    `placement.colocated` one process is learner, samplers and evaluator; with `run.deterministic` also the store.

    Each reads its config from `run_dir/run.json` and finds the store through `run_dir/store.addr`.
    """
    check_stores(config)
    common = common_env(str(cache_dir))
    command = (python, "-m", "jaxroll")
    devices = device_env(config, inventory, visible_gpus)
    devices |= {name: cpu_env() for name in actor_names(config)}
    store = ProcessSpec(
        "store",
        "store",
        (*command, "store", f"--run={run_dir}"),
        common | cpu_env() | _priority("store", inventory),
        ready_file=RunPaths(run_dir).store_address,
    )
    others = [
        ProcessSpec(
            name,
            role_of(name),
            (*command, *role_words(name), *_meeting(name, config), f"--run={run_dir}"),
            common | env | _priority(name, inventory),
            ("store",),
            gang=gang(name, config),
        )
        for name, env in devices.items()
    ]
    if config.run.deterministic:  # its one process has the store
        return tuple(replace(each, after=()) for each in others)
    return (store, *others)


def gang(process: str, config: Config) -> str:
    """The role on several hosts that this process is a part of; '' if its role has one host."""
    role = process.partition("-")[0]
    if role == "sampler" and config.placement.sampler_hosts > 1:
        return "-".join(process.split("-")[:2])
    return role if process in (learners := learner_names(config)) and len(learners) > 1 else ""


def _meeting(name: str, config: Config) -> tuple[str, ...]:
    """The meeting point of a role's processes on this machine: a file in the run's folder."""
    return ("--coordinator=127.0.0.1:0",) if gang(name, config) else ()


def _priority(name: str, inventory: Inventory) -> Env:
    """On a CPU all roles yield to the learner, and it to none, overriding the environment."""
    if inventory.platform != "cpu":
        return {}
    return {lifeline.NICE_ENV: "" if role_of(name) in LEADERS else str(lifeline.NICE)}


def forked(specs: Sequence[ProcessSpec], run_dir: Path, option: str) -> tuple[ProcessSpec, ...]:
    """`specs` of a run whose learner forks it first, by the `option` for that; the others wait until it has, those in
    its process as well. A finished run would turn samplers away before.
    """
    ready = RunPaths(run_dir).forked
    found = []
    for spec in specs:
        if spec.name in LEADERS:
            spec = replace(spec, argv=(*spec.argv, option), ready_file=ready)
        elif spec.role not in ("store", "learner"):
            spec = replace(spec, after=(*spec.after, "learner"))
        found.append(spec)
    return tuple(found)


def reachable(specs: Sequence[ProcessSpec], config: Config, host: str, *, insecure: bool) -> tuple[ProcessSpec, ...]:
    """`specs` of a run that samplers on other machines can join: store and learner listen on `host`."""
    if leader(config) == COLOCATED:
        raise ConfigError(
            "--host",
            host,
            "placement.colocated keeps the weights in one process, so none can join",
            "Set placement.colocated to False, or leave --host out.",
        )
    called = {"store": f"--store={address(host, 0)}", "learner": f"--host={host}", "sampler": f"--host={host}"}
    plain = ("--insecure",) if insecure else ()
    return tuple(
        replace(spec, argv=(*spec.argv, called[spec.role], *plain)) if spec.role in called else spec for spec in specs
    )


def compilers(
    config: Config,
    run_dir: Path,
    inventory: Inventory,
    *,
    python: str,
    cache_dir: Path,
    names: Sequence[str],
    visible_gpus: Sequence[str] = (),
) -> tuple[ProcessSpec, ...]:
    """Processes that compile the programs of the roles `names` into the cache, each on the devices of its role.

    Further samplers run the programs of the first. Left out: the one process of a colocated run, and roles on several
    hosts, whose programs need all of them. On a CPU they yield to the warm start.
    """
    devices = device_env(config, inventory, visible_gpus)
    names = [name for name in names if name in devices and not gang(name, config)]
    common = common_env(str(cache_dir))
    if inventory.platform == "cpu":
        common |= {lifeline.NICE_ENV: str(lifeline.NICE)}
    return tuple(
        ProcessSpec(
            f"compile-{role_of(name)}",
            "compile",
            (python, "-m", "jaxroll", "compile", f"--run={run_dir}", f"--role={role_of(name)}"),
            common | devices[name],
            optional=True,
        )
        for name in names
    )


def role_of(name: str) -> str:
    """`sampler` of `sampler-0`."""
    return name.partition("-")[0]


def module_of(role: str, config: Config) -> str:
    """The module in `jaxroll.roles` of a process of `role`."""
    if role == "learner" and learner_samplers(config):
        return COLOCATED
    return "store" if role == "feeder" else role


STANDBY = "store-1"


def store_names(config: Config) -> tuple[str, ...]:
    """The store, and its standby if there is one."""
    return ("store", STANDBY) if config.store.standby else ("store",)


def check_stores(config: Config) -> None:
    """Refuse a standby, which most launchers do not start."""
    if config.store.standby:
        reason = "no standby is started here"
        raise ConfigError(
            "store.standby", True, reason, "Use launch --on=ssh, or start the roles by hand (docs/machines.md)."
        )


def checked_host(args: RoleArgs, options: argparse.Namespace) -> RoleArgs:
    """`args`. ConfigError for a process that the role does not have."""
    if options.command == "store" and bool(args.peer) != args.config.store.standby:
        remedy = "Give both stores --peer=HOST:PORT and store.standby=True, or neither."
        raise ConfigError("--peer", args.peer, f"the config has store.standby={args.config.store.standby}", remedy)
    if options.command == "store" and args.index > bool(args.peer):
        remedy = "Use 0 for the one that begins the run, and 1 for its standby (store.standby)."
        raise ConfigError("--index", args.index, "there is no such store", remedy)
    if options.command not in ("learner", "sampler"):
        return args
    if options.command == "sampler" and f"sampler-{args.index}" in learner_samplers(args.config):
        reason = "it is in the learner's process (placement.learner_samplers)"
        raise ConfigError("--index", args.index, reason, "Start the learner.")
    hosts, option = args.hosts(options.command), "--index" if options.command == "learner" else "--process"
    if not 0 <= hosts.index < hosts.count:
        raise ConfigError(option, hosts.index, f"the run has {hosts.key}={hosts.count}", "They are numbered from 0.")
    return args


def role_words(name: str) -> tuple[str, ...]:
    """The command-line words that say which role, as `sampler --index=0` of `sampler-0`, and which host of it."""
    role, *numbers = name.split("-")
    return (role, *(f"--{word}={number}" for word, number in zip(("index", "process"), numbers, strict=False)))


def offline_env(
    config: Config, inventory: Inventory, cache_dir: Path, visible_gpus: Sequence[str] = ()
) -> dict[str, str]:
    """Environment of one JAX process outside a run (warm start, generate): the learner's devices, all to itself."""
    common = common_env(str(cache_dir))
    config = replace(config, placement=replace(config.placement, learner_hosts=1, sampler_hosts=1))
    devices = device_env(config, inventory, visible_gpus)
    return common | devices[leader(config)]


def default_cache_dir(run_dir: Path, environ: Mapping[str, str]) -> Path:
    """The shared compilation cache: JAXROLL_CACHE, else the folder set for JAX, else `.cache/jax` next to `runs/`."""
    named = environ.get("JAXROLL_CACHE") or environ.get("JAX_COMPILATION_CACHE_DIR")
    if named:
        return Path(named)
    above = Path(os.path.abspath(run_dir)).parent
    return (above.parent if above.name == "runs" else above) / ".cache" / "jax"


# --- placement: devices per role as environment variables
#
# docs/design.md, "Placement", has the reasons. The names are those of the process list: learner, sampler-0, …,
# evaluator.

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
    for name in wanted.keys() & {leader(config), *learner_names(config)}:
        envs[name] |= HUGE_PAGES
    return envs


def cpu_env(devices: int = 1, threads: int = 1) -> Env:
    """`threads` worth of CPU that looks like `devices` devices.

    NPROC fixes XLA's thread pool, so that the bits do not depend on the visible cores.
    """
    count = str(threads)
    flags = [
        f"--xla_force_host_platform_device_count={devices}",
        f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={CPU_COLLECTIVE_WARN_S}",
        f"--xla_cpu_collective_call_terminate_timeout_seconds={CPU_COLLECTIVE_ABORT_S}",
        f"--xla_cpu_collective_timeout_seconds={CPU_COLLECTIVE_ABORT_S}",
    ]
    return {
        "JAX_PLATFORMS": "cpu",
        "NPROC": count,
        "XLA_FLAGS": " ".join(flags),
        "OMP_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
    }


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
        "PYTHONUNBUFFERED": "1",  # a killed process leaves all that it printed in the log
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_COMPILATION_CACHE_DIR": cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def child_env(environ: Mapping[str, str], env: Mapping[str, str]) -> Env:
    """The environment of a process with the variables `env`, started from `environ`.

    `env` replaces variables of `environ`, but the flags in XLA_FLAGS are those of both. XLA takes the last value of a
    flag, so those of `env` win.
    """
    flags = " ".join(given["XLA_FLAGS"] for given in (environ, env) if given.get("XLA_FLAGS"))
    return {**environ, **env} | ({"XLA_FLAGS": flags} if flags else {})


# --- accelerators of this machine, found without starting JAX (which would take them)

PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
_TPU_DEVICES = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def find_inventory(config: Config) -> Inventory:
    """The devices the run will use; ConfigError when its roles do not fit them."""
    inventory = find(config.placement.platform)
    check_inventory(config, inventory)
    return inventory


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
    return sum(
        _read(device / "vendor") == _GOOGLE and _read(device / "device") in _TPU_DEVICES for device in pci.glob("*")
    )


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


def place_alone(role: str, args: RoleArgs) -> None:
    """Set what the supervisor would have set for a role that has this machine's accelerator to itself.

    JAX is not loaded yet. Variables that the user has set stay.
    """
    cache_dir = default_cache_dir(args.run_dir, os.environ)
    env = common_env(str(cache_dir))
    inventory = find(args.config.placement.platform)
    known = roles_with_devices(args.config) | device_processes(args.config)
    devices = known.get(role)
    if role == "sampler":  # a run may start with none
        devices = args.config.sampler.mesh.devices // args.config.placement.sampler_hosts
    if devices is None:
        env |= cpu_env()
    elif inventory.platform == "cpu":
        env |= cpu_env(devices)
    os.environ.update(child_env(env, os.environ))
