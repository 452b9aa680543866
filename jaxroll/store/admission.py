"""How much may be in work: the window in force, and what must wait for a checkpoint. Pure questions about the state."""

from __future__ import annotations

from jaxroll.schedule.window import Pace, adapted
from jaxroll.store.settings import CHECKPOINT_WANTED_AT, END_OF_DATA, Settings
from jaxroll.store.state import State, held_bytes

HUNGRY_S = 10.0  # a sampler with room asks again within this time


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


def with_room(settings: Settings, state: State, but: str, now_s: float) -> list[str]:
    """Samplers other than `but` that are not slow and were turned away a moment ago."""
    asking = (name for name, at_s in state.hungry.items() if name != but and now_s - at_s <= HUNGRY_S)
    return [name for name in asking if not is_slow(settings, state, name)]


def has_room(settings: Settings, state: State, but: str, now_s: float) -> str:
    """One of `with_room`; '' when there is none."""
    return next(iter(with_room(settings, state, but, now_s)), "")


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
