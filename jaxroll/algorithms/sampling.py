"""Token sampling: a key per token from its identity, then Gumbel-max over the truncated distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

Keys = PRNGKeyArray | Array  # typed keys, or raw uint32 key data with one more axis


def request_key(run_key: Keys, group: Int[Array, ""], member: Int[Array, ""], salt: Int[Array, ""]) -> PRNGKeyArray:
    """The key of one completion: (run, group, member, salt) folded in this order."""
    key = jax.random.fold_in(_typed(run_key), group)
    return jax.random.fold_in(jax.random.fold_in(key, member), salt)


def token_key(
    run_seed_key: Keys, group: Int[Array, ""], member: Int[Array, ""], salt: Int[Array, ""], position: Int[Array, ""]
) -> PRNGKeyArray:
    """The key of the token at absolute `position`: no slot, batch or moment enters it. vmap for many."""
    return position_key(request_key(run_seed_key, group, member, salt), position)


def position_key(key: Keys, position: Int[Array, ""]) -> PRNGKeyArray:
    """`token_key` when the request's key is already at hand."""
    return jax.random.fold_in(_typed(key), position)


def seeded(run_key: Keys, seeds: Int[Array, " S"], own: Bool[Array, " S"]) -> PRNGKeyArray:
    """For each row the run's key, or where `own` says so the key of its own seed; [S]."""
    data = jax.random.key_data(_typed(run_key))
    own_data = jax.vmap(lambda seed: jax.random.key_data(jax.random.key(seed)))(seeds)
    return jax.random.wrap_key_data(jnp.where(own[:, None], own_data, data))


def sample(
    logits: Float[Array, "S V"],
    keys: Keys,
    temperature: Float[Array, " S"],
    top_k: Int[Array, " S"],
    top_p: Float[Array, " S"],
    min_p: Float[Array, " S"] | float = 0.0,
    untruncated: Bool[Array, " S"] | bool = False,
    some_truncate: Bool[Array, ""] | None = None,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Tokens int32 [S] and their log-probs float32 [S] under the distribution really sampled.

    Row s draws from softmax(logits / τ) restricted to `support`. τ = 0 takes the first best word; its log-prob is
    that of the untempered, untruncated distribution. Log-probs of an `untruncated` row are those before truncation.
    Rows do not influence one another. `some_truncate` may say beforehand whether any row is `truncated`: over several
    devices, that is an exchange less.
    """
    logits = logits.astype(jnp.float32)
    rows = temperature.shape
    min_p, untruncated = jnp.broadcast_to(min_p, rows), jnp.broadcast_to(untruncated, rows)
    greedy = temperature == 0.0
    truncated = truncates(temperature, top_k, top_p, min_p)
    # Sorting a vocabulary is dear, and training never truncates: it is done only when some row asks for it.
    kept = jax.lax.cond(
        jnp.any(truncated) if some_truncate is None else some_truncate,
        lambda: jnp.where(
            support(tempered(logits, temperature), top_k, top_p, min_p) | ~truncated[:, None], logits, -jnp.inf
        ),
        lambda: logits,
    )
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(_typed(keys))
    perturbed = tempered(kept, temperature) + jnp.where(greedy[:, None], 0.0, noise)
    tokens = _first_best(perturbed)
    judged = jnp.where((untruncated & truncated)[:, None], logits, kept)
    return tokens, token_logprobs(judged, tokens, temperature)


def truncates(
    temperature: Float[Array, " S"], top_k: Int[Array, " S"], top_p: Float[Array, " S"],
    min_p: Float[Array, " S"] | float,
) -> Bool[Array, " S"]:  # fmt: skip
    """Which rows draw from less than the whole vocabulary; one that takes the best word draws nothing."""
    return (temperature != 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))


def _first_best(scores: Float[Array, "S V"]) -> Int[Array, " S"]:
    """The index of each row's largest score, of equals the first; the last index where a score is no number.

    As two reductions: argmax is one over pairs, which the CPU backend computes word by word, with the noise inside.
    """
    last = scores.shape[-1] - 1
    best = scores == jnp.max(scores, axis=-1, keepdims=True)
    words = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return jnp.min(jnp.where(best, words, last), axis=-1)


def support(
    scaled: Float[Array, "S V"], top_k: Int[Array, " S"], top_p: Float[Array, " S"],
    min_p: Float[Array, " S"] | float = 0.0,
) -> Bool[Array, "S V"]:  # fmt: skip
    """The words that may be drawn: the k best, of those the smallest head whose probability reaches p, and of those
    the ones at least `min_p` times as likely as the best.

    k ≤ 0, p ≥ 1 and min_p = 0 are off. Exactly k words are kept: of equals, the lower index goes first. The nucleus is
    measured on the distribution renormalised after top-k, and the best word is always kept.
    """
    vocab = scaled.shape[-1]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    within = jnp.arange(vocab) < jnp.where(top_k > 0, top_k, vocab)[:, None]
    best_first = jnp.where(within, jnp.take_along_axis(scaled, order, axis=-1), -jnp.inf)
    probability = jax.nn.softmax(best_first, axis=-1)
    mass_before = jnp.cumsum(probability, axis=-1) - probability
    nucleus = (mass_before < top_p[:, None]) | (top_p >= 1.0)[:, None]
    floor = best_first[:, :1] + jnp.log(jnp.broadcast_to(min_p, top_p.shape))[:, None]  # -inf where it is off
    kept = within & ((nucleus & (best_first >= floor)) | (jnp.arange(vocab) == 0))
    return jnp.take_along_axis(kept, rank, axis=-1)


def penalised(
    logits: Float[Array, "S V"], text: Int[Array, "S T"], lengths: Int[Array, " S"], penalty: Float[Array, " S"]
) -> Float[Array, "S V"]:
    """Logits in which the words among the first `lengths` of each row's `text` are less likely: `SamplingParams`."""
    rows = jnp.arange(text.shape[0])[:, None]
    words = jnp.where(jnp.arange(text.shape[1]) < lengths[:, None], text, logits.shape[-1])
    seen = jnp.zeros(logits.shape, bool).at[rows, words].set(True, mode="drop")
    weaker = jnp.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
    return jnp.where(seen, weaker, logits)


def _typed(keys: Keys) -> PRNGKeyArray:
    return keys if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(keys)


# --- log-probability of a token: one function for the engine, the learner and every test that compares them


def token_logprobs(
    logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"], temperature: float | Float[Array, " ..."]
) -> Float[Array, "*rows"]:
    """log softmax(logits / τ)[token], in float32.

    τ is a number or an array that broadcasts over the rows; τ = 0 (greedy) counts as 1, the untempered distribution.
    A logit of -inf is a word outside the support.
    """
    scaled = tempered(logits, temperature)
    shifted = scaled - jax.lax.stop_gradient(jnp.max(scaled, axis=-1, keepdims=True))
    # A comparison and a sum instead of a gather: it splits over a sharded vocabulary, and its gradient is no scatter.
    words = jax.lax.broadcasted_iota(tokens.dtype, shifted.shape, shifted.ndim - 1)
    chosen = jnp.sum(jnp.where(words == tokens[..., None], shifted, 0.0), axis=-1)
    return chosen - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))


def tempered(logits: Float[Array, "*rows V"], temperature: float | Float[Array, " ..."]) -> Float[Array, "*rows V"]:
    """logits / τ in float32, with τ = 0 read as 1."""
    tau = jnp.asarray(temperature, jnp.float32)
    tau = jnp.where(tau == 0.0, 1.0, tau)
    return logits.astype(jnp.float32) / tau[..., None]
