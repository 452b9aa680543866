"""State machine: decide a request, apply the events of the decision, return them for the log.

Applying is deterministic and total, so that replaying the log restores the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jaxroll.config.parsing import SOURCE_ITEMS
from jaxroll.policy.limiter import KEPT_BY_CLAIM, MEAN_KEPT_BY_CLAIM
from jaxroll.records import Cut, Question, Version, recent_mean_s, touch
from jaxroll.store.core import events as ev
from jaxroll.store.core import leases, puts, training
from jaxroll.store.core.admission import FILTERED, RESERVED_S, Settings
from jaxroll.store.core.events import Key
from jaxroll.store.core.leases import Decision
from jaxroll.store.core.state import (
    DROPPED,
    FREE,
    LEASED,
    NAMES_KNOWN,
    Batch,
    Group,
    LeaseReceipt,
    Lineage,
    Slot,
    State,
    base_step,
    keep_newest,
    no_room,
    note_seen,
)

_DECIDERS: dict[type, Callable[[Settings, State, Any, float], Decision]] = {
    ev.Arrive: leases.arrive,
    ev.Leave: leases.leave,
    ev.Lease: leases.lease,
    ev.Renew: leases.renew,
    ev.Release: leases.release,
    ev.PutMember: puts.put,
    ev.Flush: puts.flush,
    ev.Tick: leases.tick,
    ev.ClaimStep: training.claim,
    ev.Begin: training.begin,
    ev.Publish: training.publish,
    ev.Ack: training.ack,
    ev.Durable: training.durable,
    ev.EndData: training.end_data,
    ev.Close: training.close,
    ev.Open: training.open_run,
}


def decide(settings: Settings, state: State, request: ev.Request, now_s: float) -> Decision:
    """Return the events that `request` causes and its answer, without changing `state`."""
    return _DECIDERS[type(request)](settings, state, request, now_s)


class Core:
    """Settings and state of the run. Use it from one thread; time is an argument."""

    def __init__(self, settings: Settings, state: State | None = None) -> None:
        self.settings = settings
        self.state = state or State()

    @classmethod
    def recovered(cls, settings: Settings, state: State | None, events: Iterable[ev.Event], now_s: float) -> Core:
        """The machine after `state` and then `events`; every open lease gets its full time from `now_s`."""
        begun = rebased(state, now_s, settings.lease_s) if state is not None else State(moved_at_s=now_s)
        return cls(settings, rebased(replay(begun, events, now_s), now_s, settings.lease_s))

    def handle(self, request: ev.Request, now_s: float) -> Decision:
        """Decide and apply. The caller must make the events durable before it sends the answer."""
        decision = decide(self.settings, self.state, request, now_s)
        for event in decision.events:
            decision.ended += ended_by(self.state, event)
            apply(self.state, event, now_s)
        return decision


def rebased(state: State, now_s: float, lease_s: float) -> State:
    """Move `state` to a clock that shows `now_s` and return it: leases get their full time, rests and waits end."""
    for group in state.open.values():
        if group.leased_at_s is not None:
            group.leased_at_s = now_s
        for slot in group.slots:
            slot.rests_until_s = slot.avoided_until_s = 0.0
            slot.reserved_for, slot.leased_at_s = "", None
            if slot.status == LEASED:
                slot.deadline_s = now_s + lease_s
    state.moved_at_s = state.published_at_s = now_s
    state.claimed_at_s = state.awaited_at_s = None
    for name in list(state.rooms):
        no_room(state, name)
    for known in (state.idle_s, state.seen_s, state.away):
        known.clear()
    for health in state.holders.values():
        health.rested_at_s = None
    return state


# --- leases that the store ends early (abort)
#
# Expired leases are not among them, because their puts still count; neither are leases that the holder released or put.

Ending = tuple[str, Key]  # session, (group, member, attempt)


def ended_by(state: State, event: ev.Event) -> list[Ending]:
    """The leases that `event` (not applied yet) takes from their holders."""
    match event:
        case ev.Shrunk(group=gid, dropped=members) | ev.Aborted(group=gid, members=members):
            return _leases(state.open[gid], members)
        case ev.Expired(group=gid) | ev.Died(group=gid):
            group = state.find(gid)
            return _leases(group, range(len(group.slots))) if group is not None else []
        case ev.Began(parent=parent) if parent is not None:
            return [lease for group in state.open.values() for lease in _leases(group, range(len(group.slots)))]
    return []


def _leases(group: Group, members: Iterable[int]) -> list[Ending]:
    slots = ((member, group.slots[member]) for member in members)
    return [(slot.session, (group.id, m, slot.attempt)) for m, slot in slots if slot.status == LEASED]


# --- the effect of each event on the state


def apply(state: State, event: ev.Event, now_s: float) -> None:
    """Change `state` by `event`, which happened at `now_s`."""
    _EFFECTS[type(event)](state, event, now_s)
    if not isinstance(event, ev.NOT_LOGGED):
        state.position += 1


def replay(state: State, events: Iterable[ev.Event], now_s: float) -> State:
    """Apply `events` to `state` and return it; leases among them start at `now_s`."""
    for event in events:
        apply(state, event, now_s)
    return state


def _issued(state: State, e: ev.Issued, now_s: float) -> None:
    ordinal = state.next_ordinal if e.ordinal < 0 else e.ordinal
    slots = [Slot() for _ in range(e.size)]
    group = state.open[e.group] = Group(e.group, e.task, slots, e.reissue_of, e.reissues, ordinal, e.wanted)
    state.index.add(group)
    state.next_group = e.group + 1
    state.issued += 1
    touch(state.questions, e.task.question_hash).issued += 1
    if e.reissue_of is None:
        state.prompts_issued += 1
        _advance_prompts(state, ordinal, e.cursor)
    else:
        reissues = state.lengths.reissues
        reissues[e.length] = reissues.get(e.length, 0) + 1


def _advance_prompts(state: State, ordinal: int, cursor: bytes | None) -> None:
    """Mark the prompts up to `ordinal` as used; `cursor` is the pipeline's state after it."""
    state.cursor, state.next_ordinal = cursor, ordinal + 1
    if cursor is not None:
        state.stream[ordinal] = cursor


def _skipped(state: State, e: ev.Skipped, now_s: float) -> None:
    _advance_prompts(state, e.ordinal, e.cursor)
    state.curriculum_skipped += e.curriculum
    state.passed = {ordinal for ordinal in state.passed if ordinal > e.ordinal}


def _leased(state: State, e: ev.Leased, now_s: float) -> None:
    group = state.open[e.group]
    if group.leased_at_s is None:
        group.leased_at_s = now_s
    resumed = dict(e.resumed)
    state.members_resumed, state.tokens_resumed = (
        state.members_resumed + len(resumed),
        state.tokens_resumed + sum(resumed.values()),
    )
    for member, attempt in e.members:
        slot = group.slots[member]
        slot.flushed = slot.flushed if member in resumed else None
        slot.status, slot.attempt, slot.holder, slot.session = LEASED, attempt, e.holder, e.session
        slot.deadline_s, slot.rests_until_s, slot.leased_at_s = now_s + e.ttl_s, 0.0, now_s
        slot.reserved_for = ""
    note_seen(state, e.holder, now_s)
    state.index.update(group)
    state.away.discard(e.holder)
    no_room(state, e.holder)
    receipt = state.receipts.get(key := state.receipt_key(e.session, e.reserved))
    if receipt is None or receipt.request != e.request:
        receipt = state.receipts[key] = LeaseReceipt(e.request, ())
    receipt.members += tuple((e.group, member, attempt) for member, attempt in e.members)


def _lease_ended(state: State, e: ev.LeaseEnded, now_s: float) -> None:
    group = state.open[e.group]
    for member in e.members:
        slot = group.slots[member]
        slot.status, slot.reserved_for = FREE, e.reserved_for
        slot.rests_until_s = now_s + RESERVED_S if e.reserved_for else 0.0
        if e.holder_rest_s is not None:
            puts.note_too_slow(state, slot.holder, e.holder_rest_s, now_s)
    state.index.update(group)


def _shrunk(state: State, e: ev.Shrunk, now_s: float) -> None:
    group = state.open[e.group]
    for member in e.dropped:
        group.slots[member].status, group.slots[member].flushed = DROPPED, None
    group.note = e.reason
    state.shrunk += 1
    state.index.update(group)
    puts.note_ready(state, group)


def _aborted(state: State, e: ev.Aborted, now_s: float) -> None:
    group = state.open[e.group]
    for member in e.members:
        group.slots[member].status, group.slots[member].flushed = DROPPED, None
    state.aborted_members += len(e.members)
    state.index.update(group)
    puts.note_ready(state, group)


def _expired(state: State, e: ev.Expired, now_s: float) -> None:
    group = state.open.pop(e.group, None) or state.held.pop(e.group)
    state.index.remove(group)
    kind = e.reason.partition(":")[0]
    state.expired[kind] = state.expired.get(kind, 0) + 1
    if kind == FILTERED:
        state.filtered += 1
        _count_rewards(state, group)
    _lost(state, group, kind)


def _died(state: State, e: ev.Died, now_s: float) -> None:
    group = state.open.pop(e.group)
    state.index.remove(group)
    state.dead, state.died = state.dead + 1, state.died + 1
    _lost(state, group, "dead")


def _lost(state: State, group: Group, reason: str) -> None:
    """Count the finished members of a group that ended untrained."""
    state.tokens_expired[reason] = state.tokens_expired.get(reason, 0) + group.tokens
    members = sum(1 for _ in group.done())
    if group.step is not None:  # a fork ended its claim
        state.lengths.trained_tokens -= group.tokens
        state.lengths.trained_members -= members
    state.lengths.lost_tokens += group.tokens
    state.lengths.lost_members += members


def _claimed(state: State, e: ev.Claimed, now_s: float) -> None:
    for gid in e.groups:
        group = state.held[gid] = state.open.pop(gid)
        state.index.close(group)
        group.step = e.step
        _count_trained(state, group)
    if (cut := training.cut_of(state)) is not None:
        state.claim_cuts[e.step] = cut
        state.stream = {ordinal: after for ordinal, after in state.stream.items() if ordinal >= cut.ordinal - 1}
    state.batches[e.step] = Batch(e.step, e.groups, e.shuffle_seed)
    state.next_claim, state.filtered, state.died = e.step + 1, 0, 0
    state.tokens_masked += e.masked_tokens
    state.pace = e.pace if e.pace is not None else state.pace
    at_once = not state.step_s and e.step == 1 and state.acked < e.step  # claims 0 and 1 were ready at the start
    if e.worked_s > 0 and not at_once:
        state.step_s = recent_mean_s(state.step_s, e.worked_s)
    state.failing = {name: kept for name, share in state.failing.items() if (kept := KEPT_BY_CLAIM * share) > 0.001}
    for name in state.member_s:
        if not state.index.leased_to(name):
            state.member_s[name] *= MEAN_KEPT_BY_CLAIM
    for recent in state.recent_s.values():
        recent.done /= 2
    state.by_holder.set_failing(state.failing)
    state.claimed_at_s, state.awaited_at_s = now_s, None
    state.moved_at_s = now_s


def _count_trained(state: State, group: Group) -> None:
    state.lengths.trained_tokens += group.tokens
    state.lengths.trained_members += sum(1 for _ in group.done())
    row = _count_rewards(state, group)
    row.trained, row.last_step = row.trained + 1, group.step


def _count_rewards(state: State, group: Group) -> Question:
    """Add the group's finished members to the row of its question and return the row."""
    rewards = [slot.reward for _, slot in group.done()]
    row = touch(state.questions, group.task.question_hash)
    row.members, row.reward_sum = row.members + len(rewards), row.reward_sum + sum(rewards)
    row.tokens += group.tokens
    by_source, source = state.lengths.by_source, group.task.index // SOURCE_ITEMS
    members, tokens = by_source.get(source, (0, 0))
    by_source[source] = members + len(rewards), tokens + group.tokens
    return row


def _acked(state: State, e: ev.Acked, now_s: float) -> None:
    for gid in state.batches[e.version.step].groups:
        state.held[gid].acked = True
    state.acked = e.version.step + 1
    state.moved_at_s = now_s


def _made_durable(state: State, e: ev.MadeDurable, now_s: float) -> None:
    training.keep_cut(state, e.version)
    for step in range(state.durable, e.version.step):
        for gid in state.batches[step].groups:
            state.index.remove(state.held.pop(gid))
            state.trimmed += 1
    state.durable = e.version.step
    state.moved_at_s = now_s
    _forget_batches(state)


def _forget_batches(state: State) -> None:
    """Delete the batches that are both durable and published; neither replay nor admission needs them."""
    keep_from = min(state.durable, base_step(state))
    for step in [step for step in state.batches if step < keep_from]:
        del state.batches[step]


def _published(state: State, e: ev.Published, now_s: float) -> None:
    is_newer = state.published is None or state.published.version != e.ref.version
    state.published = e.ref
    line = state.lineages[e.ref.version.lineage]
    line.newest = max(e.ref.version.step, -1 if line.newest is None else line.newest)
    state.moved_at_s = now_s
    if is_newer:  # those that were refused at the version before begin to fetch; others have not even that one
        state.published_at_s = now_s
        fetching = {name: at_s for name, at_s in state.hungry.items() if name not in state.behind}
        state.behind.update(fetching)
        state.by_holder.note_published(fetching)
    _forget_batches(state)


def _began(state: State, e: ev.Began, now_s: float) -> None:
    state.learner = e.learner
    state.claimed_at_s = state.awaited_at_s = None
    state.replay_until = state.next_claim
    state.moved_at_s = now_s
    if e.parent is None:
        return
    if e.log is not None:
        if not e.log.is_sound:  # of a damaged log; the queries of lineages would not end
            raise ValueError("a lineage has left a later one")
        state.lineages[:] = [Lineage(*line) for line in e.log.lines]
        state.next_group = max(state.next_group, e.log.cut.groups)
        state.cuts[str(training.origin(state.lineages, Version(e.parent, e.version.step)))] = e.log.cut
    state.lineages.append(Lineage(e.parent, e.version.step, fork=e.fork))
    if e.cut is not None:
        _forked(state, e.version, e.cut)
    state.published = None
    state.acked = e.version.step
    for group in state.held.values():
        group.acked = group.step is not None and group.step < e.version.step
    for group in state.open.values():
        for _, slot in group.missing():  # the holder samples in a lineage that has ended
            slot.status, slot.fenced, slot.flushed = FREE, slot.attempt, None
        state.index.update(group)
    state.receipts.clear()


def _forked(state: State, version: Version, cut: Cut) -> None:
    """Forget the claims from version.step on: the new lineage lacks them, and their prompts are issued again."""
    state.next_claim = state.durable = state.replay_until = version.step
    state.batches.clear()
    state.claim_cuts.clear()
    state.cursor, state.next_ordinal, state.passed = cut.cursor, cut.ordinal, set(cut.passed)
    state.stream = {} if cut.cursor is None else {cut.ordinal - 1: cut.cursor}
    state.data_ended, state.closed, state.filtered = False, "", 0


def _arrived(state: State, e: ev.Arrived, now_s: float) -> None:
    _forget_receipts(state, state.sessions.pop(e.name, ""))
    state.sessions[e.name] = e.session  # newest last
    state.away.discard(e.name)
    state.pools.pop(e.name, None)
    if e.pool:
        state.pools[e.name] = e.pool
    if not e.session:  # it left: no other holder waits for it or leaves work to it
        no_room(state, e.name)
        for known in (state.seen_s, state.idle_s):
            known.pop(e.name, None)
    state.failing.pop(e.name, None)
    state.by_holder.dirty.add(e.name)
    if (health := state.holders.get(e.name)) is not None:
        health.failures, health.rested_at_s = 0, None  # the new process stays on trial if the old one was
    if len(state.sessions) > NAMES_KNOWN:
        no_room(state, oldest := next(iter(state.sessions)))
        state.away.discard(oldest)
        state.pools.pop(oldest, None)
        _forget_receipts(state, state.sessions.pop(oldest))


def _forget_receipts(state: State, session: str) -> None:
    for reserved in (False, True):
        state.receipts.pop(state.receipt_key(session, reserved), None)


def _data_ended(state: State, e: ev.DataEnded, now_s: float) -> None:
    state.data_ended = True


def _run_closed(state: State, e: ev.RunClosed, now_s: float) -> None:
    state.closed = e.reason


def _run_opened(state: State, e: ev.RunOpened, now_s: float) -> None:
    state.closed, state.filtered, state.died = "", 0, 0
    state.moved_at_s = now_s


def _awaited(state: State, e: ev.Awaited, now_s: float) -> None:
    state.awaited_at_s = now_s


def _hungry(state: State, e: ev.Hungry, now_s: float) -> None:
    (state.away.add if e.why == ev.AWAY else state.away.discard)(e.name)
    if e.why == ev.LAGGING:
        state.behind[e.name], state.rooms[e.name] = now_s, e.room
        state.by_holder.set_room(e.name, now_s, e.room, fetches=e.fetches)
    elif e.why and e.why != ev.AWAY:
        state.behind.pop(e.name, None)
        state.hungry[e.name], state.rooms[e.name] = now_s, e.room
        state.by_holder.set_room(e.name, now_s, e.room)
        state.idle_s.pop(e.name, None)
        state.idle_s[e.name] = now_s
        keep_newest(state.idle_s)
    else:
        no_room(state, e.name)


def _seen(state: State, e: ev.Seen, now_s: float) -> None:
    state.away.discard(e.name)
    note_seen(state, e.name, now_s)


def _renewed(state: State, e: ev.Renewed, now_s: float) -> None:
    for group, member in e.members:
        slot = state.open[group].slots[member]
        slot.deadline_s = now_s + e.ttl_s
    if e.members:
        group, member = e.members[-1]
        note_seen(state, state.open[group].slots[member].holder, now_s)


def _extended(state: State, e: ev.Extended, now_s: float) -> None:
    for group in state.open.values():
        if group.leased_at_s is not None:
            group.leased_at_s += e.by_s
        for slot in group.slots:
            if slot.status == LEASED:
                slot.deadline_s += e.by_s
            if slot.leased_at_s is not None:
                slot.leased_at_s += e.by_s
    for health in state.holders.values():
        if health.rested_at_s is not None:
            health.rested_at_s += e.by_s
    state.moved_at_s += e.by_s
    if state.claimed_at_s is not None:
        state.claimed_at_s += e.by_s
    if state.awaited_at_s is not None:
        state.awaited_at_s += e.by_s


_EFFECTS: dict[type, Callable[[State, Any, float], None]] = {
    ev.Issued: _issued,
    ev.Skipped: _skipped,
    ev.Leased: _leased,
    ev.LeaseEnded: _lease_ended,
    ev.Flushed: puts.apply_flush,
    ev.Put: puts.apply_put,
    ev.MemberFailed: puts.apply_failure,
    ev.Shrunk: _shrunk,
    ev.Aborted: _aborted,
    ev.Expired: _expired,
    ev.Died: _died,
    ev.Claimed: _claimed,
    ev.Acked: _acked,
    ev.MadeDurable: _made_durable,
    ev.Published: _published,
    ev.Began: _began,
    ev.Arrived: _arrived,
    ev.DataEnded: _data_ended,
    ev.RunClosed: _run_closed,
    ev.RunOpened: _run_opened,
    ev.Awaited: _awaited,
    ev.Hungry: _hungry,
    ev.Seen: _seen,
    ev.Renewed: _renewed,
    ev.Extended: _extended,
}
