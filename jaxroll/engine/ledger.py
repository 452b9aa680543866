"""Host record of the slots: request, progress and sampled tokens of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxroll.engine import requests
from jaxroll.engine.requests import Add, Result
from jaxroll.protocols import Completion, Supports
from jaxroll.records import Version, VersionRun, versions_after

NOTHING = Supports.whole(1)  # the support of one token that was not truncated


@dataclass(frozen=True, eq=False)
class Unfinished:
    """The T tokens of a request that left its slot before its end, and its start time."""

    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    supports: Supports
    versions: tuple[VersionRun, ...]
    start_s: float

    def completion(self, finish: str, tokens: int | None = None) -> Completion:
        """These tokens, or the first `tokens` of them, as a completion."""
        kept = len(self.tokens) if tokens is None else tokens
        packed = self.supports.first(kept).encoded(self.tokens[:kept])
        return Completion(self.tokens[:kept], self.logprobs[:kept], _first(self.versions, kept), finish, packed)


@dataclass(eq=False, slots=True)
class _Running:
    """A request in a slot. Its first tokens are those of `before` (sampled earlier), or the one sampled at its start.

    The tokens after these are in the slot's history from `start_row` on. It takes part in the dispatches from number
    `first_dispatch` on.
    """

    add: Add
    start_s: float
    start_row: int
    first_dispatch: int
    first_version: Version
    before: Unfinished | None = None
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
class Filled:
    """Changes of cache and slots by one step."""

    prefills: int = 0
    rows: int = 0
    tokens: int = 0
    started: int = 0


@dataclass(frozen=True)
class DispatchResult:
    """The result of one dispatch by slot: decoded tokens, first tokens, and ended requests.

    With speculative decoding, `extra` of the decoded tokens are those beyond one per step and slot, and steps verified
    `drafted` tokens.
    """

    decoded: int
    begun: tuple[Add, ...]
    ended: dict[int, Ended]
    extra: int = 0
    drafted: int = 0

    @property
    def firsts(self) -> int:
        """Tokens that were sampled by inserts."""
        return len(self.begun)


class Ledger:
    """The requests in S slots and the last `rows` tokens of each (at least the longest completion plus a dispatch).

    Reports arrive in the order of their dispatches. A request that starts while others are in flight (`note_dispatch`)
    has no part in their reports.
    """

    def __init__(self, slots: int, rows: int) -> None:
        self._dispatched = self._accounted = 0
        self._running: list[_Running | None] = [None] * slots
        self._history, self._swaps = History(rows, slots), [WeightSwaps() for _ in range(slots)]

    def swap_version(self, version: Version) -> None:
        """Attribute tokens from now on to `version`."""
        for running, swaps, row in zip(self._running, self._swaps, self._history.rows.tolist(), strict=True):
            swaps.forget_before(row if running is None else running.start_row)
            swaps.add(row, version)

    def start(self, slot: int, add: Add, start_s: float, version: Version, before: Unfinished | None = None) -> None:
        """Record that a request starts in `slot` at `version`, or continues there after the tokens `before`."""
        first = 1 + max(self._dispatched, self._accounted)
        running = _Running(add, start_s, int(self._history.rows[slot]), first, version, before)
        if before is not None:
            running.count, running.start_s = len(before.tokens), before.start_s
        self._running[slot] = running

    def note_dispatch(self) -> None:
        """Record that a dispatch is in flight."""
        self._dispatched += 1

    def takes_part(self, slot: int) -> bool:
        """True if the request in `slot` was there when the last dispatch began that is accounted for."""
        running = self._running[slot]
        return running is not None and running.first_dispatch <= self._accounted

    def account(self, report: requests.Report) -> DispatchResult:
        """Record the report of the oldest dispatch in flight."""
        self._accounted += 1
        counts, status = report.counts.tolist(), report.status.tolist()
        begun: list[Add] = []
        ended: dict[int, Ended] = {}
        new = np.zeros(len(counts), np.int64)  # tokens of each slot in this dispatch
        for slot, running in enumerate(self._running):
            if running is None or running.first_dispatch > self._accounted:
                continue
            if running.first_dispatch == self._accounted:
                running.start_row = int(self._history.rows[slot])
            if not running.count:
                running.first_token = int(report.first_tokens[slot])
                running.first_logprob = float(report.first_logprobs[slot])
                running.first_support = Supports.of_rows(report.first_supports[slot : slot + 1])
                running.count = 1
                begun.append(running.add)
            new[slot] = counts[slot] - running.count
            running.count = counts[slot]
            if status[slot] != requests.RUNNING:
                ended[slot] = Ended(requests.FINISH[status[slot]])
        decoded = int(new.sum())
        if report.ran is None or report.drafted is None:
            self._history.add(report.tokens, report.logprobs, report.supports)
            return DispatchResult(decoded, tuple(begun), ended)
        self._history.add(report.tokens, report.logprobs, report.supports, new)
        return DispatchResult(decoded, tuple(begun), ended, decoded - int(report.ran.sum()), int(report.drafted.sum()))

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
        versions = self._swaps[slot].runs(versions_after(before.versions, sent), start, count)
        support = self._history.supports(slot, start, count)
        if sent < earlier:
            tokens = np.concatenate([before.tokens[sent:], tokens])
            logprobs = np.concatenate([before.logprobs[sent:], logprobs])
            support = Supports.joined([before.supports.part(sent, earlier), support])
        return Completion(tokens, logprobs, versions, "", support.encoded(tokens))

    def forget(self, slot: int) -> None:
        """Remove the request in `slot` without a result."""
        self._running[slot] = None

    def interrupt(self, slot: int) -> tuple[Add, Unfinished]:
        """Remove the request in `slot` and return it with its tokens so far. LookupError for an empty slot."""
        running = self._running[slot]
        if running is None:
            raise LookupError(f"slot {slot} is empty")
        self._running[slot] = None
        before = running.before or _first_of(running)
        later = running.count - len(before.tokens)
        tokens, logprobs = self._history.column(slot, running.start_row, later)
        support = self._history.supports(slot, running.start_row, later)
        versions = self._swaps[slot].runs(before.versions, running.start_row, later)
        return running.add, Unfinished(
            np.concatenate([before.tokens, tokens]),
            np.concatenate([before.logprobs, logprobs]),
            Supports.joined([before.supports, support]),
            versions,
            running.start_s,
        )


def _first_of(running: _Running) -> Unfinished:
    """The token that was sampled at the start of `running`."""
    return Unfinished(
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


# --- history: a ring buffer of tokens per slot
#
# Without speculative decoding every dispatch adds equally many rows to all slots, valid or not, so recording it is one
# copy for any number of slots; there is no work per token.


@dataclass(frozen=True, eq=False, slots=True)
class _SupportsOfRow:
    """The ids of the supports of one row of a report, and where those of each slot begin in them."""

    ids: np.ndarray
    starts: np.ndarray

    def of_slot(self, slot: int) -> np.ndarray:
        return self.ids[self.starts[slot] : self.starts[slot + 1]]


class History:
    """The last `capacity` rows of each of S slots. `rows` (int64 [S]) counts all rows ever added to each."""

    def __init__(self, capacity: int, slots: int) -> None:
        self._tokens = np.zeros((capacity, slots), np.int32)
        self._logprobs = np.zeros((capacity, slots), np.float32)
        self._supports: np.ndarray | None = None  # objects like the tokens; None in an engine without supports
        self.rows = np.zeros(slots, np.int64)

    def add(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        support: np.ndarray | None = None,
        counts: np.ndarray | None = None,
    ) -> None:
        """Append the rows of one dispatch (each [rows, S]), with their supports [rows, S, K] if K > 0.

        With `counts` (int64 [S]) only so many of them are appended to each slot; always pass it, or never.
        """
        capacity, slots = self._tokens.shape
        new = np.full(slots, len(tokens)) if counts is None else counts
        if support is not None and support.shape[2]:
            self._add_supports(support, new)
        if counts is None:
            at = int(self.rows[0] % capacity)
            head = min(len(tokens), capacity - at)
            for ring, rows in ((self._tokens, tokens), (self._logprobs, logprobs)):
                ring[at : at + head], ring[: len(rows) - head] = rows[:head], rows[head:]
        else:
            row, slot = np.nonzero(np.arange(len(tokens))[:, None] < new)
            at = (self.rows[slot] + row) % capacity
            self._tokens[at, slot], self._logprobs[at, slot] = tokens[row, slot], logprobs[row, slot]
        self.rows += new

    def _add_supports(self, support: np.ndarray, new: np.ndarray) -> None:
        if self._supports is None:
            self._supports = np.full(self._tokens.shape, None, object)
        for row, ids in enumerate(support[: new.max(initial=0)]):
            held, slot = Supports.of_rows(ids), np.flatnonzero(row < new)
            at = (self.rows[slot] + row) % len(self._tokens)
            self._supports[at, slot] = _SupportsOfRow(held.ids, np.concatenate([[0], np.cumsum(held.sizes)]))

    def column(self, slot: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 [count], float32 [count]: tokens and log-probs of `slot` in `count` rows from row `start` on."""
        rows = self._held(slot, start, count)
        return self._tokens[rows, slot], self._logprobs[rows, slot]

    def supports(self, slot: int, start: int, count: int) -> Supports:
        """The supports of the tokens of `column`."""
        rows = self._held(slot, start, count)
        if self._supports is None or not count:
            return Supports.whole(count)
        parts = [row.of_slot(slot) for row in self._supports[rows, slot]]
        return Supports(np.array([len(part) for part in parts], np.int64), np.concatenate(parts))

    def _held(self, slot: int, start: int, count: int) -> np.ndarray:
        """The places in the ring of `count` rows of `slot` from row `start` on."""
        capacity, rows = len(self._tokens), int(self.rows[slot])
        if count and not rows - capacity <= start <= rows - count:
            raise IndexError(f"rows {start}..{start + count - 1} of {rows} are not held")
        return np.arange(start, start + count) % capacity


class WeightSwaps:
    """The version of the weights, by row of a slot's history."""

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
