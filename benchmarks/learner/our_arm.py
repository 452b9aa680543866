"""Our learner's step, an arm of benchmarks/learner: from a claim to the report, advantages and packing included.

python -m benchmarks.learner.our_arm FOLDER CASE ours LEARNER-OPTIONS-AS-JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np

from benchmarks.engine.our_arm import SPEC
from benchmarks.learner.work import BETAS, GROUP, LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Arm, Batch, serve
from jaxroll import sharding
from jaxroll.config import Config, LearnerConfig, MeshConfig, SamplingConfig, ScheduleConfig
from jaxroll.learner import minibatch, state
from jaxroll.learner.trainer import Trainer
from jaxroll.records import Claim, ClaimedGroup, Finished, Member, Segment, Task, Version, VersionRun


def member(batch: Batch, row: int) -> Member:
    """Row `row` as a sampler would put it, with arbitrary log-probs, because no correction uses them."""
    answer = batch.answers[row, : batch.lengths[row]]
    prompt = Segment(
        batch.prompts[row], np.zeros(len(batch.prompts[row]), np.uint8), np.zeros(len(batch.prompts[row]), np.float32)
    )
    said = Segment(answer, np.ones(len(answer), np.uint8), np.full(len(answer), -1.0, np.float32))
    runs = (VersionRun(Version(0, 0), len(answer)),)
    return Member(row // GROUP, row % GROUP, 1, Finished((prompt, said), "stop", float(batch.rewards[row]), {}, runs))


def claim(batch: Batch) -> Claim:
    """The batch as the store would deliver it."""
    groups = []
    for first in range(0, len(batch.prompts), GROUP):
        task = Task(first, (), "none", "{}", 0, str(first))
        members = tuple(member(batch, row) for row in range(first, first + GROUP))
        groups.append(ClaimedGroup(first // GROUP, task, members))
    return Claim(0, 0, tuple(groups), shuffle_seed=0, replayed=False)


def made(folder: Path, batch: Batch) -> Arm:
    """A warm trainer with the folder's weights."""
    mesh = MeshConfig(data=jax.device_count())
    config = Config(
        schedule=ScheduleConfig(alpha=0.0, groups_per_step=len(batch.prompts) // GROUP, group_size=GROUP),
        sampling=SamplingConfig(max_tokens=int(batch.lengths.max())),
        learner=LearnerConfig(
            mesh=mesh,
            algorithm="grpo",
            advantage="group_std",
            correction="none",
            aggregation="seq_mean_token_mean",
            learning_rate=LEARNING_RATE,
            warmup_steps=1,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_NORM,
            **json.loads(sys.argv[4]),
        ),
    )
    if (state.BETA1, state.BETA2) != BETAS:
        raise RuntimeError("the peers' optimizer differs from ours")
    trainer = Trainer(config, SPEC, sharding.build(mesh), sharding.LEARNER, key=jax.random.key(0))
    trainer.set_params(dict(np.load(folder / "weights.npz")))
    trainer.warmup()
    work = claim(batch)

    def gradients() -> dict[str, np.ndarray]:
        (samples,) = minibatch.prepare(work, config).minibatches
        accumulator = trainer.programs.zeros()
        for micro in trainer.packed(samples):
            streams = trainer.programs.placed(micro.streams)
            accumulator = trainer.programs.accumulate(trainer.state.params, accumulator, streams)
        return {name: np.asarray(leaf) for name, leaf in accumulator.grads.items()}

    def step() -> float:
        row = trainer.train(work)
        if row["compiles"]:
            raise RuntimeError(f"{row['compiles']} compilations after warm-up")
        return row["loss"]

    return Arm(gradients, step)


if __name__ == "__main__":
    serve(made)
