"""`jaxroll checkpoints RUN`: the checkpoints of a live or finished run; `--verify` checks that they are intact.

Without sums nothing can be verified, so `--verify` calls that a problem too; of a durable one it is damage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxroll.errors import EXIT_FAILURE, DataError
from jaxroll.learner import checkpoint_files
from jaxroll.learner.checkpoint_files import Entry
from jaxroll.records import Version
from jaxroll.report.figures.record import best_checkpoint
from jaxroll.report.formats import UNKNOWN, Section, moment, number, show
from jaxroll.run_paths import RunPaths
from jaxroll.store.log import database

UNSUMMED = "it has no sums to go by; its writer has not come so far, or was killed"
# The version that a durable record names is the one whose lineage made the step before it durable.
_DURABLE = "SELECT DISTINCT durable_lineage, step + 1 FROM claims WHERE durable_lineage IS NOT NULL"
Facts = dict[str, Any]


def main(run_dir: Path, *, verify: bool, as_json: bool, keep_best: str = "", console: Console | None = None) -> int:
    """Print one row per checkpoint, oldest first; 1 when one is damaged, or cannot be verified as asked, else 0."""
    found = facts(run_dir, verify=verify, keep_best=keep_best)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show([_section(run_dir, found)], console or Console())
    return EXIT_FAILURE if any(row["problem"] for row in found["checkpoints"]) else 0


def facts(run_dir: Path, *, verify: bool, keep_best: str = "") -> Facts:
    """Every checkpoint of the run as plain values. `durable` is None where there is no log to ask.

    `best` is the checkpoint that `learner.keep_best` keeps, None where it is empty or nothing was measured yet.
    """
    durable = _durable(run_dir)
    entries = checkpoint_files.entries(RunPaths(run_dir).checkpoints, verify=verify)
    return {
        "verified": verify,
        "best": best_checkpoint(run_dir, {"learner": {"keep_best": keep_best}}),
        "checkpoints": [_row(entry, durable, verify) for entry in entries],
    }


def _row(entry: Entry, durable: set[Version] | None, verify: bool) -> Facts:
    known = durable is not None
    # Nothing comes before step 0, so the store has nothing to release: it counts as soon as it is on the disk.
    counts = entry.summed if entry.version.step == 0 else known and entry.version in durable
    unsummed = "" if entry.summed else checkpoint_files.damage(entry.path, durable=counts) or UNSUMMED * verify
    return {
        "lineage": entry.version.lineage,
        "step": entry.version.step,
        "position": entry.position,
        "size_bytes": entry.size_bytes,
        "written_s": entry.written_s,
        "summed": entry.summed,
        "durable": counts if known else None,
        "problem": entry.problem or unsummed,
        "path": str(entry.path),
    }


def _durable(run_dir: Path) -> set[Version] | None:
    try:
        with database.damage_named(run_dir, ""), database.transaction(run_dir) as db:
            return {Version(int(lineage), int(step)) for lineage, step in db.execute(_DURABLE)}
    except DataError:
        return None  # a copy without its log is still a list of checkpoints


def _section(run_dir: Path, found: Facts) -> Section:
    rows = [
        (
            f"{row['lineage']}.{row['step']}",
            number(row["size_bytes"] / 1e6) + " MB",
            moment(row["written_s"]),
            str(row["position"]) if row["position"] >= 0 else UNKNOWN,
            {True: "yes", False: "no", None: UNKNOWN}[row["durable"]],
            _state(row, verified=found["verified"]),
        )
        for row in found["checkpoints"]
    ]
    headings = ("version", "size", "written", "log position", "durable", "files")
    note = "" if rows else "none: the run has not written one yet, or its folder was cleared"
    if best := found["best"]:
        note = f"best by {best['metric']}: {best['version']}, {number(best['value'])}"
    return Section(f"{run_dir.name}: checkpoints", headings, rows, note, frozenset({1, 3}))


def _state(row: Facts, *, verified: bool) -> str:
    if row["problem"] == UNSUMMED:
        return f"NOT VERIFIED: {UNSUMMED}"
    if row["problem"]:
        return f"DAMAGED: {row['problem']}"
    if not row["summed"]:
        return "whole by its name; its sums were not written"
    return "as written" if verified else "not read (--verify)"
