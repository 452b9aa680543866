"""The jitted programs of an engine: prefill-and-insert, decode, cancel.

All state lives on the device in static shapes and is donated from call to call; parameters are an argument, so a weight
flip is a change of reference. A token's key depends on its identity and position alone, and a row's arithmetic on that
row alone, so within one program a request's tokens do not depend on its slot, its neighbours or the moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

from jaxroll.engine import packets
from jaxroll.engine.packets import Sizes
from jaxroll.math import sampling
from jaxroll.models import cache as kv
from jaxroll.models import params as model_params
from jaxroll.models import transformer
from jaxroll.models.families import ModelSpec
from jaxroll.models.params import Params
from jaxroll.sharding.rules import Layout, Rules, sharding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """Everything that S slots are doing. A slot's last token stands at `positions` and is not in the cache yet."""

    cache: kv.KVCache
    requests: Int[Array, "S C"]  # see packets.request_row
    tokens: Int[Array, " S"]
    logprobs: Float[Array, " S"]
    positions: Int[Array, " S"]
    counts: Int[Array, " S"]
    status: Int[Array, " S"]


Prefill = Callable[[Params, Key[Array, ""], DecodeState, ArrayLike], DecodeState]
Decode = Callable[[Params, Key[Array, ""], DecodeState, Int[Array, ""]], tuple[DecodeState, Int[Array, "R S"]]]
Cancel = Callable[[DecodeState, ArrayLike], DecodeState]


@dataclass(frozen=True)
class Programs:
    """The jitted functions of one engine, and where their arguments lie."""

    sizes: Sizes
    prefill: dict[int, Prefill]  # by bucket
    decode: Decode
    cancel: Cancel
    state: DecodeState  # ShapeDtypeStructs with shardings
    params: dict[str, NamedSharding]
    replicated: NamedSharding

    def empty(self) -> DecodeState:
        """All slots idle."""
        like = self.state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
        return jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like), out_shardings=shardings
        )()

    def compiled(self) -> int:
        """How many programs have been compiled so far."""
        return sum(program._cache_size() for program in (*self.prefill.values(), self.decode, self.cancel))  # type: ignore[attr-defined]


def build(spec: ModelSpec, mesh: Mesh, rules: Rules, sizes: Sizes) -> Programs:
    """The programs for `spec` on `mesh`. Nothing is compiled or allocated yet."""
    whole = NamedSharding(mesh, PartitionSpec())
    like = abstract_state(spec, mesh, rules, sizes)
    state = jax.tree.map(lambda leaf: leaf.sharding, like)
    params = model_params.shardings(spec, mesh, rules)
    jit = partial(jax.jit, in_shardings=(params, whole, state, whole), donate_argnums=2)
    model = _Model(spec, Layout(mesh, rules))
    return Programs(
        sizes,
        prefill={bucket: jit(partial(_prefill, model, sizes, bucket), out_shardings=state) for bucket in sizes.buckets},
        decode=jit(partial(_decode, model, sizes), out_shardings=(state, whole)),
        # a partial of its own: jitted wrappers of one function share their cache, and `compiled` counts this engine's
        cancel=jax.jit(partial(_cancel), in_shardings=(state, whole), out_shardings=state, donate_argnums=0),
        state=like,
        params=params,
        replicated=whole,
    )


def lowered(spec: ModelSpec, mesh: Mesh, rules: Rules, sizes: Sizes) -> dict[str, jax.stages.Lowered]:
    """Name to lowered program, without touching a device: for ahead-of-time compilation and for sizing."""
    programs = build(spec, mesh, rules, sizes)

    def whole(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=programs.replicated)

    params = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=programs.params[name])
        for name, leaf in model_params.abstract(spec).items()
    }
    seed = whole((), jax.eval_shape(jax.random.key, 0).dtype)
    found = {
        f"prefill_{bucket}": prefill.lower(params, seed, programs.state, whole(sizes.batch_shape(bucket), jnp.int32))  # type: ignore[attr-defined]
        for bucket, prefill in programs.prefill.items()
    }
    return found | {"decode": programs.decode.lower(params, seed, programs.state, whole((), jnp.int32))}  # type: ignore[attr-defined]


def abstract_state(spec: ModelSpec, mesh: Mesh, rules: Rules, sizes: Sizes) -> DecodeState:
    """The decode state as ShapeDtypeStructs with shardings; slots are spread over the mesh by the rules."""
    slots = sizes.slots

    def leaf(shape: tuple[int, ...], dtype) -> Any:
        logical = ("slots",) + (None,) * (len(shape) - 1)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, logical, rules, shape))

    integers = leaf((slots,), jnp.int32)
    return DecodeState(
        cache=kv.abstract(spec, slots, sizes.max_tokens, mesh, rules),
        requests=leaf((slots, sizes.columns), jnp.int32),
        tokens=integers,
        logprobs=leaf((slots,), jnp.float32),
        positions=integers,
        counts=integers,
        status=integers,
    )


@dataclass(frozen=True)
class _Model:
    """A model and where its activations lie."""

    spec: ModelSpec
    layout: Layout


def _draw(
    seed: Key[Array, ""], requests: Int[Array, "N C"], logits: Float[Array, "N V"], positions: Int[Array, " N"]
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    """One token per request for `positions`, and its log-prob under the distribution it was drawn from."""
    column = requests.T
    identity = column[packets.GROUP], column[packets.MEMBER], column[packets.SALT]
    keys = jax.vmap(sampling.token_key, (None, 0, 0, 0, 0))(seed, *identity, positions + column[packets.KEY_OFFSET])
    temperature, top_p = packets.floats(column[packets.TEMPERATURE]), packets.floats(column[packets.TOP_P])
    return sampling.sample(logits, keys, temperature, column[packets.TOP_K], top_p)


def _status(
    requests: Int[Array, "N C"], tokens: Int[Array, " N"], counts: Int[Array, " N"]
) -> Int[Array, " N"]:  # fmt: skip
    """Whether a request goes on after `tokens`, its `counts`-th new token; a stop token is reported before length."""
    full = jnp.where(counts >= requests[:, packets.MAX_TOKENS], packets.LENGTH, packets.RUNNING)
    return jnp.where(packets.is_stop(tokens, requests), packets.STOP, full)


def _prefill(
    model: _Model, sizes: Sizes, bucket: int,
    params: Params, seed: Key[Array, ""], state: DecodeState, packed: Int[Array, " N"],
) -> DecodeState:  # fmt: skip
    """`state` with the requests of `packed` inserted, their first token drawn. Entries of no slot change nothing."""
    batch = packets.unpack(packed, bucket, sizes)
    logits, keys, values = transformer.prefill(model.spec, params, batch.tokens, batch.lengths, layout=model.layout)
    lengths = batch.lengths[batch.rows]
    tokens, logprobs = _draw(seed, batch.requests, logits[batch.rows], lengths)
    counts = jnp.ones_like(tokens)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[batch.slots].set(new, mode="drop")

    return DecodeState(
        cache=kv.insert(state.cache, keys[:, batch.rows], values[:, batch.rows], batch.slots),
        requests=put(state.requests, batch.requests),
        tokens=put(state.tokens, tokens),
        logprobs=put(state.logprobs, logprobs),
        positions=put(state.positions, lengths),
        counts=put(state.counts, counts),
        status=put(state.status, _status(batch.requests, tokens, counts)),
    )


def _decode_step(model: _Model, params: Params, seed: Key[Array, ""], state: DecodeState) -> DecodeState:
    """`state` with one more token in every running slot. Other slots compute too, and nothing of it is kept."""
    logits, cache = transformer.decode(
        model.spec, params, state.cache, state.tokens, state.positions, layout=model.layout
    )
    running = state.status == packets.RUNNING
    positions = state.positions + running
    tokens, logprobs = _draw(seed, state.requests, logits, positions)
    counts = state.counts + running
    return replace(
        state,
        cache=cache,
        tokens=jnp.where(running, tokens, state.tokens),
        logprobs=jnp.where(running, logprobs, state.logprobs),
        positions=positions,
        counts=counts,
        status=jnp.where(running, _status(state.requests, tokens, counts), state.status),
    )


def _decode(
    model: _Model, sizes: Sizes,
    params: Params, seed: Key[Array, ""], state: DecodeState, enough_free: Int[Array, ""],
) -> tuple[DecodeState, Int[Array, "R S"]]:  # fmt: skip
    """Up to `sizes.chunk` steps and their report. It ends early when `enough_free` slots stand free, or all do."""
    chunk, slots = sizes.chunk, sizes.slots

    def goes_on(carry) -> Bool[Array, ""]:
        step, state, _, _ = carry
        free = slots - jnp.sum(state.status == packets.RUNNING)
        return (step < chunk) & (free < jnp.minimum(enough_free, slots))

    def one(carry):
        step, state, tokens, logprobs = carry
        state = _decode_step(model, params, seed, state)
        return step + 1, state, tokens.at[step].set(state.tokens), logprobs.at[step].set(state.logprobs)

    rows = jnp.zeros((chunk, slots), jnp.int32), jnp.zeros((chunk, slots), jnp.float32)
    steps, after, tokens, logprobs = jax.lax.while_loop(goes_on, one, (jnp.int32(0), state, *rows))
    ends = [state.tokens, packets.bits(state.logprobs), after.counts, after.status, jnp.full(slots, steps)]
    return after, jnp.concatenate([tokens, packets.bits(logprobs), jnp.stack(ends)])


def _cancel(state: DecodeState, slots: Bool[Array, " S"]) -> DecodeState:
    """`state` with `slots` idle."""
    return replace(state, status=jnp.where(slots, packets.IDLE, state.status))
