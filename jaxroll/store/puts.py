"""Decisions about puts: idempotent by (group, member, attempt) and digest, fenced by attempt. Pure, like `work`."""

from __future__ import annotations

from jaxroll.errors import Conflict, Fenced, StaleClient, StoreRefusal
from jaxroll.records import Version, VersionRun
from jaxroll.schedule.health import Health
from jaxroll.store import events as ev
from jaxroll.store import holders
from jaxroll.store import requests as rq
from jaxroll.store.completion import after_put, can_spare_one
from jaxroll.store.groups import DONE, DROPPED, Group, Slot
from jaxroll.store.settings import Settings
from jaxroll.store.state import State, on_line, slot_of, was_published
from jaxroll.store.work import Decision, refuse

_CAUSE_CHARS = 300


def put(settings: Settings, state: State, r: rq.PutMember, now_s: float) -> Decision:
    """OK once and for all for the first put of an attempt that still counts; see promise 2."""
    settled = by_key(state, r.group, r.member, r.attempt)
    if settled is not None:
        return Decision(reply=settled)
    group = state.find(r.group)
    if group is None:
        return Decision(reply=_put_after_end(r))
    slot = group.slots[r.member]
    known = _put_known(r, slot)
    if known is not None:
        return Decision(reply=known)
    if r.failure is not None:
        return _bounded(settings, state, group, _put_failure(settings, state, group, slot, r, now_s), r.failure)
    invalid = _invalid_runs(state, r.runs)
    if invalid:
        return refuse(StaleClient(f"put {r.group}.{r.member}.{r.attempt}: {invalid}"))
    took_s = _took_s(slot, now_s)
    rest_s = holders.slow_rest_s(settings, state, slot, took_s, now_s)
    put = ev.Put(r.group, r.member, r.attempt, r.digest, r.size_bytes, r.runs, r.reward, took_s, rest_s)
    return Decision([put, *after_put(settings, state, group, put)], "OK")


def by_key(state: State, group: int, member: int, attempt: int) -> str | StoreRefusal | None:
    """The answer to a put whatever it carries; None when that depends on what it carries."""
    if not 0 <= group < state.next_group:
        return StaleClient(f"group {group} was never issued in this run")
    if (alive := state.find(group)) is None:
        return None
    slot = slot_of(alive, member)
    if slot is None:
        return StaleClient(f"group {group} has no member {member}")
    return None if 1 <= attempt == slot.failed_attempt else _put_elsewhere(f"{group}.{member}", attempt, slot)


def _put_elsewhere(name: str, attempt: int, slot: Slot) -> str | StoreRefusal | None:
    """The answer to an attempt that is not the slot's own; None to one that is."""
    if slot.status == DROPPED:
        return "SURPLUS"
    if attempt < slot.attempt:
        return Fenced(f"member {name} is at attempt {slot.attempt}, this is {attempt}")
    if 1 <= attempt <= slot.fenced:
        return Fenced(f"member {name}: a rewind ended attempt {attempt}")
    if attempt > slot.attempt or attempt < 1:
        return Fenced(f"member {name}: attempt {attempt} was never granted")
    return None


def _took_s(slot: Slot, now_s: float) -> float:
    return 0.0 if slot.leased_at_s is None else max(0.0, now_s - slot.leased_at_s)


def _put_after_end(r: rq.PutMember) -> str | StoreRefusal:
    """The answer when the group is no longer alive: what was acknowledged once is acknowledged for ever."""
    if r.recorded is None or r.attempt > r.recorded.attempt:
        return "SURPLUS"
    if r.attempt < r.recorded.attempt:
        return Fenced(f"member {r.group}.{r.member}: attempt {r.recorded.attempt} finished it, this is {r.attempt}")
    return "OK" if r.digest == r.recorded.digest else _conflict(r)


def _put_known(r: rq.PutMember, slot: Slot) -> str | StoreRefusal | None:
    """The answer to a put that the slot's history settles; None when the put is news."""
    if r.attempt == slot.failed_attempt and r.digest == slot.failed_digest:
        return "OK"
    elsewhere = _put_elsewhere(f"{r.group}.{r.member}", r.attempt, slot)
    if elsewhere is not None:
        return elsewhere
    if slot.status == DONE:
        return "OK" if r.digest == slot.digest else _conflict(r)
    if r.attempt == slot.failed_attempt:
        return _conflict(r)
    return None


def _conflict(r: rq.PutMember) -> Conflict:
    return Conflict(f"member {r.group}.{r.member}, attempt {r.attempt} was put before with other bytes")


def _put_failure(settings: Settings, state: State, group: Group, slot: Slot, r: rq.PutMember, now_s: float) -> Decision:
    assert r.failure is not None
    kind, error = r.failure
    data = kind == "DATA"
    failures = 1 + (slot.data_failures if data else slot.infra_failures)
    budget = settings.data_retries if data else settings.infra_retries
    counts = not data or holders.is_broken_alone(settings, state, slot.holder, now_s)
    # The back-off is for an outage that all holders see; one failure may as well be of one holder.
    at_once = data or (failures == 1 and holders.left_to_another(settings, state, slot, now_s))
    rest_s = 0.0 if at_once else settings.backoff_s(failures)
    health = state.holders.get(slot.holder, Health())
    holder_rest_s = health.next_rest_s(slot.leased_at_s, now_s) if counts else None
    failed = ev.MemberFailed(r.group, r.member, r.attempt, r.digest, kind, error, rest_s, holder_rest_s)
    if failures <= budget:
        return Decision([failed], "OK")
    if can_spare_one(group):
        return Decision([failed, ev.Aborted(group.id, (r.member,), "failed")], "OK")
    return Decision([failed, ev.Died(group.id, f"member {r.member}: {failures} {kind} failures: {error}")], "OK")


def _bounded(settings: Settings, state: State, group: Group, decision: Decision, failure: tuple[str, str]) -> Decision:
    """`decision` about a failure, and the end of the run where too many groups have died since the last claim."""
    dead = state.died + sum(isinstance(event, ev.Died) for event in decision.events)
    if state.closed or dead == state.died or not 0 < settings.dead_groups <= dead:
        return decision
    kind, error = failure
    why = (
        f"{dead} groups died without one claim in between (store.dead_limit): the environment {group.task.env!r} "
        f"fails, the last time with {kind}: {error[:_CAUSE_CHARS]}"
    )
    return Decision([*decision.events, ev.RunClosed(why)], decision.reply)


def _invalid_runs(state: State, runs: tuple[VersionRun, ...]) -> str:
    """Why no member of this run can have sampled `runs`; '' when one can."""
    last: Version | None = None
    for run in runs:
        if run.count < 1:
            return f"a run of {run.count} tokens"
        if not was_published(state.lineages, run.version):
            return f"version {run.version} was never published"
        if not on_line(state.lineages, run.version):
            return f"version {run.version} is of an ended lineage"
        if last is not None and run.version < last:
            return f"version {run.version} after {last}"
        last = run.version
    return "" if runs else "no sampled token"
