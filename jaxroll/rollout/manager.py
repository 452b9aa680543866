"""Rollouts of leased members: concurrent episodes that fail independently; their scores; the loop thread they run on.

Every member is a coroutine of its own on one event loop: no episode waits for another, and an error in one does not
affect the others. Thousands of them fit into one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from jaxroll.config import Config
from jaxroll.config.parsing import SOURCE_ITEMS, played_tasks
from jaxroll.errors import EXIT_FAILURE, InfraError
from jaxroll.protocols import OWNER, Environment, GenerationKey, LLMProxy, Owner, SamplingParams, Tokenizer, described
from jaxroll.records import Failed, Finished, Grant, Member, Outcome, Task, Version
from jaxroll.rollout import episode
from jaxroll.rollout.episode import EnvCallCounts, EnvironmentCalls, is_cancellation
from jaxroll.shared_loop import SharedLoop

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


# --- The asyncio loop thread of a role, with a watchdog, and the thread that runs its JAX jobs
#
# Environments run on this loop. A SystemExit or KeyboardInterrupt of a task that an environment started, and a
# `loop.stop()` of its code, end `run_forever`, which is then entered again. If an environment blocks the loop for
# `hand_over_s`, another thread runs it. If the thread ends nevertheless, or other code or too many environments block
# the loop for `blocked_s`, its jobs fail with that cause, so that the process ends instead of holding leases without
# renewing them.

T = TypeVar("T")
BLOCKED_S, HAND_OVER_S = 60.0, 2.0
MOST_BLOCKED = 16  # threads at one time that environments block
_WATCH_EVERY_S = 1.0
_START_S = 20.0  # in which a thread has started, also on a machine that swaps
_NO_MEMORY = 10  # callbacks of a loop that had no memory, after which the process ends
_FRAMES = 12  # of the blocked thread, for its error


class LoopThread:
    """An asyncio loop on a thread of its own, ended by `close`.

    `escapes` counts the exceptions and stops of foreign code that ended `run_forever`; `failure` is the reason why the
    loop can no longer be used.
    """

    def __init__(self, name: str, blocked_s: float = BLOCKED_S, hand_over_s: float = HAND_OVER_S) -> None:
        self.loop, self.escapes, self.failure = SharedLoop(), 0, ""
        self._name, self._blocked_s, self._hand_over_s = name, blocked_s, hand_over_s
        self._closing = threading.Event()
        self._jobs: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._lock = threading.Lock()
        self._alive_s, self._no_memory = time.monotonic(), 0
        self.loop.set_exception_handler(self._on_error)
        _note_starts_of_threads()
        self._thread = threading.Thread(target=self._run, name=f"{name}-loop", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name=f"{name}-loop-watch", daemon=True).start()

    def start(self, job: Coroutine[Any, Any, Any]) -> Future[Any]:
        """The future result of `job`, which runs on the loop. It is an InfraError if the loop ends or blocks before."""
        if self.failure:
            job.close()
            future: Future[Any] = Future()
            future.set_exception(InfraError(self.failure))
            return future
        future = asyncio.run_coroutine_threadsafe(job, self.loop)
        with self._lock:
            self._jobs[future] = job
        future.add_done_callback(self._forget)
        if self.failure:  # since the test above
            self._fail(self.failure)
        return future

    def close(self) -> None:
        """Stop the loop, join its thread, and close the loop unless a callback still blocks it."""
        self._closing.set()
        with contextlib.suppress(RuntimeError):  # it is closed already
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self.loop.close()

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._jobs.pop(future, None)

    def _run(self) -> None:
        cause = "its event loop ended"
        try:
            while not self._closing.is_set():
                try:
                    self.loop.run_forever()
                    what = "loop.stop()"
                except (SystemExit, KeyboardInterrupt) as error:
                    what = described(error)
                if not self._closing.is_set():
                    self.escapes += 1
                    print(f"{self._name}: {what} of foreign code left the event loop, which goes on", flush=True)
        except BaseException as error:  # noqa: BLE001 - the jobs fail with it, and the process with them
            traceback.print_exc()
            cause = f"its event loop ended: {described(error)}"
        if not self._closing.is_set():
            self._fail(f"{self._name}: {cause}")

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report the error, and end the process if callbacks of the loop have no memory again and again.

        Errors of tasks, which are foreign code, do not count. A callback that lost the loop ends with an error.
        """
        if self.loop.is_elsewhere:
            return
        if "handle" in context and isinstance(context.get("exception"), MemoryError):
            self._no_memory += 1
            if self._no_memory >= _NO_MEMORY:
                try:
                    print(f"{self._name}: MemoryError in {_NO_MEMORY} callbacks of the event loop", flush=True)
                finally:
                    os._exit(EXIT_FAILURE)
        loop.default_exception_handler(context)

    def _watch(self) -> None:
        """Fail the jobs when the loop has not answered for `blocked_s`.

        Only seconds in which this thread ran count, so that a process that was suspended does not fail. The process
        ends if its main thread starts a thread that never runs.
        """
        silent_s, starting_s, last_s, seen_s = 0.0, 0.0, time.monotonic(), self._alive_s
        starting: threading.Thread | None = None
        every_s = min(_WATCH_EVERY_S, self._hand_over_s)
        while not self._closing.wait(every_s) and self._thread.is_alive():
            now_s = time.monotonic()
            watched_s = min(now_s - last_s, 2 * _WATCH_EVERY_S)
            silent_s = silent_s + watched_s if self._alive_s == seen_s else 0.0
            last_s, seen_s, before, starting = now_s, self._alive_s, starting, _starting_thread()
            starting_s = starting_s + watched_s if starting is not None and starting is before else 0.0
            if starting is not None and starting_s >= _START_S:
                print(f"{self._name}: the thread {starting.name} did not start, as if out of memory", flush=True)
                os._exit(EXIT_FAILURE)
            if silent_s >= self._hand_over_s and self._hand_over(silent_s):
                silent_s = 0.0
            if silent_s >= self._blocked_s:
                what, _ = self._blocker(silent_s)
                remedy = 'Run an environment that blocks with place = "thread" or "process"'
                self._fail(f"{self._name}: {what}. {remedy}")
                return
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._alive_s = time.monotonic()

    def _hand_over(self, silent_s: float) -> bool:
        """True if an environment blocks the loop, and another thread runs it now."""
        blocked, decided = self._thread, threading.Event()
        heir = threading.Thread(target=self._inherit, args=(decided,), name=f"{self._name}-loop", daemon=True)
        if self.loop.blocked >= MOST_BLOCKED:
            return False
        try:
            heir.start()
        except RuntimeError:  # the machine refuses a thread
            return False
        what, where = self._blocker(silent_s)
        if owner := self.loop.hand_over(blocked, heir):
            self._thread = heir
            self.loop.call_soon_threadsafe(owner.note_blocked, where)
            print(f"{self._name}: {what}; another thread runs the loop now", flush=True)
        decided.set()
        return owner is not None

    def _inherit(self, decided: threading.Event) -> None:
        decided.wait()
        if self._thread is threading.current_thread():
            self._run()

    def _blocker(self, silent_s: float) -> tuple[str, str]:
        """Description of the task that blocks the loop, and its source line; its stack is printed."""
        task = asyncio.current_task(self.loop)
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
        for line in traceback.format_list(stack):
            print(line, end="", file=sys.stderr, flush=True)
        where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown line"
        name = "a callback" if task is None else f"the task {task.get_name()}"
        return f"{name} blocked the event loop for {silent_s:.0f} s at {where}", where

    def _fail(self, cause: str) -> None:
        self.failure = cause
        with self._lock:
            jobs = dict(self._jobs)
        for future, job in jobs.items():
            with contextlib.suppress(InvalidStateError):  # it ended meanwhile
                future.set_exception(InfraError(cause))
            if inspect.getcoroutinestate(job) == inspect.CORO_CREATED:  # the loop will not start it any more
                job.close()


@functools.cache
def _note_starts_of_threads() -> None:
    """From now on, let each `Owner` know the threads that it starts."""
    original_start = threading.Thread.start  # Python 3.11 has no audit event for it

    @functools.wraps(original_start)
    def start(self: threading.Thread) -> None:
        if (owner := OWNER.get()) is not None and not self.name.startswith("asyncio_"):  # those are the loop's own
            owner.threads.append(weakref.ref(self))
            self.run = functools.partial(_owned, owner, self, vars(self).get("run"))
        original_start(self)

    threading.Thread.start = start


def _owned(owner: Owner, thread: threading.Thread, run: Callable[[], None] | None) -> None:
    """Run a thread of `owner`, which also owns what the thread starts. `run` is one that only this thread had."""
    OWNER.set(owner)
    del thread.run  # it refers to the thread
    (run or thread.run)()


def _starting_thread() -> threading.Thread | None:
    """The thread that the main thread starts now, if any.

    Without memory a new thread may die before its first line: `Thread.start` then waits without end, and nothing is
    reported (seen with Python 3.11).
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not threading.Thread.start.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


class DeviceThread:
    """Runs jobs of an event loop, one at a time, on the thread that calls `run`: the only one that uses JAX."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()

    async def __call__(self, job: Callable[[], T]) -> T:
        """The result of `job`."""
        done: Future[T] = Future()
        self._jobs.put((job, done))
        return await asyncio.wrap_future(done)

    def stop(self) -> None:
        """Make `run` return after the jobs before."""
        self._jobs.put(None)

    def run(self) -> None:
        """Run jobs until `stop`."""
        while (entry := self._jobs.get()) is not None:
            job, done = entry
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(job())
            except Exception as error:  # noqa: BLE001 - the waiting coroutine raises it
                done.set_exception(error)
