"""Bugs to plant in the store, each in one place, each with the invariant that it breaks.

This file has bugs of puts and leases; training.py has claims, versions and forks; selection.py has the filter,
redundant members and shares. pytest's MonkeyPatch plants a bug (`BUGS[name].plant(patch)`) and undoes it. The random
test must find every bug: an invariant whose bug it does not find is not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from jaxroll.policy.limiter import AgeLimiter
from jaxroll.store.core import admission, leases, machine, puts, state
from jaxroll.store.core import events as ev
from tests.harness.store_model.checked_store import Store

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Bug:
    """A bug: `plant` changes the store in one place and thereby breaks the invariant `promise`."""

    promise: str
    plant: Callable[[Patch], None]


BUGS: dict[str, Bug] = {}


def breaks(promise: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register the function as the bug of its name."""

    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[plant.__name__] = Bug(promise, plant)
        return plant

    return register


def wrap(patch: Patch, owner: Any, name: Any, wrapper: Callable[..., Any]) -> None:
    """Replace owner.name (or owner[name]) by `wrapper(original, *arguments)`."""
    original = owner[name] if isinstance(owner, dict) else getattr(owner, name)

    def replaced(*arguments: Any, **named: Any) -> Any:
        return wrapper(original, *arguments, **named)

    if isinstance(owner, dict):
        patch.setitem(owner, name, replaced)
    else:
        patch.setattr(owner, name, replaced)


# --- puts


@breaks("2 idempotent put")
def no_dedupe(patch: Patch) -> None:
    wrap(patch, puts, "_put_known", lambda known, r, slot: None if slot.status == state.DONE else known(r, slot))


@breaks("2 idempotent put")
def dedupe_forgotten_after_consumption(patch: Patch) -> None:
    patch.setattr(puts, "_put_after_end", lambda r: "SURPLUS")


@breaks("2 idempotent put")
def other_bytes_are_taken_for_a_repeat(patch: Patch) -> None:
    patch.setattr(puts, "_conflict", lambda r: "OK")


@breaks("2 attempts per member")
def old_attempt_accepted(patch: Patch) -> None:
    def known(original: Any, r: ev.PutMember, slot: state.Slot) -> Any:
        return None if r.attempt < slot.attempt and slot.status in (state.FREE, state.LEASED) else original(r, slot)

    wrap(patch, puts, "_put_known", known)


@breaks("1 durable put")
def put_not_logged(patch: Patch) -> None:
    patch.setattr(ev, "NOT_LOGGED", (*ev.NOT_LOGGED, ev.Put))


@breaks("1 durable put")
def put_acknowledged_before_it_is_on_disk(patch: Patch) -> None:
    def ask(original: Any, store: Store, *arguments: Any) -> Any:
        reply = original(store, *arguments)
        if store.waiting and store.waiting[-1].reply is reply:
            store.leave(store.waiting[-1])
        return reply

    wrap(patch, Store, "ask", ask)


@breaks("the core is pure")
def deciding_changes_the_state(patch: Patch) -> None:
    def put(original: Any, rules: Any, now: state.State, r: ev.PutMember, now_s: float) -> Any:
        now.member_bytes = max(now.member_bytes, 2 * r.size_bytes)
        return original(rules, now, r, now_s)

    wrap(patch, machine._DECIDERS, ev.PutMember, put)


@breaks("10 one consistent cut")
def replay_leaves_something_out(patch: Patch) -> None:
    def replay(original: Any, now: state.State, events: Any, now_s: float) -> state.State:
        return original(now, [e for e in events if not isinstance(e, ev.Arrived)], now_s)

    wrap(patch, machine, "replay", replay)


@breaks("17 versions from the future")
def future_version_accepted(patch: Patch) -> None:
    patch.setattr(puts, "was_published", lambda lineages, version: True)


@breaks("lineage")
def token_of_an_ended_lineage_accepted(patch: Patch) -> None:
    patch.setattr(puts, "on_line", lambda lineages, version: True)


@breaks("never a reward of zero")
def failed_member_trained_as_zero(patch: Patch) -> None:
    def failed(original: Any, settings: Any, now: Any, group: Any, slot: Any, r: ev.PutMember, now_s: float) -> Any:
        return leases.Decision([ev.Put(r.group, r.member, r.attempt, r.digest, r.size_bytes, ())], "OK")

    wrap(patch, puts, "_put_failure", failed)


@breaks("failure budgets")
def failures_never_end(patch: Patch) -> None:
    def failed(original: Any, *arguments: Any) -> Any:
        decision = original(*arguments)
        return leases.Decision(decision.events[:1], decision.reply)

    wrap(patch, puts, "_put_failure", failed)


@breaks("failure budgets")
def no_rest_after_a_failure(patch: Patch) -> None:
    wrap(
        patch, machine._EFFECTS, ev.MemberFailed, lambda f, s, e, now: f(s, msgspec.structs.replace(e, rest_s=0.0), now)
    )


@breaks("failure budgets")
def data_failure_repeats_its_key(patch: Patch) -> None:
    def grants(original: Any, *arguments: Any) -> Any:
        return [msgspec.structs.replace(grant, key_salt=0) for grant in original(*arguments)]

    wrap(patch, leases, "_grants", grants)


# --- leases


@breaks("7a admission")
def alpha_off_by_one_in_admission(patch: Patch) -> None:
    def admits(original: Any, self: AgeLimiter, ahead: int, *rest: Any) -> bool:
        return original(self, ahead - self.batch_groups, *rest)  # in `window` it would contradict the buffer

    wrap(patch, AgeLimiter, "admits", admits)


@breaks("7a admission")
def window_off_by_one_group(patch: Patch) -> None:
    wrap(patch, AgeLimiter, "admits", lambda admits, self, ahead, *rest: admits(self, ahead - 1, *rest))


@breaks("7a admission")
def lag_of_a_sampler_ignored(patch: Patch) -> None:
    wrap(patch, AgeLimiter, "window", lambda window, self, lag, *rest: window(self, 0, *rest))


@breaks("5 to be replayed is outstanding")
def replay_not_counted_as_outstanding(patch: Patch) -> None:
    def unpublished(now: state.State) -> int:
        return sum(
            len(b.groups) for step, b in now.batches.items() if step >= max(state.base_step(now), now.replay_until)
        )

    patch.setattr(state, "unpublished_groups", unpublished)
    patch.setattr(leases, "unpublished_groups", unpublished)


@breaks("2 re-leased")
def lost_lease_goes_to_nobody(patch: Patch) -> None:
    def ended(original: Any, now: state.State, e: ev.LeaseEnded, now_s: float) -> None:
        for member in e.members:
            now.open[e.group].slots[member].deadline_s = math.inf

    wrap(patch, machine._EFFECTS, ev.LeaseEnded, ended)


@breaks("2 asked again")
def lease_asked_again_grants_more(patch: Patch) -> None:
    def leased(original: Any, now: state.State, e: ev.Leased, now_s: float) -> None:
        original(now, e, now_s)
        now.receipts.clear()

    wrap(patch, machine._EFFECTS, ev.Leased, leased)


@breaks("8 retries first")
def retries_behind_new_prompts(patch: Patch) -> None:
    def missing(original: Any, settings: Any, now: Any, r: ev.Lease, *rest: Any) -> Any:
        return ([], [], r.max_members, "") if r.prompts else original(settings, now, r, *rest)

    wrap(patch, leases, "_lease_open", missing)


@breaks("10 prompts in order")
def prompt_lost(patch: Patch) -> None:
    def lease(original: Any, *arguments: Any) -> Any:
        decision = original(*arguments)
        if isinstance(decision.reply, ev.Leases) and decision.reply.prompts_used:
            decision.reply = replace(decision.reply, prompts_used=decision.reply.prompts_used + 1)
        return decision

    wrap(patch, machine._DECIDERS, ev.Lease, lease)


@breaks("10 one consistent cut")
def cursor_of_the_record_before(patch: Patch) -> None:
    def issued(original: Any, now: state.State, e: ev.Issued, now_s: float) -> None:
        before = now.cursor
        original(now, e, now_s)
        now.cursor = before if before is not None else now.cursor

    wrap(patch, machine._EFFECTS, ev.Issued, issued)


@breaks("11 leases live")
def leases_not_renewed_on_recovery(patch: Patch) -> None:
    patch.setattr(machine, "rebased", lambda recovered, now_s, lease_s: recovered)


@breaks("11 leases live")
def stalled_store_expires_all(patch: Patch) -> None:
    wrap(patch, machine._DECIDERS, ev.Tick, lambda tick, settings, now, r, now_s: tick(settings, now, ev.Tick(), now_s))


@breaks("11 leases live")
def renewal_forgotten(patch: Patch) -> None:
    wrap(patch, machine._EFFECTS, ev.Renewed, lambda renewed, now, e, now_s: None)


@breaks("2 attempts per member")
def restarted_holder_keeps_its_leases(patch: Patch) -> None:
    wrap(patch, machine._DECIDERS, ev.Arrive, lambda f, *rest: leases.Decision(f(*rest).events[:1]))


@breaks("6 retention")
def retention_ignored(patch: Patch) -> None:
    patch.setattr(leases, "held_bytes", lambda now: 0)


@breaks("6 retention")
def buffer_of_groups_ignored(patch: Patch) -> None:
    patch.setattr(leases, "kept_groups", lambda now: len(now.open) - 100)


@breaks("7 lease_order makes (b) never bite")
def redundancy_outside_the_window(patch: Patch) -> None:
    def admits(original: Any, self: AgeLimiter, *arguments: Any) -> bool:
        return original(
            self, *arguments[:4]
        )  # without the claims that the window must hold in addition to the redundant groups

    wrap(patch, AgeLimiter, "admits", admits)


@breaks("7 the least window is what the next publication needs")
def window_adapts_to_a_deadlock(patch: Patch) -> None:
    wrap(
        patch,
        leases,
        "window_in_force",
        lambda window, rules, now: 1 if rules.window == "adaptive" else window(rules, now),
    )


@breaks("2 reserved members")
def reserved_members_go_to_anyone(patch: Patch) -> None:
    patch.setattr(machine, "RESERVED_S", 0.0)


@breaks("2 re-leased")
def reservation_that_never_ends(patch: Patch) -> None:
    patch.setattr(machine, "RESERVED_S", 1e9)


@breaks("2 reserved members")
def reservation_for_whoever_asks(patch: Patch) -> None:
    def takes(original: Any, self: admission.MemberChooser, slot: state.Slot) -> bool:
        return original(self, msgspec.structs.replace(slot, reserved_for=self._name))

    wrap(patch, admission.MemberChooser, "takes", takes)
