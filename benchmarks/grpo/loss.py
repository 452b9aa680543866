"""Our learner's loss and gradients on one batch, with the same config as in the race; see benchmarks/grpo.

    python -m benchmarks.grpo.loss FOLDER OVERRIDES-AS-JSON

The command `loss` returns the loss, writes the gradients to ours.npz, and the log-probs of the batch's tokens to
behavior.npy, which the peer's agentic learner gets as the log-probs of its sampler.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np

from benchmarks.engine.work import answering
from benchmarks.grpo.our_arm import CONFIG
from benchmarks.grpo.work import GROUP, Batch
from jaxroll import config as configs
from jaxroll import sharding
from jaxroll.config import Config
from jaxroll.learner import minibatch
from jaxroll.learner.trainer import Trainer
from jaxroll.models import params
from jaxroll.records import Claim, ClaimedGroup, Finished, Member, Segment, Task, Version, VersionRun


def segments(batch: Batch, row: int, behaviour: np.ndarray) -> Iterator[Segment]:
    """The prompt and the segments of all turns; `behaviour` [T] has the log-probs of the model's tokens."""
    prompt = batch.prompts[row]
    yield Segment(prompt, np.zeros(len(prompt), np.uint8), np.zeros(len(prompt), np.float32))
    said, sampled = batch.said[row][batch.said[row] > 0], batch.mask[row][batch.said[row] > 0]
    cuts = [0, *(np.flatnonzero(np.diff(sampled)) + 1).tolist(), len(said)]
    for first, end in pairwise(cuts):
        logprobs = np.where(sampled[first:end], behaviour[first:end], 0).astype(np.float32)
        yield Segment(said[first:end], sampled[first:end].astype(np.uint8), logprobs)


def claim(batch: Batch, behaviour: np.ndarray) -> Claim:
    """The batch as the store would deliver it, drawn at the version that is trained; `behaviour` is [N, T]."""
    groups = []
    for first in range(0, len(batch.prompts), GROUP):
        members = []
        for row in range(first, first + GROUP):
            runs = (VersionRun(Version(0, 0), int(batch.mask[row].sum())),)
            parts = tuple(segments(batch, row, behaviour[row]))
            ended = Finished(parts, "stop", float(batch.rewards[row]), {}, runs)
            members.append(Member(first // GROUP, row - first, 1, ended))
        task = Task(first, (), "none", "{}", 0, str(first))
        groups.append(ClaimedGroup(first // GROUP, task, tuple(members)))
    return Claim(0, 0, tuple(groups), shuffle_seed=0, replayed=False)


def logprobs(trainer: Trainer, config: Config, batch: Batch) -> np.ndarray:
    """Log-probs of the tokens in `batch` under the trainer's parameters, float32 [N, T]; 0 where the mask is False."""
    (samples,) = minibatch.prepare(claim(batch, np.zeros(batch.said.shape)), config).minibatches
    found, prompt = np.zeros(batch.said.shape, np.float32), batch.prompts.shape[1]
    for micro in trainer.packed(samples):
        values = jax.device_get(trainer.programs.logprobs(trainer.params(), trainer.programs.placed(micro.streams)))
        for place in micro.placements:
            row = values[place.row, place.start : place.start + place.length]
            found[place.sample, : place.skipped + place.length - prompt] = row[prompt - place.skipped :]
    return np.where(batch.mask, found, 0)


def main() -> None:
    """Answer."""
    say = answering()
    folder = Path(sys.argv[1])
    config = configs.load(CONFIG, [f"{key}={value}" for key, value in json.loads(sys.argv[2]).items()])
    spec, mesh = params.spec(config.model, 0), sharding.build(config.learner.mesh)
    trainer = Trainer(config, spec, mesh, sharding.LEARNER, key=jax.random.key(0))
    trainer.set_params(params.weights(config.model, spec))
    say({"ready": True})
    for _ in sys.stdin:
        batch = Batch.load(folder / "batch.npz")
        behaviour = logprobs(trainer, config, batch)
        np.save(folder / "behaviour.npy", behaviour)
        work = claim(batch, behaviour)
        (samples,) = minibatch.prepare(work, config).minibatches
        accumulator = trainer.programs.zeros()
        for micro in trainer.packed(samples):
            streams = trainer.programs.placed(micro.streams)
            accumulator = trainer.programs.accumulate(trainer.state.params, accumulator, streams)
        gradients = {name: np.asarray(leaf) for name, leaf in accumulator.grads.items()}
        np.savez(folder / "ours.npz", allow_pickle=False, **gradients)
        say({"loss": trainer.train(work)["loss"]})


if __name__ == "__main__":
    main()
