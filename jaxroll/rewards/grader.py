"""The reward of a completion: values from the scoring pool and remote parts, as a weighted sum with named parts."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import dataclass

import msgspec

from jaxroll.config import TaskConfig
from jaxroll.config.rewards import SHAPING, EndpointSettings, GymSettings, LengthSettings, is_function, terms
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import described
from jaxroll.records import Message
from jaxroll.rewards import grading, parts
from jaxroll.rewards.grading import IN_WORKERS, Grading, LocalPart
from jaxroll.rewards.remote import BACKOFF_MAX_S, Request
from jaxroll.rewards.scoring_pool import ScoringPool

QUEUE_ALLOWANCE_S = 120.0  # for earlier requests in the pool's queue, and for a worker that is starting
CORRECT = "correct"


@dataclass(frozen=True)
class Grade:
    """A reward with its parts; `extracted` is the answer found in the completion, None if extraction is off."""

    reward: float
    parts: dict[str, float]
    extracted: str | None = None


class Grader:
    """Grades completions as `task.extract` and `task.reward` say.

    With "auto" the reward is 1 if the raw score of the task's scorer is exactly 1.0, else 0. A sum has a part of its
    own name for each term, and the part `correct`: 1 if the first term that is not mere shaping has the value 1.
    """

    # Exactly 1.0: some scorers give wrong answers partial credit of 0.9999999999999999 or 1.0000000000000002.

    def __init__(self, pool: ScoringPool, task: TaskConfig) -> None:
        self.limit_s = pool.time_limit_s + QUEUE_ALLOWANCE_S
        self._pool, self._terms = pool, terms(task.reward, task.reward_args)
        self._cuts = task.extract != "none"
        self._plain = not self._terms and not self._cuts
        self._remote = [term for term in self._terms if isinstance(term.settings, EndpointSettings)]
        self.limit_s += max((_patience_s(term.settings) for term in self._remote), default=0.0)
        self._grading = "" if self._plain else msgspec.json.encode(instructions(task)).decode()

    async def grade(self, env_args: str, completion: str, tokens: int, messages: tuple[Message, ...] = ()) -> Grade:
        """The grade of `completion`, which has `tokens` tokens and answers `messages`.

        DataError when one of its parts has no value, InfraError when an endpoint fails.
        """
        if self._plain:
            raw = await self._pool.score(env_args, completion)
            return Grade(_binary(raw), {"raw_score": raw})
        graded = await self._pool.grade(env_args, completion, self._grading)
        extracted = graded.answer if self._cuts else None
        if not self._terms:
            raw = graded.values["raw_score"]
            return Grade(_binary(raw), {"raw_score": raw}, extracted)
        values = dict(graded.values)
        values |= await self._remote_values(env_args, completion, graded.answer, messages)
        more: dict[str, float] = {}
        for term in self._terms:
            if isinstance(term.settings, GymSettings):
                more["raw_score"] = values[term.label]
                values[term.label] = values[term.label] if term.settings.partial else _binary(values[term.label])
        first = next(term.label for term in self._terms if term.kind not in SHAPING)
        correct = values[first] == 1.0
        for term in self._terms:
            if isinstance(term.settings, LengthSettings):
                values[term.label] = parts.length(tokens, correct, term.settings)
        reward = sum(term.weight * values[term.label] for term in self._terms)
        named = {term.label: values[term.label] for term in self._terms}
        return Grade(reward, {**named, **more, CORRECT: float(correct)}, extracted)

    async def _remote_values(
        self, env_args: str, completion: str, answer: str, messages: tuple[Message, ...]
    ) -> dict[str, float]:
        """The values of remote parts, computed concurrently; a judge does not see an empty answer, whose value is 0."""
        asked = [term for term in self._remote if term.kind != "judge" or answer or not self._cuts]
        values = dict.fromkeys((term.label for term in self._remote), 0.0)
        if not asked:
            return values
        if self._pool.remote is None:
            raise DataError("reward models and judges work within a run only")
        wanted = parts.truth_or_empty(msgspec.json.decode(env_args))
        shown = tuple({"role": message.role, "content": message.content} for message in messages)
        request = Request(shown, completion, answer, wanted)
        found = await asyncio.gather(*(self._pool.remote.value(term.label, term.settings, request) for term in asked))
        return values | dict(zip((term.label for term in asked), found, strict=True))


def _patience_s(settings: EndpointSettings) -> float:
    """The longest time of all attempts of a call, and as long again in the queue of the endpoint."""
    return 2 * (settings.retries + 1) * (settings.timeout_s + BACKOFF_MAX_S)


def _binary(raw: float) -> float:
    return 1.0 if raw == 1.0 else 0.0


def instructions(task: TaskConfig) -> Grading:
    """The work of scoring workers that `task.extract` and `task.reward` require."""
    named = terms(task.reward, task.reward_args)
    if not named:
        return Grading(task.extract, (LocalPart("raw_score"),))
    found = (
        LocalPart(term.label, term.kind, msgspec.to_builtins(term.settings))
        for term in named
        if term.is_function or term.kind in IN_WORKERS
    )
    return Grading(task.extract, tuple(found))


def check(task: TaskConfig) -> None:
    """Raise ConfigError if the functions or libraries that the task's reward needs cannot be loaded here."""
    named = terms(task.reward, task.reward_args)
    functions = [("task.extract", task.extract)] if is_function(task.extract) else []
    functions += [("task.reward", term.kind) for term in named if term.is_function]
    for key, name in functions:
        try:
            grading.load(name)
        except (Exception, SystemExit) as error:
            raise ConfigError(key, name, f"it cannot be loaded: {described(error)}",
                              "Give the file's path relative to the config, and the name of a function in it.",
                              ) from error  # fmt: skip
    if any(term.kind == "math" for term in named) and importlib.util.find_spec(parts.MATH_LIBRARY) is None:
        raise ConfigError("task.reward", task.reward, "math-verify is not installed", "pip install 'jaxroll[math]'.")
