"""The commands of launch/*.sh, compared with golden files; none of them has run on the hardware."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxroll import config as configs
from jaxroll.control import cli, launchers
from jaxroll.control.launchers import Target
from jaxroll.errors import ConfigError

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
SPREAD = ["--insecure", "--on=store=vm-a", "--on=learner=vm-a", "--on=sampler-0=vm-b", "--on=evaluator=vm-c"]
ACTORS_ON = [f"--on={role}" for role in ("store=vm-a", "learner=vm-a", "sampler=vm-b", "evaluator=vm-b", "actor=vm-c")]
SLICE = [
    "--config.placement.learner_hosts=2",
    "--config.learner.mesh.fsdp=8",
    "--insecure",
    "--run=/shared/x",
    "--on=store=vm-a",
    "--on=sampler=vm-a",
    "--on=evaluator=vm-c",
]
SAMPLER = [
    "--config.placement.sampler_hosts=2",
    "--config.sampler.mesh.tensor=4",
    "--insecure",
    "--run=/shared/x",
    "--on=store=vm-a",
    "--on=learner=vm-a",
    "--on=evaluator=vm-c",
]
ACTORS_ON += ["--devices-per-host=3"]
CASES = {
    "tpu_one_host": ("tpu_vm.sh", ["--devices-per-host=8"]),
    "tpu_three_hosts": ("tpu_vm.sh", [*SPREAD, "--zone=us-central2-b", "--run=runs/x", "--workdir=/srv/jaxroll"]),
    "tpu_one_chip": ("tpu_vm.sh", ["--devices-per-host=1", "--config.placement.colocated=True"]),
    "tpu_colocated_slice": (
        "tpu_vm.sh",
        [
            "--config.placement.colocated=True",
            "--on=store=vm-a",
            "--on=colocated=slice-a",
            "--zone=us-central2-b",
            "--tls=runs/x/tls",
        ],
    ),
    "gpu_one": ("gpu.sh", ["--devices-per-host=1", "--gpu-memory-mb=81920"]),
    "gpu_eight": ("gpu.sh", ["--devices-per-host=8", "--config.sampler.count=3"]),
    "gpu_three_hosts": ("gpu.sh", [*SPREAD, "--run=runs/x"]),
    "gpu_actors_tls": (
        "gpu.sh",
        ["--config.placement.actors=2", "--config.sampler.count=2", "--tls=runs/x/tls", "--run=runs/x", *ACTORS_ON],
    ),
    "tpu_slice": ("tpu_vm.sh", [*SLICE, "--on=learner=slice-b", "--zone=us-central2-b"]),
    "gpu_learner_hosts": ("gpu.sh", [*SLICE, "--on=learner=gpu-a", "--on=learner-1=gpu-b"]),
    "gpu_sampler_hosts": ("gpu.sh", [*SAMPLER, "--on=sampler-0=gpu-a", "--on=sampler-0-1=gpu-b"]),
    "tpu_sampler_slice": ("tpu_vm.sh", [*SAMPLER, "--on=sampler=slice-b", "--zone=us-central2-b"]),
    "gpu_standby": (
        "gpu.sh",
        ["--config.store.standby=True", "--tls=runs/x/tls", *SPREAD[1:], "--on=store-1=vm-d", "--run=runs/x"],
    ),
    "gpu_three_hosts_tls": ("gpu.sh", ["--tls=runs/x/tls", *SPREAD[1:], "--run=runs/x"]),
}


def run(script: str, words: list[str], *, dry: bool = True) -> subprocess.CompletedProcess[str]:
    command = [
        "bash",
        str(ROOT / "launch" / script),
        "--config=configs/rlvr_tiny.py",
        *words,
        *(["--dry-run"] if dry else []),
    ]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("name", CASES)
def test_dry_run_is_the_golden_one(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this fails on an intended change, run with JAXROLL_UPDATE_GOLDEN=1 and commit the file."""
    script, words = CASES[name]
    monkeypatch.chdir(ROOT)
    target = f"--target={script.removesuffix('.sh')}"
    assert cli.main(["launch", target, "--config=configs/rlvr_tiny.py", *words, "--dry-run"]) == 0
    shown, file = capsys.readouterr().out, GOLDEN / f"{name}.txt"
    if os.environ.get("JAXROLL_UPDATE_GOLDEN"):
        file.write_text(shown)
    assert shown == file.read_text(), test_dry_run_is_the_golden_one.__doc__


@pytest.mark.process
@pytest.mark.parametrize("name", ["tpu_three_hosts", "gpu_three_hosts"])
def test_a_script_with_dry_run_prints_what_the_command_prints(name: str) -> None:
    done = run(*CASES[name])
    assert done.returncode == 0, done.stderr
    assert done.stdout == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.process
def test_the_script_refuses_a_plan_that_does_not_fit() -> None:
    done = run("tpu_vm.sh", ["--devices-per-host=1"])
    assert done.returncode == 64 and "a chip holds one process" in done.stderr


CONFIG = configs.load(ROOT / "configs" / "rlvr_tiny.py")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Target("tpu_vm", "c.py", devices_per_host=2), "must have 3"),
        (Target("gpu", "c.py", devices_per_host=2), "must have 3"),
        (Target("gpu", "c.py", devices_per_host=1, gpu_memory_mb=4000), "contexts"),
        (Target("gpu", "c.py", hosts={"sampler-7": "x"}), "no such role"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(target: Target, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        launchers.plan(CONFIG, target)


@pytest.mark.parametrize(
    ("kind", "hosts", "words"),
    [
        ("tpu_vm", {"sampler": "a", "evaluator": "b"}, "a TPU slice for itself"),
        ("tpu_vm", {"learner": "a", "sampler": "a", "evaluator": "b"}, "a TPU slice for itself"),
        ("gpu", {"learner": "a", "sampler": "b", "evaluator": "b"}, "learner=HOST --on learner-1=HOST"),
        ("gpu", {"learner-1": "a", "sampler": "b", "evaluator": "b"}, "learner=HOST --on learner-1=HOST"),
    ],
)
def test_a_learner_on_several_hosts_shares_none_of_them(kind: str, hosts: dict[str, str], words: str) -> None:
    config = configs.load(ROOT / "configs" / "rlvr_tiny.py", ["placement.learner_hosts=2", "learner.mesh.fsdp=8"])
    with pytest.raises(ConfigError, match=words):
        launchers.plan(config, Target(kind, "c.py", hosts=hosts, zone="z", insecure=True, devices_per_host=8))


def test_roles_of_one_host_share_its_gpus_when_each_would_take_all() -> None:
    config = configs.load(ROOT / "configs" / "rlvr_tiny.py", ["learner.mesh.fsdp=4", "sampler.mesh.tensor=4"])
    envs = {one.name: one.env for one in launchers.plan(config, Target("gpu", "c.py", devices_per_host=4))}
    keys = ("CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    shared = {name: tuple(env[key] for key in keys) for name, env in envs.items() if name != "store"}
    assert shared == {"learner": ("0,1,2,3", "0.40"), "sampler-0": ("0,1,2,3", "0.30"), "evaluator": ("0", "0.10")}
    with pytest.raises(ConfigError, match="must have 9"):
        launchers.plan(config, Target("gpu", "c.py", devices_per_host=8))


APART = {"store": "a", "learner": "a", "sampler": "b"}
QWEN3 = [
    ("rlvr_qwen3_0p6b", {"kind": "tpu_vm", "devices_per_host": 8}),
    ("rlvr_qwen3_0p6b", {"kind": "gpu", "devices_per_host": 8}),
    ("rlvr_qwen3_0p6b", {"kind": "gpu", "devices_per_host": 4, "gpu_memory_mb": 80_000}),
    ("rlvr_qwen3_8b", {"kind": "tpu_vm", "hosts": APART, "tls": "tls", "zone": "z"}),
    ("rlvr_qwen3_8b", {"kind": "gpu", "hosts": APART, "tls": "tls"}),
    ("rlvr_qwen3_8b", {"kind": "gpu", "devices_per_host": 8, "gpu_memory_mb": 80_000}),
]


@pytest.mark.parametrize(("name", "where"), QWEN3)
def test_the_qwen3_configs_fit_tpus_and_gpus(name: str, where: dict[str, Any]) -> None:
    config = configs.load(ROOT / "configs" / f"{name}.py")
    starts = {one.name: one for one in launchers.plan(config, Target(config_file="c.py", **where))}
    assert list(starts) == ["store", "learner", "sampler-0"]
    platform = {"tpu_vm": "tpu", "gpu": "cuda"}[where["kind"]]
    assert {starts[each].env["JAX_PLATFORMS"] for each in ("learner", "sampler-0")} == {platform}


def test_ssh_lines_are_quoted_so_that_a_shell_restores_the_arguments(tmp_path: Path) -> None:
    target = Target(
        "gpu",
        "my configs/c.py",
        overrides=("run.name=x",),
        hosts={"store": "hub", "learner": "hub", "sampler": "box"},
        workdir="/my dir",
        devices_per_host=2,
        insecure=True,
    )
    lines = launchers.text(CONFIG, target, dry_run=False).splitlines()
    assert len(lines) == 4
    (remote,) = (line for line in lines if line.startswith("ssh -tt box "))
    script = tmp_path / "ssh"
    script.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    script.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", remote], env=env, capture_output=True, text=True, check=True, timeout=20)
    flag, host, inner = done.stdout.rstrip("\n").split("\n")
    assert (flag, host) == ("-tt", "box")
    assert inner.startswith("cd '/my dir' && exec env ")
    assert re.search(r"jaxroll sampler --index=0 '--config=my configs/c.py' --config.run.name=x ", inner)
    assert inner.endswith("--store=hub:7077")


@pytest.mark.process
def test_the_script_runs_all_lines_in_parallel_and_ends_them_together(tmp_path: Path) -> None:
    """A stand-in for Python plays each role and waits for all four, so that roles run one by one would hang."""
    fake = tmp_path / "python3"
    fake.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -c ] && exit 0\n'
        f'[ "$3" = launch ] && exec "{sys.executable}" "$@"\n'
        f'touch "{tmp_path}/$3-up"\n'
        f'until [ "$(ls {tmp_path} | grep -c -- -up)" = 4 ]; do sleep 0.05; done\n'
    )
    fake.chmod(0o755)
    command = ["bash", str(ROOT / "launch" / "gpu.sh"), "--config=configs/rlvr_tiny.py", "--devices-per-host=4"]
    env = {**os.environ, "PYTHON": str(fake)}
    done = subprocess.run(
        [*command, f"--python={fake}"], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*-up")) == [
        "evaluator-up",
        "learner-up",
        "sampler-up",
        "store-up",
    ]


def test_several_hosts_without_tls_need_insecure() -> None:
    spread = Target("gpu", "configs/c.py", hosts={"sampler": "box"}, devices_per_host=8)
    with pytest.raises(ConfigError, match=r"plain text.*jaxroll tls.*--tls=DIR.*--insecure.*JAXROLL_TOKEN"):
        launchers.plan(CONFIG, spread)


@pytest.mark.parametrize(
    ("hosts", "named"),
    [({"sampler": "box"}, "store=localhost"), ({"store": "hub", "sampler": "box"}, "learner=localhost")],
)
def test_other_machines_cannot_reach_localhost(hosts: dict[str, str], named: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"--on = '{named}': .*cannot reach it\. Add --on {named.split('=')[0]}=NAME"
    ):
        launchers.plan(CONFIG, Target("gpu", "c.py", hosts=hosts, devices_per_host=8, insecure=True))


def test_the_roles_of_the_store_s_host_run_in_shells_if_it_is_this_one() -> None:
    """Over ssh they would find RUN locked by the command that has started them."""
    hosts = {"store": "127.0.0.1", "learner": "127.0.0.1", "sampler": "127.0.0.2", "evaluator": "127.0.0.1"}
    target = Target("gpu", "c.py", hosts=hosts, devices_per_host=8, insecure=True)
    commands = {spec.name: spec.argv[-1] for spec in launchers.supervised(CONFIG, target)}
    assert {name for name, command in commands.items() if "ssh -tt" in command} == {"sampler-0"}
    assert all("--store=127.0.0.1:7077" in command for command in commands.values())


def standby_on(host: str, store: str = "hub") -> Target:
    hosts = {"store": store, "store-1": host, "learner": "gpu-a", "sampler": "gpu-b", "evaluator": "gpu-b"}
    return Target("gpu", "c.py", hosts=hosts, devices_per_host=8, insecure=True)


def test_a_standby_needs_a_machine_that_neither_the_store_nor_the_command_over_ssh_has() -> None:
    config = replace(CONFIG, store=replace(CONFIG.store, standby=True))
    with pytest.raises(ConfigError, match=r"--on = 'store-1=hub'.*Add --on store-1=NAME"):
        launchers.plan(config, standby_on("hub"))
    for target in (standby_on("127.0.0.1"), standby_on("other", store="127.0.0.1")):
        with pytest.raises(ConfigError, match=r"--on = 'store(-1)?=127\.0\.0\.1'.*such as the learner's"):
            launchers.supervised(config, target)
    with pytest.raises(ConfigError, match=r"'localhost'|cannot reach it"):
        launchers.plan(config, standby_on("localhost"))
    specs = {spec.name: spec for spec in launchers.supervised(config, standby_on("192.0.2.1"))}
    assert {name for name, spec in specs.items() if spec.role == "store"} == {"store", "store-1"}
    with pytest.raises(ConfigError, match="no such role"):
        launchers.plan(CONFIG, standby_on("192.0.2.1"))


def test_certificates_replace_insecure() -> None:
    hosts = {"store": "hub", "learner": "hub", "sampler": "box"}
    for launch in launchers.plan(CONFIG, Target("gpu", "c.py", hosts=hosts, devices_per_host=8, tls="t")):
        assert "--insecure" not in launch.argv and launch.env["JAXROLL_TLS"] == "t"
    for launch in launchers.plan(CONFIG, Target("gpu", "c.py", devices_per_host=8, tls="t")):
        assert "JAXROLL_TLS" not in launch.env, "one host uses only the loopback interface"


@pytest.mark.process
def test_without_an_active_environment_the_scripts_use_that_of_make_demo(tmp_path: Path) -> None:
    """The README's line ended with a traceback after `make demo`: python3 of the shell lacks the packages."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    bare, own = tmp_path / "bin" / "python3", tmp_path / ".venv" / "bin" / "python"
    for path, line in ((bare, "exit 1"), (own, 'echo ".venv: $*"')):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    environment = {"PATH": f"{bare.parent}:{os.environ['PATH']}"}
    command = ["bash", str(tmp_path / "launch" / "gpu.sh"), "--dry-run"]

    def outcome(**more: str) -> tuple[int, str]:
        ended = subprocess.run(command, env=environment | more, capture_output=True, text=True, check=False, timeout=30)
        return ended.returncode, ended.stdout + ended.stderr

    assert outcome() == (0, ".venv: -m jaxroll launch --target=gpu --dry-run\n")
    for named in ("python3", "none"):
        code, text = outcome(PYTHON=named)
        assert code == 64 and f"PYTHON = '{named}'" in text and "make venv" in text
    own.unlink()
    assert outcome()[0] == 64
