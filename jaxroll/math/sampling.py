"""Drawing tokens: a key per token from who it belongs to, then Gumbel-max over the truncated distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxroll.math.logprob import tempered, token_logprobs

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


def sample(
    logits: Float[Array, "S V"],
    keys: Keys,
    temperature: Float[Array, " S"],
    top_k: Int[Array, " S"],
    top_p: Float[Array, " S"],
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Tokens int32 [S] and their log-probs float32 [S] under the distribution really sampled.

    Row s draws from softmax(logits / τ) restricted to `support`. τ = 0 takes the first best word; its log-prob is
    that of the untempered, untruncated distribution. Rows do not influence one another.
    """
    logits = logits.astype(jnp.float32)
    greedy = temperature == 0.0
    truncated = ~greedy & ((top_k > 0) | (top_p < 1.0))
    # Sorting a vocabulary is dear, and training never truncates: it is done only when some row asks for it.
    kept = jax.lax.cond(
        jnp.any(truncated),
        lambda: jnp.where(support(tempered(logits, temperature), top_k, top_p) | ~truncated[:, None], logits, -jnp.inf),
        lambda: logits,
    )
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(_typed(keys))
    perturbed = tempered(kept, temperature) + jnp.where(greedy[:, None], 0.0, noise)
    tokens = jnp.argmax(perturbed, axis=-1).astype(jnp.int32)
    return tokens, token_logprobs(kept, tokens, temperature)


def support(scaled: Float[Array, "S V"], top_k: Int[Array, " S"], top_p: Float[Array, " S"]) -> Bool[Array, "S V"]:
    """The words that may be drawn: the k best, and of those the smallest head whose probability reaches p.

    k ≤ 0 and p ≥ 1 are off. Exactly k words are kept: of equals, the lower index goes first. The nucleus is measured
    on the distribution renormalised after top-k, and the best word is always kept.
    """
    vocab = scaled.shape[-1]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    within = jnp.arange(vocab) < jnp.where(top_k > 0, top_k, vocab)[:, None]
    best_first = jnp.where(within, jnp.take_along_axis(scaled, order, axis=-1), -jnp.inf)
    probability = jax.nn.softmax(best_first, axis=-1)
    mass_before = jnp.cumsum(probability, axis=-1) - probability
    nucleus = (mass_before < top_p[:, None]) | (top_p >= 1.0)[:, None] | (jnp.arange(vocab) == 0)
    return jnp.take_along_axis(within & nucleus, rank, axis=-1)


def _typed(keys: Keys) -> PRNGKeyArray:
    return keys if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(keys)
