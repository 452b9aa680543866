"""Token sampling and log-probabilities: a random key per token, then Gumbel-max over the truncated distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

Index = Int[Array, ""] | int
Keys = PRNGKeyArray | Array  # typed keys, or raw uint32 key data with one more axis
NO_TOKEN = -1  # fills the ids of a support
_LEAST = -1e30  # finite, below every log-prob that matters


def request_key(run_key: Keys, group: Index, member: Index, salt: Index) -> PRNGKeyArray:
    """The key of one completion: group, member and salt folded into the run's key, in this order."""
    key = jax.random.fold_in(_typed(run_key), group)
    return jax.random.fold_in(jax.random.fold_in(key, member), salt)


def token_key(run_seed_key: Keys, group: Index, member: Index, salt: Index, position: Index) -> PRNGKeyArray:
    """The key of the token at absolute `position`; it does not depend on slot, batch or time. Use vmap for many."""
    return position_key(request_key(run_seed_key, group, member, salt), position)


def position_key(key: Keys, position: Index) -> PRNGKeyArray:
    """`token_key`, from the key of the request."""
    return jax.random.fold_in(_typed(key), position)


def seeded(run_key: Keys, seeds: Int[Array, " S"], own: Bool[Array, " S"]) -> Key[Array, " S"]:
    """[S]: the run's key for each row, or the key of the row's own seed where `own` is True."""
    data = jax.random.key_data(_typed(run_key))
    own_data = jax.vmap(lambda seed: jax.random.key_data(jax.random.key(seed)))(seeds)
    return jax.random.wrap_key_data(jnp.where(own[:, None], own_data, data[None]))


def sample(
    logits: Float[Array, "S V"],
    keys: Keys,
    temperature: Float[Array, " S"],
    top_k: Int[Array, " S"],
    top_p: Float[Array, " S"],
    min_p: Float[Array, " S"] | float = 0.0,
    untruncated: Bool[Array, " S"] | bool = False,
    some_truncate: Bool[Array, ""] | bool | None = None,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Tokens, int32 [S], and their log-probs, float32 [S], under the sampling distribution.

    Row s samples from softmax(logits / τ) restricted to `support`. τ = 0 takes the token with the largest logit (the
    first of equals); its log-prob is that of the untempered, untruncated distribution. Log-probs of an `untruncated`
    row are those before truncation. Rows do not influence each other. Truncation sorts the vocabulary, which is done
    only if `some_truncate`: with False no row may truncate, and the program has no sort; with None it is whether any
    row `truncates`, which costs a collective over several devices.
    """
    logits = logits.astype(jnp.float32)
    rows = temperature.shape
    min_p, untruncated = jnp.broadcast_to(min_p, rows), jnp.broadcast_to(untruncated, rows)
    greedy = temperature == 0.0
    kept = judged = logits
    if some_truncate is not False:
        truncated = truncates(temperature, top_k, top_p, min_p)
        kept = jax.lax.cond(
            jnp.any(truncated) if some_truncate is None else some_truncate,
            lambda: jnp.where(
                support(tempered(logits, temperature), top_k, top_p, min_p) | ~truncated[:, None], logits, -jnp.inf
            ),
            lambda: logits,
        )
        judged = jnp.where((untruncated & truncated)[:, None], logits, kept)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(_typed(keys))
    perturbed = tempered(kept, temperature) + jnp.where(greedy[:, None], 0.0, noise)
    tokens = _first_best(perturbed)
    return tokens, token_logprobs(judged, tokens, temperature)


def sample_with_support(
    logits: Float[Array, "S V"],
    keys: Keys,
    temperature: Float[Array, " S"],
    top_k: Int[Array, " S"],
    top_p: Float[Array, " S"],
    min_p: Float[Array, " S"],
    size: int,
) -> tuple[Int[Array, " S"], Float[Array, " S"], Int[Array, "S K"]]:
    """Tokens [S], their log-probs [S], and the ids of each row's support [S, K], K = min(size, V), filled with -1.

    The distribution is that of `sample`, further restricted to the K most likely tokens of the support (of equals,
    those with lower indices); so top-k must be at most `size`. The ids of a row that does not truncate are all -1.
    """
    logits = logits.astype(jnp.float32)
    scaled = tempered(logits, temperature)
    best, ids = jax.lax.top_k(scaled, min(size, logits.shape[-1]))
    places = jnp.arange(best.shape[-1])[None]
    within = places < jnp.where(top_k > 0, top_k, best.shape[-1])[:, None]
    # Without top-k, the nucleus is a share of the whole distribution, not of its K best tokens.
    among = jnp.where(
        (top_k > 0)[:, None],
        jax.nn.logsumexp(jnp.where(within, best, -jnp.inf), axis=-1, keepdims=True),
        jax.nn.logsumexp(scaled, axis=-1, keepdims=True),
    )
    kept = _nucleus(jnp.where(within, best, -jnp.inf), among, top_p, min_p)
    kept &= truncates(temperature, top_k, top_p, min_p)[:, None]
    ids = jnp.where(kept, ids, NO_TOKEN)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(_typed(keys))
    noise = jnp.where((temperature == 0.0)[:, None], 0.0, noise)
    inside = jnp.where(kept, best + jnp.take_along_axis(noise, ids, axis=-1, mode="clip"), -jnp.inf)
    drawn = jnp.min(
        jnp.where(kept & (inside == jnp.max(inside, axis=-1, keepdims=True)), ids, logits.shape[-1] - 1), axis=-1
    )
    tokens = jnp.where(jnp.any(kept, axis=-1), drawn, _first_best(scaled + noise))
    return tokens, token_logprobs(logits, tokens, temperature, ids), ids


def truncates(
    temperature: Float[Array, " S"],
    top_k: Int[Array, " S"],
    top_p: Float[Array, " S"],
    min_p: Float[Array, " S"] | float,
) -> Bool[Array, " S"]:
    """[S]: True for rows that sample from a part of the vocabulary; False for greedy rows."""
    return (temperature != 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))


def _first_best(scores: Float[Array, "S V"]) -> Int[Array, " S"]:
    """[S]: the index of each row's largest score (the first of equals); the last index if a score is NaN."""
    # Two reductions instead of argmax: that reduces over pairs, which the CPU backend computes element by element,
    # with the noise inside the loop.
    last = scores.shape[-1] - 1
    best = scores == jnp.max(scores, axis=-1, keepdims=True)
    tokens = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return jnp.min(jnp.where(best, tokens, last), axis=-1)


def support(
    scaled: Float[Array, "S V"],
    top_k: Int[Array, " S"],
    top_p: Float[Array, " S"],
    min_p: Float[Array, " S"] | float = 0.0,
) -> Bool[Array, "S V"]:
    """[S, V]: the token mask of top-k, top-p and min-p.

    It keeps the k best tokens, of those the smallest set whose probability reaches p, and of those the tokens that are
    at least `min_p` times as likely as the best one. k ≤ 0, p ≥ 1 and min_p = 0 are off. Exactly k tokens are kept (of
    equals, those with lower indices). The nucleus is measured on the distribution renormalized after top-k, and the
    best token is always kept.
    """
    vocab = scaled.shape[-1]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    places = jnp.arange(vocab)[None]
    within = places < jnp.where(top_k > 0, top_k, vocab)[:, None]
    best_first = jnp.where(within, jnp.take_along_axis(scaled, order, axis=-1), -jnp.inf)
    total = jax.nn.logsumexp(best_first, axis=-1, keepdims=True)
    return jnp.take_along_axis(_nucleus(best_first, total, top_p, min_p), rank, axis=-1)


def _nucleus(
    best_first: Float[Array, "S K"],
    total: Float[Array, "S 1"],
    top_p: Float[Array, " S"],
    min_p: Float[Array, " S"] | float,
) -> Bool[Array, "S K"]:
    """[S, K]: True for the tokens of top-p and min-p among the K best (-inf: not among them), and for the best one.

    `total` is the log of the summed weights of the distribution of which top-p is a share.
    """
    probability = jnp.exp(best_first - total)
    mass_before = jnp.cumsum(probability, axis=-1) - probability
    nucleus = (mass_before < top_p[:, None]) | (top_p >= 1.0)[:, None]
    floor = best_first[:, :1] + jnp.log(jnp.broadcast_to(min_p, top_p.shape))[:, None]  # -inf where it is off
    kept = (best_first > -jnp.inf) & nucleus & (best_first >= floor)
    return kept | (jnp.arange(best_first.shape[-1])[None] == 0)


def penalised(
    logits: Float[Array, "S V"], text: Int[Array, "S T"], lengths: Int[Array, " S"], penalty: Float[Array, " S"]
) -> Float[Array, "S V"]:
    """Logits with the repetition penalty (see `SamplingParams`) for the first `lengths` tokens of each row's `text`."""
    rows = jnp.arange(text.shape[0])[:, None]
    tokens = jnp.where(jnp.arange(text.shape[1])[None] < lengths[:, None], text, logits.shape[-1])
    seen = jnp.zeros(logits.shape, bool).at[rows, tokens].set(True, mode="drop")
    weaker = jnp.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
    return jnp.where(seen, weaker, logits)


def _typed(keys: Keys) -> Key[Array, ...]:
    return keys if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(keys)


# --- log-probability of a token: one function for the engine and the learner
#
# `axis` names the mesh axis over which the vocabulary is divided, for the slice of one device (in `shard_map`); None if
# the logits are those of the whole vocabulary. Tokens and supports hold ids of the whole vocabulary.


def token_logprobs(
    logits: Float[Array, "*rows V"],
    tokens: Int[Array, "*rows"],
    temperature: float | Float[Array, " ..."],
    support: Int[Array, "*rows K"] | None = None,
    axis: str | None = None,
) -> Float[Array, "*rows"]:
    """log softmax(logits / τ)[token], in float32.

    τ is a number or an array that broadcasts over the rows; τ = 0 (greedy) counts as 1, the untempered distribution.
    A logit of -inf means a token outside of the support. With `support`, the softmax is over those ids (negative
    entries are none) and over the whole vocabulary in rows without any.
    """
    shifted = _shifted(tempered(logits, temperature), axis)
    # A comparison and a sum instead of a gather: it works on a sharded vocabulary, and its gradient needs no scatter.
    indices = jax.lax.broadcasted_iota(tokens.dtype, shifted.shape, shifted.ndim - 1) + _first(shifted, axis)
    chosen = _total(jnp.where(indices == tokens[..., None], shifted, 0.0), axis)
    if support is None:
        return chosen - jnp.log(_total(jnp.exp(shifted), axis))
    whole = jnp.all(support < 0, axis=-1)
    kept = _at(shifted, support, axis)
    top = jax.lax.stop_gradient(jnp.max(kept, axis=-1, initial=_LEAST))
    inside = jnp.sum(jnp.exp(kept - top[..., None]), axis=-1)
    every = jnp.log(_total(jnp.exp(shifted), axis))
    over = jnp.where(whole, every, top + jnp.log(jnp.where(whole, 1.0, inside)))
    return chosen - over


def entropies(
    logits: Float[Array, "*rows V"],
    temperature: float | Float[Array, " ..."],
    support: Int[Array, "*rows K"] | None = None,
    axis: str | None = None,
) -> Float[Array, "*rows"]:
    """The entropy in nats of softmax(logits / τ), over `support` as in `token_logprobs`."""
    scaled = tempered(logits, temperature)
    shifted = _shifted(scaled, axis)
    over_all = _entropy(shifted - jnp.log(_total(jnp.exp(shifted), axis))[..., None], axis)
    if support is None:
        return over_all
    whole = jnp.all(support < 0, axis=-1)
    kept = jnp.where(whole[..., None], 0.0, _at(scaled, support, axis))
    return jnp.where(whole, over_all, _entropy(jax.nn.log_softmax(kept), None))


def variances(logits: Float[Array, "*rows V"], axis: str | None = None) -> Float[Array, "*rows"]:
    """The variance of each row's logits."""
    count = logits.shape[-1] * (jax.lax.axis_size(axis) if axis else 1)
    mean = _total(logits, axis) / count
    return _total(jnp.square(logits - mean[..., None]), axis) / count


def _entropy(log_all: Float[Array, "*rows N"], axis: str | None) -> Float[Array, "*rows"]:
    return -_total(jnp.exp(log_all) * jnp.maximum(log_all, _LEAST), axis)  # a finite factor, since 0 · -inf is NaN


def _shifted(scaled: Float[Array, "*rows V"], axis: str | None) -> Float[Array, "*rows V"]:
    """`scaled` less each row's largest entry."""
    largest = jax.lax.stop_gradient(jnp.max(scaled, axis=-1, keepdims=True))
    return scaled - (jax.lax.pmax(largest, axis) if axis else largest)


def _total(x: Float[Array, "*rows V"], axis: str | None) -> Float[Array, "*rows"]:
    """The sum over the vocabulary."""
    own = jnp.sum(x, axis=-1)
    return jax.lax.psum(own, axis) if axis else own


def _first(own: Float[Array, "*rows V"], axis: str | None) -> Int[Array, ""] | int:
    """The id of the first entry of this device's slice."""
    return jax.lax.axis_index(axis) * own.shape[-1] if axis else 0


def _at(scaled: Float[Array, "*rows V"], support: Int[Array, "*rows K"], axis: str | None) -> Float[Array, "*rows K"]:
    """The entries of `scaled` at the ids of `support`, -inf at negative ids."""
    here = support - _first(scaled, axis)
    found = jnp.take_along_axis(scaled, here, axis=-1, mode="clip")
    if axis:  # each id is in the slice of one device
        found = jax.lax.psum(jnp.where((here >= 0) & (here < scaled.shape[-1]), found, 0.0), axis)
    return jnp.where(support >= 0, found, -jnp.inf)


def tempered(logits: Float[Array, "*rows V"], temperature: float | Float[Array, " ..."]) -> Float[Array, "*rows V"]:
    """logits / τ in float32; τ = 0 counts as 1."""
    tau = jnp.asarray(temperature, jnp.float32)
    tau = jnp.where(tau == 0.0, 1.0, tau)
    return logits.astype(jnp.float32) / (tau[..., None] if tau.ndim else tau)
