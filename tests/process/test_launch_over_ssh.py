"""A run whose roles are started over `ssh`, with a stand-in for ssh that passes no environment on, and closes
the role's terminal when the connection ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jaxroll import metrics
from tests.harness.namespaces import Hosts, missing
from tests.harness.train_process import ROOT, START_S, last_step, report_of
from tests.harness.xla import ROLE_FLAGS
from tests.process.test_separate_roles import free_port

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]
# As sshd: the role has a clean environment and a terminal that closes with the connection.
SSH = f"""#!/bin/bash
export SSH_NOTES="{{notes}}" JAXROLL_CACHE="{ROOT / ".cache" / "jax"}" XLA_FLAGS="{ROLE_FLAGS}"
exec {sys.executable} {ROOT / "tests" / "harness" / "programs" / "ssh_stand_in.py"} "$@"
"""
GONE_S = 60.0  # well below the time for which roles wait for a store that is gone


@contextlib.contextmanager
def launched(tmp_path: Path, *words: str, hosts: Hosts | None = None) -> Iterator[subprocess.Popen]:
    """A run on the smoke config whose roles, but for the store, are started over the stand-in for ssh.

    With `hosts` the command runs on the first of them, and its `words` place the roles.
    """
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(notes=tmp_path / "calls"))
    ssh.chmod(0o755)
    env = {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}", "JAXROLL_TOKEN": ""}
    entered = [] if hosts is None else hosts.enter(hosts.addresses[0])
    if hosts is not None:
        env["SSH_HOSTS"] = json.dumps({ip: hosts.enter(ip) for ip in hosts.addresses})
    words = (
        "launch",
        "--on=ssh",
        *(["--on=sampler=127.0.0.2"] if hosts is None else []),
        "--insecure",
        f"--run={tmp_path / 'run'}",
        f"--config={ROOT / 'configs' / 'smoke.py'}",
        f"--workdir={ROOT}",
        f"--python={sys.executable}",
        f"--port={free_port()}",
        "--config.evaluator.every=0",
        "--config.task.env=tests.harness.envs.slow_reward:slow_reward",
        *words,
    )
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            [*entered, sys.executable, "-m", "jaxroll", *words],
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield process
    finally:
        for one in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def follow(tmp_path: Path, process: subprocess.Popen, step: int, folder: str = "run") -> list[dict]:
    """The rows of the run in its `folder` until `step`, or its end."""
    rows, seen = metrics.RowReader(tmp_path / folder / "metrics.jsonl"), []
    deadline, pause = time.monotonic() + 2 * START_S, threading.Event()
    while process.poll() is None and time.monotonic() < deadline and last_step(seen) < step:
        seen += rows.rows()
        pause.wait(0.1)
    assert last_step(seen) >= step, said(tmp_path)
    return seen


def said(tmp_path: Path) -> str:
    logs = "".join(f"\n== {file.name}\n{file.read_text()[-2000:]}" for file in tmp_path.glob("*/logs/*.log"))
    return (tmp_path / "out").read_text() + logs


def roles() -> list[psutil.Process]:
    """The processes of this test's roles, wherever they were started."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.environ().get("JAXROLL_TEST_ID") == os.environ["JAXROLL_TEST_ID"] and "-m jaxroll " in " ".join(
                one.cmdline()
            ):
                found.append(one)
    return found


def test_roles_on_other_hosts_are_started_again_by_the_supervisor(tmp_path: Path) -> None:
    words = ("--on=learner=127.0.0.2", "--config.sft.steps=0", "--config.schedule.steps=40")
    with launched(tmp_path, *words) as process:
        follow(tmp_path, process, 2)
        (sampler,) = [one for one in roles() if one.cmdline()[1:4] == ["-m", "jaxroll", "sampler"]]
        sampler.send_signal(signal.SIGKILL)
        assert process.wait(timeout=2 * START_S) == 0, said(tmp_path)
    seen = metrics.RowReader(tmp_path / "run" / "metrics.jsonl").rows(closed=True)
    assert last_step(seen) == 40
    assert [row["process"] for row in seen if row.get("kind") == "restart"] == ["sampler-0"]
    assert (tmp_path / "run" / "token").read_text().strip() not in (tmp_path / "calls").read_text()


def test_roles_on_other_hosts_end_soon_after_the_supervisor_was_killed(tmp_path: Path) -> None:
    """The learner is here, and its warm start is made under the lock of the command."""
    with launched(tmp_path, "--config.sft.steps=2", "--config.schedule.steps=400") as process:
        follow(tmp_path, process, 2)
        left = roles()
        assert {one.cmdline()[3] for one in left} >= {"launch", "store", "learner", "sampler"}
        process.kill()
        _, alive = psutil.wait_procs(left, timeout=GONE_S)
        assert not alive, [one.cmdline() for one in alive]


def test_a_run_over_ssh_continues_when_the_machine_of_its_store_is_lost(tmp_path: Path) -> None:
    """Three machines with disks of their own: that of the command, the learner and the sampler, and one per store."""
    if reason := missing():
        pytest.skip(f"namespaces: {reason}")
    (run := tmp_path / "run").mkdir()
    with Hosts(3, tmp_path, own=run) as hosts:
        here, store, standby = hosts.addresses
        words = (
            f"--on=learner={here}", f"--on=sampler={here}", f"--on=store={store}", f"--on=store-1={standby}",
            "--config.store.standby=True", "--config.store.takeover_s=3", "--config.store.lease_s=6",
            "--config.store.rpc_deadline_s=4", "--config.sft.steps=0", "--config.schedule.steps=30",
            "--config.supervisor.backoff_s=0.2", "--config.supervisor.max_restarts=2",
        )  # fmt: skip
        with launched(tmp_path, *words, hosts=hosts) as process:
            follow(tmp_path, process, 4, folder=hosts.disk(standby).name)
            (tmp_path / "calls.lost").write_text(f"{store}\n")
            hosts.lose(store)
            assert process.wait(timeout=2 * START_S) == 0, said(tmp_path)
        assert "store is not started again" in (tmp_path / "out").read_text(), said(tmp_path)
        report = report_of(hosts.disk(standby))
    assert (report["conservation_residual"], report["groups_trained_twice"], report["steps"]) == (0, 0, 30)
    assert report["age_max"] <= 1
