"""Samplers that join a running run by hand, leave it on SIGTERM, and are killed: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.train_process import ROOT, SMALL, START_S, Train, assert_sound, last_step
from tests.harness.xla import ROLE_FLAGS

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(1200)]
STEPS = 300
WORDS = (
    *SMALL,
    f"--config.schedule.steps={STEPS}",
    "--config.store.lease_s=12",
    "--config.task.env=tests.harness.envs.slow_reward:slow_reward",
)


def join(train: Train, *words: str, folder: Path | None = None) -> subprocess.Popen[str]:
    """Start `jaxroll sampler --join`: with the run's folder, or with `folder` and the store's address."""
    env = {"JAXROLL_CACHE": str(ROOT / ".cache" / "jax"), **os.environ, "XLA_FLAGS": ROLE_FLAGS}
    where = [f"--join={train.run_dir}"]
    if folder is not None:  # as on another machine: the address, and the secret in the environment
        where = [f"--join={(train.run_dir / 'store.addr').read_text().strip()}", f"--run={folder}"]
        env["JAXROLL_TOKEN"] = (train.run_dir / "token").read_text().strip()
    with (train.run_dir / "logs" / f"joined-{len(list((train.run_dir / 'logs').iterdir()))}.log").open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxroll", "sampler", *where, *words],
            text=True,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )


def until_stored(train: Train, name: str) -> None:
    """Wait until `name` has played an episode."""
    train.until(lambda rows: any(row.get("episodes") for row in rows if row.get("role") == name), f"work of {name}")


def changes(train: Train, name: str) -> list[str]:
    """The joins and leaves of `name`."""
    return [
        row["text"].partition(";")[0].partition(":")[0]
        for row in train.rows
        if row.get("what") in ("join", "leave") and row["role"] == name
    ]


def test_samplers_join_leave_and_die_in_mid_run(tmp_path: Path) -> None:
    joined: list[subprocess.Popen[str]] = []
    try:
        with Train(tmp_path / "run", *WORDS) as train:
            train.until_step(1)
            joined = [join(train), join(train, "--drain=20", folder=tmp_path / "elsewhere")]
            for name in ("sampler-1", "sampler-2"):
                until_stored(train, name)
            leaving = next(
                p
                for p in joined
                if f"--run={tmp_path / 'elsewhere'}" in Path(f"/proc/{p.pid}/cmdline").read_bytes().decode().split("\0")
            )
            killed = next(p for p in joined if p is not leaving)
            gone = Path(f"/proc/{leaving.pid}/cmdline").read_bytes().decode().split("--index=")[1].split("\0")[0]
            leaving.send_signal(signal.SIGTERM)
            assert leaving.wait(timeout=START_S) in (0, 130)
            open_leases = f"SELECT COUNT(*) FROM leases WHERE holder = 'sampler-{gone}'"
            assert train.query(open_leases) == [(0,)], "its leases return at once"
            train.until(lambda rows: changes(train, f"sampler-{gone}") == ["joined", "left"], "the leave")
            killed.send_signal(signal.SIGKILL)
            killed.wait(timeout=START_S)
            step = last_step(train.rows)
            assert step < STEPS, "the run must go on after the kill"
            joined.append(last := join(train))
            until_stored(train, "sampler-3")
            assert train.finish() == 0, train.logs()
            assert last.wait(timeout=START_S) == 0
            assert_sound(train, steps=STEPS, alpha=2)
            shown = subprocess.run(
                [sys.executable, "-m", "jaxroll", "inspect", str(train.run_dir)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
                timeout=START_S,
            ).stdout
            assert f"sampler-{gone}" in shown.partition("newest joins and leaves")[2], shown
    finally:
        for process in joined:
            process.kill()
            process.wait()
