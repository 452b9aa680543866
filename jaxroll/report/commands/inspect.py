"""`jaxroll inspect RUN`: state of a live or finished run; `--group=ID` shows one trajectory group in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxroll.report.commands import inspection, trajectory
from jaxroll.report.formats import UNKNOWN, Section, duration, number, short, show
from jaxroll.store.log import reading

Facts = dict[str, Any]


def main(
    run_dir: Path, config: dict[str, Any], *, group: int | None, as_json: bool, console: Console | None = None
) -> int:
    """Print what is known; 0. DataError when there is no log or it cannot be read."""
    decode, why = trajectory.decoder(run_dir, config) if group is not None else (None, "")
    with reading.damage_named(run_dir, "`jaxroll replay` says what is wrong with it"):
        with reading.transaction(run_dir) as db:
            found = inspection.facts(run_dir, db) if group is None else trajectory.facts(db, group, decode)
        text = json.dumps(found, indent=2) if as_json else ""
        sections = [] if as_json else _run_sections(found) if group is None else group_sections(found, why)
    if as_json:
        print(text)
        return 0
    show(sections, console or Console())
    return 0


def _run_sections(f: Facts) -> list[Section]:
    return [_now(f), _waits(f), _by_state(f), _head(f), _leases(f), _ended(f), _causes(f), _failures(f),
            _holders(f), _claims(f), _weights(f), _questions(f), _disk(f)]  # fmt: skip


def _now(f: Facts) -> Section:
    alive = f"store process {f['store_pid']}" if f["store_pid"] else "no store is running on this machine"
    state = f"closed: {f['closed']}" if f["closed"] else "open"
    last = f["last_record"]
    rows = [
        ("state", f"{state}; {alive}"),
        ("last record", f"{duration(last['ago_s'])} ago ({last['kind']})" if last else UNKNOWN),
        ("last put, last step", f"{_ago(f['last_put_ago_s'])}, {_ago(f['last_ack_ago_s'])}"),
        ("steps", f"{f['acked']} trained, {f['claims_made']} claimed, {f['durable']} durable, of {number(f['steps'])}"),
        ("weights", f"{f['published'] or 'none'} in lineage {f['lineage']}"),
        ("outstanding", f"{f['outstanding']} groups of a window of {number(f['window'])}"),
        ("retained", f"{_mb(f['retained_bytes'])} of {_mb(f['retention_bytes'])} MB"),
        ("unaccounted", f"{f['conservation_residual']} groups of {f['issued']}"),
    ]
    return Section(f["run"], (), rows)


def _ago(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{duration(seconds)} ago"


def _mb(size: float | None) -> str:
    return UNKNOWN if size is None else f"{size / 2**20:.1f}"


def _waits(f: Facts) -> Section:
    return Section("who is waited for", ("who", "why"), sorted(f["waits"].items()))


def _by_state(f: Facts) -> Section:
    rows = [
        (row["state"], number(row["groups"]), number(row["members_done"]), number(row["members_missing"]),
         duration(row["oldest_s"]), number(row["oldest_token_age"]))
        for row in f["groups"]
    ]  # fmt: skip
    headings = ("state", "groups", "members done", "missing", "oldest", "oldest token, steps")
    return Section("groups by state", headings, rows, right=frozenset({1, 2, 3, 5}))


def _head(f: Facts) -> Section:
    rows = [
        (str(row["group"]), row["state"], duration(row["age_s"]), f"{row['done']} of {row['size']}",
         row["holders"] or "", short(row["question"]))
        for row in f["head"]
    ]  # fmt: skip
    headings = ("group", "state", "issued", "done", "held by", "question")
    return Section("unfinished groups, those before the next claim first", headings, rows, right=frozenset({0}))


def _leases(f: Facts) -> Section:
    holders: dict[str, list[Facts]] = {}
    for row in f["leases"]:
        holders.setdefault(row["holder"], []).append(row)
    rows = [
        (holder, str(len(some)), duration(some[0]["for_s"]), short(", ".join(map(_key, some)), 70))
        for holder, some in holders.items()
    ]
    return Section("open leases", ("holder", "members", "longest", "which"), rows, right=frozenset({1}))


def _key(row: Facts) -> str:
    return f"{row['group']}.{row['member']}"


def _ended(f: Facts) -> Section:
    rows = [
        (row["state"], number(row["groups"]), number(row["tokens"]), str(row["last"]), short(row["reason"], 80))
        for row in f["ended"]
    ]
    headings = ("state", "groups", "tokens", "newest", "why")
    return Section("ended untrained", headings, rows, right=frozenset({1, 2, 3}))


def _causes(f: Facts) -> Section:
    rows = [
        (number(row["failures"]), number(row["groups"]), row["kind"], f"{duration(row['ago_s'])} ago",
         short(row["cause"], 80))
        for row in f["failures"]["causes"]
    ]  # fmt: skip
    headings = ("failures", "groups", "kind", "newest", "cause")
    return Section("failures by cause", headings, rows, right=frozenset({0, 1}))


def _failures(f: Facts) -> Section:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(f["failures"]["by_kind"].items()))
    rows = [
        (
            duration(row["ago_s"]),
            f"{row['group']}.{row['member']}.{row['attempt']}",
            row["kind"],
            short(row["error"], 80),
        )
        for row in f["failures"]["last"]
    ]
    return Section(f"failures: {kinds}" if kinds else "", ("ago", "member", "kind", "error"), rows)


def _holders(f: Facts) -> Section:
    """Holders that get less work, or none, because of their failures."""
    resting, unreliable = f["resting"], f["unreliable"]
    rows = []
    for name in sorted(resting | unreliable):
        rest = resting.get(name, {})
        share = f"{unreliable[name]:.0%}" if name in unreliable else ""
        length = duration(rest["left_s"]) if rest else ""
        rows.append((name, share, number(rest.get("rests")) if rest else "", length, short(rest.get("error", ""), 80)))
    headings = ("holder", "failed lately", "rests", "rest", "last error")
    return Section("holders that rest or fail", headings, rows, right=frozenset({1, 2, 3}))


def _claims(f: Facts) -> Section:
    rows = [
        (f"{row['lineage']}.{row['step']}", row["state"], str(row["groups"]), duration(row["waited_s"]),
         duration(row["ago_s"]))
        for row in f["claims"]
    ]  # fmt: skip
    return Section("newest claims", ("claim", "state", "groups", "learner waited", "ago"), rows, right=frozenset({2}))


def _weights(f: Facts) -> Section:
    rows = [
        (f"{row['lineage']}.{row['step']}", row["channel"], row["address"], duration(row["ago_s"]))
        for row in f["versions"]
    ]
    lines = "; ".join(
        f"lineage {row['lineage']} left {row['parent']} at step {row['fork_step']}, {duration(row['ago_s'])} ago"
        for row in f["lineages"]
        if row["parent"] is not None
    )
    return Section("newest weights", ("version", "channel", "address", "ago"), rows, lines)


def _questions(f: Facts) -> Section:
    numbers = ("mean_reward", "members", "issued", "trained")
    rows = [(row["question_hash"], *(number(row[name]) for name in numbers)) for row in f["questions"]]
    headings = ("question", "mean reward", "answers", "issued", "trained")
    return Section("hardest questions", headings, rows, right=frozenset({1, 2, 3, 4}))


def _disk(f: Facts) -> Section:
    disk = f["disk"]
    rows = [
        ("store.db, its WAL", f"{_mb(disk['database_bytes'])} MB, {_mb(disk['wal_bytes'])} MB"),
        ("records", f"{number(disk['history_from'])} to {number(disk['history_to'])} are kept; snapshot at "
                    f"{number(disk['snapshot'])}"),
        ("trajectories", f"{disk['kept_groups']} groups that ended are kept ({_mb(disk['kept_bytes'])} MB)"),
    ]  # fmt: skip
    return Section("on disk", (), rows)


# --- one trajectory group


def group_sections(f: Facts, why_no_text: str) -> list[Section]:
    """The facts of `trajectory`, for a person."""
    group, task = f["group"], f["task"]
    again = f", again for group {group['reissue_of']}" if group["reissue_of"] is not None else ""
    rows = [
        ("state", group["state"] + (f": {group['reason']}" if group["reason"] else "")),
        ("question", group["question_hash"] + again),
        ("issued", f"{duration(group['issued_ago_s'])} ago"),
    ]
    if f["claim"]:
        claim = f["claim"]
        rows.append(("claim", f"step {claim['step']} of lineage {claim['lineage']}, {duration(claim['ago_s'])} ago"))
    if group["ended_ago_s"] is not None:
        rows.append(("ended", f"{duration(group['ended_ago_s'])} ago"))
    if task:
        rows.append(("environment", f"{task['env']} {json.dumps(task['env_args'])}"))
        rows += [(message["role"], message["content"]) for message in task["messages"]]
    sections = [Section(f"group {group['id']}", (), rows, why_no_text)]
    sections += [_member(member) for member in f["members"]]
    failures = [(duration(r["ago_s"]), f"{r['member']}.{r['attempt']}", r["kind"], r["error"]) for r in f["failures"]]
    sections.append(Section("failures" if failures else "", ("ago", "member", "kind", "error"), failures))
    events = [(str(e["position"]), duration(e["ago_s"]), e["kind"], e["what"]) for e in f["events"]]
    sections.append(Section("what happened", ("record", "ago", "kind", ""), events, right=frozenset({0})))
    return sections


def _member(m: Facts) -> Section:
    title = f"member {m['member']}: {m['state']}, attempt {m['attempt']}, {m['holder']}"
    rows = []
    if m["took_s"] is not None:
        rows.append(("took", duration(m["took_s"])))
    elif m["leased_ago_s"] is not None:
        rows.append(("leased", f"{duration(m['leased_ago_s'])} ago"))
    if "segments" not in m:
        return Section(title, (), rows, m.get("gone", ""))
    parts = ", ".join(f"{name} {number(value)}" for name, value in m["reward_parts"].items())
    rows += [
        ("reward", f"{number(m['reward'])} ({parts})" if parts else number(m["reward"])),
        ("finish", m["finish"] + (f", age {m['age']}" if m["age"] is not None else "")),
        ("versions", ", ".join(f"{run['tokens']} tokens at {run['version']}" for run in m["versions"])),
    ]
    for segment in m["segments"]:
        words = segment.get("text", " ".join(map(str, segment["tokens"])))
        rows.append((f"{segment['who']}, {len(segment['tokens'])}", words))
    return Section(title, (), rows)
