"""Decisions about work: leases, renewals, what time ends. Pure functions of the state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxroll.errors import Closed, NoCredit, StaleClient, StoreRefusal
from jaxroll.records import Grant
from jaxroll.schedule.order import groups_ahead
from jaxroll.store import events as ev
from jaxroll.store import requests as rq
from jaxroll.store.settings import Settings
from jaxroll.store.state import (
    DONE,
    FREE,
    LEASED,
    Group,
    Slot,
    State,
    held_bytes,
    outstanding,
    slot_of,
    unpublished_groups,
)

LAGGING = "weights"  # the reason of a NoCredit that newer weights would mend
_ASK_AGAIN_S = 0.05


@dataclass
class Decision:
    """Events to log, in order, and the answer: a value, or a StoreRefusal (not raised: events may go with it)."""

    events: list[ev.Event] = field(default_factory=list)
    reply: Any = None


def refuse(refusal: StoreRefusal) -> Decision:
    """No events, this refusal."""
    return Decision(reply=refusal)


def arrive(settings: Settings, state: State, r: rq.Arrive, now_s: float) -> Decision:
    """A new process under an old name: the old one is gone, and so are its leases."""
    if state.sessions.get(r.name) == r.session:
        return Decision()
    events: list[ev.Event] = [ev.Arrived(r.name, r.session)]
    for group in state.open.values():
        lost = [m for m, s in group.missing() if s.status == LEASED and s.holder == r.name and s.session != r.session]
        if lost:
            events.append(ev.LeaseEnded(group.id, tuple(lost), "holder restarted"))
    return Decision(events)


# --- leases


def lease(settings: Settings, state: State, r: rq.Lease, now_s: float) -> Decision:
    """Members to produce: first what groups in progress still miss, then new prompts, as far as the window goes."""
    refusal = _lease_refusal(settings, state, r)
    if refusal is not None:
        return refuse(refusal)
    receipt = state.receipts.get(r.session)
    if receipt is not None and receipt.request == r.request:
        return Decision(reply=rq.Leases(tuple(_granted_again(settings, state, r, receipt.members)), 0))
    events, grants, room, refused = _lease_open(settings, state, r, now_s)
    used = 0
    if room > 0 and not refused:
        used, more_events, more_grants, refused = _lease_prompts(settings, state, r, room)
        events, grants = events + more_events, grants + more_grants
    if not grants:
        return refuse(_no_credit(settings, state, r, refused, now_s))
    return Decision(events, rq.Leases(tuple(grants), used))


def _lease_refusal(settings: Settings, state: State, r: rq.Lease) -> StoreRefusal | None:
    if state.closed:
        return Closed(state.closed)
    if state.acked >= settings.steps:
        return Closed("finished")
    if state.data_ended and not state.open and state.acked >= state.next_claim:
        return Closed("end of data")
    if r.max_members < 1:
        return StoreRefusal(f"max_members = {r.max_members}: ask for at least one")
    if state.sessions.get(r.name, r.session) != r.session:
        return StaleClient(f"another process took the name {r.name}")
    if state.published is None:
        return NoCredit(f"{LAGGING}: lineage {state.lineage} has published none yet", _ASK_AGAIN_S)
    version, newest = r.version, state.published.version
    if version.lineage < newest.lineage:
        return NoCredit(f"{LAGGING}: {version} is of an ended lineage, flip to {newest} first", _ASK_AGAIN_S)
    if version > newest:
        return StaleClient(f"version {version} was never published here; the newest is {newest}")
    return None


def _granted_again(settings: Settings, state: State, r: rq.Lease, members: Iterable[rq.Key]) -> list[Grant]:
    """What of an earlier answer still holds."""
    kept: dict[int, list[int]] = {}
    for group, member, attempt in members:
        slot = slot_of(state.open.get(group), member)
        if slot is not None and slot.status == LEASED and slot.attempt == attempt and slot.session == r.session:
            kept.setdefault(group, []).append(member)
    grants = []
    for group, numbers in kept.items():
        slots = state.open[group].slots
        grants += _grants(settings, state.open[group], [(m, slots[m].attempt) for m in numbers])
    return grants


def _lease_open(
    settings: Settings, state: State, r: rq.Lease, now_s: float
) -> tuple[list[ev.Event], list[Grant], int, str]:
    """Events and grants for missing members, the room left, and why nothing newer may be leased ('' if it may)."""
    events: list[ev.Event] = []
    grants: list[Grant] = []
    room, claimed, total = r.max_members, unpublished_groups(state), len(state.open)
    for place, group in enumerate(state.open.values()):
        if room == 0:
            break
        free = [(m, s) for m, s in group.missing() if s.status == FREE and s.rests_until_s <= now_s][:room]
        if not free:
            continue
        ahead = claimed + groups_ahead(settings.order, place, total)
        if not settings.limiter.admits(ahead, _published_step(state), r.version.step):
            return events, grants, room, "window"
        members = [(m, s.attempt + 1) for m, s in free]
        events.append(ev.Leased(group.id, tuple(members), r.name, r.session, r.request, settings.lease_s))
        grants += _grants(settings, group, members)
        room -= len(members)
    return events, grants, room, ""


def _lease_prompts(
    settings: Settings, state: State, r: rq.Lease, room: int
) -> tuple[int, list[ev.Event], list[Grant], str]:
    """Prompts used, events and grants for new groups, and why there are not more."""
    events: list[ev.Event] = []
    grants: list[Grant] = []
    unclaimed, claimed = len(state.open), unpublished_groups(state)
    size, used = settings.group_size, 0
    budget_bytes = settings.retention_bytes - held_bytes(state)
    while room > 0:
        spare_bytes = budget_bytes - used * size * state.member_bytes
        why = _issue_refusal(settings, state, unclaimed + used, claimed, r.version.step, spare_bytes)
        if why or used == len(r.prompts):
            return used, events, grants, why or "prompts"
        task, cursor = r.prompts[used]
        group = Group(state.next_group + used, task, [Slot() for _ in range(size)])
        members = [(m, 1) for m in range(min(room, size))]
        events.append(ev.Issued(group.id, task, size, cursor=cursor))
        events.append(ev.Leased(group.id, tuple(members), r.name, r.session, r.request, settings.lease_s))
        grants += _grants(settings, group, members)
        used += 1
        room -= len(members)
    return used, events, grants, ""


def _issue_refusal(settings: Settings, state: State, unclaimed: int, claimed: int, step: int, spare_bytes: int) -> str:
    """Why one more prompt must not be issued when `unclaimed` groups are open; '' when it may."""
    limiter = settings.limiter
    if not limiter.admits(unclaimed + claimed, _published_step(state), step):
        return "window"
    per_claim = limiter.batch_groups + limiter.redundant_groups
    if unclaimed >= (settings.steps - state.next_claim) * per_claim:
        return "enough for the steps that are left"
    # The next claim always gets its groups, or a full budget would wait for a checkpoint that waits for the claim.
    return "retention" if unclaimed >= per_claim and spare_bytes <= 0 else ""


def _no_credit(settings: Settings, state: State, r: rq.Lease, refused: str, now_s: float) -> StoreRefusal:
    lag = _published_step(state) - r.version.step
    if refused == "window" and lag > 0:
        return NoCredit(f"{LAGGING}: {r.version} is {lag} behind", _ASK_AGAIN_S)
    if refused == "window":
        waiting = outstanding(state)
        return NoCredit(f"window: {waiting} groups outstanding of {settings.limiter.window(0)}", _ASK_AGAIN_S)
    if refused == "prompts" and state.data_ended:
        return NoCredit("end of data: what is leased or resting comes first", _ASK_AGAIN_S)
    return NoCredit(refused or "window", _ASK_AGAIN_S)


def _grants(settings: Settings, group: Group, members: list[tuple[int, int]]) -> list[Grant]:
    """One grant for each key salt among `members` (a DATA failure changes a member's salt)."""
    by_salt: dict[int, list[tuple[int, int]]] = {}
    for member, attempt in members:
        by_salt.setdefault(group.slots[member].data_failures, []).append((member, attempt))
    return [Grant(group.id, group.task, tuple(some), settings.lease_s, salt) for salt, some in by_salt.items()]


def renew(settings: Settings, state: State, r: rq.Renew, now_s: float) -> Decision:
    """Extends what the session still holds; answers with what it lost."""
    kept: list[tuple[int, int]] = []
    lost: list[rq.Key] = []
    for group, member, attempt in r.members:
        slot = slot_of(state.open.get(group), member)
        if slot is not None and slot.status == LEASED and slot.attempt == attempt and slot.session == r.session:
            kept.append((group, member))
        elif slot is None or slot.status != DONE or slot.attempt != attempt:  # a put on its way is not a loss
            lost.append((group, member, attempt))
    return Decision([ev.Renewed(tuple(kept), settings.lease_s)] if kept else [], tuple(lost))


def release(settings: Settings, state: State, r: rq.Release, now_s: float) -> Decision:
    """Members that will not be produced by this holder."""
    given: dict[int, list[int]] = {}
    for group, member, attempt in r.members:
        slot = slot_of(state.open.get(group), member)
        if slot is not None and slot.status == LEASED and slot.attempt == attempt:
            given.setdefault(group, []).append(member)
    return Decision([ev.LeaseEnded(group, tuple(members), "released") for group, members in given.items()])


def tick(settings: Settings, state: State, r: rq.Tick, now_s: float) -> Decision:
    """Ends leases that ran out; a store that stood still forgives everyone that time first."""
    if r.stalled_s > 0:
        return Decision([ev.Extended(r.stalled_s)])
    events: list[ev.Event] = []
    for group in state.open.values():
        late = [m for m, s in group.missing() if s.status == LEASED and s.deadline_s <= now_s]
        if late:
            events.append(ev.LeaseEnded(group.id, tuple(late), "expired"))
    return Decision(events)


def _published_step(state: State) -> int:
    assert state.published is not None
    return state.published.version.step
