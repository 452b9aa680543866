"""Checks of a run's records: its log (`jaxroll replay RUN`), its checkpoints (`jaxroll checkpoints RUN`)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxroll.errors import EXIT_FAILURE, DataError
from jaxroll.learner import checkpoint_files
from jaxroll.learner.checkpoint_files import Entry
from jaxroll.records import Version
from jaxroll.report.formats import UNKNOWN, Section, moment, number, show
from jaxroll.report.record import best_checkpoint
from jaxroll.run_paths import RunPaths
from jaxroll.store.log import database
from jaxroll.store.log.replay import Replayed, replay_log

CHECKED = (
    "every record is readable and follows on the one before it",
    "its groups and members exist and are where the record needs them; attempts only grow",
    "groups go from state to state only as the contract says, and none is unaccounted for",
    "claims come in order, whole, of groups that no claim took before, on one line of ancestry",
    "steps are acknowledged and made durable once, in order",
)
CHECKED_AGES = "no token older than the bound is trained, and masked tokens are counted"


def replay_main(run_dir: Path, *, as_json: bool, console: Console | None = None) -> int:
    """Print the checks and the findings; 0 if there are no findings. DataError if the file cannot be read at all."""
    with database.damage_named(run_dir, "restore the file from a copy"), database.transaction(run_dir) as db:
        found = replay_log(db)
    if as_json:
        print(json.dumps(replay_facts(found), indent=2))
    else:
        show(replay_sections(run_dir, found), console or Console())
    return EXIT_FAILURE if found.violations else 0


def replay_facts(found: Replayed) -> dict[str, Any]:
    """The findings, ready for JSON."""
    plain = {key: value for key, value in vars(found).items() if key != "violations"}
    violations = [dataclasses.asdict(violation) for violation in found.violations]
    return plain | {"records": found.records, "violations": violations}


def replay_sections(run_dir: Path, found: Replayed) -> list[Section]:
    """The findings for a person."""
    begun = "from the run's first record" if found.whole else f"from the snapshot at record {found.first - 1}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.kinds.most_common())
    tables = ", ".join(f"{number(count)} {table}" for table, count in sorted(found.tables.items()))
    largest = f"{CHECKED_AGES} (largest age {found.largest_age})"
    rows = [
        ("records", f"{number(found.records)}, {begun} to record {number(found.last)}"),
        ("kinds", kinds or "none"),
        ("snapshots", f"{found.snapshots} compared with the state at their position"),
        ("tables", f"compared at the end: {tables}" if tables else "not compared: the log itself is broken"),
    ]
    checks = [(text,) for text in (*CHECKED, largest if found.ages_checked else "ages: the log names no bound")]
    violations = [("-" if v.position is None else str(v.position), v.kind, v.why) for v in found.violations]
    verdict = f"{len(violations)} violations" if violations else "everything holds"
    return [
        Section(f"{run_dir.name}: {verdict}", (), rows),
        Section("checked at every record", (), checks),
        *([Section("violations", ("record", "in", "why"), violations)] if violations else []),
    ]


# --- `jaxroll checkpoints RUN`: the checkpoints of a live or finished run; `--verify` checks that they are intact
#
# Without sums nothing can be verified, so `--verify` calls that a problem too; of a durable one it is damage.

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
