"""Records of a run: exported (`jaxroll export`), replayed and checked (`replay`), and its checkpoints (`checkpoints`).

`jaxroll export RUN` writes one row per member (`--parquet=FILE`, `--jsonl=FILE`). Only kept groups can be exported: all
that no durable checkpoint covers yet, and of the others (trained and durable, expired, dead) the newest
`store.keep_trajectories_mb`. Rows are streamed; memory holds one row group.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from jaxroll import disk, wire
from jaxroll.errors import EXIT_FAILURE, ConfigError, DataError
from jaxroll.learner import checkpoint_files
from jaxroll.learner.checkpoint_files import Entry
from jaxroll.records import Finished, Member, Version, ages
from jaxroll.report import activity, record
from jaxroll.report.formats import UNKNOWN, Section, moment, number, show
from jaxroll.report.record import best_checkpoint
from jaxroll.report.summary import trained_steps
from jaxroll.report.trajectory import Decoder, decoder, shown_state, supports_of
from jaxroll.run_paths import RunPaths
from jaxroll.store.log import database
from jaxroll.store.log.replay import Replayed, replay_log

# --- `jaxroll export RUN --perfetto=FILE`: the timeline of a run as trace events, for https://ui.perfetto.dev
#
# The format is Chrome's Trace Event Format (JSON), which Perfetto and chrome://tracing read: one process per role with
# the activities of the report as threads, the members of each sampler as slices, events and restarts as instants, and
# the learner's ages and the window of the store as counters. Times are microseconds since the first row.

Event = dict[str, Any]
Metrics = Mapping[str, Any]
_COUNTERS = (
    ("step", "age of trained tokens", ("age_mean", "age_max")),
    ("step", "reward", ("reward_mean",)),
    ("stats", "tokens per second", ("tokens_per_s",)),
    ("store", "groups in flight", ("groups_in_flight", "in_flight_window")),
)


def write_timeline(run_dir: Path, file: Path) -> int:
    """Write the trace of the run; the number of its events."""
    run = record.load(run_dir)
    lanes = activity.lanes(run.rows, trained_steps(run.rows), run.history.acked_groups)
    found = events(run.rows, lanes)
    trace = {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"run": run.name}}
    file.write_text(json.dumps(trace), encoding="utf-8")
    return len(found)


def events(rows: Sequence[Metrics], lanes: Sequence[activity.Lane]) -> list[Event]:
    """The trace events of `rows` and `lanes`; none without rows."""
    times = [row[key] for row in rows for key in ("t0", "t") if isinstance(row.get(key), int | float)]
    times += [start for lane in lanes for spans in lane.spans.values() for start, _ in spans]
    if not times:
        return []
    origin = min(times)
    roles = sorted({str(row.get("role")) for row in rows} | {lane.role for lane in lanes})
    pids = {role: number for number, role in enumerate(roles, 1)}
    found = [_named("process_name", role, pids[role], 0) for role in roles]
    for lane in lanes:
        for thread, (kind, spans) in enumerate(lane.spans.items(), 1):
            if spans:
                found.append(_named("thread_name", kind, pids[lane.role], thread))
            found += (_slice(kind, start, end, pids[lane.role], thread, origin) for start, end in spans)
    for role in roles:
        own = [row for row in rows if str(row.get("role")) == role]
        found += _members(own, pids[role], origin)
        found += _instants(own, pids[role], origin)
        found += _counters(own, pids[role], origin)
    return found


_FIRST_MEMBER_THREAD = 100


def _members(rows: Sequence[Metrics], pid: int, origin: float) -> Iterator[Event]:
    """Members in the engine, each on the first thread that is free: the threads are as many as members overlapped."""
    members = sorted((each for row in rows if row.get("kind") == "members" for each in row["rows"]), key=lambda m: m[2])
    busy: list[tuple[float, int]] = []  # (end, thread)
    free: list[int] = []
    threads = 0
    for group, member, start, end, tokens in members:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            thread = heapq.heappop(free)
        else:
            thread, threads = _FIRST_MEMBER_THREAD + threads, threads + 1
            yield _named("thread_name", f"member {threads}", pid, thread)
        heapq.heappush(busy, (end, thread))
        args = {"group": group, "member": member, "tokens": tokens}
        yield _slice(f"{group}.{member}", start, end, pid, thread, origin) | {"args": args}


def _instants(rows: Sequence[Metrics], pid: int, origin: float) -> Iterator[Event]:
    for row in rows:
        if row.get("kind") not in ("event", "restart") or not isinstance(row.get("t"), int | float):
            continue
        text = row.get("text") or f"{row.get('process')} starts again"
        yield {"ph": "i", "s": "p", "name": str(text)[:200], "pid": pid, "tid": 0, "ts": _us(row["t"], origin)}


def _counters(rows: Sequence[Metrics], pid: int, origin: float) -> Iterator[Event]:
    for row in rows:
        for kind, name, keys in _COUNTERS:
            values = {key: row[key] for key in keys if isinstance(row.get(key), int | float)}
            if row.get("kind") == kind and values and isinstance(row.get("t"), int | float):
                yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(row["t"], origin), "args": values}


def _named(what: str, name: str, pid: int, thread: int) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": thread, "args": {"name": name}}


def _slice(name: str, start: float, end: float, pid: int, thread: int, origin: float) -> Event:
    at = _us(start, origin)
    return {"ph": "X", "name": name, "pid": pid, "tid": thread, "ts": at, "dur": max(_us(end, origin) - at, 0)}


def _us(unix_s: float, origin: float) -> int:
    return round((unix_s - origin) * 1e6)


# --- `jaxroll export RUN`

ROW_GROUP_BYTES = 8 * 2**20
_TOKEN_BYTES = 16  # a token with mask, log-prob and text, roughly


def check_targets(run_dir: Path, **files: str | None) -> None:
    """Raise ConfigError for a file that belongs to the run, which an export would replace; by the option's name."""
    for kind, file in files.items():
        if file and RunPaths(run_dir).owns(Path(file)):
            raise ConfigError(f"--{kind}", file, "it belongs to the run", "Name another file.")


def export_timeline(run_dir: Path, file: Path) -> None:
    """Write the timeline into `file` and print the number of its events."""
    with replaced(file) as draft:
        count = write_timeline(run_dir, draft)
    print(f"{count} trace events: {file}", file=sys.stderr if is_stream(file) else None)


def export_main(run_dir: Path, config: dict[str, Any], *, parquet: str | None, jsonl: str | None) -> int:
    """Write the requested files and print the counts; 0. ConfigError if pyarrow is missing or a file cannot be made."""
    if not parquet and not jsonl:
        raise ConfigError("--parquet", None, "no file named", "Add --parquet=FILE or --jsonl=FILE.")
    decode, why = decoder(run_dir, config)
    for path, opened in ((parquet, open_parquet), (jsonl, open_jsonl)):
        if path:
            count = None  # where the reader of a pipe left
            with replaced(Path(path)) as draft, opened(draft) as write:
                count = _write(run_dir, decode, write)
            if count is not None:
                print(f"{count} trajectories: {path}", file=sys.stderr if is_stream(Path(path)) else None)
    if why:
        print(why, file=sys.stderr)
    return 0


def _write(run_dir: Path, decode: Decoder | None, write: Write) -> int:
    """Write the rows in portions of bounded size; their number."""
    count, portion, size = 0, [], 0
    damage = database.damage_named(run_dir, "`jaxroll replay` says what is wrong with it")
    with damage, database.transaction(run_dir) as db:
        for row in rows(db, decode):
            portion.append(row)
            size += _TOKEN_BYTES * len(row["tokens"]) + 1000
            count += 1
            if size >= ROW_GROUP_BYTES:
                write(portion)
                portion, size = [], 0
        write(portion)
    return count


def rows(db: sqlite3.Connection, decode: Decoder | None) -> Iterator[Row]:
    """One row for each finished member whose bytes are kept, by group and member."""
    cursor = db.execute(_SELECT)
    names = [column[0] for column in cursor.description]
    for found in cursor:
        yield _member_row(dict(zip(names, found, strict=True)), decode)


_SELECT = (
    "SELECT p.group_id, p.member, p.body, g.question_hash, g.prompt_index, g.state, g.reason,"
    " t.env, t.env_args, t.messages, c.lineage AS claim_lineage, c.step AS claim_step,"
    " m.attempt, m.holder, m.leased_unix_s, m.ended_unix_s"
    " FROM payloads p JOIN groups g ON g.id = p.group_id LEFT JOIN tasks t ON t.group_id = p.group_id"
    " LEFT JOIN members m ON m.group_id = p.group_id AND m.member = p.member"
    " LEFT JOIN claim_groups c ON c.group_id = p.group_id ORDER BY p.group_id, p.member"
)


def _member_row(found: Row, decode: Decoder | None) -> Row:
    outcome = wire.decode(found.pop("body"), Member).outcome
    assert isinstance(outcome, Finished)  # failures have no payload
    messages = msgspec.json.decode(found.pop("messages") or "[]")
    step = found["claim_step"]
    age = ages(outcome.versions, step) if step is not None else None
    prompt, answer = _texts(outcome, decode)
    return found | {
        "group": found.pop("group_id"),
        "state": shown_state(found["state"]),
        "question": messages[-1]["content"] if messages else None,
        "prompt_text": prompt,
        "answer_text": answer,
        "tokens": [token for s in outcome.segments for token in s.tokens.tolist()],
        "loss_mask": [mask for s in outcome.segments for mask in s.loss_mask.tolist()],
        "logprobs": [value for s in outcome.segments for value in s.logprobs.tolist()],
        "supports": _supports(outcome),
        "branches": _branches(outcome),
        "reward": outcome.reward,
        "reward_parts": json.dumps(outcome.reward_parts),
        "extracted": outcome.extracted,
        "finish": outcome.finish,
        "versions": json.dumps([[str(run.version), run.count] for run in outcome.versions]),
        "sampled_tokens": sum(run.count for run in outcome.versions),
        "age_max": int(age.max()) if age is not None and age.size else None,
        "age_mean": float(age.mean()) if age is not None and age.size else None,
    }


def _branches(outcome: Finished) -> list[int]:
    """The first token of every conversation after the first one."""
    starts = accumulate((len(segment.tokens) for segment in outcome.segments), initial=0)
    return [start for start, segment in zip(starts, outcome.segments, strict=False) if segment.branch]


def _supports(outcome: Finished) -> list[list[int]] | None:
    """The ids that truncated sampling kept for each token, [] where it kept all; None if nothing was truncated."""
    if not any(segment.support.size for segment in outcome.segments):
        return None
    return [
        ids
        for segment in outcome.segments
        for ids in (supports_of(segment) if segment.support.size else [[] for _ in segment.tokens])
    ]


def _texts(outcome: Finished, decode: Decoder | None) -> tuple[str | None, str | None]:
    """The first messages, and the text after them (with later turns of both sides)."""
    if decode is None or not outcome.segments:
        return None, None
    first, *rest = outcome.segments
    return decode(first.tokens.tolist()), "".join(decode(segment.tokens.tolist()) for segment in rest)


# --- output files: Parquet (pyarrow, extra `data`) and JSON lines, written in portions

Row = dict[str, Any]
Write = Callable[[list[Row]], None]

# (name, Arrow type): the order of the columns.
COLUMNS = (
    ("group", "int64"), ("member", "int64"), ("attempt", "int64"), ("question_hash", "string"),
    ("prompt_index", "int64"), ("env", "string"), ("env_args", "string"), ("question", "string"),
    ("prompt_text", "string"), ("answer_text", "string"), ("tokens", "list<int32>"), ("loss_mask", "list<uint8>"),
    ("logprobs", "list<float>"), ("supports", "list<list<int32>>"),
    ("branches", "list<int32>"),
    ("reward", "double"), ("reward_parts", "string"), ("extracted", "string"),
    ("finish", "string"), ("versions", "string"), ("sampled_tokens", "int64"), ("state", "string"),
    ("reason", "string"), ("claim_lineage", "int64"), ("claim_step", "int64"), ("age_max", "int64"),
    ("age_mean", "double"), ("holder", "string"), ("leased_unix_s", "double"), ("ended_unix_s", "double"),
)  # fmt: skip


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary file next to `path` that replaces it on success; ConfigError if it cannot be created or written.

    A pipe or a device (/dev/stdout) cannot be replaced: it is written directly, and its reader may leave.
    """
    if not path.parent.is_dir():
        raise ConfigError("FILE", str(path), "its folder does not exist", "Make it, or name another file.")
    if path.is_dir():
        raise ConfigError("FILE", str(path), "is a folder", "Name a file.")
    stream = is_stream(path)
    try:
        with nullcontext(path) if stream else disk.replaced(path) as draft:
            yield draft
    except BrokenPipeError:
        if not stream:
            raise
    except OSError as error:
        raise ConfigError("FILE", str(path), f"cannot be written ({error.strerror})", "Name another file.") from error


def is_stream(path: Path) -> bool:
    """True if `path` is there and not a regular file."""
    return path.exists() and not path.is_file()


@contextmanager
def open_jsonl(path: Path) -> Iterator[Write]:
    """Write one JSON object a line."""
    with path.open("wb") as file:

        def write(rows: list[Row]) -> None:
            for row in rows:
                file.write(msgspec.json.encode({name: row[name] for name, _ in COLUMNS}) + b"\n")

        yield write


@contextmanager
def open_parquet(path: Path) -> Iterator[Write]:
    """Write one row group a portion; ConfigError without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            "--parquet",
            path.name,
            "pyarrow is not installed",
            "Install it (pip install 'jaxroll[data]'), or use --jsonl=FILE.",
        ) from error
    kinds = {
        "list<int32>": pa.list_(pa.int32()),
        "list<uint8>": pa.list_(pa.uint8()),
        "int64": pa.int64(),
        "list<list<int32>>": pa.list_(pa.list_(pa.int32())),
        "list<float>": pa.list_(pa.float32()),
        "string": pa.string(),
        "double": pa.float64(),
    }
    schema = pa.schema([(name, kinds[kind]) for name, kind in COLUMNS])
    with pq.ParquetWriter(path, schema) as writer:
        yield lambda rows: writer.write_table(pa.Table.from_pylist(rows, schema=schema))


# --- Checks of a run's records: its log (`jaxroll replay RUN`), its checkpoints (`jaxroll checkpoints RUN`)

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
    begun = "from the run's first record" if found.whole else f"from the state checkpoint at record {found.first - 1}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.kinds.most_common())
    tables = ", ".join(f"{number(count)} {table}" for table, count in sorted(found.tables.items()))
    largest = f"{CHECKED_AGES} (largest age {found.largest_age})"
    rows = [
        ("records", f"{number(found.records)}, {begun} to record {number(found.last)}"),
        ("kinds", kinds or "none"),
        ("state checkpoints", f"{found.checkpoints} compared with the state at their position"),
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


def checkpoints_main(
    run_dir: Path, *, verify: bool, as_json: bool, keep_best: str = "", console: Console | None = None
) -> int:
    """Print one row per checkpoint, oldest first; 1 when one is damaged, or cannot be verified as asked, else 0."""
    found = checkpoint_facts(run_dir, verify=verify, keep_best=keep_best)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show([_section(run_dir, found)], console or Console())
    return EXIT_FAILURE if any(row["problem"] for row in found["checkpoints"]) else 0


def checkpoint_facts(run_dir: Path, *, verify: bool, keep_best: str = "") -> Facts:
    """Every checkpoint of the run as plain values. `durable` is None where there is no log to ask.

    `best` is the checkpoint that `learner.keep_best` keeps, None where it is empty or nothing was measured yet.
    """
    folder = RunPaths(run_dir).checkpoints
    if folder.exists() and not folder.is_dir():
        raise ConfigError("RUN", str(folder), "is not a folder", "Move it away, or restore the folder from a copy.")
    durable = _durable(run_dir)
    entries = checkpoint_files.entries(folder, verify=verify)
    return {
        "verified": verify,
        "best": best_checkpoint(run_dir, {"learner": {"keep_best": keep_best}}),
        "checkpoints": [_checkpoint_row(entry, durable, verify) for entry in entries],
    }


def _checkpoint_row(entry: Entry, durable: set[Version] | None, verify: bool) -> Facts:
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
