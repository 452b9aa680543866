"""One episode: a task, an environment and a model talk until it is over.

Token truth: the model's context is the concatenation of what was shown to it and what it sampled, as ids. Sampled ids
are decoded for the environment and never encoded again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import numpy as np

from jaxroll import env_checks
from jaxroll.config import Config
from jaxroll.config.rules import episode_tokens
from jaxroll.errors import DataError, DeadlineExceeded, InfraError
from jaxroll.protocols import (
    MAX_TURNS,
    Completion,
    Environment,
    GenerationKey,
    LLMProxy,
    SamplingParams,
    Tokenizer,
)
from jaxroll.records import Finished, Message, Segment, Task, VersionRun
from jaxroll.rollout.env_calls import EnvironmentCalls

GENERATION_LIMIT_S = 600.0


@dataclass
class Transcript:
    """What has been said so far, as segments; `context()` is what the model sees next."""

    segments: list[Segment] = field(default_factory=list)
    versions: list[VersionRun] = field(default_factory=list)
    length: int = 0

    def show(self, ids: list[int]) -> None:
        """Add tokens that the model did not sample."""
        tokens = np.asarray(ids, np.int32)
        zeros = np.zeros(len(tokens), np.uint8)
        self._append(Segment(tokens, zeros, zeros.astype(np.float32)))

    def add(self, completion: Completion) -> None:
        """Add what the model sampled, exactly as it was sampled."""
        tokens = np.asarray(completion.tokens, np.int32)
        ones = np.ones(len(tokens), np.uint8)
        self._append(Segment(tokens, ones, np.asarray(completion.logprobs, np.float32)))
        for run in completion.versions:
            if self.versions and self.versions[-1].version == run.version:
                run = VersionRun(run.version, self.versions.pop().count + run.count)
            self.versions.append(run)

    @property
    def sampled(self) -> int:
        """Tokens that the model sampled, of answers that are whole."""
        return sum(run.count for run in self.versions)

    def _append(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.length += len(segment.tokens)

    def context(self) -> np.ndarray:
        """int32 [all tokens so far]."""
        return np.concatenate([segment.tokens for segment in self.segments])

    def finished(self, finish: str, reward: float, parts: dict[str, float]) -> Finished:
        """The outcome with everything said."""
        return Finished(tuple(self.segments), finish, reward, parts, tuple(self.versions))


@dataclass(frozen=True)
class Bounds:
    """What ends an episode that does not end by itself: turns, tokens of the whole conversation (0: no such bound),
    and seconds that one generation may take.

    It must also fit where the learner trains on it: into `row_tokens` (0: no such bound), before which a first prompt
    of up to `prompt_tokens` lies apart, all but its last token.
    """

    turns: int = MAX_TURNS
    tokens: int = 0
    generation_s: float = GENERATION_LIMIT_S
    row_tokens: int = 0
    prompt_tokens: int = 0

    def most(self, first: int) -> int:
        """The most tokens of a conversation whose first prompt has `first`; 0: no bound."""
        apart = first - 1 if first - 1 <= self.prompt_tokens else 0
        limits = [self.tokens, apart + self.row_tokens if self.row_tokens else 0]
        return min((limit for limit in limits if limit), default=0)


def bounds_of(config: Config) -> Bounds:
    """What the config says of them."""
    learner = config.learner
    return Bounds(tokens=episode_tokens(config), row_tokens=learner.row_tokens, prompt_tokens=learner.prompt_tokens)


async def run(
    task: Task,
    key: GenerationKey,
    *,
    env: Environment,
    proxy: LLMProxy,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    bounds: Bounds = Bounds(),
    asking: EnvironmentCalls | None = None,
    transcript: Transcript | None = None,
) -> Finished:
    """The finished episode of `task`; `key` decides the random draws. It is written into `transcript`.

    A completion that did not end by itself ends the episode with reward 0 (`finish` "length", reward part `truncated`
    1): a model must end its answer to be paid for it. So do the turn after the last one that `bounds` or the
    environment allows, and a conversation that has no room for another answer. An environment that does not answer
    within its limits raises DataError, a proxy within `bounds.generation_s` DeadlineExceeded; whatever else they raise
    passes through, InfraError after the retries that the environment declares. Cancelling aborts the generation.
    """
    asking = asking or EnvironmentCalls()
    traits = asking.traits(env)
    turns, sampling = min(bounds.turns, traits.max_turns), _with_stop(sampling, tokenizer)
    transcript = transcript or Transcript()
    messages, most = env_checks.messages(await asking.reset(env, task), "what reset() returned"), 0
    for turn in range(turns):
        transcript.show(_rendered(tokenizer, messages, first=turn == 0))
        most = bounds.most(transcript.length) if turn == 0 else most
        room = _room(most, transcript.length, sampling)
        if room is None:
            return _cut(transcript)
        more = turn + 1 < turns
        completion = await _generated(proxy, transcript.context(), key, room, bounds.generation_s, keep=more)
        transcript.add(completion)
        if completion.finish == "length":
            return _cut(transcript)
        answer = tokenizer.decode(_without_stop(completion, sampling))
        result = env_checks.step_result(await asking.step(env, answer))
        if result.done:
            parts = {**result.reward_parts, "truncated": 0.0}
            return transcript.finished("stop" if turn == 0 else "done", result.reward, parts)
        messages = result.messages
    return _cut(transcript)


def _room(tokens: int, length: int, sampling: SamplingParams) -> SamplingParams | None:
    """`sampling` with no more tokens than the conversation has room for; None where there is none."""
    if not tokens or tokens - length >= sampling.max_tokens:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=tokens - length) if tokens > length else None


def _cut(transcript: Transcript) -> Finished:
    """An episode that did not come to its end."""
    if not transcript.versions:
        raise DataError(f"the first message alone has {transcript.length} tokens: there is no room for an answer")
    if not transcript.segments[-1].loss_mask.any():
        transcript.segments.pop()  # shown, and never answered
    return transcript.finished("length", 0.0, {"truncated": 1.0})


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
    proxy: LLMProxy, prompt: np.ndarray, key: GenerationKey, sampling: SamplingParams, limit_s: float, *, keep: bool
) -> Completion:
    """A completion that holds together; anything else is the engine's failure, not the item's."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            completion = await proxy.generate(prompt, key, sampling, keep=keep)
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineExceeded(f"waited {limit_s:g} s for a completion of {len(prompt)} prompt tokens") from error
        raise InfraError(f"the proxy timed out: {error}") from error
    count = len(completion.tokens)
    if completion.finish not in ("stop", "length"):
        raise InfraError(f"generation ended with {completion.finish!r} after {count} tokens")
    if not count:
        raise InfraError("a completion without a token")
    if len(completion.logprobs) != count or sum(run.count for run in completion.versions) != count:
        raise InfraError(
            f"{count} tokens came with {len(completion.logprobs)} log-probs, versions {completion.versions}"
        )
    if not np.all(np.isfinite(completion.logprobs)):
        raise InfraError("a sampled token has a log-prob that is not finite")
    return completion
