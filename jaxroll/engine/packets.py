"""How requests cross from host to device and results come back: one int32 array each way, one transfer each.

float32 values travel as their bits. The prefill batch holds P prompts and R entries; an entry says from which row to
which slot a request goes, followed by the request's own row (`request_row`), which the device keeps while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxroll.engine.requests import Request

# Columns of a request's row on the device; stop tokens fill the rest, NO_TOKEN where there is none.
GROUP, MEMBER, SALT, KEY_OFFSET, MAX_TOKENS, TOP_K, TEMPERATURE, TOP_P, STOPS = range(9)
NO_TOKEN = -1

# What has become of a slot.
IDLE, RUNNING, STOP, LENGTH = range(4)
FINISH = {STOP: "stop", LENGTH: "length"}


@dataclass(frozen=True)
class Sizes:
    """The static sizes that decide the compiled programs: S slots, P prompt rows, R inserted requests a prefill."""

    slots: int
    max_tokens: int  # cache positions a slot
    rows: int
    inserts: int
    buckets: tuple[int, ...]  # prompt tokens a row
    chunk: int  # decode steps a dispatch, at most
    max_stops: int

    @property
    def columns(self) -> int:
        """Width of a request's row."""
        return STOPS + self.max_stops

    def batch_shape(self, bucket: int) -> tuple[int]:
        """Shape of the array that `pack` makes for `bucket`."""
        return (self.rows * (bucket + 1) + self.inserts * (2 + self.columns),)

    @property
    def report_shape(self) -> tuple[int, int]:
        """Shape of the array that a decode dispatch returns: see `Report`."""
        return (2 * self.chunk + 5, self.slots)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def request_row(request: Request, sizes: Sizes) -> list[int]:
    """What the device must know of `request`, as `sizes.columns` integers."""
    key, params = request.key, request.params
    offset = request.first_position - len(request.prompt)
    stops = [*params.stop_tokens, *[NO_TOKEN] * (sizes.max_stops - len(params.stop_tokens))]
    return [
        key.group, key.member, key.salt, offset, params.max_tokens, params.top_k,
        _bits(params.temperature), _bits(params.top_p), *stops,
    ]  # fmt: skip


def pack(bucket: int, entries: Sequence[tuple[int, int, Request]], sizes: Sizes) -> np.ndarray:
    """int32 [N]: the prompts and entries (row, slot, request) of one prefill. What is unused goes to no slot."""
    prompts = np.zeros((sizes.rows, bucket + 1), np.int32)
    prompts[:, bucket] = 1  # an unused row still has a last token
    table = np.zeros((sizes.inserts, 2 + sizes.columns), np.int32)
    table[:, 1] = sizes.slots
    for index, (row, slot, request) in enumerate(entries):
        tokens = len(request.prompt)
        prompts[row, :tokens] = request.prompt
        prompts[row, bucket] = tokens
        table[index] = [row, slot, *request_row(request, sizes)]
    return np.concatenate([prompts.ravel(), table.ravel()])


@dataclass(frozen=True)
class Batch:
    """A prefill batch on the device."""

    tokens: Int[Array, "P T"]
    lengths: Int[Array, " P"]
    rows: Int[Array, " R"]
    slots: Int[Array, " R"]
    requests: Int[Array, "R C"]


def unpack(batch: Int[Array, " N"], bucket: int, sizes: Sizes) -> Batch:
    """The parts of what `pack` made."""
    cut = sizes.rows * (bucket + 1)
    prompts = batch[:cut].reshape(sizes.rows, bucket + 1)
    table = batch[cut:].reshape(sizes.inserts, 2 + sizes.columns)
    return Batch(prompts[:, :bucket], prompts[:, bucket], table[:, 0], table[:, 1], table[:, 2:])


def floats(column: Int[Array, " S"]) -> Float[Array, " S"]:
    """The float32 values whose bits are in `column`."""
    return jax.lax.bitcast_convert_type(column, jnp.float32)


def bits(values: Float[Array, "*any"]) -> Int[Array, "*any"]:
    """The bits of float32 `values` as int32."""
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def is_stop(tokens: Int[Array, " S"], requests: Int[Array, "S C"]) -> Bool[Array, " S"]:
    """Whether each slot's token is one of its request's stop tokens."""
    return jnp.any(tokens[:, None] == requests[:, STOPS:], axis=1)


@dataclass(frozen=True)
class Report:
    """What one decode dispatch did, on the host (views of the one array that came over).

    `first_*` are the last tokens before the dispatch: the first tokens of requests inserted just before it. `counts`
    are new tokens of each slot's request so far; row t of `tokens` counts for slots that were still running then.
    """

    steps: int
    tokens: np.ndarray  # int32 [steps, S]
    logprobs: np.ndarray  # float32 [steps, S]
    first_tokens: np.ndarray  # int32 [S]
    first_logprobs: np.ndarray  # float32 [S]
    counts: np.ndarray  # int32 [S]
    status: np.ndarray  # int32 [S]


def read_report(array: np.ndarray, chunk: int) -> Report:
    """The report in `array` (int32, `Sizes.report_shape`)."""
    real = array.view(np.float32)
    steps = int(array[2 * chunk + 4, 0])
    return Report(
        steps, array[:steps], real[chunk : chunk + steps], array[2 * chunk], real[2 * chunk + 1],
        array[2 * chunk + 2], array[2 * chunk + 3],
    )  # fmt: skip
