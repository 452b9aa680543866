"""Admission of lease requests: the run's settings, the in-flight window, and each holder's health, speed and share.

Pure queries of settings and state.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxroll.config import Config
from jaxroll.config.derived import (
    CHECKPOINT_WANTED_AT,
    actor_names,
    age_limiter,
    lease_holders,
    one_version,
    room_of_member,
    support_tokens,
)
from jaxroll.config.parsing import SOURCE_ITEMS
from jaxroll.config.section_rules import pools
from jaxroll.errors import ConfigError
from jaxroll.policy.limiter import BROKEN, HUNGRY_S, LONGEST_S, UNRELIABLE, AgeLimiter, HolderIndex, Pace, adapted
from jaxroll.policy.routing import Pools, serves
from jaxroll.policy.selection import Curriculum, Filter
from jaxroll.records import Task, Version
from jaxroll.store.core.state import (
    FREE,
    LEASED,
    Group,
    Slot,
    State,
    conservation_residual,
    counts,
    held_bytes,
    outstanding,
)

# --- settings of the state machine, derived from the config

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
FILTERED = "filtered"  # first part of the reason of a rejected group; the filter's reason follows a colon
_DEAD_WINDOWS = 4  # fewer would end a run by chance if its environment fails for half of the prompts
END_OF_DATA = "end of data"  # reason of a run that ends because all prompts are used


@dataclass(frozen=True)
class Settings:
    """The rules of one run. Units are in the names; `steps` is the number of claims the run trains."""

    limiter: AgeLimiter
    group_size: int
    steps: int
    seed: int = 0
    order: str = "lease_order"
    on_stale: str = "expire"
    straggler: str = "shrink"
    straggler_deadline_s: float = 300.0
    lease_s: float = 30.0
    infra_retries: int = 5
    data_retries: int = 2
    reissues: int = 3
    retention_bytes: int = 512 * 2**20
    window: str = "full"
    last_batch: str = "deliver"
    filter: Filter = field(default_factory=Filter)
    redundant_members: int = 0
    replicate: str = "auto"
    dead_groups: int = 0  # groups that may die between two claims; 0: no limit
    row_tokens: int = 0  # length of the learner's row, into which a member must fit; 0: no limit
    prompt_tokens: int = 0  # length of a first prompt that the learner keeps apart from its row
    curriculum: Curriculum = field(default_factory=Curriculum)
    support_tokens: int = 0  # ids to which a sampled token may be restricted; 0: sampling is not truncated
    holders: int = 0  # samplers or actors that lease members when all of them are ready; 0: unknown
    one_version: bool = False  # a member is sampled at one version, as long as it is not a conversation
    longest_first: bool = False  # within a claim
    pools: Pools = field(default_factory=Pools)  # of samplers that lease members; actors route to pools themselves

    def __post_init__(self) -> None:
        for key, value in (("schedule.group_size", self.group_size), ("schedule.steps", self.steps)):
            if value < 1:
                raise ConfigError(key, value, "too small", "Use 1 or more.")
        for key, value in (("store.lease_s", self.lease_s), ("store.retention_mb", self.retention_bytes)):
            if value <= 0:
                raise ConfigError(key, value, "not positive", "Use a number above 0.")

    @classmethod
    def of(cls, config: Config) -> Settings:
        """The settings given by `config`; ConfigError if they must deadlock."""
        s, store = config.schedule, config.store
        limiter = age_limiter(config)
        return cls(
            limiter, s.group_size, s.steps, config.run.seed, s.order, s.on_stale, s.straggler, s.straggler_deadline_s,
            store.lease_s, store.infra_retries, store.data_retries, store.reissues, store.retention_mb * 2**20,
            s.in_flight_window, s.last_batch,
            Filter(s.filter, s.filter_low, s.filter_high, s.filter_limit, s.on_filter_limit), s.redundant_members,
            s.group_placement,
            store.dead_limit and max(store.dead_limit, _DEAD_WINDOWS * limiter.window(0)),
            *room_of_member(config.learner),
            Curriculum(s.curriculum, s.curriculum_low, s.curriculum_high, s.curriculum_rest, s.curriculum_explore,
                       s.steps, config.run.seed),
            support_tokens(config.sampling), lease_holders(config), one_version(config),
            s.lease_first == "longest", Pools() if actor_names(config) else pools(config),
        )  # fmt: skip

    @property
    def members_leased(self) -> int:
        """The number of members of a new group, redundant ones included."""
        return self.group_size + self.redundant_members

    @property
    def members_wanted(self) -> int:
        """The number of members of a group that count, as in `events.Issued`: 0 means all."""
        return self.group_size if self.redundant_members else 0

    @property
    def filter_limit(self) -> int:
        """The number of groups that the filter may reject between two claims."""
        return self.filter.windows * self.limiter.window(0)

    def backoff_s(self, failures: int) -> float:
        """The rest of a member after its `failures`-th INFRA failure, in seconds."""
        return min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (failures - 1))

    def shuffle_seed(self, step: int) -> int:
        """The seed of the order inside the claim of `step`, in [0, 2³¹)."""
        data = hashlib.blake2b(f"{self.seed}/{step}".encode(), digest_size=4).digest()
        return int.from_bytes(data, "little") >> 1


# --- in-flight window, speed of the holders, end of the run

IDLE_S = 120.0  # a holder that was idle within this time can take over the work of one that fails
PRESENT_S = 10.0  # a holder counts as present for this time (or `lease_s`, if longer) after its last call


def window_in_force(settings: Settings, state: State) -> int:
    """The number of groups that may be outstanding for a sampler with the newest weights."""
    bound = settings.limiter.window(0)
    if settings.window == "full" or state.pace.groups == 0:
        return bound
    return max(settings.limiter.least_window, min(bound, state.pace.groups))


def adapted_pace(settings: Settings, state: State, waited_s: float, worked_s: float) -> Pace | None:
    """The pace after a claim for which the learner waited `waited_s` after `worked_s` of work; None: fixed window."""
    limiter = settings.limiter
    if settings.window == "full":
        return None
    least, most = limiter.least_window, limiter.window(0)
    return adapted(state.pace, least, most, limiter.batch_groups, waited_s, worked_s)


def is_slow(settings: Settings, state: State, name: str) -> bool:
    """True if members of `name`, also at the mean length, take longer than (α + 1) steps of a learner without waits."""
    slow_s = (settings.limiter.alpha + 1) * state.step_s
    return 0.0 < slow_s < state.member_s.get(name, 0.0) and by_holder(settings, state).is_slow(name)  # mostly not


def is_unreliable(state: State, name: str) -> bool:
    """True if more than `UNRELIABLE` of the last members of `name` failed, which delays their groups."""
    return state.failing.get(name, 0.0) > UNRELIABLE


def holds_up(settings: Settings, state: State, name: str) -> bool:
    """True if `name` delays claims (slow or unreliable); it then gets leases only if no other holder has room."""
    return is_slow(settings, state, name) or is_unreliable(state, name)


def by_holder(settings: Settings, state: State) -> HolderIndex:
    """The index of holders, for this run's idea of a slow one."""
    tokens, members = state.lengths.trained_tokens, state.lengths.trained_members
    alike = not settings.pools.names
    state.by_holder.limit((settings.limiter.alpha + 1) * state.step_s, tokens / max(1, members), alike=alike)
    return state.by_holder


def yields_to(settings: Settings, state: State, name: str, now_s: float) -> str:
    """The holder that gets the work instead of `name`, whose members are slow or fail; '' if `name` may work.

    A slow holder yields to a sampler with room, one that fails too often or is on trial to a reliable one that was idle
    lately. If all others are busy, it may work.
    """
    if is_slow(settings, state, name):
        for other in by_holder(settings, state).with_room(name, now_s):
            if are_peers(state, name, other):
                return other
    if not is_unreliable(state, name) and not _waits_for_trial(state, name, now_s):
        return ""
    for other, at_s in state.idle_s.items():
        if other == name or now_s - at_s > IDLE_S or not is_present(settings, state, other, now_s):
            continue
        if are_peers(state, name, other) and not is_unreliable(state, other) and not on_trial(state, other):
            return other
    return ""


def leaves_work(state: State, name: str, now_s: float) -> bool:
    """True if `name` leaves work to samplers that fetch new weights: not for long, compared with its members."""
    return now_s - state.published_at_s <= min(HUNGRY_S, state.member_s.get(name, math.inf) / 4)


def are_peers(state: State, name: str, other: str) -> bool:
    """True if both are in the same pool or in none: only then do they do the same work."""
    return state.pools.get(name) == state.pools.get(other)


def is_present(settings: Settings, state: State, name: str, now_s: float) -> bool:
    """True if `name` called recently and is not away."""
    return name not in state.away and now_s - state.seen_s.get(name, -math.inf) <= max(PRESENT_S, settings.lease_s)


def _waits_for_trial(state: State, name: str, now_s: float) -> bool:
    """True if `name` is on trial and its last rest began less than `LONGEST_S` ago, so that idle others come first."""
    rested_at_s = state.holders[name].rested_at_s if on_trial(state, name) else None
    return rested_at_s is not None and now_s - rested_at_s < LONGEST_S


def over(settings: Settings, state: State) -> str:
    """The reason why the run is over; '' while it continues."""
    if state.closed:
        return state.closed
    if state.acked >= settings.steps:
        return "finished"
    ended = state.data_ended and not state.open and state.acked >= state.next_claim
    return END_OF_DATA if ended else ""


def kept_groups(state: State) -> int:
    """The number of groups that are not covered by a durable checkpoint: open, claimed or acked."""
    return len(state.open) + len(state.held)


def checkpoint_wanted(settings: Settings, state: State) -> bool:
    """True if the kept groups approach a limit, so that the learner should checkpoint at the end of its step."""
    limit = settings.limiter.buffer_groups
    full_bytes = held_bytes(state) >= CHECKPOINT_WANTED_AT * settings.retention_bytes
    return full_bytes or (limit > 0 and kept_groups(state) >= CHECKPOINT_WANTED_AT * limit)


# --- lease holders: which are present, which rest, and which members each may take
#
# A failed member is not leased to the same holder again while another holder is present that has not failed it, for at
# most `AVOIDED_S`. A holder that keeps failing rests (`jaxroll.policy.limiter`).

AVOIDED_S = 60.0
RESERVED_S = 5.0  # after a release for another holder only that one may lease the member
SEEN_EVERY_S = 1.0


def left_s(settings: Settings, state: State, name: str, now_s: float) -> float:
    """The remaining rest of `name` in seconds; 0 if it may work."""
    health = state.holders.get(name)
    if health is None or health.left_s(now_s, alone=False) <= 0:
        return 0.0
    return health.left_s(now_s, alone=not any(True for _ in others(settings, state, name, now_s)))


def others(settings: Settings, state: State, name: str, now_s: float) -> Iterator[str]:
    """Holders other than `name` that are present and reliable: not resting, on trial or slow."""
    return filter(holder_filter(settings, state, name, now_s), _present(settings, state, now_s))


def _present(settings: Settings, state: State, now_s: float) -> Iterator[str]:
    """The holders that called recently, those that are away included, the newest call first."""
    since_s = now_s - max(PRESENT_S, settings.lease_s)
    return itertools.takewhile(lambda name: state.seen_s[name] >= since_s, reversed(state.seen_s))


def holder_filter(settings: Settings, state: State, name: str, now_s: float) -> Callable[[str], bool]:
    """Predicate for the holders of `others`."""

    def is_other(other: str) -> bool:
        if other == name or not are_peers(state, name, other) or not is_present(settings, state, other, now_s):
            return False
        if yields_to(settings, state, other, now_s):
            return False  # it gets no leases now
        health = state.holders.get(other)
        return health is None or not (health.on_trial or health.left_s(now_s, alone=False) > 0)

    return is_other


def is_broken_alone(settings: Settings, state: State, name: str, now_s: float) -> bool:
    """True if a failure is put down to `name` and not to its member, because others may do better.

    That is so if many of its last members failed while those of another holder succeed, and if `name` has never put one
    and an expected holder has failed nothing lately: that may not be ready yet. No holder that left is waited for.
    """
    left = (known for known, session in state.sessions.items() if not session)
    if name not in state.member_s and len({name, *state.failing, *left}) < settings.holders:
        return True
    if state.failing.get(name, 0.0) < BROKEN:
        return False
    return any(state.failing.get(other, 0.0) <= UNRELIABLE for other in others(settings, state, name, now_s))


def left_to_another(settings: Settings, state: State, slot: Slot, now_s: float) -> bool:
    """True if another holder is present that has not failed this member."""
    return any(other not in slot.failed_by for other in others(settings, state, slot.holder, now_s))


def has_leases(state: State, name: str) -> bool:
    """True if `name` holds a lease."""
    return len(state.index.leased_to(name)) > 0


def on_trial(state: State, name: str) -> bool:
    """True if `name` may hold only one lease at a time."""
    return name in state.holders and state.holders[name].on_trial


def refusal(settings: Settings, state: State, name: str, now_s: float) -> str:
    """The reason why `name` gets no lease now; '' if it may work."""
    if (left := left_s(settings, state, name, now_s)) > 0:
        return f"resting: {name} {why_resting(state, name)}; it gets work again in {left:.1f} s"
    if on_trial(state, name) and has_leases(state, name):
        return f"on trial: {name} gets another member when it has put this one"
    return ""


def why_resting(state: State, name: str) -> str:
    """The reason of the rest."""
    health = state.holders[name]
    return f"rests for the {health.rests}. time in a row: {health.error or 'its members failed'}"


def resting(settings: Settings, state: State, now_s: float | None = None) -> dict[str, dict[str, float | int | str]]:
    """Holders that rest or are on trial, for display: remaining rest in seconds, rests in a row, last error.

    Without a clock (a state read from a log) `left_s` is the length of the whole rest.
    """
    found: dict[str, dict[str, float | int | str]] = {}
    for name, health in state.holders.items():
        left = health.rest_s if now_s is None else left_s(settings, state, name, now_s)
        if health.on_trial or (health.rests and left > 0):
            found[name] = {"left_s": round(left, 1), "rests": health.rests, "error": health.error}
    return found


class MemberChooser:
    """Predicate for the free members that `name`, with the weights of `version`, may lease now."""

    def __init__(self, settings: Settings, state: State, name: str, version: Version, now_s: float) -> None:
        self._settings, self._state, self._name, self._now_s = settings, state, name, now_s
        self.groups: Callable[[Group], bool] = lambda group: True  # those whose members it may lease
        self.reserved = False  # it leases members that are reserved for it, and no others
        # Where weights change only between members or intervals, a member starts again instead of waiting.
        self._version = None if settings.one_version or settings.limiter.intervals else version

    def takes(self, slot: Slot) -> bool:
        """True unless the member rests, waits for newer weights, or is left to a holder that has not failed it."""
        rests = slot.rests_until_s > self._now_s
        if rests != self.reserved or (rests and slot.reserved_for != self._name):
            return False
        if slot.flushed is not None and self._version is not None and slot.flushed.runs[-1].version > self._version:
            return False
        if self._name not in slot.failed_by or slot.avoided_until_s <= self._now_s:
            return True
        return all(name in slot.failed_by for name in others(self._settings, self._state, self._name, self._now_s))


def pool_of(settings: Settings, task: Task) -> str:
    """The pool that prefers this task; '' if the run has no pools."""
    return settings.pools.of_work(task.index // SOURCE_ITEMS) if settings.pools.names else ""


def free_members(group: Group, now_s: float, taker: MemberChooser | None = None) -> list[tuple[int, Slot]]:
    """The members of a group that can be leased now to `taker`; None: to any holder."""
    if taker is not None and not taker.groups(group):
        return []
    takes = taker.takes if taker is not None else lambda slot: slot.rests_until_s <= now_s
    return [(m, s) for m, s in group.missing() if s.status == FREE and takes(s)]


def is_awaited(settings: Settings, state: State, place: int) -> bool:
    """True if the learner waits for a claim that includes the unclaimed group at `place`."""
    return state.awaited_at_s is not None and place < settings.limiter.batch_groups


# --- status of the run, and what each role waits for


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
    failed = any(slot.failed_by for _, slot in group.missing())
    why = f", of which some failed in the environment {group.task.env!r}" if failed else ""
    return {
        holder: f"group {group.id} misses members {', '.join(map(str, members))}{why}"
        for holder, members in holders.items()
    }


def status(settings: Settings, state: State, prompts_ready: bool = True, now_s: float | None = None) -> dict[str, Any]:
    """Status of the run as numbers and texts, ready for JSON."""
    wasted = sum(state.tokens_expired.values()) + state.tokens_masked
    return {
        "counts": counts(state),
        "issued": state.issued,
        "prompts_issued": state.prompts_issued,
        "prompts_skipped": {"curriculum": state.curriculum_skipped} if state.curriculum_skipped else {},
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
        "members_resumed": state.members_resumed,
        "tokens_resumed": state.tokens_resumed,
        "tokens_flushed": state.tokens_flushed,
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
        "pools": pool_facts(settings, state),
        "data_ended": state.data_ended,
        "closed": over(settings, state),
        "position": state.position,
    }


def pool_facts(settings: Settings, state: State) -> dict[str, dict[str, Any]]:
    """For each pool: its samplers, and the members it prefers that wait, are leased, and are leased by other pools."""
    found: dict[str, dict[str, Any]] = {
        name: {"samplers": sorted(who for who, pool in state.pools.items() if pool == name)}
        for name in dict.fromkeys((*settings.pools.names, *state.pools.values()))
    }
    for name in found:
        groups = (group for group in state.index.lacking.values() if pool_of(settings, group.task) == name)
        slots = [slot for group in groups for _, slot in group.missing()]
        holders = [slot.holder for slot in slots if slot.status == LEASED]
        elsewhere = sum(not serves(state.pools.get(holder, ""), name) for holder in holders)
        found[name] |= {"waiting": len(slots) - len(holders), "leased": len(holders), "leased_elsewhere": elsewhere}
    return found


def unreliable(state: State) -> dict[str, float]:
    """The unreliable holders, each with the share of its last members that failed."""
    return {name: round(share, 3) for name, share in state.failing.items() if is_unreliable(state, name)}
