"""Records of the reference model: groups, members, lines of versions, and the figures derived from them.

Plain dicts and lists, so that it pickles. Versions are (lineage, step), token runs (lineage, step, count).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn

FREE, LEASED, DONE, DROPPED = "free", "leased", "done", "dropped"
Fact = (
    tuple  # what the log says: (issued, group, prompt, reissue_of) (expired, group, why) (dead, group) (shrunk, group)
    # (closed, None, why) (aborted, group, members) (rest, group, seconds or None) (too slow, group, seconds)
)


class Broken(AssertionError):
    """A promise of the contract is broken; the message begins with its name."""


def broken(promise: str, text: str) -> NoReturn:
    """Raise Broken."""
    raise Broken(f"[{promise}] {text}")


@dataclass(frozen=True)
class Rules:
    """The settings of one run, as a user would write them down."""

    alpha: float
    batch: int
    redundant: int
    publish_every: int
    size: int
    steps: int
    order: str
    on_stale: str
    straggler: str
    straggler_s: float
    lease_s: float
    infra_retries: int
    data_retries: int
    reissues: int
    retention_bytes: int
    buffer: int = 0
    window: str = "full"
    last_batch: str = "deliver"
    filter: tuple[str, float, float] = ("none", 0.0, 1.0)  # kind, low, high
    filter_windows: int = 10
    at_limit: str = "stop"
    spare: int = 0  # members of a group beyond `size`
    replicate: str = "together"
    holders: int = 0  # that lease members when all are ready; 0: unknown

    @property
    def members(self) -> int:
        """The members of a new group."""
        return self.size + self.spare


@functools.cache
def whole_groups(alpha: float, batch: int, steps: int) -> int:
    """⌊(α + 1 − steps)·B⌋, with the α that a user writes in decimals."""
    return math.floor((Fraction(str(alpha)) + 1 - steps) * batch)


class Books:
    """The state of a run, and questions about it."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.open: dict[int, dict] = {}  # groups that no claim took, in the order of issue
        self.held: dict[int, dict] = {}  # claimed and not trimmed
        self.finished: dict[tuple[int, int], tuple[int, str]] = {}  # every put that was accepted, forever
        self.ended: Counter[str] = Counter()
        self.tokens_ended: Counter[str] = Counter()
        self.batches: dict[int, tuple[tuple[int, ...], int]] = {}  # step → (groups, shuffle seed)
        self.sessions: dict[str, str] = {}
        self.asked: dict[str, tuple[str, tuple]] = {}  # session → (lease request, keys granted)
        self.lines: list[tuple[int | None, int]] = [(None, 0)]  # lineage → (parent, fork step)
        self.newest: list[int] = [-1]  # lineage → newest published step
        self.branch_of: list[int] = [0]  # lineage → branch: a rewind replays the claims, a fork makes new ones
        self.branches: list[tuple[int, int]] = [(0, 0)]  # branch → (branch and step that it left)
        self.claims: dict[tuple[int, int], tuple[int, ...]] = {}  # (branch, step) → groups, forever
        self.cuts: dict[tuple[int, int], frozenset[int]] = {}  # (branch, claims made) → prompts ended by then
        self.durable_made: set[tuple[int, int]] = set()  # versions that a durable checkpoint holds
        self.forks: set[str] = set()
        self.passed: frozenset[int] = frozenset()  # prompts that ended before the fork, and do not come again
        self.next_prompt = self.begun_at = 0
        self.published: tuple[int, int, str] | None = None  # lineage, step, address
        self.idle: dict[str, float] = {}  # sampler → when it last got nothing because the window was full
        self.failing: dict[str, float] = {}  # holder → failed members of its last ones, as a share
        # the same with its room, and whether it has all weights but the newest, until it gets something
        self.rooms: dict[str, tuple[float, int, bool]] = {}
        self.behind: dict[str, tuple[float, int, bool]] = {}  # the same, if its weights are older
        self.took: dict[str, float] = {}  # holder → how long its members lately took, as the store measures it
        self.published_at = -math.inf
        self.slow: set[str] = set()  # samplers that the store calls slow
        self.proved: set[str] = set()  # holders that have put a member
        self.seen: dict[str, float] = {}  # holder → time of its last call
        self.away: set[str] = set()  # those that ask for no leases for a while
        self.health: dict[str, dict] = {}  # holder → failures, rests, rest, at (None: it does not rest)
        self.avoided = 0  # how often a member was left to another holder
        self.ended_as_slow = 0  # leases
        self.moved = 0  # members leased by the sampler for which they were reserved
        self.awaited = False  # the learner waits for a claim
        self.learner = self.closed = ""
        self.data_ended = False
        self.next_group = self.prompts = self.next_claim = self.acked = self.durable = 0
        self.completions = self.largest = self.tokens_put = self.tokens_masked = 0
        self.rejected = self.stopped = self.dealt = 0

    def state(self, group: dict) -> str:
        """The name of its state in the contract."""
        if group["step"] is not None:
            return "ACKED" if group["step"] < self.acked else "CLAIMED"
        if group["place"] is not None:
            return "READY"
        return "LEASED" if any(m["status"] == LEASED for m in group["members"]) else "PENDING"

    def counts(self) -> dict[str, int]:
        """Groups by state: what conservation adds up."""
        found: dict[str, int] = dict.fromkeys(("PENDING", "LEASED", "READY", "CLAIMED", "ACKED"), 0)
        for group in (*self.open.values(), *self.held.values()):
            found[self.state(group)] += 1
        trimmed, dead = self.ended["trimmed"], self.ended["dead"]
        return found | {"TRIMMED": trimmed, "EXPIRED": self.ended.total() - trimmed - dead, "DEAD": dead}

    def base(self) -> int:
        """The step that samplers are at, or will be at the first publication of this lineage."""
        return self.lines[-1][1] if self.published is None else self.published[1]

    def unpublished(self) -> int:
        """Groups claimed and not in published weights yet, those to be replayed among them."""
        return sum(len(self.batches[step][0]) for step in range(self.base(), self.next_claim))

    def outstanding(self) -> int:
        """Leased + ready + claimed and not yet published + to be replayed."""
        return self.unpublished() + sum(self.state(g) != "PENDING" for g in self.open.values())

    def window(self, lag: int) -> tuple[int, int]:
        """(least, most) groups that may be outstanding for a sampler `lag` steps behind.

        The most is ⌊(α + 1 − lag)·B⌋ + R while a further claim fits: once the claims since the publication fill it, new
        samples could only grow too old. It must get that much, or what a publication needs, where the window adapts.
        """
        rules, lag = self.rules, max(0, lag)
        if whole_groups(rules.alpha, rules.batch, lag + self.next_claim - self.base()) <= 0:
            return 0, 0
        most = whole_groups(rules.alpha, rules.batch, lag) + rules.redundant
        adapted = rules.publish_every * rules.batch + rules.redundant
        return (most if rules.window == "full" else min(most, adapted)), most

    def on_line(self, lineage: int, step: int) -> bool:
        """True if that version is an ancestor of the current lineage, or in it."""
        here, limit = len(self.lines) - 1, math.inf
        while here is not None and here != lineage:
            limit, here = min(limit, self.lines[here][1]), self.lines[here][0]
        return here == lineage and step <= limit

    def branch(self, lineage: int, step: int) -> tuple[int, int]:
        """The branch on which the claim before version (lineage, step) was made, and `step`."""
        here = self.branch_of[lineage]
        while here and step <= self.branches[here][1]:
            here = self.branches[here][0]
        return here, step

    def made(self, lineage: int, step: int) -> tuple[int, int]:
        """The same parameters by the lineage that made them."""
        while self.lines[lineage][0] is not None and step <= self.lines[lineage][1]:
            lineage = self.lines[lineage][0] or 0
        return lineage, step

    def line(self, lineage: int, step: int) -> tuple[tuple[int, ...], ...]:
        """The batches behind version (lineage, step)."""
        return tuple(self.claims[self.branch(lineage, made)[0], made - 1] for made in range(1, step + 1))

    def skip_passed(self, prompt: int) -> int:
        """The next prompt from `prompt` on."""
        while prompt in self.passed:
            prompt += 1
        return prompt

    def runs(self, group: dict) -> list[tuple[int, int, int]]:
        """The token runs of its finished members."""
        return [run for m in group["members"] if m["status"] == DONE for run in m["runs"]]

    def too_old(self, step: int, trained: int) -> bool:
        """Promise 7(b), to the letter."""
        return trained - step > math.ceil(self.rules.alpha)

    def bytes(self) -> int:
        """Payload on disk."""
        return sum(m["bytes"] for g in (*self.open.values(), *self.held.values()) for m in g["members"])

    def unfinished(self, *statuses: str) -> int:
        """Members of open groups that are in one of these statuses."""
        return sum(m["status"] in statuses for g in self.open.values() for m in g["members"])

    def member(self, gid: int, number: int) -> dict | None:
        """A member of a group that is open or held."""
        group = self.open.get(gid) or self.held.get(gid)
        return group["members"][number] if group is not None and 0 <= number < self.rules.members else None

    def holds(self, session: str, key: tuple[int, int, int]) -> bool:
        """True if `session` has this lease."""
        member = self.member(key[0], key[1])
        return (
            member is not None
            and member["status"] == LEASED
            and (member["session"], member["attempt"]) == (session, key[2])
        )

    def leases(self) -> set[tuple[str, tuple[int, int, int]]]:
        """(session, key) of every leased member."""
        return {
            (m["session"], (gid, number, m["attempt"]))
            for gid, group in self.open.items()
            for number, m in enumerate(group["members"])
            if m["status"] == LEASED
        }

    # --- changes

    def add(self, gid: int, prompt: int, reissues: int) -> None:
        """A new group at the end of the order."""
        if gid < self.next_group:
            broken("conservation", f"group {gid} is issued twice")
        self.next_group = gid + 1
        fields = {"status": FREE, "attempt": 0, "fenced": 0, "session": "", "name": "", "deadline": 0.0, "rest": 0.0}
        fields |= {"for": "", "avoid": 0.0, "leased": None, "digest": "", "bytes": 0, "runs": ()}
        fields |= {"INFRA": 0, "DATA": 0, "salt": 0, "reward": 0.0}
        members = [fields | {"failed": {}, "failed_by": set()} for _ in range(self.rules.members)]
        group = {"prompt": prompt, "reissues": reissues, "members": members, "leased_at": None, "place": None}
        self.open[gid] = group | {"step": None}

    def end(self, gid: int, how: str) -> dict:
        """Note that the group has left the open ones permanently."""
        group = self.open.pop(gid, None) or self.held.pop(gid)
        self.ended[how] += 1
        self.tokens_ended[how] += sum(run[2] for run in self.runs(group))
        return group

    def rejects(self, group: dict) -> bool:
        """True if the filter wants nothing of this group; in fractions, so that nothing is rounded."""
        kind, low, high = self.rules.filter
        rewards = [Fraction(m["reward"]) for m in group["members"] if m["status"] == DONE]
        if kind == "pass_rate":
            rewards = [Fraction(r >= 1) for r in rewards]
        mean = sum(rewards, Fraction(0)) / len(rewards)
        if kind == "min_std":
            return sum((r - mean) ** 2 for r in rewards) / len(rewards) <= Fraction(low) ** 2
        return kind != "none" and not Fraction(low) < mean < Fraction(high)

    def note_completion(self, group: dict) -> None:
        """Give it its place in the order of completion once nothing is missing."""
        if all(m["status"] in (DONE, DROPPED) for m in group["members"]):
            group["place"] = self.completions
            self.completions += 1

    def free(self, which: Callable[[dict], bool]) -> None:
        """End the leases of the members that are meant."""
        for group in self.open.values():
            for member in group["members"]:
                if member["status"] == LEASED and which(member):
                    member["status"] = FREE

    def leased_to(self, name: str) -> int:
        """The number of leases that the sampler holds."""
        return sum(m["status"] == LEASED and m["name"] == name for g in self.open.values() for m in g["members"])

    def recovered(self, now: float) -> None:
        """The store came back: every open lease counts from now, rests are over, waits begin again."""
        self.idle.clear()
        self.rooms.clear()
        self.behind.clear()
        self.published_at = now
        self.seen.clear()
        self.away.clear()
        for health in self.health.values():
            health["at"] = None
        self.awaited = False
        for group in self.open.values():
            if group["leased_at"] is not None:
                group["leased_at"] = now
            for member in group["members"]:
                member |= {"rest": 0.0, "avoid": 0.0, "leased": None, "deadline": now + self.rules.lease_s}

    def figures(self) -> dict[str, Any]:
        """The status that the store must report after every operation."""
        return {
            "counts": self.counts(),
            "groups_in_flight": self.outstanding(),
            "claims": self.next_claim,
            "acked": self.acked,
            "durable": self.durable,
            "lineage": len(self.lines) - 1,
            "published": self.published,
            "prompts": self.prompts,
            "closed": self.closed,
            "completions": self.completions,
            "put": self.tokens_put,
            "failing": self.failing,
            "masked": self.tokens_masked,
            "expired": {k: n for k, n in self.tokens_ended.items() if n},
        }

    def members(self) -> dict[int, list[tuple[str, int, str]]]:
        """Every member alive: its status, the attempt that counts, its digest."""
        return {
            gid: [
                (m["status"], m["attempt"] if m["status"] in (LEASED, DONE) else 0, m["digest"]) for m in g["members"]
            ]
            for gid, g in (*self.open.items(), *self.held.items())
        }
