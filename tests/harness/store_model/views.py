"""The core's state in the terms of the reference model, and the reference's rules as the core's settings."""

from __future__ import annotations

from typing import Any

from jaxroll.policy.limiter import AgeLimiter
from jaxroll.policy.selection import Filter
from jaxroll.store.core import events as ev
from jaxroll.store.core import state as st
from jaxroll.store.core.admission import Settings, is_slow
from jaxroll.store.core.state import DONE, LEASED
from tests.harness.store_model.books import Fact, Rules


def settings(rules: Rules) -> Settings:
    """The rules as the store reads them."""
    return Settings(
        AgeLimiter(rules.alpha, rules.batch, rules.redundant, rules.publish_every, rules.buffer),
        group_size=rules.size,
        steps=rules.steps,
        order=rules.order,
        on_stale=rules.on_stale,
        straggler=rules.straggler,
        straggler_deadline_s=rules.straggler_s,
        lease_s=rules.lease_s,
        infra_retries=rules.infra_retries,
        data_retries=rules.data_retries,
        reissues=rules.reissues,
        retention_bytes=rules.retention_bytes,
        window=rules.window,
        last_batch=rules.last_batch,
        filter=Filter(*rules.filter, windows=rules.filter_windows, at_limit=rules.at_limit),
        redundant_members=rules.spare,
        replicate=rules.replicate,
        holders=rules.holders,
    )


def facts(events: list[Any]) -> list[Fact]:
    """The starts and ends according to the log."""
    found: list[Fact] = []
    for e in events:
        if isinstance(e, ev.Issued):
            found.append(("issued", e.group, e.task.index, e.reissue_of))
        elif isinstance(e, ev.Expired):
            found.append(("expired", e.group, e.reason.partition(":")[0]))
        elif isinstance(e, ev.RunClosed):
            found.append(("closed", None, e.reason))
        elif isinstance(e, ev.Aborted):
            found.append(("aborted", e.group, e.members))
        elif isinstance(e, ev.Died):
            found.append(("dead", e.group))
        elif isinstance(e, ev.MemberFailed) and (e.kind == "INFRA" or e.holder_rest_s is not None):
            found.append(("rest", e.group, e.holder_rest_s))
        elif isinstance(e, ev.Put) and e.holder_rest_s is not None:
            found.append(("too slow", e.group, e.holder_rest_s))
        elif isinstance(e, ev.LeaseEnded) and e.reason == "too slow":
            found.extend(("lease too slow", e.group, member, e.holder_rest_s) for member in e.members)
        elif isinstance(e, ev.Shrunk):
            found.append(("shrunk", e.group, e.dropped))
    return found


def answered(request: Any, reply: Any) -> str:
    """The request and its answer in two words, or three."""
    for word in ("resting", "on trial", "slow", "unreliable"):
        if word in str(reply):
            return word
    failed = "failed " if getattr(request, "failure", None) else ""
    name = reply if reply is None or isinstance(reply, str) else type(reply).__name__
    return f"{failed}{type(request).__name__} {name}"


def figures(state: st.State) -> dict[str, Any]:
    """The core's status, in the reference's terms."""
    published = state.published
    return {
        "counts": st.counts(state),
        "groups_in_flight": st.outstanding(state),
        "claims": state.next_claim,
        "acked": state.acked,
        "durable": state.durable,
        "lineage": state.lineage,
        "published": published and (published.version.lineage, published.version.step, published.address),
        "prompts": state.prompts_issued,
        "closed": state.closed,
        "completions": state.ready_places,
        "put": state.tokens_put,
        "masked": state.tokens_masked,
        "failing": state.failing,
        "expired": {why: count for why, count in state.tokens_expired.items() if count},
    }


def timeless(state: st.State) -> st.State:
    """`state` without clock readings in its groups; whether a group was ever leased stays."""
    for group in (*state.open.values(), *state.held.values()):
        group.leased_at_s = None if group.leased_at_s is None else 0.0
        for slot in group.slots:
            slot.deadline_s, slot.rests_until_s, slot.leased_at_s = 0.0, 0.0, None
            slot.avoided_until_s, slot.reserved_for = 0.0, ""
    return state


def members_of(state: st.State) -> dict[int, list[tuple[str, int, str]]]:
    """Every member alive, in the reference's words."""
    return {
        gid: [(s.status, s.attempt if s.status in (LEASED, DONE) else 0, s.digest) for s in group.slots]
        for gid, group in (*state.open.items(), *state.held.items())
    }


def slow(settings: Settings, state: st.State) -> set[str]:
    """The samplers that the core calls slow, as it measures them."""
    return {name for name in state.member_s if is_slow(settings, state, name)}
