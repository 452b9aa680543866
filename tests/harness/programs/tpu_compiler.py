"""A child process that compiles for TPU: libtpu reads its environment once, when it is loaded."""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxroll.tools import chips

ROOT = Path(__file__).parents[3]
CHIP_BYTES = 16e9  # high-bandwidth memory of one v5e chip
Costs = Mapping[str, Mapping[str, Any]]  # program name → its cost (see `aot.ProgramCost`) and facts about its text

NEEDS_LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason=f"libtpu has no wheel for {platform.system()} {platform.machine()} here: nothing to compile with",
)


def compiled(script: str, topology: str, size: str, *, limit_s: float) -> list[dict[str, Any]]:
    """Run `script` from this folder; return the costs of each program that it compiled."""
    command = [sys.executable, str(Path(__file__).with_name(script)), topology, size]
    environment = chips.tpu_environment() | {"PYTHONPATH": str(ROOT)}  # the script imports tests.harness
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    return [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
