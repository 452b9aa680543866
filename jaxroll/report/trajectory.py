"""One trajectory group in full: its messages, rewards, versions and events."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxroll import wire
from jaxroll.config import parse
from jaxroll.errors import ConfigError, JaxRollError
from jaxroll.protocols import Supports
from jaxroll.records import Finished, Member, Segment, ages
from jaxroll.report.formats import Section, duration, number
from jaxroll.run_paths import RunPaths
from jaxroll.store.core import events as ev
from jaxroll.text import tokenizers

NO_TEXT = "(its text is not kept)"
Facts = dict[str, Any]
Decoder = Callable[[list[int]], str]


def decoder(run_dir: Path, config: dict[str, Any]) -> tuple[Decoder | None, str]:
    """A function from token ids to text with the run's tokenizer; or None and the reason."""
    try:
        tokenizer = tokenizers.of_run(run_dir, parse(config).tokenizer)
    except (JaxRollError, OSError, ValueError) as error:
        return None, f"no text: {error}"
    if tokenizer is None:
        return None, f"no text: {RunPaths(run_dir).alphabet} is not there (the store's feeder writes it)"
    return tokenizer.decode, ""


def facts(db: sqlite3.Connection, group: int, decode: Decoder | None) -> Facts:
    """The group, ready for JSON; ConfigError when it was never issued. Times are seconds before now."""
    now = time.time()
    row = _row(db, "SELECT * FROM groups WHERE id = ?", group)
    if row is None:
        highest = db.execute("SELECT MAX(id) FROM groups").fetchone()[0]
        remedy = "None was issued yet." if highest is None else f"Use one of 0 to {highest}."
        raise ConfigError("--group", group, "there is no such group", remedy)
    row["state"] = shown_state(row["state"])
    row["issued_ago_s"] = now - row.pop("issued_unix_s")
    ended = row.pop("ended_unix_s")
    row["ended_ago_s"] = None if ended is None else now - ended
    return {
        "group": row,
        "task": task_facts(db, group),
        "claim": claim_facts(db, group, now),
        "members": [_member(db, found, decode, row["claim_step"], now) for found in _members(db, group)],
        "failures": failure_facts(db, group, now),
        "events": list(event_facts(db, group, now)),
    }


def _row(db: sqlite3.Connection, sql: str, *values: Any) -> Facts | None:
    cursor = db.execute(sql, values)
    found = cursor.fetchone()
    return None if found is None else dict(zip([c[0] for c in cursor.description], found, strict=True))


def task_facts(db: sqlite3.Connection, group: int) -> Facts | None:
    """Environment, arguments, seed and messages of the group's task; None if they are not kept."""
    found = _row(db, "SELECT env, env_args, seed, messages FROM tasks WHERE group_id = ?", group)
    if found is not None:
        found["messages"] = msgspec.json.decode(found["messages"])
        found["env_args"] = msgspec.json.decode(found["env_args"])
    return found


def claim_facts(db: sqlite3.Connection, group: int, now: float) -> Facts | None:
    """The claim that holds the group; None if there is none."""
    sql = (
        "SELECT lineage, step, place, trained_lineage, durable_lineage, unix_s FROM claim_groups"
        " JOIN claims USING (lineage, step) WHERE group_id = ?"
    )
    found = _row(db, sql, group)
    if found is not None:
        found["ago_s"] = now - found.pop("unix_s")
    return found


def _members(db: sqlite3.Connection, group: int) -> Iterator[Facts]:
    sql = (
        "SELECT m.*, p.body FROM members m LEFT JOIN payloads p ON p.group_id = m.group_id AND p.member = m.member"
        " WHERE m.group_id = ? ORDER BY m.member"
    )
    cursor = db.execute(sql, (group,))
    names = [column[0] for column in cursor.description]
    for found in cursor:
        yield dict(zip(names, found, strict=True))


def _member(db: sqlite3.Connection, found: Facts, decode: Decoder | None, step: int | None, now: float) -> Facts:
    body, leased, ended = found.pop("body"), found.pop("leased_unix_s"), found.pop("ended_unix_s")
    found.pop("group_id")
    found["leased_ago_s"] = None if leased is None else now - leased
    found["took_s"] = ended - leased if leased is not None and ended is not None else None
    outcome = None if body is None else wire.decode(body, Member).outcome
    if isinstance(outcome, Finished):
        found |= finished_facts(outcome, decode, step)
    elif found["digest"]:
        found["gone"] = "its bytes are dropped: the group is done with (store.keep_trajectories_mb keeps more)"
    return found


def finished_facts(outcome: Finished, decode: Decoder | None, step: int | None) -> Facts:
    """A finished member's facts beyond the log's columns; `age` when `step` is the claim that trained it."""
    age = ages(outcome.versions, step) if step is not None else None
    return {
        "finish": outcome.finish,
        "reward": outcome.reward,
        "reward_parts": outcome.reward_parts,
        "extracted": outcome.extracted,
        "versions": [{"version": str(run.version), "tokens": run.count} for run in outcome.versions],
        "age": int(age.max()) if age is not None and age.size else None,
        "segments": [_segment(segment, decode) for segment in outcome.segments],
    }


def _segment(segment: Segment, decode: Decoder | None) -> Facts:
    sampled = bool(segment.loss_mask.any())
    found: Facts = {"source": "model" if sampled else "shown", "tokens": segment.tokens.tolist()}
    if sampled:
        found["logprobs"] = [round(float(value), 6) for value in segment.logprobs]
    if segment.branch:
        found["branch"] = True
    if segment.support.size:
        found["supports"] = supports_of(segment)
    if decode is not None:
        found["text"] = decode(found["tokens"])
    return found


def supports_of(segment: Segment) -> list[list[int]]:
    """The ids to which truncated sampling restricted each token of the segment; [] for all, or not sampled."""
    found: list[list[int]] = [[] for _ in segment.tokens]
    sampled = np.flatnonzero(segment.sampled_mask)
    kept = Supports.decoded(segment.support, segment.tokens[sampled])
    ids = np.split(kept.ids, np.cumsum(kept.sizes)[:-1]) if len(sampled) else []
    for place, of_token in zip(sampled, ids, strict=True):
        found[place] = sorted(of_token.tolist())
    return found


def failure_facts(db: sqlite3.Connection, group: int, now: float) -> list[Facts]:
    """The failures of the group's members, the first one first."""
    sql = "SELECT unix_s, member, attempt, kind, error FROM failures WHERE group_id = ? ORDER BY unix_s"
    names = ("ago_s", "member", "attempt", "kind", "error")
    return [dict(zip(names, (now - t, *rest), strict=True)) for t, *rest in db.execute(sql, (group,))]


# --- events


def event_facts(db: sqlite3.Connection, group: int, now: float) -> Iterator[Facts]:
    """The records that concern the group, in order; those before the kept history are gone."""
    sql = (
        "SELECT position, unix_s, kind, body FROM log WHERE group_id = ?"
        " OR kind IN ('claimed', 'acked', 'durable', 'began') ORDER BY position"
    )
    step: int | None = None
    for position, unix_s, kind, body in db.execute(sql, (group,)):
        event = wire.decode(body, ev.Event)  # type: ignore[arg-type]
        if isinstance(event, ev.Claimed):
            if group not in event.groups:
                continue
            step = event.step
        elif not _concerns(event, group, step):
            continue
        yield {"position": position, "ago_s": now - unix_s, "kind": kind, "what": described(event)}
        if isinstance(event, (ev.MadeDurable, ev.Expired, ev.Died)):
            return  # what comes after is about others


def _concerns(event: ev.Event, group: int, step: int | None) -> bool:
    if isinstance(event, ev.Acked):
        return event.version.step == step
    if isinstance(event, ev.MadeDurable):
        return step is not None and event.version.step > step
    if isinstance(event, ev.Began):
        return event.parent is not None and step is not None and event.version.step <= step
    return getattr(event, "group", None) == group


def described(event: ev.Event) -> str:
    """One line about a record."""
    match event:
        case ev.Issued():
            again = f", again for group {event.reissue_of}" if event.reissue_of is not None else ""
            return f"{event.size} members{again}"
        case ev.Leased():
            members = ", ".join(f"{m} (attempt {a})" for m, a in event.members)
            return f"{event.holder} leased member {members}"
        case ev.LeaseEnded():
            return f"members {_listed(event.members)}: {event.reason}"
        case ev.Put():
            return f"member {event.member} (attempt {event.attempt}), {_runs(event)}, {event.size_bytes:,} bytes"
        case ev.MemberFailed():
            return f"member {event.member} (attempt {event.attempt}), {event.kind}: {event.error}"
        case ev.Shrunk():
            return f"closed without members {_listed(event.dropped)}: {event.reason}"
        case ev.Expired() | ev.Died():
            return event.reason
        case ev.Claimed():
            return f"for step {event.step}, with {len(event.groups)} groups"
        case ev.Acked() | ev.MadeDurable():
            return f"at {event.version}"
        case ev.Began():
            return f"the learner went back to step {event.version.step}: lineage {event.version.lineage}"
    return ""


def _listed(members: Iterable[int]) -> str:
    return ", ".join(map(str, members))


def _runs(event: ev.Put) -> str:
    return " + ".join(f"{run.count} tokens at {run.version}" for run in event.runs)


# --- for a person


def sections(f: Facts, why_no_text: str) -> list[Section]:
    """The facts of a group, for a person."""
    group, task = f["group"], f["task"]
    again = f", to replace group {group['reissue_of']}" if group["reissue_of"] is not None else ""
    rows = [
        ("state", group["state"] + (f": {group['reason']}" if group["reason"] else "")),
        *([] if task else [("question", NO_TEXT)]),
        ("issued", f"{duration(group['issued_ago_s'])} ago{again}"),
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
    sections += [_shown_member(member) for member in f["members"]]
    failures = [(duration(r["ago_s"]), f"{r['member']}.{r['attempt']}", r["kind"], r["error"]) for r in f["failures"]]
    sections.append(Section("failures" if failures else "", ("ago", "member", "kind", "error"), failures))
    events = [(str(e["position"]), duration(e["ago_s"]), e["kind"], e["what"]) for e in f["events"]]
    sections.append(Section("what happened", ("record", "ago", "kind", ""), events, right=frozenset({0})))
    return sections


def _shown_member(m: Facts) -> Section:
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
        *([("extracted", m["extracted"])] if m["extracted"] is not None else []),
        ("finish", m["finish"] + (f", age {m['age']}" if m["age"] is not None else "")),
        ("versions", ", ".join(f"{run['tokens']} tokens at {run['version']}" for run in m["versions"])),
    ]
    for segment in m["segments"]:
        words = segment.get("text", " ".join(map(str, segment["tokens"])))
        begins = "other conversation: " if segment.get("branch") else ""
        rows.append((f"{begins}{segment['source']}, {len(segment['tokens'])}", words))
        if sizes := [len(ids) for ids in segment.get("supports", ()) if ids]:
            text = f"of {len(sizes)} tokens, {min(sizes)} to {max(sizes)} ids, mean {number(sum(sizes) / len(sizes))}"
            rows.append(("supports", text))
    return Section(title, (), rows)


def shown_state(state: str) -> str:
    """The state of a group as users read it: the log calls a group TRIMMED whose training is in a checkpoint."""
    return "DURABLE" if state == "TRIMMED" else state
