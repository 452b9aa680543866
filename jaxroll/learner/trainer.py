"""The trainer: one claim in, one new version out.

The caller's thread dispatches JAX. `train` runs the three parts of a step in sequence. A caller that overlaps them with
other work calls them itself: `prepare` packs the samples and puts them on the devices, `dispatch_step` queues the step,
`await_step` waits for its metrics. The result is a function of (state, claim): micro-batches and shuffles do not
depend on the order of arrival, unless parts of the claim are given to `stream` before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxroll import sharding as layouts
from jaxroll.config import Config
from jaxroll.config.parsing import labels
from jaxroll.errors import ConfigError
from jaxroll.learner import critic, lora, minibatch, packing, shared_prompts, step, step_metrics
from jaxroll.learner import state as states
from jaxroll.learner.critic import Critic
from jaxroll.learner.minibatch import Sample
from jaxroll.learner.packing import EXPERTS, SUPPORT, MicroBatch, Streamed
from jaxroll.learner.state import Accumulator, Params, Reference, TrainState
from jaxroll.learner.step import PROXIMAL, REFERENCE, AheadOfTime, CompileCounter, Recipe
from jaxroll.models import moe
from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import Progress
from jaxroll.records import Claim
from jaxroll.sharding import Layout, Rules, batch_spec, replicated

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
    early: int = 0  # micro-batches that were streamed; they are not in `placed`


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
        states.check_host_memory(config.learner, mesh.local_devices)
        self.config, self.spec = config, spec
        self.layout = Layout(mesh, rules)
        self._shards, self._quadratic = layouts.shards(mesh), packing.attention_share(spec)
        self.buckets = packing.learner_buckets(config.learner, config.learner.shared_prompt_rows)
        self._settings = minibatch.Settings.of(config)
        self.algorithm = self._settings.algorithm
        if config.learner.shared_prompt_tokens and self.algorithm.together > 1:
            reason = "this algorithm compares adjacent samples of a row, which must not share a prompt"
            remedy = "Set it to 0: every sample then has its own copy of its prompt."
            raise ConfigError("learner.shared_prompt_tokens", config.learner.shared_prompt_tokens, reason, remedy)
        self.programs = TrainingPrograms(Recipe.of(config, spec, self.layout, self.algorithm))
        self.critic = Critic.of(config.learner, self.programs.recipe)
        self.lora = self.programs.recipe.lora
        self.sends_adapters = self.lora is not None and config.learner.lora_publish == "adapters"
        self.base: Params = {}  # frozen parameters under the adapters; empty if all parameters are trained
        self._base_digest = ""
        params = model_params.init(spec, key, mesh, rules)
        self.reference = Reference.of(config.learner, params)
        self.state: TrainState = self._fresh(params)
        self._compiles = CompileCounter()
        self._accumulator: Accumulator | None = None
        self._streamed: Streamed | None = None

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of `state`, for restoring a checkpoint."""
        return dataclasses.replace(self.programs.state, critic=self.critic.state if self.critic else None)

    def params(self) -> Params:
        """The parameters that the model computes with now; with adapters a merged copy."""
        return self.programs.merge(self.state.params, self.base) if self.lora else self.state.params

    def publishable_params(self) -> Params:
        """The parameters that samplers receive with every version: `params`, or the adapters alone (`lora_publish`)."""
        return self.state.params if self.sends_adapters else self.params()

    def base_params(self) -> Params:
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
        self.state, self._accumulator, self._streamed = self.abstract_state(), None, None

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
        if self.config.learner.streaming:
            return self._prepare_rest(claim)
        prepared = self._prepared(claim)
        packed = [self.packed(samples, self.algorithm.together) for samples in prepared.minibatches]
        return Ready(claim, prepared, packed, [self._placed(batches) for batches in packed])

    def _prepared(self, claim: Claim) -> minibatch.Prepared:
        costs = self._kl_costs if _kl_in_reward(self.config) else None
        values = self._values if self.critic else None
        return minibatch.prepare(claim, self.config, settings=self._settings, costs=costs, values=values)

    def stream(self, part: Claim) -> None:
        """Compute the gradients of `part`, finished groups of the next claim, as far as they fill micro-batches.

        `prepare` takes the rest of that claim. If it lacks one of these groups, it starts again without them.
        """
        streamed = self._streamed_of(part)
        streamed.add([group.group for group in part.groups], self._prepared(part))
        packed = self.packed(streamed.waiting, self.algorithm.together, by_rows=True)
        if full := packing.full_batches(packed, self.buckets[0]):
            jax.block_until_ready(self._accumulate(self._with_added([self._placed(full)])[0]).statistics)
            streamed.note_computed(full)

    def _prepare_rest(self, claim: Claim) -> Ready:
        streamed = self._streamed_of(claim)
        if not streamed.groups.keys() <= {group.group for group in claim.groups}:
            streamed = self._streamed_of(claim, again=True)
        rest = tuple(group for group in claim.groups if group.group not in streamed.groups)
        prepared = self._prepared(msgspec.structs.replace(claim, groups=rest))
        streamed.add([group.group for group in rest], prepared)
        batches = self.packed(streamed.waiting, self.algorithm.together)
        groups = [streamed.groups[group.group] for group in claim.groups]
        prepared = minibatch.Prepared(groups, [streamed.samples], streamed.counted)
        return Ready(claim, prepared, [[*streamed.packed, *batches]], [self._placed(batches)], len(streamed.packed))

    def _streamed_of(self, claim: Claim, *, again: bool = False) -> Streamed:
        """The groups of this claim so far; none if it is another claim than before, or with `again`."""
        found = self._streamed
        if again or found is None or (found.lineage, found.step) != (claim.lineage, claim.step):
            if found is not None and found.packed:
                self._accumulator = None
            found = self._streamed = Streamed(claim.lineage, claim.step)
        return found

    def dispatch_step(self, ready: Ready) -> Running:
        """Queue the step on `ready`; from here on `state` and `params()` are those after it."""
        placed = self._with_added(ready.placed)
        reports = [self._train_minibatch(batches, ready.prepared.counted) for batches in placed]
        self._streamed = None
        return Running(ready, reports, self._train_critic(ready.prepared.minibatches, ready.packed, placed))

    def await_step(self, running: Running) -> Metrics:
        """Wait for the step and return its metrics.

        Raises JaxRollError when a gradient is not finite; the state is then invalid and must be restored.
        """
        prepared, packed, claim = running.ready.prepared, running.ready.packed, running.ready.claim
        reports, of_critic = layouts.fetched((running.reports, running.of_critic))
        if self.config.learner.streaming:
            tokens = packing.real_tokens(packed[0])
            reports = [step_metrics.divided(report, prepared.counted, tokens) for report in reports]
        step_metrics.check_finite(reports, claim, "learner.learning_rate")
        step_metrics.check_finite(of_critic, claim, "learner.critic_learning_rate")
        batches = [batch for of_minibatch in packed for batch in of_minibatch]
        seen = step_metrics.of_reports(reports)
        if of_critic:
            seen |= critic.metrics([sample for samples in prepared.minibatches for sample in samples], of_critic)
        rewards = step_metrics.rewards_by_age(prepared.groups, self.programs.recipe.age_buckets)
        seen["by_age"] = {age: {"tokens": 0} | earned | seen["by_age"].get(age, {}) for age, earned in rewards.items()}
        if named := labels(self.config):
            seen["sources"] = step_metrics.by_source(prepared.groups, claim, named)
        return (
            step_metrics.of_data(prepared.groups)
            | seen
            | {
                "padding_waste": packing.padding_waste(batches),
                "shared_tokens": packing.shared_tokens(batches),
                "shard_imbalance": packing.shard_imbalance(batches, self._shards, self._quadratic),
                "tokens_computed": sum(sample.trained_tokens for samples in prepared.minibatches for sample in samples),
                "micro_batches": len(batches),
                "micro_batches_early": running.ready.early,
                "compiles": self._compiles.count,
            }
        )

    def _fresh(self, params: Params) -> TrainState:
        transform = self.programs.recipe.optimizer.transform
        critic_state = self.critic.fresh(params) if self.critic else None
        if self.lora:
            self.base, self._base_digest = params, lora.digest(params)
            key = jax.random.fold_in(model_params.key(self.config), _ADAPTERS)
            params = lora.starting(self.config.learner, self.spec, self.layout, self.lora, key)
        offload = self.programs.recipe.optimizer.offload
        state = states.fresh(params, self.spec, self.layout, transform, self.lora, offload=offload)
        return dataclasses.replace(state, critic=critic_state)

    def packed(self, samples: Sequence[Sample], together: int = 1, *, by_rows: bool = False) -> list[MicroBatch]:
        """The micro-batches of `samples` under this config; `by_rows` as in `packing.pack`."""
        recipe = self.programs.recipe
        of: dict[str, Any] = {"shards": self._shards, "quadratic": self._quadratic, "support": recipe.support}
        if recipe.rows:
            batches = shared_prompts.pack(samples, recipe.rows, self.buckets, **of)
        else:
            batches = packing.pack(samples, recipe.row_tokens, self.buckets, together=together, by_rows=by_rows, **of)
        if recipe.routers:
            of_all = not recipe.streaming
            packing.add_routing(batches, samples, self.spec, replay=recipe.routers.replay, of_all=of_all)
        return batches

    def _placed(self, batches: Sequence[MicroBatch]) -> list[Streams]:
        return [self.programs.placed(batch.streams) for batch in batches]

    def _with_added(self, placed: list[list[Streams]]) -> list[list[Streams]]:
        """The micro-batches of all minibatches with the streams that the recipe adds."""
        for name in self.programs.recipe.added:
            placed = self._with_logprobs(placed, name)
        return placed

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

    def _accumulate(self, batches: Sequence[Streams]) -> Accumulator:
        """Queue the gradients of `batches`, which are added to those that wait for an optimizer step."""
        self._accumulator = self._accumulator or self.programs.zeros()
        with jax.transfer_guard("disallow"):  # an array on the host would be copied in every step
            for streams in batches:
                self._accumulator = self.programs.accumulate(self.state.params, self._accumulator, streams, self.base)
        return self._accumulator

    def _train_minibatch(self, batches: Sequence[Streams], counted: float) -> dict[str, Any]:
        """Dispatch one optimizer step: gradients of `batches` and those queued, over `counted` unless it is 0."""
        accumulator = self._accumulate(batches)
        if counted:
            accumulator = self.programs.divided(accumulator, counted)
        policy = dataclasses.replace(self.state, critic=None)
        policy, self._accumulator, report = self.programs.apply(policy, accumulator)
        self.state = dataclasses.replace(policy, critic=self.state.critic)
        return report


def _kl_in_reward(config: Config) -> bool:
    return config.learner.kl_coef > 0 and config.learner.kl_in == "reward"


def _divided(accumulator: Accumulator, count: jax.Array) -> Accumulator:
    return Accumulator({name: grad / count for name, grad in accumulator.grads.items()}, accumulator.statistics)


class TrainingPrograms:
    """The programs of one recipe, compiled ahead of time; calls only look them up.

        accumulate  (params, accumulator, micro-batch) → accumulator     one per row bucket; the accumulator is donated
        logprobs    (params, micro-batch) → log π per token              one per row bucket, if the recipe adds streams
        divided     (accumulator, number) → accumulator                  one, with `learner.streaming`; donated
        apply       (state, accumulator) → (state, zeros, report)        one; both arguments are donated

    With layers in a loop, the programs of `state.ByLayer` replace `apply`. After `compile` nothing compiles again, for
    any claim.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        spec, layout, transform = recipe.spec, recipe.layout, recipe.optimizer.transform
        self.state = states.abstract(spec, layout, transform, recipe.lora, offload=recipe.optimizer.offload)
        where = model_params.shardings(spec, layout.mesh, layout.rules)
        self.params = {name: step.sharded_like(leaf, where[name]) for name, leaf in model_params.abstract(spec).items()}
        self.base = self.params if recipe.lora else {}
        self._everywhere = replicated(recipe.layout.mesh)
        self._batch = NamedSharding(recipe.layout.mesh, batch_spec(recipe.layout.rules))
        loads = (spec.layers, spec.experts) if recipe.routers else None
        seen = jax.eval_shape(lambda: step_metrics.zeros(recipe.age_buckets, loads))
        self.accumulator = step.described(
            lora.abstract_gradients(spec, layout, recipe.lora, self.state.params), seen, layout.mesh
        )
        self._single = step.described(self.state.params, seen, layout.mesh)
        loops = self.accumulator.grads.keys() != self.state.params.keys()
        optimizer = recipe.optimizer, recipe.bias_rate
        self._by_layer = states.ByLayer(spec, *optimizer, self.state, self.accumulator) if loops else None
        self._compiled = AheadOfTime("learner", recipe.row_tokens, self.lowered)

    def compile(self, buckets: Sequence[int], progress: Progress | None = None, *, logprobs: bool = False) -> None:
        """Compile everything for micro-batches of `buckets` rows, reporting each program and its duration.

        With `logprobs`, compile that program even if the recipe adds no stream.
        """
        for name in ("zeros", *(states.ByLayer.PROGRAMS if self._by_layer else ("apply",))):
            self._compiled.compile(name, 0, progress)
        if self.recipe.lora:
            self._compiled.compile("merge", 0, progress)
        if self.recipe.streaming:
            self._compiled.compile("divided", 0, progress)
        for rows in buckets:
            self._compiled.compile("accumulate", rows, progress)
            if self.recipe.added or logprobs:
                self._compiled.compile("logprobs", rows, progress)

    def zeros(self) -> Accumulator:
        """The accumulator of no micro-batches."""
        return self._compiled["zeros", 0]()

    def placed(self, streams: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """The streams of a micro-batch on the devices, with rows sharded over data, fsdp and expert."""
        return layouts.placed(dict(streams), self._batch)

    def warm_fetches(self, buckets: Sequence[int]) -> None:
        """Fetch an array of every micro-batch shape once, because a fetch over several processes compiles a program."""
        for rows in buckets:
            layouts.fetched(self.placed({"": np.zeros((rows, self.recipe.row_tokens), np.float32)}))

    def accumulate(
        self, params: Params, accumulator: Accumulator, streams: Streams, base: Params | None = None
    ) -> Accumulator:
        """`accumulator` (donated) plus one micro-batch; `base` holds the frozen parameters under adapters."""
        return self._compiled["accumulate", streams["tokens"].shape[0]](params, accumulator, dict(streams), base or {})

    def divided(self, accumulator: Accumulator, count: float) -> Accumulator:
        """`accumulator` (donated) with all gradients divided by `count`."""
        number = layouts.placed_once(np.array(count, np.float32), self._everywhere)
        return self._compiled["divided", 0](accumulator, number)

    def merge(self, params: Params, base: Params) -> Params:
        """`base` merged with the adapters `params`."""
        merge, found = self._compiled["merge", 0], dict(base)
        if self._by_layer is None:
            return merge(params, base)
        for number in range(self.recipe.spec.layers):
            here, first = f"layers.{number:02d}.", "layers.00."
            of = ({name: x for name, x in values.items() if name.startswith(here)} for values in (params, base))
            made = merge(*({name.replace(here, first): x for name, x in values.items()} for values in of))
            found |= {name.replace(first, here): value for name, value in made.items()}
        return found

    def logprobs(self, params: Params, streams: Streams) -> jax.Array:
        """log π [R, T] of the trained tokens under `params`, 0 elsewhere."""
        return self._compiled["logprobs", streams["tokens"].shape[0]](
            params, {name: streams[name] for name in self.recipe.streams}
        )

    def apply(self, state: TrainState, accumulator: Accumulator) -> tuple[TrainState, Accumulator, dict[str, Any]]:
        """The next state, an empty accumulator, and the step's report; both arguments are donated."""
        if self._by_layer is None:
            return self._compiled["apply", 0](state, accumulator)
        state, report = self._by_layer.applied(self._compiled, state, accumulator)
        return state, self.zeros(), report

    def lowered(self, name: str, rows: int = 0) -> jax.stages.Lowered:
        """The program before compilation; only those of micro-batches have rows. Needs the mesh but no real devices."""
        recipe, state, accumulator = self.recipe, self.state, self.accumulator
        if name == "zeros":
            return jax.jit(lambda: layouts.zeroed(accumulator), out_shardings=layouts.shardings_of(accumulator)).lower()
        if name == "divided":
            number = jax.ShapeDtypeStruct((), np.float32, sharding=self._everywhere)
            divide = jax.jit(_divided, donate_argnums=0, out_shardings=layouts.shardings_of(accumulator))
            return divide.lower(accumulator, number)
        if name == "merge":
            given = [dict(state.params), dict(self.base)]
            if self._by_layer is not None:  # a program for each layer
                given = [{name: x for name, x in of.items() if name.startswith("layers.00.")} for of in given]
            merge = jax.jit(functools.partial(step.dense, recipe), out_shardings=layouts.shardings_of(given[1]))
            return merge.lower(*given)
        if name == "apply":
            out = (layouts.shardings_of(state), layouts.shardings_of(self._single), self._everywhere)
            return jax.jit(self._apply, donate_argnums=(0, 1), out_shardings=out).lower(state, self._single)
        if name in states.ByLayer.PROGRAMS:
            assert self._by_layer is not None  # layers are in a loop
            return self._by_layer.lowered(name)
        streams = {key: self._stream(rows, dtype) for key, dtype in recipe.streams.items()}
        if recipe.support:
            shape = (rows, recipe.row_tokens, recipe.support)
            streams[SUPPORT] = jax.ShapeDtypeStruct(shape, np.int32, sharding=self._batch)
        if EXPERTS in streams:
            like, width = streams[EXPERTS], moe.recorded_width(recipe.spec)
            streams[EXPERTS] = jax.ShapeDtypeStruct((*like.shape, width), like.dtype, sharding=like.sharding)
        if name == "logprobs":
            return jax.jit(self._logprobs, out_shardings=self._batch).lower(self.params, streams)
        streams |= {key: self._stream(rows, np.dtype(np.float32)) for key in recipe.added}
        accumulate = jax.jit(self._accumulate, donate_argnums=1, out_shardings=layouts.shardings_of(accumulator))
        return accumulate.lower(state.params, accumulator, streams, self.base)

    def _stream(self, rows: int, dtype: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.recipe.row_tokens), dtype, sharding=self._batch)

    def _accumulate(self, params: Params, accumulator: Accumulator, streams: Streams, base: Params) -> Accumulator:
        grads, seen = step.accumulated_gradients(self.recipe, params, streams, base, accumulator.grads)
        return Accumulator(grads, step_metrics.merged(accumulator.statistics, seen))

    def _logprobs(self, params: Params, streams: Streams) -> jax.Array:
        terms = step.terms_of(self.recipe, params, streams)
        return jnp.where(streams["mask"], terms.logprob, 0.0)

    def _apply(self, state: TrainState, accumulator: Accumulator) -> tuple[TrainState, Accumulator, dict[str, Any]]:
        found, empty, report = states.applied(self.recipe.optimizer, state, accumulator)
        if rate := self.recipe.bias_rate:
            params = moe.with_moved_biases(found.params, accumulator.statistics[step_metrics.LOADS], rate)
            found = dataclasses.replace(found, params=params)
        return found, empty, report
