"""`jaxroll replay RUN`: replays the log, prints the checks, and exits with 1 if one fails."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxroll.errors import EXIT_FAILURE
from jaxroll.report.formats import Section, number, show
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


def main(run_dir: Path, *, as_json: bool, console: Console | None = None) -> int:
    """Print the checks and the findings; 0 if there are no findings. DataError if the file cannot be read at all."""
    with database.damage_named(run_dir, "restore the file from a copy"), database.transaction(run_dir) as db:
        found = replay_log(db)
    if as_json:
        print(json.dumps(facts(found), indent=2))
    else:
        show(sections(run_dir, found), console or Console())
    return EXIT_FAILURE if found.violations else 0


def facts(found: Replayed) -> dict[str, Any]:
    """The findings, ready for JSON."""
    plain = {key: value for key, value in vars(found).items() if key != "violations"}
    violations = [dataclasses.asdict(violation) for violation in found.violations]
    return plain | {"records": found.records, "violations": violations}


def sections(run_dir: Path, found: Replayed) -> list[Section]:
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
