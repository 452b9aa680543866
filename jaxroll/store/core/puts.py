"""Puts: the decision (idempotent by key and digest, fenced by attempt) and the effect of its events on the state.

Deciding is pure; `machine` applies the effects.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median

from jaxroll.errors import Conflict, Fenced, StaleClient, StoreRefusal
from jaxroll.policy.limiter import SHORT_S, SLOW, SLOWER, TRIP, Health, failing_share
from jaxroll.records import Recent, Version, VersionRun, recent_mean_s
from jaxroll.store.core import admission
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import FILTERED, Settings
from jaxroll.store.core.leases import Decision, refuse
from jaxroll.store.core.state import (
    DONE,
    DROPPED,
    FREE,
    LEASED,
    FlushedTokens,
    Group,
    Lineage,
    Slot,
    State,
    keep_newest,
    no_room,
    note_seen,
    on_line,
    slot_of,
)

_CAUSE_CHARS, _ERROR_CHARS = 300, 200
_RECENT = 20  # members in the mean duration of a holder
_ROUNDING = 1e-9


def put(settings: Settings, state: State, r: ev.PutMember, now_s: float) -> Decision:
    """Accept the first put of the current attempt; the same bytes again get the same answer (promise 2)."""
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
    rest_s = _slow_rest_s(settings, state, slot, took_s, now_s, sum(run.count for run in r.runs))
    health = state.holders.get(slot.holder)
    # Only members that were leased during a trial count in it.
    counts = not rest_s and (health is None or not health.is_of_older_wave(slot.leased_at_s))
    put = ev.Put(r.group, r.member, r.attempt, r.digest, r.size_bytes, r.runs, r.reward, took_s, rest_s, counts)
    return Decision([put, *after_put(settings, state, group, put)], "OK")


def flush(settings: Settings, state: State, r: ev.Flush, now_s: float) -> Decision:
    """Take further tokens of a leased member, in order and within the budget of retention (promise 6).

    Tokens from 0 on replace earlier ones: their holder started the member again. Tokens that do not follow those in
    the store are not taken; the answer says where the holder continues.
    """
    group = state.open.get(r.group)
    slot = slot_of(group, r.member)
    if group is None or slot is None or slot.status != LEASED or slot.attempt != r.attempt:
        return Decision(reply=-1)
    known = slot.flushed
    have = 0 if known is None else known.tokens
    if r.start not in (0, have):
        return Decision(reply=have)
    kept = known if r.start else None
    invalid = _invalid_runs(state, r.runs)
    if not invalid and kept is not None and r.runs[0].version < kept.runs[-1].version:
        invalid = f"version {r.runs[0].version} after {kept.runs[-1].version}"
    if not invalid and sum(run.count for run in r.runs) != r.count:
        invalid = f"versions of {sum(run.count for run in r.runs)} tokens, {r.count} are flushed"
    if invalid:
        return refuse(StaleClient(f"flush {r.group}.{r.member}.{r.attempt}: {invalid}"))
    size = r.size_bytes + (0 if kept is None else kept.size_bytes)
    held = state.index.put_bytes + state.index.leased * max(state.member_bytes, size)
    if held > settings.retention_bytes or 0 < settings.row_tokens < r.start + r.count:
        return Decision(reply=have)
    return Decision([ev.Flushed(r.group, r.member, r.attempt, r.start, r.runs, r.size_bytes)], r.start + r.count)


def by_key(state: State, group: int, member: int, attempt: int) -> str | StoreRefusal | None:
    """The answer to a put that does not depend on its bytes; None if it does."""
    if not 0 <= group < state.next_group:
        return StaleClient(f"group {group} was never issued in this run")
    if (alive := state.find(group)) is None:
        return None
    slot = slot_of(alive, member)
    if slot is None:
        return StaleClient(f"group {group} has no member {member}")
    return None if 1 <= attempt == slot.failed_attempt else _put_elsewhere(f"{group}.{member}", attempt, slot)


def _put_elsewhere(name: str, attempt: int, slot: Slot) -> str | StoreRefusal | None:
    """The answer to an attempt that is not the slot's current one; None for the current one."""
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


def _put_after_end(r: ev.PutMember) -> str | StoreRefusal:
    """The answer for a group that is no longer alive: a put that was acknowledged once is acknowledged again."""
    if r.recorded is None or r.attempt > r.recorded.attempt:
        return "SURPLUS"
    if r.attempt < r.recorded.attempt:
        return Fenced(f"member {r.group}.{r.member}: attempt {r.recorded.attempt} finished it, this is {r.attempt}")
    return "OK" if r.digest == r.recorded.digest else _conflict(r)


def _put_known(r: ev.PutMember, slot: Slot) -> str | StoreRefusal | None:
    """The answer to a put that the slot has already received or replaced; None for a new put."""
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


def _conflict(r: ev.PutMember) -> Conflict:
    return Conflict(f"member {r.group}.{r.member}, attempt {r.attempt} was put before with other bytes")


def _put_failure(settings: Settings, state: State, group: Group, slot: Slot, r: ev.PutMember, now_s: float) -> Decision:
    assert r.failure is not None
    kind, error = r.failure
    data = kind == "DATA"
    spared = admission.is_broken_alone(settings, state, slot.holder, now_s)
    failures = (not spared) + (slot.data_failures if data else slot.infra_failures)
    budget = settings.data_retries if data else settings.infra_retries
    counts = not data or spared
    # The back-off is meant for an outage that affects all holders; a first failure may be the holder's own.
    at_once = data or spared or (failures == 1 and admission.left_to_another(settings, state, slot, now_s))
    rest_s = 0.0 if at_once else settings.backoff_s(failures)
    health = state.holders.get(slot.holder, Health())
    holder_rest_s = health.next_rest_s(slot.leased_at_s, now_s) if counts else None
    failed = ev.MemberFailed(r.group, r.member, r.attempt, r.digest, kind, error, rest_s, holder_rest_s, spared)
    if failures <= budget:
        return Decision([failed], "OK")
    if can_spare_one(group):
        return Decision([failed, ev.Aborted(group.id, (r.member,), "failed")], "OK")
    return Decision([failed, ev.Died(group.id, f"member {r.member}: {failures} {kind} failures: {error}")], "OK")


def _bounded(settings: Settings, state: State, group: Group, decision: Decision, failure: tuple[str, str]) -> Decision:
    """Add the end of the run to `decision` if too many groups have died since the last claim."""
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
    """The reason why no sampler of this run can have sampled `runs`; '' if one can."""
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


def was_published(lineages: list[Lineage], version: Version) -> bool:
    """True if weights of `version` may exist in a sampler: its lineage published that step or a later one."""
    if not 0 <= version.lineage < len(lineages):
        return False
    newest = lineages[version.lineage].newest
    return newest is not None and 0 <= version.step <= newest


# --- completion: redundant members are aborted, the filter judges the group


def after_put(settings: Settings, state: State, group: Group, put: ev.Put) -> list[ev.Event]:
    """The further events of a put: none unless it completes its group."""
    rewards = {m: slot.reward for m, slot in group.done()} | {put.member: put.reward}
    missing = tuple(m for m, _ in group.missing() if m != put.member)
    if missing and not 0 < group.wanted <= len(rewards):
        return []
    events: list[ev.Event] = [ev.Aborted(group.id, missing, "enough")] if missing else []
    return events + judged(settings, state, group.id, [rewards[m] for m in sorted(rewards)])


def can_spare_one(group: Group) -> bool:
    """True if the group can still become complete without one of its unfinished members."""
    possible = sum(1 for _ in group.done()) + sum(1 for _ in group.missing())
    return 0 < group.wanted < possible


def judged(
    settings: Settings, state: State, gid: int, rewards: Sequence[float], rejected_before: int = 0
) -> list[ev.Event]:
    """Expire group `gid` if the filter rejects it, and close the run if the filter has rejected too many.

    `rejected_before` counts the groups that the same decision has already rejected.
    """
    rule = settings.filter
    if rule.kind == "none":
        return []
    rejected = state.filtered + rejected_before
    if rejected >= settings.filter_limit and rule.at_limit == "deliver":
        return []
    verdict = rule.verdict(rewards)
    if not verdict.reason:
        return []
    events: list[ev.Event] = [ev.Expired(gid, f"{FILTERED}: {verdict.reason}")]
    why = _why_over(settings, state, rejected + 1, verdict.reason, verdict.broken)
    return [*events, ev.RunClosed(why)] if why and not state.closed else events


def _why_over(settings: Settings, state: State, rejected: int, reason: str, broken: bool) -> str:
    """The reason why a run with `rejected` groups since its last claim must end; '' if it continues."""
    if broken:
        return f"schedule.filter: {reason}"
    if rejected < settings.filter_limit or settings.filter.at_limit == "deliver":
        return ""
    return (
        f"schedule.filter {settings.filter.kind} rejected {rejected} groups for claim {state.next_claim} "
        f"(schedule.filter_limit), the last one as: {reason}"
    )


# --- the effects of `Flushed`, `Put` and `MemberFailed` on the state


def apply_flush(state: State, e: ev.Flushed, now_s: float) -> None:
    """Add the tokens to those that the store has of the member."""
    slot = state.open[e.group].slots[e.member]
    before = slot.flushed if e.start else None
    runs, first = (() if before is None else before.runs), e.runs[0]
    if runs and runs[-1].version == first.version:
        runs, first = runs[:-1], VersionRun(first.version, runs[-1].count + first.count)
    size_bytes = e.size_bytes + (0 if before is None else before.size_bytes)
    slot.flushed = FlushedTokens((*runs, first, *e.runs[1:]), size_bytes)
    state.tokens_flushed += sum(run.count for run in e.runs)
    state.member_bytes = max(state.member_bytes, size_bytes)
    note_seen(state, slot.holder, now_s)


def apply_put(state: State, e: ev.Put, now_s: float) -> None:
    """Mark the member as done and update the statistics of its holder."""
    group = state.open[e.group]
    slot = group.slots[e.member]
    slot.status, slot.digest, slot.size_bytes = DONE, e.digest, e.size_bytes
    slot.runs, slot.reward = e.runs, e.reward
    slot.rests_until_s, slot.reserved_for, slot.failed_by, slot.flushed = 0.0, "", (), None
    note_seen(state, slot.holder, now_s)
    _note_success(state, slot.holder, e.holder_rest_s, now_s)
    _note_end(state, slot.holder, failed=False)
    if e.took_s > 0:
        _note_duration(state, slot.holder, e.took_s, slot.tokens, is_measured=e.is_measured)
    state.tokens_put += slot.tokens
    state.member_bytes = max(state.member_bytes, e.size_bytes)
    state.moved_at_s = now_s
    state.index.update(group)
    note_ready(state, group)


def note_ready(state: State, group: Group) -> None:
    """Give the group the next position in the order of completion if it misses no member."""
    if group.id not in state.index.lacking:
        group.ready_place = state.ready_places
        state.ready_places += 1


def finished_early(settings: Settings, state: State, known: Sequence[int]) -> tuple[int, ...]:
    """The finished groups of the next claim, which is not complete, beyond the `known` ones.

    The claim will contain each of them, unless it ends, as surplus too. With `freshest_first` this is true of none.
    """
    if settings.order == "freshest_first":
        return ()
    head, had = settings.limiter.batch_groups + settings.limiter.redundant_groups, {*known}
    first = itertools.islice(state.open.values(), head if settings.order == "lease_order" else None)
    return tuple(group.id for group in first if group.ready and group.id not in had)


def apply_failure(state: State, e: ev.MemberFailed, now_s: float) -> None:
    """Free the failed member, which rests, and update the statistics of its holder."""
    group = state.open[e.group]
    slot = group.slots[e.member]
    slot.status, slot.failed_attempt, slot.failed_digest = FREE, e.attempt, e.digest
    slot.flushed, slot.reserved_for = None, ""
    slot.rests_until_s = now_s + e.rest_s if e.rest_s > 0 else 0.0
    if e.kind == "DATA":
        slot.data_failures, slot.data_spared = slot.data_failures + (not e.spared), slot.data_spared + e.spared
    elif not e.spared:
        slot.infra_failures += 1
    if slot.holder not in slot.failed_by:
        slot.failed_by += (slot.holder,)
    slot.avoided_until_s = now_s + admission.AVOIDED_S
    _note_end(state, slot.holder, failed=True)
    if e.holder_rest_s is not None:
        _note_failure(state, slot.holder, e.holder_rest_s, e.error, now_s)
    state.index.update(group)


def _note_duration(state: State, holder: str, took_s: float, tokens: int, *, is_measured: bool) -> None:
    """Add the duration of a member to the means of its holder; `is_measured`: also to the one that is compared."""
    state.member_s[holder] = recent_mean_s(state.member_s.pop(holder, 0.0), took_s)
    dropped = keep_newest(state.member_s)
    if is_measured:
        recent = state.recent_s.pop(holder, None) or Recent()
        recent.count = min(recent.count + 1, _RECENT)
        recent.mean_s += (took_s - recent.mean_s) / recent.count
        recent.mean_tokens += (tokens - recent.mean_tokens) / recent.count
        recent.done += 1
        got = recent.done + len(state.index.leased_to(holder))
        recent.mean_got += (got - recent.mean_got) / recent.count
        state.recent_s[holder] = recent
        dropped += keep_newest(state.recent_s)
    state.by_holder.dirty |= {holder, *dropped}


def _note_end(state: State, holder: str, *, failed: bool) -> None:
    """Update the share of the holder's last members that failed."""
    share = state.failing.pop(holder, 0.0)
    if failed or share > 0:
        state.failing[holder] = failing_share(share, failed=failed)
        state.by_holder.dirty |= {holder, *keep_newest(state.failing)}


def _note_failure(state: State, holder: str, rest_s: float, error: str, now_s: float) -> None:
    """Count a failure against its holder, which rests for `rest_s` (0: not)."""
    health = state.holders.pop(holder, None) or Health()
    state.holders[holder] = health  # newest last
    health.note_failure(rest_s, error[:_ERROR_CHARS], now_s)
    if rest_s > 0:
        _clear_idle(state, holder)
    keep_newest(state.holders)


def note_too_slow(state: State, holder: str, rest_s: float, now_s: float) -> None:
    """Count a lease that was too slow as a failure of its holder; the reason of its rests stays."""
    _note_failure(state, holder, rest_s, state.holders[holder].error, now_s)


def _note_success(state: State, holder: str, slow_rest_s: float | None, now_s: float) -> None:
    """Count a put of the holder; `slow_rest_s` is the rest for slowness that it causes, None if there is none."""
    if slow_rest_s is not None:
        health = state.holders.pop(holder, None) or Health()
        state.holders[holder] = health
        if slow_rest_s > 0:
            health.begin_slow_rest(slow_rest_s, now_s)
            state.recent_s.pop(holder, None)  # only members leased for the trial count in it
            state.by_holder.dirty.add(holder)
            _clear_idle(state, holder)
        keep_newest(state.holders)
    elif (health := state.holders.get(holder)) is not None:
        health.note_success()
        if not health.rests:
            del state.holders[holder]


def _clear_idle(state: State, holder: str) -> None:
    no_room(state, holder)
    state.idle_s.pop(holder, None)


# --- comparison of the durations of holders


def _slow_rest_s(
    settings: Settings, state: State, slot: Slot, took_s: float, now_s: float, tokens: int = 0
) -> float | None:
    """The rest imposed on the holder of a put that took `took_s`; None if the holder keeps up with the others."""
    recent = state.recent_s.get(slot.holder, Recent())
    health = state.holders.get(slot.holder, Health())
    enough = recent.count + 1 >= TRIP or not (health.on_trial and health.error == SLOW)
    keeps_up = None if enough else 0.0  # a single quick member does not end a trial
    is_alone = state.recent_s.keys() <= {slot.holder}
    if is_alone or took_s <= 0 or slot.leased_at_s is None or max(recent.mean_s, took_s) <= SHORT_S:
        return keeps_up
    is_other = admission.holder_filter(settings, state, slot.holder, now_s)
    usual = (one for one in state.by_holder.quickest() if is_other(one[1]))
    if (quickest := next(usual, None)) is None:
        return keeps_up
    # The median below is at least `quickest`: most holders need no comparison with all others.
    if max(recent.mean_s, took_s) <= SLOWER * quickest[0]:
        return keeps_up
    its_s = _mean_at_least_s(recent, took_s, _running_s(state, slot.holder, now_s, slot))
    if its_s <= max(SHORT_S, SLOWER * quickest[0]):
        return keeps_up
    # An estimate is at least its mean. If more than half of the means are so long that this holder keeps up with them,
    # it keeps up with the median. Few means are shorter as a rule, and one look more than there are of them suffices.
    below, others = state.by_holder.from_mean(its_s / SLOWER * (1 + _ROUNDING))
    if sum(1 for _ in itertools.islice(filter(is_other, others), below + 1)) > below:
        return keeps_up
    names = (quickest[1], *(name for _, name in usual))
    usual_s = median(_mean_at_most_s(state.recent_s[name], _running_s(state, name, now_s, slot)) for name in names)
    if its_s <= max(SHORT_S, SLOWER * usual_s):
        return keeps_up
    newest_s = took_s / max(1.0, tokens, recent.mean_tokens)  # a short member waits for a slot as long as others do
    if tokens and _has_pace_of(state, slot.holder, newest_s, names):
        return keeps_up
    return health.next_slow_rest_s(slot.leased_at_s, max(took_s, its_s))


def _has_pace_of(state: State, holder: str, newest_s: float, others: Sequence[str]) -> bool:
    """True if this holder keeps pace with the others: its members are longer, or it got more, and it is not slow.

    `newest_s`: seconds per token of one more member. Members that begin together end in the order of their length. So
    the last ones of a sampler may be the longest of a batch while those of the others are the shortest of the next.
    """
    known = [name for name in others if state.recent_s[name].per_token_s]
    recent = state.recent_s.get(holder, Recent())
    if not (known and recent.per_token_s):
        return False
    if newest_s <= SLOWER * median(state.recent_s[name].per_token_s for name in known):
        return True
    got = {name: max(1.0, state.recent_s[name].done + len(state.index.leased_to(name))) for name in (holder, *known)}
    return newest_s / got[holder] <= SLOWER * median(state.recent_s[name].per_token_s / got[name] for name in known)


def _mean_at_least_s(recent: Recent, took_s: float, running_s: list[float]) -> float:
    """A lower estimate of the mean, if one more member took `took_s` and others have run for `running_s` so far.

    Short members are put first, so the finished ones alone would make a slow holder look quick.
    """
    longer = [run_s for run_s in running_s if run_s > recent.mean_s]
    return (recent.count * recent.mean_s + took_s + sum(longer)) / (recent.count + 1 + len(longer))


def _mean_at_most_s(recent: Recent, running_s: list[float]) -> float:
    """An upper estimate of the mean: each member that still runs is expected to need the mean once more."""
    expected = sum(running_s) + len(running_s) * recent.mean_s
    return (recent.count * recent.mean_s + expected) / (recent.count + len(running_s))


def _running_s(state: State, holder: str, now_s: float, ended: Slot) -> list[float]:
    """Seconds since the lease of each leased member of `holder`, without the one in slot `ended`."""
    leased = state.index.leased_to(holder)
    return [now_s - slot.leased_at_s for slot in leased if slot.leased_at_s is not None and slot is not ended]
