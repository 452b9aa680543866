"""The arms of a race as child processes, each in its peer's environment: asked a line at a time, answering in JSON."""

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
from jaxroll.control.placement import HUGE_PAGES

_DEADLINE_S = 300.0
_OURS_ALONE = ("PYTHONPATH", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")  # of this process; nothing to a peer


def python_of(arm: str) -> Path:
    """The interpreter that an arm runs in; it need not exist."""
    return Path(sys.executable) if arm == "ours" else ROOT / f".venv-{arm}" / "bin" / "python"


class Child:
    """A module of `benchmarks` as a process that answers; it dies with this one, whose end closes its stdin."""

    def __init__(
        self, program: str, arm: str, threads: int, *words: str, devices: int = 1, platform: str = "cpu"
    ) -> None:
        """`threads` are one CPU device's; of several `devices` each has so many."""
        self._name, count = f"{program} with {devices} x {threads} threads", str(threads)
        environment = {key: value for key, value in os.environ.items() if key not in _OURS_ALONE}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": platform, "NPROC": count, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count,
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "benchmarks" / f"jax-{arm}"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **HUGE_PAGES,  # every arm gains by them, or may
        }  # fmt: skip
        if devices > 1:
            environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [str(python_of(arm)), "-m", program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, env=environment,
        )  # fmt: skip
        self.said = self._answer()  # as it came up

    def ask(self, command: str) -> dict[str, Any]:
        """What it answers."""
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
