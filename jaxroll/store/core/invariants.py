"""Invariants of every log record, given the state before it.

Each check returns the reason why a record is impossible, or ''. The checks share no code with the deciders (`leases`,
`puts`, `training`), so that replaying a log finds mistakes in those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxroll.records import VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings
from jaxroll.store.core.puts import was_published
from jaxroll.store.core.state import DONE, DROPPED, FREE, LEASED, Group, State, base_step, on_line

# Allowed transitions (from, to) by docs/store_contract.md. A record may also leave the state of a group unchanged.
EDGES = frozenset({
    ("PENDING", "LEASED"), ("LEASED", "PENDING"), ("LEASED", "READY"), ("PENDING", "READY"), ("READY", "CLAIMED"),
    ("CLAIMED", "ACKED"), ("ACKED", "CLAIMED"), ("ACKED", "TRIMMED"), ("PENDING", "ENDED"), ("LEASED", "ENDED"),
    ("READY", "ENDED"), ("CLAIMED", "ENDED"), ("ACKED", "ENDED"),
})  # fmt: skip


@dataclass
class Known:
    """Facts from earlier records that the state does not keep: every group that was ever in a claim."""

    settings: Settings | None = None
    claimed: set[int] = field(default_factory=set)
    largest_age: int = 0


def impossible(seen: Known, state: State, event: ev.Event) -> str:
    """The reason why `event` cannot follow `state`; '' if it can."""
    check = _CHECKS.get(type(event))
    return check(seen, state, event) if check else ""


def residual(state: State) -> int:
    """Groups issued less groups alive or ended; the cheap form of `conservation_residual`."""
    return state.issued - len(state.open) - len(state.held) - state.trimmed - sum(state.expired.values()) - state.dead


def touched(event: ev.Event) -> tuple[int, ...]:
    """The groups that a record names."""
    if isinstance(event, ev.Claimed):
        return event.groups
    group = getattr(event, "group", None)
    return () if group is None else (group,)


def state_name(state: State, gid: int) -> str | None:
    """The group's state; None when it is not alive."""
    group = state.find(gid)
    return None if group is None else group.state


# --- one check for each kind of record


def _issued(seen: Known, state: State, e: ev.Issued) -> str:
    if e.group != state.next_group:
        return f"group {e.group} is issued, the next is {state.next_group}"
    if e.size < 1 or not 0 <= e.wanted <= e.size:
        return f"group {e.group} has {e.size} members, of which {e.wanted} count"
    if e.reissue_of is not None and not 0 <= e.reissue_of < e.group:
        return f"group {e.group} is issued again for group {e.reissue_of}, which never existed"
    return ""


def _leased(seen: Known, state: State, e: ev.Leased) -> str:
    group = state.open.get(e.group)
    if group is None:
        return f"a lease of group {e.group}, which is not open"
    if state.published is None:
        return f"a lease of group {e.group} in lineage {state.lineage}, before its first weights"
    for member, attempt in e.members:
        if not 0 <= member < len(group.slots):
            return f"a lease of member {e.group}.{member}, which does not exist"
        slot = group.slots[member]
        if slot.status != FREE:
            return f"a lease of member {e.group}.{member}, which is {slot.status}"
        if attempt <= slot.attempt:
            return f"a lease of member {e.group}.{member} as attempt {attempt} after attempt {slot.attempt}"
    for member, tokens in e.resumed:
        slot = group.slots[member] if member in dict(e.members) else None
        there = slot.flushed.tokens if slot is not None and slot.flushed is not None else 0
        if not 0 < tokens == there:
            return f"member {e.group}.{member} continues after {tokens} tokens, the store has {there} of them"
    return ""


def _lease_ended(seen: Known, state: State, e: ev.LeaseEnded) -> str:
    return _members_are(state, e.group, e.members, (LEASED,), "the end of a lease")


def _flushed(seen: Known, state: State, e: ev.Flushed) -> str:
    why = _members_are(state, e.group, (e.member,), (LEASED,), "a flush") or _attempt(state, e)
    if why:
        return why
    known = state.open[e.group].slots[e.member].flushed
    there = sum(run.count for run in known.runs) if known is not None else 0
    if e.start not in (0, there) or not e.runs:
        return f"a flush of member {e.group}.{e.member} from token {e.start} on, the store has {there}"
    runs = (*(known.runs if known is not None and e.start else ()), *e.runs)
    for before, after in itertools.pairwise(runs):
        if after.version < before.version:
            return f"member {e.group}.{e.member} goes from version {before.version} back to {after.version}"
    return next(filter(None, (_run(state, e, run) for run in e.runs)), "")


def _put(seen: Known, state: State, e: ev.Put) -> str:
    why = _members_are(state, e.group, (e.member,), (LEASED, FREE), "a put") or _attempt(state, e)
    if why:
        return why
    if not e.runs:
        return f"a put of member {e.group}.{e.member} without a sampled token"
    return next(filter(None, (_run(state, e, run) for run in e.runs)), "")


def _run(state: State, e: ev.Put | ev.Flushed, run: VersionRun) -> str:
    if not was_published(state.lineages, run.version):
        return f"member {e.group}.{e.member} was sampled at {run.version}, which was never published"
    if not on_line(state.lineages, run.version):
        return f"member {e.group}.{e.member} was sampled at {run.version}, of a lineage that ended"
    return "" if run.count > 0 else f"member {e.group}.{e.member} has a run of {run.count} tokens"


def _failed(seen: Known, state: State, e: ev.MemberFailed) -> str:
    return _members_are(state, e.group, (e.member,), (LEASED, FREE), "a failure") or _attempt(state, e)


def _shrunk(seen: Known, state: State, e: ev.Shrunk) -> str:
    why = _members_are(state, e.group, e.dropped, (LEASED, FREE), "a shrink")
    if why:
        return why
    group = state.open[e.group]
    done, size = sum(1 for _ in group.done()), group.wanted or len(group.slots)
    least = 1 if size <= 2 else 2  # one member has nothing to be compared with, but a group of two would wait forever
    return "" if done >= least else f"group {e.group} is closed with {done} finished members, {least} are the least"


def _aborted(seen: Known, state: State, e: ev.Aborted) -> str:
    why = _members_are(state, e.group, e.members, (LEASED, FREE), "the end")
    if why:
        return why
    group = state.open[e.group]
    there = sum(slot.status in (DONE, LEASED, FREE) for slot in group.slots) - len(e.members)
    done = sum(1 for _ in group.done())
    if not group.wanted or there < group.wanted or (e.reason == "enough" and done != group.wanted):
        return f"members {e.members} of group {e.group} are aborted; {done} are done, {group.wanted} are wanted"
    return ""


def _expired(seen: Known, state: State, e: ev.Expired) -> str:
    group = state.find(e.group)
    if group is None:
        return f"group {e.group} expires, but it is not alive"
    if e.reason.startswith("filtered") and (group.step is not None or not group.ready):
        return f"group {e.group} is filtered, but it is {group.state}"
    return ""


def _died(seen: Known, state: State, e: ev.Died) -> str:
    return "" if e.group in state.open else f"group {e.group} dies, but it is not open"


def _claimed(seen: Known, state: State, e: ev.Claimed) -> str:
    if e.step != state.next_claim:
        return f"claim {e.step}, the next is {state.next_claim}"
    if e.lineage != state.lineage:
        return f"claim {e.step} in lineage {e.lineage}, the run is in {state.lineage}"
    if len(set(e.groups)) != len(e.groups) or not e.groups:
        return f"claim {e.step} of {len(e.groups)} groups, {len(set(e.groups))} of them different"
    for gid in e.groups:
        why = _claimable(seen, state, gid, e.step)
        if why:
            return why
    return _batch(seen, state, e)


def _claimable(seen: Known, state: State, gid: int, step: int) -> str:
    if gid in seen.claimed:
        return f"claim {step} takes group {gid}, which an earlier claim took"
    group = state.open.get(gid)
    if group is None:
        return f"claim {step} takes group {gid}, which is not open"
    if not group.ready:
        return f"claim {step} takes group {gid}, which misses members {[m for m, _ in group.missing()]}"
    for _, slot in group.done():
        for run in slot.runs:
            if not on_line(state.lineages, run.version):
                return f"claim {step} takes group {gid} with tokens of {run.version}, of a lineage that ended"
    return ""


def _batch(seen: Known, state: State, e: ev.Claimed) -> str:
    """Check the size of the claim and the age of every trained token."""
    if seen.settings is None:
        return ""
    size, bound = seen.settings.limiter.batch_groups, seen.settings.limiter.max_age
    if len(e.groups) != size and not (state.data_ended and len(e.groups) < size):
        return f"claim {e.step} has {len(e.groups)} groups, a step trains {size}"
    runs = [run for gid in e.groups for _, slot in state.open[gid].done() for run in slot.runs]
    old = sum(run.count for run in runs if e.step - run.version.step > bound)
    trained = [e.step - run.version.step for run in runs if e.step - run.version.step <= bound]
    seen.largest_age = max(seen.largest_age, *trained, 0)
    if old and seen.settings.on_stale == "expire":
        return f"claim {e.step} trains {old} tokens older than {bound}"
    return "" if old == e.masked_tokens else f"claim {e.step} masks {e.masked_tokens} tokens, {old} are too old"


def _acked(seen: Known, state: State, e: ev.Acked) -> str:
    if e.version.lineage != state.lineage:
        return f"an acknowledgement of {e.version}, the run is in lineage {state.lineage}"
    if e.version.step >= state.next_claim:
        return f"an acknowledgement of step {e.version.step}, of which no claim was made yet"
    return "" if e.version.step == state.acked else f"step {e.version.step} is acknowledged, the next is {state.acked}"


def _durable(seen: Known, state: State, e: ev.MadeDurable) -> str:
    if not on_line(state.lineages, e.version):
        return f"{e.version} is made durable, of a lineage that ended"
    if e.version.step > state.acked:
        return f"step {e.version.step} is made durable, {state.acked} are acknowledged"
    return "" if e.version.step > state.durable else f"step {e.version.step} is made durable twice"


def _published(seen: Known, state: State, e: ev.Published) -> str:
    version = e.ref.version
    if version.lineage != state.lineage:
        return f"{version} is published, the run is in lineage {state.lineage}"
    if version.step > state.next_claim:
        return f"{version} is published after {state.next_claim} claims"
    return "" if version.step >= base_step(state) else f"{version} is published after step {base_step(state)}"


def _began(seen: Known, state: State, e: ev.Began) -> str:
    line = state.lineage if e.parent is None else len(e.log.lines if e.log else state.lineages)
    if e.version.lineage != line:
        return f"a learner begins at {e.version}, the lineage is {line}"
    forked = getattr(e, "cut", None) is not None
    if not forked and not state.durable <= e.version.step <= state.next_claim:
        return f"a learner begins at {e.version}; {state.durable} steps are durable, {state.next_claim} are claimed"
    return ""


def _members_are(state: State, gid: int, members: Iterable[int], allowed: tuple[str, ...], what: str) -> str:
    group = state.open.get(gid)
    if group is None:
        return f"{what} of group {gid}, which is not open"
    for member in members:
        if not 0 <= member < len(group.slots):
            return f"{what} of member {gid}.{member}, which does not exist"
        status = group.slots[member].status
        if status not in allowed:
            return f"{what} of member {gid}.{member}, which is {status}"
    return ""


def _attempt(state: State, e: ev.Put | ev.MemberFailed | ev.Flushed) -> str:
    attempt = state.open[e.group].slots[e.member].attempt
    return "" if e.attempt == attempt else f"attempt {e.attempt} of member {e.group}.{e.member}, {attempt} was granted"


_CHECKS: dict[type, Callable[[Known, State, Any], str]] = {
    ev.Issued: _issued, ev.Leased: _leased, ev.LeaseEnded: _lease_ended, ev.Put: _put, ev.MemberFailed: _failed,
    ev.Flushed: _flushed,
    ev.Shrunk: _shrunk, ev.Aborted: _aborted, ev.Expired: _expired, ev.Died: _died, ev.Claimed: _claimed,
    ev.Acked: _acked, ev.MadeDurable: _durable, ev.Published: _published, ev.Began: _began,
}  # fmt: skip


def group_contradicts(group: Group) -> str:
    """The reason why a group contradicts itself; '' if it does not."""
    missing = [m for m, s in enumerate(group.slots) if s.status not in (DONE, DROPPED)]
    if group.ready and missing:
        return f"group {group.id} is {group.state} and misses members {missing}"
    done = sum(1 for _ in group.done())
    if group.ready and group.wanted and done != group.wanted and not group.note:
        return f"group {group.id} is {group.state} with {done} members, {group.wanted} are wanted"
    if group.step is not None and not group.ready:
        return f"group {group.id} is {group.state}, but it was never ready"
    return ""
