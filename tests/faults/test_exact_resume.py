"""A learner killed at five random instants ends in the same state, bit for bit, as an undisturbed learner.

The states are equal bit for bit only with the same device count, jaxlib and CPU model, and with NPROC=1
(docs/store_contract.md, fault 4). The claims are the same because members are a function of their question, because no
rewind disowns the version of their tokens, and because α lets the run train them to its end.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.harness.cluster import kills
from tests.harness.cluster.learner_state import digests
from tests.harness.cluster.real_roles import World
from tests.harness.cluster.rpc_calls import ack_of
from tests.harness.cluster.scripted_groups import ScriptedSampler

pytestmark = pytest.mark.process
STEPS, CHECKPOINT_EVERY = 14, 4
GROUPS = 4
PHASES = ("waiting", "mid-step", "published, not acked", "acked, not durable", "mid-checkpoint")
OF_A_STEP = ("loss", "grad_norm", "entropy", "logits_std", "tokens_computed", "reward_mean", "groups")


def world(folder: Path, **changes: object) -> World:
    """A run of `STEPS` steps whose members may be as old as the run."""
    return World(
        folder,
        schedule__alpha=STEPS,
        schedule__steps=STEPS,
        learner__checkpoint_every=CHECKPOINT_EVERY,
        learner__micro_batch_rows=2,
        **changes,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict, list]:
    """The rows of an undisturbed learner by step, the digests of its last state, and its claims."""
    with world(tmp_path_factory.mktemp("whole") / "run") as run, ScriptedSampler(run.tap.address, run.config):
        run.learner()
        assert run.ended("learner") == 0, run.logs()
        rows = {row["step"]: row for row in run.step_rows()}
        assert sorted(rows) == list(range(1, STEPS + 1))
        assert any(row["grad_norm"] > 0 for row in rows.values()), (
            "the learner learned nothing, so the test shows nothing"
        )
        return rows, digests(run), claims(run)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_five_random_instants(seed: int, tmp_path: Path, undisturbed, note) -> None:
    chance = random.Random(f"exactness {seed}")
    rows, state, wanted_claims = undisturbed
    phases = chance.sample(PHASES, len(PHASES))
    steps = sorted(chance.sample(range(1, STEPS - CHECKPOINT_EVERY), len(phases)))
    with world(tmp_path / "run") as run, ScriptedSampler(run.tap.address, run.config) as sampler:
        for phase, step in zip(phases, steps, strict=True):
            kill_at(run, sampler, phase, step, chance)
        run.learner()
        assert run.ended("learner") == 0, run.logs()
        assert claims(run) == wanted_claims, "other groups or another order"
        for row in run.step_rows():
            same = {key: row[key] for key in OF_A_STEP}
            assert same == {key: rows[row["step"]][key] for key in OF_A_STEP}, f"a replay that differs: {row}"
        assert any(row["replayed"] for row in run.step_rows())
        assert digests(run) == state
        note(run.judge(f"4-6 exactness, seed {seed}", len(phases)))


def kill_at(run: World, sampler: ScriptedSampler, phase: str, step: int, chance: random.Random) -> None:
    """Start the learner and kill it in `phase` of the claim of `step` (or of the first checkpoint after it)."""
    if phase == "waiting":
        sampler.up_to = min(sampler.up_to, GROUPS * step)
    run.learner()
    if phase == "mid-checkpoint":
        run.until_step(step)
        kills.in_checkpoint(run)
    elif phase == "waiting":
        kills.waiting(run, step, chance.uniform(0.0, 0.5)).wait()
    elif phase == "mid-step":
        kills.in_step(run, step, chance.uniform(0.0, 0.03)).wait()
    else:
        answered = phase == "acked, not durable"
        kills.Dying(run, "learner", "Ack", lambda call: ack_of(call) == step, answered=answered).wait()
    run.tap.on("learner", "Claim", None)
    sampler.allow(10**9)


def claims(run: World) -> list[tuple]:
    """Step, seed, place and group of every claimed group."""
    return run.query(
        "SELECT step, shuffle_seed, place, group_id FROM claim_groups JOIN claims USING (step) ORDER BY step, place"
    )
