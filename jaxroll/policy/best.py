"""The best checkpoint by a held-out metric, and the checkpoints that may be removed. Pure.

The evaluator measures a version later than the learner writes its checkpoint. Three rules make the choice sound:

1. The evaluator measures only versions of which the learner writes a checkpoint (`is_kept`).
2. A checkpoint stays while the evaluator measures its version, until its value is known.
3. The best version is the one with the highest value among those that have a checkpoint; of equal ones the earliest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxroll.records import Version

Measured = dict[Version, float]
ACCURACY = "accuracy"  # of the set of task.heldout_items


def metrics_of(sets: Iterable[str]) -> tuple[str, ...]:
    """The metrics that a run with the held-out sets `sets` has, as paths into a row of the evaluator."""
    return (ACCURACY, *(f"sets.{name}.{ACCURACY}" for name in sets))


def measured(rows: Iterable[Mapping[str, Any]], metric: str) -> Measured:
    """The values of `metric` by version, from rows of the evaluator; the last row of a version counts."""
    found: Measured = {}
    for row in rows:
        if row.get("kind") == "eval":
            value = _value(row, metric)
            if value is not None:
                found[Version(row.get("lineage") or 0, row["step"])] = value
    return found


def _value(row: Mapping[str, Any], metric: str) -> float | None:
    if metric == ACCURACY:
        return row.get(ACCURACY)
    name = metric.removeprefix("sets.").removesuffix(f".{ACCURACY}")  # a name may contain dots
    return ((row.get("sets") or {}).get(name) or {}).get(ACCURACY)


def best(values: Measured, versions: Collection[Version]) -> Version | None:
    """The version of `versions` with the highest value, of equal ones the earliest; None if none has a value."""
    candidates = sorted(version for version in versions if version in values)
    return max(candidates, key=values.__getitem__, default=None)


def is_kept(step: int, every: int, last: int) -> bool:
    """True if the learner writes a checkpoint of each version with this step: every `every` steps, and the last."""
    return step % every == 0 or step == last


def removable(
    versions: Sequence[Version], durable: Version, kept: int, spared: Collection[Version] = ()
) -> list[Version]:
    """The checkpoints to remove, so that `kept` with `durable` and the older ones are left, and those in `spared`."""
    older = sorted(version for version in versions if version < durable)
    return [version for version in older[: max(0, len(older) - (kept - 1))] if version not in spared]
