"""Difficulty of questions and speed of lease holders: running means that are part of the state.

Every group that is claimed, or rejected by the filter, counts once, however often a learner trains on the claim. Only
the questions touched last are kept here; the table `questions` of the database has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from jaxroll.policy.health import Health
from jaxroll.policy.limiter import Pace
from jaxroll.records import Version, VersionRef
from jaxroll.store.core.events import Cut
from jaxroll.store.core.groups import FREE, LEASED, Group, Index, Slot

QUESTIONS_KEPT = 20_000


class Question(msgspec.Struct, array_like=True):
    """What became of one question: groups issued, groups claimed; finished members judged, the sum of their rewards."""

    issued: int = 0
    trained: int = 0
    members: int = 0
    reward_sum: float = 0.0
    last_step: int | None = None  # the claim that took it last

    @property
    def reward_mean(self) -> float | None:
        """Over all members that were claimed or rejected by the filter; None before the first."""
        return self.reward_sum / self.members if self.members else None


class Lengths(msgspec.Struct):
    """Tokens and finished members of the groups that were claimed and of those that ended otherwise.

    `reissues` counts prompts that were issued again, by the length class of the group that ended: tokens of its longest
    finished member, rounded up to a power of two.
    """

    trained_tokens: int = 0
    trained_members: int = 0
    lost_tokens: int = 0
    lost_members: int = 0
    reissues: dict[int, int] = {}


def touch(questions: dict[str, Question], question_hash: str) -> Question:
    """The question's row, made the newest; the oldest of too many is forgotten."""
    row = questions.pop(question_hash, None) or Question()
    questions[question_hash] = row
    if len(questions) > QUESTIONS_KEPT:
        del questions[next(iter(questions))]
    return row


def length_class(tokens: int) -> int:
    """The smallest power of two that is at least `tokens`; 0 for none."""
    return 1 << (tokens - 1).bit_length() if tokens > 0 else 0


# --- durations: means over the last few

_HOLDERS_KEPT = 1000  # samplers whose speed is remembered


def recent_mean_s(before_s: float, now_s: float) -> float:
    """The mean of the last few durations, the newest being `now_s`; `before_s` 0 says that it is the first."""
    return now_s if before_s == 0.0 else 0.8 * before_s + 0.2 * now_s


_RECENT = 20  # members


class Recent(msgspec.Struct):
    """The mean duration of the last `_RECENT` members of a holder, the newer ones weighing more."""

    mean_s: float = 0.0
    count: int = 0

    def add(self, took_s: float) -> None:
        """Include one more member."""
        self.count = min(self.count + 1, _RECENT)
        self.mean_s += (took_s - self.mean_s) / self.count

    def at_least_s(self, took_s: float, running_s: list[float]) -> float:
        """A lower estimate of the mean: one more member took `took_s`, and others run for `running_s` already.

        Members that end soon are put first, so the finished ones alone make a slow holder look quick.
        """
        longer = [run_s for run_s in running_s if run_s > self.mean_s]
        return (self.count * self.mean_s + took_s + sum(longer)) / (self.count + 1 + len(longer))

    def at_most_s(self, running_s: list[float]) -> float:
        """An upper estimate of the mean: each member that still runs is expected to need the mean once more."""
        expected = sum(running_s) + len(running_s) * self.mean_s
        return (self.count * self.mean_s + expected) / (self.count + len(running_s))


def note_duration(durations: dict[str, float], name: str, took_s: float) -> None:
    """Remember that something of `name` took so long; who was not heard of for longest is forgotten."""
    durations[name] = recent_mean_s(durations.pop(name, 0.0), took_s)
    while len(durations) > _HOLDERS_KEPT:
        del durations[next(iter(durations))]


# --- What the store knows: plain records and questions about them. Only `apply` changes them
#
# The whole `State` encodes to MessagePack, which is how the log is compacted. Times are seconds of the store's
# monotonic
# clock and mean nothing in another process: `rebased` gives every open lease its full time again after a restart.

NAMES_KNOWN = 10_000


class Batch(msgspec.Struct):
    """The logged claim of one step: these groups, in this order."""

    step: int
    groups: tuple[int, ...]
    shuffle_seed: int


class Lineage(msgspec.Struct):
    """A line of parameter versions that left `parent` at `fork_step`; `newest` is its last published step.

    `fork` names the fork that began it; it is empty when the learner rewound, and its parent's claims were replayed.
    """

    parent: int | None = None
    fork_step: int = 0
    newest: int | None = None
    fork: str = ""


class LeaseReceipt(msgspec.Struct):
    """What a session was granted last, so that a repeated request gets the same answer."""

    request: str
    members: tuple[tuple[int, int, int], ...]  # (group, member, attempt)


class State(msgspec.Struct, dict=True):
    """The run. `open` are the groups that no claim took yet, in the order of issue; `held` the others alive.

    `index` finds among them without looking at all; it is made of them, and no part of what is encoded or compared.
    """

    position: int = 0  # records in the log
    next_group: int = 0
    issued: int = 0
    open: dict[int, Group] = {}
    held: dict[int, Group] = {}
    batches: dict[int, Batch] = {}
    next_claim: int = 0  # claims logged are 0 … next_claim − 1
    acked: int = 0  # claims trained along this line are 0 … acked − 1
    durable: int = 0  # a durable checkpoint holds the effect of claims 0 … durable − 1
    replay_until: int = 0  # claims below were logged before the learner began
    lineages: list[Lineage] = msgspec.field(default_factory=lambda: [Lineage()])
    learner: str = ""  # the session that may claim and publish
    published: VersionRef | None = None  # in the current lineage
    cursor: bytes | None = None  # the prompt pipeline's state (place, seed, epoch) after the last prompt used
    prompts_issued: int = 0
    next_ordinal: int = 0  # the place of the next prompt in the stream; smaller again after a fork
    stream: dict[int, bytes] = {}  # ordinal → the pipeline's state after it, from the oldest open group on
    passed: set[int] = set()  # ordinals that were used on this line before a fork
    cuts: dict[str, Cut] = {}  # durable version → where the prompts stood
    claim_cuts: dict[int, Cut] = {}  # claim that is not trimmed → where the prompts stood after it
    data_ended: bool = False
    closed: str = ""
    receipts: dict[str, LeaseReceipt] = {}
    sessions: dict[str, str] = {}  # name → its newest session, of the NAMES_KNOWN that joined last
    ready_places: int = 0
    trimmed: int = 0
    expired: dict[str, int] = {}
    dead: int = 0
    died: int = 0  # groups that died since the last claim
    filtered: int = 0  # groups that the filter rejected since the last claim
    shrunk: int = 0
    aborted_members: int = 0  # redundant ones that were not needed in the end
    tokens_put: int = 0
    tokens_expired: dict[str, int] = {}
    tokens_masked: int = 0
    member_bytes: int = 4096  # the largest member seen: what an open lease reserves
    moved_at_s: float = 0.0  # when something last came forward
    pace: Pace = Pace()  # the window in force
    step_s: float = 0.0  # how long the learner lately worked on a claim; 0 before it is known
    recent_s: dict[str, Recent] = {}  # holder → durations since it last began to rest for slowness
    member_s: dict[str, float] = {}  # holder → how long its members lately took from lease to put
    hungry: dict[str, float] = {}  # sampler → when it last got nothing because the window was full
    idle_s: dict[str, float] = {}  # the same, kept when it got work since
    rooms: dict[str, int] = {}  # and for how many members it has room
    seen_s: dict[str, float] = {}  # holder → when it was last given work, put or renewed any, or asked for it
    holders: dict[str, Health] = {}  # those whose members failed lately
    failing: dict[str, float] = {}  # holder → share of its last members that failed, with DATA or INFRA
    questions: dict[str, Question] = {}  # by question hash, the newest last
    lengths: Lengths = msgspec.field(default_factory=Lengths)
    claimed_at_s: float | None = None  # when the newest claim went to this learner; None after a beginning or a restart
    awaited_at_s: float | None = None  # since when the learner waits for the next one

    def __post_init__(self) -> None:
        self.index = Index(self.open, self.held)

    @property
    def lineage(self) -> int:
        """The current lineage."""
        return len(self.lineages) - 1

    @property
    def published_step(self) -> int | None:
        """The step samplers should be at; None before the first publication in this lineage."""
        return None if self.published is None else self.published.version.step

    def find(self, group: int) -> Group | None:
        """The group, if it is alive."""
        return self.open.get(group) or self.held.get(group)


def slot_of(group: Group | None, member: int) -> Slot | None:
    """Member `member` of `group`; None when there is no such group or member."""
    return group.slots[member] if group is not None and 0 <= member < len(group.slots) else None


def base_step(state: State) -> int:
    """The step samplers are (or, before the first publication in this lineage, will be) at."""
    return state.lineages[-1].fork_step if state.published is None else state.published.version.step


def unpublished_groups(state: State) -> int:
    """Groups of logged claims whose effect is not in the published version: claimed or to be replayed."""
    return sum(len(state.batches[step].groups) for step in range(base_step(state), state.next_claim))


def outstanding(state: State) -> int:
    """Leased + ready + claimed and not yet published + to be replayed: what admission counts."""
    return len(state.open) - state.index.pending + unpublished_groups(state)


def counts(state: State) -> dict[str, int]:
    """Groups by state, terminal ones included."""
    found: dict[str, int] = {"PENDING": 0, "LEASED": 0, "READY": 0, "CLAIMED": 0, "ACKED": 0}
    for group in (*state.open.values(), *state.held.values()):
        found[group.state] += 1
    return found | {"TRIMMED": state.trimmed, "EXPIRED": sum(state.expired.values()), "DEAD": state.dead}


def conservation_residual(state: State) -> int:
    """Groups issued less groups accounted for: 0, or something was lost."""
    return state.issued - sum(counts(state).values())


def held_bytes(state: State) -> int:
    """Payload bytes on disk, and what the open leases reserve."""
    return state.index.put_bytes + state.index.leased * state.member_bytes


def on_line(lineages: list[Lineage], version: Version, lineage: int | None = None) -> bool:
    """True if `version` is an ancestor of (or in) `lineage`, by default the newest."""
    here: int | None = len(lineages) - 1 if lineage is None else lineage
    limit: int | None = None
    while here is not None and here > version.lineage:
        fork = lineages[here].fork_step
        limit = fork if limit is None else min(limit, fork)
        here = lineages[here].parent
    return here == version.lineage and (limit is None or version.step <= limit)


def was_published(lineages: list[Lineage], version: Version) -> bool:
    """True if weights of `version` may exist in a sampler: its lineage published that step or a later one."""
    if not 0 <= version.lineage < len(lineages):
        return False
    newest = lineages[version.lineage].newest
    return newest is not None and 0 <= version.step <= newest


def next_deadline_s(state: State, now_s: float) -> float | None:
    """When the next lease ends or the next resting member may be leased; None when nothing is due.

    A member whose rest is over and that no holder leases is due no more; a lease that ran out is due until a tick.
    """
    lacking = state.index.lacking.values()
    due = [s.deadline_s for g in lacking for s in g.slots if s.status == LEASED]
    due += [s.rests_until_s for g in lacking for s in g.slots if s.status == FREE and s.rests_until_s > now_s]
    return min(due, default=None)


def rebased(state: State, now_s: float, lease_s: float) -> State:
    """`state` on a clock that shows `now_s`: open leases are renewed once, rests and waits start again."""
    for group in state.open.values():
        if group.leased_at_s is not None:
            group.leased_at_s = now_s
        for slot in group.slots:
            slot.rests_until_s = slot.avoided_until_s = 0.0
            slot.leased_at_s = None
            if slot.status == LEASED:
                slot.deadline_s = now_s + lease_s
    state.moved_at_s = now_s
    state.claimed_at_s = state.awaited_at_s = None
    state.hungry.clear()
    state.rooms.clear()
    state.idle_s.clear()
    state.seen_s.clear()
    for health in state.holders.values():
        health.rested_at_s = None
    return state


def straggler_due(state: State, batch: int, deadline_s: float, now_s: float) -> bool:
    """True if an unfinished group among the next `batch` is in work for longer than `deadline_s`."""
    return any(at_s <= now_s for at_s in _stragglers_s(state, batch, deadline_s))


def next_straggler_s(state: State, batch: int, deadline_s: float, now_s: float) -> float | None:
    """When the next of the unfinished groups among the next `batch` is in work for so long; None when none will be."""
    return min((at_s for at_s in _stragglers_s(state, batch, deadline_s) if at_s > now_s), default=None)


def _stragglers_s(state: State, batch: int, deadline_s: float) -> Iterator[float]:
    for group in state.index.lacking.values():
        if state.index.place_of(group) >= batch:
            break
        if group.leased_at_s is not None:
            yield group.leased_at_s + deadline_s
