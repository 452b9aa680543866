"""OpenEnv's validator and client against our server, and our client against OpenEnv's server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxroll.envs.adapters.openenv_env import GameView, OpenEnvGame, Settings

pytestmark = [pytest.mark.soak, pytest.mark.process, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv-openenv" / "bin"
OURS = ["env", "serve", "frozen_lake", f"--config={ROOT / 'configs/agentic_frozen_lake.py'}", "--port=0"]


@pytest.fixture(autouse=True)
def installed() -> None:
    if not (BIN / "python").exists():
        missing = pytest.fail if "openenv" in os.environ.get("JAXROLL_PEERS", "").split() else pytest.skip
        missing("OpenEnv is not installed; run `make venv-openenv`")


@contextmanager
def serving(*command: str) -> Iterator[str]:
    """The URL in the first line that a server prints; it is ended afterwards."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield next(word for word in server.stdout.readline().split() if word.startswith("http:")).rstrip(",")
        finally:
            server.terminate()


def validated(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / "openenv", "validate", "--url", url], capture_output=True, text=True, check=False)


def test_openenv_validate_passes_and_its_client_plays_with_the_token(peer, tmp_path: Path) -> None:
    with serving(sys.executable, "-m", "jaxroll", *OURS, f"--token-file={tmp_path / 'token'}") as url:
        assert validated(url).returncode != 0
        url = url.replace("//", f"//user:{(tmp_path / 'token').read_text().strip()}@")
        done = validated(url)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        assert found["passed"] and found["mode"] == "simulation" and found["summary"]["failed_criteria"] == []
        played = peer("openenv", "openenv_peer.py", "play", url)
    assert played["same"] and "VALIDATION_ERROR" in played["refused"]
    assert played["state"] == {"episode_id": None, "step_count": played["steps"], "task": 3}
    assert played["parts"]["turns"] == played["steps"] and played["reward"] == played["parts"]["success"]


def test_our_client_plays_an_environment_of_openenv() -> None:
    program = str(ROOT / "tests/peers/programs/openenv_peer.py")
    with serving(str(BIN / "python"), program, "serve") as url:
        game = OpenEnvGame(Settings(url=url, action="text"))
        assert game.start(17) == "game 17"
        assert game.play("5") == GameView("higher", reward=-0.25)
        assert game.play("7") == GameView("right", True, 0.75, {"steps": 2.0})
        game.close()
        game = OpenEnvGame(Settings(url=url))
        game.start(3)
        assert game.play('{"text": 5}').misread, "OpenEnv's own validation refuses a number"
        assert game.play('{"text": "3"}').reward == 1.0
        game.close()
