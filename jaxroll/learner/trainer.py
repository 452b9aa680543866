"""One claim in, one new version out.

The caller's thread dispatches JAX; `train` returns when the step's report has been read, so the time it takes is the
time of the step. What it computes is a function of (state, claim): micro-batches and shuffles never depend on arrival.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxroll.config import Config
from jaxroll.errors import JaxRollError
from jaxroll.learner import minibatch, optimizer, packing, statistics
from jaxroll.learner import state as states
from jaxroll.learner.compiles import CompileCounter
from jaxroll.learner.packing import MicroBatch
from jaxroll.learner.samples import Sample
from jaxroll.learner.state import TrainState
from jaxroll.learner.step import PROXIMAL, Accumulator, Programs, Recipe
from jaxroll.math import objective
from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import Progress
from jaxroll.records import Claim
from jaxroll.sharding.rules import Layout, Rules

Metrics = dict[str, Any]


class Trainer:
    """The parameters of a run and the programs that train them, on one mesh."""

    def __init__(self, config: Config, spec: ModelSpec, mesh: Mesh, rules: Rules, *, key: jax.Array) -> None:
        self.config, self.spec = config, spec
        self.layout = Layout(mesh, rules)
        self._shards, self._quadratic = mesh.shape["data"] * mesh.shape["fsdp"], packing.attention_share(spec)
        self.buckets = packing.row_buckets(config.learner.micro_rows, self._shards)
        self.programs = Programs(recipe(config, spec, self.layout))
        self.state: TrainState = self._fresh(model_params.init(spec, key, mesh, rules))
        self._compiles = CompileCounter()
        self._accumulator: Accumulator | None = None

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of `state`: what a checkpoint is restored into."""
        return self.programs.state

    def set_params(self, params: Mapping[str, np.ndarray]) -> None:
        """Start from `params` (host arrays) with a fresh optimizer."""
        self.state = self._fresh(states.placed(params, self.spec, self.layout))

    def warmup(self, progress: Progress | None = None) -> None:
        """Compile every program that any claim can need; from here on `compiles` counts what should not happen."""
        self.programs.compile(self.buckets, progress)
        shape = (self.config.schedule.groups_per_step, self.config.schedule.group_size)
        minibatch.group_advantages([np.zeros(1, np.float32)], shape, self.config.learner.advantage == "group_std")
        self._accumulator = self.programs.zeros()
        self._compiles.reset()

    def train(self, claim: Claim) -> Metrics:
        """Train on `claim`, one optimizer step per substep; the metrics of the step.

        Raises JaxRollError when a gradient is not finite; the state is then spoilt and must be restored.
        """
        prepared = minibatch.prepare(claim, self.config)
        packed = [self._packed(samples) for samples in prepared.substeps]
        placed = [[self.programs.placed(batch.streams) for batch in batches] for batches in packed]
        if self.programs.recipe.recompute:
            placed = [[self._with_proximal(streams) for streams in batches] for batches in placed]
        reports = jax.device_get([self._substep(batches) for batches in placed])
        _check_finite(reports, claim)
        batches = [batch for of_substep in packed for batch in of_substep]
        return data_metrics(prepared.groups) | _step_metrics(reports) | {
            "padding_waste": packing.padding_waste(batches),
            "shard_imbalance": packing.shard_imbalance(batches, self._shards, self._quadratic),
            "tokens_computed": sum(sample.trained_tokens for samples in prepared.substeps for sample in samples),
            "micro_batches": len(batches),
            "compiles": self._compiles.count,
        }  # fmt: skip

    def _fresh(self, params: states.Params) -> TrainState:
        return states.fresh(params, self.spec, self.layout, self.programs.recipe.optimizer.transform)

    def _packed(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        return packing.pack(
            samples, self.config.learner.row_tokens, self.buckets, shards=self._shards, quadratic=self._quadratic
        )

    def _with_proximal(self, streams: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return streams | {PROXIMAL: self.programs.logprobs(self.state.params, streams)}

    def _substep(self, batches: Sequence[dict[str, jax.Array]]) -> dict[str, Any]:
        """One optimizer step over all of `batches`; its report, still on the device."""
        accumulator = self._accumulator or self.programs.zeros()
        for streams in batches:
            accumulator = self.programs.accumulate(self.state.params, accumulator, streams)
        self.state, self._accumulator, report = self.programs.apply(self.state, accumulator)
        return report


def recipe(config: Config, spec: ModelSpec, layout: Layout) -> Recipe:
    """What the learner's programs are made of under this config."""
    return Recipe(
        spec=spec,
        layout=layout,
        token_loss=objective.build(config.learner),
        optimizer=optimizer.build(config.learner),
        temperature=config.sampling.temperature,
        row_tokens=config.learner.row_tokens,
        age_buckets=math.ceil(config.schedule.alpha) + 1,
        recompute=config.learner.substeps > 1,
    )


def data_metrics(groups: Sequence[Sequence[Sample]]) -> Metrics:
    """What a claim's data say about themselves: rewards as they were earned, ages of the tokens that are trained."""
    samples = [sample for group in groups for sample in group]
    rewards = np.array([sample.reward for sample in samples], np.float64)
    ages = np.concatenate([np.zeros(0, np.int32), *(sample.ages[sample.mask] for sample in samples)])
    counts = np.unique(ages, return_counts=True)
    return {
        "reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "samples": len(samples),
        "tokens_trained": len(ages),
        "masked_tokens": sum(sample.sampled_tokens for sample in samples) - len(ages),
        "age_mean": float(ages.mean()) if len(ages) else 0.0,
        "age_max": int(ages.max()) if len(ages) else 0,
        "age_hist": {str(age): int(count) for age, count in zip(*counts, strict=True)},
        "groups_without_signal": sum(len({sample.reward for sample in group}) <= 1 for group in groups),
    }


def _step_metrics(reports: Sequence[Mapping[str, Any]]) -> Metrics:
    """The substeps' reports as one: statistics over all tokens, the mean loss and gradient norm."""
    row = statistics.metrics(statistics.totals([report["statistics"] for report in reports]))
    return row | {
        "loss": row["loss"] / len(reports),
        "grad_norm": float(np.mean([report["grad_norm"] for report in reports])),
        "learning_rate": float(reports[-1]["learning_rate"]),
    }


def _check_finite(reports: Sequence[Mapping[str, Any]], claim: Claim) -> None:
    for substep, report in enumerate(reports):
        if not np.isfinite(report["grad_norm"]):
            raise JaxRollError(
                f"step {claim.step}, substep {substep}: the gradient is not finite (norm {report['grad_norm']}); "
                "resume from the last checkpoint with a lower learner.learning_rate or model.dtype = float32"
            )
