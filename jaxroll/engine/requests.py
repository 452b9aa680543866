"""The engine's inputs and outputs: requests, results, commands; the arrays that carry them to the device and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxroll.errors import DataError
from jaxroll.kernels.attention import window_pages
from jaxroll.models.params import Params
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Version

TokenMask = Callable[[np.ndarray], np.ndarray]  # tokens drawn so far, int32 [T]; the mask, bool [V]
MaySample = Callable[[int], int]  # tokens sampled so far → how many more may be
OnTokens = Callable[[Completion], None]  # new tokens of a running request; their `finish` is ""

_KEY_LIMIT = 2**31
PREFILL_TOKENS = 256  # from about as many on, arithmetic and not reading the weights bounds a pass on an accelerator


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

    `on_tokens` gets the new tokens after every dispatch that does not end the request, once there are `piece_tokens` of
    them, from the stepping thread; it must neither block nor raise. The `Result` holds all tokens. It is never called
    under the policy `restart`, which may discard tokens.

    `may_sample` gets the number of tokens so far, and returns how many more the request may sample before it is called
    again. At 0 the engine waits, with all requests, until it is woken. It is called on the stepping thread before each
    dispatch, and must neither block nor raise. With drafts a step may exceed it by `Sizes.draft` tokens.

    `before` are the first tokens of the completion, sampled earlier by another engine: they count in `max_tokens`, are
    computed like a part of the prompt, and come first in the `Result`; `on_tokens` gets only later ones. Under the
    policy `drain` the request ends at once (finish "abort") if they are not of the version in use.
    """

    id: int
    prompt: np.ndarray
    key: GenerationKey
    params: SamplingParams
    position: int = 0
    keep: bool = False
    allowed: TokenMask | None = None
    on_tokens: OnTokens | None = None
    piece_tokens: int = 1
    may_sample: MaySample | None = None
    before: Completion | None = None

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


def check(request: Request, sizes: Sizes, *, vocab_size: int, decodes: bool) -> None:
    """Raise DataError, with the reason and a remedy, if an engine of these sizes cannot serve `request`.

    It serves stop strings only if it `decodes` tokens.
    """
    prompt, params, name = request.prompt, request.params, f"request {request.id}"
    if not isinstance(prompt, np.ndarray) or prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise DataError(f"{name}: the prompt must be a one-dimensional integer array of token ids")
    if prompt.size and (prompt.min() < 0 or prompt.max() >= vocab_size):
        raise DataError(f"{name}: prompt token ids must lie in 0..{vocab_size - 1}, the model's vocabulary")
    if not len(prompt):
        raise DataError(f"{name}: the prompt is empty: generation needs at least one token to start from")
    if params.max_tokens < 1:
        raise DataError(f"{name}: max_tokens = {params.max_tokens}; it must be at least 1")
    if len(prompt) + params.max_tokens > sizes.max_tokens:
        raise DataError(
            f"{name}: {len(prompt)} prompt tokens and max_tokens = {params.max_tokens} exceed the cache of "
            f"{sizes.max_tokens} tokens a slot: lower max_tokens or give the engine a longer cache"
        )
    if len(params.stop_tokens) > (most := sizes.max_stops):
        raise DataError(f"{name}: {len(params.stop_tokens)} stop tokens, but this engine is compiled for {most}")
    if params.temperature < 0 or params.top_k < 0 or not 0 < params.top_p <= 1:
        raise DataError(f"{name}: temperature and top_k must be >= 0 and top_p in (0, 1]; got {params}")
    if not 0 <= params.min_p <= 1 or params.repetition_penalty <= 0:
        raise DataError(f"{name}: min_p must lie in [0, 1] and repetition_penalty be > 0; got {params}")
    if sizes.support and (params.top_k > sizes.support or params.untruncated_logprobs):
        raise DataError(
            f"{name}: this engine records supports of at most {sizes.support} tokens (sampling.support_tokens): "
            f"top_k must not exceed that, and untruncated_logprobs must be False; got {params}"
        )
    if (before := request.before) is not None:
        count = len(before.tokens)
        if not 0 < count < params.max_tokens:
            raise DataError(
                f"{name}: {count} earlier tokens; there must be 1 to max_tokens - 1 = {params.max_tokens - 1}"
            )
        if len(before.logprobs) != count or sum(run.count for run in before.versions) != count:
            raise DataError(f"{name}: {count} earlier tokens, but log-probs or versions of another number")
        if before.tokens.min() < 0 or before.tokens.max() >= vocab_size:
            raise DataError(f"{name}: earlier token ids must lie in 0..{vocab_size - 1}, the model's vocabulary")
    if params.seed is not None and not 0 <= params.seed < _KEY_LIMIT:
        raise DataError(f"{name}: a seed must lie in 0..2^31-1; got {params.seed}")
    for wanted, can, what in (
        (params.repetition_penalty != 1, sizes.penalties, "penalties=True, for a repetition penalty"),
        (request.allowed is not None, sizes.masks, "masks=True, for a request with a token mask (`allowed`)"),
        (bool(params.stop_strings), decodes, "decode=, for stop strings"),
        (_truncates(params), sizes.truncation or sizes.support > 0, "truncation=True, for top_k, top_p and min_p"),
    ):
        if wanted and not can:
            raise DataError(f"{name}: this engine was not made with {what}")
    numbers = (request.key.group, request.key.member, request.key.salt, request.first_position)
    if not all(0 <= number < _KEY_LIMIT for number in numbers):
        raise DataError(f"{name}: group, member, salt and position must lie in 0..2^31-1; got {numbers}")


# --- Packed requests and results between host and device: one int32 array each way, one transfer each
#
# float32 values are transferred as their bits. Unused rows of a batch have an index out of range, so that programs drop
# their writes.

# Columns of a request's row on the device; the remaining columns are stop tokens, padded with NO_TOKEN.
(GROUP, MEMBER, SALT, KEY_OFFSET, MAX_TOKENS, TOP_K, TEMPERATURE, TOP_P, MIN_P, PENALTY, SEED, FLAGS, STOPS) = range(13)
NO_TOKEN = -1
OWN_SEED, UNTRUNCATED, NO_DRAFTS = 1, 2, 4  # bits of FLAGS

# The status of a slot.
IDLE, RUNNING, STOP, LENGTH = range(4)
FINISH = {STOP: "stop", LENGTH: "length"}


@dataclass(frozen=True)
class Sizes:
    """The static sizes of the compiled programs: S slots in D shards, R rows per prefill, N requests per insert."""

    slots: int
    max_tokens: int  # positions of one request in the cache
    rows: int
    inserts: int
    buckets: tuple[int, ...]  # prompt tokens a row
    chunk: int  # decode steps a dispatch, at most
    max_stops: int
    page_tokens: int = 64
    pages: int = 0  # of a shard; 0: as many as all its slots can need
    logit_rows: int = 16
    shards: int = 1
    penalties: bool = False  # the device stores every request's tokens
    masks: bool = False  # the device stores a token mask per slot
    support: int = 0  # K: truncated sampling keeps at most K tokens, and reports carry their ids; 0: no limit, no ids
    experts: bool = False  # the device stores the chosen experts of every token
    draft: int = 0  # tokens that a decode step may draft per slot; 0: no speculative decoding
    window: int = 0  # of the layers with rings (`models.cache`), at most; 0: no rings
    truncation: bool = False  # requests may truncate, also without `support`
    draft_model: bool = False  # a model drafts, instead of prompt lookup

    @property
    def sorts(self) -> bool:
        """True if the programs that sample can sort the vocabulary. Supports need no sort."""
        return self.truncation and not self.support

    @property
    def columns(self) -> int:
        """C: the width of a request's row."""
        return STOPS + self.max_stops

    @property
    def table(self) -> int:
        """J: the number of pages of the longest request."""
        return -(-self.max_tokens // self.page_tokens)

    @property
    def table_columns(self) -> int:
        """J, and one for the number of the ring if there are rings."""
        return self.table + (self.window > 0)

    @property
    def ring(self) -> int:
        """R: the pages of a ring, with room for the window and for drafted tokens behind it; 0 without rings."""
        return window_pages(self.window, 1 + self.draft, self.page_tokens) if self.window else 0

    @property
    def rings(self) -> int:
        """The rings of a shard: one for each slot, and its share of those for cached prompts."""
        return self.slots // self.shards + -(-self.logit_rows // self.shards) if self.window else 0

    def keeps_window(self, later: int) -> bool:
        """True if a ring still has the whole window before a token when `later` tokens were computed after it."""
        return self.window + self.draft + later <= self.ring * self.page_tokens + 1 or not self.window

    @property
    def shard_pages(self) -> int:
        """P: the pages of a shard. By default a full table for each slot, and one page to copy for each prompt."""
        return self.pages or self.slots // self.shards * self.table + self.logit_rows

    def rows_at_once(self, bucket: int) -> int:
        """The rows of a prefill that are computed at once: PREFILL_TOKENS tokens or more, divided over the shards."""
        rows = -(-PREFILL_TOKENS // bucket)
        return min(self.rows, -(-rows // self.shards) * self.shards)

    def prefill_shape(self, bucket: int) -> tuple[int, int]:
        """The shape of the array of `pack_prefill` for `bucket`."""
        return (self.rows, bucket + 4 + self.table_columns)

    @property
    def text(self) -> int:
        """W: the number of tokens of each request that the device stores."""
        return self.max_tokens if self.penalties or self.draft else 0

    @property
    def dispatch_tokens(self) -> int:
        """The maximum number of tokens that a dispatch samples per slot."""
        return self.chunk * (self.draft + 1)

    @property
    def insert_shape(self) -> tuple[int, int]:
        """The shape of the arrays of `pack_inserts` and `pack_restores`."""
        return (self.inserts, 6 + self.columns + self.text)

    @property
    def copy_shape(self) -> tuple[int, int]:
        """The shape of the array of `pack_copies`."""
        return (self.inserts, 3)

    @property
    def report_shape(self) -> tuple[int, int]:
        """The shape of the array that a decode dispatch returns; see `Report`."""
        tokens = self.dispatch_tokens
        return (2 * tokens + 5 + 2 * (self.draft > 0) + (tokens + 1) * self.support, self.slots)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _truncates(params: SamplingParams) -> bool:
    return params.temperature != 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def request_row(request: Request, sizes: Sizes) -> list[int]:
    """The row of `request` on the device: `sizes.columns` integers."""
    key, params = request.key, request.params
    offset = request.first_position - len(request.prompt)
    stops = () if params.ignore_eos else params.stop_tokens
    flags = OWN_SEED * (params.seed is not None) + UNTRUNCATED * params.untruncated_logprobs
    flags += NO_DRAFTS * (request.allowed is not None)  # the mask of one token does not allow for the next
    return [
        key.group, key.member, key.salt, offset, params.max_tokens, params.top_k,
        _bits(params.temperature), _bits(params.top_p), _bits(params.min_p), _bits(params.repetition_penalty),
        params.seed or 0, flags, *stops, *[NO_TOKEN] * (sizes.max_stops - len(stops)),
    ]  # fmt: skip


# --- to the device


@dataclass(frozen=True)
class PrefillRow:
    """A row of a prefill: `tokens` at positions `start`, start + 1, … of the pages in `table` and of the `ring`.

    The last token's logits go to row `logit_row` of the logits (None: nowhere).
    """

    tokens: np.ndarray
    start: int
    shard: int
    table: Sequence[int]
    logit_row: int | None
    ring: Sequence[int] = ()  # its number; none in an engine without rings


def pack_prefill(bucket: int, rows: Sequence[PrefillRow], sizes: Sizes) -> np.ndarray:
    """The rows of a prefill as one array, int32 `Sizes.prefill_shape`."""
    packed = np.zeros(sizes.prefill_shape(bucket), np.int32)
    packed[:, bucket + 3] = sizes.logit_rows
    for into, row in zip(packed, rows, strict=False):
        into[: len(row.tokens)] = row.tokens
        logits = sizes.logit_rows if row.logit_row is None else row.logit_row
        into[bucket : bucket + 4] = len(row.tokens), row.start, row.shard, logits
        into[bucket + 4 : bucket + 4 + len(row.table)] = row.table
        into[len(into) - len(row.ring) :] = row.ring
    return packed


@dataclass(frozen=True)
class Prefill:
    """A prefill batch on the device."""

    tokens: Int[Array, "R T"]
    lengths: Int[Array, " R"]
    starts: Int[Array, " R"]
    shards: Int[Array, " R"]
    logit_rows: Int[Array, " R"]
    tables: Int[Array, "R J"]


def unpack_prefill(packed: Int[Array, "R C"], bucket: int) -> Prefill:
    """The parts of the array of `pack_prefill`."""
    lengths, starts, shards, rows = (packed[:, bucket + i] for i in range(4))
    return Prefill(packed[:, :bucket], lengths, starts, shards, rows, packed[:, bucket + 4 :])


def pack_inserts(entries: Sequence[tuple[int, int, Sequence[int], int, Request]], sizes: Sizes) -> np.ndarray:
    """int32 `Sizes.insert_shape`; entries: (slot, logits row, (shard, from page, to page), prompt tokens, request)."""
    packed = _unused_rows(sizes)
    for into, (slot, row, copy, tokens, request) in zip(packed, entries, strict=False):
        into[:6] = slot, row, *copy, tokens
        _put_request(into[6:], request, request.prompt, sizes)
    return packed


def pack_restores(entries: Sequence[tuple[int, np.ndarray, float, int, Request]], sizes: Sizes) -> np.ndarray:
    """int32 `Sizes.insert_shape`; entries: (slot, sampled tokens, the last one's log-prob, its position, request)."""
    packed = _unused_rows(sizes)
    for into, (slot, tokens, logprob, position, request) in zip(packed, entries, strict=False):
        into[:6] = slot, tokens[-1], _bits(logprob), position, len(tokens), 0
        _put_request(into[6:], request, np.concatenate([request.prompt, tokens]), sizes)
    return packed


def _put_request(into: np.ndarray, request: Request, text: np.ndarray, sizes: Sizes) -> None:
    into[: sizes.columns] = request_row(request, sizes)
    if sizes.text:
        into[sizes.columns : sizes.columns + len(text)] = text


def _unused_rows(sizes: Sizes) -> np.ndarray:
    """Rows whose slot and page are out of range, so that programs drop their writes."""
    packed = np.zeros(sizes.insert_shape, np.int32)
    packed[:, 0], packed[:, 4] = sizes.slots, sizes.shard_pages
    return packed


def pack_copies(copies: Sequence[Sequence[int]], sizes: Sizes) -> np.ndarray:
    """int32 `Sizes.copy_shape`; entries are (shard, from page, to page)."""
    packed = np.zeros(sizes.copy_shape, np.int32)
    packed[:, 2] = sizes.shard_pages
    if copies:
        packed[: len(copies)] = copies
    return packed


def floats(column: Int[Array, " S"]) -> Float[Array, " S"]:
    """The float32 values whose bits are in `column`."""
    return jax.lax.bitcast_convert_type(column, jnp.float32)


def bits(values: Float[Array, "*any"]) -> Int[Array, "*any"]:
    """The bits of float32 `values` as int32."""
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def is_stop(tokens: Int[Array, " S"], requests: Int[Array, "S C"]) -> Bool[Array, " S"]:
    """True if each slot's token is one of its request's stop tokens."""
    return jnp.any(tokens[:, None] == requests[:, STOPS:], axis=1)


# --- from the device


@dataclass(frozen=True)
class Report:
    """The report of one decode dispatch on the host, as views of one array.

    `first_*` are the last tokens before the dispatch, which are the first tokens of requests inserted just before it.
    `counts` are the numbers of new tokens of each slot's request so far. Row t of `tokens` is valid for slots that were
    running at step t. `supports` are the ids to which truncated sampling restricted each token (negative entries: none,
    K = 0 in an engine without them).

    With speculative decoding a slot may sample several tokens in a step. Row t has the t-th token of each slot in this
    dispatch, if it has sampled so many. `ran` are the steps in which each slot was running, `drafted` the drafted
    tokens that these verified; both are None otherwise.
    """

    steps: int
    tokens: np.ndarray  # int32 [rows, S], rows = steps without speculative decoding
    logprobs: np.ndarray  # float32 [rows, S]
    first_tokens: np.ndarray  # int32 [S]
    first_logprobs: np.ndarray  # float32 [S]
    counts: np.ndarray  # int32 [S]
    status: np.ndarray  # int32 [S]
    supports: np.ndarray  # int32 [rows, S, K]
    first_supports: np.ndarray  # int32 [S, K]
    drafted: np.ndarray | None = None  # int32 [S]
    ran: np.ndarray | None = None  # int32 [S]


def read_report(array: np.ndarray, sizes: Sizes) -> Report:
    """The report in `array` (int32, `Sizes.report_shape`)."""
    most, real = sizes.dispatch_tokens, array.view(np.float32)
    steps, ends = int(array[2 * most + 4, 0]), 2 * most + 5 + 2 * (sizes.draft > 0)
    rows = most if sizes.draft else steps
    ids = array[ends:].reshape(most + 1, -1, array.shape[1]).swapaxes(1, 2)
    return Report(
        steps,
        array[:rows],
        real[most : most + rows],
        array[2 * most],
        real[2 * most + 1],
        array[2 * most + 2],
        array[2 * most + 3],
        ids[1 : rows + 1],
        ids[0],
        *(array[2 * most + 5 : ends] if sizes.draft else ()),
    )


def report_supports(first: Int[Array, "S K"], later: Int[Array, "chunk S K"], slots: int) -> Int[Array, "rows S"]:
    """The rows of a report that hold the supports of the tokens before and of those in the dispatch."""
    return jnp.concatenate([first[None], later]).swapaxes(1, 2).reshape(-1, slots)
