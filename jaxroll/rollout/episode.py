"""Episodes: the conversation of an environment and a model about one task, the rollouts of members, and their scores.

Token truth: the model's context is the concatenation of the token ids shown to it and those that it sampled. Sampled
ids are decoded for the environment and never encoded again.

Every member is a coroutine of its own on one event loop: no episode waits for another, and an error in one does not
affect the others. Thousands of them fit into one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import numpy as np

from jaxroll import protocols, records
from jaxroll.config import Config
from jaxroll.config.derived import episode_tokens, room_of_member
from jaxroll.config.parsing import SOURCE_ITEMS, played_tasks
from jaxroll.envs.executors import EnvCallCounts, EnvironmentCalls, is_cancellation
from jaxroll.errors import DataError, DeadlineExceeded, InfraError, described
from jaxroll.protocols import Completion, Environment, GenerationKey, LLMProxy, SamplingParams, Tokenizer
from jaxroll.records import Failed, Finished, Grant, Member, Message, Partial, Segment, Task, Version, VersionRun
from jaxroll.text.tokenizers import end_ids

_LOG = logging.getLogger(__name__)

# --- One episode

GENERATION_LIMIT_S = 600.0


class RestoreFailed(Exception):
    """An environment could not continue after the turns of another process; it must not be used any more."""


class AnswerStream(Protocol):
    """The conversation on its way to the store, the tokens of an answer `piece_tokens` at a time."""

    piece_tokens: int

    def unended(self) -> int: ...  # sampled tokens of the current answer that have come
    def may_sample(self, sampled: int) -> int: ...  # tokens that may follow so many of the current answer now

    def turns(self, prompt: np.ndarray) -> Sequence[Partial]:
        """The completed turns after the first prompt (int32 [P]) of another process; at a second call none."""
        ...

    def begin(self, prompt: np.ndarray) -> Completion | None:
        """The first tokens of the answer to `prompt` (int32 [P]), if another process has sampled some."""

    def add(self, piece: Completion) -> None:
        """Take further tokens of the answer."""

    def end_turn(self, answer: Completion, shown: Sequence[int], state: bytes) -> None:
        """Take the complete answer, the tokens shown after it, and the environment's state."""


@dataclass
class Transcript:
    """The conversation so far, as segments; `context()` is the model's next prompt.

    A `stream` receives the tokens of the first answer while they are sampled, and those of later turns as long as the
    environment can be restored.
    """

    segments: list[Segment] = field(default_factory=list)
    versions: list[VersionRun] = field(default_factory=list)
    length: int = 0
    experts: list[np.ndarray] = field(default_factory=list)  # chosen experts of the first tokens, in pieces [E, X]
    stream: AnswerStream | None = None

    def show(self, ids: list[int]) -> None:
        """Add tokens that the model did not sample."""
        zeros = np.zeros(len(ids), np.uint8)
        self._append(Segment(np.asarray(ids, np.int32), zeros, zeros.astype(np.float32)))

    def add(self, completion: Completion) -> None:
        """Add the sampled tokens unchanged."""
        known = sum(map(len, self.experts))
        if len(completion.experts) > known:  # tokens of earlier turns keep the record of the turn that sampled them
            self.experts.append(completion.experts[known:])
        tokens = np.asarray(completion.tokens, np.int32)
        ones = np.ones(len(tokens), np.uint8)
        self._append(Segment(tokens, ones, np.asarray(completion.logprobs, np.float32), support=completion.support))
        self.add_versions(completion.versions)

    def add_versions(self, versions: Sequence[VersionRun]) -> None:
        """Add the versions of further sampled tokens."""
        for run in versions:
            if self.versions and self.versions[-1].version == run.version:
                run = VersionRun(run.version, self.versions.pop().count + run.count)
            self.versions.append(run)

    @property
    def sampled(self) -> int:
        """Number of sampled tokens in complete answers."""
        return sum(run.count for run in self.versions)

    def _append(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.length += len(segment.tokens)

    def context(self) -> np.ndarray:
        """int32 [all tokens so far]."""
        return np.concatenate([segment.tokens for segment in self.segments])

    def finished(self, finish: str, reward: float, parts: dict[str, float], extracted: str | None = None) -> Finished:
        """The outcome, with all segments."""
        experts = np.concatenate(self.experts) if self.experts else records.NO_EXPERTS
        return Finished(tuple(self.segments), finish, reward, parts, tuple(self.versions), extracted, experts)


@dataclass(frozen=True)
class Bounds:
    """Limits of an episode: turns and tokens of the whole conversation (0: no limit), seconds of one generation.

    It must also fit into a row of the learner: `row_tokens` (0: no limit), in addition to a first prompt of up to
    `prompt_tokens`, which is packed separately except for its last token.
    """

    turns: int = 0
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
    """The limits of the config."""
    row_tokens, prompt_tokens = room_of_member(config.learner)
    return Bounds(config.task.max_turns, episode_tokens(config), row_tokens=row_tokens, prompt_tokens=prompt_tokens)


def own_bounds(config: Config) -> dict[str, Bounds]:
    """The limits of an episode by environment (`Task.env`), for sources with settings of their own."""
    own = {env: task for env, task in played_tasks(config).items() if "@" in env}
    return {env: bounds_of(replace(config, task=task)) for env, task in own.items()}


def sampling_params(config: Config, tokenizer: Tokenizer, temperature: float | None = None) -> SamplingParams:
    """The sampling parameters of training rollouts, or of evaluations at `temperature`, which are not truncated."""
    s, stop = config.sampling, end_ids(tokenizer)
    if temperature is not None:
        return SamplingParams(s.max_tokens, temperature, stop_tokens=stop)
    return SamplingParams(s.max_tokens, s.temperature, s.top_k, s.top_p, stop, min_p=s.min_p)


async def run(
    task: Task,
    key: GenerationKey,
    *,
    env: Environment,
    proxy: LLMProxy,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    bounds: Bounds = Bounds(),
    env_calls: EnvironmentCalls | None = None,
    transcript: Transcript | None = None,
) -> Finished:
    """The finished episode of `task`; `key` determines the random draws. It is written into `transcript`.

    A truncated completion ends the episode with reward 0 (`finish` "length", reward part `truncated` 1), and so do a
    conversation that reaches the last turn that `bounds` or the environment allows, and one without room for another
    answer: a model must end its answer to be rewarded. DataError if the environment exceeds its time limits,
    DeadlineExceeded if a generation exceeds `bounds.generation_s`; other errors pass through, InfraError after the
    retries that the environment declares. Cancelling aborts the generation.

    It continues after the completed turns that the transcript's stream has of another process, for which it restores
    the environment. RestoreFailed if that fails, before anything is in the transcript.
    """
    env_calls, transcript = env_calls or EnvironmentCalls(), transcript or Transcript()
    traits = env_calls.traits(env)
    turns, sampling = min(bounds.turns or traits.max_turns, traits.max_turns), with_stop(sampling, tokenizer)
    tools, stream = task.tools(), transcript.stream
    messages = protocols.messages(await env_calls.reset(env, task), "the value of reset()")
    shown = _rendered(tokenizer, messages, tools, first=True)
    most, played = bounds.most(len(shown)), await _restored(env_calls, env, stream, shown)
    for turn in range(turns):
        transcript.show(shown)
        if turn < len(played) and (end := (one := played[turn]).turn) is not None:
            transcript.add(Completion(one.tokens, one.logprobs, one.versions, "stop", one.support))
            shown = end.shown.tolist()
            continue
        left = room(most, transcript.length, sampling)
        if left is None:
            return _cut(transcript)
        more = turn + 1 < turns
        prompt = transcript.context()
        completion = await generated(proxy, prompt, key, left, bounds.generation_s, keep=more, stream=stream)
        transcript.add(completion)
        if completion.finish == "length":
            return _cut(transcript)
        answer = tokenizer.decode(_without_stop(completion, sampling))
        if hasattr(env, "answer_tokens"):
            setattr(env, "answer_tokens", len(completion.tokens))  # noqa: B010 - optional in the protocol
        result = protocols.step_result(await env_calls.step(env, answer))
        if result.done:
            parts = {**result.reward_parts, "truncated": 0.0}
            return transcript.finished("stop" if turn == 0 else "done", result.reward, parts, result.extracted)
        shown = _rendered(tokenizer, result.messages, tools, first=False) if more else []
        state = env_calls.kept_state(env, result.state)
        stream = stream if state is not None else None
        if stream is not None and state is not None and more:
            stream.end_turn(completion, shown, state)
    return _cut(transcript)


async def _restored(
    calls: EnvironmentCalls, env: Environment, stream: AnswerStream | None, shown: list[int]
) -> Sequence[Partial]:
    """The completed turns of another process after the prompt `shown`; `env` continues there, or RestoreFailed."""
    if stream is None or not calls.traits(env).restores:
        return ()
    turns = stream.turns(np.asarray(shown, np.int32))
    if turns and (end := turns[-1].turn) is not None:
        try:
            await calls.restore(env, end.state)
        except Exception as error:
            calls.counts.add_fault(f"restore: {described(error)}")
            raise RestoreFailed(described(error)) from error
    return turns


def room(tokens: int, length: int, sampling: SamplingParams) -> SamplingParams | None:
    """`sampling`, limited to the tokens that the conversation has room for; None if there is no room."""
    if not tokens or tokens - length >= sampling.max_tokens:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=tokens - length) if tokens > length else None


def _cut(transcript: Transcript) -> Finished:
    """The outcome of a truncated episode."""
    if not transcript.versions:
        raise DataError(f"the first message alone has {transcript.length} tokens: there is no room for an answer")
    if not transcript.segments[-1].loss_mask.any():
        transcript.segments.pop()  # a message that the model did not answer
    return transcript.finished("length", 0.0, {"truncated": 1.0})


def with_stop(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """`sampling` with the end of sequence among its stop tokens."""
    stops = dict.fromkeys((*sampling.stop_tokens, tokenizer.eos_id))
    return msgspec.structs.replace(sampling, stop_tokens=tuple(stops))


def _rendered(tokenizer: Tokenizer, messages: tuple[Message, ...], tools: list, *, first: bool) -> list[int]:
    if not messages:
        raise DataError("the environment is not done and shows nothing to answer")
    return tokenizer.render(messages, first=first, tools=tools)


def _without_stop(completion: Completion, sampling: SamplingParams) -> list[int]:
    """The sampled ids before the stop token. InfraError if a completion with finish "stop" does not end in one."""
    ids = completion.tokens.tolist()
    if not ids or ids[-1] not in sampling.stop_tokens:
        raise InfraError(f"a completion with finish 'stop' ends in {ids[-1:]}, stop tokens are {sampling.stop_tokens}")
    return ids[:-1]


async def generated(
    proxy: LLMProxy,
    prompt: np.ndarray,
    key: GenerationKey,
    sampling: SamplingParams,
    limit_s: float,
    *,
    keep: bool,
    stream: AnswerStream | None = None,
) -> Completion:
    """The completion. An inconsistent one is an error of the engine (InfraError), not of the item.

    With a `stream` it continues the tokens that the stream begins with, and the stream gets the others as they come.
    """
    limit = asyncio.timeout(limit_s)
    more: dict[str, Any] = {}
    if stream is not None:
        more = {"before": stream.begin(prompt), "on_tokens": stream.add, "piece_tokens": stream.piece_tokens}
        more["may_sample"] = stream.may_sample
    try:
        async with limit:
            completion = await proxy.generate(prompt, key, sampling, keep=keep, **more)
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineExceeded(f"waited {limit_s:g} s for a completion of {len(prompt)} prompt tokens") from error
        raise InfraError(f"the proxy timed out: {error}") from error
    count = len(completion.tokens)
    if completion.finish not in ("stop", "length"):
        raise InfraError(f"generation ended with {completion.finish!r} after {count} tokens")
    if not count:
        raise InfraError("a completion without a token")
    if (logprobs := len(completion.logprobs)) != count or sum(run.count for run in completion.versions) != count:
        raise InfraError(f"{count} tokens came with {logprobs} log-probs, versions {completion.versions}")
    if not np.all(np.isfinite(completion.logprobs)):
        raise InfraError("a sampled token has a log-prob that is not finite")
    return completion


# --- Rollouts of leased members


@dataclass
class Counts:
    """Episode counts since the start: finished, failed by kind, and sums over those that finished."""

    finished: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    parts: dict[str, float] = field(default_factory=dict)  # of reward parts
    reward: float = 0.0
    tokens: int = 0  # sampled

    def add(self, outcome: records.Outcome) -> None:
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


EpisodePlayer = Callable[..., Awaitable[Finished]]


class RolloutManager:
    """Runs episodes of granted members; all methods run on one event loop. Its only state between calls is counts.

    Without a `proxy` every member brings its own. `play` plays an episode, with the arguments of `run`.
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
        bounds: Bounds = Bounds(),
        own_bounds: Mapping[str, Bounds] = MappingProxyType({}),
        sources: Sequence[str] = (),
        play: EpisodePlayer = run,
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

    async def judged_threads(self) -> int:
        """`left_threads` of all closed environments, which it waits for (about 10 s) if any has threads or tasks."""
        return await self._env_calls.judged_threads()

    async def run_member(
        self,
        grant: Grant,
        member: int,
        attempt: int,
        proxy: LLMProxy | None = None,
        transcript: Transcript | None = None,
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
        self, grant: Grant, member: int, proxy: LLMProxy, transcript: Transcript | None
    ) -> records.Outcome:
        try:
            with contextlib.suppress(RestoreFailed):  # counted; another environment plays from the start
                return await self._episode(grant, member, proxy, transcript)
            return await self._episode(grant, member, proxy, transcript)
        except InfraError as error:
            return Failed("INFRA", described(error))
        except BaseException as error:
            if is_cancellation(error):
                raise
            return Failed("DATA", described(error))

    async def _episode(self, grant: Grant, member: int, proxy: LLMProxy, transcript: Transcript | None) -> Finished:
        env = await self._env_calls.make(self._make_env, grant.task.env)
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

    `right`: the reward is 1 or, if there is a part `correct`, that is. An item that failed (`failed` is INFRA or DATA,
    `text` the error) or has tokens of another version is not pinned and counts in no mean.
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
    samples: int = 1,
    first: int = 0,
) -> list[list[Score]]:
    """The scores of all tasks in order, a list for each of `samples` repetitions; at most `permits` episodes at a time.

    The number of the repetition and that of the task, where `first` is the first one's, determine the random keys.
    """
    gate = asyncio.Semaphore(permits)

    async def score(index: int, task: Task, sample: int) -> Score:
        async with gate:
            member = await manager.run_member(Grant(first + index, task, ((sample, 0),), ttl_s=0.0), sample, 0)
        return _score(task, member, tokenizer, version)

    found = await asyncio.gather(*(score(at, task, k) for k in range(samples) for at, task in enumerate(tasks)))
    return [found[k * len(tasks) : (k + 1) * len(tasks)] for k in range(samples)]


def grouped(values: Sequence[Any], key: Callable[[Any], str]) -> Mapping[str, list[Any]]:
    """`values` by key, in order of the keys; empty if only one key, the empty one, occurs."""
    found: dict[str, list[Any]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return {} if set(found) <= {""} else dict(sorted(found.items()))


def _score(task: Task, member: Member, tokenizer: Tokenizer, version: Version) -> Score:
    outcome = member.outcome
    if not isinstance(outcome, Finished):
        return Score(task, outcome.error, right=False, pinned=False, failed=outcome.kind)
    sampled = [int(t) for s in outcome.segments for t, on in zip(s.tokens, s.loss_mask, strict=True) if on]
    pinned = all(run.version == version for run in outcome.versions)
    right = outcome.reward_parts.get("correct", outcome.reward) == 1.0  # a sum of parts may be another number
    return Score(task, tokenizer.decode(sampled), right, pinned, outcome.reward_parts, outcome.extracted)
