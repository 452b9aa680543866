"""Roles started one by one and connected by address: no supervisor, no folder shared with the sampler."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll import metrics
from jaxroll.control import run_dir
from jaxroll.errors import EXIT_CONFIG
from tests.harness.train_process import ROOT, last_step
from tests.harness.xla import ROLE_FLAGS

pytestmark = pytest.mark.process
WORDS = (
    f"--config={ROOT / 'configs' / 'smoke.py'}",
    "--config.sft.steps=0",
    "--config.evaluator.every=0",
    "--config.learner.mesh.fsdp=2",
    "--config.sampler.mesh.tensor=2",
    "--config.schedule.steps=3",
)
LIMIT_S = 200.0


def start(role: str, path: Path, address: str, *words: str, config: Sequence[str] = WORDS) -> subprocess.Popen:
    """Start `jaxroll ROLE --config=FILE --store=HOST:PORT --run=DIR` with its output in DIR.log."""
    env = {**os.environ, "JAXROLL_CACHE": str(ROOT / ".cache" / "jax")}
    env["XLA_FLAGS"] = ROLE_FLAGS  # a role that is started alone adds its own devices
    with path.with_suffix(f".{role}.log").open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxroll", role, *config, f"--store={address}", f"--run={path}", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=env,
        )


def free_port() -> int:
    """A port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_task_without_prompts_ends_the_store_with_its_reason(tmp_path: Path) -> None:
    """This happens if the data changes after the run was created, so that the check of `jaxroll train` is outdated."""
    settings = configs.load(ROOT / "configs" / "smoke.py", ["task.max_prompt_tokens=1"])
    run_dir.create(tmp_path / "a", settings, [])
    store = start("store", tmp_path / "a", "127.0.0.1:0", config=())
    try:
        assert store.wait(timeout=60) == EXIT_CONFIG
        assert "gives no prompts" in (tmp_path / "a.store.log").read_text()
    finally:
        store.kill()
        store.wait(timeout=10)


def test_roles_meet_by_address(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    roles = {
        "store": start("store", tmp_path / "a", address),
        "learner": start("learner", tmp_path / "a", address),
        "sampler": start("sampler", tmp_path / "b", address, "--index=0"),
    }
    said = lambda: "\n".join(f"--- {p.name}\n{p.read_text()[-2000:]}" for p in tmp_path.glob("*.log"))  # noqa: E731
    try:
        for name in ("learner", "sampler"):
            try:
                code = roles[name].wait(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                pytest.fail(f"the {name} did not end within {LIMIT_S:g} s\n{said()}", pytrace=False)
            assert code == 0, said()
        assert last_step(metrics.read(tmp_path / "a" / "metrics.jsonl")) == 3
        assert not (tmp_path / "b" / "store.db").exists(), "only the store may write the log"
    finally:
        for process in roles.values():
            process.terminate()
        for process in roles.values():
            process.wait(timeout=15)
