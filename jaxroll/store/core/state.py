"""State of a run: groups, their members and the run's counters. Records and queries; only `machine` changes them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping

import msgspec

from jaxroll.policy.limiter import Health, HolderIndex, Pace
from jaxroll.records import Cut, Question, Recent, Task, Version, VersionRef, VersionRun

FREE, LEASED, DONE, DROPPED = "free", "leased", "done", "dropped"
Edge = tuple[int, int]  # steps of the oldest and of the newest token of a group


class FlushedTokens(msgspec.Struct, frozen=True, gc=False):
    """The tokens of an unfinished member that the store has: their versions, and their bytes on disk."""

    runs: tuple[VersionRun, ...]
    size_bytes: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(run.count for run in self.runs)


class Slot(msgspec.Struct, gc=False):
    """One member of a group. `attempt` counts its leases; a put must carry the current attempt. `digest` belongs to the
    put that finished it; `failed_digest` to its last failure, reported by `failed_attempt`."""

    status: str = FREE
    attempt: int = 0
    fenced: int = 0  # a rewind ended the attempts up to this one
    holder: str = ""
    session: str = ""
    deadline_s: float = 0.0
    leased_at_s: float | None = None  # None: the store has restarted since
    rests_until_s: float = 0.0
    reserved_for: str = ""  # the holder that may lease it while it rests
    digest: str = ""
    size_bytes: int = 0
    runs: tuple[VersionRun, ...] = ()
    reward: float = 0.0
    failed_attempt: int = 0
    failed_digest: str = ""
    infra_failures: int = 0
    data_failures: int = 0
    data_spared: int = 0  # DATA failures that count against the holder alone
    failed_by: tuple[str, ...] = ()  # holders
    flushed: FlushedTokens | None = None  # its first tokens, from which the next holder continues
    avoided_until_s: float = 0.0  # until then the holders in `failed_by` do not get it while others are present

    @property
    def salt(self) -> int:
        """The number of its DATA failures, which is a part of its random key."""
        return self.data_failures + self.data_spared

    @property
    def tokens(self) -> int:
        """Sampled tokens of the finished member."""
        return sum(run.count for run in self.runs)


class Group(msgspec.Struct, gc=False):
    """G members of one task. `step` is the claim that took it; `leased_at_s` the time of its first lease."""

    id: int
    task: Task
    slots: list[Slot]
    reissue_of: int | None = None
    reissues: int = 0
    ordinal: int = 0  # the position of its prompt in the prompt stream
    wanted: int = 0  # the first `wanted` members to finish count; 0: all
    leased_at_s: float | None = None
    ready_place: int | None = None
    step: int | None = None
    acked: bool = False
    note: str = ""

    @property
    def group(self) -> int:
        """Its id: a group is a candidate of a claim (`training.pick`)."""
        return self.id

    @property
    def state(self) -> str:
        """The name of its state, as docs/store_contract.md defines it."""
        if self.acked:
            return "ACKED"
        if self.step is not None:
            return "CLAIMED"
        if self.ready:
            return "READY"
        return "LEASED" if any(s.status == LEASED for s in self.slots) else "PENDING"

    @property
    def ready(self) -> bool:
        """True if all members that still count (at least one) are stored."""
        return self.ready_place is not None

    def done(self) -> Iterator[tuple[int, Slot]]:
        """The finished members, with their numbers."""
        return ((m, s) for m, s in enumerate(self.slots) if s.status == DONE)

    def missing(self) -> Iterator[tuple[int, Slot]]:
        """The members that are not stored yet (free or leased), with their numbers."""
        return ((m, s) for m, s in enumerate(self.slots) if s.status in (FREE, LEASED))

    @property
    def tokens(self) -> int:
        """Sampled tokens of its finished members."""
        return sum(s.tokens for s in self.slots)

    @property
    def size_bytes(self) -> int:
        """Bytes of its finished members."""
        return sum(s.size_bytes for s in self.slots)

    @property
    def oldest_step(self) -> int:
        """The step of its oldest token; 0 when there is none."""
        return min((run.version.step for s in self.slots for run in s.runs), default=0)

    @property
    def newest_step(self) -> int:
        """The step of its newest token; 0 when there is none."""
        return max((run.version.step for s in self.slots for run in s.runs), default=0)


# --- index of groups with free or unfinished members; derived, never logged
#
# The store of a large run has tens of thousands of leased members and takes a thousand decisions per second. Most
# groups are complete and wait for a claim; decisions about leases look only at the few that are not.


class Index:
    """`lacking` are the open groups that miss members, in order of issue; `pending` of them have none leased.

    `leased` counts the leased members over all groups alive, and `put_bytes` sums the bytes of finished members and the
    flushed ones of free members (a lease reserves the space of its member's). Groups are issued
    with rising ids and a complete group never misses a member again. So `lacking` is filled in the order of issue, and
    an open group is ready exactly if it is not in `lacking`. `begun` has those of `lacking` that were leased, the one
    with the earliest first lease first.
    """

    def __init__(self, open_: Mapping[int, Group], held: Mapping[int, Group]) -> None:
        self.lacking, self.begun = dict[int, Group](), dict[int, Group]()
        self.pending = self.leased = self.put_bytes = 0
        self.edges: dict[int, Edge] = {}  # by open group with tokens
        self.by_edge: dict[Edge, int] = {}  # number of these groups
        self.moved = set[str]()  # holders whose leases changed
        self._leased_to: dict[str, dict[tuple[int, int], Slot]] = {}
        self._holders: dict[int, list[tuple[str, int]]] = {}  # group → (holder, member) of its leases
        self._free, self._free_order = dict[int, Group](), list[int]()
        self._order, self._lacking_order = list[int](), list[int]()
        self._shares: dict[int, tuple[int, int, int]] = {}  # group → what it adds to `pending`, `leased`, `put_bytes`
        for group in open_.values():
            self.add(group)
        self.begun = dict(sorted(self.begun.items(), key=lambda one: one[1].leased_at_s or 0.0))
        for group in held.values():
            self._count(group, is_open=False)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Index)
            and vars(self) | {"moved": 0} == vars(other) | {"moved": 0}
            and [*self.lacking] == [*other.lacking]
        )

    __hash__ = None  # type: ignore[assignment]

    def place_of(self, group: Group) -> int:
        """The number of open groups that were issued before this open group."""
        return bisect_left(self._order, group.id)

    def unready(self, oldest: int) -> tuple[int, Group | None]:
        """The number of groups among the `oldest` open ones that miss members, and the first of these."""
        last = self._order[min(oldest, len(self._order)) - 1] if self._order else -1
        number = bisect_left(self._lacking_order, last + 1)
        return number, self.lacking[self._lacking_order[0]] if number else None

    def with_free(self) -> Iterator[Group]:
        """The open groups with a free member (which may be resting), in order of issue.

        Consume the iterator before you apply another event: events change the index.
        """
        return (self._free[gid] for gid in self._free_order)

    def leased_to(self, holder: str) -> Collection[Slot]:
        """The leased members of `holder`."""
        return self._leased_to.get(holder, {}).values()

    def add(self, group: Group) -> None:
        """Add a group that was issued after all others."""
        self._order.append(group.id)
        self.update(group)

    def update(self, group: Group) -> None:
        """Update the entries of an open group whose members changed."""
        statuses = [slot.status for slot in group.slots]
        free, leased = FREE in statuses, LEASED in statuses
        if not (free or leased):
            self._completed(group)
        elif group.id not in self.lacking:
            self.lacking[group.id] = group
            self._lacking_order.append(group.id)
        if group.leased_at_s is not None and group.id in self.lacking:
            self.begun.setdefault(group.id, group)
        if free and group.id not in self._free:
            self._free[group.id] = group
            insort(self._free_order, group.id)
        elif not free:
            self._filled(group)
        self._count(group, is_open=True)

    def close(self, group: Group) -> None:
        """Remove a claimed group from the open ones; it stays alive."""
        self._closed(group)
        self._count(group, is_open=False)

    def remove(self, group: Group) -> None:
        """Remove a group that is not alive any more."""
        self._closed(group)
        self._add(self._shares.pop(group.id), -1)
        self._note_leases(group, [])

    def _completed(self, group: Group) -> None:
        if self.lacking.pop(group.id, None) is not None:
            del self._lacking_order[bisect_left(self._lacking_order, group.id)]
            self.begun.pop(group.id, None)

    def _closed(self, group: Group) -> None:
        self._completed(group)
        self._note_edge(group.id, None)
        self._filled(group)
        place = bisect_left(self._order, group.id)
        if self._order[place : place + 1] == [group.id]:
            del self._order[place]

    def _filled(self, group: Group) -> None:
        if self._free.pop(group.id, None) is not None:
            del self._free_order[bisect_left(self._free_order, group.id)]

    def _count(self, group: Group, *, is_open: bool) -> None:
        held = [(slot.holder, m) for m, slot in enumerate(group.slots) if slot.status == LEASED]
        self._note_leases(group, held)
        if is_open and any(slot.runs for slot in group.slots if slot.status == DONE):
            self._note_edge(group.id, (group.oldest_step, group.newest_step))
        leased = len(held)
        put_bytes = sum(slot.size_bytes for slot in group.slots if slot.status == DONE)
        put_bytes += sum(slot.flushed.size_bytes for slot in group.slots if slot.flushed and slot.status == FREE)
        if group.id in self._shares:
            self._add(self._shares[group.id], -1)
        share = self._shares[group.id] = (int(is_open and group.id in self._free and not leased), leased, put_bytes)
        self._add(share, 1)

    def _note_edge(self, gid: int, edge: Edge | None) -> None:
        if (before := self.edges.pop(gid, None)) is not None:
            self.by_edge[before] -= 1
            if not self.by_edge[before]:
                del self.by_edge[before]
        if edge is not None:
            self.edges[gid] = edge
            self.by_edge[edge] = self.by_edge.get(edge, 0) + 1

    def _note_leases(self, group: Group, held: list[tuple[str, int]]) -> None:
        before = self._holders.pop(group.id, ())
        self.moved.update(holder for holder, _ in (*before, *held))
        for holder, member in before:
            leases = self._leased_to[holder]
            del leases[group.id, member]
            if not leases:
                del self._leased_to[holder]
        for holder, member in held:
            self._leased_to.setdefault(holder, {})[group.id, member] = group.slots[member]
        if held:
            self._holders[group.id] = held

    def _add(self, share: tuple[int, int, int], sign: int) -> None:
        pending, leased, put_bytes = share
        self.pending += sign * pending
        self.leased += sign * leased
        self.put_bytes += sign * put_bytes


# --- the state
#
# `State` encodes to MessagePack: compaction of the log writes it. Times are seconds of the store's monotonic clock and
# have no meaning in another process: after a restart `machine.rebased` gives every open lease its full time again.

NAMES_KNOWN = 10_000
HOLDERS_KEPT = 1000  # entries of each table by holder


class Lengths(msgspec.Struct):
    """Tokens and finished members of claimed groups (trained) and of groups that ended otherwise (lost).

    `reissues` counts reissued prompts by the tokens of the longest finished member, rounded up to a power of two.
    `by_source` has the members and tokens of claimed and filtered groups by the number of their source.
    """

    trained_tokens: int = 0
    trained_members: int = 0
    lost_tokens: int = 0
    lost_members: int = 0
    reissues: dict[int, int] = {}
    by_source: dict[int, tuple[int, int]] = {}


class Batch(msgspec.Struct):
    """Logged claim of one step: its groups, in the order of training."""

    step: int
    groups: tuple[int, ...]
    shuffle_seed: int


class Lineage(msgspec.Struct):
    """Line of parameter versions that left `parent` at `fork_step`; `newest` is its last published step.

    `fork` is the name of the fork that began it; it is empty after a rewind, which replays the claims of the parent.
    """

    parent: int | None = None
    fork_step: int = 0
    newest: int | None = None
    fork: str = ""


class LeaseReceipt(msgspec.Struct):
    """Last grants of a session, so that a repeated request gets the same answer."""

    request: str
    members: tuple[tuple[int, int, int], ...]  # (group, member, attempt)


class State(msgspec.Struct, dict=True):
    """State of the run. `open`: groups not claimed yet, in the order of issue; `held`: the other groups alive.

    `index` is derived from both, `by_holder` from the tables by holder; they are neither encoded nor compared.
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
    cursor: bytes | None = None  # the prompt pipeline's state (position, seed, epoch) after the last prompt used
    prompts_issued: int = 0
    next_ordinal: int = 0  # the position of the next prompt in the stream; a fork moves it back
    stream: dict[int, bytes] = {}  # ordinal → the pipeline's state after it, from the oldest open group on
    passed: set[int] = set()  # ordinals that were used on this line before a fork
    curriculum_skipped: int = 0  # prompts that the curriculum did not admit, since the beginning of the run
    cuts: dict[str, Cut] = {}  # durable version → position of the prompt stream
    claim_cuts: dict[int, Cut] = {}  # claim that is not trimmed → position of the prompt stream after it
    data_ended: bool = False
    closed: str = ""
    receipts: dict[str, LeaseReceipt] = {}  # by `receipt_key`
    sessions: dict[str, str] = {}  # name → its newest session, of the NAMES_KNOWN that joined last
    pools: dict[str, str] = {}  # name → its pool, of those samplers that are in one
    ready_places: int = 0
    trimmed: int = 0
    expired: dict[str, int] = {}
    dead: int = 0
    died: int = 0  # groups that died since the last claim
    filtered: int = 0  # groups that the filter rejected since the last claim
    shrunk: int = 0
    aborted_members: int = 0  # redundant ones that were not needed in the end
    tokens_put: int = 0
    members_resumed: int = 0  # leases that continued after flushed tokens, which are counted in the next line
    tokens_resumed: int = 0
    tokens_flushed: int = 0
    tokens_expired: dict[str, int] = {}
    tokens_masked: int = 0
    member_bytes: int = 4096  # the largest member seen, flushed ones included: what an open lease reserves
    moved_at_s: float = 0.0  # time of the last progress
    pace: Pace = Pace()  # the window in force
    step_s: float = 0.0  # how long the learner lately worked on a claim; 0 before it is known
    recent_s: dict[str, Recent] = {}  # holder → durations since it last began to rest for slowness
    member_s: dict[str, float] = {}  # holder → how long its members lately took from lease to put
    hungry: dict[str, float] = {}  # sampler → time of its last refusal because the window was full; cleared by a lease
    idle_s: dict[str, float] = {}  # the same, but kept when it gets a lease
    rooms: dict[str, int] = {}  # sampler that is hungry or behind → members for which it has room
    seen_s: dict[str, float] = {}  # holder → when it last leased, put, renewed or asked for a lease
    away: set[str] = set()  # holders that ask for no leases for a while
    holders: dict[str, Health] = {}  # holders whose members failed lately
    failing: dict[str, float] = {}  # holder → share of its last members that failed, with DATA or INFRA
    questions: dict[str, Question] = {}  # by question hash, the newest last
    lengths: Lengths = msgspec.field(default_factory=Lengths)
    published_at_s: float = 0.0  # time of the newest publication
    claimed_at_s: float | None = None  # time of this learner's newest claim; None after it or the store started
    awaited_at_s: float | None = None  # since when the learner has waited for the next claim
    behind: dict[str, float] = {}  # sampler → when it last had room and lacked newer weights, which it fetches

    def __post_init__(self) -> None:
        self.index = Index(self.open, self.held)
        tables = self.member_s, self.recent_s, self.hungry, self.rooms, self.failing, self.behind
        self.by_holder = HolderIndex(*tables, lambda name: len(self.index.leased_to(name)))
        self.index.moved = self.by_holder.dirty

    @property
    def lineage(self) -> int:
        """The current lineage."""
        return len(self.lineages) - 1

    @property
    def published_step(self) -> int | None:
        """The step samplers should be at; None before the first publication in this lineage."""
        return None if self.published is None else self.published.version.step

    def receipt_key(self, session: str, reserved: bool) -> str:
        """The key of a receipt; a call for reserved members may be under way together with another one."""
        return f"{session}/reserved" if reserved else session

    def find(self, group: int) -> Group | None:
        """The group, if it is alive."""
        return self.open.get(group) or self.held.get(group)


def slot_of(group: Group | None, member: int) -> Slot | None:
    """Member `member` of `group`; None when there is no such group or member."""
    return group.slots[member] if group is not None and 0 <= member < len(group.slots) else None


def base_step(state: State) -> int:
    """The step of the weights that samplers use (before the first publication in this lineage: will use)."""
    return state.lineages[-1].fork_step if state.published is None else state.published.version.step


def unpublished_groups(state: State) -> int:
    """The number of groups in logged claims whose effect is not in the published version: claimed or to be replayed."""
    return sum(len(state.batches[step].groups) for step in range(base_step(state), state.next_claim))


def outstanding(state: State) -> int:
    """The number of groups that admission counts: leased + ready + claimed and not yet published + to be replayed."""
    return len(state.open) - state.index.pending + unpublished_groups(state)


def counts(state: State) -> dict[str, int]:
    """Groups by state, terminal ones included."""
    found: dict[str, int] = {"PENDING": 0, "LEASED": 0, "READY": 0, "CLAIMED": 0, "ACKED": 0}
    for group in (*state.open.values(), *state.held.values()):
        found[group.state] += 1
    return found | {"TRIMMED": state.trimmed, "EXPIRED": sum(state.expired.values()), "DEAD": state.dead}


def conservation_residual(state: State) -> int:
    """Groups issued minus groups accounted for; anything but 0 is a lost group."""
    return state.issued - sum(counts(state).values())


def held_bytes(state: State) -> int:
    """Payload bytes on disk plus those reserved for open leases."""
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


def no_room(state: State, holder: str) -> None:
    """Forget that the holder had room."""
    for known in (state.hungry, state.behind, state.rooms):
        known.pop(holder, None)
    state.by_holder.drop(holder)


def note_seen(state: State, holder: str, now_s: float) -> None:
    """Record that the holder is present."""
    state.seen_s.pop(holder, None)
    state.seen_s[holder] = now_s
    keep_newest(state.seen_s)


def keep_newest(table: dict) -> list[str]:
    """Drop the oldest entries of `table` beyond `HOLDERS_KEPT`; the names that were dropped."""
    dropped = []
    while len(table) > HOLDERS_KEPT:
        dropped.append(next(iter(table)))
        del table[dropped[-1]]
    return dropped
