"""The critic: a second set of parameters of the same decoder, with a value head in place of logits.

It starts from the run's initial parameters with its value head at zero, and has its own optimizer. Its state is a part
of the trainer's state, so checkpoints contain it; this module holds the programs and no state. Between two uses the
state is stored on the devices or, with `learner.critic_offload`, in host memory.

    values      (params, micro-batch) → V per token                  one per row bucket
    accumulate  (params, accumulator, micro-batch) → accumulator     one per row bucket; the accumulator is donated
    apply       (state, accumulator) → (state, zeros, report)        one; both arguments are donated

With layers in a loop, the three programs of `states.ByLayer` replace `apply`, as in `trainer.TrainingPrograms`.

R rows, T tokens of a row. The value of token t is the value of the state in which it was sampled: it comes from the
hidden state at t − 1 of the same segment, like its log-prob.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jaxroll import sharding as layouts
from jaxroll.algorithms import advantages
from jaxroll.config import LearnerConfig
from jaxroll.learner import packing, step
from jaxroll.learner import state as states
from jaxroll.learner.lora import abstract_gradients
from jaxroll.learner.minibatch import Sample
from jaxroll.learner.packing import MicroBatch
from jaxroll.learner.state import Accumulator, Params, TrainState
from jaxroll.learner.step import AheadOfTime, Recipe, Streams
from jaxroll.models import transformer
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import Progress
from jaxroll.sharding import Layout, batch_spec, replicated

_Leaf = TypeVar("_Leaf")
HEAD = "value"
BEFORE, TARGET = "value", "target"  # streams: V at the start of the claim, and its regression target
_READ = ("tokens", "positions", "segment_ids", packing.PROMPT_IDS, "mask", "weight")  # of the policy's streams


def abstract(learner: LearnerConfig, spec: ModelSpec, layout: Layout) -> TrainState | None:
    """The critic's state for a policy of `spec`, as ShapeDtypeStructs sharded as between two uses.

    None when the config has no critic.
    """
    if learner.critic == "none":
        return None
    transform = states.of_critic(learner).transform
    state = states.abstract(dataclasses.replace(spec, value_head=True), layout, transform)
    return jax.tree.map(_in_host_memory, state) if learner.critic_offload else state


class Critic:
    """The programs that evaluate and train a critic; the caller keeps the state."""

    def __init__(self, learner: LearnerConfig, policy: Recipe) -> None:
        self.recipe = dataclasses.replace(
            policy,
            spec=dataclasses.replace(policy.spec, value_head=True),
            optimizer=states.of_critic(learner),
            added=(),
            lora=None,
            routers=None,
        )
        self.clip, self.offload = learner.value_clip, learner.critic_offload
        layout, transform = policy.layout, self.recipe.optimizer.transform
        self.here = states.abstract(self.recipe.spec, layout, transform)  # on the devices
        kept = abstract(learner, policy.spec, layout)
        assert kept is not None  # `of` builds a Critic only when the config has one
        self.state: TrainState = kept
        seen = {"loss": jax.ShapeDtypeStruct((), np.dtype(np.float32))}
        grads = abstract_gradients(self.recipe.spec, layout, None, self.here.params)
        self.accumulator = step.described(grads, seen, layout.mesh)
        whole = self.recipe.spec, self.recipe.optimizer, 0.0, self.here, self.accumulator
        self._by_layer = states.ByLayer(*whole) if grads.keys() != self.here.params.keys() else None
        self._everywhere = replicated(layout.mesh)
        self._batch = NamedSharding(layout.mesh, batch_spec(layout.rules))
        self._compiled = AheadOfTime("critic", policy.row_tokens, self.lowered)

    @classmethod
    def of(cls, learner: LearnerConfig, policy: Recipe) -> Critic | None:
        """The critic that the config asks for, for a policy with this recipe; None when it asks for none."""
        return None if learner.critic == "none" else cls(learner, policy)

    def compile(self, buckets: Sequence[int], progress: Progress | None = None) -> None:
        """Compile everything for micro-batches of `buckets` rows."""
        for name in ("zeros", *(states.ByLayer.PROGRAMS if self._by_layer else ("apply",))):
            self._compiled.compile(name, 0, progress)
        for rows in buckets:
            self._compiled.compile("values", rows, progress)
            self._compiled.compile("accumulate", rows, progress)

    def fresh(self, policy: Params) -> TrainState:
        """The critic's state before the first step of a run that starts from the parameters `policy`."""
        spec, layout = self.recipe.spec, self.recipe.layout
        # Copied: a step donates the parameters that it replaces.
        params = {name: jnp.copy(policy[name]) for name in self.here.params if name != HEAD}
        head = self.here.params[HEAD]
        params[HEAD] = layouts.placed_once(np.zeros(head.shape, head.dtype), head.sharding)
        return self._kept(states.fresh(params, spec, layout, self.recipe.optimizer.transform))

    def values(self, state: TrainState, batches: Sequence[Streams]) -> list[np.ndarray]:
        """V [R, T] of the trained tokens of every micro-batch, 0 elsewhere."""
        if not batches:
            return []
        params = jax.device_put(state.params, layouts.shardings_of(self.here.params)) if self.offload else state.params
        return layouts.fetched([self._compiled["values", _rows(of)](params, _read(of)) for of in batches])

    def placed(self, batch: MicroBatch, samples: Sequence[Sample], streams: Streams) -> Streams:
        """The critic's training streams: `streams` (the policy's, on the devices) with values and targets."""
        given = {
            BEFORE: [_given(sample.value) for sample in samples],
            TARGET: [_given(sample.target) for sample in samples],
        }
        rows = {name: packing.spread(batch, values) for name, values in given.items()}
        return _read(streams) | layouts.placed(rows, self._batch)

    def trained(
        self, state: TrainState, minibatches: Sequence[Sequence[Streams]]
    ) -> tuple[TrainState, list[dict[str, Any]]]:
        """The state after one optimizer step over each of `minibatches`, and their reports, still on the devices.

        Donates `state` if it is on the devices.
        """
        if self.offload:
            state = jax.device_put(state, layouts.shardings_of(self.here))
        reports, accumulator = [], self._compiled["zeros", 0]()
        for batches in minibatches:
            for streams in batches:
                accumulator = self._compiled["accumulate", _rows(streams)](state.params, accumulator, streams)
            if self._by_layer is None:
                state, accumulator, report = self._compiled["apply", 0](state, accumulator)
            else:
                state, report = self._by_layer.applied(self._compiled, state, accumulator)
                accumulator = self._compiled["zeros", 0]()
            reports.append(report)
        return self._kept(state), reports

    def lowered(self, name: str, rows: int = 0) -> jax.stages.Lowered:
        """The program before compilation: zeros and apply have no rows."""
        accumulator, out = self.accumulator, layouts.shardings_of(self.accumulator)
        if name == "zeros":
            return jax.jit(lambda: layouts.zeroed(accumulator), out_shardings=out).lower()
        if name in states.ByLayer.PROGRAMS:
            assert self._by_layer is not None  # layers are in a loop
            return self._by_layer.lowered(name)
        if name == "apply":
            apply = jax.jit(
                self._applied,
                donate_argnums=(0, 1),
                out_shardings=(layouts.shardings_of(self.here), out, self._everywhere),
            )
            return apply.lower(self.here, accumulator)
        streams = {key: self._stream(rows, dtype) for key, dtype in _read(self.recipe.streams).items()}
        if name == "values":
            return jax.jit(self._values, out_shardings=self._batch).lower(self.here.params, streams)
        streams |= {key: self._stream(rows, np.dtype(np.float32)) for key in (BEFORE, TARGET)}
        accumulate = jax.jit(self._accumulate, donate_argnums=1, out_shardings=out)
        return accumulate.lower(self.here.params, accumulator, streams)

    def _stream(self, rows: int, dtype: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.recipe.row_tokens), dtype, sharding=self._batch)

    def _kept(self, state: TrainState) -> TrainState:
        """`state`, moved to where it is stored between two uses."""
        return jax.device_put(state, layouts.shardings_of(self.state)) if self.offload else state

    def _values(self, params: Params, streams: Streams) -> Array:
        return jnp.where(streams["mask"], token_values(self.recipe, params, streams), 0.0)

    def _accumulate(self, params: Params, accumulator: Accumulator, streams: Streams) -> Accumulator:
        """Add ∇ Σ weight · value loss; the weights, and so the denominators, are those of the policy's loss."""

        def total(model: Params, stacks: Params | None, sums: Params | None) -> tuple[Array, Array]:
            values = token_values(self.recipe, model, streams, stacks, sums)
            loss = advantages.clipped_value_loss(values, streams[BEFORE], streams[TARGET], self.clip)
            loss = jnp.sum(jnp.where(streams["mask"], streams["weight"] * loss, 0.0))
            return loss, loss

        grads, loss = step.differentiate(self.recipe, params, total, {}, accumulator.grads)
        return Accumulator(grads, {"loss": accumulator.statistics["loss"] + loss})

    def _applied(self, state: TrainState, accumulator: Accumulator) -> tuple[TrainState, Accumulator, dict[str, Any]]:
        return states.applied(self.recipe.optimizer, state, accumulator)


def token_values(
    recipe: Recipe, params: Params, streams: Streams, stacks: Params | None = None, sums: Params | None = None
) -> Float[Array, "R T"]:
    """V of every token of packed rows, float32; undefined where `mask` is False.

    `stacks` and `sums` as in `transformer.forward_with_load`.
    """
    hidden = step.hidden_states(recipe, params, streams, stacks, sums)
    return jnp.roll(transformer.values(recipe.spec, params, hidden), 1, axis=1)


def metrics(samples: Sequence[Sample], reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The critic's metrics of a step; `reports` are those of the minibatches, on the host.

    The explained variance is 1 − Var(R − V)/Var(R) over the trained tokens, where R is the target and V the value at
    the start of the claim; None if all targets are equal.
    """
    given = [(_given(sample.value)[sample.mask], _given(sample.target)[sample.mask]) for sample in samples]
    values, targets = (
        np.concatenate([np.zeros(0), *parts]) for parts in ([v for v, _ in given], [t for _, t in given])
    )
    spread = targets.var() if len(targets) else 0.0
    return {
        "value_loss": float(np.mean([report["statistics"]["loss"] for report in reports])),
        "value_explained_variance": float(1 - (targets - values).var() / spread) if spread > 0 else None,
        "returns_mean": float(targets.mean()) if len(targets) else None,
        "critic_grad_norm": float(np.mean([report["grad_norm"] for report in reports])),
    }


def _in_host_memory(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    assert isinstance(leaf.sharding, NamedSharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding.with_memory_kind(layouts.HOST_MEMORY))


def _given(values: np.ndarray | None) -> np.ndarray:
    assert values is not None  # minibatch.prepare gives them to every sample of a run with a critic
    return values


def _rows(streams: Streams) -> int:
    return streams["tokens"].shape[0]


def _read(streams: Mapping[str, _Leaf]) -> dict[str, _Leaf]:
    return {name: streams[name] for name in _READ if name in streams}
