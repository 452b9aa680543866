"""Attention's fused kernels are really in the programs that libtpu compiles, ahead of time, on a machine without a TPU.

One child process compiles them all: libtpu reads its environment once, when it is loaded.
"""

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

from jaxroll.offline import aot

SCRIPT = Path(__file__).with_name("tpu_kernels.py")
CHIP_BYTES = 16e9  # high-bandwidth memory of one v5e chip

Costs = Mapping[tuple[str, bool], Mapping[str, Any]]

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason=f"libtpu has no wheel for {platform.system()} {platform.machine()} here: nothing to compile with",
    ),
]


def compiled(topology: str, size: str, limit_s: float) -> Costs:
    """(program, whether attention is fused) to its cost, see `aot.ProgramCost`, and what stands in its text."""
    command = [sys.executable, str(SCRIPT), topology, size]
    child = subprocess.run(
        command, env=aot.tpu_environment(), capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert child.returncode == 0, child.stderr[-4000:]
    rows = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    return {(row["name"], not row["attention"].startswith("xla")): row for row in rows}


@pytest.fixture(scope="module")
def costs() -> Costs:
    """The lean model's on four chips."""
    return compiled("v5e:2x2", "lean", 240)


# Forward, the same again for the backward pass (remat), dq, and dk with dv; elsewhere one kernel for the one layer.
@pytest.mark.parametrize(("name", "kernels"), [("accumulate", 4), ("prefill_192", 1), ("decode", 1)])
def test_the_kernels_are_in_the_programs(costs: Costs, name: str, kernels: int) -> None:
    assert costs[name, True]["custom_calls"] == kernels
    assert costs[name, False]["custom_calls"] == 0


def test_what_was_chosen_is_said(costs: Costs) -> None:
    said = {name: row["attention"] for (name, fused), row in costs.items() if fused}
    assert said == {
        "accumulate": "splash (auto on tpu)", "prefill_192": "splash (auto on tpu)", "decode": "pallas (auto on tpu)"
    }  # fmt: skip


def test_no_array_of_a_fused_step_has_tokens_squared(costs: Costs) -> None:
    assert costs["accumulate", True]["squares"] == 0
    assert costs["accumulate", False]["squares"] > 0, "the pattern would be found"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_qwen3_fits_sixteen_chips() -> None:
    """Printed: what each program of a model of 0.6 B parameters takes of a chip."""
    found = compiled("v5e:4x4", "qwen3_0p6b", 1700)
    fused = {name: row for (name, fused), row in found.items() if fused}
    assert {name: row["custom_calls"] for name, row in fused.items()} == {
        "accumulate": 4 * 28, "prefill_1024": 28, "decode": 28
    }  # fmt: skip
    for name, row in fused.items():
        peak, temporaries = row["peak_bytes"] / 2**20, row["temp_bytes"] / 2**20
        print(f"{name}: {row['attention']}, peak {peak:.0f} MiB a chip, of it temporaries {temporaries:.0f} MiB, "
              f"{row['flops'] / 1e9:.1f} GFLOP beside the kernels, compiled in {row['compile_s']:.0f} s")  # fmt: skip
        assert row["peak_bytes"] < CHIP_BYTES
    assert found["accumulate", True]["squares"] == 0 < found["accumulate", False]["squares"]
