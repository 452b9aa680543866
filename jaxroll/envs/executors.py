"""The executor of each environment, by its declared place, and the calls of environment code.

Episodes call all environments as coroutines.

place      for                                               if a call hangs
loop       coroutines; functions that return at once         only the member fails; one that blocks costs a thread
thread     libraries that block: sockets, sleep, files       its thread is lost; too many lost threads end the process
process    heavy or crashing code; code that holds the GIL   only the member fails: the process is killed
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxroll import protocols
from jaxroll.config import Config
from jaxroll.config.parsing import played_tasks
from jaxroll.envs import registry
from jaxroll.envs.processes import InProcess, Processes
from jaxroll.envs.threads import InThread, Threads
from jaxroll.errors import ConfigError, DataError, InfraError, RestartRequired, described
from jaxroll.loop_thread import OwnedTask, SharedLoop
from jaxroll.protocols import OWNER, Environment, StepResult
from jaxroll.records import MAX_STATE_BYTES, Message, Task
from jaxroll.rewards.processes import resident_bytes
from jaxroll.rewards.scoring_pool import ScoringPool

# --- The executor of each environment, by its declared place


class Executors:
    """Factory of the environments of one event loop; owns the threads and processes that they share."""

    def __init__(self, pool: ScoringPool, config: Config, threads: Threads | None = None) -> None:
        self._pool, self._tasks = pool, {"": config.task, **played_tasks(config)}
        self.threads = threads or Threads(config.sampler.env_threads)
        self.processes = Processes(config.sampler.env_processes, self._tasks)
        loop = asyncio._get_running_loop()  # None outside of one
        self._loop = loop if isinstance(loop, SharedLoop) else None
        if self._loop is not None:
            self._run_in_executor, self._loop.run_in_executor = self._loop.run_in_executor, self._run_owned

    def _run_owned(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """As `loop.run_in_executor`. Calls of environments do not use the default executor.

        It has a few threads, which the role needs for weights; calls that hang, as in `asyncio.to_thread`, would take
        them one after the other, and nothing would count them.
        """
        if executor is None and (owner := OWNER.get()) is not None:
            call = asyncio.ensure_future(self.threads.call(functools.partial(func, *args), math.inf, "thread"))
            owner.calls.add(call)
            call.add_done_callback(owner.calls.discard)
            return call
        return self._run_in_executor(executor, func, *args)

    def create(self, name: str) -> Environment:
        """A new environment for one episode of a task whose environment is `name`.

        ConfigError for an unknown name, DataError for an unknown source and for invalid traits.
        """
        task = registry.section(self._tasks, name)
        factory = registry.factory(task.env if "@" in name else name)
        declared = self._declared(factory)
        if declared.place == "process":
            return InProcess(name, declared, self.processes)
        env = factory(self._pool, task)
        if self._declared(env).place != "thread":
            return env
        if inspect.iscoroutinefunction(env.step):
            raise DataError(f"{name}: place = 'thread' is for plain functions; use 'loop' for coroutines")
        return InThread(env, self.threads)

    def counts(self) -> dict[str, int | dict[str, int]]:
        """Counts of failures so far.

        They count calls in threads that were abandoned (and those that still hang), environment processes and scoring
        workers that were replaced or failed to start, times that a scoring worker became slow, answers that a scorer's
        guard rejected, and items without a score, by cause. With them comes the memory of this process in a role.
        """
        return {
            "env_threads_abandoned": self.threads.abandoned,
            "env_threads_hanging": self.threads.hanging,
            "env_processes_replaced": self.processes.replaced,
            "env_process_failed_starts": self.processes.failed_starts,
            "scoring_restarts": self._pool.restarts,
            "scoring_failed_starts": self._pool.failed_starts,
            "scoring_slow": self._pool.found_slow,
            "answers_rejected": dict(self._pool.rejected),
            "scoring_failed": dict(self._pool.failed),
            "scoring_remote": dict(self._pool.remote.counts) if self._pool.remote else {},
            **({} if self._loop is None else {"resident_bytes": resident_bytes()}),  # simulations repeat their rows
        }

    async def raise_when_worn_out(self) -> None:
        """Wait forever, or raise when environments cannot run any more.

        RestartRequired when too many threads hang in environments; InfraError when no scoring worker or no environment
        process can be started; ConfigError when the budget of a judge or reward model is spent.
        """
        remote = self._pool.remote
        events = [self.threads.worn, self.processes.gave_up, self._pool.gave_up, *([remote.spent] if remote else [])]
        waiting = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
        if remote and remote.spent_key:
            raise ConfigError(
                remote.spent_key, remote.spent_limit, "the run has spent it", "Continue with --resume and a larger one."
            )
        if self._pool.gave_up.is_set():
            raise InfraError(f"the scoring pool does not work: {self._pool.broken}")
        if self.processes.gave_up.is_set():
            raise InfraError(f"environment processes do not start: {self.processes.broken}")
        hanging, leftover = self.threads.hanging, self.threads.leftover
        raise RestartRequired(f"environments: {hanging} threads hang, {leftover} run on after close; no more start")

    async def close(self) -> None:
        """Kill the processes. Threads are daemons, so hanging ones do not keep this process from ending."""
        if self._loop is not None and self._loop.run_in_executor == self._run_owned:
            self._loop.run_in_executor = self._run_in_executor
        await self.processes.close()

    @staticmethod
    def _declared(environment: Any) -> protocols.Traits:
        try:
            return protocols.traits(environment)
        except ValueError as error:
            raise DataError(str(error)) from error


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
MAKE_LIMIT_S = 300.0  # for a constructor, which may load a library or a data set
JUDGE_EVERY_S = 0.1
CAUSES, CAUSE_CHARS = 32, 200  # most different causes of faults, and characters of one


@dataclass
class EnvCallCounts:
    """Environment calls since the start: all, repeated, over their time limit, deaf to cancellation (abandoned).

    `faults` counts misbehavior that may leave the outcome of its member as it is, such as a failed close, by cause.
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


def _running(owner: protocols.Owner) -> list[threading.Thread]:
    """The threads of `owner` that are alive."""
    return [thread for one in list(owner.threads) if (thread := one()) and thread.is_alive()]


class EnvironmentCalls:
    """Calls environments on the event loop. `sleep` waits between two attempts."""

    def __init__(self, sleep: Sleep = asyncio.sleep) -> None:
        self.counts, self._sleep = EnvCallCounts(), sleep
        self._owners: dict[int, protocols.Owner] = {}  # id of an environment → the owner of its tasks
        self._closed: deque[tuple[float, protocols.Owner]] = deque(maxlen=1 << 14)  # with the time of the close
        self._left: list[threading.Thread] = []  # of closed environments
        self._stuck: dict[int, asyncio.Task[Any]] = {}  # id of an environment → its call that ignores its cancellation
        self._closing = set[asyncio.Task[None]]()  # of environments that were made too late

    def traits(self, env: Environment) -> protocols.Traits:
        """The traits that `env` declares; DataError if they are invalid."""
        try:
            return protocols.traits(env)
        except ValueError as error:
            raise DataError(str(error)) from error

    async def make(self, make: Callable[[str], Environment], name: str) -> Environment:
        """The environment `name`, made by `make`; DataError after `MAKE_LIMIT_S`. One made too late is closed."""
        owner, made = self._new_owner("making it", name), list[Environment]()
        call = lambda: made.append(make(name))  # noqa: E731
        try:
            await self._as_task(owner, "making it", call, MAKE_LIMIT_S, "making the environment", id(owner))
        except BaseException:
            if (late := self._stuck.get(id(owner))) is not None:
                late.add_done_callback(lambda _: self._close_late(owner, made))
            else:
                await self._close_unused(owner, made)
            raise
        self._owners[id(made[0])] = owner
        return made[0]

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

    async def restore(self, env: Environment, state: bytes) -> None:
        """Make `env`, which was reset, continue after the step that returned `state`. Raises what it raises."""
        restore, limit_s = getattr(env, "restore"), self.traits(env).reset_limit_s  # noqa: B009 - optional in the protocol
        self.counts.calls += 1
        await self._within_limit(env, lambda: restore(state), limit_s, "restore")
        self.counts.restored += 1

    def kept_state(self, env: Environment, state: bytes | None) -> bytes | None:
        """The `state` after a step of `env`, if there is one that can be kept; one that is too large is a fault."""
        if state is not None and not self.traits(env).restores:
            raise DataError("StepResult.state is given, but the environment has no method restore(state)")
        if state is None or len(state) <= MAX_STATE_BYTES:
            return state
        self.counts.add_fault(f"state: {len(state)} bytes, at most {MAX_STATE_BYTES} are kept")
        return None

    async def close(self, env: Environment) -> None:
        """Close `env`, unless one of its calls is still running. Raises the error of its close."""
        try:
            if id(env) not in self._stuck:
                await self._within_limit(env, env.close, CLOSE_LIMIT_S, "close")
        finally:
            if owner := self._owners.pop(id(env), None):
                self._closed.append((time.monotonic(), owner))

    def left_threads(self) -> int:
        """Number of threads that run `LEFT_S` after the close of the environment that started them; counts new ones.

        Tasks that still run then are counted as faults. Calls that it left in threads of the executor are given up, and
        count there as hanging.
        """
        ended = list[protocols.Owner]()
        while self._closed and time.monotonic() - self._closed[0][0] >= LEFT_S:
            _, owner = self._closed.popleft()
            ended += [] if owner.calls else [owner]  # tasks that wait for these calls end with them
            for call in list(owner.calls):
                self.counts.add_fault(f"{owner.name} left a call in a thread running")
                call.cancel()
            for thread in _running(owner):
                self.counts.add_fault(f"{owner.name} left the thread {thread.name} running")
                self._left.append(thread)
        for owner, task in self._tasks_of(ended):
            self.counts.add_fault(f"{owner.name} left the task {task.get_name()} running")
        self._left = [thread for thread in self._left if thread.is_alive()]
        return len(self._left)

    async def judged_threads(self) -> int:
        """Wait until each closed owner's calls have ended, `LEFT_S` at most, and return `left_threads()`."""
        for _ in range(math.ceil(LEFT_S / JUDGE_EVERY_S) + 1):  # not longer by a virtual clock
            owners = [owner for _, owner in self._closed]
            if not any(owner.calls or _running(owner) for owner in owners) and not self._tasks_of(owners):
                break
            await asyncio.sleep(JUDGE_EVERY_S)
        return self.left_threads()

    def _tasks_of(self, owners: list[protocols.Owner]) -> list[tuple[protocols.Owner, OwnedTask]]:
        """The tasks on this loop that these owners started and that run, without calls that were abandoned."""
        if not owners:
            return []
        known, stuck = set(map(id, owners)), self._stuck.values()
        tasks = [task for task in asyncio.all_tasks() if isinstance(task, OwnedTask) and task not in stuck]
        return [(task.owner, task) for task in tasks if task.owner is not None and id(task.owner) in known]

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
        """The result of the call, as by `_as_task`."""
        name = f"{type(env).__name__}.{what}"
        return await self._as_task(self._owner_of(env), name, call, limit_s, f"the environment's {what}", id(env))

    async def _as_task(self, owner: protocols.Owner, name: str, call: Call, limit_s: float, what: str, key: int) -> Any:
        """The result of the call. A timeout is a DataError: the same item and answer would time out again."""
        context = copy_context()
        context.run(protocols.OWNER.set, owner)
        owner.blocked_at, owner.cancelled, owner.call = "", 0, name
        task = asyncio.get_running_loop().create_task(_answered(call, what), name=name, context=context)
        try:
            await asyncio.wait([task], timeout=None if math.isinf(limit_s) else limit_s)
        except asyncio.CancelledError:
            await self._cancelled(key, task, context)
            raise
        if not task.done():
            self.counts.overdue += 1
            blocked = f" and blocked the event loop at {owner.blocked_at}" if owner.blocked_at else ""
            await self._cancelled(key, task, context)
            raise DataError(f"{what} took longer than {limit_s:g} s{blocked}")
        if owner.cancelled:
            raise DataError(f"{what} cancelled {owner.cancelled} tasks that it did not start")
        if task.cancelled():
            raise DataError(f"{what} cancelled itself")
        error = task.exception()
        if error is not None and not isinstance(error, Exception):  # GeneratorExit, or a panic of compiled code
            raise DataError(f"{what} raised {described(error)}") from error
        return task.result()

    def _close_late(self, owner: protocols.Owner, made: list[Environment]) -> None:
        closing = asyncio.ensure_future(self._close_unused(owner, made))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close_unused(self, owner: protocols.Owner, made: list[Environment]) -> None:
        """Close what a constructor returned although its call failed or was cancelled, if it returned something."""
        if not made:
            self._closed.append((time.monotonic(), owner))
            return
        self._owners[id(made[0])] = owner
        try:
            await self.close(made[0])
        except Exception as error:  # noqa: BLE001 - foreign code; the member has failed already
            self.counts.add_fault(f"close: {described(error)}")

    def _owner_of(self, env: Environment) -> protocols.Owner:
        if id(env) not in self._owners:
            self._owners[id(env)] = self._new_owner(type(env).__name__)
        return self._owners[id(env)]

    def _new_owner(self, call: str, name: str = "") -> protocols.Owner:
        where = "{0.call} blocked the event loop at {0.blocked_at}".format
        return protocols.Owner(call, lambda it: self.counts.add_fault(where(it)), name)

    async def _cancelled(self, key: int, task: asyncio.Task[Any], context: Context) -> None:
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
                self._stuck[key] = task  # whose context and call keep the object of this id alive
                task.add_done_callback(lambda _: self._stuck.pop(key, None))


async def _answered(call: Call, what: str) -> Any:
    """The result of `call`; DataError for exceptions that would end the event loop or look like our cancellation."""
    try:
        found = call()
        return await found if inspect.isawaitable(found) else found
    except TimeoutError as error:
        raise DataError(f"{what} timed out: {described(error)}") from error
    except Exception:
        raise
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        if is_cancellation(error):
            raise
        raise DataError(f"{what} raised {described(error)}") from error


def is_cancellation(error: BaseException) -> bool:
    """True if `error` comes from a cancellation of the current task; False if foreign code raised it.

    True without a running loop too: it has ended, and the coroutine of a member that was left pending is collected.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return True
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
