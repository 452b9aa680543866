"""The program of a run on a Ray cluster: a placement group for each copy of a role, an actor for each process.

`groups_of` is pure. `run` is the driver: the usual supervisor, which starts each process in an actor and, when the
process, its actor or its node dies, in a new actor of the same placement group, which Ray moves to another node.
Only this module imports Ray, and only in functions. A node's Python needs Ray; the roles run with `--python` in
`--workdir`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxroll import config as configs
from jaxroll.clock import Clock, MonotonicClock
from jaxroll.config import Config
from jaxroll.control import clusters, program, run_dir
from jaxroll.control.clusters import LaunchOptions, Program, Role
from jaxroll.control.live import open_view
from jaxroll.control.program import ProcessSpec
from jaxroll.control.supervisor import Supervisor
from jaxroll.errors import EXIT_FAILURE, ConfigError, one_line
from jaxroll.lifeline import PARENT_ENV
from jaxroll.rpc import protocol
from jaxroll.rpc.protocol import TOKEN_VARIABLE
from jaxroll.rpc.tls import TLS_VARIABLE
from jaxroll.run_paths import RunPaths

PLACED_S = 600.0  # a process waits this long for a node; autoscalers take minutes
HERE_S = 60.0
NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class RayProcess:
    """One process: its name and its line of shell."""

    name: str
    line: str
    index: int


@dataclass(frozen=True)
class PlacementGroup:
    """A placement group and its processes, one in each bundle; with `here` it is on the driver's node."""

    name: str
    strategy: str
    bundle: Mapping[str, float]
    processes: tuple[RayProcess, ...]
    here: bool = False


def groups_of(config: Config, program: Program, request: LaunchOptions) -> tuple[PlacementGroup, ...]:
    """The placement groups. A copy of a role is packed on one node; its hosts, if several, are spread over nodes."""
    clusters.check_scratch(request)
    found = []
    for role in program.roles:
        for copy in range(role.count):
            name = f"{role.name}-{copy}" if role.name in ("sampler", "actor") else role.name
            names = [name, *(f"{name}-{host}" for host in range(1, role.hosts))]
            first = copy if role.hosts == 1 else 0
            processes = tuple(
                RayProcess(each, _line(config, role, request, copy, host), first + host)
                for host, each in enumerate(names)
            )
            strategy = "STRICT_PACK" if role.hosts == 1 else "STRICT_SPREAD"
            found.append(
                PlacementGroup(
                    f"{program.name}-{name}", strategy, bundle(role, request), processes, here=role.name == "store"
                )
            )
    return tuple(found)


def bundle(role: Role, request: LaunchOptions) -> dict[str, float]:
    """The resources of one process. `accelerator` is gpu, gpu:TYPE, tpu or tpu:TYPE, with Ray's accelerator types."""
    kind, _, model = request.accelerator.partition(":")
    if kind not in ("", "gpu", "tpu"):
        remedy = "As in --accelerator=gpu:H100 or --accelerator=tpu:TPU-V5P."
        raise ConfigError("--accelerator", request.accelerator, "Ray has the resources GPU and TPU", remedy)
    if kind == "tpu" and role.hosts > 1:
        reason = "the hosts of a TPU slice must be placed as one"
        remedy = "Set it to 1, or use --on=tpu-vm or --on=jobset."
        raise ConfigError(f"placement.{role.name}_hosts", role.hosts, reason, remedy)
    if not (kind and role.devices):
        return {"CPU": 1.0}
    return {"CPU": 1.0, kind.upper(): float(role.devices)} | ({f"accelerator_type:{model}": 0.001} if model else {})


def _line(config: Config, role: Role, request: LaunchOptions, copy: int, host: int) -> str:
    """The line of shell, run as a child of `jaxroll.lifeline`, which dies with the actor."""
    if role.name == "store":  # under the lock of the driver, as its child
        return role.line()
    # Other roles are alone on their node: they find its devices themselves.
    bound = f"{PARENT_ENV}=$$ {request.python} -m jaxroll.lifeline env -u {PARENT_ENV} "
    warm = clusters.warm_start(config, role.command, request.run, bound) if role.before else ""
    own = [f"--run={request.run}/samplers/{copy}{f'-{host}' if host else ''}"] if role.name == "sampler" else []
    # The first hosts of two samplers may share a node: each sampler has a port of its own.
    meeting, port = f"--coordinator={clusters.FIRST}:{request.port + 2}", request.port + 2 + copy
    command = [f"--coordinator={clusters.FIRST}:{port}" if word == meeting else word for word in role.command]
    return f"unset {PARENT_ENV}; {warm}exec {clusters.line([*command, *own])}"


def files(config: Config, program: Program, request: LaunchOptions) -> dict[str, str]:
    """The placement groups as YAML, for reading."""
    shown = [
        {
            "placement_group": group.name,
            "strategy": group.strategy,
            "bundles": [dict(group.bundle)] * len(group.processes),
            **({"node": "that of the driver"} if group.here else {}),
            "actors": {process.name: process.line for process in group.processes},
        }
        for group in groups_of(config, program, request)
    ]
    where = {"cluster": request.address or "that of this node", "workdir": request.workdir, "placement_groups": shown}
    return {"ray.yaml": yaml.dump(where, Dumper=_Plain, sort_keys=False, width=1000)}


class _Plain(yaml.SafeDumper):
    """Dumper without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# --- in the cluster


class RoleProcess:
    """The actor of one process. The process dies with it, and its output is the actor's log."""

    # Ray pickles this class by value, so that the workers need not have JaxRoll: it uses nothing else of this module.

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen | None = None
        self._stopped = False

    def __repr__(self) -> str:
        return self._name  # the prefix of its lines in Ray's logs

    def address(self) -> str:
        """The address of its node."""
        import ray

        return ray.util.get_node_ip_address()

    def place(self) -> str:
        """Its node, for reading."""
        import ray

        return f"{self.address()}, node {ray.get_runtime_context().get_node_id()[:8]}"

    def run(self, command: list[str], env: dict[str, str], workdir: str | None, first: str) -> tuple[int, str]:
        """Run the process to its end: its exit code and the last lines of its output.

        `first` is the address of the first host of its role.
        """
        here = self.address()
        hosts = {"HOST_NAME": here, "LEARNER_HOST": first, "FIRST_HOST": first}
        env = {**os.environ, **env, **hosts, "JAXROLL_PARENT": str(os.getpid())}
        tail: deque[str] = deque(maxlen=50)
        if self._stopped:
            return 0, ""
        # This thread lives as long as the process, as its parent-death signal needs.
        process = subprocess.Popen(
            command,
            env=env,
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._process = process

        def copy() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                tail.append(line)
                print(line, end="", flush=True)

        copier = threading.Thread(target=copy, daemon=True)
        copier.start()
        code = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers that it left
        copier.join(timeout=5)
        return code, "".join(tail)

    def terminate(self) -> None:
        """Ask the process to finish its work and end."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


class RayCluster:
    """The placement groups of one run in a Ray cluster, and the actors in them."""

    def __init__(self, groups: tuple[PlacementGroup, ...], env: Mapping[str, str], request: LaunchOptions) -> None:
        ray = _ray()
        try:
            ray.init(address=request.address or "auto", namespace=request.name, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as error:
            why, remedy = f"no Ray cluster: {one_line(str(error), 200)}", "Start one with `ray start --head`."
            raise ConfigError("--address", request.address, why, remedy) from error
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        own = ray.get_runtime_context()
        self._env = {**env, "STORE_HOST": ray.util.get_node_ip_address()}
        self._workdir = None if _uploaded(own) and request.workdir == "." else os.path.abspath(request.workdir)
        self._python = request.python
        self._where: dict[str, tuple[PlacementGroup, Any, int]] = {}
        self._groups = []
        for group in groups:
            here = [{NODE_LABEL: own.get_node_id()}] if group.here else None
            placed = ray.util.placement_group(
                [dict(group.bundle)] * len(group.processes),
                strategy=group.strategy,
                name=group.name,
                bundle_label_selector=here,
            )
            self._groups.append(placed)
            if group.here and not placed.wait(HERE_S):
                why, remedy = f"this node has no {dict(group.bundle)} free for the store", "Run this on another node."
                raise ConfigError("--on", "ray", why, remedy)
            self._where |= {process.name: (group, placed, at) for at, process in enumerate(group.processes)}
        self._leaders: dict[str, Any] = {}  # by group, the address of its first process
        self._starts: Counter[str] = Counter()

    def start(self, spec: ProcessSpec, log: Path, environ: Mapping[str, str]) -> ActorChild:
        """Start a process in a new actor; `environ`, that of the driver, stays here."""
        del environ
        ray = _ray()
        group, placed, at = self._where[spec.name]
        self._starts[spec.name] += 1
        resources = dict(group.bundle)
        actor = (
            ray.remote(RoleProcess)
            .options(
                name=f"{group.name}:{spec.name}:{self._starts[spec.name]}",
                max_concurrency=2,
                num_cpus=resources.pop("CPU"),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(placed, at),
            )
            .remote(spec.name)
        )
        if at == 0:
            self._leaders[group.name] = actor.address.remote()
        process = group.processes[at]
        command = [self._python, "-m", "jaxroll.lifeline", "bash", "-c", process.line]
        env = {**self._env, **spec.env, "ROLE_INDEX": str(process.index)}
        end = actor.run.remote(command, env, self._workdir, self._leaders[group.name])
        return ActorChild(actor, end, log, f"{dict(group.bundle)}")

    def close(self) -> None:
        """Remove the placement groups, which ends every actor, and leave the cluster."""
        ray = _ray()
        for group in self._groups:
            ray.util.remove_placement_group(group)
        ray.shutdown()


class ActorChild:
    """A process in an actor, for the supervisor. `cause` is the reason of an end that the process did not choose."""

    def __init__(self, actor: Any, end: Any, log: Path, wants: str, clock: Clock | None = None) -> None:
        self._actor, self._end, self._log, self._wants = actor, end, log, wants
        self._clock = clock or MonotonicClock()
        self._placing, self._place = actor.place.remote(), ""
        self._due_s = self._clock.now_s() + PLACED_S
        self._code: int | None = None
        self.pid: int | None = None  # known on its node only
        self.cause = ""

    def poll(self) -> int | None:
        """The exit code once the process, its actor or its node has ended, else None."""
        if self._code is None and (found := self._ended()) is not None:
            self._code, text = found
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as file:
                file.write(f"{text}{self.cause}\n")
            self.kill()
        return self._code

    def _ended(self) -> tuple[int, str] | None:
        ray = _ray()
        try:
            if not self._place and ray.wait([self._placing], timeout=0)[0]:
                self._place = ray.get(self._placing)
            if ray.wait([self._end], timeout=0)[0]:
                found = ray.get(self._end)
                return found if isinstance(found, tuple) else self._lost("its end was not reported")
        except ray.exceptions.ActorUnavailableError:
            # Ray does not know yet whether its node is lost, and would place the next actor there: ask until it does.
            self._placing = self._end = self._actor.place.remote()
        except ray.exceptions.RayError as error:
            return self._lost(type(error).__name__, f"{error}\n")
        if not self._place and self._clock.now_s() > self._due_s:
            self.cause = f"no node of the cluster had {self._wants} free for {PLACED_S:g} s"
            return EXIT_FAILURE, ""
        return None

    def _lost(self, why: str, text: str = "") -> tuple[int, str]:
        self.cause = f"Ray lost it on {self._place or 'a node that was just chosen'}: {why}"
        return EXIT_FAILURE, text

    def terminate(self) -> None:
        """Ask the process to finish its work and end."""
        self._actor.terminate.remote()

    def kill(self) -> None:
        """Kill the actor, and the process with it."""
        _ray().kill(self._actor)


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError("--on", "ray", "Ray is not installed", "pip install 'jaxroll[ray]'") from error
    return ray


def _uploaded(context: Any) -> bool:
    """True in a job with a working directory, of which every node has its own copy."""
    return bool(context.runtime_env.get("working_dir"))


def run(config: Config, request: LaunchOptions, words: Sequence[str]) -> int:
    """Run `config` in the cluster from here, the store's node; the exit code. The run can be inspected in --scratch.

    `words` are the command line, for the run's folder.
    """
    _ray()
    if request.address.startswith("ray://"):
        reason = "a Ray client is on no node, and the store is on the driver's"
        remedy = "Run this on a node of the cluster, or with `ray job submit`."
        raise ConfigError("--address", request.address, reason, remedy)
    groups = groups_of(config, clusters.program_of(config, request), request)
    path = run_dir.shared(request.scratch, config, words)
    specs = [_spec(process, group, path) for group in groups for process in group.processes]
    with run_dir.locked(path), contextlib.ExitStack() as closing:
        env = {TOKEN_VARIABLE: protocol.create(path)}
        env |= {} if request.insecure else {TLS_VARIABLE: f"{request.run}/tls"}
        cluster = RayCluster(groups, env, request)
        closing.callback(cluster.close)
        view = closing.enter_context(contextlib.closing(open_view(path, configs.to_dict(config))))
        return Supervisor(specs, path, config.supervisor, view, leader="learner", start=cluster.start).run()


def _spec(process: RayProcess, group: PlacementGroup, path: Path) -> ProcessSpec:
    gang = group.processes[0].name if len(group.processes) > 1 else ""
    role, ready = program.role_of(process.name), RunPaths(path).store_address
    if group.here:
        env = program.common_env(str(program.default_cache_dir(path, os.environ))) | program.cpu_env()
        return ProcessSpec(process.name, role, (), env, ready_file=ready)
    return ProcessSpec(process.name, role, (), after=("store",), gang=gang)
