"""Leases that end before their holder put anything, so that it hears of them at once and stops (early abort). Pure.

A lease that ran out is not among them, for its put still counts; nor what its holder gave back or put itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxroll.store import events as ev
from jaxroll.store.groups import LEASED, Group
from jaxroll.store.requests import Key
from jaxroll.store.state import State

Ending = tuple[str, Key]  # session, (group, member, attempt)


def ended_by(state: State, event: ev.Event) -> list[Ending]:
    """The leases that `event`, which is not applied yet, takes from their holders."""
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
