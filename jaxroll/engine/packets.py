"""Packed requests and results between host and device: one int32 array each way, one transfer each.

float32 values are transferred as their bits. Unused rows of a batch have an index out of range, so that programs drop
their writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxroll.engine.requests import Request

# Columns of a request's row on the device; the remaining columns are stop tokens, padded with NO_TOKEN.
(
    GROUP, MEMBER, SALT, KEY_OFFSET, MAX_TOKENS, TOP_K, TEMPERATURE, TOP_P, MIN_P, PENALTY, SEED, FLAGS, STOPS
) = range(13)  # fmt: skip
NO_TOKEN = -1
OWN_SEED, UNTRUNCATED = 1, 2  # bits of FLAGS

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

    @property
    def columns(self) -> int:
        """C: the width of a request's row."""
        return STOPS + self.max_stops

    @property
    def table(self) -> int:
        """J: the number of pages of the longest request."""
        return -(-self.max_tokens // self.page_tokens)

    @property
    def shard_pages(self) -> int:
        """P: the pages of a shard. By default a full table for each slot, and one page to copy for each prompt."""
        return self.pages or self.slots // self.shards * self.table + self.logit_rows

    def prefill_shape(self, bucket: int) -> tuple[int, int]:
        """The shape of the array of `pack_prefill` for `bucket`."""
        return (self.rows, bucket + 4 + self.table)

    @property
    def text(self) -> int:
        """W: the number of tokens of each request that the device stores."""
        return self.max_tokens if self.penalties else 0

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
        return (2 * self.chunk + 5 + (self.chunk + 1) * self.support, self.slots)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def request_row(request: Request, sizes: Sizes) -> list[int]:
    """The row of `request` on the device: `sizes.columns` integers."""
    key, params = request.key, request.params
    offset = request.first_position - len(request.prompt)
    stops = () if params.ignore_eos else params.stop_tokens
    flags = OWN_SEED * (params.seed is not None) + UNTRUNCATED * params.untruncated_logprobs
    return [
        key.group, key.member, key.salt, offset, params.max_tokens, params.top_k,
        _bits(params.temperature), _bits(params.top_p), _bits(params.min_p), _bits(params.repetition_penalty),
        params.seed or 0, flags, *stops, *[NO_TOKEN] * (sizes.max_stops - len(stops)),
    ]  # fmt: skip


# --- to the device


@dataclass(frozen=True)
class PrefillRow:
    """A row of a prefill: `tokens` at positions `start`, start + 1, … of the pages in `table`.

    The last token's logits go to row `logit_row` of the logits (None: nowhere).
    """

    tokens: np.ndarray
    start: int
    shard: int
    table: Sequence[int]
    logit_row: int | None


def pack_prefill(bucket: int, rows: Sequence[PrefillRow], sizes: Sizes) -> np.ndarray:
    """The rows of a prefill as one array, int32 `Sizes.prefill_shape`."""
    packed = np.zeros(sizes.prefill_shape(bucket), np.int32)
    packed[:, bucket + 3] = sizes.logit_rows
    for into, row in zip(packed, rows, strict=False):
        into[: len(row.tokens)] = row.tokens
        logits = sizes.logit_rows if row.logit_row is None else row.logit_row
        into[bucket : bucket + 4] = len(row.tokens), row.start, row.shard, logits
        into[bucket + 4 : bucket + 4 + len(row.table)] = row.table
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
    """

    steps: int
    tokens: np.ndarray  # int32 [steps, S]
    logprobs: np.ndarray  # float32 [steps, S]
    first_tokens: np.ndarray  # int32 [S]
    first_logprobs: np.ndarray  # float32 [S]
    counts: np.ndarray  # int32 [S]
    status: np.ndarray  # int32 [S]
    supports: np.ndarray  # int32 [steps, S, K]
    first_supports: np.ndarray  # int32 [S, K]


def read_report(array: np.ndarray, chunk: int) -> Report:
    """The report in `array` (int32, `Sizes.report_shape`)."""
    real = array.view(np.float32)
    steps, ends = int(array[2 * chunk + 4, 0]), 2 * chunk + 5
    ids = array[ends:].reshape(chunk + 1, -1, array.shape[1]).swapaxes(1, 2)
    return Report(
        steps, array[:steps], real[chunk : chunk + steps], array[2 * chunk], real[2 * chunk + 1],
        array[2 * chunk + 2], array[2 * chunk + 3], ids[1 : steps + 1], ids[0],
    )  # fmt: skip


def report_supports(first: Int[Array, "S K"], later: Int[Array, "chunk S K"], slots: int) -> Int[Array, "rows S"]:
    """The rows of a report that hold the supports of the tokens before and of those in the dispatch."""
    return jnp.concatenate([first[None], later]).swapaxes(1, 2).reshape(-1, slots)
