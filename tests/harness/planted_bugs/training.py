"""Bugs of claims, versions, checkpoints and forks, as in leases_and_puts.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from jaxroll.policy.limiter import AgeLimiter
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from jaxroll.store.core import leases, machine, puts, state, training
from tests.harness.planted_bugs.leases_and_puts import BUGS, Patch, breaks, wrap

__all__ = ["BUGS"]

# --- claims


@breaks("7b age bound")
def alpha_off_by_one_at_the_claim(patch: Patch) -> None:
    wrap(patch, AgeLimiter, "too_old", lambda old, self, sampled, trained: old(self, sampled, trained - 1))


@breaks("3 atomic groups")
def partial_group_claimed(patch: Patch) -> None:
    def note(original: Any, now: state.State, group: state.Group) -> None:
        if not group.ready and sum(1 for _ in group.missing()) <= 1:
            group.ready_place, now.ready_places = now.ready_places, now.ready_places + 1

    wrap(patch, puts, "note_ready", note)


@breaks("5 replayable batches")
def replayed_batch_in_another_order(patch: Patch) -> None:
    def claim(original: Any, *arguments: Any) -> Any:
        decision = original(*arguments)
        if isinstance(decision.reply, state.Batch) and not decision.events:
            decision.reply = msgspec.structs.replace(decision.reply, groups=decision.reply.groups[::-1])
        return decision

    wrap(patch, machine._DECIDERS, ev.ClaimStep, claim)


@breaks("8 order")
def head_skipped(patch: Patch) -> None:
    wrap(patch, training, "pick", lambda pick, policy, *rest: pick(policy.replace("lease_order", "ready_first"), *rest))


@breaks("8 order")
def batch_not_shuffled(patch: Patch) -> None:
    patch.setattr(training, "shuffled", lambda groups, seed: tuple(groups))


@breaks("7 surplus")
def surplus_trained(patch: Patch) -> None:
    def pick(original: Any, *arguments: Any) -> training.Pick:
        found = original(*arguments)
        return replace(found, chosen=tuple(sorted(found.chosen + found.surplus)), surplus=())

    wrap(patch, training, "pick", pick)


@breaks("7 surplus")
def surplus_kept(patch: Patch) -> None:
    wrap(patch, training, "pick", lambda pick, *rest: replace(pick(*rest), surplus=()))


@breaks("expired groups are re-issued")
def expired_group_not_issued_again(patch: Patch) -> None:
    wrap(patch, training, "expire_and_reissue", lambda expire, *rest: expire(*rest)[:1])


@breaks("conservation")
def expired_group_counted_twice(patch: Patch) -> None:
    def expired(original: Any, now: state.State, e: ev.Expired, now_s: float) -> None:
        original(now, e, now_s)
        now.expired[e.reason] += 1

    wrap(patch, machine._EFFECTS, ev.Expired, expired)


@breaks("8 stragglers")
def shrunk_to_one(patch: Patch) -> None:
    patch.setattr(training, "SHRINK_LEAST", 1)


@breaks("8 stragglers")
def shrunk_where_it_should_wait(patch: Patch) -> None:
    wrap(patch, training, "_shrunk", lambda shrunk, rules, *rest: shrunk(replace(rules, straggler="shrink"), *rest))


# --- versions, acknowledgements, checkpoints


@breaks("6 never trimmed early")
def trimmed_at_the_ack(patch: Patch) -> None:
    def ack(original: Any, settings: Any, now: state.State, r: ev.Ack, now_s: float) -> Any:
        decision = original(settings, now, r, now_s)
        if decision.events:
            decision.events.append(ev.MadeDurable(Version(r.version.lineage, r.version.step + 1)))
        return decision

    wrap(patch, machine._DECIDERS, ev.Ack, ack)


@breaks("6 never trimmed early")
def trimmed_one_claim_too_many(patch: Patch) -> None:
    def durable(original: Any, now: state.State, e: ev.MadeDurable, now_s: float) -> None:
        more = e.version.step + (e.version.step in now.batches)
        original(now, ev.MadeDurable(Version(e.version.lineage, more)), now_s)
        now.durable = e.version.step

    wrap(patch, machine._EFFECTS, ev.MadeDurable, durable)


@breaks("6 never below the trim mark")
def restored_below_the_trim_mark(patch: Patch) -> None:
    def impossible(original: Any, now: state.State, start: Version) -> Any:
        return None if start.step < now.durable else original(now, start)

    wrap(patch, training, "_impossible_start", impossible)


@breaks("4 one line of ancestry")
def second_learner_beside_the_first(patch: Patch) -> None:
    patch.setattr(training, "_not_the_learner", lambda now, session: None)


@breaks("4 one line of ancestry")
def ack_ahead_of_training(patch: Patch) -> None:
    def ack(original: Any, settings: Any, now: state.State, r: ev.Ack, now_s: float) -> Any:
        decision = original(settings, now, r, now_s)
        early = now.learner == r.session and now.lineage == r.version.lineage and now.acked < r.version.step
        return leases.Decision() if early else decision

    wrap(patch, machine._DECIDERS, ev.Ack, ack)


@breaks("versions grow within a lineage")
def older_version_published(patch: Patch) -> None:
    def publish(original: Any, settings: Any, now: state.State, r: ev.Publish, now_s: float) -> Any:
        decision = original(settings, now, r, now_s)
        older = now.published is not None and 0 <= r.ref.version.step < now.published.version.step
        mine = now.learner == r.session and now.lineage == r.ref.version.lineage
        return leases.Decision([ev.Published(r.ref)]) if older and mine else decision

    wrap(patch, machine._DECIDERS, ev.Publish, publish)


@breaks("lineage")
def lineage_not_bumped_on_rewind(patch: Patch) -> None:
    def begin(original: Any, settings: Any, now: state.State, r: ev.Begin, now_s: float) -> Any:
        decision = original(settings, now, r, now_s)
        if isinstance(decision.reply, Version) and decision.reply.lineage > now.lineage:
            decision.reply = Version(now.lineage, decision.reply.step)
            decision.events = [ev.Began(decision.reply, r.session)]
        return decision

    wrap(patch, machine._DECIDERS, ev.Begin, begin)


@breaks("lineage")
def rewind_keeps_tokens_of_the_dead_lineage(patch: Patch) -> None:
    patch.setattr(training, "_expired_by_rewind", lambda *rest: [])


@breaks("lineage")
def rewind_does_not_fence_leases(patch: Patch) -> None:
    def began(original: Any, now: state.State, e: ev.Began, now_s: float) -> None:
        leased = [slot for group in now.open.values() for slot in group.slots if slot.status == state.LEASED]
        original(now, e, now_s)
        for slot in leased:
            slot.status, slot.fenced = state.LEASED, 0

    wrap(patch, machine._EFFECTS, ev.Began, began)


@breaks("lineage")
def fenced_lease_may_still_put(patch: Patch) -> None:
    def began(original: Any, now: state.State, e: ev.Began, now_s: float) -> None:
        original(now, e, now_s)
        for group in now.open.values():
            for slot in group.slots:
                slot.fenced = 0

    wrap(patch, machine._EFFECTS, ev.Began, began)


@breaks("6 a fork gives up what its line does not hold")
def fork_leaves_open_groups(patch: Patch) -> None:
    def fork(original: Any, now: state.State, r: ev.Begin) -> Any:
        decision = original(now, r)
        return leases.Decision([e for e in decision.events if not isinstance(e, ev.Expired)], decision.reply)

    wrap(patch, training, "fork", fork)


@breaks("4 exactly once along one line of ancestry")
def fork_trains_prompts_twice(patch: Patch) -> None:
    wrap(patch, training, "cut_at", lambda cut_at, *rest: cut_at(*rest) and replaced_cut(cut_at(*rest)))


def replaced_cut(cut: ev.Cut) -> ev.Cut:
    """The cut without the prompts that must not be issued again."""
    return msgspec.structs.replace(cut, passed=())


@breaks("11 the last short batch")
def last_batch_delivered_against_the_policy(patch: Patch) -> None:
    wrap(patch, training, "_new_claim", lambda claim, rules, *rest: claim(replace(rules, last_batch="deliver"), *rest))
