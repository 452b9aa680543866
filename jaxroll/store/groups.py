"""Groups and their members: what the store knows of each. Only `apply` changes them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from jaxroll.records import Task, VersionRun

FREE, LEASED, DONE, DROPPED = "free", "leased", "done", "dropped"


class Slot(msgspec.Struct, gc=False):
    """One member of a group. `attempt` counts its leases; a put must carry the current one.

    `digest` is that of the put that finished it, `failed_digest` that of the last failure, put by `failed_attempt`.
    """

    status: str = FREE
    attempt: int = 0
    fenced: int = 0  # attempts up to this one are void since a rewind
    holder: str = ""
    session: str = ""
    deadline_s: float = 0.0
    leased_at_s: float | None = None  # None: the store was restarted since
    rests_until_s: float = 0.0
    digest: str = ""
    size_bytes: int = 0
    runs: tuple[VersionRun, ...] = ()
    reward: float = 0.0
    failed_attempt: int = 0
    failed_digest: str = ""
    infra_failures: int = 0
    data_failures: int = 0
    failed_by: tuple[str, ...] = ()  # holders
    avoided_until_s: float = 0.0  # not leased again to those before, while others are there

    @property
    def tokens(self) -> int:
        """Sampled tokens of the finished member."""
        return sum(run.count for run in self.runs)


class Group(msgspec.Struct, gc=False):
    """G members of one task. `step` is the claim that took it; `leased_at_s` its first lease, None before.

    `ordinal` is the place of its prompt in the stream of prompts.
    """

    id: int
    task: Task
    slots: list[Slot]
    reissue_of: int | None = None
    reissues: int = 0
    ordinal: int = 0
    wanted: int = 0  # of its members the first so many to finish count; 0: all
    leased_at_s: float | None = None
    ready_place: int | None = None
    step: int | None = None
    acked: bool = False
    note: str = ""

    @property
    def state(self) -> str:
        """The name of its state in the contract."""
        if self.acked:
            return "ACKED"
        if self.step is not None:
            return "CLAIMED"
        if self.ready:
            return "READY"
        return "LEASED" if any(s.status == LEASED for s in self.slots) else "PENDING"

    @property
    def ready(self) -> bool:
        """Whether every member that still counts is there (and one at least)."""
        return self.ready_place is not None

    def done(self) -> Iterator[tuple[int, Slot]]:
        """The finished members, with their numbers."""
        return ((m, s) for m, s in enumerate(self.slots) if s.status == DONE)

    def missing(self) -> Iterator[tuple[int, Slot]]:
        """The members that must still be put."""
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
