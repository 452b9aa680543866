"""The jitted programs of an engine: prefill prompts, insert requests, decode, and move pages.

All state is on the device in static shapes, and each call donates it. Parameters are an argument, so a weight swap is a
change of a reference. A token's random key depends only on its identity and position, and a row's arithmetic only on
that row, so within one program a request's tokens do not depend on its slot, its neighbors or the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from jaxroll import sharding as layout
from jaxroll.algorithms import sampling
from jaxroll.config import WeightSwap
from jaxroll.engine import decoding
from jaxroll.engine import requests as inputs
from jaxroll.engine.decoding import DecodeState, Model
from jaxroll.engine.requests import Sizes
from jaxroll.errors import ConfigError
from jaxroll.kernels import choice
from jaxroll.kernels.choice import DENSE, PLAIN, EngineChoices
from jaxroll.models import cache as dense
from jaxroll.models import cache as kv
from jaxroll.models import params as model_params
from jaxroll.models import transformer
from jaxroll.models.families import ModelSpec
from jaxroll.models.params import Held, Params
from jaxroll.sharding import Layout, Rules, sharding

Update = Callable[[DecodeState, ArrayLike], DecodeState]
Prefill = Callable[[Held, DecodeState, ArrayLike], DecodeState]
Insert = Callable[[Key[Array, ""], DecodeState, ArrayLike], DecodeState]
Decode = Callable[
    [Held, Key[Array, ""], DecodeState, Int[Array, "S J"], Int[Array, " 2"]], tuple[DecodeState, Int[Array, "R S"]]
]
Pages = kv.KVCache  # the pages of one request: leaves [J, K, U, H]
Save = Callable[[DecodeState, ArrayLike], Pages]
Load = Callable[[DecodeState, ArrayLike, Pages], DecodeState]
Experts = Callable[[DecodeState, ArrayLike], jax.Array]
Allow = Callable[[DecodeState, ArrayLike, ArrayLike], DecodeState]


@dataclass(frozen=True)
class EnginePrograms:
    """The jitted functions of one engine, and the shardings of their arguments."""

    sizes: Sizes
    prefill: dict[tuple[bool, int], Prefill]  # by (fresh, bucket)
    insert: Insert
    restore: Update
    copy: Update
    copy_rings: Update
    decode: Decode
    cancel: Update
    allow: Allow
    save: Save
    load: Load
    experts: Experts | None  # None in an engine that does not record choices
    state: DecodeState  # ShapeDtypeStructs with shardings
    saved: Any  # Pages, with the shardings of what `save` returns and `load` takes
    params: dict[str, NamedSharding]  # by the names of parameters
    held: dict[str, Any]  # what `hold` returns, as ShapeDtypeStructs with shardings
    hold: Callable[[Params], Held] | None  # stacks and quantizes them (`params.held`); None if they stay as they are
    tables: NamedSharding
    replicated: NamedSharding

    def empty(self) -> DecodeState:
        """The decode state with all slots idle."""
        like = self.state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
        return jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like), out_shardings=shardings
        )()


def build(spec: ModelSpec, mesh: Mesh, rules: Rules, sizes: Sizes, attention: EngineChoices = PLAIN) -> EnginePrograms:
    """The programs for `spec` on `mesh`. Nothing is compiled or allocated yet."""
    whole = NamedSharding(mesh, PartitionSpec())
    like = abstract_state(spec, mesh, rules, sizes, attention)
    state = jax.tree.map(lambda leaf: leaf.sharding, like)
    held = model_params.abstract_held(spec, mesh, rules)
    params = jax.tree.map(lambda leaf: leaf.sharding, held)
    # The heads of saved pages stay where they are in the pools: otherwise every device would get all of them.
    saved = jax.tree.map(lambda pool: NamedSharding(mesh, PartitionSpec(None, pool.sharding.spec[1])), like.cache)
    tables = sharding(mesh, ("slots", None), rules, (sizes.slots, sizes.table_columns))
    model = Model(spec, Layout(mesh, rules), attention, _draft_model(spec, mesh, rules, sizes, attention))
    # A new partial per engine, because jitted wrappers of one function share a cache, and
    # `Device.compiles` counts this engine's programs.
    update = lambda change: jax.jit(  # noqa: E731
        partial(change), in_shardings=(state, whole), out_shardings=state, donate_argnums=0
    )
    return EnginePrograms(
        sizes,
        prefill={
            (fresh, bucket): jax.jit(
                partial(_in_blocks, _prefill if fresh else _extend, model, sizes, bucket),
                in_shardings=(params, state, whole),
                out_shardings=state,
                donate_argnums=1,
            )
            for fresh in (True, False)
            for bucket in sizes.buckets
        },
        insert=jax.jit(
            partial(_insert, sizes), in_shardings=(whole, state, whole), out_shardings=state, donate_argnums=1
        ),
        restore=update(partial(_restore, sizes)),
        copy=update(_copy),
        copy_rings=update(partial(_copy_rings, sizes)),
        decode=jax.jit(
            partial(decoding.decode, model, sizes),
            in_shardings=(params, whole, state, tables, whole),
            out_shardings=(state, whole),
            donate_argnums=2,
        ),
        cancel=update(_cancel),
        allow=jax.jit(partial(_allow), in_shardings=(state, whole, whole), out_shardings=state, donate_argnums=0),
        save=jax.jit(partial(_save), in_shardings=(state, whole), out_shardings=saved),
        load=jax.jit(partial(_load), in_shardings=(state, whole, saved), out_shardings=state, donate_argnums=0),
        experts=jax.jit(partial(_experts), in_shardings=(state, whole), out_shardings=whole) if sizes.experts else None,
        state=like,
        saved=saved,
        params=model_params.shardings(spec, mesh, rules),
        held=held,
        hold=_hold(spec, mesh, rules),
        tables=tables,
        replicated=whole,
    )


def _hold(spec: ModelSpec, mesh: Mesh, rules: Rules) -> Callable[[Params], Held] | None:
    if not spec.scan and not spec.weight_dtype:
        return None
    where = model_params.held_shardings(spec, mesh, rules)
    return jax.jit(partial(model_params.held, spec, layout=Layout(mesh, rules)), out_shardings=where)


def held(spec: ModelSpec, params: Params, mesh: Mesh, rules: Rules) -> Held:
    """`params` as `EnginePrograms.hold` returns them."""
    hold = _hold(spec, mesh, rules)
    return dict(params) if hold is None else hold(params)


def choose_kernels(
    spec: ModelSpec, mesh: Mesh, sizes: Sizes, *, prefill: str = choice.AUTO, paged: str = choice.AUTO
) -> EngineChoices:
    """The implementations for fresh prompts and for decoding; ConfigError when a named one cannot work on `mesh`.

    The choice for prompts depends on the largest bucket; shorter prompts are padded to the kernel's block.
    """
    site = choice.Site(spec, layout.platform(mesh), mesh.shape["tensor"], sizes.buckets[-1])
    return EngineChoices(
        choice.choose("prefill", prefill, site),
        choice.choose(
            "paged", paged, replace(site, tokens=sizes.page_tokens, longest=sizes.max_tokens, limited=sizes.pages > 0)
        ),
    )


def kernels_and_sizes(
    spec: ModelSpec, mesh: Mesh, sizes: Sizes, *, prefill: str = choice.AUTO, paged: str = choice.AUTO
) -> tuple[EngineChoices, Sizes]:
    """The implementations, and `sizes` with rings where these need less memory."""
    attention = choose_kernels(spec, mesh, sizes, prefill=prefill, paged=paged)
    return attention, with_rings(replace(sizes, draft_model=spec.draft is not None), spec, attention)


def _draft_model(spec: ModelSpec, mesh: Mesh, rules: Rules, sizes: Sizes, attention: EngineChoices) -> Model | None:
    """The draft model, with fused kernels only where the model has some."""
    if spec.draft is None:
        return None
    limited = replace(sizes, pages=sizes.shard_pages)  # it has no contiguous copy of its cache
    wanted = {use: choice.XLA if name == choice.XLA else choice.AUTO for use, name in attention.names().items()}
    return Model(spec.draft, Layout(mesh, rules), choose_kernels(spec.draft, mesh, limited, **wanted))


def with_rings(sizes: Sizes, spec: ModelSpec, attention: EngineChoices) -> Sizes:
    """`sizes` with rings for the layers with windows, if these need fewer pages so; otherwise as they are.

    Only the XLA form over pages reads rings.
    """
    window = max(spec.each_window)
    ringed = replace(sizes, window=window)
    if not window or attention.paged.name != choice.XLA or ringed.ring * ringed.rings >= sizes.shard_pages:
        return sizes
    # Pages that no layer uses must not limit the engine.
    used = sizes.experts or spec.draft or not all(spec.each_window)
    return ringed if used else replace(ringed, pages=0)


def lowered(
    spec: ModelSpec, mesh: Mesh, rules: Rules, sizes: Sizes, attention: EngineChoices = PLAIN
) -> dict[str, jax.stages.Lowered]:
    """The lowered programs by name, for ahead-of-time compilation and memory estimates; no device is used."""
    programs = build(spec, mesh, rules, sizes, attention)

    def whole(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=programs.replicated)

    params = programs.held
    seed = whole((), jax.eval_shape(jax.random.key, 0).dtype)
    tables = jax.ShapeDtypeStruct((sizes.slots, sizes.table_columns), jnp.int32, sharding=programs.tables)
    found = {
        f"{'prefill' if fresh else 'extend'}_{bucket}": prefill.lower(  # type: ignore[attr-defined]
            params, programs.state, whole(sizes.prefill_shape(bucket), jnp.int32)
        )
        for (fresh, bucket), prefill in programs.prefill.items()
    }
    if sizes.pages:  # a request may be preempted
        found |= lowered_moves(programs)
    return found | {
        "insert": programs.insert.lower(seed, programs.state, whole(sizes.insert_shape, jnp.int32)),  # type: ignore[attr-defined]
        "decode": programs.decode.lower(params, seed, programs.state, tables, whole((2,), jnp.int32)),  # type: ignore[attr-defined]
    }


def lowered_moves(programs: EnginePrograms) -> dict[str, jax.stages.Lowered]:
    """The lowered programs that move a preempted request's pages out of the pools and back, by name."""
    place = jax.ShapeDtypeStruct((1 + programs.sizes.table_columns,), jnp.int32, sharding=programs.replicated)
    pages = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        jax.eval_shape(programs.save, programs.state, place),
        programs.saved,
    )
    return {
        "save": programs.save.lower(programs.state, place),  # type: ignore[attr-defined]
        "load": programs.load.lower(programs.state, place, pages),  # type: ignore[attr-defined]
    }


def abstract_state(
    spec: ModelSpec, mesh: Mesh, rules: Rules, sizes: Sizes, attention: EngineChoices = PLAIN
) -> DecodeState:
    """The decode state as ShapeDtypeStructs with shardings; slots are sharded by the rules."""
    slots = sizes.slots

    def leaf(shape: tuple[int, ...], dtype, first: str | None = "slots", last: str | None = None) -> Any:
        logical = (first,) + (None,) * (len(shape) - 2) + ((last,) if len(shape) > 1 else ())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, logical, rules, shape))

    integers, rings = leaf((slots,), jnp.int32), {"ring": sizes.ring, "rings": sizes.rings}
    sides = sizes.shards, sizes.shard_pages, sizes.page_tokens, mesh, rules
    side = None
    if attention.paged.name == DENSE:
        longest = sizes.table * sizes.page_tokens
        side = dense.abstract_contiguous(spec, sizes.shards, slots, longest, sizes.page_tokens, mesh, rules)
    return DecodeState(
        cache=kv.abstract(spec, *sides, experts=sizes.experts, **rings),
        side=side,
        logits=leaf((sizes.logit_rows, spec.vocab_size), jnp.float32, None, "vocab"),
        requests=leaf((slots, sizes.columns), jnp.int32),
        text=leaf((slots, sizes.text), jnp.int32),
        allowed=leaf((slots, spec.vocab_size if sizes.masks else 0), jnp.bool_),
        tokens=integers,
        logprobs=leaf((slots,), jnp.float32),
        support=leaf((slots, sizes.support), jnp.int32),
        positions=integers,
        counts=integers,
        status=integers,
        chances=leaf((slots,), jnp.float32) if sizes.draft else None,
    )


def _in_blocks(
    compute: Callable[..., DecodeState],
    model: Model,
    sizes: Sizes,
    bucket: int,
    params: Held,
    state: DecodeState,
    packed: Int[Array, "R C"],
) -> DecodeState:
    """`compute` of the rows of a prefill in use, as many at once as keep a device busy: the others cost nothing."""
    rows, some = sizes.rows, sizes.rows_at_once(bucket)
    if some >= rows:
        return compute(model, bucket, params, state, packed)
    blocks, used = -(-rows // some), jnp.max(jnp.where(packed[:, bucket] > 0, jnp.arange(rows) + 1, 0))
    unused = jnp.zeros((blocks * some - rows, packed.shape[1]), packed.dtype).at[:, bucket + 3].set(sizes.logit_rows)
    packed = jnp.concatenate([packed, unused])

    def one(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        step, state = carry
        block = jax.lax.dynamic_slice_in_dim(packed, step * some, some)
        return step + 1, compute(model, bucket, params, state, block)

    # `blocks` is a constant of the condition, so that readers of the program know the trips of the loop.
    there = lambda carry: (carry[0] < blocks) & (carry[0] * some < used)  # noqa: E731
    return jax.lax.while_loop(there, one, (jnp.int32(0), state))[1]


def _prefill(model: Model, bucket: int, params: Held, state: DecodeState, packed: Int[Array, "R C"]) -> DecodeState:
    """`state` after computing prompts from position 0 on into their pages, with the logits after them."""
    batch = inputs.unpack_prefill(packed, bucket)
    fill = partial(kv.begun, shards=batch.shards, lengths=batch.lengths)

    def computed(
        model: Model, params: Held, cache: kv.KVCache, tables: Int[Array, "R J"]
    ) -> tuple[Float[Array, "R V"], kv.KVCache]:
        def keep(cache: kv.KVCache, layer: int | Array, window: int, k: Array, v: Array) -> kv.KVCache:
            keys, values, first, _ = cache.of(layer, window)
            put = partial(fill, tables=cache.tables(window, tables) + first, ring=cache.ring_of(window))
            return cache.with_layer(layer, window, put(keys, k), put(values, v))

        options = {"layout": model.layout, "attention": model.attention.prefill.name}
        logits, cache, experts = transformer.prefill_into(
            model.spec, params, cache, keep, _known(model, batch), batch.lengths, **options
        )
        if cache.experts is not None and experts is not None:
            cache = replace(cache, experts=fill(cache.experts, experts, tables=cache.tables(0, tables)))
        return logits, cache

    return _with_prompts(model, params, state, batch, computed)


def _extend(model: Model, bucket: int, params: Held, state: DecodeState, packed: Int[Array, "R C"]) -> DecodeState:
    """`state` after computing more tokens behind those already in the pages, with the logits after them."""
    batch = inputs.unpack_prefill(packed, bucket)

    def computed(
        model: Model, params: Held, cache: kv.KVCache, tables: Int[Array, "R J"]
    ) -> tuple[Float[Array, "R V"], kv.KVCache]:
        pages = transformer.Pages(batch.shards, tables, batch.starts)
        options = {"layout": model.layout, "attention": model.attention.prefill.name}
        return transformer.extend(model.spec, params, cache, _known(model, batch), pages, batch.lengths, **options)

    return _with_prompts(model, params, state, batch, computed)


def _known(model: Model, batch: inputs.Prefill) -> Int[Array, "R T"]:
    """The tokens, with the last id in place of those that a draft model does not have."""
    return jnp.minimum(batch.tokens, model.spec.vocab_size - 1)


def _with_prompts(
    model: Model,
    params: Held,
    state: DecodeState,
    batch: inputs.Prefill,
    computed: Callable[[Model, Held, kv.KVCache, Int[Array, "R J"]], tuple[Float[Array, "R V"], kv.KVCache]],
) -> DecodeState:
    """`state` with the prompts of `batch` in the caches of the model and of its draft model, and the logits."""
    own, drafting = decoding.divided(params)
    logits, cache = computed(model, own, state.cache, batch.tables)
    if model.draft is not None and cache.draft is not None:
        _, draft = computed(model.draft, drafting, cache.draft, cache.tables(0, batch.tables))
        cache = replace(cache, draft=draft)
    return replace(state, cache=cache, logits=state.logits.at[batch.logit_rows].set(logits, mode="drop"))


def _insert(sizes: Sizes, seed: Key[Array, ""], state: DecodeState, packed: Int[Array, "N C"]) -> DecodeState:
    """`state` with new requests in slots: a page is copied for each, and its first token sampled."""
    slots, rows, shards, sources, targets, positions = (packed[:, i] for i in range(6))
    requests, text = packed[:, 6 : 6 + sizes.columns], packed[:, 6 + sizes.columns :]
    by = decoding.sampling_rows(sizes, seed, requests)
    drawn = decoding.draw(by, state.logits[rows], positions, text, state.allowed[slots], sizes.support)
    state = _with_copies(state, shards, sources, targets)
    text = decoding.with_token(text, drawn[0], positions)
    return _write_slot(sizes, state, slots, requests, text, drawn, positions, jnp.ones_like(drawn[0]))


def _restore(sizes: Sizes, state: DecodeState, packed: Int[Array, "N C"]) -> DecodeState:
    """`state` with resumed requests in slots, which continue after tokens sampled earlier."""
    slots, tokens, logprobs, positions, counts = (packed[:, i] for i in range(5))
    requests, text = packed[:, 6 : 6 + sizes.columns], packed[:, 6 + sizes.columns :]
    # The host has the support of its last token.
    support = jnp.full((len(tokens), sizes.support), sampling.NO_TOKEN, jnp.int32)
    drawn = tokens, inputs.floats(logprobs), support
    return _write_slot(sizes, state, slots, requests, text, drawn, positions, counts)


def _write_slot(
    sizes: Sizes,
    state: DecodeState,
    slots: Int[Array, " N"],
    requests: Int[Array, "N C"],
    text: Int[Array, "N W"],
    drawn: tuple[Int[Array, " N"], Float[Array, " N"], Int[Array, "N K"]],
    positions: Int[Array, " N"],
    counts: Int[Array, " N"],
) -> DecodeState:
    tokens, logprobs, support = drawn

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[slots].set(new, mode="drop")

    return replace(
        state,
        side=None if state.side is None else dense.taken(state.side, slots),
        requests=put(state.requests, requests),
        text=put(state.text, text),
        tokens=put(state.tokens, tokens),
        logprobs=put(state.logprobs, logprobs),
        support=put(state.support, support),
        positions=put(state.positions, positions),
        counts=put(state.counts, counts),
        chances=None
        if state.chances is None
        else put(state.chances, jnp.full(len(slots), decoding.FIRST if sizes.draft_model else 0.0)),
        status=put(state.status, decoding.status_after(requests, tokens, counts)),
    )


def _allow(state: DecodeState, slots: Int[Array, " S"], masks: Bool[Array, "S V0"]) -> DecodeState:
    """`state` with row i of `masks` as the token mask of slots[i]; a row with index S is dropped."""
    return replace(state, allowed=state.allowed.at[slots].set(masks, mode="drop"))


def _copy(state: DecodeState, packed: Int[Array, "N 3"]) -> DecodeState:
    """`state` with pages copied."""
    return _with_copies(state, packed[:, 0], packed[:, 1], packed[:, 2])


def _with_copies(
    state: DecodeState, shards: Int[Array, " N"], sources: Int[Array, " N"], targets: Int[Array, " N"]
) -> DecodeState:
    def change(pool: Array, layers: int, ring: int) -> Array:
        return pool if ring else kv.copied(pool, shards, sources, targets, layers)

    return replace(state, cache=state.cache.map(change))


def _copy_rings(sizes: Sizes, state: DecodeState, packed: Int[Array, "N 3"]) -> DecodeState:
    """`state` with rings copied one by one, so that temporary memory is that of one ring."""

    def one(index: Array, cache: kv.KVCache) -> kv.KVCache:
        return kv.ring_copied(cache, *packed[index])

    count = jnp.sum(packed[:, 2] < sizes.rings)  # unused rows are the last
    return replace(state, cache=jax.lax.fori_loop(0, count, one, state.cache))


def _save(state: DecodeState, place: Int[Array, " J1"]) -> Pages:
    """The pages place[1:] of shard place[0]; see `_pages_in`."""
    return state.cache.map(lambda pool, layers, ring: pool[place[0], :, _pages_in(state, pool, layers, ring, place)])


def _pages_in(state: DecodeState, pool: Array, layers: int, ring: int, place: Int[Array, " J1"]) -> Int[Array, " LJ"]:
    """The pages of `place`, a shard and a row of a table, in a pool; a page with index P is out of range in it."""
    pages = place[-1] * ring + jnp.arange(ring) if ring else state.cache.tables(0, place[1:])
    return kv.of_every_layer(pool, layers, pages)


def _experts(state: DecodeState, place: Int[Array, " J1"]) -> Integer[Array, "JU X"]:
    """The recorded choices in the pages place[1:] of shard place[0]."""
    pool = state.cache.experts
    assert pool is not None
    return pool[place[0], 0, state.cache.tables(0, place[1:])].reshape(-1, pool.shape[-1])


def _load(state: DecodeState, place: Int[Array, " J1"], pages: Pages) -> DecodeState:
    """`state` with `pages` written to pages place[1:] of shard place[0]; a page with index P is dropped."""

    def put(pool: Array, layers: int, ring: int, saved: Array) -> Array:
        return pool.at[place[0], :, _pages_in(state, pool, layers, ring, place)].set(saved, mode="drop")

    return replace(state, cache=state.cache.map(put, pages))


def _cancel(state: DecodeState, slots: Bool[Array, " S"]) -> DecodeState:
    """`state` with `slots` idle."""
    return replace(state, status=jnp.where(slots, inputs.IDLE, state.status))


def check_sizes(sizes: Sizes, weight_swap: str) -> None:
    """Raise ConfigError for sizes that cannot work."""
    if weight_swap not in get_args(WeightSwap):
        raise ConfigError(
            "schedule.weight_swap", weight_swap, "unknown policy", f"Use one of {', '.join(get_args(WeightSwap))}."
        )
    counts = {"slots": sizes.slots, "prefill_rows": sizes.rows, "decode_chunk": sizes.chunk}
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"sampler.{name}", count, "at least 1 is needed", "Use a larger number.")
    if sizes.draft < 0:
        raise ConfigError("sampler.draft_tokens", sizes.draft, "at least 0 is needed", "0: no speculative decoding.")
    if not all(1 <= bucket <= sizes.max_tokens for bucket in sizes.buckets or (0,)):
        raise ConfigError(
            "sampler.prefill_buckets",
            sizes.buckets,
            f"every bucket must hold 1..{sizes.max_tokens} tokens",
            "The cache of a slot must hold the longest prompt and its answer.",
        )
    if sizes.shard_pages < sizes.table + 1:
        raise ConfigError(
            "sampler.cache_pages",
            sizes.shard_pages,
            f"the longest request alone needs {sizes.table + 1} pages "
            f"of {sizes.page_tokens} tokens in its shard ({sizes.shards} shards)",
            "Give the cache more pages.",
        )
