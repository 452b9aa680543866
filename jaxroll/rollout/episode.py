"""One episode: the conversation of an environment and a model about one task.

Token truth: the model's context is the concatenation of the token ids shown to it and those that it sampled. Sampled
ids are decoded for the environment and never encoded again.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from jaxroll import protocols
from jaxroll.config import Config
from jaxroll.config.derived import episode_tokens, room_of_member
from jaxroll.errors import DataError, DeadlineExceeded, InfraError
from jaxroll.protocols import Completion, Environment, GenerationKey, LLMProxy, SamplingParams, StepResult, Tokenizer
from jaxroll.records import MAX_STATE_BYTES, NO_EXPERTS, Finished, Message, Partial, Segment, Task, VersionRun

# --- Calls of environment code, with time limits and retries, isolated from each other
#
# Each call is a task of its own: environment code that cancels its task, raises CancelledError, or ignores a
# cancellation affects only its own member. It cannot cancel tasks of others, and if it blocks the loop of a role,
# another thread runs the loop (`loop_thread.SharedLoop`). SystemExit, KeyboardInterrupt and GeneratorExit become
# DataError, because the environment raised them and the process goes on.

T = TypeVar("T")
Call = Callable[[], Any]
Sleep = Callable[[float], Awaitable[object]]
PAUSE_FIRST_S, PAUSE_MAX_S = 0.1, 10.0
CLOSE_LIMIT_S, LEFT_S, CANCEL_GRACE_S = 10.0, 10.0, 5.0  # for a close, its threads and a cancelled call to end
CAUSES, CAUSE_CHARS = 32, 200  # most different causes of faults, and characters of one


@dataclass
class EnvCallCounts:
    """Environment calls since the start: all, repeated, over their time limit, deaf to cancellation (abandoned).

    `faults` counts misbehaviour that may leave the outcome of its member as it is, such as a failed close, by cause.
    """

    calls: int = 0
    retries: int = 0
    overdue: int = 0
    abandoned: int = 0
    restored: int = 0  # environments that continue after the turns of another process
    faults: Counter[str] = field(default_factory=Counter)

    def add_fault(self, cause: str) -> None:
        """Count one fault."""
        count_cause(self.faults, cause)


def count_cause(counts: Counter[str], cause: str) -> None:
    """Count `cause`, at most `CAUSES` different ones. Causes that differ in numbers only are one cause."""
    cause = re.sub(r"0x[0-9a-fA-F]+|\d+", "N", cause.split("\n", 1)[0])[:CAUSE_CHARS]
    counts[cause if cause in counts or len(counts) < CAUSES else "other causes"] += 1


class EnvironmentCalls:
    """Calls environments on the event loop. `sleep` waits between two attempts."""

    def __init__(self, sleep: Sleep = asyncio.sleep) -> None:
        self.counts, self._sleep = EnvCallCounts(), sleep
        self._owners: dict[int, protocols.Owner] = {}  # id of an environment → the owner of its tasks
        self._closed: deque[tuple[float, protocols.Owner]] = deque(maxlen=1 << 14)  # with the time of the close
        self._left: list[threading.Thread] = []  # of closed environments
        self._stuck: dict[int, asyncio.Task[Any]] = {}  # id of an environment → its call that ignores its cancellation

    def traits(self, env: Environment) -> protocols.Traits:
        """The traits that `env` declares; DataError if they are invalid."""
        try:
            return protocols.traits(env)
        except ValueError as error:
            raise DataError(str(error)) from error

    def make(self, make: Callable[[str], Environment], name: str) -> Environment:
        """The environment `name`, made by `make`."""
        before = protocols.OWNER.set(owner := self._new_owner("making it", name))
        try:
            env = make(name)
        except BaseException as error:
            self._closed.append((time.monotonic(), owner))
            if isinstance(error, Exception):
                raise
            raise DataError(f"making the environment raised {protocols.described(error)}") from error
        finally:
            protocols.OWNER.reset(before)
        self._owners[id(env)] = owner
        return env

    async def reset(self, env: Environment, task: Task) -> tuple[Message, ...]:
        """The first messages. DataError after the time limit, InfraError after the last retry."""
        declared = self.traits(env)
        call = lambda: env.reset(task, task.seed)  # noqa: E731
        return await self._with_retries(env, call, declared.reset_limit_s, declared.reset_retries, "reset")

    async def step(self, env: Environment, answer: str) -> StepResult:
        """The result of `answer`; raises as `reset` does."""
        declared = self.traits(env)
        call = lambda: env.step(answer)  # noqa: E731
        return await self._with_retries(env, call, declared.step_limit_s, declared.step_retries, "step")

    async def restored(self, env: Environment, stream: AnswerStream | None, shown: list[int]) -> Sequence[Partial]:
        """The completed turns of another process after the prompt `shown`; `env` continues there, or RestoreFailed."""
        if stream is None or not self.traits(env).restores:
            return ()
        turns = stream.turns(np.asarray(shown, np.int32))
        if turns and (end := turns[-1].turn) is not None:
            try:
                await self.restore(env, end.state)
            except Exception as error:
                self.counts.add_fault(f"restore: {protocols.described(error)}")
                raise RestoreFailed(protocols.described(error)) from error
        return turns

    async def restore(self, env: Environment, state: bytes) -> None:
        """Make `env`, which was reset, continue after the step that returned `state`. Raises what it raises."""
        restore, limit_s = getattr(env, "restore"), self.traits(env).reset_limit_s  # noqa: B009 - optional in the protocol
        self.counts.calls += 1
        await self._within_limit(env, lambda: restore(state), limit_s, "restore")
        self.counts.restored += 1

    async def close(self, env: Environment) -> None:
        """Close `env`, unless one of its calls is still running. Raises the error of its close."""
        try:
            if id(env) not in self._stuck:
                await self._within_limit(env, env.close, CLOSE_LIMIT_S, "close")
        finally:
            if owner := self._owners.pop(id(env), None):
                self._closed.append((time.monotonic(), owner))

    def left_threads(self) -> int:
        """Number of threads that run `LEFT_S` after the close of the environment that started them; counts new ones."""
        while self._closed and time.monotonic() - self._closed[0][0] >= LEFT_S:
            _, owner = self._closed.popleft()
            for thread in (found for one in list(owner.threads) if (found := one()) and found.is_alive()):
                self.counts.add_fault(f"{owner.name} left the thread {thread.name} running")
                self._left.append(thread)
        self._left = [thread for thread in self._left if thread.is_alive()]
        return len(self._left)

    async def _with_retries(self, env: Environment, call: Call, limit_s: float, retries: int, what: str) -> Any:
        for attempt in range(retries + 1):
            self.counts.calls += 1
            try:
                return await self._within_limit(env, call, limit_s, what)
            except InfraError:
                if attempt == retries:
                    raise
                self.counts.retries += 1
                await self._sleep(min(PAUSE_FIRST_S * 2**attempt, PAUSE_MAX_S))
        raise AssertionError("unreachable")

    async def _within_limit(self, env: Environment, call: Call, limit_s: float, what: str) -> Any:
        """The result of the call. A timeout is a DataError: the same item and answer would time out again."""
        owner, context, name = self._owner_of(env), copy_context(), f"{type(env).__name__}.{what}"
        context.run(protocols.OWNER.set, owner)
        owner.blocked_at, owner.cancelled, owner.call = "", 0, name
        task = asyncio.get_running_loop().create_task(_answered(call, what), name=name, context=context)
        try:
            await asyncio.wait([task], timeout=None if math.isinf(limit_s) else limit_s)
        except asyncio.CancelledError:
            await self._cancelled(env, task, context)
            raise
        if not task.done():
            self.counts.overdue += 1
            blocked = f" and blocked the event loop at {owner.blocked_at}" if owner.blocked_at else ""
            await self._cancelled(env, task, context)
            raise DataError(f"the environment's {what} took longer than {limit_s:g} s{blocked}")
        if owner.cancelled:
            raise DataError(f"the environment's {what} cancelled {owner.cancelled} tasks that it did not start")
        if task.cancelled():
            raise DataError(f"the environment's {what} cancelled itself")
        error = task.exception()
        if error is not None and not isinstance(error, Exception):  # GeneratorExit, or a panic of compiled code
            raise DataError(f"the environment's {what} raised {protocols.described(error)}") from error
        return task.result()

    def _owner_of(self, env: Environment) -> protocols.Owner:
        if id(env) not in self._owners:
            self._owners[id(env)] = self._new_owner(type(env).__name__)
        return self._owners[id(env)]

    def _new_owner(self, call: str, name: str = "") -> protocols.Owner:
        where = "{0.call} blocked the event loop at {0.blocked_at}".format
        return protocols.Owner(call, lambda it: self.counts.add_fault(where(it)), name)

    async def _cancelled(self, env: Environment, task: asyncio.Task[Any], context: Context) -> None:
        """Cancel the call and wait for it to end; abandon it if it ignores the cancellation.

        A call that waits for tasks of others must not pass its cancellation on to them: it is made in its `context`.
        """
        context.copy().run(task.cancel)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio warns about it
        try:
            await asyncio.wait([task], timeout=CANCEL_GRACE_S)
        finally:
            if not task.done():
                self.counts.abandoned += 1
                self._stuck[id(env)] = task
                task.add_done_callback(lambda _: self._stuck.pop(id(env), None))  # keeps `env` alive, and its id taken


async def _answered(call: Call, what: str) -> Any:
    """The result of `call`; DataError for exceptions that would end the event loop or look like our cancellation."""
    try:
        found = call()
        return await found if inspect.isawaitable(found) else found
    except TimeoutError as error:
        raise DataError(f"the environment's {what} timed out: {protocols.described(error)}") from error
    except Exception:
        raise
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        if is_cancellation(error):
            raise
        raise DataError(f"the environment's {what} raised {protocols.described(error)}") from error


def is_cancellation(error: BaseException) -> bool:
    """True if `error` comes from a cancellation of the current task; False if foreign code raised it."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


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
        experts = np.concatenate(self.experts) if self.experts else NO_EXPERTS
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


def sampling_params(config: Config, tokenizer: Tokenizer, temperature: float | None = None) -> SamplingParams:
    """The sampling parameters of training rollouts, or of evaluations at `temperature`, which are not truncated."""
    s, stop = config.sampling, (tokenizer.eos_id,)
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
    messages = protocols.messages(await env_calls.reset(env, task), "what reset() returned")
    shown = _rendered(tokenizer, messages, tools, first=True)
    most, played = bounds.most(len(shown)), await env_calls.restored(env, stream, shown)
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
        state = _kept_state(traits, result.state, env_calls.counts)
        stream = stream if state is not None else None
        if stream is not None and state is not None and more:
            stream.end_turn(completion, shown, state)
    return _cut(transcript)


def _kept_state(declared: protocols.Traits, state: bytes | None, counts: EnvCallCounts) -> bytes | None:
    """The state after a step, if there is one that can be kept; one that is too large is a fault."""
    if state is not None and not declared.restores:
        raise DataError("StepResult.state is given, but the environment has no method restore(state)")
    if state is None or len(state) <= MAX_STATE_BYTES:
        return state
    counts.add_fault(f"state: {len(state)} bytes, at most {MAX_STATE_BYTES} are kept")
    return None


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
    if tokenizer.eos_id in sampling.stop_tokens:
        return sampling
    return msgspec.structs.replace(sampling, stop_tokens=(*sampling.stop_tokens, tokenizer.eos_id))


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
