"""What follows when a group is complete: redundant members are let go, the filter judges it. Pure, like `work`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxroll.store import events as ev
from jaxroll.store.groups import Group
from jaxroll.store.settings import FILTERED, Settings
from jaxroll.store.state import State


def after_put(settings: Settings, state: State, group: Group, put: ev.Put) -> list[ev.Event]:
    """What a put brings about beside itself: nothing, unless its group has enough members with it."""
    rewards = {m: slot.reward for m, slot in group.done()} | {put.member: put.reward}
    missing = tuple(m for m, _ in group.missing() if m != put.member)
    if missing and not 0 < group.wanted <= len(rewards):
        return []
    events: list[ev.Event] = [ev.Aborted(group.id, missing, "enough")] if missing else []
    return events + judged(settings, state, group.id, [rewards[m] for m in sorted(rewards)])


def can_spare_one(group: Group) -> bool:
    """Whether the group can still become complete when a member that is not done is given up."""
    possible = sum(1 for _ in group.done()) + sum(1 for _ in group.missing())
    return 0 < group.wanted < possible


def judged(
    settings: Settings, state: State, gid: int, rewards: Sequence[float], rejected_before: int = 0
) -> list[ev.Event]:
    """The end of group `gid` if the filter rejects it, and that of the run where it rejects too many.

    `rejected_before` counts those that the same decision rejects.
    """
    rule, limit = settings.filter, settings.filter_limit
    rejected = state.filtered + rejected_before
    if rejected >= limit and rule.at_limit == "deliver":
        return []
    verdict = rule.verdict(rewards)
    if not verdict.reason:
        return []
    events: list[ev.Event] = [ev.Expired(gid, f"{FILTERED}: {verdict.reason}")]
    why = _why_over(settings, state, rejected + 1, verdict.reason, verdict.broken)
    return [*events, ev.RunClosed(why)] if why and not state.closed else events


def _why_over(settings: Settings, state: State, rejected: int, reason: str, broken: bool) -> str:
    """Why a run that has rejected so many groups since its last claim cannot go on; '' when it can."""
    if broken:
        return f"schedule.filter: {reason}"
    if rejected < settings.filter_limit or settings.filter.at_limit == "deliver":
        return ""
    return (
        f"schedule.filter {settings.filter.kind} rejected {rejected} groups for claim {state.next_claim} "
        f"(schedule.filter_limit), the last one as: {reason}"
    )
