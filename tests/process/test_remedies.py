"""The remedies of a new user's first mistakes, followed for real: each command runs to its end, or until it serves.

tests/control/test_first_mistakes.py follows every remedy with stand-ins for what would start, and checks the answer to
the mistake. Here nothing is replaced: roles train, engines compile, servers listen.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.control import run_dir
from jaxroll.errors import EXIT_INTERRUPTED
from tests.control import test_first_mistakes
from tests.control.test_first_mistakes import MISTAKES

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0  # of one command, also on a busy machine
# Remedies that are not followed here, each with the reason.
ELSEWHERE = {
    "train --config=configs/demo.py": "make demo runs it",
    "plan ": "tests/tools follows plans: they need libtpu",
    "sampler ": "a sampler alone waits for a store: tests/roles has roles as processes",
    "actor ": "an actor alone waits for a store: tests/roles has roles as processes",
}
# Values that fit the runs of this file, of three steps with checkpoints at 2 and 3.
FITTED = {"schedule.steps=99": "schedule.steps=4", "schedule.steps=20": "schedule.steps=4", "--fork=1": "--fork=2"}
SERVES = {"serve": "serves ", "tinker-serve": "serves ", "store": "serving on "}  # the line with which each is ready
REMEDIES = list(dict.fromkeys(
    remedy for _, _, remedy in MISTAKES if not any(remedy.startswith(words) for words in ELSEWHERE)
))  # fmt: skip


def fitted(line: str) -> str:
    """The command with values for the runs of this file."""
    for old, new in FITTED.items():
        line = line.replace(old, new)
    return line


def command(line: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """The words of `jaxroll LINE` as a process, and its environment."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XDG_STATE_HOME": str(home / "state")}
    env.pop("XLA_FLAGS", None)
    return [sys.executable, "-m", "jaxroll", *shlex.split(line)], env


def ended(line: str, home: Path) -> tuple[int, str]:
    """The exit code and the output of a command that runs to its end."""
    words, env = command(line, home)
    done = subprocess.run(
        words, cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, encoding="utf-8", timeout=LIMIT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def stopped_when_it_serves(line: str, ready: str, home: Path) -> tuple[int, str]:
    """The exit code and the output of a server that gets SIGTERM as soon as it serves."""
    words, env = command(line, home)
    output = ""
    with subprocess.Popen(
        words, cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, encoding="utf-8",
    ) as server:  # fmt: skip
        assert server.stdout is not None
        try:
            for text in server.stdout:
                output += text
                if ready in text:
                    server.send_signal(signal.SIGTERM)
            return server.wait(LIMIT_S), output
        finally:
            server.kill()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder as in test_first_mistakes, but `old` and `trained` are runs that were really trained."""
    home = tmp_path_factory.mktemp("remedies") / "home"
    home.mkdir()
    (home / "configs").symlink_to(ROOT / "configs")
    code, output = ended("train old --config=configs/smoke.py", home)
    assert code == 0, output
    shutil.copytree(home / "old", home / "trained")
    run_dir.create(home / "begun", configs.load(ROOT / "configs" / "smoke.py"), [])
    shutil.copytree(home / "begun", home / "killed")
    (home / "killed" / "store.addr").write_text("127.0.0.1:1")
    shutil.copytree(ROOT / "tests" / "golden" / "qwen3" / "tied", home / "model")
    rows = [{"question": f"{index}+1", "answer": str(index + 1)} for index in range(99)]
    (home / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (home / "cluster.toml").write_text(test_first_mistakes.CLUSTER)
    (home / "hardware.toml").write_text(test_first_mistakes.HARDWARE)
    (home / "mistaken_env.py").write_text(test_first_mistakes.ENVIRONMENT)
    code, output = ended("sim long --config=configs/smoke.py --cluster=cluster.toml --config.schedule.steps=12", home)
    assert code == 0, output
    return home


@pytest.fixture
def home(prepared: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the user's folder."""
    home = tmp_path / "home"
    shutil.copytree(prepared, home, symlinks=True)
    yield home
    shutil.rmtree(home)


@pytest.mark.parametrize("remedy", REMEDIES)
def test_the_remedy_works_with_real_starts(remedy: str, home: Path) -> None:
    line = fitted(remedy)
    if ready := SERVES.get(line.split()[0]):
        code, output = stopped_when_it_serves(line, ready, home)
        assert ready in output and code in (0, EXIT_INTERRUPTED), output
    else:
        code, output = ended(line, home)
        assert code == 0, output
    assert "Traceback" not in output


def test_every_reason_for_another_place_belongs_to_a_remedy() -> None:
    assert all(any(remedy.startswith(words) for _, _, remedy in MISTAKES) for words in ELSEWHERE)
    assert all(any(old in remedy for remedy in REMEDIES) for old in FITTED)
