"""Bugs of the filter, of redundant members, of shares and of admission, as in leases_and_puts.py. `BUGS` has all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec

from jaxroll.policy import limiter, selection
from jaxroll.policy.limiter import Health, Share
from jaxroll.store.core import admission, leases, machine, puts, state, training
from jaxroll.store.core import events as ev
from tests.harness.planted_bugs.leases_and_puts import Patch, breaks, wrap
from tests.harness.planted_bugs.training import BUGS

__all__ = ["BUGS"]

# --- the filter


@breaks("filter")
def groups_are_not_judged(patch: Patch) -> None:
    patch.setattr(puts, "judged", lambda *rest: [])


@breaks("filter")
def stragglers_are_not_judged(patch: Patch) -> None:
    patch.setattr(training, "_rejected", lambda *rest: [])


@breaks("filter")
def bounds_of_the_band_are_inside(patch: Patch) -> None:
    wrap(patch, selection, "_band", lambda band, value, low, high, what: band(value, low - 1e-9, high + 1e-9, what))


@breaks("filter")
def rejections_are_never_too_many(patch: Patch) -> None:
    patch.setattr(puts, "_why_over", lambda *rest: "")


@breaks("filter")
def limit_of_rejections_is_not_counted_anew(patch: Patch) -> None:
    def claimed(original: Any, now: state.State, e: ev.Claimed, now_s: float) -> None:
        before = now.filtered
        original(now, e, now_s)
        now.filtered = before

    wrap(patch, machine._EFFECTS, ev.Claimed, claimed)


@breaks("7a rejected groups make room")
def rejected_groups_still_count_as_outstanding(patch: Patch) -> None:
    wrap(patch, leases, "unpublished_groups", lambda unpublished, now: unpublished(now) + now.filtered)


# --- redundant members


@breaks("redundant members")
def redundant_members_are_waited_for(patch: Patch) -> None:
    def after_put(original: Any, settings: Any, now: Any, group: state.Group, put: ev.Put) -> Any:
        return original(settings, now, msgspec.structs.replace(group, wanted=0), put)

    wrap(patch, puts, "after_put", after_put)


@breaks("redundant members")
def group_is_complete_one_member_early(patch: Patch) -> None:
    def issued(original: Any, now: state.State, e: ev.Issued, now_s: float) -> None:
        original(now, msgspec.structs.replace(e, wanted=e.wanted - 1) if e.wanted > 1 else e, now_s)

    wrap(patch, machine._EFFECTS, ev.Issued, issued)


@breaks("failure budgets")
def group_dies_of_a_member_it_can_spare(patch: Patch) -> None:
    patch.setattr(puts, "can_spare_one", lambda group: False)


@breaks("redundant members")
def free_members_that_are_not_needed_stay(patch: Patch) -> None:
    def aborted(original: Any, now: state.State, e: ev.Aborted, now_s: float) -> None:
        slots = now.open[e.group].slots
        free = [slots[member] for member in e.members if slots[member].status == state.FREE]
        original(now, e, now_s)
        for slot in free:
            slot.status = state.FREE

    wrap(patch, machine._EFFECTS, ev.Aborted, aborted)


@breaks("11 holders learn of lost leases")
def holders_of_surplus_work_are_not_told(patch: Patch) -> None:
    def ended_by(original: Any, now: state.State, event: ev.Event) -> Any:
        return [] if isinstance(event, ev.Aborted) else original(now, event)

    wrap(patch, machine, "ended_by", ended_by)


@breaks("11 holders learn of lost leases")
def holders_are_told_of_leases_that_others_have(patch: Patch) -> None:
    def ended_by(original: Any, now: state.State, event: ev.Event) -> Any:
        return [("somebody", key) for _, key in original(now, event)]

    wrap(patch, machine, "ended_by", ended_by)


# --- shares of scarce work


@breaks("9 shares")
def first_asker_takes_everything(patch: Patch) -> None:
    patch.setattr(leases, "share_of", lambda settings, now, r, *_: Share(r.max_members))


@breaks("9 shares")
def samplers_that_are_gone_are_waited_for(patch: Patch) -> None:
    patch.setattr(limiter, "HUNGRY_S", 1e9)


@breaks("9 shares")
def samplers_that_fetch_weights_are_passed_over(patch: Patch) -> None:
    def hunger(original: Any, settings: Any, now: state.State, r: ev.Lease, refused: str, now_s: float) -> list:
        return [] if r.version.step < leases._published_step(now) else original(settings, now, r, refused, now_s)

    wrap(patch, leases, "_hunger", hunger)


@breaks("9 shares")
def who_asks_again_gets_the_part_of_those_that_fetch_weights(patch: Patch) -> None:
    def members(self: Share) -> int:
        part = -(-self.available * self.room // (self.room + self.others.room))
        return max(1, part) if self.is_scarce else self.room

    patch.setattr(Share, "members", property(members))


@breaks("9 shares")
def weights_that_nobody_has_yet_are_not_waited_for(patch: Patch) -> None:
    patch.setattr(limiter.HolderIndex, "note_published", lambda self, names: None)


@breaks("9 shares")
def who_was_given_work_still_has_room(patch: Patch) -> None:
    def leased(original: Any, now: state.State, e: ev.Leased, now_s: float) -> None:
        hungry, behind, rooms = dict(now.hungry), dict(now.behind), dict(now.rooms)
        original(now, e, now_s)
        now.hungry.update(hungry)
        now.behind.update(behind)
        now.rooms.update(rooms)
        for name, room in rooms.items():
            now.by_holder.set_room(name, (hungry | behind)[name], room)

    wrap(patch, machine._EFFECTS, ev.Leased, leased)


@breaks("9 shares")
def group_kept_together_is_split(patch: Patch) -> None:
    patch.setattr(Share, "splits", lambda self, awaited: self.others.room > 0)


@breaks("9 shares")
def group_to_be_spread_is_kept_together(patch: Patch) -> None:
    patch.setattr(Share, "splits", lambda self, awaited: False)


# --- broken holders


@breaks("failures: rest")
def failed_member_goes_back_to_its_holder(patch: Patch) -> None:
    patch.setattr(admission.MemberChooser, "takes", lambda self, slot: True)


@breaks("failures: rest")
def failed_member_is_left_to_holders_that_are_gone(patch: Patch) -> None:
    def others(original: Any, settings: Any, now: state.State, name: str, now_s: float) -> Any:
        return [other for other in now.sessions if other != name and other != "evaluator"]

    wrap(patch, admission, "others", others)


@breaks("failures: rest")
def broken_holder_never_rests(patch: Patch) -> None:
    patch.setattr(admission, "refusal", lambda settings, now, name, now_s: "")


@breaks("failures: rest")
def every_failure_of_a_wave_prolongs_the_rest(patch: Patch) -> None:
    def next_rest_s(original: Any, health: Health, leased_at_s: float | None, now_s: float) -> Any:
        return original(health, None, now_s)

    wrap(patch, Health, "next_rest_s", next_rest_s)


@breaks("failures: rest")
def put_does_not_end_a_rest(patch: Patch) -> None:
    patch.setattr(Health, "note_success", lambda self: None)


@breaks("failures: rest")
def trial_is_of_many_members(patch: Patch) -> None:
    patch.setattr(Health, "on_trial", False)


@breaks("failures: rest")
def rest_outlives_the_process(patch: Patch) -> None:
    def arrived(original: Any, now: state.State, e: ev.Arrived, now_s: float) -> None:
        before = {name: health.rested_at_s for name, health in now.holders.items()}
        original(now, e, now_s)
        for name, health in now.holders.items():
            health.rested_at_s = before[name]

    wrap(patch, machine._EFFECTS, ev.Arrived, arrived)


@breaks("failures: rest")
def unreliable_holder_keeps_its_work(patch: Patch) -> None:
    patch.setattr(admission, "is_unreliable", lambda now, name: False)


@breaks("failures: rest")
def holder_with_one_failure_is_unreliable(patch: Patch) -> None:
    patch.setattr(admission, "UNRELIABLE", 0.04)


@breaks("failures: rest")
def all_data_failures_count_against_their_holder(patch: Patch) -> None:
    patch.setattr(admission, "is_broken_alone", lambda settings, now, name, now_s: True)


@breaks("failures: rest")
def holders_that_are_not_ready_yet_are_forgotten(patch: Patch) -> None:
    def alone(original: Any, settings: Any, *rest: Any) -> bool:
        return original(replace(settings, holders=0), *rest)

    wrap(patch, admission, "is_broken_alone", alone)


@breaks("9 shares")
def holders_that_are_away_count_as_present(patch: Patch) -> None:
    def present(original: Any, settings: Any, state: Any, *rest: Any) -> bool:
        return original(settings, SimpleNamespace(seen_s=state.seen_s, away=()), *rest)

    wrap(patch, admission, "is_present", present)


@breaks("failures: rest")
def claims_do_not_forgive_failures(patch: Patch) -> None:
    patch.setattr(machine, "KEPT_BY_CLAIM", 1.0)


@breaks("failures: backoff")
def failed_member_rests_though_another_holder_is_there(patch: Patch) -> None:
    patch.setattr(admission, "left_to_another", lambda settings, now, slot, now_s: False)


@breaks("failures: backoff")
def failed_member_never_rests(patch: Patch) -> None:
    patch.setattr(puts.Settings, "backoff_s", lambda self, failures: 0.0)


@breaks("failures: rest")
def slow_leases_end_outside_the_next_batch(patch: Patch) -> None:
    patch.setattr(leases, "itertools", SimpleNamespace(islice=lambda groups, count: groups))
