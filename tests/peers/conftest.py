"""A fixture that runs a program in a peer's own environment (`make peers`) and reads its last line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent
_DEADLINE_S = 270
_OURS = ("PYTHONPATH", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")  # meant for this process, not for a peer


@pytest.fixture
def peer() -> Callable[..., dict[str, Any]]:
    """A function that runs tests/peers/programs/PROGRAM in .venv-NAME and returns the JSON object of its last line.

    `make soak` lists in JAXROLL_PEERS the peers that it has installed. A test of a missing peer fails if the peer is in
    this list, else it is skipped.
    """

    def run(name: str, program: str, *arguments: str) -> dict[str, Any]:
        python = _ROOT / f".venv-{name}" / "bin" / "python"
        if not python.exists():
            missing = pytest.fail if name in os.environ.get("JAXROLL_PEERS", "").split() else pytest.skip
            missing(f"{python.parent.parent.name} is not installed; run `make venv-{name}`")
        environment = {key: value for key, value in os.environ.items() if key not in _OURS}
        command = [str(python), str(_HERE / "programs" / program), *arguments]
        done = _finished(command, environment | {"HF_HUB_OFFLINE": "1"})
        assert done.returncode == 0, f"{program} in .venv-{name}:\n{done.stderr[-3000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    return run


def _finished(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; kill its process group at the deadline."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=_DEADLINE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
