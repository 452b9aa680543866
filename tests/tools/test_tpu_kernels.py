"""Attention's fused kernels are really in the programs that libtpu compiles, ahead of time, on a machine without a TPU.

One child process compiles them all: libtpu reads its environment once, when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.harness.programs.tpu_compiler import CHIP_BYTES, NEEDS_LIBTPU, compiled

Costs = Mapping[tuple[str, bool], Mapping[str, Any]]

pytestmark = [NEEDS_LIBTPU]


def by_fusion(topology: str, size: str, limit_s: float) -> Costs:
    """The cost and the text of programs by (program, attention is fused)."""
    rows = compiled("tpu_kernels.py", topology, size, limit_s=limit_s)
    return {(row["name"], not row["attention"].startswith("xla")): row for row in rows}


@pytest.fixture(scope="module")
def costs() -> Costs:
    """The lean model's on four chips."""
    return by_fusion("v5e:2x2", "lean", 240)


# Forward, the same again for the backward pass (remat), and all gradients; elsewhere one kernel for the one layer.
@pytest.mark.parametrize(("name", "kernels"), [("accumulate", 3), ("prefill_192", 1), ("decode", 1), ("extend", 1)])
def test_the_kernels_are_in_the_programs(costs: Costs, name: str, kernels: int) -> None:
    assert costs[name, True]["custom_calls"] == kernels
    assert costs[name, False]["custom_calls"] == 0


def test_the_choice_is_reported(costs: Costs) -> None:
    said = {name: row["attention"] for (name, fused), row in costs.items() if fused and row["attention"]}
    assert said == {
        "accumulate": "splash (auto on tpu)",
        "prefill_192": "splash (auto on tpu)",
        "decode": "pallas (auto on tpu)",
        "extend": "splash (auto on tpu)",
    }


def test_no_array_of_a_fused_step_has_tokens_squared(costs: Costs) -> None:
    assert costs["accumulate", True]["squares"] == 0
    assert costs["accumulate", False]["squares"] > 0, "the pattern would be found"


@pytest.mark.parametrize("data", [1, 2])
def test_a_preempted_requests_pages_are_moved_without_a_copy_of_them(costs: Costs, data: int) -> None:
    """`save` makes a device's part of the table and nothing else, `load` writes it in place: at most 1.1 parts."""
    save, load = (costs[f"{name}, data {data}", True] for name in ("save", "load"))
    assert 1.0 <= save["made"] <= save["made"] + save["temporary"] <= 1.1
    assert load["made"] + load["temporary"] <= 0.1


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_long_rows_of_qwen3_fit_sixteen_chips(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of 4,096 tokens, where XLA's form would hold their square. Printed: what each program takes of a chip."""
    found = by_fusion("v5e:4x4", "qwen3_0p6b", 1700)
    fused = {name: row for (name, fused), row in found.items() if fused}
    assert {name: row["custom_calls"] for name, row in fused.items()} == {
        "accumulate": 3 * 28,
        "prefill_1024": 28,
        "decode": 28,
    }
    for name, row in fused.items():
        peak, temporaries = row["peak_bytes"] / 2**20, row["temp_bytes"] / 2**20
        with capsys.disabled():
            print(
                f"\n{name}: {row['attention']}, peak {peak:.0f} MiB a chip, of it temporaries {temporaries:.0f} MiB, "
                f"{row['flops'] / 1e9:.1f} GFLOP without the kernels, compiled in {row['compile_s']:.0f} s",
                end="",
            )
        assert row["peak_bytes"] < CHIP_BYTES
    assert found["accumulate", True]["squares"] == 0 < found["accumulate", False]["squares"]
