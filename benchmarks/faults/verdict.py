"""Invariants of a run under attack, from its folder, the journal of acknowledgements, and replay.

`facts` collects; `violations` judges, and is a pure function of the facts. `tracebacks` reads the logs of roles.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.run import Run
from jaxroll import wire
from jaxroll.control import run_dir as run_dirs
from jaxroll.report.record import checks
from jaxroll.store.core import events as ev

Row = dict[str, Any]
Key = tuple[int, int, int]  # group, member, attempt
ENDED = ("TRIMMED", "EXPIRED", "DEAD")
LOST = "LOST"
SAME = (
    "groups",
    "loss",
    "grad_norm",
    "tokens_trained",
    "tokens_computed",
    "reward_mean",
)  # equal whenever a step is trained


def facts(run: Run, steps: int) -> Row:
    """All facts for the verdict. `steps` is the number of steps that the run had to train."""
    journal = read_journal(run.journal)
    claims = [row for row in journal if row["kind"] == "claim"]
    report, report_error = run.asked("report", str(run.run_dir), "--json")
    replayed, replay_error = run.asked("replay", str(run.run_dir), "--json")
    _, verify_error = run.asked("checkpoints", str(run.run_dir), "--verify", "--json")
    with contextlib.closing(sqlite3.connect(run.run_dir / "store.db", timeout=30.0)) as db:
        puts, lost = put_outcomes(db, journal)
        found = {
            "steps": db.execute("SELECT COUNT(*) FROM claims WHERE durable_lineage IS NOT NULL").fetchone()[0],
            "conservation": conservation(db),
            "unexplained": [gid for (gid,) in db.execute(_UNEXPLAINED)],
            "puts": puts,
            "lost": [*lost, *lost_checkpoints(db, journal)],
            "issued": [index for (index,) in db.execute(_ISSUED)],
            "rewinds": db.execute("SELECT COUNT(*) FROM lineages").fetchone()[0] - 1,
            "dead": db.execute("SELECT COUNT(*) FROM groups WHERE state = 'DEAD'").fetchone()[0],
        }
    issued = found.pop("issued")
    ages = [(report or {}).get("age_max"), (replayed or {}).get("largest_age")]
    config = json.loads((run.run_dir / "run.json").read_text())["config"]
    return {
        **found,
        "steps_wanted": steps,
        "alpha": config["schedule"]["alpha"],
        "trained_twice": trained_twice(claims),
        "claims_changed": changed_claims(claims),
        "steps_changed": changed_steps(run.rows),
        "steps_trained_again": len({row["step"] for row in _steps(run.rows)} & _repeated(run.rows)),
        "age_max": max((age for age in ages if age is not None), default=0),
        "replay_clean": not replay_error and replayed is not None and not replayed["violations"],
        "prompts_issued": len(issued),
        "prompts_out_of_order": out_of_order(issued, run.run_dir),
        "acknowledged_puts": len({tuple(r["key"]) for r in journal if r["kind"] == "put" and _acknowledged(r)}),
        "errors": [error for error in (report_error, replay_error, verify_error) if error],
        "promises": [] if report is None else violated_invariants(report, config),
    }


_DURABLE = "SELECT group_id FROM claim_groups JOIN claims USING (lineage, step) WHERE durable_lineage IS NOT NULL"
_ENDINGS = "SELECT group_id, body FROM log WHERE kind IN ('expired', 'died')"
_UNEXPLAINED = "SELECT id FROM groups WHERE state IN ('EXPIRED', 'DEAD') AND reason = ''"
_ISSUED = "SELECT prompt_index FROM groups WHERE reissue_of IS NULL ORDER BY id"


def violations(found: Mapping[str, Any]) -> list[str]:
    """The violated invariants as text; empty if all hold."""
    wrong: list[str] = []

    def must(holds: bool, text: str) -> None:
        if not holds:
            wrong.append(text)

    must(found["steps"] == found["steps_wanted"], f"{found['steps']} of {found['steps_wanted']} steps are durable")
    must(found["conservation"] == 0, f"{found['conservation']} groups are unaccounted for")
    must(not found["unexplained"], f"groups ended without a reason: {found['unexplained'][:5]}")
    must(not found["lost"], f"{len(found['lost'])} acknowledged things are lost: {found['lost'][:3]}")
    must(not found["trained_twice"], f"groups in two durable steps: {found['trained_twice'][:5]}")
    must(not found["claims_changed"], f"steps whose claim changed: {found['claims_changed'][:5]}")
    must(not found["steps_changed"], f"steps that were not the same when trained again: {found['steps_changed'][:3]}")
    bound = math.ceil(found["alpha"])
    must(found["age_max"] <= bound, f"a token of age {found['age_max']} was trained, and α is {found['alpha']}")
    must(found["replay_clean"], "`jaxroll replay` finds violations")
    must(
        found["prompts_out_of_order"] is None,
        f"prompts differ from an undisturbed run: {found['prompts_out_of_order']}",
    )
    return [*wrong, *found["errors"], *(f"the report says NO: {text}" for text in found["promises"])]


_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_IN_GROUP = re.compile(r"^ *[|+] ")  # before the lines of a group of exceptions
FIRST = 3  # errors by log
# By the beginning of a fault's name: the errors of roles that it explains.
EXPLAINED = {
    "env_": r"the environment was ordered to|KeyboardInterrupt|CancelledError|SystemExit|loop is already running",
    "disk_full": r"No space left|ENOSPC|disk is full|disk I/O error|database or disk",
    "weights_full": r"No space left|ENOSPC|RESOURCE_EXHAUSTED",
    "cache_full": r"No space left|ENOSPC",
    "read_only": r"Read-only file system|EROFS|readonly database|unable to open database",
    "few_descriptors": r"Too many open files|EMFILE|unable to open database",
    "little_memory": r"MemoryError|bad_alloc|[Oo]ut of memory|Cannot allocate memory",
    "no_memory": r"MemoryError|bad_alloc|[Oo]ut of memory|Cannot allocate memory",
    "no_new_tasks": r"can't start new thread|Resource temporarily unavailable",
    "tls_": r"certificate|CERTIFICATE|SSL|[Hh]andshake",
}
_ALWAYS = r"the environment raises now and then"


def tracebacks(logs: Path, faults: Collection[str]) -> Row:
    """By log in the folder: the `number` of tracebacks that none of the `faults` explains, and its `first` errors."""
    found: Row = {}
    for log in sorted(logs.glob("*.log")):
        errors = unexplained_errors(log.read_text(errors="replace"), faults)
        if errors:
            found[log.stem] = {"number": len(errors), "first": list(dict.fromkeys(errors))[:FIRST]}
    return found


def unexplained_errors(text: str, faults: Collection[str]) -> list[str]:
    """The last error of each traceback in a log, without those of which a fault explains any error of the chain."""
    patterns = [pattern for start, pattern in EXPLAINED.items() if any(name.startswith(start) for name in faults)]
    explained = re.compile("|".join([_ALWAYS, *patterns]))
    chains: list[list[str]] = []
    inside = chained = False
    for line in text.splitlines():
        content = _IN_GROUP.sub("", line)
        if content.endswith(_TRACEBACK):
            if not (chains and (chained or line.lstrip().startswith("|"))):  # the next of a chain, or inside a group
                chains.append([])
            inside, chained = True, False
        elif inside and content[:1].strip():
            chains[-1].append(content[:200])
            inside = False
        elif content.startswith(_CHAINED):
            chained = True
        elif chains and chains[-1] and content.startswith("\tdetails = "):  # of an error of gRPC
            chains[-1][-1] += f" {content.strip()[:400]}"
    return [errors[-1] for errors in chains if errors and not any(map(explained.search, errors))]


def read_journal(folder: Path) -> list[Row]:
    """The store's acknowledgements, process by process, without a torn last line."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def conservation(db: sqlite3.Connection) -> int:
    """The number of issued groups minus those in the table; ids count from 0."""
    issued, there = db.execute("SELECT COALESCE(MAX(id) + 1, 0), COUNT(*) FROM groups").fetchone()
    return issued - there


def put_outcomes(db: sqlite3.Connection, journal: Sequence[Row]) -> tuple[Counter[str], list[str]]:
    """The number of acknowledged members by outcome, and the lost ones as text.

    A member was `trained` if the learner received its bytes in the claim of a durable step; it is `kept` if its group
    is open or claimed and its bytes are on disk; it `ended` with its group, for the reason that the log states (that of
    the table where old parts of the log are deleted). Everything else is lost.
    """
    stored = {
        (g, m, a): digest for g, m, a, digest in db.execute("SELECT group_id, member, attempt, digest FROM members")
    }
    groups = {gid: (state, reason) for gid, state, reason in db.execute("SELECT id, state, reason FROM groups")}
    alive = f"SELECT id FROM groups WHERE state NOT IN {ENDED}"
    rows = db.execute(f"SELECT group_id, member, body FROM payloads WHERE group_id IN ({alive})")
    bodies = {(group, member): wire.digest(body) for group, member, body in rows}
    durable, received = {gid for (gid,) in db.execute(_DURABLE)}, received_members(journal)
    (oldest,) = db.execute("SELECT COALESCE(MIN(position), 1) FROM log").fetchone()
    endings = {gid: wire.decode(body, ev.Event).reason for gid, body in db.execute(_ENDINGS)}  # type: ignore[union-attr]

    def outcome(key: Key, digest: str) -> str:
        """The outcome of a member; that of a lost one begins with LOST."""
        state, reason = groups.get(key[0], ("no such group", ""))
        if stored.get(key) != digest:
            return f"{LOST}: not in the table ({state})"
        if state in ("EXPIRED", "DEAD"):
            cause = endings.get(key[0], reason if oldest > 1 else "")
            if not cause or cause != reason:
                return f"{LOST}: its group is {state} for the reason {reason!r}, in the log {cause!r}"
            return f"ended {state}: {cause}" if state == "EXPIRED" else f"ended {state}"
        if state not in ENDED:
            return "kept" if bodies.get(key[:2]) == digest else f"{LOST}: its bytes are missing, its group is {state}"
        if key[0] in durable and digest in received[key]:
            return "trained"
        return f"{LOST}: its group is {state}, and the learner did not receive it for a durable step"

    put: dict[Key, str] = {
        tuple(row["key"]): row["digest"] for row in journal if row["kind"] == "put" and _acknowledged(row)
    }
    outcomes = {key: outcome(key, digest) for key, digest in put.items()}
    lost = [f"member {key}{text.removeprefix(LOST)}" for key, text in outcomes.items() if text.startswith(LOST)]
    return Counter(text for text in outcomes.values() if not text.startswith(LOST)), lost


def lost_puts(db: sqlite3.Connection, journal: Sequence[Row]) -> list[str]:
    """The acknowledged members that are lost, as text: see `put_outcomes`."""
    return put_outcomes(db, journal)[1]


def received_members(journal: Iterable[Row]) -> defaultdict[Key, set[str]]:
    """The digests of each member in the learner's claims, as it was before stale tokens were masked."""
    found: defaultdict[Key, set[str]] = defaultdict(set)
    for row in journal:
        if row["kind"] == "claim":
            for group, members in row["groups"]:
                for member, attempt, *digests in members:
                    found[group, member, attempt].add(digests[-1])
    return found


def _acknowledged(row: Row) -> bool:
    return row["finished"] and row["answer"] == "OK"


def lost_checkpoints(db: sqlite3.Connection, journal: Iterable[Row]) -> list[str]:
    """Versions that were acknowledged as durable and are not on the line of ancestry of the run's weights."""
    line = dict(db.execute("SELECT lineage, upto FROM line"))
    durable = {tuple(row["version"]) for row in journal if row["kind"] == "durable"}
    return [f"version {lineage}.{step}" for lineage, step in sorted(durable) if step > line.get(lineage, -1)]


def trained_twice(claims: Iterable[Row]) -> list[int]:
    """Groups that were claimed for more than one step."""
    steps: dict[int, set[int]] = defaultdict(set)
    for row in claims:
        for group, _ in row["groups"]:
            steps[group].add(row["step"])
    return sorted(group for group, found in steps.items() if len(found) > 1)


def changed_claims(claims: Iterable[Row]) -> list[int]:
    """Steps whose claim was handed out more than once, and not with the same groups, members and bytes."""
    found: dict[int, set[str]] = defaultdict(set)
    for row in claims:
        found[row["step"]].add(json.dumps(row["groups"]))
    return sorted(step for step, texts in found.items() if len(texts) > 1)


def changed_steps(rows: Iterable[Row]) -> list[int]:
    """Steps that were trained more than once, and not with the same result to the last bit."""
    lives: dict[int, set[str]] = defaultdict(set)
    for row in _steps(rows):
        lives[row["step"]].add(json.dumps([row.get(key) for key in SAME]))
    return sorted(step for step, texts in lives.items() if len(texts) > 1)


def _steps(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.get("kind") == "step" and row.get("step") is not None]


def _repeated(rows: Iterable[Row]) -> set[int]:
    return {step for step, times in Counter(row["step"] for row in _steps(rows)).items() if times > 1}


def out_of_order(issued: Sequence[int], run_dir: Path) -> str | None:
    """The first difference between the run's prompts and the order of its dataset; None if there is none."""
    from jaxroll.data.tasks import PromptPipeline

    pipeline = PromptPipeline(run_dirs.load_config(run_dir))
    return first_difference(issued, [next(pipeline).index for _ in issued])


def first_difference(issued: Sequence[int], undisturbed: Sequence[int]) -> str | None:
    """The first difference between the two as text; None if there is none."""
    for place, (found, wanted) in enumerate(zip(issued, undisturbed, strict=True)):
        if found != wanted:
            return f"prompt {place} is item {found}, not {wanted}"
    return None


def violated_invariants(report: Row, config: Row) -> list[str]:
    """The invariants that the run's report finds violated, except performance: a run under attack is slow."""
    kept = (
        "largest age",
        "groups unaccounted for",
        "groups trained twice",
        "held-out questions trained",
        "compiles after warm-up",
    )
    return [f"{c.name}: {c.found} ({c.bound})" for c in checks(report, config) if c.holds is False and c.name in kept]
