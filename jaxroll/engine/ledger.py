"""Host record of the slots: request, progress and sampled tokens of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxroll import supports
from jaxroll.engine import requests
from jaxroll.engine.requests import Add, Result
from jaxroll.protocols import Completion
from jaxroll.records import Version, VersionRun, versions_after
from jaxroll.supports import Supports

NOTHING = supports.whole(1)  # the support of one token that was not truncated


@dataclass(frozen=True, eq=False)
class Partial:
    """The T tokens of a request that left its slot before its end, and its start time."""

    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    supports: Supports
    versions: tuple[VersionRun, ...]
    start_s: float

    def completion(self, finish: str, tokens: int | None = None) -> Completion:
        """These tokens, or the first `tokens` of them, as a completion."""
        kept = len(self.tokens) if tokens is None else tokens
        packed = supports.encoded(self.supports.first(kept), self.tokens[:kept])
        return Completion(self.tokens[:kept], self.logprobs[:kept], _first(self.versions, kept), finish, packed)


@dataclass(eq=False, slots=True)
class _Running:
    """A request in a slot. Its first tokens are those of `before` (sampled earlier), or the one sampled at its start.

    The tokens after these are in the history from `start_row` on.
    """

    add: Add
    start_s: float
    start_row: int
    first_version: Version
    before: Partial | None = None
    count: int = 0
    first_token: int = 0
    first_logprob: float = 0.0
    first_support: Supports = NOTHING


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a request, and the number of its tokens to deliver (None: all)."""

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
    """The requests in S slots and the last `rows` decode rows (at least the longest completion plus a dispatch)."""

    def __init__(self, slots: int, rows: int) -> None:
        self._running: list[_Running | None] = [None] * slots
        self._history, self._swaps = History(rows, slots), WeightSwaps()

    def swap_version(self, version: Version) -> None:
        """Attribute tokens from now on to `version`."""
        row = self._history.rows
        self._swaps.forget_before(min((r.start_row for r in self._running if r is not None), default=row))
        self._swaps.add(row, version)

    def start(self, slot: int, add: Add, start_s: float, version: Version, before: Partial | None = None) -> None:
        """Record that a request starts in `slot` at `version`, or continues there after the tokens `before`."""
        running = _Running(add, start_s, self._history.rows, version, before)
        if before is not None:
            running.count, running.start_s = len(before.tokens), before.start_s
        self._running[slot] = running

    def account(self, report: requests.Report) -> Progress:
        """Record a dispatch's report."""
        counts, status = report.counts.tolist(), report.status.tolist()
        decoded, begun = 0, []
        ended: dict[int, Ended] = {}
        for slot, running in enumerate(self._running):
            if running is None:
                continue
            if not running.count:
                running.first_token = int(report.first_tokens[slot])
                running.first_logprob = float(report.first_logprobs[slot])
                running.first_support = supports.of_rows(report.first_supports[slot : slot + 1])
                running.count = 1
                begun.append(running.add)
            decoded += counts[slot] - running.count
            running.count = counts[slot]
            if status[slot] != requests.RUNNING:
                ended[slot] = Ended(requests.FINISH[status[slot]])
        self._history.add(report.tokens, report.logprobs, report.supports)
        return Progress(decoded, tuple(begun), ended)

    def take(self, slot: int, ended: Ended, end_s: float) -> tuple[Add, Result]:
        """Remove the request in `slot` and return it with its result."""
        add, drawn = self.interrupt(slot)
        return add, Result(drawn.completion(ended.finish, ended.tokens), drawn.start_s, end_s)

    def tokens(self, slot: int) -> np.ndarray:
        """int32 [T]: the tokens that the request in `slot` has sampled so far. LookupError for an empty slot."""
        running = self._running[slot]
        if running is None:
            raise LookupError(f"slot {slot} is empty")
        before = [running.first_token] if running.before is None else running.before.tokens
        later, _ = self._history.column(slot, running.start_row, running.count - len(before))
        return np.concatenate([np.asarray(before, np.int32), later])

    def since(self, slot: int, sent: int) -> Completion:
        """The tokens after the first `sent` of the request in `slot`; LookupError without one."""
        running = self._running[slot]
        if running is None:
            raise LookupError(f"slot {slot} is empty")
        before = running.before or _first_of(running)
        earlier = len(before.tokens)
        start, count = running.start_row + max(sent - earlier, 0), running.count - max(sent, earlier)
        tokens, logprobs = self._history.column(slot, start, count)
        versions = self._swaps.runs(versions_after(before.versions, sent), start, count)
        support = self._history.supports(slot, start, count)
        if sent < earlier:
            tokens = np.concatenate([before.tokens[sent:], tokens])
            logprobs = np.concatenate([before.logprobs[sent:], logprobs])
            support = supports.joined([before.supports.part(sent, earlier), support])
        return Completion(tokens, logprobs, versions, "", supports.encoded(support, tokens))

    def forget(self, slot: int) -> None:
        """Remove the request in `slot` without a result."""
        self._running[slot] = None

    def interrupt(self, slot: int) -> tuple[Add, Partial]:
        """Remove the request in `slot` and return it with its tokens so far. LookupError for an empty slot."""
        running = self._running[slot]
        if running is None:
            raise LookupError(f"slot {slot} is empty")
        self._running[slot] = None
        before = running.before or _first_of(running)
        later = running.count - len(before.tokens)
        tokens, logprobs = self._history.column(slot, running.start_row, later)
        support = self._history.supports(slot, running.start_row, later)
        versions = self._swaps.runs(before.versions, running.start_row, later)
        return running.add, Partial(
            np.concatenate([before.tokens, tokens]),
            np.concatenate([before.logprobs, logprobs]),
            supports.joined([before.supports, support]),
            versions,
            running.start_s,
        )


def _first_of(running: _Running) -> Partial:
    """The token that was sampled at the start of `running`."""
    return Partial(
        np.array([running.first_token], np.int32),
        np.array([running.first_logprob], np.float32),
        running.first_support,
        (VersionRun(running.first_version, 1),),
        running.start_s,
    )


def _first(versions: tuple[VersionRun, ...], tokens: int) -> tuple[VersionRun, ...]:
    """The versions of the first `tokens` tokens."""
    kept, left = [], tokens
    for run in versions:
        if left > 0:
            kept.append(VersionRun(run.version, min(run.count, left)))
        left -= run.count
    return tuple(kept)


# --- history: a ring buffer of decode rows, from which the tokens of a finished request are read as a column
#
# A running slot samples in every decode step, so a request's tokens after its first are in one column in consecutive
# rows. Recording a dispatch is one copy, for any number of slots; there is no work per token.


class History:
    """The last `capacity` rows of S slots. `rows` counts all rows ever added."""

    def __init__(self, capacity: int, slots: int) -> None:
        self._tokens = np.zeros((capacity, slots), np.int32)
        self._logprobs = np.zeros((capacity, slots), np.float32)
        # The ids of each row, and where those of each slot begin in them; empty in an engine without supports.
        self._supports: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.rows = 0

    def add(self, tokens: np.ndarray, logprobs: np.ndarray, support: np.ndarray | None = None) -> None:
        """Append the rows of one dispatch (each [steps, S]), with their supports [steps, S, K] if K > 0."""
        for row, ids in enumerate(() if support is None or not support.shape[2] else support, start=self.rows):
            held = supports.of_rows(ids)
            self._supports[row % len(self._tokens)] = held.ids, np.concatenate([[0], np.cumsum(held.sizes)])
        capacity, steps = len(self._tokens), len(tokens)
        at = self.rows % capacity
        head = min(steps, capacity - at)
        self._tokens[at : at + head], self._logprobs[at : at + head] = tokens[:head], logprobs[:head]
        if head < steps:
            self._tokens[: steps - head], self._logprobs[: steps - head] = tokens[head:], logprobs[head:]
        self.rows += steps

    def column(self, slot: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 [count], float32 [count]: tokens and log-probs of `slot` in `count` rows from row `start` on."""
        rows = self._held(start, count)
        return self._tokens[rows, slot], self._logprobs[rows, slot]

    def supports(self, slot: int, start: int, count: int) -> Supports:
        """The supports of the tokens of `column`."""
        rows = self._held(start, count)
        if not self._supports or not count:
            return supports.whole(count)
        parts = [ids[starts[slot] : starts[slot + 1]] for ids, starts in (self._supports[row] for row in rows.tolist())]
        return Supports(np.array([len(part) for part in parts], np.int64), np.concatenate(parts))

    def _held(self, start: int, count: int) -> np.ndarray:
        """The places of `count` rows from row `start` on."""
        if count and not self.rows - len(self._tokens) <= start <= self.rows - count:
            raise IndexError(f"rows {start}..{start + count - 1} of {self.rows} are not held")
        return np.arange(start, start + count) % len(self._tokens)


class WeightSwaps:
    """The version of the weights, by row of the history."""

    def __init__(self) -> None:
        self._swaps: list[tuple[int, Version]] = []

    def add(self, row: int, version: Version) -> None:
        """Record that tokens are sampled at `version` from `row` on."""
        self._swaps.append((row, version))

    def forget_before(self, row: int) -> None:
        """Drop versions that apply only to rows before `row`."""
        while len(self._swaps) > 1 and self._swaps[1][0] <= row:
            del self._swaps[0]

    def runs(self, before: tuple[VersionRun, ...], start: int, count: int) -> tuple[VersionRun, ...]:
        """The run-length encoded versions of earlier tokens (`before`) and `count` tokens from row `start` on."""
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
