"""The learner's compiled programs. After `Programs.compile` nothing compiles again, whatever the claims look like.

    accumulate  (params, accumulator, micro-batch) → accumulator     one per row bucket; the accumulator is donated
    logprobs    (params, micro-batch) → log π per token              one per row bucket, only with several substeps
    apply       (state, accumulator) → (state, zeros, report)        one; both arguments are donated

R rows, T tokens of a row. The log-prob of token t comes from the hidden state at t − 1 of the same segment; the first
token of a segment has none and never carries loss.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jaxroll.learner import state as states
from jaxroll.learner import statistics
from jaxroll.learner.optimizer import Optimizer
from jaxroll.learner.packing import STREAMS
from jaxroll.learner.state import Params, TrainState
from jaxroll.math import logprob, objective
from jaxroll.models import params as model_params
from jaxroll.models import transformer
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import Progress
from jaxroll.sharding.rules import Layout, batch_spec, replicated

Streams = Mapping[str, jax.Array]
PROXIMAL = "proximal"  # the stream that `logprobs` adds to a micro-batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Gradients (float32, lying like the parameters) and statistics summed over micro-batches, or their description."""

    grads: dict[str, Any]
    statistics: dict[str, Any]


class TokenTerms(NamedTuple):
    """What one forward pass says about every token, float32 [R, T]."""

    logprob: Float[Array, "R T"]
    entropy: Float[Array, "R T"]
    logits_variance: Float[Array, "R T"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the programs are made of. `recompute` adds a pass for the proximal log-probs at the start of a claim."""

    spec: ModelSpec
    layout: Layout
    token_loss: objective.Objective
    optimizer: Optimizer
    temperature: float
    row_tokens: int
    age_buckets: int = 1
    recompute: bool = False


def token_terms(spec: ModelSpec, layout: Layout, temperature: float, params: Params, streams: Streams) -> TokenTerms:
    """The terms of every token of packed rows; of no meaning where `mask` is False."""
    hidden = transformer.forward(
        spec, params, streams["tokens"], streams["positions"], streams["segment_ids"], layout=layout
    )
    before = jnp.roll(hidden, 1, axis=1)

    @jax.checkpoint  # [R, T, V] is the largest array of all: made again in the backward pass rather than kept
    def head(params: Params, before: Array) -> TokenTerms:
        logits = transformer.logits(spec, params, before)
        constant = jax.lax.stop_gradient(logits)
        log_all = jax.nn.log_softmax(logprob.tempered(constant, temperature))
        entropy = -jnp.sum(jnp.exp(log_all) * log_all, axis=-1)
        return TokenTerms(
            logprob.token_logprobs(logits, streams["tokens"], temperature), entropy, constant.var(axis=-1)
        )

    return head(params, before)


def gradients(recipe: Recipe, params: Params, streams: Streams) -> tuple[Params, statistics.Statistics]:
    """∇ Σ weight · token loss over one micro-batch, and its statistics."""

    def total(params: Params) -> tuple[Array, statistics.Statistics]:
        terms = token_terms(recipe.spec, recipe.layout, recipe.temperature, params, streams)
        logprobs = jnp.where(streams["mask"], terms.logprob, 0.0)
        # One step per claim: the proximal policy is this very forward pass, so the identity is exact and free.
        proximal = streams.get(PROXIMAL, jax.lax.stop_gradient(logprobs))
        token = recipe.token_loss(logprobs, proximal, streams["behaviour"], streams["advantage"])
        seen = statistics.of_batch(streams, proximal, token, terms.entropy, terms.logits_variance, recipe.age_buckets)
        return jnp.sum(jnp.where(streams["mask"], streams["weight"] * token.loss, 0.0)), seen

    grads, seen = jax.grad(total, has_aux=True)(params)
    return jax.tree.map(lambda grad: grad.astype(jnp.float32), grads), seen


class Programs:
    """The programs of one recipe, compiled ahead of time; calls only look them up."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.state = states.abstract(recipe.spec, recipe.layout, recipe.optimizer.transform)
        self._everywhere = replicated(recipe.layout.mesh)
        self._batch = NamedSharding(recipe.layout.mesh, batch_spec(recipe.layout.rules))
        shapes = Accumulator(
            model_params.abstract(recipe.spec), jax.eval_shape(lambda: statistics.zeros(recipe.age_buckets))
        )
        shardings = Accumulator(
            {name: leaf.sharding for name, leaf in self.state.params.items()},
            dict.fromkeys(shapes.statistics, self._everywhere),
        )
        self.accumulator = jax.tree.map(_struct, shapes, shardings)
        self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}

    def compile(self, buckets: Sequence[int], progress: Progress | None = None) -> None:
        """Compile everything for micro-batches of `buckets` rows, saying before each what and after it how long."""
        self._get("zeros", 0, progress)
        self._get("apply", 0, progress)
        for rows in buckets:
            self._get("accumulate", rows, progress)
            if self.recipe.recompute:
                self._get("logprobs", rows, progress)

    def zeros(self) -> Accumulator:
        """The accumulator of no micro-batches."""
        return self._get("zeros", 0)()

    def placed(self, streams: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """The streams of a micro-batch on the devices, rows over data and fsdp."""
        return jax.device_put(dict(streams), self._batch)

    def accumulate(self, params: Params, accumulator: Accumulator, streams: Streams) -> Accumulator:
        """`accumulator` (donated) with one micro-batch more."""
        return self._get("accumulate", streams["tokens"].shape[0])(params, accumulator, dict(streams))

    def logprobs(self, params: Params, streams: Streams) -> jax.Array:
        """log π [R, T] of the trained tokens under `params`, 0 elsewhere."""
        return self._get("logprobs", streams["tokens"].shape[0])(params, dict(streams))

    def apply(self, state: TrainState, accumulator: Accumulator) -> tuple[TrainState, Accumulator, dict[str, Any]]:
        """The next state, an empty accumulator, and the step's report; both arguments are donated."""
        return self._get("apply", 0)(state, accumulator)

    def _get(self, name: str, rows: int, progress: Progress | None = None) -> Callable[..., Any]:
        key = (name, rows)
        if key not in self._compiled:
            what = f"learner {name}" + (f" [{rows}, {self.recipe.row_tokens}]" if rows else "")
            if progress:
                progress(f"compiling {what}")
            started = time.monotonic()
            self._compiled[key] = self.lowered(name, rows).compile()
            if progress:
                progress(f"compiled {what}: {time.monotonic() - started:.1f} s")
        return self._compiled[key]

    def lowered(self, name: str, rows: int = 0) -> jax.stages.Lowered:
        """The program before compilation: zeros and apply have no rows. Needs the mesh, not its devices."""
        recipe, state, accumulator = self.recipe, self.state, self.accumulator
        if name == "zeros":
            return jax.jit(lambda: _zeroed(accumulator), out_shardings=_shardings(accumulator)).lower()
        if name == "apply":
            out = (_shardings(state), _shardings(accumulator), self._everywhere)
            return jax.jit(self._apply, donate_argnums=(0, 1), out_shardings=out).lower(state, accumulator)
        streams = {key: self._stream(rows, dtype) for key, dtype in STREAMS.items()}
        if name == "logprobs":
            return jax.jit(self._logprobs, out_shardings=self._batch).lower(state.params, streams)
        if recipe.recompute:
            streams[PROXIMAL] = self._stream(rows, np.dtype(np.float32))
        accumulate = jax.jit(self._accumulate, donate_argnums=1, out_shardings=_shardings(accumulator))
        return accumulate.lower(state.params, accumulator, streams)

    def _stream(self, rows: int, dtype: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.recipe.row_tokens), dtype, sharding=self._batch)

    def _accumulate(self, params: Params, accumulator: Accumulator, streams: Streams) -> Accumulator:
        grads, seen = gradients(self.recipe, params, streams)
        return Accumulator(
            jax.tree.map(jnp.add, accumulator.grads, grads), statistics.merged(accumulator.statistics, seen)
        )

    def _logprobs(self, params: Params, streams: Streams) -> jax.Array:
        recipe = self.recipe
        terms = token_terms(recipe.spec, recipe.layout, recipe.temperature, params, streams)
        return jnp.where(streams["mask"], terms.logprob, 0.0)

    def _apply(self, state: TrainState, accumulator: Accumulator) -> tuple[TrainState, Accumulator, dict[str, Any]]:
        optimizer = self.recipe.optimizer
        updates, opt_state = optimizer.transform.update(accumulator.grads, state.opt_state, state.params)
        report = {
            "statistics": accumulator.statistics,
            "grad_norm": optax.tree.norm(accumulator.grads),
            "learning_rate": jnp.asarray(optimizer.schedule(state.step), jnp.float32),
        }
        params = cast(Params, optax.apply_updates(state.params, updates))
        return TrainState(params, opt_state, state.step + 1), _zeroed(accumulator), report


def _struct(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _zeroed(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
