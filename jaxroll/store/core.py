"""The state machine as one object: decides a request, applies what was decided, hands out the events to log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jaxroll.store import events as ev
from jaxroll.store import puts, training, work
from jaxroll.store import requests as rq
from jaxroll.store.apply import apply, replay
from jaxroll.store.endings import ended_by
from jaxroll.store.settings import Settings
from jaxroll.store.state import State, rebased
from jaxroll.store.work import Decision

_DECIDERS: dict[type, Callable[[Settings, State, Any, float], Decision]] = {
    rq.Arrive: work.arrive,
    rq.Lease: work.lease,
    rq.Renew: work.renew,
    rq.Release: work.release,
    rq.PutMember: puts.put,
    rq.Tick: work.tick,
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
    """The events that `request` causes and its answer; `state` is not changed."""
    return _DECIDERS[type(request)](settings, state, request, now_s)


class Core:
    """Settings and state. Used from one thread; time is an argument."""

    def __init__(self, settings: Settings, state: State | None = None) -> None:
        self.settings = settings
        self.state = state or State()

    @classmethod
    def recovered(cls, settings: Settings, state: State | None, events: Iterable[ev.Event], now_s: float) -> Core:
        """The machine after `state` and then `events`; every open lease counts from now."""
        begun = rebased(state, now_s, settings.lease_s) if state is not None else State(moved_at_s=now_s)
        return cls(settings, rebased(replay(begun, events, now_s), now_s, settings.lease_s))

    def handle(self, request: rq.Request, now_s: float) -> Decision:
        """Decide and apply. The caller makes the events durable before it passes the answer on."""
        decision = decide(self.settings, self.state, request, now_s)
        for event in decision.events:
            decision.ended += ended_by(self.state, event)
            apply(self.state, event, now_s)
        return decision
