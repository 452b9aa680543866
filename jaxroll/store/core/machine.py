"""State machine: decide a request, apply the decision, return the events to log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jaxroll.store.core import events as ev
from jaxroll.store.core import leases, puts, training
from jaxroll.store.core import requests as rq
from jaxroll.store.core.apply import apply, replay
from jaxroll.store.core.groups import LEASED, Group
from jaxroll.store.core.leases import Decision
from jaxroll.store.core.requests import Key
from jaxroll.store.core.settings import Settings
from jaxroll.store.core.state import State, rebased

_DECIDERS: dict[type, Callable[[Settings, State, Any, float], Decision]] = {
    rq.Arrive: leases.arrive,
    rq.Lease: leases.lease,
    rq.Renew: leases.renew,
    rq.Release: leases.release,
    rq.PutMember: puts.put,
    rq.Tick: leases.tick,
    rq.ClaimStep: training.claim,
    rq.Begin: training.begin,
    rq.Publish: training.publish,
    rq.Ack: training.ack,
    rq.Durable: training.durable,
    rq.EndData: training.end_data,
    rq.Close: training.close,
    rq.Open: training.open_run,
}


def decide(settings: Settings, state: State, request: rq.Request, now_s: float) -> Decision:
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

    def handle(self, request: rq.Request, now_s: float) -> Decision:
        """Decide and apply. The caller must make the events durable before it sends the answer."""
        decision = decide(self.settings, self.state, request, now_s)
        for event in decision.events:
            decision.ended += ended_by(self.state, event)
            apply(self.state, event, now_s)
        return decision


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
