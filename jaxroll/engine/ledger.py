"""Host record of the slots: request, progress and sampled tokens of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxroll.engine import packets
from jaxroll.engine.requests import Add, Result
from jaxroll.protocols import Completion
from jaxroll.records import Version, VersionRun


@dataclass(frozen=True, eq=False)
class Partial:
    """The T tokens of a request that left its slot before its end, and its start time."""

    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    versions: tuple[VersionRun, ...]
    start_s: float


@dataclass(eq=False, slots=True)
class _Running:
    """A request in a slot. Its tokens after the first `known` ones are in the history from `start_row` on.

    Known are those it had drawn when it came (`before`), or the one that its start draws.
    """

    add: Add
    start_s: float
    start_row: int
    first_version: Version
    before: Partial | None = None
    count: int = 0
    first_token: int = 0
    first_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a request, and the number of its tokens that count (None: all)."""

    finish: str
    tokens: int | None = None


@dataclass(frozen=True)
class Progress:
    """The result of one dispatch by slot: decoded tokens, first tokens, and ended requests."""

    decoded: int
    begun: tuple[Add, ...]
    ended: dict[int, Ended]

    @property
    def firsts(self) -> int:
        """Tokens that were sampled by inserts."""
        return len(self.begun)


class Ledger:
    """S slots and the rows sampled lately, `rows` at least as many as the longest completion and one dispatch."""

    def __init__(self, slots: int, rows: int) -> None:
        self._running: list[_Running | None] = [None] * slots
        self._history, self._swaps = History(rows, slots), WeightSwaps()

    def swap_version(self, version: Version) -> None:
        """Tokens are drawn at `version` from now on."""
        row = self._history.rows
        self._swaps.forget_before(min((r.start_row for r in self._running if r is not None), default=row))
        self._swaps.add(row, version)

    def start(self, slot: int, add: Add, start_s: float, version: Version, before: Partial | None = None) -> None:
        """A request begins in `slot` at `version`, or goes on there after what it had drawn `before`."""
        running = _Running(add, start_s, self._history.rows, version, before)
        if before is not None:
            running.count, running.start_s = len(before.tokens), before.start_s
        self._running[slot] = running

    def account(self, report: packets.Report) -> Progress:
        """Take in a dispatch's report."""
        counts, status = report.counts.tolist(), report.status.tolist()
        decoded, begun = 0, []
        ended: dict[int, Ended] = {}
        for slot, running in enumerate(self._running):
            if running is None:
                continue
            if not running.count:
                running.first_token = int(report.first_tokens[slot])
                running.first_logprob = float(report.first_logprobs[slot])
                running.count = 1
                begun.append(running.add)
            decoded += counts[slot] - running.count
            running.count = counts[slot]
            if status[slot] != packets.RUNNING:
                ended[slot] = Ended(packets.FINISH[status[slot]])
        self._history.add(report.tokens, report.logprobs)
        return Progress(decoded, tuple(begun), ended)

    def take(self, slot: int, ended: Ended, end_s: float) -> tuple[Add, Result]:
        """The request in `slot` and what it came to; the slot is empty afterwards."""
        add, drawn = self.interrupt(slot)
        kept = len(drawn.tokens) if ended.tokens is None else ended.tokens
        versions = _first(drawn.versions, kept)
        completion = Completion(drawn.tokens[:kept], drawn.logprobs[:kept], versions, ended.finish)
        return add, Result(completion, drawn.start_s, end_s)

    def tokens(self, slot: int) -> np.ndarray:
        """int32 [T]: what the request in `slot` has drawn so far."""
        running = self._running[slot]
        if running is None:
            raise LookupError(f"slot {slot} is empty")
        before = [running.first_token] if running.before is None else running.before.tokens
        later, _ = self._history.column(slot, running.start_row, running.count - len(before))
        return np.concatenate([np.asarray(before, np.int32), later])

    def forget(self, slot: int) -> None:
        """The request in `slot` is not there, and was not."""
        self._running[slot] = None

    def interrupt(self, slot: int) -> tuple[Add, Partial]:
        """The request in `slot` and what it has drawn so far; the slot is empty afterwards."""
        running = self._running[slot]
        if running is None:
            raise LookupError(f"slot {slot} is empty")
        self._running[slot] = None
        before = running.before or Partial(
            np.array([running.first_token], np.int32), np.array([running.first_logprob], np.float32),
            (VersionRun(running.first_version, 1),), running.start_s,
        )  # fmt: skip
        later = running.count - len(before.tokens)
        tokens, logprobs = self._history.column(slot, running.start_row, later)
        versions = self._swaps.runs(before.versions, running.start_row, later)
        return running.add, Partial(
            np.concatenate([before.tokens, tokens]), np.concatenate([before.logprobs, logprobs]), versions,
            running.start_s,
        )  # fmt: skip


def _first(versions: tuple[VersionRun, ...], tokens: int) -> tuple[VersionRun, ...]:
    """The versions of the first `tokens` tokens."""
    kept, left = [], tokens
    for run in versions:
        if left > 0:
            kept.append(VersionRun(run.version, min(run.count, left)))
        left -= run.count
    return tuple(kept)


# --- history: a ring of decode rows from which a finished request takes its column
#
# A running slot samples in every decode step, so a request's tokens after its first are in one column in consecutive
# rows. Keeping rows costs one copy a dispatch, however many slots there are; nothing is done per token.


class History:
    """The last `capacity` rows of S slots. `rows` counts all rows ever added."""

    def __init__(self, capacity: int, slots: int) -> None:
        self._tokens = np.zeros((capacity, slots), np.int32)
        self._logprobs = np.zeros((capacity, slots), np.float32)
        self.rows = 0

    def add(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Append the rows of one dispatch (each [steps, S])."""
        capacity, steps = len(self._tokens), len(tokens)
        at = self.rows % capacity
        head = min(steps, capacity - at)
        self._tokens[at : at + head], self._logprobs[at : at + head] = tokens[:head], logprobs[:head]
        if head < steps:
            self._tokens[: steps - head], self._logprobs[: steps - head] = tokens[head:], logprobs[head:]
        self.rows += steps

    def column(self, slot: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 [count], float32 [count]: what `slot` sampled in `count` rows from row `start` (both still held)."""
        if count and not self.rows - len(self._tokens) <= start <= self.rows - count:
            raise IndexError(f"rows {start}..{start + count - 1} of {self.rows} are not held")
        rows = np.arange(start, start + count) % len(self._tokens)
        return self._tokens[rows, slot], self._logprobs[rows, slot]


class WeightSwaps:
    """The version in force, by row."""

    def __init__(self) -> None:
        self._swaps: list[tuple[int, Version]] = []

    def add(self, row: int, version: Version) -> None:
        """From `row` on, tokens are drawn at `version`."""
        self._swaps.append((row, version))

    def forget_before(self, row: int) -> None:
        """Drop what only concerns rows before `row`."""
        while len(self._swaps) > 1 and self._swaps[1][0] <= row:
            del self._swaps[0]

    def runs(self, before: tuple[VersionRun, ...], start: int, count: int) -> tuple[VersionRun, ...]:
        """The run-length encoded versions of tokens drawn `before` and `count` tokens from row `start` on."""
        runs = [[run.version, run.count] for run in before]
        for index, (row, version) in enumerate(self._swaps):
            following = self._swaps[index + 1][0] if index + 1 < len(self._swaps) else start + count
            drawn = min(following, start + count) - max(row, start)
            if drawn <= 0:
                continue
            if runs and runs[-1][0] == version:
                runs[-1][1] += drawn
            else:
                runs.append([version, drawn])
        return tuple(VersionRun(version, drawn) for version, drawn in runs)
