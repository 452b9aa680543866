"""A run whose roles are started over `ssh`, with a stand-in for ssh that passes no environment on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from jaxroll import metrics
from tests.harness.train_process import ROOT, START_S, last_step
from tests.harness.xla import ROLE_FLAGS
from tests.process.test_separate_roles import free_port

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]
# Without -tt, as a host: a clean environment and a shell. The option list ends at the host's name.
SSH = """#!/bin/bash
[ "$1" = -tt ] && shift
echo "$*" >> "{notes}"
exec env -i HOME="$HOME" PATH="{path}" JAXROLL_CACHE="{cache}" XLA_FLAGS="{flags}" bash -c "$2"
"""


def test_roles_on_other_hosts_are_started_again_by_the_supervisor(tmp_path: Path) -> None:
    run, ssh = tmp_path / "run", tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(notes=tmp_path / "calls", path=os.environ["PATH"], cache=ROOT / ".cache" / "jax",
                              flags=ROLE_FLAGS))  # fmt: skip
    ssh.chmod(0o755)
    env = {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}", "JAXROLL_TOKEN": ""}
    words = ["launch", "--on=ssh", "--on=learner=127.0.0.2", "--on=sampler=127.0.0.2", "--insecure", f"--run={run}",
             f"--config={ROOT / 'configs' / 'smoke.py'}", f"--workdir={ROOT}", f"--python={sys.executable}",
             f"--port={free_port()}", "--config.evaluator.every=0", "--config.schedule.steps=40",
             "--config.sft.steps=0", "--config.task.env=tests.harness.envs.slow_reward:slow_reward"]  # fmt: skip
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "jaxroll", *words], cwd=ROOT, env=env, stdout=out, stderr=out,
                                   stdin=subprocess.DEVNULL)  # fmt: skip
    try:
        rows = metrics.Follower(run / "metrics.jsonl")
        seen: list[dict] = []
        deadline, pause, killed = time.monotonic() + 2 * START_S, threading.Event(), False
        while process.poll() is None and time.monotonic() < deadline:
            seen += rows.rows()
            if not killed and last_step(seen) >= 2:
                (sampler,) = [p for p in psutil.Process(process.pid).children(recursive=True)
                              if p.cmdline()[1:4] == ["-m", "jaxroll", "sampler"]]  # fmt: skip
                sampler.send_signal(signal.SIGKILL)
                killed = True
            pause.wait(0.1)
        output = (tmp_path / "out").read_text() + "".join(f.read_text()[-2000:] for f in (run / "logs").glob("*.log"))
        assert process.poll() == 0, output
        seen += rows.rows(closed=True)
        assert last_step(seen) == 40 and [row["process"] for row in seen if row.get("kind") == "restart"] == [
            "sampler-0"
        ]
        assert (run / "token").read_text().strip() not in (tmp_path / "calls").read_text()
    finally:
        for one in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
