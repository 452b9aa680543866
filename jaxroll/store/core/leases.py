"""Lease decisions: grant, renew, release, expire. Pure functions of the state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import msgspec

from jaxroll.config.parsing import SOURCE_ITEMS
from jaxroll.errors import Closed, NoCredit, StaleClient, StoreRefusal
from jaxroll.policy.limiter import FETCHES_S, HUNGRY_S, SHORT_S, SLOWER, Health, Rooms, Share, groups_ahead
from jaxroll.policy.routing import may_help, serves
from jaxroll.policy.selection import Curriculum, longest_first, predicted_tokens
from jaxroll.records import Grant, Question, Task
from jaxroll.store.core import admission
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import (
    Settings,
    by_holder,
    free_members,
    is_awaited,
    is_slow,
    kept_groups,
    over,
    window_in_force,
    yields_to,
)
from jaxroll.store.core.state import (
    DONE,
    LEASED,
    FlushedTokens,
    Group,
    Slot,
    State,
    held_bytes,
    outstanding,
    slot_of,
    unpublished_groups,
)

_ASK_AGAIN_S = 0.05


@dataclass
class Decision:
    """Events to log, in order, and the answer: a value, or a StoreRefusal (not raised, because events may go with it).

    `ended` lists the leases (session, key) that the events ended early; it is filled when they are applied.
    """

    events: list[ev.Event] = field(default_factory=list)
    reply: Any = None
    ended: list[tuple[str, ev.Key]] = field(default_factory=list)


def refuse(refusal: StoreRefusal) -> Decision:
    """A decision without events that refuses the request."""
    return Decision(reply=refusal)


def arrive(settings: Settings, state: State, r: ev.Arrive, now_s: float) -> Decision:
    """Register a new process under its name and end the leases of an earlier process with that name."""
    if state.sessions.get(r.name) == r.session and state.pools.get(r.name, "") == r.pool:
        return Decision()
    return Decision(
        [ev.Arrived(r.name, r.session, r.pool), *_ended_leases(state, r.name, "holder restarted", r.session)]
    )


def leave(settings: Settings, state: State, r: ev.Leave, now_s: float) -> Decision:
    """End the leases of a process that leaves; nothing if its name belongs to another process by now."""
    if state.sessions.get(r.name) != r.session:
        return Decision()
    return Decision([ev.Arrived(r.name, ""), *_ended_leases(state, r.name, "released")])


def _ended_leases(state: State, name: str, reason: str, but: str = "") -> list[ev.Event]:
    """The end of all leases of the processes called `name`, but those of the session `but`."""
    events: list[ev.Event] = []
    for group in state.index.lacking.values():
        if lost := [m for m, s in group.missing() if s.status == LEASED and s.holder == name and s.session != but]:
            events.append(ev.LeaseEnded(group.id, tuple(lost), reason))
    return events


# --- leases


def lease(settings: Settings, state: State, r: ev.Lease, now_s: float) -> Decision:
    """Grant members: first those that open groups still miss, then new prompts, up to the in-flight window."""
    refusal = _lease_refusal(settings, state, r)
    if refusal is not None:
        return refuse(refusal)
    if (receipt := state.receipts.get(state.receipt_key(r.session, r.reserved))) and receipt.request == r.request:
        return Decision(reply=ev.Leases(tuple(_granted_again(settings, state, r, receipt.members)), 0))
    if why := admission.refusal(settings, state, r.name, now_s):
        return refuse(NoCredit(why, _ASK_AGAIN_S))
    if not r.reserved and (other := yields_to(settings, state, r.name, now_s)):  # no other may have reserved members
        return refuse(NoCredit(_why_for_another(settings, state, r.name, other), _ASK_AGAIN_S))
    if admission.on_trial(state, r.name):
        r = replace(r, max_members=1)
    taker = admission.MemberChooser(settings, state, r.name, r.version, now_s)
    if r.reserved:
        taker.reserved = True
        events, grants, _, _ = _lease_open(settings, state, r, Share(r.max_members), taker, now_s)
        return Decision(events, ev.Leases(tuple(grants), 0))
    taker.groups = lambda group: _serves(settings, state, r.name, group.task)
    share, used = share_of(settings, state, r, now_s, taker), 0
    events, grants, room, refused = list[ev.Event](), list[Grant](), r.max_members, ev.LEFT
    if share.members:
        events, grants, room, refused = _lease_open(settings, state, r, share, taker, now_s)
    if room > 0 and not refused:
        used, more_events, more_grants, refused = _lease_prompts(settings, state, r, share, room)
        events, grants, room = events + more_events, grants + more_grants, room - _members(more_grants)
    if room > 0 and settings.pools.names:
        more_events, more_grants = _lease_of_other_pools(settings, state, r, room, taker, now_s)
        events, grants = events + more_events, grants + more_grants
    if not grants and not used:
        return _nothing(settings, state, r, refused, now_s)
    return Decision(events, ev.Leases(tuple(grants), used))


def _why_for_another(settings: Settings, state: State, name: str, other: str) -> str:
    if is_slow(settings, state, name):
        return f"slow: {name} holds claims up, and {other} has room"
    share = state.failing.get(name, 0.0)
    return f"unreliable: {share:.0%} of the last members of {name} failed, and {other} has room"


def _members(grants: Iterable[Grant]) -> int:
    return sum(len(grant.members) for grant in grants)


def _lease_refusal(settings: Settings, state: State, r: ev.Lease) -> StoreRefusal | None:
    if reason := over(settings, state):
        return Closed(reason)
    if r.max_members < 1:
        return StoreRefusal(f"max_members = {r.max_members}: ask for at least one")
    if state.sessions.get(r.name, r.session) != r.session:
        return StaleClient(f"another process took the name {r.name}")
    if state.published is None:
        return NoCredit(f"{ev.LAGGING}: lineage {state.lineage} has published none yet", _ASK_AGAIN_S)
    version, newest = r.version, state.published.version
    if version.lineage < newest.lineage:
        return NoCredit(f"{ev.LAGGING}: {version} is of an ended lineage, load {newest} first", _ASK_AGAIN_S)
    if version > newest:
        return StaleClient(f"version {version} was never published here; the newest is {newest}")
    return None


def _granted_again(settings: Settings, state: State, r: ev.Lease, members: Iterable[ev.Key]) -> list[Grant]:
    """The grants of an earlier answer that are still held."""
    kept, grants = dict[int, list[int]](), list[Grant]()
    for group, member, attempt in members:
        slot = slot_of(state.open.get(group), member)
        if slot is not None and slot.status == LEASED and slot.attempt == attempt and slot.session == r.session:
            kept.setdefault(group, []).append(member)
    for group, numbers in kept.items():
        slots = state.open[group].slots
        resumed = [(m, flushed.tokens) for m in numbers if (flushed := slots[m].flushed) is not None]
        grants += _grants(settings, state.open[group], [(m, slots[m].attempt) for m in numbers], resumed)
    return grants


def _lease_open(
    settings: Settings, state: State, r: ev.Lease, share: Share, taker: admission.MemberChooser, now_s: float
) -> tuple[list[ev.Event], list[Grant], int, str]:
    """Lease missing members of open groups.

    Returns events, grants, the remaining share, and the reason why no newer group may be leased ('' if one may).
    """
    events: list[ev.Event] = []
    grants: list[Grant] = []
    room, claimed, total, refused = share.members, unpublished_groups(state), len(state.open), ""
    in_force, newest = window_in_force(settings, state), _published_step(state)
    for group in _lease_order(settings, state):
        if room <= 0:
            break
        free = free_members(group, now_s, taker)
        if not free:
            continue
        place = state.index.place_of(group)
        ahead = claimed + groups_ahead(settings.order, place, total)
        if not settings.limiter.admits(ahead, newest, r.version.step, in_force, state.next_claim - newest):
            if not settings.longest_first:
                return events, grants, room, "window"
            refused = "window"  # an older and shorter one may still be admitted
            continue
        begun = group.leased_at_s is not None or not (settings.longest_first or settings.pools.names)
        count = share.of_group(len(free), room, is_awaited(settings, state, place), begun=begun)
        members = [(m, s.attempt + 1) for m, s in free[:count]]
        resumed = tuple(
            (m, s.flushed.tokens)
            for m, s in free[:count]
            if s.flushed and _resumes(settings, state, s.flushed, r, ahead)
        )
        held = r.name, r.session, r.request, settings.lease_s
        events.append(ev.Leased(group.id, tuple(members), *held, resumed, r.reserved))
        grants += _grants(settings, group, members, resumed)
        room -= len(members)
    return events, grants, room, refused


def _lease_order(settings: Settings, state: State) -> Iterable[Group]:
    """The groups with free members, in the order in which they are leased."""
    groups = state.index.with_free()
    if not settings.longest_first:
        return groups
    waiting, by_source = [*groups], state.lengths.by_source
    run = sum(members for members, _ in by_source.values()), sum(tokens for _, tokens in by_source.values())
    predicted = []
    for group in waiting:
        known = state.questions.get(group.task.question_hash, Question())
        source = by_source.get(group.task.index // SOURCE_ITEMS, (0, 0))
        predicted.append(predicted_tokens((known.members, known.tokens), source, run))
    places = [state.index.place_of(group) for group in waiting]
    limiter = settings.limiter
    return [waiting[i] for i in longest_first(places, predicted, limiter.batch_groups + limiter.redundant_groups)]


def _lease_of_other_pools(
    settings: Settings, state: State, r: ev.Lease, room: int, taker: admission.MemberChooser, now_s: float
) -> tuple[list[ev.Event], list[Grant]]:
    """Lease members of groups that other pools prefer, if none of their samplers has room, or soon has new weights."""
    with_room = {pool for pool, _ in _rooms(state, r.name, now_s, state.hungry)}
    if admission.leaves_work(state, r.name, now_s):
        idle = (name for name in state.behind if state.by_holder.rooms_of(name).fetching)
        with_room |= {state.pools.get(name, "") for name in idle}

    def may_lease(group: Group) -> bool:
        work = admission.pool_of(settings, group.task)
        return not serves(state.pools.get(r.name, ""), work) and may_help(work, with_room)

    taker.groups = may_lease
    events, grants, _, _ = _lease_open(settings, state, r, Share(room), taker, now_s)
    return events, grants


def _resumes(settings: Settings, state: State, flushed: FlushedTokens, r: ev.Lease, ahead: int) -> bool:
    """True if the caller may continue after these tokens; otherwise it starts the member again.

    Tokens that would be too old when their group is trained are discarded, unless the rule is to mask them.
    """
    first, last = flushed.runs[0].version, flushed.runs[-1].version
    if last > r.version or (settings.one_version and first < r.version):
        return False
    in_force, newest = window_in_force(settings, state), _published_step(state)
    fresh = settings.limiter.admits(ahead, newest, first.step, in_force, state.next_claim - newest)
    return fresh or settings.on_stale == "mask"


def _lease_prompts(
    settings: Settings, state: State, r: ev.Lease, share: Share, room: int
) -> tuple[int, list[ev.Event], list[Grant], str]:
    """Lease members of new groups. Returns prompts used, events, grants, and the reason why there are not more."""
    events: list[ev.Event] = []
    grants: list[Grant] = []
    unclaimed, claimed = len(state.open), unpublished_groups(state)
    size, used, issued = settings.members_leased, 0, 0
    leased_again = share.members - room
    budget_bytes = settings.retention_bytes - held_bytes(state) - leased_again * state.member_bytes
    while room > 0:
        spare_bytes = budget_bytes - issued * size * state.member_bytes
        why = _issue_refusal(settings, state, unclaimed + issued, claimed, r.version.step, spare_bytes)
        # Not while no group may be issued: until then, the results of the questions may change.
        if (passed := _passed(state, r, used, Curriculum() if why else settings.curriculum)) is not None:
            events.append(passed)
            used = passed.ordinal - state.next_ordinal + 1
        if why or used == len(r.prompts):
            return used, events, grants, why or "prompts"
        task, cursor = r.prompts[used]
        group = Group(state.next_group + issued, task, [Slot() for _ in range(size)])
        awaited = is_awaited(settings, state, unclaimed + issued)
        events.append(ev.Issued(group.id, task, size, cursor=cursor, wanted=settings.members_wanted))
        used, issued = used + 1, issued + 1
        if settings.longest_first:  # issue the claim first; the call is decided again, and leases from all of it
            claims = (unclaimed + issued) % (settings.limiter.batch_groups + settings.limiter.redundant_groups)
            if claims == 0 and issued * size >= room:
                return used, events, grants, ""
            continue
        if not _serves(settings, state, r.name, task):
            continue  # its own pool leases it
        members = [(m, 1) for m in range(share.of_group(size, room, awaited, begun=False))]
        events.append(ev.Leased(group.id, tuple(members), r.name, r.session, r.request, settings.lease_s))
        grants += _grants(settings, group, members)
        room -= len(members)
    return used, events, grants, ""


def _passed(state: State, r: ev.Lease, used: int, curriculum: Curriculum) -> ev.Skipped | None:
    """Skip offered prompts from `used` on, up to the first that was not trained on before a fork and is admitted."""
    place, refused = used, 0
    while place < len(r.prompts):
        if (ordinal := state.next_ordinal + place) not in state.passed:
            if _admitted(state, curriculum, r.prompts[place][0], ordinal):
                break
            refused += 1
        place += 1
    if place == used:
        return None
    return ev.Skipped(state.next_ordinal + place - 1, r.prompts[place - 1][1], refused)


def _admitted(state: State, curriculum: Curriculum, task: Task, ordinal: int) -> bool:
    known = state.questions.get(task.question_hash)
    return known is None or curriculum.admits(known.reward_mean, known.last_step, state.next_claim, ordinal)


def _issue_refusal(settings: Settings, state: State, unclaimed: int, claimed: int, step: int, spare_bytes: int) -> str:
    """The reason why one more prompt must not be issued while `unclaimed` groups are open; '' if it may."""
    limiter, newest = settings.limiter, _published_step(state)
    in_force = window_in_force(settings, state)
    if not limiter.admits(unclaimed + claimed, newest, step, in_force, state.next_claim - newest):
        return "window"
    per_claim = limiter.batch_groups + limiter.redundant_groups
    if unclaimed >= (settings.steps - state.next_claim) * per_claim:
        return "enough for the steps that are left"
    # The next claim always gets its groups. Otherwise a full budget would wait for a checkpoint that waits for a claim.
    if unclaimed < per_claim:
        return ""
    is_full = 0 < limiter.buffer_groups <= kept_groups(state) - len(state.open) + unclaimed
    return "retention" if is_full or spare_bytes <= 0 else ""


def _nothing(settings: Settings, state: State, r: ev.Lease, refused: str, now_s: float) -> Decision:
    """A decision that grants nothing, for the reason `refused`."""
    lag, why = _published_step(state) - r.version.step, refused or "window"
    if refused == "window" and lag > 0:
        why = f"{ev.LAGGING}: {r.version} is {lag} behind"
    elif refused == "window":
        why = f"window: {outstanding(state)} groups outstanding of {window_in_force(settings, state)}"
    elif refused == "prompts" and state.data_ended:
        why = "end of data: what is leased or resting comes first"
    unlogged = _seen(state, r, now_s) + _hunger(settings, state, r, refused, now_s)
    return Decision(unlogged, NoCredit(why, _ASK_AGAIN_S))


def _seen(state: State, r: ev.Lease, now_s: float) -> list[ev.Event]:
    """Note that a sampler with the newest weights is present, at most once per `SEEN_EVERY_S`."""
    before_s = state.seen_s.get(r.name, -math.inf)
    due = r.version.step >= _published_step(state) and now_s - before_s >= admission.SEEN_EVERY_S
    return [ev.Seen(r.name)] if due else []


def _hunger(settings: Settings, state: State, r: ev.Lease, refused: str, now_s: float) -> list[ev.Event]:
    """Note if the full window is the only reason why this sampler gets no lease; with pools for any reason. One that
    fetches newer weights has room as well, until it has worked at nothing for `FETCHES_S`."""
    fetches = now_s - state.seen_s.get(r.name, -math.inf) <= FETCHES_S
    hungry = refused == "window" or (bool(settings.pools.names) and refused != ev.LEFT)
    if lag := _published_step(state) - r.version.step:
        return [ev.Hungry(r.name, ev.LAGGING, r.max_members, lag == 1)] if hungry and fetches else []
    return [ev.Hungry(r.name, "window" * hungry, r.max_members)] if hungry or r.name in state.rooms else []


def _grants(
    settings: Settings, group: Group, members: list[tuple[int, int]], resumed: Iterable[tuple[int, int]] = ()
) -> list[Grant]:
    """One grant for each salt among `members` (each DATA failure gives a member a new salt)."""
    by_salt: dict[int, list[tuple[int, int]]] = {}
    for member, attempt in members:
        by_salt.setdefault(group.slots[member].salt, []).append((member, attempt))
    tokens = dict(resumed)
    resumed_of = {salt: tuple((m, tokens[m]) for m, _ in some if m in tokens) for salt, some in by_salt.items()}
    return [
        Grant(group.id, group.task, tuple(some), settings.lease_s, salt, resumed_of[salt])
        for salt, some in by_salt.items()
    ]


# --- the share of the available work that one holder may lease


def share_of(settings: Settings, state: State, r: ev.Lease, now_s: float, taker: admission.MemberChooser) -> Share:
    """The caller's share if other samplers have room too; all that it has room for if it is alone."""
    if settings.pools.names:
        own, asked = state.pools.get(r.name, ""), _rooms(state, r.name, now_s, state.hungry | state.behind)
        others = Rooms.sum(rooms for pool, rooms in asked if serves(pool, own))
    else:
        others = by_holder(settings, state).rooms_of_others(r.name, now_s)
    if others.room == 0:
        return Share(r.max_members)
    available = _available(settings, state, r, r.max_members + others.room, now_s, taker)
    others = others if admission.leaves_work(state, r.name, now_s) else others._replace(fetching=0)
    return Share(r.max_members, others, available, settings.replicate, len(state.index.leased_to(r.name)))


def _available(
    settings: Settings, state: State, r: ev.Lease, enough: int, now_s: float, taker: admission.MemberChooser
) -> int:
    """The number of members that may be leased at the caller's version, free or of new groups; counts to `enough`."""
    assert state.published is not None
    newest, in_force = state.published.version.step, window_in_force(settings, state)
    claimed, unclaimed = unpublished_groups(state), len(state.open)
    bound, found = settings.limiter.bound(newest, r.version.step, in_force, state.next_claim - newest), 0
    for group in state.index.with_free():
        if free := free_members(group, now_s, taker):
            place = state.index.place_of(group)
            if claimed + groups_ahead(settings.order, place, unclaimed) >= bound:
                return found
            found += len(free)
    per_claim = settings.limiter.batch_groups + settings.limiter.redundant_groups
    last = (settings.steps - state.next_claim) * per_claim
    new = max(0, min(last, bound - claimed) - unclaimed)
    if settings.pools.names:
        new = sum(_serves(settings, state, r.name, task) for task, _ in r.prompts[:new])
    return found + settings.members_leased * min(new, max(0, -(-(enough - found) // settings.members_leased)))


def _rooms(state: State, but: str, now_s: float, asked: Mapping[str, float]) -> list[tuple[str, Rooms]]:
    """Pool and room of each holder other than `but` that `asked` within `HUNGRY_S`."""
    return [
        (state.pools.get(name, ""), state.by_holder.rooms_of(name))
        for name, at_s in asked.items()
        if name != but and now_s - at_s <= HUNGRY_S
    ]


def _serves(settings: Settings, state: State, name: str, task: Task) -> bool:
    """True if `name` takes this task without regard to other pools."""
    return not settings.pools.names or serves(state.pools.get(name, ""), admission.pool_of(settings, task))


# --- renewal, return and end of leases


def renew(settings: Settings, state: State, r: ev.Renew, now_s: float) -> Decision:
    """Extend the leases that the session still holds; the answer lists those it lost."""
    kept: list[tuple[int, int]] = []
    lost: list[ev.Key] = []
    for group, member, attempt in r.members:
        slot = slot_of(state.open.get(group), member)
        if slot is not None and slot.status == LEASED and slot.attempt == attempt and slot.session == r.session:
            kept.append((group, member))
        elif slot is None or slot.status != DONE or slot.attempt != attempt:  # a member it has put is not lost
            lost.append((group, member, attempt))
    return Decision([ev.Renewed(tuple(kept), settings.lease_s)] if kept else [], tuple(lost))


def release(settings: Settings, state: State, r: ev.Release, now_s: float) -> Decision:
    """Free members that their holder gives back, for another one if that is present."""
    to = r.to if state.sessions.get(r.to) else ""
    given: dict[int, list[int]] = {}
    for group, member, attempt in r.members:
        slot = slot_of(state.open.get(group), member)
        if slot is not None and slot.status == LEASED and slot.attempt == attempt:
            given.setdefault(group, []).append(member)
    ends = [ev.LeaseEnded(group, tuple(some), "released", reserved_for=to) for group, some in given.items()]
    return Decision([*ends, *([ev.Hungry(r.away, ev.AWAY)] if r.away else [])])


def tick(settings: Settings, state: State, r: ev.Tick, now_s: float) -> Decision:
    """End expired leases and slow ones; after a stall of the store, first extend all leases by its length."""
    if r.stalled_s > 0:
        return Decision([ev.Extended(r.stalled_s)])
    events: list[ev.Event] = []
    for group in state.index.lacking.values():
        if late := [m for m, s in group.missing() if s.status == LEASED and s.deadline_s <= now_s]:
            events.append(ev.LeaseEnded(group.id, tuple(late), "expired"))
    return Decision(events + _too_slow(settings, state, now_s))


def _too_slow(settings: Settings, state: State, now_s: float) -> list[ev.Event]:
    """The ends of leases that the learner waits for and that take much longer than others, of holders that rested.

    Each counts as a failure.
    """
    events: list[ev.Event] = []
    known: dict[str, Health] = {}  # with the ends so far
    head = state.open.values() if state.awaited_at_s is not None else ()
    for group in itertools.islice(head, settings.limiter.batch_groups):
        for member, slot in group.missing():
            if slot.status != LEASED or slot.deadline_s <= now_s or not _takes_long(settings, state, slot, now_s):
                continue
            health = known.setdefault(slot.holder, msgspec.structs.replace(state.holders[slot.holder]))
            if (rest_s := health.next_rest_s(slot.leased_at_s, now_s)) is not None:
                health.note_failure(rest_s, health.error, now_s)
            events.append(ev.LeaseEnded(group.id, (member,), "too slow", rest_s))
    return events


def _takes_long(settings: Settings, state: State, slot: Slot, now_s: float) -> bool:
    """True if the slot's holder has rested and its lease takes `SLOWER` times as long as the members of others."""
    health = state.holders.get(slot.holder)
    if health is None or not health.rests or slot.leased_at_s is None:
        return False
    is_other = admission.holder_filter(settings, state, slot.holder, now_s)
    means_s = [mean_s for mean_s, other in state.by_holder.quickest() if is_other(other)]
    return bool(means_s) and now_s - slot.leased_at_s > max(SHORT_S, SLOWER * median(means_s))


def _published_step(state: State) -> int:
    assert state.published is not None
    return state.published.version.step
