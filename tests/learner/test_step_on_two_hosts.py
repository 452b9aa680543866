"""A mesh over two processes: each brings its rows, and the update is that of one process with all devices."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxroll import wire
from tests.harness.processes import ran_together

pytestmark = pytest.mark.process
_SCRIPT = Path(__file__).parents[1] / "harness/programs/learner_host.py"
# Sharded over the two processes: rows; rows and parameters; heads and hidden units (with rows replicated).
MESHES = {
    "rows": {"data": 2, "tensor": 2},
    "parameters": {"fsdp": 4},
    "heads": {"tensor": 4},
}
LEARNERS = {
    "grpo": {"aggregation": "token_mean"},
    "by sequence": {"aggregation": "seq_mean_token_mean", "algorithm": "gspo", "minibatches": 2},
    "constant": {"aggregation": "constant_length", "algorithm": "dr_grpo"},
    "critic": {"algorithm": "ppo", "critic": "init"},
    "kl": {"reference": "init", "kl_coef": 0.1, "kl_in": "reward"},
    "shared": {"shared_prompt_tokens": 16, "shared_prompt_rows": 2, "row_tokens": 32, "micro_batch_rows": 8},
    "lora": {"lora_rank": 4},
    "sums": {"aggregation": "seq_mean_token_sum", "algorithm": "rloo"},
    "offloaded": {
        "algorithm": "ppo",
        "critic": "init",
        "critic_offload": True,
        "reference": "init",
        "reference_offload": True,
        "kl_coef": 0.1,
        "kl_in": "reward",
    },
}
# The three aggregations, and one that fetches what lies on both: rows on one process or the other in all of them.
FEW = [("grpo", "parameters"), ("by sequence", "rows"), ("constant", "parameters"), ("kl", "rows")]
MORE = [("grpo", "rows"), ("grpo", "heads"), ("constant", "rows"), ("critic", "rows"), ("critic", "parameters"),
        ("kl", "heads"), ("shared", "parameters"), ("lora", "heads"),
        ("sums", "rows"), ("offloaded", "parameters")]  # fmt: skip


def wanted(pairs: list[tuple[str, str]]) -> dict[str, dict]:
    """The learner's options of each pair of a learner and a mesh."""
    return {f"{name} on {mesh}": LEARNERS[name] | {"mesh": MESHES[mesh]} for name, mesh in pairs}


@pytest.mark.timeout(600)
@pytest.mark.soak
@pytest.mark.parametrize("pairs", [FEW, MORE], ids=["few", "more"])
def test_two_processes_make_the_update_of_one(make_claim, tmp_path, pairs):
    """Denominators, advantages, statistics and the critic's targets are counted over both; both write a checkpoint."""
    options = wanted(pairs)
    claims = [make_claim(step, age=1) for step in (1, 2)]
    found = {}
    for processes in (2, 1):  # the one reads the checkpoints of the two
        folder = tmp_path / str(processes)
        folder.mkdir()
        for number, claim in enumerate(claims):
            (folder / f"claim-{number}").write_bytes(wire.encode(claim))
        (folder / "options.json").write_text(json.dumps(options))
        ran_together(_SCRIPT, folder, processes, devices=4)
        for name in options:
            for index in range(processes):
                rows = json.loads((folder / f"{name}-{index}.json").read_text())
                found[name, processes, index] = rows, dict(np.load(folder / f"{name}-{index}.npz"))
    for name in options:
        assert_same(found[name, 2, 0], found[name, 2, 1], 0.0, f"{name}: the two processes")
        assert_same(found[name, 1, 0], found[name, 2, 0], 2e-5, f"{name}: one process and two")
        moved = found[name, 1, 0][0][-1]
        assert moved["grad_norm"] > 0 and moved["tokens_trained"] > 0
        compiled = [row["compiles"] for row in found[name, 2, 0][0]]
        # Offloaded state returns by copies that are compiled on first use, in the first step.
        assert compiled == [0, 0] or ("offloaded" in name and compiled[0] == compiled[1]), (name, compiled)


def assert_same(one, other, tolerance: float, what: str) -> None:
    for row, theirs in zip(one[0], other[0], strict=True):
        for key in ("loss", "grad_norm", "entropy", "tokens_trained", "clip_share", "ess", "value_loss"):
            if row.get(key) is not None:
                assert theirs[key] == pytest.approx(row[key], rel=10 * tolerance, abs=tolerance), f"{what}: {key}"
    for key, value in one[1].items():
        np.testing.assert_allclose(other[1][key], value, atol=tolerance, rtol=0, err_msg=f"{what}: {key}")
