"""Forks: a new lineage from a checkpoint, without the claims after it (their trajectories may be trimmed).

A rewind replays the claims after its checkpoint; a fork makes new claims instead, so it also restores the position of
the prompt stream at that step (`cuts`). The new lineage skips the prompts that claims before the fork used and issues
all others again, in their order. Pure, like `training`.
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
    """Open a new lineage at the checkpoint: all groups after it end, and its later claims are made again."""
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
# The store keeps a cut for every claim that is not trimmed, and for every durable step.

CUTS_KEPT = 1000  # the newest durable steps; only these can be forked from


def cut_of(state: State) -> Cut | None:
    """The current position of the prompt stream: prompts before the oldest open group have ended, and some after it.

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
    """The same parameters, named by the lineage that trained them.

    Version 2.5 is 0.5 if lineage 2 left lineage 0 at step 5 or later.
    """
    lineage = version.lineage
    while (parent := lineages[lineage].parent) is not None and version.step <= lineages[lineage].fork_step:
        lineage = parent
    return Version(lineage, version.step)


def cut_at(state: State, version: Version) -> Cut | None:
    """The cut of `version`; None if the store never had it or has dropped it."""
    made = origin(state.lineages, version)
    if version.step == 0:
        return Cut()
    if (known := state.cuts.get(str(made))) is not None:
        return known
    here = origin(state.lineages, Version(state.lineage, version.step))
    return state.claim_cuts.get(version.step - 1) if made == here else None


def keep_cut(state: State, version: Version) -> None:
    """Keep the cut of a version that becomes durable; drop the oldest beyond `CUTS_KEPT`."""
    cut = state.claim_cuts.get(version.step - 1)  # None: an older JaxRoll logged the claim, without a cut
    if cut is not None:
        state.cuts[str(origin(state.lineages, version))] = cut
    for step in [step for step in state.claim_cuts if step < version.step]:
        del state.claim_cuts[step]
    while len(state.cuts) > CUTS_KEPT:
        del state.cuts[next(iter(state.cuts))]


def shared_steps(lineages: list[Lineage], version: Version) -> int:
    """The number of claims that the newest lineage and `version` have in common."""
    here = _line(lineages, Version(len(lineages) - 1, version.step))
    there = _line(lineages, version)
    return max((min(step, there[lineage]) for lineage, step in here.items() if lineage in there), default=0)


def _line(lineages: list[Lineage], version: Version) -> dict[int, int]:
    """For each lineage on the line that ends at `version`: its last step on that line."""
    lineage: int | None = version.lineage
    last, found = version.step, {}
    while lineage is not None:
        found[lineage] = last
        last, lineage = min(last, lineages[lineage].fork_step), lineages[lineage].parent
    return found
