"""Held-out tasks answered and scored at one version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxroll.protocols import Tokenizer
from jaxroll.records import Finished, Grant, Member, Task, Version
from jaxroll.rollout.manager import RolloutManager


@dataclass(frozen=True)
class Score:
    """One task's result: its text, whether the reward was 1, and whether it counts (`pinned`: wholly at the version).

    An item that failed or that saw another version is not pinned and enters no mean.
    """

    task: Task
    text: str
    right: bool
    pinned: bool
    parts: dict[str, float] = field(default_factory=dict)


async def scores(
    manager: RolloutManager, tasks: Sequence[Task], tokenizer: Tokenizer, version: Version, *, permits: int
) -> list[Score]:
    """The score of every task, in order, with at most `permits` episodes at a time."""
    gate = asyncio.Semaphore(permits)

    async def score(index: int, task: Task) -> Score:
        async with gate:
            member = await manager.run_member(Grant(index, task, ((0, 0),), ttl_s=0.0), 0, 0)
        return _score(task, member, tokenizer, version)

    return await asyncio.gather(*(score(index, task) for index, task in enumerate(tasks)))


def accuracy(results: Sequence[Score]) -> float | None:
    """Share of right answers among the items that count; None when none does."""
    counted = [score.right for score in results if score.pinned]
    return sum(counted) / len(counted) if counted else None


def parts(results: Sequence[Score]) -> dict[str, float]:
    """The mean of every reward part over the items that count."""
    counted = [score.parts for score in results if score.pinned]
    names = sorted({name for found in counted for name in found})
    return {name: sum(found.get(name, 0.0) for found in counted) / len(counted) for name in names}


def marks(results: Sequence[Score]) -> str:
    """One character an item: 1 right, 0 wrong, - not counted."""
    return "".join("01"[score.right] if score.pinned else "-" for score in results)


def expected(task: Task) -> str:
    """The answer that the task's arguments name, for a person to compare with; empty where they name none."""
    args = task.args()
    entry = args.get("entry")
    answer = args.get("answer", entry.get("answer") if isinstance(entry, dict) else None)
    return "" if answer is None else str(answer)


def _score(task: Task, member: Member, tokenizer: Tokenizer, version: Version) -> Score:
    outcome = member.outcome
    if not isinstance(outcome, Finished):
        return Score(task, outcome.error, right=False, pinned=False)
    sampled = [int(t) for s in outcome.segments for t, on in zip(s.tokens, s.loss_mask, strict=True) if on]
    pinned = all(run.version == version for run in outcome.versions)
    return Score(task, tokenizer.decode(sampled), outcome.reward == 1.0, pinned, outcome.reward_parts)
