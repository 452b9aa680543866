"""The log-probability of a token: one function for the engine, the learner and every test that compares them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
