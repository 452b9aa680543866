"""A learner killed at a random instant and resumed on another mesh: the same data in the same order, the same losses.

Another mesh adds in another order, so losses are equal up to float32 rounding; on one mesh they are equal bit for bit
(test_exact_resume). As there, members are a function of their question. The instant is random; a failure prints the
JAXROLL_FAULT_SEED=N that repeats it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxroll import metrics
from jaxroll.control import run_dir
from tests.harness.cluster import kills
from tests.harness.cluster.real_roles import ROOT, World
from tests.harness.cluster.scripted_groups import ScriptedSampler

pytestmark = [pytest.mark.process, pytest.mark.soak]
STEPS, CHECKPOINT_EVERY = 10, 2
RULES = {
    "schedule__alpha": STEPS,
    "schedule__steps": STEPS,
    "learner__checkpoint_every": CHECKPOINT_EVERY,
    "learner__micro_batch_rows": 4,
    "learner__mesh__fsdp": 2,
}
OTHER_MESHES = {
    "tensor 2": ("learner.mesh.fsdp=1", "learner.mesh.tensor=2"),
    "data 4": ("learner.mesh.fsdp=1", "learner.mesh.data=4"),
    "one device": ("learner.mesh.fsdp=1",),
}
MINIBATCHES = {"tensor 2": 1, "data 4": 2, "one device": 1}  # with two, the logged shuffle decides the order
Curves = tuple[dict[int, dict], list[tuple]]  # the row of every step, and its groups


class Resumed(World):
    """The same run resumed with `overrides`, as `--resume` does."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        super().__init__(folder.with_name("scratch"))
        self.config = run_dir.resume(folder, overrides, lambda config: None)
        self.run_dir = folder
        self._follower = metrics.RowReader(folder / "metrics.jsonl")


def claims(run: World) -> list[tuple]:
    return run.query(
        "SELECT step, shuffle_seed, place, group_id FROM claim_groups JOIN claims USING (step) ORDER BY 1, 3"
    )


@pytest.fixture(scope="module", autouse=True)
def four_devices() -> Iterator[None]:
    """Give every learner four devices: no supervisor runs here, which would force as many as the mesh needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_NUM_CPU_DEVICES", "4")
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Curves]:
    """A function for the curves of an undisturbed run with so many minibatches; each is run once."""

    @functools.cache
    def curves(minibatches: int) -> Curves:
        with World(tmp_path_factory.mktemp("whole") / "run", **RULES, learner__minibatches=minibatches) as run:
            with ScriptedSampler(run.tap.address, run.config):
                run.learner()
                assert run.ended("learner") == 0, run.logs()
            return {row["step"]: row for row in run.step_rows()}, claims(run)

    return curves


def chance() -> random.Random:
    """Random numbers from a new seed, or from JAXROLL_FAULT_SEED to repeat a run."""
    seed = int(os.environ.get("JAXROLL_FAULT_SEED") or secrets.randbelow(2**32))
    print(f"to repeat this: JAXROLL_FAULT_SEED={seed}")
    return random.Random(seed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", OTHER_MESHES)
def test_killed_and_resumed_on_another_mesh(mesh: str, tmp_path: Path, undisturbed: Callable[[int], Curves]) -> None:
    rules = RULES | {"learner__minibatches": MINIBATCHES[mesh]}
    rows, wanted_claims = undisturbed(MINIBATCHES[mesh])
    drawn, folder = chance(), tmp_path / "run"
    step, delay_s = drawn.randrange(CHECKPOINT_EVERY + 1, STEPS - 1), drawn.uniform(0.0, 0.1)
    print(f"killed {delay_s:.3f} s after the claim of step {step}")
    with World(folder, **rules) as first, ScriptedSampler(first.tap.address, first.config):
        first.learner()
        kills.in_step(first, step, delay_s).wait()
    with Resumed(folder, *OTHER_MESHES[mesh]) as second, ScriptedSampler(second.tap.address, second.config):
        second.learner()
        assert second.ended("learner") == 0, second.logs()
        assert claims(second) == wanted_claims, "the same groups in the same order"
        trained = second.step_rows()
        sizes = {role: told["mesh"] for role, told in run_dir.load(folder)["devices"].items()}
    last = {row["step"]: row for row in trained}
    assert sorted(last) == list(range(1, STEPS + 1))
    resumed = [row for row in trained if row["replayed"]]
    # The claim during which it died makes step + 1; the next one may have been requested already (steps overlap).
    assert resumed and resumed[-1]["step"] <= step + 2, "it did not continue from a checkpoint with its old claims"
    for key, tolerance in (("loss", 2e-4), ("entropy", 2e-4), ("grad_norm", 2e-3)):
        want, got = (np.array([of[number][key] for number in sorted(rows)]) for of in (rows, last))
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=f"{key} on {mesh} {sizes}")
    listed = [sys.executable, "-m", "jaxroll", "checkpoints", str(folder), "--verify", "--json"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    newest = json.loads(done.stdout)["checkpoints"][-1]
    assert newest["step"] == STEPS and newest["durable"] and newest["position"] > STEPS
