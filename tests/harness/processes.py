"""Processes of one JAX cluster on this machine: they run the same program, and all have to end well."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from jaxroll import lifeline
from tests.harness.xla import FAST_COMPILATION

LIMIT_S = 240.0


def ran_together(script: Path, folder: Path, processes: int, *, devices: int) -> None:
    """Run `script` with FOLDER INDEX PROCESSES COORDINATOR in so many processes, which share `devices`, to their end.

    The logs are in `folder`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    children = [_started(script, folder, index, processes, address, devices) for index in range(processes)]
    try:
        codes = [child.wait(LIMIT_S) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    logs = "\n".join((folder / f"{processes}-{index}.log").read_text()[-3000:] for index in range(processes))
    assert codes == [0] * processes, logs


def _started(
    script: Path, folder: Path, index: int, processes: int, address: str, devices: int
) -> subprocess.Popen[bytes]:
    flags = f"--xla_force_host_platform_device_count={devices // processes} --xla_cpu_collective_timeout_seconds=200"
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XLA_FLAGS": f"{flags} {FAST_COMPILATION}",
        "JAX_PLATFORMS": "cpu",
        "NPROC": "1",
        lifeline.PARENT_ENV: str(os.getpid()),
    }
    log = (folder / f"{processes}-{index}.log").open("w")
    words = [sys.executable, str(script), str(folder), str(index), str(processes), address]
    return subprocess.Popen(words, env=environment, stdout=log, stderr=log)
