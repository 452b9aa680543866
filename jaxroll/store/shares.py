"""What one sampler may take of the work there is, as the state has it. Pure questions, for `work`."""

from __future__ import annotations

from jaxroll.schedule.order import groups_ahead
from jaxroll.schedule.sharing import Share
from jaxroll.store import requests as rq
from jaxroll.store.admission import window_in_force, with_room
from jaxroll.store.groups import FREE, Group, Slot
from jaxroll.store.holders import Taker
from jaxroll.store.settings import Settings
from jaxroll.store.state import State, unpublished_groups


def free_members(group: Group, now_s: float, taker: Taker | None = None) -> list[tuple[int, Slot]]:
    """The members of a group that can be leased now: to `taker`, or to anybody."""
    free = [(m, s) for m, s in group.missing() if s.status == FREE and s.rests_until_s <= now_s]
    return free if taker is None else [(m, s) for m, s in free if taker.takes(s)]


def is_awaited(settings: Settings, state: State, place: int) -> bool:
    """Whether the learner waits for a claim that the unclaimed group at `place` belongs to."""
    return state.awaited_at_s is not None and place < settings.limiter.batch_groups


def share_of(settings: Settings, state: State, r: rq.Lease, now_s: float, taker: Taker) -> Share:
    """The asker's share beside those who have room as well; all that it has room for when it is alone."""
    others = sum(state.rooms.get(name, 0) for name in with_room(settings, state, r.name, now_s))
    if others == 0:
        return Share(r.max_members)
    available = _available(settings, state, r, r.max_members + others, now_s, taker)
    return Share(r.max_members, others, available, settings.replicate)


def _available(settings: Settings, state: State, r: rq.Lease, enough: int, now_s: float, taker: Taker) -> int:
    """Members that may be leased at the asker's version: free ones, and those of new groups; `enough` is counted."""
    assert state.published is not None
    newest, in_force = state.published.version.step, window_in_force(settings, state)
    claimed, unclaimed = unpublished_groups(state), len(state.open)

    def admits(ahead: int) -> bool:
        return settings.limiter.admits(ahead, newest, r.version.step, in_force, state.next_claim - newest)

    found = 0
    for group in state.index.with_free():
        if free := free_members(group, now_s, taker):
            place = state.index.place_of(group)
            if not admits(claimed + groups_ahead(settings.order, place, unclaimed)):
                return found
            found += len(free)
    per_claim = settings.limiter.batch_groups + settings.limiter.redundant_groups
    last = (settings.steps - state.next_claim) * per_claim
    while found < enough and unclaimed < last and admits(claimed + unclaimed):
        found, unclaimed = found + settings.members_leased, unclaimed + 1
    return found
