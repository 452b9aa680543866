"""The trainer: one claim in, one new version out.

The caller's thread dispatches JAX. `train` runs the three parts of a step in sequence. A caller that overlaps them with
other work calls them itself: `prepare` packs the samples and puts them on the devices, `dispatch_step` queues the step,
`await_step` waits for its metrics. The result is a function of (state, claim): micro-batches and shuffles do not
depend on the order of arrival.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxroll import sharding as layouts
from jaxroll.algorithms import registry
from jaxroll.algorithms.registry import Algorithm
from jaxroll.config import Config, LearnerConfig
from jaxroll.config.derived import sample_tokens, support_tokens
from jaxroll.errors import ConfigError, JaxRollError
from jaxroll.kernels import choice
from jaxroll.kernels.attention import SharedRows
from jaxroll.learner import critic, lora, minibatch, packing, shared_prompts, step_metrics
from jaxroll.learner import state as states
from jaxroll.learner.critic import Critic
from jaxroll.learner.lora import Lora
from jaxroll.learner.minibatch import Sample
from jaxroll.learner.packing import MicroBatch
from jaxroll.learner.state import Accumulator, Reference, TrainState
from jaxroll.learner.step import PROXIMAL, REFERENCE, CompileCounter, Programs, Recipe, Routers
from jaxroll.models import families, moe
from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.policy.limiter import max_age
from jaxroll.protocols import Progress
from jaxroll.records import Claim
from jaxroll.sharding import Layout, Rules

Metrics = dict[str, Any]
Streams = dict[str, jax.Array]
_ADAPTERS = 0x10FA  # folded into the run's seed for fresh adapters; no other random stream uses this number


@dataclass(frozen=True)
class Ready:
    """A claim's micro-batches by optimizer step, on the host and on the devices."""

    claim: Claim
    prepared: minibatch.Prepared
    packed: list[list[MicroBatch]]
    placed: list[list[Streams]]


@dataclass(frozen=True)
class Running:
    """A dispatched step: the reports (device arrays) of its optimizer steps, and those of the critic."""

    ready: Ready
    reports: list[dict[str, Any]]
    of_critic: list[dict[str, Any]]

    def is_done(self) -> bool:
        """True if `Trainer.await_step` would not wait."""
        return all(leaf.is_ready() for leaf in jax.tree.leaves((self.reports, self.of_critic)))


class Trainer:
    """The parameters of a run and the programs that train them, on one mesh.

    With `learner.reference` the trainer also keeps a frozen copy of the run's initial parameters, with `learner.critic`
    a second model that learns the values of states.
    """

    def __init__(self, config: Config, spec: ModelSpec, mesh: Mesh, rules: Rules, *, key: jax.Array) -> None:
        self.config, self.spec = config, spec
        self.layout = Layout(mesh, rules)
        self._shards, self._quadratic = layouts.shards(mesh), packing.attention_share(spec)
        self.buckets = packing.learner_buckets(config.learner, config.learner.shared_prompt_rows)
        self._settings = minibatch.Settings.of(config)
        self.algorithm = self._settings.algorithm
        self._rows = shared_rows(config.learner)
        if self._rows and self.algorithm.together > 1:
            raise ConfigError(
                "learner.shared_prompt_tokens",
                config.learner.shared_prompt_tokens,
                "this algorithm compares adjacent samples of a row, which must not share a prompt",
                "Set it to 0: every sample then has its own copy of its prompt.",
            )
        self.programs = Programs(recipe(config, spec, self.layout, self.algorithm))
        self.critic = Critic.of(config.learner, self.programs.recipe)
        self.lora = self.programs.recipe.lora
        self.sends_adapters = self.lora is not None and config.learner.lora_publish == "adapters"
        self.base: states.Params = {}  # frozen parameters under the adapters; empty if all parameters are trained
        self._base_digest = ""
        params = model_params.init(spec, key, mesh, rules)
        self.reference = Reference.of(config.learner, params)
        self.state: TrainState = self._fresh(params)
        self._compiles = CompileCounter()
        self._accumulator: Accumulator | None = None

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of `state`, for restoring a checkpoint."""
        return dataclasses.replace(self.programs.state, critic=self.critic.state if self.critic else None)

    def params(self) -> states.Params:
        """The parameters that the model computes with now; with adapters a merged copy."""
        return self.programs.merge(self.state.params, self.base) if self.lora else self.state.params

    def publishable_params(self) -> states.Params:
        """The parameters that samplers receive with every version: `params`, or the adapters alone (`lora_publish`)."""
        return self.state.params if self.sends_adapters else self.params()

    def base_params(self) -> states.Params:
        """The frozen parameters under the adapters; if adapters are published alone, samplers receive these once."""
        return self.base

    def base_digest(self) -> str:
        """The digest of the frozen parameters under the adapters; empty if all parameters are trained."""
        return self._base_digest

    def set_params(self, params: Mapping[str, np.ndarray]) -> None:
        """Start from `params` (host arrays) with a fresh optimizer; they also become the reference.

        The old state is released first, so the trainer has none if this raises.
        """
        self.release()
        self.reference, self.base = None, {}
        placed = states.placed(params, self.spec, self.layout)
        self.reference = Reference.of(self.config.learner, placed)
        self.state = self._fresh(placed)

    def release(self) -> None:
        """Give up the state's arrays, before another state is put on the devices; `state` is abstract until then."""
        # Otherwise two states would exist at once, 24 bytes per parameter: more than a step needs.
        self.state = self.abstract_state()

    def set_reference(self, params: Mapping[str, np.ndarray]) -> None:
        """Set the reference to `params` (host arrays): a resumed run passes its initial parameters."""
        self.reference = Reference.of(self.config.learner, states.placed(params, self.spec, self.layout))

    def warmup(self, progress: Progress | None = None) -> None:
        """Compile every program that a claim can need; from here on the metric `compiles` should stay 0."""
        self.programs.compile(self.buckets, progress, logprobs=_kl_in_reward(self.config))
        minibatch.warmup(self.config)
        if self.critic:
            self.critic.compile(self.buckets, progress)
        if self.critic or _kl_in_reward(self.config):  # `prepare` fetches their per-token results
            self.programs.warm_fetches(self.buckets)
        self._accumulator = self.programs.zeros()
        self._compiles.reset()

    def train(self, claim: Claim) -> Metrics:
        """Train on `claim`, one optimizer step per minibatch; return the step's metrics. Raises like `await_step`."""
        return self.await_step(self.dispatch_step(self.prepare(claim)))

    @property
    def prepares_ahead(self) -> bool:
        """True if a claim may be prepared while the previous step runs, because `prepare` evaluates no model."""
        return self.critic is None and not _kl_in_reward(self.config)

    def prepare(self, claim: Claim) -> Ready:
        """`claim` packed and on the devices; KL costs and critic values are computed with the current parameters."""
        costs = self._kl_costs if _kl_in_reward(self.config) else None
        values = self._values if self.critic else None
        prepared = minibatch.prepare(claim, self.config, settings=self._settings, costs=costs, values=values)
        packed = [self.packed(samples, self.algorithm.together) for samples in prepared.minibatches]
        return Ready(
            claim, prepared, packed, [[self.programs.placed(batch.streams) for batch in batches] for batches in packed]
        )

    def dispatch_step(self, ready: Ready) -> Running:
        """Queue the step on `ready`; from here on `state` and `params()` are those after it."""
        placed = ready.placed
        for name in self.programs.recipe.added:
            placed = self._with_logprobs(placed, name)
        reports = [self._train_minibatch(batches) for batches in placed]
        return Running(ready, reports, self._train_critic(ready.prepared.minibatches, ready.packed, placed))

    def await_step(self, running: Running) -> Metrics:
        """Wait for the step and return its metrics.

        Raises JaxRollError when a gradient is not finite; the state is then invalid and must be restored.
        """
        prepared, packed, claim = running.ready.prepared, running.ready.packed, running.ready.claim
        reports, of_critic = layouts.fetched((running.reports, running.of_critic))
        _check_finite(reports, claim, "learner.learning_rate")
        _check_finite(of_critic, claim, "learner.critic_learning_rate")
        batches = [batch for of_minibatch in packed for batch in of_minibatch]
        seen = _step_metrics(reports)
        if of_critic:
            seen |= critic.metrics([sample for samples in prepared.minibatches for sample in samples], of_critic)
        rewards = rewards_by_age(prepared.groups, self.programs.recipe.age_buckets)
        seen["by_age"] = {age: {"tokens": 0} | earned | seen["by_age"].get(age, {}) for age, earned in rewards.items()}
        return (
            data_metrics(prepared.groups)
            | seen
            | {
                "padding_waste": packing.padding_waste(batches),
                "shared_tokens": packing.shared_tokens(batches),
                "shard_imbalance": packing.shard_imbalance(batches, self._shards, self._quadratic),
                "tokens_computed": sum(sample.trained_tokens for samples in prepared.minibatches for sample in samples),
                "micro_batches": len(batches),
                "compiles": self._compiles.count,
            }
        )

    def _fresh(self, params: states.Params) -> TrainState:
        transform = self.programs.recipe.optimizer.transform
        critic_state = self.critic.fresh(params) if self.critic else None
        if self.lora:
            self.base, self._base_digest = params, lora.digest(params)
            key = jax.random.fold_in(model_params.key(self.config), _ADAPTERS)
            params = lora.starting(self.config.learner, self.spec, self.layout, self.lora, key)
        state = states.fresh(params, self.spec, self.layout, transform, self.lora)
        return dataclasses.replace(state, critic=critic_state)

    def packed(self, samples: Sequence[Sample], together: int = 1) -> list[MicroBatch]:
        """The micro-batches of `samples` under this config."""
        if self._rows:
            batches = shared_prompts.pack(
                samples,
                self._rows,
                self.buckets,
                shards=self._shards,
                quadratic=self._quadratic,
                support=self.programs.recipe.support,
            )
        else:
            batches = packing.pack(
                samples,
                self.config.learner.row_tokens,
                self.buckets,
                shards=self._shards,
                quadratic=self._quadratic,
                together=together,
                support=self.programs.recipe.support,
            )
        if routers := self.programs.recipe.routers:
            for batch, shares in zip(batches, packing.token_shares(batches), strict=True):
                batch.streams[packing.SHARE] = shares
                if routers.replay:
                    width, dtype = moe.recorded_width(self.spec), moe.recorded_dtype(self.spec)
                    batch.streams[packing.EXPERTS] = packing.spread_experts(batch, samples, width, dtype)
        return batches

    def _with_logprobs(self, placed: list[list[Streams]], name: str) -> list[list[Streams]]:
        """The micro-batches of all minibatches with the added stream `name`: log π under the model of that name."""
        if name == PROXIMAL:
            params = nullcontext(self.params())
        else:
            assert self.reference is not None  # the rules refuse a config that needs one and has none
            params = self.reference.params()
        with params as lent:
            return [[of | {name: self.programs.logprobs(lent, of)} for of in batches] for batches in placed]

    def _kl_costs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """kl_coef · k1(π_prox, π_ref) of the tokens of each sample, [T]."""
        batches = self.packed(samples)
        placed = [[self.programs.placed(batch.streams) for batch in batches]]
        for name in (PROXIMAL, REFERENCE):
            placed = self._with_logprobs(placed, name)
        both = layouts.fetched([(streams[PROXIMAL], streams[REFERENCE]) for streams in placed[0]])
        costs = [self.config.learner.kl_coef * (logp.astype(np.float64) - logq) for logp, logq in both]
        return packing.gathered(batches, costs, len(samples))

    def _values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The critic's current values at the tokens of each sample, float32 [T]."""
        assert self.critic is not None  # `prepare` calls this only with a critic
        batches = self.packed(samples)
        placed = [self.programs.placed(batch.streams) for batch in batches]
        return packing.gathered(batches, self.critic.values(self.state.critic, placed), len(samples))

    def _train_critic(
        self, minibatches: Sequence[Sequence[Sample]], packed: list[list[MicroBatch]], placed: list[list[Streams]]
    ) -> list[dict[str, Any]]:
        """Train the critic on the same micro-batches, one optimizer step per minibatch; reports stay on the devices."""
        if not self.critic:
            return []
        streams = [
            [self.critic.placed(batch, samples, of) for batch, of in zip(batches, on_devices, strict=True)]
            for samples, batches, on_devices in zip(minibatches, packed, placed, strict=True)
        ]
        critic_state, reports = self.critic.trained(self.state.critic, streams)
        self.state = dataclasses.replace(self.state, critic=critic_state)
        return reports

    def _train_minibatch(self, batches: Sequence[dict[str, jax.Array]]) -> dict[str, Any]:
        """Dispatch one optimizer step over all of `batches`; the report stays on the device."""
        accumulator = self._accumulator or self.programs.zeros()
        with jax.transfer_guard("disallow"):  # an array on the host would be copied in every step
            for streams in batches:
                accumulator = self.programs.accumulate(self.state.params, accumulator, streams, self.base)
        policy = dataclasses.replace(self.state, critic=None)
        policy, self._accumulator, report = self.programs.apply(policy, accumulator)
        self.state = dataclasses.replace(policy, critic=self.state.critic)
        return report


def recipe(config: Config, spec: ModelSpec, layout: Layout, algorithm: Algorithm | None = None) -> Recipe:
    """The recipe of the learner's programs under this config."""
    algorithm = algorithm or registry.build(config.learner)
    families.check_routing(spec, config)
    added = [PROXIMAL] if config.learner.minibatches > 1 else []
    remat, rows = config.learner.remat, shared_rows(config.learner)
    return Recipe(
        spec=dataclasses.replace(spec, remat=spec.remat if remat == "auto" else remat, scan=config.learner.scan_layers),
        layout=layout,
        token_loss=algorithm.objective,
        optimizer=states.build(config.learner),
        temperature=config.sampling.temperature,
        row_tokens=rows.row_tokens if rows else config.learner.row_tokens,
        age_buckets=max_age(config.schedule.alpha) + 1,
        added=(*added, REFERENCE) if algorithm.needs_reference else tuple(added),
        logits_mb=config.learner.logits_mb,
        attention=choice.Choice(choice.XLA, "prompts are shared") if rows else attention(config, spec, layout),
        lora=Lora.of(config.learner),
        rows=rows,
        support=support_tokens(config.sampling),
        routers=_routers(config.learner, spec) if spec.experts else None,
    )


def _routers(learner: LearnerConfig, spec: ModelSpec) -> Routers:
    return Routers(learner.routing_replay, learner.router_loss, learner.router_bias_rate if spec.router_bias else 0.0)


def shared_rows(learner: LearnerConfig) -> SharedRows | None:
    """The layout of rows that share prompts; None if every sample has its own copy of its prompt."""
    if not learner.shared_prompt_tokens:
        return None
    return SharedRows(learner.shared_prompt_tokens, learner.shared_prompt_rows, learner.row_tokens)


def attention(config: Config, spec: ModelSpec, layout: Layout) -> choice.Choice:
    """The attention implementation for packed rows; ConfigError when the config names one that cannot work here."""
    mesh = layout.mesh
    site = choice.Site(
        spec, layouts.platform(mesh), mesh.shape["tensor"] * mesh.shape["sequence"], sample_tokens(config.learner)
    )
    return choice.choose("packed", config.learner.attention, site)


def _kl_in_reward(config: Config) -> bool:
    return config.learner.kl_coef > 0 and config.learner.kl_in == "reward"


def data_metrics(groups: Sequence[Sequence[Sample]]) -> Metrics:
    """Metrics of a claim's data: unshaped rewards, and ages of the trained tokens."""
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


def rewards_by_age(groups: Sequence[Sequence[Sample]], age_buckets: int) -> dict[str, Metrics]:
    """The number of trained tokens of each age and the mean of their members' rewards.

    The last bucket also holds all older tokens.
    """
    samples = [sample for group in groups for sample in group if sample.mask.any()]
    if not samples:
        return {}
    ages = np.concatenate([np.clip(sample.ages[sample.mask], 0, age_buckets - 1) for sample in samples])
    rewards = np.repeat([sample.reward for sample in samples], [sample.trained_tokens for sample in samples])
    return {
        str(age): {"tokens_trained": int((ages == age).sum()), "reward": float(rewards[ages == age].mean())}
        for age in np.unique(ages)
    }


def _step_metrics(reports: Sequence[Mapping[str, Any]]) -> Metrics:
    """The reports of all minibatches combined: statistics over all tokens, mean loss and mean gradient norm."""
    row = step_metrics.metrics(step_metrics.totals([report["statistics"] for report in reports]))
    return row | {
        "loss": row["loss"] / len(reports),
        "expert_balance": row["expert_balance"] and row["expert_balance"] / len(reports),
        "grad_norm": float(np.mean([report["grad_norm"] for report in reports])),
        "learning_rate": float(reports[-1]["learning_rate"]),
    }


def _check_finite(reports: Sequence[Mapping[str, Any]], claim: Claim, rate: str) -> None:
    for number, report in enumerate(reports):
        if not np.isfinite(report["grad_norm"]):
            raise JaxRollError(
                f"step {claim.step}, minibatch {number}: the gradient is not finite (norm {report['grad_norm']}); "
                f"resume from the last checkpoint with a lower {rate} or model.dtype = float32"
            )
