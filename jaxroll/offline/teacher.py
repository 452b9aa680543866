"""How much of a set of worked answers a model would have given greedily, read off one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.learner import packing
from jaxroll.learner.samples import Sample
from jaxroll.learner.state import Params
from jaxroll.learner.step import Programs, Recipe, hidden_states
from jaxroll.models import transformer


def exact_share(programs: Programs, params: Params, check: Sequence[Sample], buckets: Sequence[int]) -> float | None:
    """The share of `check` of which every trained token is the likeliest one after the true tokens before it.

    As long as every token was the likeliest, greedy decoding has produced the same prefix: the share is that of exact
    greedy answers (up to ties and rounding). None when there is nothing to check.
    """
    if not check:
        return None
    recipe = programs.recipe
    guess = jax.jit(lambda params, streams: _likeliest(recipe, params, streams))
    right = 0
    for batch in packing.pack(check, recipe.row_tokens, buckets[:1]):
        hits = np.asarray(guess(params, programs.placed(batch.streams))) | ~batch.streams["mask"]
        right += sum(bool(hits[p.row, p.start : p.start + p.length].all()) for p in batch.placements)
    return right / len(check)


def _likeliest(recipe: Recipe, params: Params, streams: Mapping[str, jax.Array]) -> jax.Array:
    """bool [R, T]: where the token is the argmax of the distribution that predicts it."""
    hidden = hidden_states(recipe, params, streams)
    logits = transformer.logits(recipe.spec, params, jnp.roll(hidden, 1, axis=1))
    return logits.argmax(-1) == streams["tokens"]
