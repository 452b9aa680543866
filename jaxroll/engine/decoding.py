"""Decode steps of an engine: sampling, and speculative decoding with drafts by prompt lookup or by a smaller model.

With `Sizes.draft` = k > 0, a step drafts up to k tokens per slot: those that followed an earlier occurrence of the
sequence's last tokens (prompt lookup decoding, Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), or those of
a draft model (`ModelSpec.draft`). One pass of the model computes the logits after the last token and after each drafted
one. At each of these positions the engine samples with the key that it would use there without a draft, and it keeps
the samples up to and including the first one that differs from the draft. So every token is a sample of the model's own
distribution, and no residual distribution is needed. For a draft that is certain of its token, Leviathan et al. (arXiv
2211.17192) accept with the same probability: p(token).

A draft model samples with the keys of the model, too, so both take the same Gumbel noise. Two distributions with a
total variation distance of d then agree on a token with a probability of at least (1 - d) / (1 + d), at any temperature
(Daliri et al., arXiv 2408.07978), and tokens do not depend on the draft model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxroll.algorithms import sampling
from jaxroll.engine import requests as inputs
from jaxroll.engine.requests import Sizes
from jaxroll.kernels.attention import blocks, paged, reach, within
from jaxroll.kernels.choice import EngineChoices
from jaxroll.kernels.quantised import Pool
from jaxroll.models import cache as kv
from jaxroll.models import transformer
from jaxroll.models.cache import ContiguousCache, refreshed
from jaxroll.models.families import ModelSpec
from jaxroll.models.params import DRAFT, Held
from jaxroll.sharding import Layout

# A draft continues the longest earlier run of tokens that equals the last ones, and the latest of equally long ones.
SHORTEST_RUN, LONGEST_RUN = 2, 4
# Every step compares its sample with the first drafted token. The average of these comparisons, over about 1 / RATE
# steps with a draft, is a sequence's chance that a drafted token is right; it is 0 at first.
RATE = 1 / 8
# Drafts are verified when at least this many drafted tokens are expected to be right, as a mean over running slots. A
# pass over several tokens per slot takes longer where it is limited by arithmetic, as on a CPU or with many slots.
# With one drafted token, no chance is certain: then this share of those drafted is enough.
WORTH, SHARE = 1.0, 0.8
# A draft model begins with the chance FIRST: four drafted tokens are verified once its first guess was right.
# When its chance falls below LEAST, it drafts no more for the sequence: it lacks keys and values of the tokens after.
FIRST, LEAST, NEVER = 0.5, 0.1, -1.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The state of S slots. A slot's last token is at `positions` and is not in the cache yet.

    `logits` are those after the last token of each cached prompt, from which new requests sample their first token.
    """

    cache: kv.KVCache
    side: ContiguousCache | None  # a contiguous copy of the cache, if decode steps read that
    logits: Float[Array, "E V"]
    requests: Int[Array, "S C"]  # see packets.request_row
    text: Int[Array, "S W"]  # prompt and answer up to the last token, for penalties and drafts (otherwise W = 0)
    allowed: Bool[Array, "S V0"]  # token masks (V0 = 0 in an engine without masks)
    tokens: Int[Array, " S"]
    logprobs: Float[Array, " S"]
    support: Int[Array, "S K"]  # ids to which the last token was restricted (K = 0 in an engine without supports)
    positions: Int[Array, " S"]
    counts: Int[Array, " S"]
    status: Int[Array, " S"]
    chances: Float[Array, " S"] | None = None  # that a drafted token is right; None in an engine without drafts


@dataclass(frozen=True)
class Model:
    """A model, the layout of its activations, and its attention implementations."""

    spec: ModelSpec
    layout: Layout
    attention: EngineChoices
    draft: Model | None = None


def divided(params: Held) -> tuple[Held, Held]:
    """The parameters of the model, and those of its draft model (empty without one)."""
    return {name: value for name, value in params.items() if name != DRAFT}, params.get(DRAFT, {})


# --- sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """The sampling data of N requests that do not depend on the position, computed once per dispatch."""

    requests: Int[Array, "N C"]
    keys: Key[Array, " N"]
    some_truncate: Bool[Array, ""] | None  # None: the engine serves no request that truncates
    penalties: bool = field(metadata={"static": True})

    def real(self, column: int) -> Float[Array, " N"]:
        """A column of floats."""
        return inputs.floats(self.requests[:, column])

    def repeated(self, times: int) -> SamplingRows:
        """Every row `times` times in succession."""
        keys = jnp.broadcast_to(self.keys[:, None], (len(self.keys), times)).reshape(-1)
        return replace(self, requests=jnp.repeat(self.requests, times, axis=0), keys=keys)


def sampling_rows(sizes: Sizes, seed: Key[Array, ""], requests: Int[Array, "N C"]) -> SamplingRows:
    """The sampling data of `requests`."""
    column = requests.T
    run_keys = sampling.seeded(seed, column[inputs.SEED], (column[inputs.FLAGS] & inputs.OWN_SEED) > 0)
    identity = column[inputs.GROUP], column[inputs.MEMBER], column[inputs.SALT]
    some = None
    if sizes.sorts:
        temperature, top_p, min_p = (inputs.floats(column[i]) for i in (inputs.TEMPERATURE, inputs.TOP_P, inputs.MIN_P))
        some = jnp.any(sampling.truncates(temperature, column[inputs.TOP_K], top_p, min_p))
    return SamplingRows(requests, jax.vmap(sampling.request_key)(run_keys, *identity), some, sizes.penalties)


def draw(
    by: SamplingRows,
    logits: Float[Array, "N V"],
    positions: Int[Array, " N"],
    text: Int[Array, "N W"],
    allowed: Bool[Array, "N V0"],
    size: int,
) -> tuple[Int[Array, " N"], Float[Array, " N"], Int[Array, "N K"]]:
    """A token per request at `positions`, its log-prob and its support (K = `size`); `text` holds the tokens before."""
    column = by.requests.T
    keys = jax.vmap(sampling.position_key)(by.keys, positions + column[inputs.KEY_OFFSET])
    if by.penalties:
        logits = sampling.penalised(logits, text, positions, by.real(inputs.PENALTY))
    if allowed.shape[1]:
        logits = jnp.where(allowed, logits, -jnp.inf)
    settings = by.real(inputs.TEMPERATURE), column[inputs.TOP_K], by.real(inputs.TOP_P), by.real(inputs.MIN_P)
    if size:
        tokens, logprobs, ids = sampling.sample_with_support(logits, keys, *settings, size)
        fill = ((0, 0), (0, size - ids.shape[1]))  # a vocabulary may be smaller than `size`
        return tokens, logprobs, jnp.pad(ids, fill, constant_values=sampling.NO_TOKEN)
    untruncated = (column[inputs.FLAGS] & inputs.UNTRUNCATED) > 0
    some_truncate = False if by.some_truncate is None else by.some_truncate
    tokens, logprobs = sampling.sample(logits, keys, *settings, untruncated, some_truncate)
    return tokens, logprobs, jnp.zeros((len(tokens), 0), jnp.int32)


def status_after(requests: Int[Array, "N C"], tokens: Int[Array, " N"], counts: Int[Array, " N"]) -> Int[Array, " N"]:
    """The status of each request after `tokens`, its `counts`-th new token; STOP takes precedence over LENGTH."""
    full = jnp.where(counts >= requests[:, inputs.MAX_TOKENS], inputs.LENGTH, inputs.RUNNING)
    return jnp.where(inputs.is_stop(tokens, requests), inputs.STOP, full)


def with_token(text: Int[Array, "N W"], tokens: Int[Array, " N"], positions: Int[Array, " N"]) -> Int[Array, "N W"]:
    """`text` with `tokens` at `positions`; those beyond it are dropped."""
    return text.at[jnp.arange(len(tokens)), positions].set(tokens, mode="drop") if text.shape[1] else text


# --- one token per running slot


def _next_token(
    model: Model,
    params: Held,
    by: SamplingRows,
    state: DecodeState,
    tables: Int[Array, "S J"],
    last: Int[Array, ""],
) -> DecodeState:
    """`state` with one more token in every running slot; no slot is beyond position `last`.

    Other slots are computed too, but their results are discarded.
    """
    running, side = state.status == inputs.RUNNING, state.side
    at = state.tokens, jnp.where(running, state.positions, -1), tables
    if side is None:
        logits, cache = transformer.decode(
            model.spec, params, state.cache, *at, layout=model.layout, attention=model.attention.paged.name
        )
    else:
        logits, cache, side = transformer.decode_contiguous(
            model.spec, params, state.cache, side, *at, last, layout=model.layout
        )
    positions = state.positions + running
    tokens, logprobs, support = draw(by, logits, positions, state.text, state.allowed, state.support.shape[1])
    counts = state.counts + running
    return replace(
        state,
        cache=cache,
        side=side,
        text=with_token(state.text, tokens, jnp.where(running, positions, state.text.shape[1])),
        tokens=jnp.where(running, tokens, state.tokens),
        logprobs=jnp.where(running, logprobs, state.logprobs),
        support=jnp.where(running[:, None], support, state.support),
        positions=positions,
        counts=counts,
        status=jnp.where(running, status_after(state.requests, tokens, counts), state.status),
    )


# --- drafts


def drafts(
    text: Int[Array, "S W"], positions: Int[Array, " S"], most: int
) -> tuple[Int[Array, "S most"], Bool[Array, " S"]]:
    """Tokens that may follow the token at `positions` of each row of `text`, and whether the row has any.

    If they reach the end of the text, they go on with the drafted tokens themselves, as text that repeats.
    """
    at = jnp.arange(text.shape[1])[None]
    equal, run = at < positions[:, None], jnp.zeros(text.shape, jnp.int32)
    for back in range(LONGEST_RUN):
        before = jnp.pad(text, ((0, 0), (back, 0)))[:, : text.shape[1]]  # the token `back` before each position
        wanted = jnp.take_along_axis(text, jnp.maximum(positions - back, 0)[:, None], axis=1)
        equal &= (before == wanted) & (at >= back)
        run += equal
    best = jnp.max(jnp.where(run >= SHORTEST_RUN, run * text.shape[1] + at, -1), axis=1)
    end = best % text.shape[1]
    period = jnp.maximum(positions - end, 1)
    copied = end[:, None] + 1 + jnp.arange(most)[None] % period[:, None]
    return jnp.take_along_axis(text, jnp.minimum(copied, text.shape[1] - 1), axis=1), best >= 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Draft:
    """The drafted tokens of the next step, of which the first `lengths` count; `worth`: the step verifies them.

    The tokens of a draft model, which drafts for the slots in `found`, come later (`_guessed`).
    """

    tokens: Int[Array, "S most"]
    lengths: Int[Array, " S"]
    found: Bool[Array, " S"]
    worth: Bool[Array, ""]


def _drafted(state: DecodeState, most: int, *, by_model: bool) -> _Draft:
    """The draft of the step after `state`."""
    assert state.chances is not None
    running, column = state.status == inputs.RUNNING, state.requests.T
    if by_model:
        tokens, found = jnp.zeros((len(running), most), jnp.int32), state.chances != NEVER
    else:
        tokens, found = drafts(state.text, state.positions, most)
    found &= running & ((column[inputs.FLAGS] & inputs.NO_DRAFTS) == 0)
    # All tokens of a step fit behind the prompt, so no write goes beyond the slot's pages.
    lengths = jnp.where(found, jnp.minimum(most, column[inputs.MAX_TOKENS] - state.counts - 1), 0)
    chain = jnp.cumprod(jnp.broadcast_to(state.chances[:, None], tokens.shape), axis=1)
    right = jnp.sum(jnp.where(jnp.arange(most)[None] < lengths[:, None], chain, 0.0))
    enough = min(WORTH, SHARE * most) * jnp.sum(running)
    return _Draft(tokens, lengths, found, jnp.any(lengths > 0) & (right >= enough))


def _guessed(
    model: Model, params: Held, by: SamplingRows, state: DecodeState, draft: _Draft, tables: Int[Array, "S J"]
) -> tuple[DecodeState, _Draft]:
    """`draft` with the tokens of the draft model (`params`), and `state` with their keys and values in its cache.

    All of them if the step verifies them; otherwise the first, to compare it with the sample. The same without one.
    """
    small, cache = model.draft, state.cache.draft
    if small is None or cache is None:
        return state, draft
    tables, vocab, column = state.cache.tables(0, tables), model.spec.vocab_size, by.requests.T
    settings = by.real(inputs.TEMPERATURE), column[inputs.TOP_K], by.real(inputs.TOP_P)

    def one(step: Array, carry: tuple[Array, Array, kv.KVCache]) -> tuple[Array, Array, kv.KVCache]:
        token, tokens, cache = carry
        token = jnp.minimum(token, small.spec.vocab_size - 1)  # ids that it does not have
        at = jnp.where(draft.found & (step <= draft.lengths), state.positions + step, -1)
        logits, cache = transformer.decode(
            small.spec, params, cache, token, at, tables, layout=small.layout, attention=small.attention.paged.name
        )
        # Noise is drawn for a whole vocabulary, and padded ones differ between models of one tokenizer.
        more = ((0, 0), (0, max(0, vocab - logits.shape[1])))
        logits = jnp.pad(logits[:, :vocab], more, constant_values=-jnp.inf)
        keys = jax.vmap(sampling.position_key)(by.keys, state.positions + 1 + step + column[inputs.KEY_OFFSET])
        token, _ = sampling.sample(logits, keys, *settings, some_truncate=False)
        return token, tokens.at[:, step].set(token, mode="drop"), cache

    # One pass more than drafted tokens: if all are kept, the cache needs the last of them.
    passes = jnp.where(draft.worth, draft.tokens.shape[1] + 1, jnp.any(draft.found).astype(jnp.int32))
    _, tokens, cache = jax.lax.fori_loop(0, passes, one, (state.tokens, draft.tokens, cache))
    return replace(state, cache=replace(state.cache, draft=cache)), replace(draft, tokens=tokens)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Step:
    """The tokens of a step, of which the first `counts` are valid in each slot."""

    tokens: Int[Array, "S T"]
    logprobs: Float[Array, "S T"]
    support: Int[Array, "S T K"]
    counts: Int[Array, " S"]


def _verified(
    model: Model,
    params: Held,
    by: SamplingRows,
    state: DecodeState,
    draft: _Draft,
    tables: Int[Array, "S J"],
    last: Int[Array, ""],
) -> tuple[DecodeState, _Step]:
    """`state` with one or more tokens in every running slot, by one pass over the last token and the drafted ones."""
    drafted, lengths = draft.tokens, draft.lengths
    (S, most), running = drafted.shape, state.status == inputs.RUNNING
    T, K, slots = most + 1, state.support.shape[1], jnp.arange(S)[:, None]
    by = by.repeated(T)
    logits, cache, side = _logits_after(
        model,
        params,
        state.cache,
        state.side,
        jnp.concatenate([state.tokens[:, None], drafted], axis=1),
        jnp.where(running, state.positions, -1),
        jnp.where(running, lengths + 1, 0),
        tables,
        last,
    )
    ahead = state.positions[:, None] + 1 + jnp.arange(T)[None]
    # Penalties see the drafted tokens before each position.
    text = state.text.at[slots, ahead[:, :-1]].set(drafted, mode="drop") if by.penalties else state.text[:, :0]
    text, allowed = (jnp.repeat(x, T, axis=0) for x in (text, state.allowed))
    drawn = draw(by, logits.reshape(S * T, -1), ahead.reshape(-1), text, allowed, K)
    stops = inputs.is_stop(drawn[0], by.requests).reshape(S, T)
    tokens, logprobs, support = (x.reshape(S, T, *x.shape[1:]) for x in drawn)
    agree = (tokens[:, :-1] == drafted) & (jnp.arange(most)[None] < lengths[:, None])
    kept = 1 + jnp.sum(jnp.cumprod(agree, axis=1), axis=1)
    until_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, T)
    new = jnp.where(running, jnp.minimum(kept, until_stop), 0)
    counts, valid = state.counts + new, jnp.arange(T)[None] < new[:, None]

    def final(x: jax.Array, old: jax.Array) -> jax.Array:
        found = x[jnp.arange(S), jnp.maximum(new - 1, 0)]
        return jnp.where(running.reshape(-1, *(1,) * (old.ndim - 1)), found, old)

    token = final(tokens, state.tokens)
    after = replace(
        state,
        cache=cache,
        side=side,
        text=state.text.at[slots, jnp.where(valid, ahead, state.text.shape[1])].set(tokens, mode="drop"),
        tokens=token,
        logprobs=final(logprobs, state.logprobs),
        support=final(support, state.support),
        positions=state.positions + new,
        counts=counts,
        status=jnp.where(running, status_after(state.requests, token, counts), state.status),
    )
    return after, _Step(tokens, logprobs, support, new)


_Caches = tuple[kv.KVCache, ContiguousCache | None]


def _logits_after(
    model: Model,
    params: Held,
    cache: kv.KVCache,
    side: ContiguousCache | None,
    tokens: Int[Array, "S T"],
    positions: Int[Array, " S"],
    lengths: Int[Array, " S"],
    tables: Int[Array, "S J"],
    last: Int[Array, ""],
) -> tuple[Float[Array, "S T V"], kv.KVCache, ContiguousCache | None]:
    """The logits after each of the next `lengths` ≤ T tokens of every slot, and the caches with these tokens.

    The first token of a slot is at its position, and each sees those before it. Logits after other tokens are
    undefined. Attention reads `side` if that is given, up to position `last` + T - 1, otherwise the pages.
    """
    spec, layout, T = model.spec, model.layout, tokens.shape[1]
    decoder = transformer.outer(spec, params)
    split = lambda x: x.reshape(cache.shards, -1, *x.shape[1:])  # noqa: E731
    count = blocks(len(tokens) // cache.shards, layout) if side is None else 1
    order = jnp.argsort(-split(positions), axis=1) if count > 1 else None
    tokens, positions, lengths, tables = (transformer.ordered(x, order) for x in (tokens, positions, lengths, tables))
    each, starts = positions[:, None] + jnp.arange(T)[None], split(positions)
    where = jnp.where(jnp.arange(T)[None] < lengths[:, None], each, -1)
    at_each, U = split(where.reshape(-1)), cache.page_tokens
    own = {window: cache.tables(window, split(tables)) for window in set(spec.each_window)}
    near = {window: within(pages, starts, window, T, U) for window, pages in own.items()}

    def append(pool: Pool, new: Array, tables: Array) -> Pool:
        each = jnp.repeat(tables, T, axis=1)
        return jax.vmap(kv.appended)(pool, split(new.reshape(-1, *new.shape[2:])), each, at_each)

    def attend(held: _Caches, layer: int | Array, window: int, q: Array, k: Array, v: Array) -> tuple[Array, _Caches]:
        pages, side = held
        keys, values, first, _ = pages.of(layer, window)
        keys, values = append(keys, k, own[window] + first), append(values, v, own[window] + first)
        pages = pages.with_layer(layer, window, keys, values)
        if side is not None:
            assert isinstance(layer, int)
            side = kv.with_token(side, layer, split(k), split(v), split(where))
            return kv.attend(side, layer, split(q), starts, last + T - 1, window).reshape(q.shape), (pages, side)
        tables, begin = near[window]
        over_shards = jax.vmap(partial(paged, window=window), in_axes=(0, 0, 0, 0, 0, None))
        out = over_shards(split(q), keys, values, tables + first, begin, reach(begin, T, U, count))
        return out.reshape(q.shape), (pages, None)

    x, (held, side), chosen = transformer.through(
        spec, params, decoder, decoder.embedded(tokens), each, (cache, side), attend, layout
    )
    if held.experts is not None and chosen is not None:
        held = replace(held, experts=append(held.experts, chosen, cache.tables(0, split(tables))))
    x = transformer.ordered(x, None if order is None else jnp.argsort(order, axis=1))
    return decoder.logits(decoder.final_norm(x)), kv.constrained(held, layout), side


# --- a dispatch


def decode(
    model: Model,
    sizes: Sizes,
    params: Held,
    seed: Key[Array, ""],
    state: DecodeState,
    tables: Int[Array, "S J"],
    limits: Int[Array, " 2"],
) -> tuple[DecodeState, Int[Array, "R S"]]:
    """Decode up to limits[0] ≤ `sizes.chunk` steps, and stop early once limits[1] slots or all are idle."""
    chunk, slots = sizes.chunk, sizes.slots
    steps_wanted, enough_idle = limits
    params, drafting = divided(params)
    next_draft = partial(_drafted, most=sizes.draft, by_model=model.draft is not None)
    where = jnp.where(state.status == inputs.RUNNING, state.positions, -1)
    last, by = jnp.max(where), sampling_rows(sizes, seed, state.requests)
    if state.side is not None:
        split = lambda x: x.reshape(state.cache.shards, -1, *x.shape[1:])  # noqa: E731
        state = replace(state, side=refreshed(state.side, state.cache, split(tables), split(where)))
    before = state.counts

    def continues(carry) -> Bool[Array, ""]:
        step, state, *_ = carry
        idle = slots - jnp.sum(state.status == inputs.RUNNING)
        return (step < jnp.minimum(steps_wanted, chunk)) & (idle < jnp.minimum(enough_idle, slots))

    def one(carry):
        step, state, *rows = carry
        state = _next_token(model, params, by, state, tables, last + step)
        of_step = state.tokens, state.logprobs, state.support
        return step + 1, state, *(row.at[step].set(new) for row, new in zip(rows, of_step, strict=True))

    def several(carry, verifies: bool):
        step, state, draft, drafted, ran, *rows = carry
        running, row = state.status == inputs.RUNNING, state.counts - before
        furthest = jnp.max(jnp.where(running, state.positions, -1))
        state, draft = _guessed(model, drafting, by, state, draft, tables)
        if verifies:
            after, made = _verified(model, params, by, state, draft, tables, furthest)
            drafted += draft.lengths
        else:
            after = _next_token(model, params, by, state, tables, furthest)
            tokens, logprobs, support = (x[:, None] for x in (after.tokens, after.logprobs, after.support))
            made = _Step(tokens, logprobs, support, after.counts - state.counts)
        right = (made.tokens[:, 0] == draft.tokens[:, 0]).astype(jnp.float32)
        chances = state.chances
        assert chances is not None
        chances = jnp.where(draft.lengths > 0, chances + RATE * (right - chances), chances)
        if model.draft is not None:
            chances = jnp.where(chances < LEAST, NEVER, chances)
        after = replace(after, chances=chances)
        ahead = jnp.arange(made.tokens.shape[1])[None]
        at = jnp.where(ahead < made.counts[:, None], row[:, None] + ahead, sizes.dispatch_tokens)
        put = lambda old, new: old.at[at, jnp.arange(slots)[:, None]].set(new, mode="drop")  # noqa: E731
        rows = (put(row, new) for row, new in zip(rows, (made.tokens, made.logprobs, made.support), strict=True))
        return step + 1, after, next_draft(after), drafted, ran + running, *rows

    def some(carry):
        # Two loops instead of a condition, whose branches would copy the cache.
        one_each = lambda carry: continues(carry) & ~carry[2].worth  # noqa: E731
        carry = jax.lax.while_loop(one_each, partial(several, verifies=False), carry)
        return jax.lax.while_loop(
            lambda carry: continues(carry) & carry[2].worth, partial(several, verifies=True), carry
        )

    rows = [
        jnp.zeros((sizes.dispatch_tokens, *x.shape), x.dtype) for x in (state.tokens, state.logprobs, state.support)
    ]
    start, tallies = jnp.int32(0), []
    if sizes.draft:
        nothing = jnp.zeros_like(before)
        steps, after, _, *tallies, tokens, logprobs, support = jax.lax.while_loop(
            continues, some, (start, state, next_draft(state), nothing, nothing, *rows)
        )
    else:
        steps, after, tokens, logprobs, support = jax.lax.while_loop(continues, one, (start, state, *rows))
    ends = [state.tokens, inputs.bits(state.logprobs), after.counts, after.status, jnp.full(slots, steps), *tallies]
    supports = inputs.report_supports(state.support, support, slots)
    return after, jnp.concatenate([tokens, inputs.bits(logprobs), jnp.stack(ends), supports])
