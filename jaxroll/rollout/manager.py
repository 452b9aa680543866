"""Rollouts of leased members: concurrent episodes that fail independently, and their scores.

Every member is a coroutine of its own on one event loop: no episode waits for another, and an error in one does not
affect the others. Thousands of them fit into one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxroll.config import Config
from jaxroll.config.parsing import SOURCE_ITEMS, played_tasks
from jaxroll.envs.executors import EnvCallCounts, EnvironmentCalls, is_cancellation
from jaxroll.errors import InfraError
from jaxroll.protocols import Environment, GenerationKey, LLMProxy, SamplingParams, Tokenizer, described
from jaxroll.records import Failed, Finished, Grant, Member, Outcome, Task, Version
from jaxroll.rollout import episode

# --- Rollouts of leased members

_LOG = logging.getLogger(__name__)


@dataclass
class Counts:
    """Episode counts since the start: finished, failed by kind, and sums over those that finished."""

    finished: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    parts: dict[str, float] = field(default_factory=dict)  # of reward parts
    reward: float = 0.0
    tokens: int = 0  # sampled

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        if isinstance(outcome, Finished):
            self.finished += 1
            self.reward += outcome.reward
            self.tokens += sum(run.count for run in outcome.versions)
            for name, value in outcome.reward_parts.items():
                self.parts[name] = self.parts.get(name, 0.0) + value
        else:
            self.failed[outcome.kind] += 1

    def means(self) -> dict[str, Any]:
        """The episodes that finished, with their mean reward and mean number of sampled tokens (None without any)."""
        reward, tokens = (total / self.finished if self.finished else None for total in (self.reward, self.tokens))
        return {"episodes": self.finished, "reward": reward, "tokens": tokens}


def own_bounds(config: Config) -> dict[str, episode.Bounds]:
    """The limits of an episode by environment (`Task.env`), for sources with settings of their own."""
    own = {env: task for env, task in played_tasks(config).items() if "@" in env}
    return {env: episode.bounds_of(dataclasses.replace(config, task=task)) for env, task in own.items()}


EpisodePlayer = Callable[..., Awaitable[Finished]]


class RolloutManager:
    """Runs episodes of granted members; all methods run on one event loop. Its only state between calls is counts.

    Without a `proxy` every member brings its own. `play` plays an episode, with the arguments of `episode.run`.
    `own_bounds` are the limits for some environments (`Task.env`), `bounds` those for the others. The counts are also
    kept for each of `sources`, the labels of the sources of prompts by number.
    """

    def __init__(
        self,
        proxy: LLMProxy | None,
        make_env: Callable[[str], Environment],
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        bounds: episode.Bounds = episode.Bounds(),  # noqa: B008 - it is frozen
        own_bounds: Mapping[str, episode.Bounds] = MappingProxyType({}),
        sources: Sequence[str] = (),
        play: EpisodePlayer = episode.run,
    ) -> None:
        self._proxy, self._make_env, self._env_calls = proxy, make_env, EnvironmentCalls()
        fixed = {"tokenizer": tokenizer, "sampling": sampling, "env_calls": self._env_calls}
        self._play, self._bounds, self._own_bounds = functools.partial(play, **fixed), bounds, own_bounds
        self.counts, self.by_source = Counts(), {label: Counts() for label in sources}
        self._sources = sources

    @property
    def env_calls(self) -> EnvCallCounts:
        """Counts of environment calls so far."""
        return self._env_calls.counts

    def left_threads(self) -> int:
        """Number of threads that closed environments left running; each is counted once in `env_calls.faults`."""
        return self._env_calls.left_threads()

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
        number = grant.task.index // SOURCE_ITEMS
        if number < len(self._sources):  # items of a held-out set may have any index
            self.by_source[self._sources[number]].add(outcome)
        return Member(grant.group, member, attempt, outcome)

    async def _outcome(
        self, grant: Grant, member: int, proxy: LLMProxy, transcript: episode.Transcript | None
    ) -> Outcome:
        try:
            with contextlib.suppress(episode.RestoreFailed):  # counted; another environment plays from the start
                return await self._episode(grant, member, proxy, transcript)
            return await self._episode(grant, member, proxy, transcript)
        except InfraError as error:
            return Failed("INFRA", described(error))
        except BaseException as error:
            if is_cancellation(error):
                raise
            return Failed("DATA", described(error))

    async def _episode(
        self, grant: Grant, member: int, proxy: LLMProxy, transcript: episode.Transcript | None
    ) -> Finished:
        env = self._env_calls.make(self._make_env, grant.task.env)
        try:
            key = GenerationKey(grant.group, member, grant.key_salt)
            bounds = self._own_bounds.get(grant.task.env, self._bounds)
            return await self._play(grant.task, key, env=env, proxy=proxy, transcript=transcript, bounds=bounds)
        finally:
            await self._close(env)

    async def _close(self, env: Environment) -> None:
        """Close the environment. A failure is counted and does not change the outcome."""
        try:
            await self._env_calls.close(env)
        except Exception as error:  # noqa: BLE001 - foreign code; the outcome is known already
            self.env_calls.add_fault(f"close: {described(error)}")
            _LOG.warning("closing an environment failed: %s", described(error))


# --- Held-out tasks answered and scored at one version


@dataclass(frozen=True)
class Score:
    """Result of one task: its text, and `pinned` if all tokens are of the evaluated version.

    `right` is True if the reward was 1, or if its parts include one called `correct`, if that one was 1.
    A failed item, and one with tokens of another version, is not pinned and does not count in any mean. `failed` is
    INFRA or DATA for a failed item, whose text is the error; else ''.
    """

    task: Task
    text: str
    right: bool
    pinned: bool
    parts: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None
    failed: str = ""


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


def grouped(values: Sequence[Any], key: Callable[[Any], str]) -> Mapping[str, list[Any]]:
    """`values` by key, in order of the keys; empty if only one key, the empty one, occurs."""
    found: dict[str, list[Any]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return {} if set(found) <= {""} else dict(sorted(found.items()))


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
        return Score(task, outcome.error, right=False, pinned=False, failed=outcome.kind)
    sampled = [int(t) for s in outcome.segments for t, on in zip(s.tokens, s.loss_mask, strict=True) if on]
    pinned = all(run.version == version for run in outcome.versions)
    right = outcome.reward_parts.get("correct", outcome.reward) == 1.0  # a sum of parts may be another number
    return Score(task, tokenizer.decode(sampled), right, pinned, outcome.reward_parts, outcome.extracted)
