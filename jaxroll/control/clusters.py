"""The program of a run for launchers that start and restart processes: Slurm, JobSet, SkyPilot, TPU queued resources.

`program_of` is the one description: commands, hosts, devices, restarts and spot capacity by role. Each launcher renders
it as files; nothing here starts a process. Samplers join the run (`jaxroll sampler --join`), so a launcher may add and
remove them at any time. Secrets are files with mode 0600 or secrets of the launcher, never arguments of a command.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from jaxroll.config import Config
from jaxroll.config.derived import actor_names, has_evaluator, has_warm_start, learner_names, own_samplers
from jaxroll.control.child import FORGIVEN_AFTER_S
from jaxroll.errors import EXIT_CLOSED, EXIT_CONFIG, ConfigError
from jaxroll.lifeline import ENDED_ENV
from jaxroll.rpc.protocol import TOKEN_VARIABLE
from jaxroll.rpc.tls import TLS_VARIABLE
from jaxroll.run_paths import RunPaths

# Variables that each launcher sets before the command; FIRST is the first host of a sampler on several.
STORE, LEARNER, HOST, INDEX = "${STORE_HOST}", "${LEARNER_HOST}", "${HOST_NAME}", "${ROLE_INDEX}"
FIRST = "${FIRST_HOST}"
POD_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
GROUP_INDEX = "metadata.annotations['jobset.sigs.k8s.io/job-index']"  # the copy of a role whose copies are jobs
SECRETS = "/etc/jaxroll"  # where pods see token and certificates
CERTIFICATES = ("ca.pem", "cert.pem", "key.pem", "client-cert.pem", "client-key.pem")
DRAIN_S = 20  # below the 25 s and 30 s that clouds give before they take a machine


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `jaxroll launch`; `accelerator` is named as the launcher names it; '' is for CPU hosts."""

    config_file: str
    overrides: Sequence[str] = ()
    name: str = "jaxroll"
    run: str = "runs/launched"
    scratch: str = ""  # a local disk for the store, where `run` is a shared folder
    workdir: str = "."
    python: str = "python3"
    port: int = 7077
    accelerator: str = ""
    image: str = ""
    queue: str = ""  # partition of Slurm, local queue of Kueue
    zone: str = ""
    project: str = ""  # of the TPU VMs; '': the one that gcloud is set to
    runtime: str = ""  # software version of TPU VMs
    spot: bool = False
    insecure: bool = False
    address: str = ""  # of the Ray cluster


@dataclass(frozen=True)
class Role:
    """`count` copies of a role, each on `hosts` hosts with `devices` each; `before` runs before its first start."""

    name: str
    command: tuple[str, ...]
    count: int = 1
    hosts: int = 1
    devices: int = 0
    spot: bool = False
    before: str = ""

    def line(self, *, replaces: bool = True, command: Sequence[str] = ()) -> str:
        """The line of shell that runs the role; with `replaces` the shell becomes its process."""
        return f"{self.before}{'exec ' if replaces else ''}{line(command or self.command)}"


@dataclass(frozen=True)
class Program:
    """The roles of a run, and how often a role is started again."""

    name: str
    roles: tuple[Role, ...]
    restarts: int


def program_of(config: Config, request: LaunchOptions) -> Program:
    """The program of `config`. ConfigError for a run that cannot be spread over hosts."""
    if config.placement.colocated:
        reason = "the launchers start a process for each role"
        raise ConfigError("placement.colocated", True, reason, "Set it to False, or use --on=local.")
    common = [f"--config={request.config_file}", *(f"--config.{text}" for text in request.overrides)]
    plain = ("--insecure",) if request.insecure else ()
    store = f"--store={STORE}:{request.port}"

    def command(role: str, *words: str, run: str = request.run) -> tuple[str, ...]:
        return (request.python, "-m", "jaxroll", role, *common, f"--run={run}", *words)

    hosts, of_sampler = len(learner_names(config)), config.placement.sampler_hosts
    coordinator = (f"--index={INDEX}", f"--coordinator={LEARNER}:{request.port + 1}") if hosts > 1 else ()
    join = (request.python, "-m", "jaxroll", "sampler", f"--join={STORE}:{request.port}", f"--drain={DRAIN_S}")
    join += (f"--process={INDEX}", f"--coordinator={FIRST}:{request.port + 2}") if of_sampler > 1 else ()
    serving = (f"--host={HOST}", *plain) if actor_names(config) else ()
    roles = [
        Role("store", command("store", f"--store=0.0.0.0:{request.port}", *plain, run=request.scratch or request.run)),
        Role("learner", command("learner", store, f"--host={LEARNER}", *coordinator, *plain), hosts=hosts,
             devices=config.learner.mesh.devices // hosts, before=warm_start(config, command("learner"), request.run)),
        Role("sampler", (*join, *serving), count=len(own_samplers(config)), hosts=of_sampler,
             devices=config.sampler.mesh.devices // of_sampler, spot=request.spot),
    ]  # fmt: skip
    if has_evaluator(config):
        roles.append(Role("evaluator", command("evaluator", store), devices=config.evaluator.mesh.devices))
    if actors := actor_names(config):
        roles.append(Role("actor", command("actor", store, f"--index={INDEX}"), count=len(actors)))
    return Program(request.name, tuple(roles), config.supervisor.max_restarts)


def line(command: Sequence[str]) -> str:
    """The command as a line of shell; words with a variable of the launcher keep it."""
    return " ".join(f'"{word}"' if "${" in word else shlex.quote(word) for word in command)


def warm_start(config: Config, learner: Sequence[str], run: str, prefix: str = "") -> str:
    """The shell's beginning of the learner's line that makes the warm start once; '' if the run has none.

    `learner` is the learner's command. A learner of several hosts does not make it (docs/machines.md).
    `prefix` is shell, put in front of the command.
    """
    if not has_warm_start(config) or len(learner_names(config)) > 1:
        return ""
    named = [word for word in learner if word.startswith(("--config", "--run="))]
    done = shlex.quote(str(RunPaths(Path(run)).warm_start_done))
    return f"{{ test -e {done} || {prefix}{line([*learner[:3], 'sft', *named])}; }} && "


def check_scratch(request: LaunchOptions) -> None:
    if not request.scratch:
        remedy = "Name a folder on the disk of the store's host, as in --scratch=/local/x."
        raise ConfigError("--scratch", "", "the store's database must not be on a shared file system", remedy)


class _Dumper(yaml.SafeDumper):
    """Dumper that writes text of several lines as a block."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(value: object) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000)


# Every job of the script has a process group of its own (`set -m`), which ends with all its processes.
END_JOBS = 'set -m\nend_jobs() { for job in $(jobs -p); do kill -TERM -- "-$job" 2>/dev/null; done; wait; }'


# As the supervisor does: earlier failures do not count after a long run. The next process reports how this one ended.
COUNT_FAILURE = f"[ $((SECONDS-began)) -lt {FORGIVEN_AFTER_S:.0f} ] || tries=0; ((tries++)); export {ENDED_ENV}=$code"


# --- Slurm: one heterogeneous job, a component for each role


def slurm(program: Program, request: LaunchOptions) -> dict[str, str]:
    """A script for `sbatch`. `run` is a folder that all nodes reach, `scratch` one on the store's own disk."""
    check_scratch(request)
    head = ["#!/bin/bash", f"#SBATCH --job-name={program.name}", "#SBATCH --signal=B:TERM@60"]
    head += [f"#SBATCH --partition={request.queue}"] if request.queue else []
    roles = [role for role in program.roles if role.count]  # no component may have 0 nodes
    for number, role in enumerate(roles):
        head += ["#SBATCH hetjob"] if number else []
        head.append(f"#SBATCH --nodes={role.count * role.hosts} --ntasks-per-node=1 --cpus-per-task=4")
        if role.devices and request.accelerator:
            head.append(f"#SBATCH --gres={request.accelerator}:{role.devices}")
    numbers = {role.name: number for number, role in enumerate(roles)}
    body = [
        "set -uo pipefail",
        f"cd {shlex.quote(request.workdir)}",
        f"chmod 600 {shlex.quote(request.run)}/token  # on the shared folder: all nodes read it there",
        'first() { scontrol show hostnames "$1" | head -n 1; }',
        *(
            f'export {name}="$(first "$SLURM_JOB_NODELIST_HET_GROUP_{numbers[role]}")"'
            for name, role in (("STORE_HOST", "store"), ("LEARNER_HOST", "learner"))
        ),
        f'export {TOKEN_VARIABLE}="$(cat {shlex.quote(request.run)}/token)"',
        *([] if request.insecure else [f"export {TLS_VARIABLE}={shlex.quote(request.run + '/tls')}"]),
        "",
        f"# Starts a role again when it dies, at most {program.restarts} times, not counting those before a run of "
        f"{FORGIVEN_AFTER_S:g} s. 0: done, {EXIT_CONFIG}: refused, {EXIT_CLOSED}: the run is closed.",
        "role() {",
        '  local group="$1" nodes="$2" tries=0 code=0 began',
        f"  while [ $tries -le {program.restarts} ]; do began=$SECONDS",
        '    srun --het-group="$group" --nodes="$nodes" --kill-on-bad-exit=1 --export=ALL bash -c "$3"; code=$?',
        f"    case $code in 0|{EXIT_CONFIG}|{EXIT_CLOSED}) return $code ;; esac",
        f"    {COUNT_FAILURE}; sleep 5",
        "  done",
        "  return $code\n}",
        END_JOBS,
        "trap 'end_jobs; exit 143' TERM",
    ]
    for role in roles:
        inner = f"export ROLE_INDEX=$SLURM_PROCID HOST_NAME=$SLURMD_NODENAME; {role.line()}"
        if role.name == "sampler" and role.hosts > 1:
            inner = f'FIRST_HOST=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1); {inner}'
        copies = role.count if role.name == "sampler" else 1
        nodes = role.hosts if role.name == "sampler" else role.count * role.hosts
        body += [f"role {numbers[role.name]} {nodes} {shlex.quote(inner)} &"] * copies
        body += [f"{role.name}=$!"] if role.name == "learner" else []
    body += ['wait "$learner"; code=$?', "end_jobs", "exit $code"]
    return {"job.sbatch": "\n".join([*head, "", *body, ""])}


# --- JobSet: one replicated job for each role; Kueue admits it through a label


def jobset(program: Program, request: LaunchOptions) -> dict[str, str]:
    """A manifest for `kubectl apply`. The secret NAME-secrets holds the token and the certificates as files."""
    if not request.image:
        raise ConfigError("--image", "", "pods need an image with JaxRoll", "Build one of launch/docker and name it.")
    if not request.run.startswith("/"):
        reason = "volumes of pods are mounted at an absolute path"
        raise ConfigError("--run", request.run, reason, "As in --run=/runs/x.")
    labels = {"kueue.x-k8s.io/queue-name": request.queue} if request.queue else {}
    # A role whose job fails starts again by itself. By default all would, also the store when a learner loses a host.
    others = [role.name for role in program.roles if role.count and role.name != "store"]
    alone = {"name": "the_role_alone", "action": "RestartJob", "targetReplicatedJobs": others}
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": program.name, **({"labels": labels} if labels else {})},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["learner"]},
            "failurePolicy": {"maxRestarts": program.restarts, "rules": [alone]},
            "replicatedJobs": [_replicated_job(program, role, request) for role in program.roles if role.count],
        },
    }
    return {"jobset.yaml": _yaml(manifest)}


def pod_host(name: str, role: str) -> str:
    """The DNS name of the first pod of a role, for its certificate."""
    return f"{name}-{role}-0-0.{name}"


def _replicated_job(program: Program, role: Role, request: LaunchOptions) -> dict:
    pods, in_groups = role.hosts if role.hosts > 1 else role.count, role.name == "sampler" and role.hosts > 1
    limits, selector = _pod_devices(role, request)
    secret = f"{program.name}-secrets"
    mark = f"{shlex.quote(request.run)}/{role.name}-$ROLE_INDEX.started"  # on the pod's volume
    noted = f"[ ! -e {mark} ] || export {ENDED_ENV}='its container ended'; touch {mark}"
    more: list[dict] = [] if request.insecure else [{"name": TLS_VARIABLE, "value": SECRETS}]
    if in_groups:
        first = f"{program.name}-{role.name}-$(GROUP_INDEX)-0.{program.name}"
        more.append({"name": "GROUP_INDEX", "valueFrom": {"fieldRef": {"fieldPath": GROUP_INDEX}}})
        more.append({"name": "FIRST_HOST", "value": first})
    container = {
        "name": role.name,
        "image": request.image,
        **({"workingDir": request.workdir} if request.workdir != "." else {}),
        "command": ["bash", "-c", f"{noted}; {role.line()}"],
        "env": [
            {"name": "STORE_HOST", "value": pod_host(program.name, "store")},
            {"name": "LEARNER_HOST", "value": pod_host(program.name, "learner")},
            {"name": "HOST_NAME", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "ROLE_INDEX", "valueFrom": {"fieldRef": {"fieldPath": POD_INDEX}}},
            {"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": {"name": secret, "key": "token"}}},
            *more,
        ],
        "volumeMounts": [
            {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
            {"name": "run", "mountPath": request.run},
        ],
    }
    if limits:
        container["resources"] = {"limits": limits}
    volumes: list[dict] = [{"name": "secrets", "secret": {"secretName": secret, "defaultMode": 0o400}}]
    if role.name in ("store", "learner"):  # their state outlives their pods
        volumes.append({"name": "run", "persistentVolumeClaim": {"claimName": f"{program.name}-{role.name}"}})
    else:
        volumes.append({"name": "run", "emptyDir": {}})
    if role.spot:
        selector = selector | {"cloud.google.com/gke-spot": "true"}
    pod = {
        # If one process of a sampler dies, the others end, too: so all pods of its group start again in place.
        "restartPolicy": "OnFailure" if role.hosts == 1 or in_groups else "Never",
        "terminationGracePeriodSeconds": DRAIN_S + 10,
        **({"nodeSelector": selector} if selector else {}),
        "containers": [container],
        "volumes": volumes,
    }
    job = {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": program.restarts if role.hosts == 1 or in_groups else 0,
        "template": {"spec": pod},
    }
    return {"name": role.name, "replicas": role.count if in_groups else 1, "template": {"spec": job}}


def _pod_devices(role: Role, request: LaunchOptions) -> tuple[dict[str, int], dict[str, str]]:
    """Limits and node selector. `accelerator` is `gpu`, `gpu:TYPE` or `tpu:TYPE:TOPOLOGY`."""
    kind, _, rest = request.accelerator.partition(":")
    if not (role.devices and kind):
        return {}, {}
    if kind == "gpu":
        return {"nvidia.com/gpu": role.devices}, ({"cloud.google.com/gke-accelerator": rest} if rest else {})
    if kind == "tpu" and rest.count(":") == 1:
        chip, topology = rest.split(":")
        selector = {"cloud.google.com/gke-tpu-accelerator": chip, "cloud.google.com/gke-tpu-topology": topology}
        return {"google.com/tpu": role.devices}, selector
    reason = "pods ask for gpu, gpu:TYPE or tpu:TYPE:TOPOLOGY"
    raise ConfigError("--accelerator", request.accelerator, reason, "As in --accelerator=tpu:tpu-v5-lite-podslice:2x2.")


# --- SkyPilot: a cluster for store, learner and evaluator; a managed job for each sampler


def skypilot(program: Program, request: LaunchOptions) -> dict[str, str]:
    """Two tasks: that of the fixed roles (`sky launch`) and that of one sampler (`sky jobs launch`)."""
    fixed = [role for role in program.roles if role.name != "sampler"]
    sampler = next(role for role in program.roles if role.name == "sampler")
    for role in program.roles:
        if role.hosts > 1:
            reason, remedy = "a task has one host per role", "Set it to 1, or use --on=slurm or --on=jobset."
            raise ConfigError(f"placement.{role.name}_hosts", role.hosts, reason, remedy)
    nodes = [role for role in fixed for _ in range(role.count)]
    cases = []
    for rank, role in enumerate(nodes):
        index = nodes[:rank].count(role)
        cases.append(f"  {rank}) ROLE_INDEX={index}; run() {{ {role.line(replaces=False)}; }} ;;")
    addresses = [
        "HOST_NAME=$(hostname -I | cut -d' ' -f1)",
        *(
            f'{name}_HOST=$(sed -n {number}p <<< "$SKYPILOT_NODE_IPS")'
            for number, name in ((1, "STORE"), (2, "LEARNER"))
        ),
    ]
    script = ["set -u", *addresses, "case $SKYPILOT_NODE_RANK in", *cases, "esac", *_restarts("run", program.restarts)]
    devices = max(role.devices for role in fixed)
    main = _task(program.name, request, devices, False, "\n".join(script)) | {"num_nodes": len(nodes)}
    join = ["set -u", "HOST_NAME=$(hostname -I | cut -d' ' -f1)", f"run() {{ {line(sampler.command)}; }}"]
    script = [*join, *_restarts("run", program.restarts)]
    one_sampler = _task(f"{program.name}-sampler", request, sampler.devices, sampler.spot, "\n".join(script))
    one_sampler["envs"] = {"STORE_HOST": None}
    one_sampler["resources"]["job_recovery"] = {
        "strategy": "EAGER_NEXT_REGION",
        "max_restarts_on_errors": program.restarts,
    }
    return {"run.yaml": _yaml(main), "sampler.yaml": _yaml(one_sampler)}


def _task(name: str, request: LaunchOptions, devices: int, spot: bool, script: str) -> dict:
    resources: dict = {"accelerators": f"{request.accelerator}:{devices}"} if request.accelerator and devices else {}
    resources |= {"use_spot": True} if spot else {}
    task: dict = {"name": name, "resources": resources, "workdir": request.workdir, "secrets": {TOKEN_VARIABLE: None}}
    if not request.insecure:
        task["file_mounts"] = {f"~/.jaxroll-tls/{file}": f"{request.run}/tls/{file}" for file in CERTIFICATES}
        script = f"export {TLS_VARIABLE}=$HOME/.jaxroll-tls\n{script}"
    return task | {"setup": f"{request.python} -m pip install -e .", "run": script}


def _restarts(function: str, restarts: int) -> list[str]:
    """Lines of shell that call `function` again while it fails."""
    return [
        f"tries=0; while [ $tries -le {restarts} ]; do",
        f"  began=$SECONDS; {function}; code=$?",
        f"  case $code in 0|{EXIT_CONFIG}|{EXIT_CLOSED}) break ;; esac",
        f"  {COUNT_FAILURE}; sleep 5",
        "done; exit $code",
    ]


# --- TPU VMs: a queued resource for each role with devices, created again after a preemption


def tpu_vm(program: Program, request: LaunchOptions) -> dict[str, str]:
    """A script that creates TPU VMs, runs the roles on them, streams their output and deletes them at the end.

    Roles without devices run where the script runs: a machine in the network of the VMs, whose disk keeps the store. A
    role whose VM is preempted gets a new VM, as often as it may restart; `run` is a folder that all of them reach.
    Token and certificates travel through the standard input of ssh into files with mode 0600.
    """
    if not (request.zone and request.accelerator and request.runtime):
        reason = "a queued resource has a zone, an accelerator type and a runtime"
        remedy = "Add --zone=ZONE, --accelerator=v5litepod-8 and --runtime=v2-alpha-tpuv5-lite."
        raise ConfigError("--zone", request.zone, reason, remedy)
    check_scratch(request)
    run, kept = shlex.quote(request.run), f".jaxroll/{program.name}"
    files = "token" if request.insecure else f"token {' '.join(f'tls/{name}' for name in CERTIFICATES)}"
    receive = f"umask 077; mkdir -p {kept} && tar -C {kept} -xf - && chmod -R go= {kept}"
    wanted = f"--accelerator-type={shlex.quote(request.accelerator)} --runtime-version={shlex.quote(request.runtime)}"
    text = TPU_VM.format(
        zone=shlex.quote(request.zone),
        run=run,
        files=files,
        receive=shlex.quote(receive),
        wanted=wanted,
        project=f" --project={shlex.quote(request.project)}" if request.project else "",
        restarts=program.restarts,
        end_jobs=END_JOBS,
        count_failure=COUNT_FAILURE,
        refused=EXIT_CONFIG,
        closed=EXIT_CLOSED,
    )
    names = [(role, f"{program.name}-{role.name}-{copy}") for role in program.roles for copy in range(role.count)]
    lines = [f"vms=({' '.join(name for role, name in names if role.devices)})"]
    for role, name in names:
        found_by_jax = ("--index=", "--process=", "--coordinator=") if role.hosts > 1 else ()  # on a slice
        command = [word for word in role.command if not word.startswith(found_by_jax)]
        index, home = name.rpartition("-")[2], f"$HOME/{kept}" if role.devices else request.run
        setup = f"cd {shlex.quote(request.workdir)} && export ROLE_INDEX={index} {TOKEN_VARIABLE}=$(cat {home}/token)"
        setup += "" if request.insecure else f" {TLS_VARIABLE}={home}/tls"
        where, spot = "on_vm" if role.devices else "here", " --spot" if role.spot else ""
        lines.append(f"supervise {where} {name} {shlex.quote(f'{setup} && {role.line(command=command)}')}{spot} &")
        lines += ["learner=$!"] if role.name == "learner" else []
    return {"tpu_vm.sh": "\n".join([text, *lines, 'wait "$learner"; code=$?', "finish", "exit $code", ""])}


TPU_VM = r"""#!/bin/bash
set -uo pipefail
{end_jobs}
ZONE={zone} POLL_S="${{POLL_S:-15}}"
STORE_HOST=$(hostname -I | cut -d' ' -f1)
qr() {{ local verb="$1"; shift; gcloud compute tpus queued-resources "$verb" "$@" --zone="$ZONE"{project}; }}
vm() {{ local verb="$1"; shift; gcloud compute tpus tpu-vm "$verb" "$@" --zone="$ZONE"{project}; }}
state() {{ qr describe "$1" --format='value(state.state)' 2>/dev/null; }}
finish() {{ end_jobs; for name in "${{vms[@]}}"; do qr delete "$name" --force --quiet; done; }}
trap 'finish; exit 143' TERM INT

# Creates the VM of this name unless it is there, waits until it is active, and sends it the secrets.
acquire() {{
  local name="$1"; shift
  case "$(state "$name")" in
    ACTIVE) ;;
    FAILED | SUSPENDED | SUSPENDING) qr delete "$name" --force --quiet || return 1 ;;
  esac
  [ -n "$(state "$name")" ] || qr create "$name" --node-id="$name" {wanted} "$@" || return 1
  while :; do
    case "$(state "$name")" in
      ACTIVE) break ;;
      FAILED | SUSPENDED | "") return 1 ;;
    esac
    sleep "$POLL_S"
  done
  tar -C {run} -cf - {files} | vm ssh "$name" --worker=all --command={receive}
}}

# Runs a command on its VM; this shell shows the output.
on_vm() {{
  local name="$1" command="$2" address; shift 2
  acquire "$name" "$@"; local failed=$?; echo $SECONDS > "$mark"; [ $failed -eq 0 ] || return 1
  address=$(vm describe "$name" --format='value(networkEndpoints[0].ipAddress)')
  command="export STORE_HOST=$STORE_HOST LEARNER_HOST=$address HOST_NAME=$address; $command"
  vm ssh "$name" --worker=all --command="export JAXROLL_ENDED=$(cat "$mark.ran" 2> /dev/null); $command"
  echo $? > "$mark.ran"; return "$(cat "$mark.ran")"
}}

here() {{ STORE_HOST=$STORE_HOST HOST_NAME=$STORE_HOST bash -c "$2"; }}

# Starts a role again when it dies or is preempted. 0: done, {refused}: refused, {closed}: the run is closed.
supervise() {{
  local tries=0 code=1 began mark; mark=$(mktemp)  # when the VM was there: a queued one waits for hours
  while [ $tries -le {restarts} ]; do
    echo $SECONDS > "$mark"; "$@" 2>&1 | sed -u "s/^/$2: /"; code=${{PIPESTATUS[0]}}; began=$(cat "$mark")
    case $code in 0 | {refused} | {closed}) break ;; esac
    {count_failure}; sleep "$POLL_S"
  done
  return $code
}}
"""


@dataclass(frozen=True)
class Launcher:
    """A launcher: the renderer of its files by name, and the commands that hand them over."""

    render: Callable[[Program, LaunchOptions], dict[str, str]]
    commands: tuple[tuple[str, ...], ...]


LAUNCHERS: Mapping[str, Launcher] = {
    "slurm": Launcher(slurm, (("sbatch", "job.sbatch"),)),
    "jobset": Launcher(jobset, (("kubectl", "apply", "-f", "secret.json"), ("kubectl", "apply", "-f", "jobset.yaml"))),
    "skypilot": Launcher(
        skypilot, (("sky", "launch", "--yes", "--detach-run", "--secret", TOKEN_VARIABLE, "run.yaml"),)),
    "tpu-vm": Launcher(tpu_vm, (("bash", "tpu_vm.sh"),)),
}  # fmt: skip


def secret_manifest(name: str, files: Mapping[str, bytes]) -> str:
    """The Kubernetes secret of the run, for a file with mode 0600."""
    data = {file: base64.b64encode(content).decode() for file, content in files.items()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{name}-secrets"}, "type": "Opaque"}
    return json.dumps(secret | {"data": data}, indent=1) + "\n"
