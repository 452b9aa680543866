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

_KEY_LIMIT = 2**31


@dataclass(frozen=True, eq=False)
class Request:
    """One generation. `id` is unique among the requests in the engine.

    `position` is the absolute position of the first new token, which its random key depends on; 0 means right after
    the prompt (int32 [P]). It differs from P only when the prompt is a continuation cut off at the front. With `keep`
    its keys and values stay, as long as there is room: a request whose prompt goes on from there computes only what is
    new.

    `allowed` constrains what is drawn: it is given the tokens drawn so far (int32 [T]) and answers which words may come
    next (bool [V], one at least). It is called on the stepping thread before each token, so every dispatch is one step
    while such a request runs; what may be drawn must not depend on anything else, or a replay would differ. If it
    raises, or answers with something else, the request ends with an error; the others do not notice.
    """

    id: int
    prompt: np.ndarray
    key: GenerationKey
    params: SamplingParams
    position: int = 0
    keep: bool = False
    allowed: TokenMask | None = None

    @property
    def first_position(self) -> int:
        """The position of the first new token, for its random key."""
        return self.position or len(self.prompt)


@dataclass(frozen=True)
class Result:
    """A completion and when it was made: from its prefill to its delivery, in seconds of the engine's clock.

    With an `error` the request could not go on, through a fault of its own; the completion is what it drew before.
    """

    completion: Completion
    t_start_s: float
    t_end_s: float
    error: DataError | None = None


OnDone = Callable[[Result], None]


@dataclass(frozen=True, eq=False)
class Add:
    """Start `request` when a slot is free; it was added at `added_s`."""

    request: Request
    on_done: OnDone
    added_s: float


@dataclass(frozen=True)
class Abort:
    """End request `id` now; with `keep` its tokens so far are delivered, else nothing is."""

    id: int
    keep: bool


@dataclass(frozen=True)
class Suspend:
    """Stop decoding between two steps and keep everything as it is."""


@dataclass(frozen=True)
class Resume:
    """Go on after `Suspend`."""


@dataclass(frozen=True, eq=False)
class Swap:
    """Sample with `params`, which are `version`, from now on (or, under `drain`, as soon as nothing runs)."""

    version: Version
    params: Params


def next_mask(request: Request, drawn: np.ndarray, vocab_size: int) -> np.ndarray:
    """The token mask of `request` after the tokens `drawn`: bool [V]; DataError for a bad one."""
    assert request.allowed is not None
    name = f"request {request.id}: its `allowed`"
    try:
        mask = np.asarray(request.allowed(drawn), bool)
    except Exception as error:  # the caller's code: its errors go to the caller and do not end the engine
        raise DataError(f"{name} raised {type(error).__name__} after {len(drawn)} tokens: {error}") from error
    if mask.shape != (vocab_size,):
        raise DataError(f"{name} answered with shape {mask.shape}; one bool for each of {vocab_size} words is needed")
    if not mask.any():
        raise DataError(f"{name} leaves no word to draw after {len(drawn)} tokens; one at least must be")
    return mask


Command = Add | Abort | Suspend | Resume | Swap


@dataclass(frozen=True)
class Capabilities:
    """Optional abilities of an engine, which need memory or a tokenizer."""

    penalties: bool = False
    masks: bool = False
    text: bool = False


def check(request: Request, *, max_tokens: int, max_stops: int, vocab_size: int, able: Capabilities) -> None:
    """DataError if `request` cannot be served by an engine with these sizes: says what and what to do."""
    prompt, params, name = request.prompt, request.params, f"request {request.id}"
    if not isinstance(prompt, np.ndarray) or prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise DataError(f"{name}: the prompt must be a one-dimensional integer array of token ids")
    if prompt.size and (prompt.min() < 0 or prompt.max() >= vocab_size):
        raise DataError(f"{name}: prompt token ids must lie in 0..{vocab_size - 1}, the model's vocabulary")
    if not len(prompt):
        raise DataError(f"{name}: the prompt is empty: generation needs at least one token to start from")
    if params.max_tokens < 1:
        raise DataError(f"{name}: max_tokens = {params.max_tokens}; at least 1 token must be asked for")
    if len(prompt) + params.max_tokens > max_tokens:
        raise DataError(
            f"{name}: {len(prompt)} prompt tokens and max_tokens = {params.max_tokens} exceed the cache of "
            f"{max_tokens} tokens a slot: ask for fewer tokens or give the engine a longer cache"
        )
    if len(params.stop_tokens) > max_stops:
        raise DataError(f"{name}: {len(params.stop_tokens)} stop tokens, but this engine is compiled for {max_stops}")
    if params.temperature < 0 or params.top_k < 0 or not 0 < params.top_p <= 1:
        raise DataError(f"{name}: temperature and top_k must be >= 0 and top_p in (0, 1]; got {params}")
    if not 0 <= params.min_p <= 1 or params.repetition_penalty <= 0:
        raise DataError(f"{name}: min_p must lie in [0, 1] and repetition_penalty be > 0; got {params}")
    if params.seed is not None and not 0 <= params.seed < _KEY_LIMIT:
        raise DataError(f"{name}: a seed must lie in 0..2^31-1; got {params.seed}")
    for wanted, can, what in (
        (params.repetition_penalty != 1, able.penalties, "penalties=True, for a repetition penalty"),
        (request.allowed is not None, able.masks, "masks=True, for a request that says what is allowed"),
        (bool(params.stop_strings), able.text, "decode=, for stop strings"),
    ):
        if wanted and not can:
            raise DataError(f"{name}: this engine was not made with {what}")
    numbers = (request.key.group, request.key.member, request.key.salt, request.first_position)
    if not all(0 <= number < _KEY_LIMIT for number in numbers):
        raise DataError(f"{name}: group, member, salt and position must lie in 0..2^31-1; got {numbers}")
