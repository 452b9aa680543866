"""What was sampled lately: a ring of decode rows from which a finished request takes its column.

A running slot samples in every decode step, so a request's tokens after its first stand in one column in consecutive
rows. Keeping rows costs one copy a dispatch, however many slots there are; nothing is done per token.
"""

from __future__ import annotations

import numpy as np

from jaxroll.records import Version, VersionRun


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


class Flips:
    """Which version was in force in which row."""

    def __init__(self) -> None:
        self._flips: list[tuple[int, Version]] = []

    def add(self, row: int, version: Version) -> None:
        """From `row` on, tokens are drawn at `version`."""
        self._flips.append((row, version))

    def forget_before(self, row: int) -> None:
        """Drop what only concerns rows before `row`."""
        while len(self._flips) > 1 and self._flips[1][0] <= row:
            del self._flips[0]

    def runs(self, before: tuple[VersionRun, ...], start: int, count: int) -> tuple[VersionRun, ...]:
        """The run-length encoded versions of tokens drawn `before` and `count` tokens from row `start` on."""
        runs = [[run.version, run.count] for run in before]
        for index, (row, version) in enumerate(self._flips):
            following = self._flips[index + 1][0] if index + 1 < len(self._flips) else start + count
            drawn = min(following, start + count) - max(row, start)
            if drawn <= 0:
                continue
            if runs and runs[-1][0] == version:
                runs[-1][1] += drawn
            else:
                runs.append([version, drawn])
        return tuple(VersionRun(version, drawn) for version, drawn in runs)
