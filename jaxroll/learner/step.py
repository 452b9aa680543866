"""Loss and gradients of packed rows, which the learner's programs compute, and the recipe that determines them.

`trainer.TrainingPrograms` compiles and calls them.

R rows, T tokens of a row. The log-prob of token t comes from the hidden state at t − 1 of the same segment. The first
token of a segment has no log-prob and never carries loss.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from jaxroll import sharding as layouts
from jaxroll.algorithms import registry
from jaxroll.algorithms import sampling as logprob
from jaxroll.algorithms.advantages import Objective, Tokens
from jaxroll.algorithms.registry import Algorithm
from jaxroll.config import Config, LearnerConfig
from jaxroll.config.derived import sample_tokens, support_tokens
from jaxroll.kernels import choice
from jaxroll.kernels.attention import SharedRows, lengthened
from jaxroll.kernels.choice import UNASKED, Choice
from jaxroll.learner import lora
from jaxroll.learner import state as states
from jaxroll.learner import step_metrics as statistics
from jaxroll.learner.lora import Lora
from jaxroll.learner.packing import EXPERTS, PROMPT_IDS, SHARE, STREAMS, SUPPORT
from jaxroll.learner.state import Accumulator, Optimizer, Params
from jaxroll.models import families, moe, transformer
from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.models.layers import head_logits
from jaxroll.models.moe import ExpertLoad
from jaxroll.policy.limiter import max_age
from jaxroll.protocols import Progress
from jaxroll.sharding import Layout, replicated

_EVENT = "/jax/core/compile/backend_compile_duration"


# --- compilation: programs compiled ahead of time, and a counter that shows that no others are compiled


class AheadOfTime(dict[tuple[str, int], Callable[..., Any]]):
    """Programs by name and number of rows (0: none), each compiled when it is first looked up.

    `lowered(name, rows)` returns a program before compilation. `owner` and `row_tokens` appear in progress messages.
    """

    def __init__(self, owner: str, row_tokens: int, lowered: Callable[[str, int], jax.stages.Lowered]) -> None:
        super().__init__()
        self._owner, self._row_tokens, self._lowered = owner, row_tokens, lowered

    def compile(self, name: str, rows: int = 0, progress: Progress | None = None) -> None:
        """Compile the program unless it is there; `progress` gets its name before and the duration after that."""
        if (name, rows) in self:
            return
        what = f"{self._owner} {name}" + (f" [{rows}, {self._row_tokens}]" if rows else "")
        if progress:
            progress(f"compiling {what}")
        started = time.monotonic()
        self[name, rows] = self._lowered(name, rows).compile()
        if progress:
            progress(f"compiled {what}: {time.monotonic() - started:.1f} s")

    def __missing__(self, key: tuple[str, int]) -> Callable[..., Any]:
        self.compile(*key)
        return self[key]


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
    streaming: bool = False  # gradients are divided by the step's denominator at its end

    @classmethod
    def of(cls, config: Config, spec: ModelSpec, layout: Layout, algorithm: Algorithm | None = None) -> Recipe:
        """The recipe of the learner's programs under this config."""
        algorithm = algorithm or registry.build(config.learner)
        families.check_routing(spec, config)
        added = [PROXIMAL] if config.learner.minibatches > 1 else []
        remat, rows = config.learner.remat, shared_rows(config.learner)
        return cls(
            spec=dataclasses.replace(
                spec, remat=spec.remat if remat == "auto" else remat, scan=config.learner.scan_layers
            ),
            layout=layout,
            token_loss=algorithm.objective,
            optimizer=states.build(config.learner),
            temperature=config.sampling.temperature,
            row_tokens=rows.row_tokens if rows else config.learner.row_tokens,
            age_buckets=max_age(config.schedule.alpha) + 1,
            added=(*added, REFERENCE) if algorithm.needs_reference else tuple(added),
            logits_mb=config.learner.logits_mb,
            attention=Choice(choice.XLA, "prompts are shared") if rows else packed_attention(config, spec, layout),
            lora=Lora.of(config.learner),
            rows=rows,
            support=support_tokens(config.sampling),
            routers=_routers(config.learner, spec) if spec.experts else None,
            streaming=config.learner.streaming,
        )

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


def _routers(learner: LearnerConfig, spec: ModelSpec) -> Routers:
    return Routers(learner.routing_replay, learner.router_loss, learner.router_bias_rate if spec.router_bias else 0.0)


def shared_rows(learner: LearnerConfig) -> SharedRows | None:
    """The layout of rows that share prompts; None if every sample has its own copy of its prompt."""
    if not learner.shared_prompt_tokens:
        return None
    return SharedRows(learner.shared_prompt_tokens, learner.shared_prompt_rows, learner.row_tokens)


def packed_attention(config: Config, spec: ModelSpec, layout: Layout) -> Choice:
    """The attention implementation for packed rows; ConfigError when the config names one that cannot work here."""
    mesh = layout.mesh
    site = choice.Site(
        spec, layouts.platform(mesh), mesh.shape["tensor"] * mesh.shape["sequence"], sample_tokens(config.learner)
    )
    return choice.choose("packed", config.learner.attention, site)


def hidden_states(
    recipe: Recipe, params: Params, streams: Streams, stacks: Params | None = None, sums: Params | None = None
) -> Array:
    """The final hidden states [R, T, D] of packed rows; `stacks` and `sums` as in `transformer.forward_with_load`."""
    return _with_load(recipe, params, streams, stacks, sums)[0]


def _with_load(
    recipe: Recipe, params: Params, streams: Streams, stacks: Params | None = None, sums: Params | None = None
) -> tuple[Array, ExpertLoad | None]:
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
    grads, seen = accumulated_gradients(recipe, params, streams, base or {})
    return model_params.unstacked(recipe.spec, grads), seen


def accumulated_gradients(
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
    if held is not None and recipe.spec.remat in ("layer", "offload") and not recipe.lora:
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


def described(grads: Mapping[str, Any], statistics: Mapping[str, Any], mesh: Mesh) -> Accumulator:
    """The abstract accumulator for gradients sharded like `grads`; the statistics are replicated."""
    everywhere = replicated(mesh)
    return Accumulator(dict(grads), {name: sharded_like(leaf, everywhere) for name, leaf in statistics.items()})


def sharded_like(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """`shape` with this sharding."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


# --- output head: log-probabilities and entropies, a part of each row at a time
#
# R rows, T tokens of a row, D width, V vocabulary. The logits of all tokens, [R, T, V], would be by far the largest
# array of a step (2.5 GB for 4,096 tokens of Qwen3). So they are computed for `part_tokens` tokens of each row at a
# time, and recomputed in the backward pass.
#
# The head is divided over the devices. The compiler would gather it, and sum its gradient, in each turn of the loop
# over parts. So each device runs the loop over its own tokens, with all of the head, or its slice of the vocabulary
# where the mesh has an axis tensor: gathered once before the loop, in the dtype that the model computes in, and kept
# for the backward loop. That adds up this device's gradient, in float32, and the devices reduce it once behind it.


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

    weight, tied = params["embed" if spec.tied_embeddings else "head"], spec.tied_embeddings
    head = layout.sharding(("vocab", "embed") if tied else ("embed", "vocab"), weight.shape).spec
    over = "tensor" if "tensor" in jax.tree.leaves(tuple(head)) else None

    def terms(weight: Array, before: Array, tokens: Array, support: Array | None) -> TokenTerms:
        logits = head_logits(before, weight, tied=tied, softcap=spec.logit_softcap)
        constant = jax.lax.stop_gradient(logits)
        return TokenTerms(
            logprob.token_logprobs(logits, tokens, temperature, support, over),
            logprob.entropies(constant, temperature, support, over),
            logprob.variances(constant, over),
        )

    R, T = tokens.shape
    part = part_tokens(spec, layout, (R, T), logits_mb) // _token_shards(layout, T)
    rows = layout.sharding(("rows", "tokens"), tokens.shape).spec
    run = functools.partial(_in_parts, terms, part, axes=head[int(tied)] or (), at=int(tied))
    given = jnp.roll(hidden, 1, axis=1), tokens, support
    return jax.shard_map(run, mesh=layout.mesh, in_specs=(head, rows), out_specs=rows, check_vma=False)(weight, given)


def _in_parts(
    terms: Callable[..., TokenTerms],
    part: int,
    weight: Array,
    given: tuple[Array, Array, Array | None],
    *,
    axes: str | tuple[str, ...],
    at: int,
) -> TokenTerms:
    """`terms` of one device's tokens, of `part` tokens of each row at a time.

    `weight` is the device's part of the head, whose axis `at` is divided over the mesh `axes`.
    """
    R, T = given[1].shape

    def cut(x: Array) -> Array:
        return jnp.moveaxis(lengthened(x, part).reshape(R, -1, part, *x.shape[2:]), 1, 0)

    def whole(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(R, -1, *x.shape[3:])[:, :T]

    @jax.custom_vjp
    def run(weight: Array, before: Array, *fixed: Array | None) -> TokenTerms:
        return forwards(weight, before, *fixed)[0]

    def forwards(weight: Array, before: Array, *fixed: Array | None) -> tuple[TokenTerms, Any]:
        head = weight.astype(before.dtype)
        head = jax.lax.all_gather(head, axes, axis=at, tiled=True) if axes else head
        given = jax.tree.map(cut, (before, *fixed))
        _, parts = jax.lax.scan(lambda _, x: (None, terms(head, *x)), None, given)
        return jax.tree.map(whole, parts), (head, given)

    def backwards(kept: Any, cotangents: TokenTerms) -> tuple[Any, ...]:
        head, given = kept

        def one(total: Array, x: tuple[Any, TokenTerms]) -> tuple[Array, Array]:
            (before, *fixed), cotangent = x
            back = jax.vjp(lambda head, before: terms(head, before, *fixed), head, before)[1]
            of_head, of_hidden = back(cotangent)
            return total + of_head.astype(jnp.float32), of_hidden

        none = jnp.zeros_like(head, jnp.float32)
        total, of_hidden = jax.lax.scan(one, none, (given, jax.tree.map(cut, cotangents)))
        total = jax.lax.psum_scatter(total, axes, scatter_dimension=at, tiled=True) if axes else total
        return total, whole(of_hidden), None, None

    run.defvjp(forwards, backwards)
    return run(weight, *given)


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
