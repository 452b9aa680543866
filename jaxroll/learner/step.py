"""Compiled programs of the learner. After `Programs.compile` nothing compiles again, for any claim.

    accumulate  (params, accumulator, micro-batch) → accumulator     one per row bucket; the accumulator is donated
    logprobs    (params, micro-batch) → log π per token              one per row bucket, if the recipe adds streams
    apply       (state, accumulator) → (state, zeros, report)        one; both arguments are donated

With layers in a loop, three programs replace `apply`, so that its compilation does not grow with their number:

    report      (accumulator, step) → report                         one; it has the norm that clipping needs
    layer       (parameters and moments of a layer) → the next ones  one, called for every layer; donated
    rest        the same for all other parameters                    one

R rows, T tokens of a row. The log-prob of token t comes from the hidden state at t − 1 of the same segment. The first
token of a segment has no log-prob and never carries loss.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from jaxroll import sharding as layouts
from jaxroll.algorithms import sampling as logprob
from jaxroll.algorithms.advantages import Objective, Tokens
from jaxroll.kernels.attention import SharedRows, lengthened
from jaxroll.kernels.choice import UNASKED, Choice
from jaxroll.learner import lora
from jaxroll.learner import state as states
from jaxroll.learner import step_metrics as statistics
from jaxroll.learner.lora import Lora
from jaxroll.learner.packing import EXPERTS, PROMPT_IDS, SHARE, STREAMS, SUPPORT
from jaxroll.learner.state import Accumulator, Optimizer, Params, TrainState
from jaxroll.models import moe, transformer
from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.models.moe import Load
from jaxroll.protocols import Progress
from jaxroll.sharding import Layout, batch_spec, replicated

_EVENT = "/jax/core/compile/backend_compile_duration"


# --- compilation: programs compiled ahead of time, and a counter that shows that no others are compiled


class AheadOfTime:
    """Programs by name and number of rows, each compiled once; calls only look them up.

    `lowered(name, rows)` returns a program before compilation. `owner` and `row_tokens` appear in progress messages.
    """

    def __init__(self, owner: str, row_tokens: int, lowered: Callable[[str, int], jax.stages.Lowered]) -> None:
        self._owner, self._row_tokens, self._lowered = owner, row_tokens, lowered
        self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}

    def get(self, name: str, rows: int = 0, progress: Progress | None = None) -> Callable[..., Any]:
        """The program, compiled on first use; `progress` gets its name before and the duration after compilation."""
        key = (name, rows)
        if key not in self._compiled:
            what = f"{self._owner} {name}" + (f" [{rows}, {self._row_tokens}]" if rows else "")
            if progress:
                progress(f"compiling {what}")
            started = time.monotonic()
            self._compiled[key] = self._lowered(name, rows).compile()
            if progress:
                progress(f"compiled {what}: {time.monotonic() - started:.1f} s")
        return self._compiled[key]


class CompileCounter:
    """Count of compilations on one thread since creation or the last `reset`; hits of the persistent cache count too.

    It counts one thread only, because roles that share a process compile on threads of their own.
    """

    def __init__(self) -> None:
        self.count, self._thread = 0, threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._seen)

    def reset(self) -> None:
        """Start again at 0, for the thread that calls this."""
        self.count, self._thread = 0, threading.get_ident()

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._seen)

    def _seen(self, event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if event == _EVENT and threading.get_ident() == self._thread:
            self.count += 1


# --- programs of a step

Streams = Mapping[str, jax.Array]
PROXIMAL, REFERENCE = "proximal", "reference"  # streams that `logprobs` adds to a micro-batch


@dataclasses.dataclass(frozen=True)
class Routers:
    """The training of a model with experts.

    With `replay` the experts are those that the sampler chose. `loss` is the coefficient of `moe.balance_loss`,
    `bias_rate` the step of the biases (`moe.with_moved_biases`).
    """

    replay: bool
    loss: float
    bias_rate: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that determines the programs.

    `added` names the log-prob streams computed before the gradients: under the parameters at the start of the claim
    (PROXIMAL), and under the reference model (REFERENCE).
    """

    spec: ModelSpec
    layout: Layout
    token_loss: Objective
    optimizer: Optimizer
    temperature: float
    row_tokens: int  # T
    age_buckets: int = 1
    added: tuple[str, ...] = ()
    logits_mb: float = math.inf  # see `token_terms`
    attention: Choice = UNASKED
    lora: Lora | None = None  # if set, `params` of a state are adapters and `base` the frozen parameters
    rows: SharedRows | None = None  # layout of a row that shares prompts
    support: int = 0  # K of the stream SUPPORT; 0: samples are not truncated
    routers: Routers | None = None  # of a model with experts

    @property
    def bias_rate(self) -> float:
        """The step of the biases of routers; 0 if they do not move."""
        return self.routers.bias_rate if self.routers else 0.0

    @property
    def streams(self) -> Mapping[str, np.dtype]:
        """The streams of a micro-batch as it is packed, by name."""
        extra = [name for name, used in ((PROMPT_IDS, self.rows), (SUPPORT, self.support)) if used]
        found = STREAMS | dict.fromkeys(extra, np.dtype(np.int32))
        found |= {SHARE: np.dtype(np.float32)} if self.routers else {}
        return found | ({EXPERTS: moe.recorded_dtype(self.spec)} if self.routers and self.routers.replay else {})


def hidden_states(
    recipe: Recipe, params: Params, streams: Streams, stacks: Params | None = None, sums: Params | None = None
) -> Array:
    """The final hidden states [R, T, D] of packed rows; `stacks` and `sums` as in `transformer.forward_with_load`."""
    return _with_load(recipe, params, streams, stacks, sums)[0]


def _with_load(
    recipe: Recipe, params: Params, streams: Streams, stacks: Params | None = None, sums: Params | None = None
) -> tuple[Array, Load | None]:
    """The hidden states, and the load of the experts; `stacks` and `sums` as in `transformer.forward_with_load`."""
    choices = None
    if recipe.routers and recipe.routers.replay:
        choices = streams[EXPERTS].reshape(*streams["tokens"].shape, recipe.spec.layers, -1)
    return transformer.forward_with_load(
        recipe.spec,
        params,
        streams["tokens"],
        streams["positions"],
        streams["segment_ids"],
        layout=recipe.layout,
        attention=recipe.attention.name,
        rows=recipe.rows,
        prompt_ids=streams.get(PROMPT_IDS),
        choices=choices,
        stacks=stacks,
        sums=sums,
    )


def terms_of(recipe: Recipe, params: Params, streams: Streams) -> TokenTerms:
    """Log-prob, entropy and logit variance of every token of packed rows; undefined where `mask` is False."""
    return _terms_of_hidden(recipe, params, hidden_states(recipe, params, streams), streams)


def _terms_of_hidden(recipe: Recipe, params: Params, hidden: Array, streams: Streams) -> TokenTerms:
    return token_terms(
        recipe.spec,
        recipe.layout,
        recipe.temperature,
        params,
        hidden,
        streams["tokens"],
        recipe.logits_mb,
        streams.get(SUPPORT),
    )


def gradients(
    recipe: Recipe, params: Params, streams: Streams, base: Params | None = None
) -> tuple[Params, statistics.Statistics]:
    """∇ Σ weight · token loss over one micro-batch by `params` (with LoRA: adapters on `base`), and its statistics.

    With experts, the loss also has their balance loss times the micro-batch's share of the step's tokens.
    """
    grads, seen = _gradients(recipe, params, streams, base or {})
    return model_params.unstacked(recipe.spec, grads), seen


def _gradients(
    recipe: Recipe, params: Params, streams: Streams, base: Params, held: Params | None = None
) -> tuple[Params, statistics.Statistics]:
    """`gradients`, by `lora.differentiated`; with `held`, their sum with `held`."""

    def total(model: Params, stacks: Params | None, sums: Params | None) -> tuple[Array, statistics.Statistics]:
        hidden, load = _with_load(recipe, model, streams, stacks, sums)
        terms = _terms_of_hidden(recipe, model, hidden, streams)
        logprobs = jnp.where(streams["mask"], terms.logprob, 0.0)
        # With one optimizer step per claim, the proximal policy is this forward pass: no extra program is needed.
        proximal = streams.get(PROXIMAL, jax.lax.stop_gradient(logprobs))
        reference = streams.get(REFERENCE, jnp.zeros_like(logprobs))
        given = (streams[name] for name in ("advantage", "mask", "segment_ids", "ages"))
        token = recipe.token_loss(Tokens(logprobs, proximal, streams["behaviour"], reference, *given))
        seen = statistics.of_batch(streams, proximal, token, terms.entropy, terms.logits_variance, recipe.age_buckets)
        loss = jnp.sum(jnp.where(streams["mask"], streams["weight"] * token.loss, 0.0))
        if recipe.routers and load is not None:
            balance = moe.balance_loss(load) * jnp.sum(streams[SHARE])
            seen = statistics.with_experts(seen, balance, load.chosen)
            loss = loss + recipe.routers.loss * balance if recipe.routers.loss else loss
        return loss, seen

    return differentiate(recipe, params, total, base, held)


def differentiate(
    recipe: Recipe,
    params: Params,
    total: Callable[[Params, Params | None, Params | None], tuple[Array, Any]],
    base: Params,
    held: Params | None = None,
) -> tuple[Params, Any]:
    """The gradient of `total` by `lora.differentiated`, with `held` added to it, and the second result of `total`.

    `total` gets the parameters that the model computes with, the stacks of those in the loop (None without a loop), and
    the sums of `transformer.forward_with_load`.
    """
    trained, sums = dict(lora.differentiated(recipe.spec, recipe.layout, recipe.lora, params)), {}
    # The loop that sums recomputes every layer, and computes gradients of the stacks themselves.
    if held is not None and recipe.spec.remat == "layer" and not recipe.lora:
        sums = {name: held[name] for name in trained if name not in params}
    fixed = {name: trained.pop(name) for name in sums}

    def of(own: Params, sums: Params) -> tuple[Array, Any]:
        every = own | fixed
        model = params | {name: every[name] for name in every.keys() & params.keys()}
        stacks = {name: value for name, value in every.items() if name not in params}
        if recipe.lora and stacks:
            stacks = lora.merged_stacks(recipe.spec, recipe.layout, recipe.lora, base, stacks)
            return total(dense(recipe, model, model_params.outside_loop(recipe.spec, base)), stacks, None)
        return total(dense(recipe, model, base), stacks or None, sums or None)

    (grads, sums), seen = jax.grad(of, argnums=(0, 1), has_aux=True)(trained, sums)
    grads = {name: grad.astype(jnp.float32) for name, grad in grads.items()}
    if held is not None:
        grads = {name: held[name] + grad for name, grad in grads.items()}
    return grads | sums, seen


def dense(recipe: Recipe, params: Params, base: Params) -> Params:
    """The parameters that the model computes with: `params`, or with LoRA `base` merged with the adapters `params`."""
    return lora.merged(recipe.spec, recipe.layout, recipe.lora, base, params) if recipe.lora else params


class Programs:
    """The programs of one recipe, compiled ahead of time; calls only look them up."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        spec, layout, transform = recipe.spec, recipe.layout, recipe.optimizer.transform
        self.state = states.abstract(spec, layout, transform, recipe.lora)
        where = model_params.shardings(spec, layout.mesh, layout.rules)
        self.params = {name: _struct(leaf, where[name]) for name, leaf in model_params.abstract(spec).items()}
        self.base = self.params if recipe.lora else {}
        self._everywhere = replicated(recipe.layout.mesh)
        self._batch = NamedSharding(recipe.layout.mesh, batch_spec(recipe.layout.rules))
        loads = (spec.layers, spec.experts) if recipe.routers else None
        seen = jax.eval_shape(lambda: statistics.zeros(recipe.age_buckets, loads))
        self.accumulator = described(
            lora.abstract_gradients(spec, layout, recipe.lora, self.state.params), seen, layout.mesh
        )
        self._single = described(self.state.params, seen, layout.mesh)
        loops = self.accumulator.grads.keys() != self.state.params.keys()
        optimizer = recipe.optimizer, recipe.bias_rate
        self._by_layer = states.ByLayer(spec, *optimizer, self.state, self.accumulator) if loops else None
        self._get = AheadOfTime("learner", recipe.row_tokens, self.lowered).get

    def compile(self, buckets: Sequence[int], progress: Progress | None = None, *, logprobs: bool = False) -> None:
        """Compile everything for micro-batches of `buckets` rows, reporting each program and its duration.

        With `logprobs`, compile that program even if the recipe adds no stream.
        """
        for name in ("zeros", *(states.ByLayer.PROGRAMS if self._by_layer else ("apply",))):
            self._get(name, 0, progress)
        if self.recipe.lora:
            self._get("merge", 0, progress)
        for rows in buckets:
            self._get("accumulate", rows, progress)
            if self.recipe.added or logprobs:
                self._get("logprobs", rows, progress)

    def zeros(self) -> Accumulator:
        """The accumulator of no micro-batches."""
        return self._get("zeros")()

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
        return self._get("accumulate", streams["tokens"].shape[0])(params, accumulator, dict(streams), base or {})

    def merge(self, params: Params, base: Params) -> Params:
        """`base` merged with the adapters `params`."""
        merge, found = self._get("merge"), dict(base)
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
        return self._get("logprobs", streams["tokens"].shape[0])(
            params, {name: streams[name] for name in self.recipe.streams}
        )

    def apply(self, state: TrainState, accumulator: Accumulator) -> tuple[TrainState, Accumulator, dict[str, Any]]:
        """The next state, an empty accumulator, and the step's report; both arguments are donated."""
        if self._by_layer is None:
            return self._get("apply")(state, accumulator)
        state, report = self._by_layer.applied(self._get, state, accumulator)
        return state, self.zeros(), report

    def lowered(self, name: str, rows: int = 0) -> jax.stages.Lowered:
        """The program before compilation; only those of micro-batches have rows. Needs the mesh but no real devices."""
        recipe, state, accumulator = self.recipe, self.state, self.accumulator
        if name == "zeros":
            return jax.jit(lambda: layouts.zeroed(accumulator), out_shardings=layouts.shardings_of(accumulator)).lower()
        if name == "merge":
            given = [dict(state.params), dict(self.base)]
            if self._by_layer is not None:  # a program for each layer
                given = [{name: x for name, x in of.items() if name.startswith("layers.00.")} for of in given]
            merge = jax.jit(functools.partial(dense, recipe), out_shardings=layouts.shardings_of(given[1]))
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
        grads, seen = _gradients(self.recipe, params, streams, base, accumulator.grads)
        return Accumulator(grads, statistics.merged(accumulator.statistics, seen))

    def _logprobs(self, params: Params, streams: Streams) -> jax.Array:
        terms = terms_of(self.recipe, params, streams)
        return jnp.where(streams["mask"], terms.logprob, 0.0)

    def _apply(self, state: TrainState, accumulator: Accumulator) -> tuple[TrainState, Accumulator, dict[str, Any]]:
        found, empty, report = states.applied(self.recipe.optimizer, state, accumulator)
        if rate := self.recipe.bias_rate:
            params = moe.with_moved_biases(found.params, accumulator.statistics[statistics.LOADS], rate)
            found = dataclasses.replace(found, params=params)
        return found, empty, report


def described(grads: Mapping[str, Any], statistics: Mapping[str, Any], mesh: Mesh) -> Accumulator:
    """The abstract accumulator for gradients sharded like `grads`; the statistics are replicated."""
    everywhere = replicated(mesh)
    return Accumulator(dict(grads), {name: _struct(leaf, everywhere) for name, leaf in statistics.items()})


def _struct(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


# --- output head: log-probabilities and entropies, a part of each row at a time
#
# R rows, T tokens of a row, D width, V vocabulary. The logits of all tokens, [R, T, V], would be by far the largest
# array of a step (2.5 GB for 4,096 tokens of Qwen3). So they are computed for `part_tokens` tokens of each row at a
# time, and recomputed in the backward pass.


class TokenTerms(NamedTuple):
    """Per-token results of one forward pass, float32 [R, T]."""

    logprob: Float[Array, "R T"]
    entropy: Float[Array, "R T"]
    logits_variance: Float[Array, "R T"]


def token_terms(
    spec: ModelSpec,
    layout: Layout,
    temperature: float,
    params: transformer.Params,
    hidden: Float[Array, "R T D"],
    tokens: Int[Array, "R T"],
    logits_mb: float,
    support: Int[Array, "R T K"] | None = None,
) -> TokenTerms:
    """The terms of every token of packed rows, from the previous token's hidden state; undefined for a row's first.

    With `support`, log-probs and entropies are those of the distribution over these ids (see `token_logprobs`). At most
    `logits_mb` MiB of float32 logits exist on a device at a time.
    """
    R, T = tokens.shape
    part = part_tokens(spec, layout, (R, T), logits_mb)

    @jax.checkpoint
    def terms(params: transformer.Params, before: Array, tokens: Array, support: Array | None) -> TokenTerms:
        logits = transformer.logits(spec, params, before)
        constant = jax.lax.stop_gradient(logits)
        entropy = logprob.entropies(constant, temperature, support)
        return TokenTerms(logprob.token_logprobs(logits, tokens, temperature, support), entropy, constant.var(axis=-1))

    given = jnp.roll(hidden, 1, axis=1), tokens, support
    if part == T:
        return terms(params, *given)
    S = _token_shards(layout, T)  # a part has as many tokens of each shard

    def cut(x: Array) -> Array:
        own = lengthened(x.reshape(R * S, T // S, *x.shape[2:]), part // S)
        return jnp.moveaxis(own.reshape(R, S, -1, part // S, *x.shape[2:]), 2, 0).reshape(-1, R, part, *x.shape[2:])

    def whole(x: Array) -> Array:
        own = jnp.moveaxis(x.reshape(-1, R, S, part // S), 0, 2).reshape(R, S, -1)
        return own[:, :, : T // S].reshape(R, T)

    _, parts = jax.lax.scan(lambda _, x: (None, terms(params, *x)), None, jax.tree.map(cut, given))
    return jax.tree.map(whole, parts)


def part_tokens(spec: ModelSpec, layout: Layout, shape: tuple[int, int], logits_mb: float) -> int:
    """The number of tokens of a row whose logits exist at once.

    T, halved (rounding up) until their logits take at most `logits_mb` MiB on a device, and at least one on each shard
    of the tokens.
    """
    rows, tokens = shape
    local = layout.sharding(("rows", "tokens", "vocab"), (rows, 1, spec.vocab_size)).shard_shape
    a_token = 4 * math.prod(local((rows, 1, spec.vocab_size)))
    shards = _token_shards(layout, tokens)
    part = tokens // shards
    while part > 1 and part * a_token > logits_mb * 2**20:
        part = -(-part // 2)
    return part * shards


def _token_shards(layout: Layout, tokens: int) -> int:
    """The number of shards of a row of `tokens`."""
    return tokens // layout.sharding(("rows", "tokens"), (1, tokens)).shard_shape((1, tokens))[1]
