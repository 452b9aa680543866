"""Members from leases: many episodes at once, each of which can fail alone.

Every member is a coroutine of its own on one event loop: no episode waits for another, and what an environment does to
one of them is no concern of the others. Thousands of them fit into one process.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from jaxroll.errors import InfraError
from jaxroll.protocols import Environment, GenerationKey, LLMProxy, SamplingParams, Tokenizer
from jaxroll.records import Failed, Finished, Grant, Member, Outcome
from jaxroll.rollout import episode
from jaxroll.rollout.asking import Asked, Asking

_LOG = logging.getLogger(__name__)
_MAX_ERROR_CHARS = 1000
_CLOSE_LIMIT_S = 10.0


@dataclass
class Counts:
    """How the episodes since the start went: finished, failed by kind, and the sums of their reward parts."""

    finished: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """One more."""
        if isinstance(outcome, Finished):
            self.finished += 1
            for name, value in outcome.reward_parts.items():
                self.parts[name] = self.parts.get(name, 0.0) + value
        else:
            self.failed[outcome.kind] += 1


class RolloutManager:
    """Runs episodes of granted members; all methods run on one event loop. What it holds between calls are counts.

    Without a `proxy` every member brings its own.
    """

    def __init__(
        self,
        proxy: LLMProxy | None,
        make_env: Callable[[str], Environment],
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        bounds: episode.Bounds = episode.Bounds(),  # noqa: B008 - it is frozen
    ) -> None:
        self._proxy, self._make_env, self._tokenizer, self._sampling = proxy, make_env, tokenizer, sampling
        self._bounds, self._asking = bounds, Asking()
        self.counts = Counts()

    @property
    def asked(self) -> Asked:
        """What was asked of environments so far."""
        return self._asking.asked

    async def run_member(
        self, grant: Grant, member: int, attempt: int, proxy: LLMProxy | None = None,
        transcript: episode.Transcript | None = None,
    ) -> Member:  # fmt: skip
        """Member `member`, finished or failed: INFRA where the machinery broke, DATA for whatever else went wrong.

        Never raises for an episode's sake. Cancelling aborts the episode and raises CancelledError. Its completions are
        asked of `proxy`, where one is given, and what was said so far stands in `transcript`.
        """
        asked = proxy or self._proxy
        assert asked is not None, "a manager without a proxy is given one with every member"
        outcome = await self._outcome(grant, member, asked, transcript)
        self.counts.add(outcome)
        return Member(grant.group, member, attempt, outcome)

    async def run_group(self, grant: Grant, put: Callable[[Member], Awaitable[object]]) -> None:
        """Runs all members of the grant at once and puts each the moment it ends, rewarded.

        What `put` raises for one member does not stop the others; the first such error is raised at the end.
        """

        async def run_and_put(member: int, attempt: int) -> None:
            await put(await self.run_member(grant, member, attempt))

        members = [asyncio.create_task(run_and_put(member, attempt)) for member, attempt in grant.members]
        try:
            results = await asyncio.gather(*members, return_exceptions=True)
        finally:
            for task in members:  # only a cancellation from outside finds one unfinished
                task.cancel()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _outcome(
        self, grant: Grant, member: int, proxy: LLMProxy, transcript: episode.Transcript | None
    ) -> Outcome:
        try:
            env = self._make_env(grant.task.env)
            try:
                return await episode.run(
                    grant.task,
                    GenerationKey(grant.group, member, grant.key_salt),
                    env=env,
                    proxy=proxy,
                    tokenizer=self._tokenizer,
                    sampling=self._sampling,
                    bounds=self._bounds,
                    asking=self._asking,
                    transcript=transcript,
                )
            finally:
                await _closed(env)
        except InfraError as error:
            return Failed("INFRA", _text(error))
        except Exception as error:  # noqa: BLE001 - an environment may raise anything; it costs its member, no other
            return Failed("DATA", _text(error))


async def _closed(env: Environment) -> None:
    """Closes the environment; how that goes does not change what the episode was."""
    try:
        async with asyncio.timeout(_CLOSE_LIMIT_S):
            closing = env.close()
            if inspect.isawaitable(closing):
                await closing
    except Exception as error:  # noqa: BLE001 - foreign code, and the outcome stands already
        _LOG.warning("closing an environment failed: %s", _text(error))


def _text(error: BaseException) -> str:
    """The error in text that any wire carries: lone surrogates, which UTF-8 has no bytes for, become question marks."""
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS].encode(errors="replace").decode()
