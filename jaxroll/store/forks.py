"""Forks: a new lineage from a checkpoint whose later claims are given up, even where their trajectories are trimmed.

A rewind replays the claims after its checkpoint; a fork makes them anew. So it goes back to where the prompts stood at
that step (`cuts`). Prompts that claims below the fork used do not come again on the new line, all others do, in their
order. Pure, like `training`.
"""

from __future__ import annotations

from jaxroll.errors import StaleClient, StoreRefusal
from jaxroll.records import Version
from jaxroll.store import events as ev
from jaxroll.store import requests as rq
from jaxroll.store.cuts import cut_at, shared_steps
from jaxroll.store.state import State
from jaxroll.store.work import Decision, refuse


def fork(state: State, r: rq.Begin) -> Decision:
    """A new lineage at the checkpoint: everything beyond it ends, and the claims from there on are made anew."""
    start = r.durable or Version(0, 0)
    cut = None if _unknown(state, start) else cut_at(state, start)
    if cut is None:
        return refuse(_no_cut(state, start))
    shared = shared_steps(state.lineages, start)
    events: list[ev.Event] = [ev.Acked(Version(state.lineage, step)) for step in range(state.acked, shared)]
    if shared > state.durable:
        events.append(ev.MadeDurable(Version(state.lineage, shared)))
    ended = [g.id for g in state.held.values() if g.step is not None and g.step >= shared] + list(state.open)
    events += [ev.Expired(group, "lineage") for group in sorted(ended)]
    version = Version(len(state.lineages), start.step)
    events.append(ev.Began(version, r.session, start.lineage, r.fork, cut))
    return Decision(events, version)


def _unknown(state: State, start: Version) -> bool:
    return not 0 <= start.lineage < len(state.lineages) or start.step < 0


def _no_cut(state: State, start: Version) -> StoreRefusal:
    newest = ", ".join(list(state.cuts)[-3:]) or "none"
    return StaleClient(
        f"checkpoint {start} cannot be forked from: the store knows the prompts of 0.0, of durable steps (the newest: "
        f"{newest}) and of the claims since"
    )
