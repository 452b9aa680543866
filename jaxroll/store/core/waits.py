"""Status of a run and what it waits for, derived from the state alone."""

from __future__ import annotations

from typing import Any

from jaxroll.store.core.admission import (
    Settings,
    is_slow,
    is_unreliable,
    kept_groups,
    over,
    resting,
    why_resting,
    window_in_force,
)
from jaxroll.store.core.state import LEASED, Group, State, conservation_residual, counts, held_bytes, outstanding


def waits(settings: Settings, state: State, prompts_ready: bool = True, now_s: float | None = None) -> dict[str, str]:
    """For each role or holder that the run waits for: the reason. Empty if the run is over.

    `prompts_ready`: the feeder has prompts. `now_s` is the store's clock; None for a state read from a log.
    """
    if over(settings, state):
        return {}
    if not state.learner:
        return {"learner": "has not begun"}
    if state.published is None:
        return {"learner": f"has not published weights in lineage {state.lineage}"}
    found = {}
    if state.acked < state.next_claim:
        found["learner"] = f"is training claim {state.acked}"
    found |= _head(settings, state, prompts_ready)
    at_rest = resting(settings, state, now_s) if set(found) - {"learner"} else {}
    return found | {name: why_resting(state, name) for name in at_rest}


def _head(settings: Settings, state: State, prompts_ready: bool) -> dict[str, str]:
    batch = settings.limiter.batch_groups
    head = list(state.open.values())[:batch]
    unfinished = [group for group in head if not group.ready]
    if unfinished:
        return _unfinished(unfinished[0])
    if len(head) == batch and state.acked == state.next_claim:
        return {"learner": f"has not claimed step {state.next_claim}, which is ready"}
    if len(head) < batch and outstanding(state) < window_in_force(settings, state) and not state.data_ended:
        if not prompts_ready:
            return {"feeder": f"has no prompt ready, and step {state.next_claim} lacks {batch - len(head)} groups"}
        return {"samplers": f"have leased {len(head)} of the {batch} groups of step {state.next_claim}"}
    return {}


def _unfinished(group: Group) -> dict[str, str]:
    holders: dict[str, list[int]] = {}
    for member, slot in group.missing():
        holders.setdefault(slot.holder if slot.status == LEASED else "samplers", []).append(member)
    return {
        holder: f"group {group.id} misses members {', '.join(map(str, members))}" for holder, members in holders.items()
    }


def status(settings: Settings, state: State, prompts_ready: bool = True, now_s: float | None = None) -> dict[str, Any]:
    """Status of the run as numbers and texts, ready for JSON."""
    wasted = sum(state.tokens_expired.values()) + state.tokens_masked
    return {
        "counts": counts(state),
        "issued": state.issued,
        "prompts_issued": state.prompts_issued,
        "groups_in_flight": outstanding(state),
        "in_flight_window": window_in_force(settings, state),
        "in_flight_window_max": settings.limiter.window(0),
        "learner_wait_share": state.pace.waiting_share,
        "lineage": state.lineage,
        "published": None if state.published is None else str(state.published.version),
        "claims": state.next_claim,
        "acked": state.acked,
        "durable": state.durable,
        "waits": waits(settings, state, prompts_ready, now_s),
        "conservation_residual": conservation_residual(state),
        "expired": dict(state.expired),
        "shrunk": state.shrunk,
        "aborted_members": state.aborted_members,
        "wasted_tokens": wasted / state.tokens_put if state.tokens_put else 0.0,
        "tokens_put": state.tokens_put,
        "tokens_expired": dict(state.tokens_expired),
        "tokens_masked": state.tokens_masked,
        "retained_bytes": held_bytes(state),
        "kept_groups": kept_groups(state),
        "reissues_by_length": {str(length): n for length, n in sorted(state.lengths.reissues.items())},
        "lengths": {
            "trained": [state.lengths.trained_members, state.lengths.trained_tokens],
            "lost": [state.lengths.lost_members, state.lengths.lost_tokens],
        },
        "questions": len(state.questions),
        "slow": sorted(name for name in state.member_s if is_slow(settings, state, name)),
        "backoff": resting(settings, state, now_s),
        "unreliable": unreliable(state),
        "data_ended": state.data_ended,
        "closed": over(settings, state),
        "position": state.position,
    }


def unreliable(state: State) -> dict[str, float]:
    """The unreliable holders, each with the share of its last members that failed."""
    return {name: round(share, 3) for name, share in state.failing.items() if is_unreliable(state, name)}
