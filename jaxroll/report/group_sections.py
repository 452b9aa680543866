"""One trajectory group as `jaxroll inspect RUN --group=ID` shows it."""

from __future__ import annotations

import json
from typing import Any

from jaxroll.report.formats import duration, number
from jaxroll.report.listing import Section

Facts = dict[str, Any]


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
