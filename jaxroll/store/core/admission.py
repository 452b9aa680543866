"""Admission: the in-flight window in force, and when a checkpoint must come first. Pure queries of the state."""

from __future__ import annotations

import math

from jaxroll.policy.health import LONGEST_S, UNRELIABLE
from jaxroll.policy.limiter import Pace, adapted
from jaxroll.store.core.settings import CHECKPOINT_WANTED_AT, END_OF_DATA, Settings
from jaxroll.store.core.state import State, held_bytes

HUNGRY_S = 10.0  # a sampler with room asks again within this time
IDLE_S = 120.0  # a holder that was idle so lately can do the work of one that fails
PRESENT_S = 10.0  # a holder is there for so long after it was last heard of, or for a lease's time if that is longer


def window_in_force(settings: Settings, state: State) -> int:
    """Groups that may be outstanding now for a sampler that is up to date."""
    bound = settings.limiter.window(0)
    if settings.window == "full" or state.pace.groups == 0:
        return bound
    return max(settings.limiter.least_window, min(bound, state.pace.groups))


def adapted_pace(settings: Settings, state: State, waited_s: float, worked_s: float) -> Pace | None:
    """The pace after a claim for which the learner waited `waited_s` after `worked_s` of work; None: it is fixed."""
    limiter = settings.limiter
    if settings.window == "full":
        return None
    least, most = limiter.least_window, limiter.window(0)
    return adapted(state.pace, least, most, limiter.batch_groups, waited_s, worked_s)


def is_slow(settings: Settings, state: State, name: str) -> bool:
    """Whether members of `name` take longer than the window is deep: (α + 1) steps of a learner that never waits."""
    return 0.0 < (settings.limiter.alpha + 1) * state.step_s < state.member_s.get(name, 0.0)


def is_unreliable(state: State, name: str) -> bool:
    """Whether so many of the last members of `name` failed that groups are late because of it."""
    return state.failing.get(name, 0.0) > UNRELIABLE


def holds_up(settings: Settings, state: State, name: str) -> bool:
    """Whether claims wait for members of `name`, so that it gets work only if no other holder has room."""
    return is_slow(settings, state, name) or is_unreliable(state, name)


def with_room(settings: Settings, state: State, but: str, now_s: float) -> list[str]:
    """Samplers other than `but` that hold nothing up and were turned away a moment ago."""
    asking = (name for name, at_s in state.hungry.items() if name != but and now_s - at_s <= HUNGRY_S)
    return [name for name in asking if not holds_up(settings, state, name)]


def yields_to(settings: Settings, state: State, name: str, now_s: float) -> str:
    """A holder that gets the work instead of `name`, whose members are slow or fail; '' when `name` may work.

    A slow one yields to a sampler with room. One that fails too often or is on trial yields to a reliable holder that
    was idle lately. When all others are busy, its work is better than none.
    """
    if is_slow(settings, state, name) and (other := next(iter(with_room(settings, state, name, now_s)), "")):
        return other
    if not is_unreliable(state, name) and not _waits_for_trial(state, name, now_s):
        return ""
    for other, at_s in state.idle_s.items():
        if other == name or now_s - at_s > IDLE_S or not is_present(settings, state, other, now_s):
            continue
        if not is_unreliable(state, other) and not _is_on_trial(state, other):
            return other
    return ""


def is_present(settings: Settings, state: State, name: str, now_s: float) -> bool:
    """Whether `name` was heard of lately."""
    return now_s - state.seen_s.get(name, -math.inf) <= max(PRESENT_S, settings.lease_s)


def _is_on_trial(state: State, name: str) -> bool:
    return name in state.holders and state.holders[name].on_trial


def _waits_for_trial(state: State, name: str, now_s: float) -> bool:
    """Whether `name` is on trial and need not be tried while others are idle; it is, once in `LONGEST_S`."""
    health = state.holders.get(name)
    if health is None or not health.on_trial or health.rested_at_s is None:
        return False
    return now_s - health.rested_at_s < LONGEST_S


def over(settings: Settings, state: State) -> str:
    """Why the run is over; '' while it goes on."""
    if state.closed:
        return state.closed
    if state.acked >= settings.steps:
        return "finished"
    ended = state.data_ended and not state.open and state.acked >= state.next_claim
    return END_OF_DATA if ended else ""


def kept_groups(state: State) -> int:
    """Groups that a durable checkpoint has not made dispensable: open, claimed, acked."""
    return len(state.open) + len(state.held)


def checkpoint_wanted(settings: Settings, state: State) -> bool:
    """Whether what is kept nears a limit, so that the learner should checkpoint at the end of its step."""
    limit = settings.limiter.buffer_groups
    full_bytes = held_bytes(state) >= CHECKPOINT_WANTED_AT * settings.retention_bytes
    return full_bytes or (limit > 0 and kept_groups(state) >= CHECKPOINT_WANTED_AT * limit)
