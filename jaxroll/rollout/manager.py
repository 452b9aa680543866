"""Rollouts of leased members: many concurrent episodes, which fail independently; evaluation and its accuracy.

Every member is a coroutine of its own on one event loop: no episode waits for another, and an error in one does not
affect the others. Thousands of them fit into one process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxroll.errors import InfraError
from jaxroll.protocols import Environment, GenerationKey, LLMProxy, SamplingParams, Tokenizer, described
from jaxroll.records import Failed, Finished, Grant, Member, Outcome, Task, Version
from jaxroll.rollout import episode
from jaxroll.rollout.episode import EnvCallCounts, EnvironmentCalls, is_cancellation

# --- Accuracy of evaluated tasks: pass@k, mean@n, intervals, accuracy by source. Pure

RESAMPLES = 1000


class Scored(Protocol):
    """A scored answer: whether it is right, and whether it counts."""

    @property
    def right(self) -> bool: ...

    @property
    def pinned(self) -> bool: ...


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate 1 − C(n−c, k)/C(n, k) of the chance that one of k samples is right, given c right of n.

    Source: Chen et al. 2021, arXiv 2107.03374, 2.1. ValueError unless 1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} of {c} right among {n} samples is not defined")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean(values: Sequence[float]) -> float:
    """The mean; ValueError for no values."""
    if not values:
        raise ValueError("the mean of no values is not defined")
    return math.fsum(values) / len(values)


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean of `values`, by resampling items (Efron 1979); the same for equal seeds."""
    draw = random.Random(seed)
    means = sorted(mean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]


def counts(samples: Sequence[Sequence[Scored]]) -> list[tuple[int, int]]:
    """(answers that count, right ones) of each item, for the items with any; `samples` has one list per repetition."""
    found = []
    for answers in zip(*samples, strict=True):
        counted = [answer.right for answer in answers if answer.pinned]
        if counted:
            found.append((len(counted), sum(counted)))
    return found


def table(found: Sequence[tuple[int, int]], ks: Sequence[int]) -> dict[str, tuple[float, float, float]]:
    """(estimate, low, high) of mean@n and of pass@k for each k, over items with (n, c); with 95 % bootstrap intervals.

    An item with fewer than k answers that count is left out of pass@k.
    """
    most = max(n for n, _ in found)
    rows: dict[str, list[float]] = {f"mean@{most}": [c / n for n, c in found]}
    rows |= {f"pass@{k}": [pass_at_k(n, c, k) for n, c in found if n >= k] for k in ks}
    return {name: (mean(values), *bootstrap(values)) for name, values in rows.items() if values}


def grouped(values: Sequence[Any], key: Callable[[Any], str]) -> Mapping[str, list[Any]]:
    """`values` by key, in order of the keys; empty if only one key, the empty one, occurs."""
    found: dict[str, list[Any]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return {} if set(found) <= {""} else dict(sorted(found.items()))


# --- Rollouts of leased members

_LOG = logging.getLogger(__name__)


@dataclass
class Counts:
    """Episode counts since the start: finished, failed by kind, and the sums of their reward parts.

    `closes_failed` counts environments whose close raised or took too long.
    """

    finished: int = 0
    closes_failed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        if isinstance(outcome, Finished):
            self.finished += 1
            for name, value in outcome.reward_parts.items():
                self.parts[name] = self.parts.get(name, 0.0) + value
        else:
            self.failed[outcome.kind] += 1


EpisodePlayer = Callable[..., Awaitable[Finished]]


class RolloutManager:
    """Runs episodes of granted members; all methods run on one event loop. Its only state between calls is counts.

    Without a `proxy` every member brings its own. `play` plays an episode, with the arguments of `episode.run`.
    """

    def __init__(
        self,
        proxy: LLMProxy | None,
        make_env: Callable[[str], Environment],
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        bounds: episode.Bounds = episode.Bounds(),  # noqa: B008 - it is frozen
        play: EpisodePlayer = episode.run,
    ) -> None:
        self._proxy, self._make_env, self._tokenizer, self._sampling = proxy, make_env, tokenizer, sampling
        self._bounds, self._env_calls, self._play = bounds, EnvironmentCalls(), play
        self.counts = Counts()

    @property
    def env_calls(self) -> EnvCallCounts:
        """Counts of environment calls so far."""
        return self._env_calls.counts

    async def run_member(
        self,
        grant: Grant,
        member: int,
        attempt: int,
        proxy: LLMProxy | None = None,
        transcript: episode.Transcript | None = None,
    ) -> Member:
        """Member `member`, finished or failed: INFRA for errors of the infrastructure, DATA for any other error.

        Errors of the episode are not raised. Cancelling aborts the episode and raises CancelledError. `proxy`, if
        given, generates its completions; `transcript` contains the conversation so far.
        """
        generator = proxy or self._proxy
        assert generator is not None, "without a proxy of its own the manager needs one with every member"
        outcome = await self._outcome(grant, member, generator, transcript)
        self.counts.add(outcome)
        return Member(grant.group, member, attempt, outcome)

    async def run_group(self, grant: Grant, put: Callable[[Member], Awaitable[object]]) -> None:
        """Run all members of the grant concurrently and `put` each one when it ends, with its reward.

        An error of `put` for one member does not stop the others; the first such error is raised at the end.
        """

        async def run_and_put(member: int, attempt: int) -> None:
            await put(await self.run_member(grant, member, attempt))

        members = [asyncio.create_task(run_and_put(member, attempt)) for member, attempt in grant.members]
        try:
            results = await asyncio.gather(*members, return_exceptions=True)
        finally:
            for task in members:  # unfinished only after a cancellation from outside
                task.cancel()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _outcome(
        self, grant: Grant, member: int, proxy: LLMProxy, transcript: episode.Transcript | None
    ) -> Outcome:
        try:
            env = self._env_calls.make(self._make_env, grant.task.env)
            try:
                return await self._play(
                    grant.task,
                    GenerationKey(grant.group, member, grant.key_salt),
                    env=env,
                    proxy=proxy,
                    tokenizer=self._tokenizer,
                    sampling=self._sampling,
                    bounds=self._bounds,
                    env_calls=self._env_calls,
                    transcript=transcript,
                )
            finally:
                await self._close(env)
        except InfraError as error:
            return Failed("INFRA", described(error))
        except BaseException as error:
            if is_cancellation(error):
                raise
            return Failed("DATA", described(error))

    async def _close(self, env: Environment) -> None:
        """Close the environment. A failure is counted and does not change the outcome."""
        try:
            await self._env_calls.close(env)
        except Exception as error:  # noqa: BLE001 - foreign code; the outcome is known already
            self.counts.closes_failed += 1
            _LOG.warning("closing an environment failed: %s", described(error))


# --- Held-out tasks answered and scored at one version


@dataclass(frozen=True)
class Score:
    """Result of one task: its text, and `pinned` if all tokens are of the evaluated version.

    `right` is True if the reward was 1, or if its parts include one called `correct`, if that one was 1.
    A failed item, and one with tokens of another version, is not pinned and does not count in any mean.
    """

    task: Task
    text: str
    right: bool
    pinned: bool
    parts: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None


async def scores(
    manager: RolloutManager,
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    version: Version,
    *,
    permits: int,
    sample: int = 0,
    first: int = 0,
) -> list[Score]:
    """The score of every task, in order, with at most `permits` episodes at a time.

    `sample` is the number of the repetition and `first` that of the first task; both determine the random keys.
    """
    gate = asyncio.Semaphore(permits)

    async def score(index: int, task: Task) -> Score:
        async with gate:
            member = await manager.run_member(Grant(first + index, task, ((sample, 0),), ttl_s=0.0), sample, 0)
        return _score(task, member, tokenizer, version)

    return await asyncio.gather(*(score(index, task) for index, task in enumerate(tasks)))


def accuracy(results: Sequence[Score]) -> float | None:
    """Fraction of right answers among the pinned items; None without any."""
    counted = [score.right for score in results if score.pinned]
    return sum(counted) / len(counted) if counted else None


def parts(results: Sequence[Score]) -> dict[str, float]:
    """The mean of every reward part over the pinned items."""
    counted = [score.parts for score in results if score.pinned]
    names = sorted({name for found in counted for name in found})
    return {name: sum(found.get(name, 0.0) for found in counted) / len(counted) for name in names}


def marks(results: Sequence[Score]) -> str:
    """One character per item: 1 right, 0 wrong, - not pinned."""
    return "".join("01"[score.right] if score.pinned else "-" for score in results)


def expected(task: Task) -> str:
    """The reference answer in the task's arguments, for display; empty if there is none."""
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
    right = outcome.reward_parts.get("correct", outcome.reward) == 1.0  # a sum of parts may be another number
    return Score(task, tokenizer.decode(sampled), right, pinned, outcome.reward_parts, outcome.extracted)
