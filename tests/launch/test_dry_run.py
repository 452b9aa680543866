"""What launch/*.sh would run, compared with golden files; nothing here has run on the hardware."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.control import launchers
from jaxroll.control.launchers import Target
from jaxroll.errors import ConfigError

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
SPREAD = ["--insecure", "--on=store=vm-a", "--on=learner=vm-a", "--on=sampler-0=vm-b", "--on=evaluator=vm-c"]
ACTORS_ON = [f"--on={role}" for role in ("store=vm-a", "learner=vm-a", "sampler=vm-b", "evaluator=vm-b", "actor=vm-c")]
ACTORS_ON += ["--devices-per-host=3"]
CASES = {
    "tpu_one_host": ("tpu_vm.sh", ["--devices-per-host=8"]),
    "tpu_three_hosts": ("tpu_vm.sh", [*SPREAD, "--zone=us-central2-b", "--run=runs/x", "--workdir=/srv/jaxroll"]),
    "gpu_one": ("gpu.sh", ["--devices-per-host=1", "--gpu-memory-mb=81920"]),
    "gpu_eight": ("gpu.sh", ["--devices-per-host=8", "--config.sampler.count=3"]),
    "gpu_three_hosts": ("gpu.sh", [*SPREAD, "--run=runs/x"]),
    "gpu_actors_tls": (
        "gpu.sh",
        ["--config.placement.actors=2", "--config.sampler.count=2", "--tls=runs/x/tls", "--run=runs/x", *ACTORS_ON],
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


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_dry_run_is_the_golden_one(name: str) -> None:
    """Look at the difference; if it is meant, run with JAXROLL_UPDATE_GOLDEN=1 and commit the file."""
    done = run(*CASES[name])
    assert done.returncode == 0, done.stderr
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("JAXROLL_UPDATE_GOLDEN"):
        file.write_text(done.stdout)
    assert done.stdout == file.read_text(), test_dry_run_is_the_golden_one.__doc__


@pytest.mark.process
def test_what_cannot_be_launched_is_refused_by_the_script() -> None:
    done = run("tpu_vm.sh", ["--devices-per-host=1"])
    assert done.returncode == 64 and "a chip cannot hold two roles" in done.stderr


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


def test_hosts_are_reached_by_quoted_lines_that_a_shell_takes_apart_again(tmp_path: Path) -> None:
    target = Target("gpu", "my configs/c.py", overrides=("run.name=x",), hosts={"sampler": "box"}, workdir="/my dir",
                    devices_per_host=2, insecure=True)  # fmt: skip
    lines = launchers.text(CONFIG, target, dry_run=False).splitlines()
    assert len(lines) == 4
    (remote,) = (line for line in lines if line.startswith("ssh "))
    script = tmp_path / "ssh"
    script.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    script.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", remote], env=env, capture_output=True, text=True, check=True, timeout=20)
    flag, host, inner = done.stdout.rstrip("\n").split("\n")
    assert (flag, host) == ("-tt", "box")
    assert inner.startswith("cd '/my dir' && exec env ")
    assert re.search(r"jaxroll sampler --index=0 '--config=my configs/c.py' --config.run.name=x ", inner)
    assert inner.endswith("--store=localhost:7077")


@pytest.mark.process
def test_the_script_runs_all_lines_side_by_side_and_ends_them_together(tmp_path: Path) -> None:
    """A python that is no python takes every role's place: each waits for all four, so one after another would hang."""
    fake = tmp_path / "python3"
    fake.write_text(
        "#!/bin/sh\n"
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


def test_several_hosts_need_a_word_about_plain_text() -> None:
    spread = Target("gpu", "configs/c.py", hosts={"sampler": "box"}, devices_per_host=8)
    with pytest.raises(ConfigError, match=r"plain text.*jaxroll tls.*--tls=DIR.*--insecure.*JAXROLL_TOKEN"):
        launchers.plan(CONFIG, spread)


def test_certificates_take_the_place_of_the_word_about_plain_text() -> None:
    for launch in launchers.plan(CONFIG, Target("gpu", "c.py", hosts={"sampler": "box"}, devices_per_host=8, tls="t")):
        assert "--insecure" not in launch.argv and launch.env["JAXROLL_TLS"] == "t"
    for launch in launchers.plan(CONFIG, Target("gpu", "c.py", devices_per_host=8, tls="t")):
        assert "JAXROLL_TLS" not in launch.env, "on one host nothing leaves the loopback"
