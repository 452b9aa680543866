"""The arms of one race: processes that start at their first run, and the trials and races that benchmarks share."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks.lib.child import Child
from benchmarks.lib.report import Runs, ratio, spread

Run = Callable[[str, int], dict[str, Any]]  # arm and threads → one run, with tokens_per_s and cpu_s


class Arms:
    """Children by arm and number of threads; they end with the block."""

    def __init__(self, start: Callable[[str, int], Child]) -> None:
        self._start, self._started, self._stack = start, {}, ExitStack()

    def __enter__(self) -> Arms:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, arm: str, threads: int) -> Child:
        """The process of `arm` with `threads`, started now if there is none yet."""
        if (arm, threads) not in self._started:
            child = self._start(arm, threads)
            self._stack.callback(child.close)
            self._started[arm, threads] = child
        return self._started[arm, threads]


def best_threads(case: str, arm: str, given: dict[str, int], runs: Runs, run: Run) -> int:
    """The threads `given` for `arm`, or the number up to the cores with which three of its runs were fastest."""
    if arm in given:
        return given[arm]
    tried = {}
    for threads in range(1, min(2, os.cpu_count() or 1) + 1):
        name = f"{case} {arm}, trial with {threads} threads"
        trials = [runs.run(name, number, lambda t=threads: run(arm, t)) for number in range(3)]
        tried[threads] = statistics.median(trial["tokens_per_s"] for trial in trials)
    return max(tried, key=lambda threads: tried[threads])


def raced(case: str, best: dict[str, int], runs: Runs, run: Run, rounds: int) -> tuple[dict[str, Any], dict[str, list]]:
    """Tokens per second of ours (first of `best`) and its peer, their ratio with its interval; and the runs by arm."""
    ours, peer = best
    named = {f"{case} {arm}": lambda arm=arm: run(arm, best[arm]) for arm in best}
    found = runs.alternate(named, rounds)
    of = {arm: found[f"{case} {arm}"] for arm in best}
    rates = {arm: [one["tokens_per_s"] for one in of[arm]] for arm in best}
    busy = {arm: [1 / one["cpu_s"] for one in of[arm]] for arm in best}
    spreads, value = {arm: spread(values) for arm, values in rates.items()}, ratio(rates[ours], rates[peer])
    result = {
        "ours": spreads[ours]["median"],
        "peer": spreads[peer]["median"],
        "ratio": value["value"],
        "low": value["low"],
        "high": value["high"],
        "runs": rounds,
        "against": peer,
        "tokens_per_s": spreads,
        "per_cpu_second": ratio(busy[ours], busy[peer]),
    }
    return result, of
