"""Forks: a new lineage from a checkpoint whose later claims are given up, even if their trajectories are gone.

A rewind replays the claims after its checkpoint; a fork makes them again. So it goes back to where the prompts stood at
that step (`cuts`). Prompts that claims below the fork used do not come again on the new line, all others do, in their
order. Pure, like `training`.
"""

from __future__ import annotations

from jaxroll.errors import StaleClient, StoreRefusal
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from jaxroll.store.core import requests as rq
from jaxroll.store.core.events import Cut
from jaxroll.store.core.leases import Decision, refuse
from jaxroll.store.core.state import Lineage, State


def fork(state: State, r: rq.Begin) -> Decision:
    """A new lineage at the checkpoint: everything beyond it ends, and the claims from there on are made again."""
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


# --- position of the prompt stream after each claim, from which a fork continues
#
# A cut is kept with every claim that is not trimmed, and for every durable step.

CUTS_KEPT = 1000  # durable steps to which a run can be forked, the newest ones


def cut_of(state: State) -> Cut | None:
    """Where the prompts stand now: those below the oldest open group have ended, and some after it.

    None while a group is open whose prompt was read before the log kept the pipeline's states (schema 1).
    """
    unended = {group.ordinal for group in state.open.values()}
    low = min(unended, default=state.next_ordinal)
    if low and low - 1 not in state.stream:
        return None
    passed = [ordinal for ordinal in range(low, state.next_ordinal) if ordinal not in unended]
    passed += sorted(ordinal for ordinal in state.passed if ordinal >= state.next_ordinal)
    return Cut(low, tuple(passed), state.stream.get(low - 1))


def origin(lineages: list[Lineage], version: Version) -> Version:
    """The same parameters by the lineage that made them: 2.5 is 0.5 when lineage 2 left lineage 0 at 5 or later."""
    lineage = version.lineage
    while (parent := lineages[lineage].parent) is not None and version.step <= lineages[lineage].fork_step:
        lineage = parent
    return Version(lineage, version.step)


def cut_at(state: State, version: Version) -> Cut | None:
    """The cut of `version`; None when the store never knew it, or no longer does."""
    made = origin(state.lineages, version)
    if version.step == 0:
        return Cut()
    if (known := state.cuts.get(str(made))) is not None:
        return known
    here = origin(state.lineages, Version(state.lineage, version.step))
    return state.claim_cuts.get(version.step - 1) if made == here else None


def keep_cut(state: State, version: Version) -> None:
    """Remember the cut of a version that becomes durable; the oldest of too many is forgotten."""
    cut = state.claim_cuts.get(version.step - 1)  # None: the claim is of a log from before there were cuts
    if cut is not None:
        state.cuts[str(origin(state.lineages, version))] = cut
    for step in [step for step in state.claim_cuts if step < version.step]:
        del state.claim_cuts[step]
    while len(state.cuts) > CUTS_KEPT:
        del state.cuts[next(iter(state.cuts))]


def shared_steps(lineages: list[Lineage], version: Version) -> int:
    """How many claims of the newest lineage's line are also behind `version`."""
    here = _line(lineages, Version(len(lineages) - 1, version.step))
    there = _line(lineages, version)
    return max((min(step, there[lineage]) for lineage, step in here.items() if lineage in there), default=0)


def _line(lineages: list[Lineage], version: Version) -> dict[int, int]:
    """Lineage → last step of it on the line that ends at `version`."""
    lineage: int | None = version.lineage
    last, found = version.step, {}
    while lineage is not None:
        found[lineage] = last
        last, lineage = min(last, lineages[lineage].fork_step), lineages[lineage].parent
    return found
