"""The arms of a race as child processes in their peers' environments, which answer command lines with JSON."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib.report import ROOT
from jaxroll.control.program import HUGE_PAGES

_DEADLINE_S = 300.0
_OURS_ALONE = ("PYTHONPATH", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")  # meant for this process, not for a peer


def python_of(arm: str) -> Path:
    """The interpreter of an arm; it need not exist."""
    return Path(sys.executable) if arm == "ours" else ROOT / f".venv-{arm}" / "bin" / "python"


class Child:
    """A module of `benchmarks` as a process that answers commands and ends with this process."""

    def __init__(
        self, program: str, arm: str, threads: int, *words: str, devices: int = 1, platform: str = "cpu"
    ) -> None:
        """Start the process; each of its `devices` has so many `threads`."""
        self._name, count = f"{program} with {devices} x {threads} threads", str(threads)
        environment = {key: value for key, value in os.environ.items() if key not in _OURS_ALONE}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": platform,
            "NPROC": count,
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "benchmarks" / f"jax-{arm}"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            **HUGE_PAGES,  # every arm may use large pages
        }
        if devices > 1:
            environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [str(python_of(arm)), "-m", program, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.started = self._answer()  # its answer at the start

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        line = out.readline() if select.select([out], [], [], _DEADLINE_S)[0] else ""
        if not line:
            code = self._process.poll()
            self.close()
            self._errors.seek(0)
            why = f"within {_DEADLINE_S:.0f} s" if code is None else f"and ended with {code}"
            raise RuntimeError(f"{self._name} gave no answer {why}:\n{self._errors.read()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
