"""How far the samplers' weights are behind the learner's, and what publishing costs."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxroll.report.activity import Lane
from jaxroll.report.formats import duration
from jaxroll.report.summary import numbers

Row = dict[str, Any]


def lags(stats: Sequence[Row], published: Sequence[tuple[float, str]]) -> list[int]:
    """Of each report of a sampler: the newest published step less the step of its weights.

    Reports from before the first weights, and of a lineage that ended, are left out.
    """
    times = [t for t, _ in published]
    found = []
    for row in stats:
        place = bisect_right(times, row["t"]) - 1
        held = _version(row.get("version"))
        newest = _version(published[place][1]) if place >= 0 else None
        if held and newest and held[0] == newest[0] and held[1] <= newest[1]:
            found.append(newest[1] - held[1])
    return found


def by_lag(found: Sequence[int]) -> dict[int, float]:
    """Share of the reports by lag."""
    counts = Counter(found)
    return {lag: counts[lag] / len(found) for lag in sorted(counts)}


def words(steps: Sequence[Row], lanes: Sequence[Lane]) -> str:
    """How long publishing takes (beside the learner's next step), fetching and flipping; medians of what is said."""
    times = {"Publishing": [row for row in numbers(steps, "publish_s") if row > 0]}
    for kind, name in (("fetch", "fetching"), ("flip", "flipping")):
        times[name] = [end - start for lane in lanes for start, end in lane.spans.get(kind, ())]
    parts = [f"{name} takes {duration(sorted(found)[len(found) // 2])}" for name, found in times.items() if found]
    return ", ".join(parts) + (" (median)." if parts else "")


def _version(text: object) -> tuple[int, int] | None:
    lineage, _, step = str(text).partition(".")
    return (int(lineage), int(step)) if lineage.isdigit() and step.isdigit() else None
