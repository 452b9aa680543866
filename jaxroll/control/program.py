"""The processes of a run as a value: the command, arguments and environment of each, and the processes before it.

`build` is pure: the supervisor runs its answer, the launchers print it, tests compare it with a golden file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxroll import lifeline
from jaxroll.config import Config
from jaxroll.config.derived import COLOCATED, LEADERS, actor_names, learner_names
from jaxroll.config.rules import Inventory
from jaxroll.control import placement
from jaxroll.run_paths import RunPaths


@dataclass(frozen=True)
class ProcessSpec:
    """One process. `env` is added to the parent's; `ready_file` exists once the process can be spoken to.

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
    `placement.colocated` one process is learner, samplers and evaluator.

    Each reads its config from `run_dir/run.json` and finds the store through `run_dir/store.addr`.
    """
    common = placement.common_env(str(cache_dir))
    command = (python, "-m", "jaxroll")
    devices = placement.device_env(config, inventory, visible_gpus)
    devices |= {name: placement.cpu_env() for name in actor_names(config)}
    store = ProcessSpec(
        "store",
        "store",
        (*command, "store", f"--run={run_dir}"),
        common | placement.cpu_env() | _priority("store", inventory),
        ready_file=RunPaths(run_dir).store_address,
    )
    others = [
        ProcessSpec(
            name, role_of(name), (*command, *role_words(name), *_meeting(name, config), f"--run={run_dir}"),
            common | env | _priority(name, inventory), ("store",), gang="learner" if _meeting(name, config) else "",
        )
        for name, env in devices.items()
    ]  # fmt: skip
    return (store, *others)


def _meeting(name: str, config: Config) -> tuple[str, ...]:
    """The meeting point of a learner's processes on this machine: a file in the run's folder."""
    several = name in learner_names(config) and config.placement.learner_hosts > 1
    return ("--coordinator=127.0.0.1:0",) if several else ()


def _priority(name: str, inventory: Inventory) -> placement.Env:
    """On a CPU all roles yield to the learner, and it to none, overriding the environment."""
    if inventory.platform != "cpu":
        return {}
    return {lifeline.NICE_ENV: "" if role_of(name) in LEADERS else str(lifeline.NICE)}


def forked(specs: Sequence[ProcessSpec], run_dir: Path, at: str, *, name: str) -> tuple[ProcessSpec, ...]:
    """`specs` of a run whose learner forks it at the checkpoint `at` first; the others wait until it has, those in
    its process as well.

    A finished run would turn samplers away before. `name` tells the store that a learner that was started again means
    the same fork.
    """
    ready = RunPaths(run_dir).forked
    found = []
    for spec in specs:
        if spec.name in LEADERS:
            spec = replace(spec, argv=(*spec.argv, f"--fork={at}@{name}"), ready_file=ready)
        elif spec.role not in ("store", "learner"):
            spec = replace(spec, after=(*spec.after, "learner"))
        found.append(spec)
    return tuple(found)


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

    Further samplers run the programs of the first. Left out: the one process of a colocated run, and a learner of
    several hosts, whose programs need all of them. On a CPU they yield to the warm start.
    """
    devices = placement.device_env(config, inventory, visible_gpus)
    names = [name for name in names if name in devices and not (name == "learner" and learner_names(config)[1:])]
    common = placement.common_env(str(cache_dir))
    if inventory.platform == "cpu":
        common |= {lifeline.NICE_ENV: str(lifeline.NICE)}
    return tuple(
        ProcessSpec(
            f"compile-{role_of(name)}", "compile",
            (python, "-m", "jaxroll", "compile", f"--run={run_dir}", f"--role={role_of(name)}"),
            common | devices[name], optional=True,
        )
        for name in names
    )  # fmt: skip


def role_of(name: str) -> str:
    """`sampler` of `sampler-0`."""
    return name.partition("-")[0]


def role_words(name: str) -> tuple[str, ...]:
    """The command-line words that say which role: `sampler --index=0` of `sampler-0`."""
    role, _, index = name.partition("-")
    return (role, f"--index={index}") if index else (role,)


def offline_env(
    config: Config, inventory: Inventory, cache_dir: Path, visible_gpus: Sequence[str] = ()
) -> dict[str, str]:
    """Environment of one JAX process outside a run (warm start, generate): the learner's devices, all to itself."""
    common = placement.common_env(str(cache_dir))
    config = replace(config, placement=replace(config.placement, learner_hosts=1))
    devices = placement.device_env(config, inventory, visible_gpus)
    return common | devices[COLOCATED if config.placement.colocated else "learner"]


def default_cache_dir(run_dir: Path, environ: Mapping[str, str]) -> Path:
    """The shared compilation cache: JAXROLL_CACHE, else the folder set for JAX, else `.cache/jax` next to `runs/`."""
    named = environ.get("JAXROLL_CACHE") or environ.get("JAX_COMPILATION_CACHE_DIR")
    if named:
        return Path(named)
    above = Path(os.path.abspath(run_dir)).parent
    return (above.parent if above.name == "runs" else above) / ".cache" / "jax"
