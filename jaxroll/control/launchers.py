"""The same roles on other machines: host, command and environment per role, as values and as shell lines.

A host with one role gives it all its devices; a host with several splits them as `placement` does. The store listens
on loopback when everything is on one host. launch/*.sh run the lines, and so does a supervisor with `--on=ssh`; other
launchers get files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import socket
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from jaxroll import disk
from jaxroll.config import Config
from jaxroll.config.derived import LEADERS, actor_names, device_processes, memory_fractions, sampler_names
from jaxroll.config.parsing import nearest
from jaxroll.config.rules import GPU_SHARE, Inventory, check_inventory
from jaxroll.control import child, clusters, on_ray, program
from jaxroll.control.program import STANDBY, ProcessSpec, gang, role_of, role_words
from jaxroll.errors import ConfigError, InfraError
from jaxroll.lifeline import CONNECTION, PARENT_ENV
from jaxroll.rpc import protocol
from jaxroll.rpc.protocol import TOKEN_VARIABLE
from jaxroll.rpc.tls import TLS_VARIABLE
from jaxroll.run_paths import RunPaths

LOCAL = "localhost"
CACHE = ".cache/jax"
LAUNCHERS = ("ray", *clusters.LAUNCHERS)  # which get the program of `clusters.program_of`
KNOWN = ("local", "ssh", *LAUNCHERS)  # what `--on` may name, in addition to hosts


@dataclass(frozen=True)
class Target:
    """The hosts of the roles, and the way to reach them. `hosts` maps process names (or roles) to hosts."""

    kind: str  # tpu_vm | gpu
    config_file: str
    overrides: Sequence[str] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)
    run: str = "runs/launched"
    workdir: str = "."
    python: str = "python3"
    port: int = 7077
    devices_per_host: int = 0
    gpu_memory_mb: int = 0
    zone: str = ""
    project: str = ""
    insecure: bool = False
    tls: str = ""  # the folder with certificates, the same on every host
    new_log: bool = False

    def host(self, name: str) -> str:
        """The host of process `name`: named itself, or by its role, else this machine."""
        return self.hosts.get(name) or self.hosts.get(name.partition("-")[0]) or LOCAL


@dataclass(frozen=True)
class Launch:
    """One role on one host, or with `workers` "all" on every host of a TPU slice."""

    name: str
    host: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    workers: str = "0"


LISTED = ("ssh", "tpu_vm", "gpu")  # roles are started by the lines of `plan`; the last two are kinds of --target
ALL = (*LISTED, *LAUNCHERS)
# Default, placeholder, help and readers of each option; `launcher_of` refuses it elsewhere.
OPTIONS: Mapping[str, tuple[str | int | bool, str, str, tuple[str, ...]]] = {
    "name": ("", "NAME", "the name of the job (default: run.name)", LAUNCHERS),
    "accelerator": ("", "TYPE", "as the launcher names it: gpu:h100 (Slurm), gpu or tpu:TYPE:TOPOLOGY (JobSet), H100 "
                    "(SkyPilot), v5litepod-8 (TPU VM), gpu:H100 or tpu:TPU-V5P (Ray); none: CPU hosts", LAUNCHERS),
    "address": ("", "HOST:PORT", "the Ray cluster (default: the one of this node)", ("ray",)),
    "image": ("", "IMAGE", "the container image of pods", ("jobset",)),
    "queue": ("", "NAME", "the partition or local queue", ("slurm", "jobset")),
    "scratch": ("", "DIR", "a folder on the store's own disk, where RUN is shared", ("ray", "slurm", "tpu-vm")),
    "runtime": ("", "VERSION", "the software version of TPU VMs", ("tpu-vm",)),
    "zone": ("", "ZONE", "zone of the TPU VMs", ("tpu-vm", "tpu_vm")),
    "project": ("", "PROJECT", "project of the TPU VMs", ("tpu-vm", "tpu_vm")),
    "tls": ("", "DIR", "folder of the certificates on each host", LISTED),
    "workdir": (".", "DIR", "the checkout on the hosts (default: .)", ALL),
    "python": ("python3", "FILE", "the interpreter on the hosts (default: python3)", ALL),
    "port": (7077, "PORT", "the port of the store (default: 7077)", ALL),
    "devices-per-host": (0, "N", "TPU chips or GPUs of a host that runs several roles", LISTED),
    "gpu-memory-mb": (0, "MB", "memory of one GPU that several roles share", ("ssh", "gpu")),
    "new-log": (False, "", "the store's log is lost: begin a new one at the learner's newest checkpoint", ("ssh",)),
    "spot": (False, "", "samplers use preemptible machines", ("jobset", "skypilot", "tpu-vm")),
    "insecure": (False, "", "send plain text between the hosts, on a trusted network", ALL),
}  # fmt: skip


def add_options(one: argparse.ArgumentParser) -> None:
    """Add the options of `jaxroll launch`; `launcher_of` sets their defaults."""
    one.add_argument("--target", choices=("tpu_vm", "gpu"), help="print lines for this kind of machine (launch/*.sh)")
    one.add_argument(
        "--on",
        action="append",
        default=[],
        metavar="LAUNCHER|ROLE=HOST",
        help=f"{', '.join(KNOWN[:-1])} or {KNOWN[-1]}; or the host of a role, repeatable: store=a, "
        "learner=b, sampler-0=c",
    )
    for name, (default, metavar, text, readers) in OPTIONS.items():
        text += "" if readers == ALL else f" [{', '.join(map(_spelled, readers))}]"
        if default is False:
            one.add_argument(f"--{name}", action="store_true", default=None, help=text)
        else:
            one.add_argument(f"--{name}", type=type(default), metavar=metavar, help=text)
    one.add_argument("--dry-run", action="store_true", help="print files or commands, and start nothing")


def _spelled(reader: str) -> str:
    return f"--target={reader}" if reader in ("tpu_vm", "gpu") else f"--on={reader}"


def _check_options(options: argparse.Namespace, launcher: str) -> None:
    """Set the defaults of options that were not given. ConfigError for one that the launcher (or target) ignores."""
    reader = launcher or options.target
    given = {name: getattr(options, name.replace("-", "_")) for name in OPTIONS}
    hosts = [word for word in options.on if "=" in word]
    if launcher and options.target:
        raise ConfigError("--target", options.target, f"--on={launcher} does not read it", "Leave one of them out.")
    if hosts and reader not in LISTED:
        raise ConfigError("--on", hosts[0], f"{_spelled(reader)} chooses the hosts", "Leave it out, or use --on=ssh.")
    if options.tls and options.insecure:
        raise ConfigError("--insecure", True, "--tls names certificates", "Leave one of them out.")
    for name, (default, _, _, readers) in OPTIONS.items():
        if given[name] is None:
            setattr(options, name.replace("-", "_"), default)
        elif reader not in readers:
            remedy = f"Leave it out; it is for {', '.join(map(_spelled, readers))}."
            raise ConfigError(f"--{name}", given[name], f"{_spelled(reader)} does not read it", remedy)


def target_of(options: argparse.Namespace) -> Target:
    """The target that the command line of `jaxroll launch` describes."""
    hosts = {}
    for word in options.on:
        if word in KNOWN:
            continue
        name, equals, host = word.partition("=")
        if not equals or not host:
            raise ConfigError("--on", word, "not ROLE=HOST", "Write for example --on learner=tpu-a.")
        hosts[name] = host
    if options.target == "tpu_vm" and any(host != LOCAL for host in hosts.values()) and not options.zone:
        raise ConfigError("--zone", "", "TPU VMs are found by their zone", "Add --zone=ZONE.")
    return Target(
        options.target or "gpu",
        options.config,
        tuple(options.overrides),
        hosts,
        options.run or Target.run,
        options.workdir,
        options.python,
        options.port,
        options.devices_per_host,
        options.gpu_memory_mb,
        options.zone,
        options.project,
        options.insecure,
        options.tls,
        options.new_log,
    )


def plan(config: Config, target: Target) -> list[Launch]:
    """The processes to start on each host: all roles and actors. ConfigError if a host has too few devices."""
    stores = program.store_names(config)
    names = (*stores, *_with_devices(config, target), *actor_names(config))
    unknown = [name for name in target.hosts if name not in names and name not in {n.partition("-")[0] for n in names}]
    if unknown:
        raise ConfigError("--on", unknown[0], "no such role in this config", f"Roles: {', '.join(names)}.")
    if len({target.host(name) for name in stores}) < len(stores):
        reason, named = "the standby is for the loss of the store's machine", f"{STANDBY}={target.host(STANDBY)}"
        raise ConfigError("--on", named, reason, f"Add --on {STANDBY}=NAME, the name of another machine.")
    _check_several_hosts(config, target)
    envs = _device_envs(config, target)
    common = program.common_env(CACHE)
    spread = len({target.host(name) for name in names}) > 1
    if spread and not (target.tls or target.insecure):
        raise ConfigError(
            "--on",
            " ".join(f"{n}={h}" for n, h in target.hosts.items()),
            "plain text between machines",
            "Make certificates with `jaxroll tls RUN --host=NAME` (the store's and the learner's hosts), "
            "copy them to the hosts and add --tls=DIR; or add --insecure on a net you trust. Every host "
            f"needs the run's secret in {TOKEN_VARIABLE}.",
        )
    _check_reached(config, target, names)
    own = {name: f"{target.host(name) if spread else '127.0.0.1'}:{target.port}" for name in stores}
    address = ",".join(own.values())
    if spread and target.tls:
        common = {**common, TLS_VARIABLE: target.tls}
    between = _words_between(config, target) if spread else {}
    found = [
        _launch(name, target, common | envs[name], own.get(name, address), between.get(name, ())) for name in names
    ]
    if target.kind == "tpu_vm":
        return [replace(one, workers="all") if gang(one.name, config) else one for one in found]
    return found


def _with_devices(config: Config, target: Target) -> dict[str, int]:
    """Devices of each process that is started by itself: on a TPU slice one line starts a role on all its hosts."""
    found = device_processes(config)
    if target.kind == "tpu_vm":
        return {name: count for name, count in found.items() if gang(name, config) in ("", name)}
    return found


def _gangs(config: Config) -> dict[str, list[str]]:
    """The processes of each role on several hosts."""
    found: dict[str, list[str]] = {}
    for name in device_processes(config):
        if role := gang(name, config):
            found.setdefault(role, []).append(name)
    return found


def _check_several_hosts(config: Config, target: Target) -> None:
    """Check that each process of a role on several hosts has one: named for GPUs, those of its slice for a TPU."""
    where = [target.host(name) for name in _with_devices(config, target)]
    for role, names in _gangs(config).items():
        hosts, first = len(names), target.host(role)
        if target.kind == "tpu_vm" and (first == LOCAL or where.count(first) > 1):
            reason = f"a {role_of(role)} of {hosts} hosts takes a TPU slice for itself"
            raise ConfigError("--on", first, reason, f"Add --on {role}=NAME, and give the other roles another.")
        theirs = {target.host(name) for name in names}
        if target.kind == "gpu" and (LOCAL in theirs or len(theirs) < hosts):
            remedy = f"Name each: {' '.join(f'--on {name}=HOST' for name in names)}."
            raise ConfigError("--on", first, f"a {role_of(role)} of {hosts} hosts takes that many", remedy)


def _check_reached(config: Config, target: Target, names: Sequence[str]) -> None:
    """Refuse the name of the loopback for a role that roles on other machines call."""
    others = [host for name in names if (host := target.host(name)) != LOCAL and not protocol.is_loopback(host)]
    called = (*program.store_names(config), "learner", *(sampler_names(config) if actor_names(config) else ()))
    for name in called:
        if others and name in names and target.host(name) == LOCAL:
            remedy = f"Add --on {name}=NAME, the name of its machine in the network. It may be this one."
            raise ConfigError("--on", f"{name}={LOCAL}", f"the roles on {others[0]} cannot reach it", remedy)


def _words_between(config: Config, target: Target) -> dict[str, tuple[str, ...]]:
    """The options by which the roles of different hosts find each other, by role; only a called role listens."""
    stores = program.store_names(config)
    peers = {
        name: tuple(f"--peer={target.host(one)}:{target.port}" for one in stores if one != name) for name in stores
    }
    called = {**peers, "learner": (f"--host={target.host('learner')}",)}  # samplers fetch its weights
    if actors := actor_names(config):  # they ask the samplers
        ports = {name: target.port + 1 + index for index, name in enumerate(sampler_names(config))}
        called |= {name: (f"--host={target.host(name)}", f"--port={port}") for name, port in ports.items()}
        asked = tuple(f"--sampler={target.host(name)}:{port}" for name, port in ports.items())
    else:
        asked = ()
    if target.kind == "gpu":  # on TPUs JAX finds out where the hosts of a role meet
        for role, names in _gangs(config).items():
            offset = 1 if role == "learner" else 2 + sampler_names(config).index(role)
            meeting = f"--coordinator={target.host(role)}:{target.port + len(sampler_names(config)) + offset}"
            called |= {name: (*called.get(name, ()), meeting) for name in names}
    insecure = () if target.tls else ("--insecure",)
    return {name: (*words, *insecure) for name, words in called.items()} | dict.fromkeys(actors, asked)


def _launch(name: str, target: Target, env: Mapping[str, str], address: str, between: tuple[str, ...]) -> Launch:
    host = target.host(name)
    argv = [target.python, "-m", "jaxroll", *role_words(name), f"--config={target.config_file}"]
    argv += [*(f"--config.{text}" for text in target.overrides), f"--run={target.run}", f"--store={address}"]
    argv += ["--new-log"] if target.new_log and role_of(name) in LEADERS else []
    return Launch(name, host, (*argv, *between), env)


def _device_envs(config: Config, target: Target) -> dict[str, program.Env]:
    wanted = _with_devices(config, target)
    envs: dict[str, program.Env] = dict.fromkeys(
        (*program.store_names(config), *actor_names(config)), program.cpu_env()
    )
    if config.placement.platform == "cpu":
        return envs | {name: program.cpu_env(count, config.placement.cpu_threads) for name, count in wanted.items()}
    for host in dict.fromkeys(map(target.host, wanted)):
        here = {name: count for name, count in wanted.items() if target.host(name) == host}
        if target.kind == "tpu_vm":
            envs |= _tpu_host(config, here, host, target)
        else:
            envs |= _gpu_host(config, here, host, target)
    return envs


def _tpu_host(config: Config, here: Mapping[str, int], host: str, target: Target) -> dict[str, program.Env]:
    if len(here) == 1:  # the whole slice
        return {name: {"JAX_PLATFORMS": "tpu"} for name in here}
    if target.devices_per_host == 1:
        check_inventory(config, Inventory("tpu", chips=1))
    _fits(here, host, target)
    return program.tpu_env(here)


def _gpu_host(config: Config, here: Mapping[str, int], host: str, target: Target) -> dict[str, program.Env]:
    if len(here) == 1:
        return {name: {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{GPU_SHARE:.2f}"} for name in here}
    if target.devices_per_host != max(here.values()):
        _fits(here, host, target)
    elif set(here) == set(device_processes(config)):
        check_inventory(config, Inventory("gpu", target.devices_per_host, target.gpu_memory_mb))
    return program.gpu_env(here, memory_fractions(config), tuple(map(str, range(target.devices_per_host))))


def _fits(here: Mapping[str, int], host: str, target: Target) -> None:
    needed = sum(here.values())
    if target.devices_per_host < needed:
        spelled = ", ".join(f"{name} {count}" for name, count in here.items())
        reason = f"{host} must have {needed} ({spelled})"
        remedy = "Say how many it has, or use one host per role."
        raise ConfigError("--devices-per-host", target.devices_per_host, reason, remedy)


def text(config: Config, target: Target, *, dry_run: bool) -> str:
    """With `dry_run` a page to read; else one line of shell per role, to be run side by side."""
    launches = plan(config, target)
    return "\n\n".join(map(describe, launches)) if dry_run else "\n".join(shell_line(one, target) for one in launches)


def shown(config: Config, launcher: str, options: argparse.Namespace) -> str:
    """The processes of `local`, `ssh` or --target, for reading, or the lines that launch/*.sh run."""
    if launcher != "local":
        return text(config, target_of(options), dry_run=options.dry_run)
    run = Path(os.path.abspath(options.run or f"runs/{config.run.name}"))
    inventory, cache_dir = program.find(config.placement.platform), program.default_cache_dir(run, os.environ)
    specs = program.build(
        config, run, inventory, python=sys.executable, cache_dir=cache_dir, visible_gpus=program.visible_gpus()
    )
    return "\n\n".join(describe(Launch(spec.name, LOCAL, spec.argv, spec.env)) for spec in specs)


def describe(one: Launch) -> str:
    """Host, command and environment of one role, for reading."""
    env = "\n".join(f"    {key}={value}" for key, value in sorted(one.env.items()))
    host = one.host if one.workers == "0" else f"{one.host}, on all its workers"
    return f"{one.name}\n  host: {host}\n  command: {shlex.join(one.argv)}\n  environment:\n{env}"


def shell_line(one: Launch, target: Target, before: str = "") -> str:
    """The shell line that starts one role on its host, after `before`, and stays until the role ends."""
    remote = {PARENT_ENV: CONNECTION} if one.host != LOCAL and target.kind == "gpu" else {}
    assignments = [f"{key}={value}" for key, value in sorted({**one.env, **remote}.items())]
    inner = f"cd {shlex.quote(target.workdir)} && {before}exec env {shlex.join(assignments)} {shlex.join(one.argv)}"
    if one.host == LOCAL:
        return inner
    if target.kind == "tpu_vm":
        words = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", one.host, f"--worker={one.workers}"]
        words += [f"--zone={target.zone}"]
        words += [f"--project={target.project}"] if target.project else []
        return shlex.join([*words, f"--command={inner}"])
    return shlex.join(["ssh", "-tt", one.host, inner])  # -tt: closing the connection ends the role


# --- `--on=LAUNCHER`: the launcher starts the roles, and starts them again


def launcher_of(options: argparse.Namespace) -> str:
    """The launcher that `--on` names; '' with --target. It sets the defaults of all options.

    ConfigError for two launchers, none, or an unknown one, and for an option that the launcher does not read.
    """
    named = [word for word in options.on if "=" not in word]
    unknown = [word for word in named if word not in KNOWN]
    if unknown or len(named) > 1 or not (named or options.target):
        reason = "no such launcher" if unknown else "more than one launcher" if named else "no launcher is named"
        hint = nearest(unknown[0], KNOWN) if unknown else f"Launchers: {', '.join(KNOWN)}."
        raise ConfigError("--on", " ".join(unknown or named) or None, reason, hint)
    launcher = named[0] if named else ""
    _check_options(options, launcher)
    return launcher


def request_of(config: Config, options: argparse.Namespace) -> clusters.LaunchOptions:
    """The options, for a launcher other than local and ssh."""
    program.check_stores(config)
    given: dict[str, Any] = {one.name: getattr(options, one.name, None) for one in fields(clusters.LaunchOptions)}
    given |= {"config_file": options.config, "overrides": tuple(options.overrides), "name": _name(config, options)}
    given["run"] = options.run or Target.run
    return clusters.LaunchOptions(**given)


def files_of(config: Config, launcher: str, options: argparse.Namespace) -> dict[str, str]:
    """The files of a launcher other than local and ssh, by name; for Ray a description."""
    request = request_of(config, options)
    described = clusters.program_of(config, request)
    if launcher == "ray":
        return on_ray.files(config, described, request)
    return clusters.LAUNCHERS[launcher].render(described, request)


def _name(config: Config, options: argparse.Namespace) -> str:
    return options.name or config.run.name.replace("_", "-").lower()  # a DNS name, for Kubernetes and clouds


def hand_over(config: Config, launcher: str, options: argparse.Namespace, path: Path) -> int:
    """Write the launcher's files into RUN/launch, with mode 0600, and run its commands; the exit code of the last one.

    The run's secret is made if there is none. A dry run prints the files, which hold no secret. Ray gets no files.
    """
    if launcher == "ray" and not options.dry_run:
        options.scratch, options.run = os.path.abspath(options.scratch), str(path)
        return on_ray.run(config, request_of(config, options), options.words)
    files, folder = files_of(config, launcher, options), RunPaths(path).launch
    if options.dry_run:
        print("\n".join(f"# --- {name}\n{content}" for name, content in files.items()), end="")
        return 0
    path.mkdir(parents=True, exist_ok=True)
    with child.locked_if_possible(path):  # not for the commands: the store may start on this machine
        secret = protocol.create(path)
        if launcher == "jobset":
            files["secret.json"] = clusters.secret_manifest(_name(config, options), _secrets(path))
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            with disk.replaced(folder / name) as draft:
                draft.touch(mode=0o600)
                draft.write_text(content, encoding="utf-8")
    for command in clusters.LAUNCHERS[launcher].commands:
        words = [str(folder / word) if word in files else word for word in command]
        print(shlex.join(words), flush=True)
        if code := subprocess.run(words, env={**os.environ, TOKEN_VARIABLE: secret}, check=False).returncode:
            return code
    return 0


def _secrets(run_dir: Path) -> dict[str, bytes]:
    """Token and certificates of the run, by name; never the key of the authority."""
    paths = RunPaths(run_dir)
    found = {"token": paths.token, **{name: paths.tls / name for name in clusters.CERTIFICATES}}
    return {name: path.read_bytes() for name, path in found.items() if path.exists()}


def supervised(config: Config, target: Target) -> tuple[ProcessSpec, ...]:
    """The roles as processes of a supervisor here: shells, or ssh, whose end ends the role on the other side."""
    found, here, stores = [], _hosts_here(target), program.store_names(config)
    if local := [name for name in stores[1:] and stores if target.host(name) in here]:
        reason = "if this machine is lost, the roles end with this command"
        remedy = "Run it on another machine than the stores, such as the learner's."
        raise ConfigError("--on", f"{local[0]}={target.host(local[0])}", reason, remedy)
    for one in plan(config, target):
        if one.host in here:  # over ssh it would be refused: this command holds the lock of RUN
            one = replace(one, host=LOCAL)
        # Here the warm start is a child of the shell, with the learner's devices and under the lock of this command.
        own = f"env {shlex.join(f'{key}={value}' for key, value in sorted(one.env.items()))} {PARENT_ENV}=$$ "
        own = own if one.host == LOCAL else ""
        warm = clusters.warm_start(config, one.argv, target.run, own) if one.name == "learner" else ""
        shell = shell_line(one, target, warm)
        inner = shell if one.host == LOCAL else f"exec {shell}"
        command = (sys.executable, "-m", "jaxroll.lifeline", "bash", "-c", inner)
        found.append(ProcessSpec(one.name, program.role_of(one.name), command, gang=gang(one.name, config)))
    return tuple(found)


def _hosts_here(target: Target) -> tuple[str, ...]:
    """The names of this machine: that of a store's host, if its address can be listened on."""
    found = [LOCAL]
    for name in ("store", STANDBY):
        with contextlib.suppress(OSError), socket.create_server((target.host(name), 0)):
            found.append(target.host(name))
    return tuple(found)


def send_secrets(target: Target, run_dir: Path) -> None:
    """Copy token and certificates into the run's folder on every other host, through the standard input of ssh.

    InfraError if a host does not accept them.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:") as archive:
        for name, content in _secrets(run_dir).items():
            info = tarfile.TarInfo(name if name == "token" else f"tls/{name}")
            info.size, info.mode = len(content), 0o600
            archive.addfile(info, io.BytesIO(content))
    folder = shlex.quote(target.run)
    inner = f"umask 077 && cd {shlex.quote(target.workdir)} && mkdir -p {folder} && tar -xpf - -C {folder}"
    for host in sorted(set(target.hosts.values()) - set(_hosts_here(target))):
        done = subprocess.run(["ssh", host, inner], input=packed.getvalue(), capture_output=True, check=False)
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip()[-500:]
            raise InfraError(f"{host} does not accept the secrets of the run (exit code {done.returncode}): {why}")
