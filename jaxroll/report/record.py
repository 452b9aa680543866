"""A run's figures and invariants, from the log in RUN/store.db, which is read without disturbing the store.

Everything is read in one transaction. The figures come from the tables (`jaxroll.store.log.schema`); values in no
table (masked tokens, the conservation residual) come from the state that the log replays to.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxroll import config as configs
from jaxroll import disk, metrics, run_paths
from jaxroll.config import Config
from jaxroll.errors import ConfigError, DataError
from jaxroll.learner import checkpoint_files
from jaxroll.policy.limiter import max_age
from jaxroll.records import Version
from jaxroll.report.formats import UNKNOWN, known, number, percent
from jaxroll.run_paths import RunPaths
from jaxroll.store.core import state
from jaxroll.store.core.machine import replay
from jaxroll.store.core.state import on_line
from jaxroll.store.log import database
from jaxroll.store.log import replay as replays

# --- The invariants of a run, compared with its figures


@dataclass(frozen=True)
class Check:
    """One invariant: `holds` is None if the run cannot tell, or if the invariant does not apply to it."""

    name: str
    found: str
    bound: str
    holds: bool | None
    meaning: str


def checks(figures: Mapping[str, Any], config: Mapping[str, Any]) -> list[Check]:
    """All invariants, the most important first."""
    alpha = max_age(figures["alpha"])
    shared = bool((config.get("placement") or {}).get("colocated"))  # devices that compute one thing at a time
    return [
        _most(figures, "age_max", "largest age", alpha, f"α = {figures['alpha']:g}: no older token is trained"),
        _most(figures, "conservation_residual", "groups unaccounted for", 0, "every issued group has a state"),
        _most(figures, "groups_trained_twice", "groups trained twice", 0, "no group is in two durable steps"),
        _most(figures, "heldout_in_train", "held-out questions trained", 0, "no held-out question is trained on"),
        _most(figures, "compiles_after_warmup", "compiles after warm-up", 0, "all shapes are static"),
        _evaluated(figures, config),
        _mismatch(figures, config),
        _least(
            figures,
            "overlap",
            "overlap",
            0.5,
            "learner compute with useful decoding at the same time",
            alpha >= 1 and not shared,
        ),
        _least(figures, "slot_occupancy", "slot occupancy", 0.85, "busy slots while requests wait"),
        _padding(figures, config),
        _waste(figures, config),
    ]


_ROWS_TO_FILL = 16  # packed rows of a step; with fewer, the last row alone can be a tenth of them


def _padding(figures: Mapping[str, Any], config: Mapping[str, Any]) -> Check:
    """An invariant of steps with many packed rows on every shard; a small step cannot fill even one micro-batch."""
    learner = config.get("learner") or {}
    mesh = learner.get("mesh") or {}
    shards = mesh.get("data", 1) * mesh.get("fsdp", 1) * mesh.get("expert", 1)
    rows = (figures["tokens_per_step"] or 0) / learner.get("row_tokens", 128) / shards
    check = _most(figures, "padding_waste", "padding", 0.25, "share of packed tokens that are padding", percent)
    return check if rows >= _ROWS_TO_FILL else replace(check, holds=None)


def _waste(figures: Mapping[str, Any], config: Mapping[str, Any]) -> Check:
    """An invariant of runs without filters and redundant groups, which waste samples on purpose."""
    schedule = config.get("schedule") or {}
    chosen = schedule.get("filter", "none") != "none" or schedule.get("redundant_groups", 0) > 0
    check = _most(figures, "wasted_tokens", "wasted tokens", 0.02, "sampled, then expired or masked", percent)
    return replace(check, holds=None) if chosen else check


def _most(figures: Mapping[str, Any], key: str, name: str, bound: float, meaning: str, written=number) -> Check:
    value = figures[key]
    short = percent(bound, 0) if written is percent else number(bound)
    return Check(
        name, written(value), f"≤ {short}" if bound else "0", value <= bound if known(value) else None, meaning
    )


def _least(figures: Mapping[str, Any], key: str, name: str, bound: float, meaning: str, asked: bool = True) -> Check:
    value = figures[key]
    holds = value >= bound if known(value) and asked else None
    return Check(name, percent(value), f"≥ {percent(bound, 0)}" if asked else UNKNOWN, holds, meaning)


def _evaluated(figures: Mapping[str, Any], config: Mapping[str, Any]) -> Check:
    """An invariant of finished runs with an evaluator: it evaluated before the first step and after the last."""
    steps, wanted = figures["eval_steps"] or [], figures["steps_wanted"]
    asked = bool((config.get("evaluator") or {}).get("every")) and figures["steps"] == wanted
    found = ", ".join(number(step) for step in steps) or UNKNOWN
    meaning = "the gain is measured from the warm start to the last weights"
    return Check("evaluated at", found, f"0, {number(wanted)}", list(steps) == [0, wanted] if asked else None, meaning)


def _mismatch(figures: Mapping[str, Any], config: Mapping[str, Any]) -> Check:
    """An invariant of runs that compute in float32 on both sides, without quantized samplers."""
    value, limit = figures["logprob_mismatch_max"], figures["logprob_mismatch_limit"]
    dtypes = {(config.get(room) or {}).get("dtype", "float32") for room in ("model", "transfer")}
    sampler = config.get("sampler") or {}
    exact = dtypes == {"float32"} and not (sampler.get("kv_dtype") or sampler.get("weight_dtype"))
    asked = exact and known(value) and known(limit)
    bound = f"< {number(limit, 2)}" if asked else UNKNOWN
    meaning = "log-probs of sampler and learner on equal weights"
    return Check("log-prob mismatch", number(value, 2), bound, value < limit if asked else None, meaning)


# --- A run's figures and invariants, from the log in RUN/store.db, which is read without disturbing the store

FAILURES_KEPT = 20


@dataclass(frozen=True)
class Failure:
    """A failed member. `error` may contain text of a model."""

    unix_s: float
    group: int
    member: int
    kind: str
    error: str


@dataclass(frozen=True)
class ClaimTimes:
    """Times of one claim: of the learner's wait and work before it, and of its slowest group,
    from its first lease to its last put, and its members in the mean."""

    waited_s: float
    worked_s: float
    made_s: float
    member_s: float


@dataclass(frozen=True)
class LogFacts:
    """Facts of the log.

    `groups_by_state` counts issued groups and `reasons` those that ended untrained, by why; `wasted_tokens` is the
    share of all sampled tokens that expired with their group or were masked. `published` is (unix seconds, version).
    """

    acked_groups: frozenset[int] = frozenset()
    groups_by_state: dict[str, int] | None = None
    groups_trained_twice: int | None = None
    heldout_in_train: int | None = None
    wasted_tokens: float | None = None
    conservation_residual: int | None = None
    reasons: dict[str, int] | None = None
    lineages: tuple[state.Lineage, ...] = ()
    published: tuple[tuple[float, str], ...] = ()
    failures: tuple[Failure, ...] = ()
    failed_members: int = 0
    claim_times: tuple[ClaimTimes, ...] = ()
    closed: str = ""


def read(run_dir: Path, heldout_hashes: Collection[str] | None) -> LogFacts:
    """The history of the run; an empty one before the store has made its log. DataError when it cannot be read."""
    with database.damage_named(run_dir, "the report needs a whole log: restore the file from a copy"):
        if not database.is_there(run_dir):  # or just being made
            return LogFacts()
        with database.transaction(run_dir) as db:
            return _history(db, heldout_hashes)


def _history(db: sqlite3.Connection, heldout_hashes: Collection[str] | None) -> LogFacts:
    replayed = _replayed(db)
    by_state = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
    ended = "SELECT reason, COUNT(*) FROM groups WHERE state IN ('EXPIRED', 'DEAD') GROUP BY reason"
    failed = "SELECT unix_s, group_id, member, kind, error FROM failures ORDER BY unix_s DESC LIMIT ?"
    closed = db.execute("SELECT value FROM meta WHERE key = 'closed'").fetchone()
    return LogFacts(
        acked_groups=frozenset(_column(db, "SELECT id FROM groups WHERE state IN ('ACKED', 'TRIMMED')")),
        groups_by_state=by_state,
        groups_trained_twice=trained_twice(db),
        heldout_in_train=None if heldout_hashes is None else _heldout_issued(db, frozenset(heldout_hashes)),
        wasted_tokens=_wasted_share(db, replayed.tokens_masked),
        conservation_residual=residual(replayed, by_state),
        reasons=dict(db.execute(ended)),
        lineages=tuple(replayed.lineages),
        published=tuple((t, f"{lineage}.{step}") for t, lineage, step in db.execute(_PUBLISHED)),
        failures=tuple(Failure(*row) for row in db.execute(failed, (FAILURES_KEPT,))),
        failed_members=db.execute("SELECT COUNT(*) FROM failures").fetchone()[0],
        claim_times=tuple(ClaimTimes(*row) for row in db.execute(_CLAIM_TIMES)),
        closed=closed[0] if closed else "",
    )


_CLAIM_TIMES = """
SELECT waited_s, worked_s, MAX(made_s), SUM(taken_s) / SUM(done)
FROM claims JOIN claim_groups USING (lineage, step) JOIN (
  SELECT group_id, MAX(ended_unix_s) - MIN(leased_unix_s) AS made_s, TOTAL(ended_unix_s - leased_unix_s) AS taken_s,
  COUNT(*) AS done FROM members WHERE state = 'done' GROUP BY group_id) USING (group_id)
GROUP BY lineage, step ORDER BY lineage, step
"""
_PUBLISHED = "SELECT unix_s, lineage, step FROM versions ORDER BY unix_s"


def _column(db: sqlite3.Connection, sql: str) -> Iterator[int]:
    return (row[0] for row in db.execute(sql))


def _replayed(db: sqlite3.Connection) -> state.State:
    """The store's state, rebuilt from the log as the store does."""
    kept = replays.newest(db)
    begun = kept[1] if kept else state.State()
    return replay(begun, (event for _, event in replays.events_after(db, begun.position)), 0.0)


def residual(replayed: state.State, by_state: dict[str, int]) -> int:
    """Groups issued less groups accounted for, and groups on which the tables and the log disagree; 0 is right."""
    counted = {name: count for name, count in state.counts(replayed).items() if count}
    disagreeing = sum(abs(counted.get(name, 0) - by_state.get(name, 0)) for name in counted.keys() | by_state.keys())
    return abs(state.conservation_residual(replayed)) + disagreeing


def trained_twice(db: sqlite3.Connection) -> int:
    """Groups that are in two durable steps of the surviving line, or twice in one."""
    return db.execute(
        "SELECT COUNT(*) FROM (SELECT group_id FROM claim_groups JOIN claims USING (lineage, step)"
        " WHERE durable_lineage IS NOT NULL GROUP BY group_id HAVING COUNT(*) > 1)"
    ).fetchone()[0]


def _heldout_issued(db: sqlite3.Connection, hashes: frozenset[str]) -> int:
    return sum(hash_ in hashes for (hash_,) in db.execute("SELECT question_hash FROM groups"))


def _wasted_share(db: sqlite3.Connection, masked_tokens: int) -> float:
    """(tokens of groups that ended untrained + masked tokens) / all sampled tokens put; 0 before the first put."""
    put, lost = db.execute(
        "SELECT TOTAL(tokens), TOTAL(tokens * (groups.state IN ('EXPIRED', 'DEAD')))"
        " FROM members JOIN groups ON groups.id = members.group_id WHERE digest != ''"
    ).fetchone()
    return (lost + masked_tokens) / put if put else 0.0


# --- Run record: run.json, metrics.jsonl, heldout.json and store.db of a run's folder, read once

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """`about` is run.json without its config. `rows` are of the surviving line of ancestry."""

    path: Path
    config: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    history: LogFacts = field(default_factory=LogFacts)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.name

    @property
    def created_s(self) -> float | None:
        """Unix time at which the run was made, before its warm start."""
        return self.about.get("created")

    @property
    def is_simulated(self) -> bool:
        """True if `jaxroll sim` made it: its times are those of cost models."""
        return bool(self.about.get("simulated"))

    @property
    def steps_wanted(self) -> int:
        """The length of its schedule."""
        return int(self.config["schedule"]["steps"])


def load(run_dir: Path) -> Run:
    """The run in `run_dir`, finished or live; ConfigError when there is none."""
    path = Path(run_dir).resolve()
    values = about(path)
    config = values.pop("config")
    facts = read(path, heldout_hashes(path))
    return Run(path, config, values, surviving(metrics.read(RunPaths(path).metrics), facts), facts)


def about(path: Path) -> dict[str, Any]:
    """The content of run.json, its config included; ConfigError if it is missing or malformed."""
    file = RunPaths(path).run_file
    remedy = "Name the folder of a run; `jaxroll list` shows them."
    try:
        values = disk.read_json(file)
        values = run_paths.run_file(values, file) if isinstance(values, dict) else values
    except (FileNotFoundError, NotADirectoryError):
        reason = "no run here (no run.json)" if path.is_dir() else "no such folder"
        raise ConfigError("RUN", str(path), reason, remedy) from None
    except OSError as error:
        remedy = "Check the path and its permissions."
        raise ConfigError("RUN", str(file), f"unreadable: {error.strerror}", remedy) from error
    except (ValueError, DataError) as error:
        raise ConfigError("RUN", str(file), f"unreadable: {error}", "Restore the file from a copy.") from error
    config = values.get("config") if isinstance(values, dict) else None
    if isinstance(config, dict) and (misfit := _misfit(config, configs.to_dict(Config()))):
        raise ConfigError("RUN", str(file), f"{misfit} of its config has another type", "Restore the file from a copy.")
    for room, key in (("schedule", "alpha"), ("schedule", "steps"), ("learner", "mesh"), ("sampler", "mesh")):
        if not isinstance(config, dict) or key not in (config.get(room) or {}):
            raise ConfigError("RUN", str(file), f"its config lacks {room}.{key}", remedy)
    return values


def _misfit(values: dict[str, Any], defaults: dict[str, Any]) -> str:
    """The first key of `values` that is of another type than in `defaults`, dotted; '' when there is none.

    Keys of other versions are left alone: the report reads old runs too.
    """
    for key, default in defaults.items():
        value = values.get(key, default)
        if isinstance(default, (int, float)):
            fits = isinstance(value, (int, float)) and abs(value) < 1e100
        else:
            fits = default is None or isinstance(value, type(default))
        if not fits:
            return key
        if isinstance(default, dict) and isinstance(value, dict) and (inner := _misfit(value, default)):
            return f"{key}.{inner}"
    return ""


def heldout_hashes(path: Path) -> frozenset[str] | None:
    """The question hashes of the held-out set as the evaluator wrote them; None when it has not (yet)."""
    file = RunPaths(path).heldout
    try:
        hashes = disk.read_json(file)
        if not isinstance(hashes, list):
            raise ValueError("not a list of hashes")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, DataError) as error:
        raise ConfigError("RUN", str(file), f"unreadable: {error}", "Remove it.") from error
    return frozenset(map(str, hashes))


def surviving(rows: list[Row], facts: LogFacts) -> list[Row]:
    """The rows without steps and evaluations of weights that a rewind discarded."""
    lineages = list(facts.lineages)
    if len(lineages) < 2:
        return rows
    return [row for row in rows if row.get("kind") not in ("step", "eval") or on_line(lineages, _version(row))]


def _version(row: Row) -> Version:
    return Version(int(row.get("lineage") or 0), int(row["step"]))


def best_checkpoint(run_dir: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The checkpoint that `learner.keep_best` keeps: version, metric, value. None without one, or before its value."""
    metric = config.get("learner", {}).get("keep_best", "")
    found = checkpoint_files.best_of(run_dir, metric)
    return {"version": str(found[0]), "metric": metric, "value": found[1]} if found else None


# --- whether a process on this machine has the run open, without touching its locks


def store_pid(run_dir: Path) -> int | None:
    """The process that serves the run on this machine; None when none does, or nothing is known of it."""
    path = RunPaths(run_dir).store_lock
    try:
        return int(path.read_text(encoding="utf-8")) if disk.lock_holder(path) is not None else None
    except (OSError, ValueError):
        return None


def is_open(run_dir: Path) -> bool:
    """True if a store or a supervisor on this machine holds the run."""
    paths = RunPaths(run_dir)
    return any(disk.lock_holder(path) is not None for path in (paths.store_lock, paths.lock))


def supervisor_pid(run_dir: Path) -> int | None:
    """The supervisor of the run on this machine; None if there is none, or if its roles were started one by one."""
    pid = disk.lock_holder(RunPaths(run_dir).lock)
    return None if pid == store_pid(run_dir) else pid


def restart_words(row: Mapping[str, Any]) -> str:
    """The end of the process of a `restart` row as text, as far as it is known."""
    text = f"ended with {row['code']}, started again" if row.get("code") is not None else "started again"
    if (
        row.get("code") is not None and row.get("role") == row["process"]
    ):  # it says so itself, and may have another name now
        text = f"was started for a process that ended with {row['code']}"
    cause, error = row.get("cause") or "", row.get("error") or ""
    text += f" ({cause})" if cause else ""
    return text + (f"; its last error: {error}" if error and error not in cause else "")
