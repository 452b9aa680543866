"""One episode: a task, an environment and a model talk until it is over.

Token truth: the model's context is the concatenation of what was shown to it and what it sampled, as ids. Sampled ids
are decoded for the environment and never encoded again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from jaxroll.errors import DataError, DeadlineExceeded, InfraError
from jaxroll.protocols import Completion, Environment, GenerationKey, LLMProxy, SamplingParams, StepResult, Tokenizer
from jaxroll.records import Finished, Message, Segment, Task, VersionRun

MAX_TURNS = 64
GENERATION_LIMIT_S = 600.0

T = TypeVar("T")


@dataclass
class Transcript:
    """What has been said so far, as segments; `context()` is what the model sees next."""

    segments: list[Segment] = field(default_factory=list)
    versions: list[VersionRun] = field(default_factory=list)

    def show(self, ids: list[int]) -> None:
        """Adds tokens that the model did not sample."""
        tokens = np.asarray(ids, np.int32)
        zeros = np.zeros(len(tokens), np.uint8)
        self.segments.append(Segment(tokens, zeros, zeros.astype(np.float32)))

    def add(self, completion: Completion) -> None:
        """Adds what the model sampled, exactly as it was sampled."""
        tokens = np.asarray(completion.tokens, np.int32)
        ones = np.ones(len(tokens), np.uint8)
        self.segments.append(Segment(tokens, ones, np.asarray(completion.logprobs, np.float32)))
        for run in completion.versions:
            if self.versions and self.versions[-1].version == run.version:
                run = VersionRun(run.version, self.versions.pop().count + run.count)
            self.versions.append(run)

    def context(self) -> np.ndarray:
        """int32 [all tokens so far]."""
        return np.concatenate([segment.tokens for segment in self.segments])

    def finished(self, finish: str, reward: float, parts: dict[str, float]) -> Finished:
        """The outcome with everything said."""
        return Finished(tuple(self.segments), finish, reward, parts, tuple(self.versions))


async def run(
    task: Task,
    key: GenerationKey,
    *,
    env: Environment,
    proxy: LLMProxy,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    max_turns: int = MAX_TURNS,
    generation_limit_s: float = GENERATION_LIMIT_S,
) -> Finished:
    """The finished episode of `task`; `key` decides the random draws.

    A completion that did not end by itself ends the episode with reward 0 (`finish` "length", reward part `truncated`
    1): a model must end its answer to be paid for it. So does the turn after `max_turns`. An environment that does not
    answer within its `step_limit_s` raises DataError, a proxy within `generation_limit_s` DeadlineExceeded; whatever
    else they raise passes through. Cancelling aborts the generation.
    """
    sampling = _with_stop(sampling, tokenizer)
    transcript = Transcript()
    messages = await _in_time(env.reset(task, task.seed), env.step_limit_s, "reset")
    for turn in range(max_turns):
        transcript.show(_rendered(tokenizer, messages, first=turn == 0))
        completion = await _generated(proxy, transcript.context(), key, sampling, generation_limit_s)
        transcript.add(completion)
        if completion.finish == "length":
            return transcript.finished("length", 0.0, {"truncated": 1.0})
        answer = tokenizer.decode(_without_stop(completion, sampling))
        result = await _in_time(env.step(answer), env.step_limit_s, "step")
        if result.done:
            return transcript.finished("stop" if turn == 0 else "done", *_reward(result))
        messages = result.messages
    return transcript.finished("length", 0.0, {"truncated": 1.0, "turns": float(max_turns)})


def _reward(result: StepResult) -> tuple[float, dict[str, float]]:
    if not np.isfinite(result.reward):
        raise DataError(f"the environment's reward is {result.reward}")
    return float(result.reward), {**result.reward_parts, "truncated": 0.0}


def _with_stop(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """`sampling` with the end of sequence among its stop tokens."""
    if tokenizer.eos_id in sampling.stop_tokens:
        return sampling
    return msgspec.structs.replace(sampling, stop_tokens=(*sampling.stop_tokens, tokenizer.eos_id))


def _rendered(tokenizer: Tokenizer, messages: tuple[Message, ...], *, first: bool) -> list[int]:
    if not messages:
        raise DataError("the environment is not done and shows nothing to answer")
    return tokenizer.render(messages, first=first)


def _without_stop(completion: Completion, sampling: SamplingParams) -> list[int]:
    """The sampled ids before the stop token. A completion that says "stop" without one has not ended by itself."""
    ids = completion.tokens.tolist()
    if not ids or ids[-1] not in sampling.stop_tokens:
        raise InfraError(f"a completion with finish 'stop' ends in {ids[-1:]}, stop tokens are {sampling.stop_tokens}")
    return ids[:-1]


async def _generated(
    proxy: LLMProxy, prompt: np.ndarray, key: GenerationKey, sampling: SamplingParams, limit_s: float
) -> Completion:
    """A completion that holds together; anything else is the engine's failure, not the item's."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            completion = await proxy.generate(prompt, key, sampling)
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineExceeded(f"waited {limit_s:g} s for a completion of {len(prompt)} prompt tokens") from error
        raise InfraError(f"the proxy timed out: {error}") from error
    count = len(completion.tokens)
    if completion.finish not in ("stop", "length"):
        raise InfraError(f"generation ended with {completion.finish!r} after {count} tokens")
    if len(completion.logprobs) != count or sum(run.count for run in completion.versions) != count:
        raise InfraError(
            f"{count} tokens came with {len(completion.logprobs)} log-probs, versions {completion.versions}"
        )
    if not np.all(np.isfinite(completion.logprobs)):
        raise InfraError("a sampled token has a log-prob that is not finite")
    return completion


async def _in_time(call: Awaitable[T], limit_s: float, what: str) -> T:
    """The environment's answer. A hang is the item's fault: the same answer would hang again."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await call
    except TimeoutError as error:
        if limit.expired():
            raise DataError(f"the environment's {what} took longer than {limit_s:g} s") from error
        raise DataError(f"the environment's {what} timed out: {error}") from error
