"""Naive generation, the reference for the engine: no cache, no batch, one full forward pass per token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxroll.algorithms import sampling
from jaxroll.engine.requests import Request
from jaxroll.models import transformer
from jaxroll.models.families import ModelSpec
from jaxroll.models.params import Params

NEAR_TIE = 1e-3  # two programs may sample different tokens if the best two perturbed logits are closer than this

_LENGTH_STEP = 32  # lengths are padded to multiples of this, so that not every length is compiled


@dataclass(frozen=True)
class Trace:
    """A naive generation. `margins` are the differences between the best and second-best perturbed logits."""

    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    margins: np.ndarray  # float32 [T]


def generate(spec: ModelSpec, params: Params, request: Request, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The new tokens of `request`, int32 [T], including the stop token, and their log-probs, float32 [T]."""
    found = trace(spec, params, request, seed)
    return found.tokens, found.logprobs


def trace(spec: ModelSpec, params: Params, request: Request, seed: int) -> Trace:
    """The result of `generate`, with the margins."""
    wanted = request.params
    end = len(request.prompt) + wanted.max_tokens
    text = np.zeros(-(-end // _LENGTH_STEP) * _LENGTH_STEP, np.int32)
    text[: len(request.prompt)] = request.prompt
    offset = request.first_position - len(request.prompt)
    drawn: list[tuple[int, float, float]] = []
    for length in range(len(request.prompt), end):
        logits = next_logits(spec, params, text, np.int32(length))
        drawn.append(draw(request, seed, logits, length + offset, text[:length]))
        text[length] = drawn[-1][0]
        if text[length] in wanted.stop_tokens and not wanted.ignore_eos:
            break
    tokens, logprobs, margins = zip(*drawn, strict=True)
    return Trace(np.array(tokens, np.int32), np.array(logprobs, np.float32), np.array(margins, np.float32))


@partial(jax.jit, static_argnums=0)
def next_logits(
    spec: ModelSpec, params: Params, tokens: Int[Array, " T"], length: Int[Array, ""]
) -> Float[Array, " V"]:
    """float32 [V]: the logits after the first `length` of `tokens`; later tokens have no effect."""
    positions = jnp.arange(tokens.shape[0])
    segments = (positions < length).astype(jnp.int32)
    hidden = transformer.forward(spec, params, tokens[None], positions[None], segments[None])
    return transformer.logits(spec, params, hidden[0, length - 1])


@partial(jax.jit, static_argnums=0)
def all_logits(spec: ModelSpec, params: Params, tokens: Int[Array, " T"]) -> Float[Array, "T V"]:
    """float32 [T, V]: the logits after each of `tokens`, in one forward pass."""
    positions = jnp.arange(tokens.shape[0])
    hidden = transformer.forward(spec, params, tokens[None], positions[None], jnp.ones_like(tokens)[None])
    return transformer.logits(spec, params, hidden[0])


@jax.jit
def _noise(seed: int, identity: Int[Array, " 4"], like: Float[Array, " V"]) -> Float[Array, " V"]:
    """The Gumbel noise of the token with `identity` (group, member, salt, position)."""
    return jax.random.gumbel(sampling.token_key(jax.random.key(seed), *identity), like.shape, like.dtype)


def draw(
    request: Request, seed: int, logits: Float[Array, " V"], position: int, text: np.ndarray
) -> tuple[int, float, float]:
    """The token at `position`, after `text`, its log-prob and its margin, computed in numpy by definition."""
    key, params = request.key, request.params
    scores = _penalised(np.array(logits), text, params.repetition_penalty)
    if request.allowed is not None:
        scores[~request.allowed(text[len(request.prompt) :])] = -np.inf
    if params.temperature == 0:
        return _best(scores, scores)
    tempered = scores / np.float32(params.temperature)
    kept = _truncated(tempered, params.top_k, params.top_p, params.min_p)
    own = seed if params.seed is None else params.seed
    noise = _noise(own, np.array([key.group, key.member, key.salt, position], np.int32), logits)
    return _best(kept + np.asarray(noise), tempered if params.untruncated_logprobs else kept)


def _penalised(scores: np.ndarray, text: np.ndarray, penalty: float) -> np.ndarray:
    """`scores` with those of every token in `text` divided by `penalty` if positive, multiplied otherwise."""
    for token in set(text.tolist()) if penalty != 1 else ():
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    return scores


def _truncated(scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """`scores` with -inf outside of the token mask.

    The mask keeps the `top_k` best tokens (0: all), of those the smallest set with mass `top_p`, and of those the
    tokens at least `min_p` times as likely as the best one.
    """
    order = np.argsort(-scores, kind="stable")
    head = order[: top_k or len(order)]
    mass = np.cumsum(_probabilities(scores[head]))
    kept = head if top_p >= 1 else head[: 1 + np.searchsorted(mass, top_p)]
    kept = kept[np.exp(scores[kept] - scores[order[0]]) >= min_p]
    return np.where(np.isin(np.arange(len(scores)), kept), scores, -np.inf)


def _probabilities(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def _best(perturbed: np.ndarray, judged: np.ndarray) -> tuple[int, float, float]:
    """The best of `perturbed`, its log-prob under `judged`, and its margin to the second best."""
    token = int(np.argmax(perturbed))
    ahead = np.partition(perturbed, -2)[-2:]
    return token, float(np.log(_probabilities(judged)[token])), float(ahead[1] - ahead[0])
