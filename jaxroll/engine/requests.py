"""The engine's inputs and outputs: requests, results, and the commands that carry them between threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxroll.errors import DataError
from jaxroll.models.params import Params
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Version

TokenMask = Callable[[np.ndarray], np.ndarray]  # tokens drawn so far, int32 [T]; the mask, bool [V]
OnTokens = Callable[[Completion], None]  # new tokens of a running request; their `finish` is ""

_KEY_LIMIT = 2**31


@dataclass(frozen=True, eq=False)
class Request:
    """One generation. `id` is unique among the requests in the engine.

    `position` is the absolute position of the first new token, on which its random key depends; 0 means directly after
    the prompt (int32 [P]). It differs from P only if the prompt was truncated at the front. With `keep`, the KV cache
    of prompt and answer is kept while there is room, so that a later request that continues them computes only new
    tokens.

    `allowed` returns the mask of the next token (bool [V], at least one True) for the tokens sampled so far (int32
    [T]). It is called on the stepping thread before each token, so every dispatch is one step while such a request
    runs. Its result must depend on nothing else, otherwise a replay would differ. If it raises or returns an invalid
    mask, the request ends with an error; other requests are not affected.

    `on_tokens` gets the new tokens after every dispatch that does not end the request, from the stepping thread; it
    must neither block nor raise. The `Result` holds all tokens. It is never called under the policy `restart`, which
    may discard tokens.
    """

    id: int
    prompt: np.ndarray
    key: GenerationKey
    params: SamplingParams
    position: int = 0
    keep: bool = False
    allowed: TokenMask | None = None
    on_tokens: OnTokens | None = None

    @property
    def first_position(self) -> int:
        """The position of the first new token, for its random key."""
        return self.position or len(self.prompt)


@dataclass(frozen=True)
class Result:
    """A completion with its start (prefill) and end (delivery), in seconds of the engine's clock.

    With an `error` the request ended by its own fault; the completion holds the tokens before.
    """

    completion: Completion
    t_start_s: float
    t_end_s: float
    error: DataError | None = None


OnDone = Callable[[Result], None]


@dataclass(frozen=True, eq=False)
class Add:
    """The command to start `request` when a slot is free; it was added at `added_s`."""

    request: Request
    on_done: OnDone
    added_s: float


@dataclass(frozen=True)
class Abort:
    """The command to end request `id`; with `keep` its tokens so far are delivered, otherwise nothing."""

    id: int
    keep: bool


@dataclass(frozen=True)
class Suspend:
    """The command to stop decoding between two dispatches; running requests keep their slots."""


@dataclass(frozen=True)
class Resume:
    """The command to continue after `Suspend`."""


@dataclass(frozen=True, eq=False)
class Swap:
    """The command to sample with `params`, which are `version` (under `drain`, when no request runs)."""

    version: Version
    params: Params


def next_mask(request: Request, drawn: np.ndarray, vocab_size: int) -> np.ndarray:
    """The token mask of `request` after the tokens `drawn`: bool [V]; DataError for an invalid one."""
    assert request.allowed is not None
    name = f"request {request.id}: its `allowed`"
    try:
        mask = np.asarray(request.allowed(drawn), bool)
    except Exception as error:  # the caller's code: its errors go to the caller and do not end the engine
        raise DataError(f"{name} raised {type(error).__name__} after {len(drawn)} tokens: {error}") from error
    if mask.shape != (vocab_size,):
        raise DataError(f"{name} returned shape {mask.shape}; one bool for each of {vocab_size} tokens is needed")
    if not mask.any():
        raise DataError(f"{name} allows no token after {len(drawn)} tokens; it must allow at least one")
    return mask


Command = Add | Abort | Suspend | Resume | Swap


@dataclass(frozen=True)
class Capabilities:
    """Optional abilities of an engine, which need memory or a tokenizer."""

    penalties: bool = False
    masks: bool = False
    text: bool = False
    support_tokens: int = 0


def check(request: Request, *, max_tokens: int, max_stops: int, vocab_size: int, able: Capabilities) -> None:
    """Raise DataError, with the reason and a remedy, if an engine with these sizes cannot serve `request`."""
    prompt, params, name = request.prompt, request.params, f"request {request.id}"
    if not isinstance(prompt, np.ndarray) or prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise DataError(f"{name}: the prompt must be a one-dimensional integer array of token ids")
    if prompt.size and (prompt.min() < 0 or prompt.max() >= vocab_size):
        raise DataError(f"{name}: prompt token ids must lie in 0..{vocab_size - 1}, the model's vocabulary")
    if not len(prompt):
        raise DataError(f"{name}: the prompt is empty: generation needs at least one token to start from")
    if params.max_tokens < 1:
        raise DataError(f"{name}: max_tokens = {params.max_tokens}; it must be at least 1")
    if len(prompt) + params.max_tokens > max_tokens:
        raise DataError(
            f"{name}: {len(prompt)} prompt tokens and max_tokens = {params.max_tokens} exceed the cache of "
            f"{max_tokens} tokens a slot: lower max_tokens or give the engine a longer cache"
        )
    if len(params.stop_tokens) > max_stops:
        raise DataError(f"{name}: {len(params.stop_tokens)} stop tokens, but this engine is compiled for {max_stops}")
    if params.temperature < 0 or params.top_k < 0 or not 0 < params.top_p <= 1:
        raise DataError(f"{name}: temperature and top_k must be >= 0 and top_p in (0, 1]; got {params}")
    if not 0 <= params.min_p <= 1 or params.repetition_penalty <= 0:
        raise DataError(f"{name}: min_p must lie in [0, 1] and repetition_penalty be > 0; got {params}")
    if able.support_tokens and (params.top_k > able.support_tokens or params.untruncated_logprobs):
        raise DataError(
            f"{name}: this engine records supports of at most {able.support_tokens} tokens (sampling.support_tokens): "
            f"top_k must not exceed that, and untruncated_logprobs must be False; got {params}"
        )
    if params.seed is not None and not 0 <= params.seed < _KEY_LIMIT:
        raise DataError(f"{name}: a seed must lie in 0..2^31-1; got {params.seed}")
    for wanted, can, what in (
        (params.repetition_penalty != 1, able.penalties, "penalties=True, for a repetition penalty"),
        (request.allowed is not None, able.masks, "masks=True, for a request with a token mask (`allowed`)"),
        (bool(params.stop_strings), able.text, "decode=, for stop strings"),
    ):
        if wanted and not can:
            raise DataError(f"{name}: this engine was not made with {what}")
    numbers = (request.key.group, request.key.member, request.key.salt, request.first_position)
    if not all(0 <= number < _KEY_LIMIT for number in numbers):
        raise DataError(f"{name}: group, member, salt and position must lie in 0..2^31-1; got {numbers}")
