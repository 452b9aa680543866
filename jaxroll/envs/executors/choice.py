"""The executor of each environment, by its declared place; episodes call all environments as coroutines.

place      for                                               if a call hangs
loop       coroutines; functions that return at once         only the member fails (a coroutine can be cancelled)
thread     libraries that block: sockets, sleep, files       its thread is lost; too many lost threads end the process
process    heavy or crashing code; code that holds the GIL   only the member fails: the process is killed
"""

from __future__ import annotations

import asyncio
import inspect
import math
from typing import Any

from jaxroll import protocols
from jaxroll.config import Config
from jaxroll.envs import registry
from jaxroll.envs.executors.processes import InProcess, Processes
from jaxroll.envs.executors.threads import Abandoned, Threads
from jaxroll.errors import ConfigError, DataError, InfraError, RestartRequired
from jaxroll.protocols import Environment, StepResult
from jaxroll.records import Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool


class Executors:
    """Factory of the environments of one event loop; owns the threads and processes that they share."""

    def __init__(self, pool: ScoringPool, config: Config) -> None:
        self._pool, self._task = pool, config.task
        self.threads = Threads(config.sampler.env_threads)
        self.processes = Processes(config.sampler.env_processes, config.task)

    def create(self, name: str) -> Environment:
        """A new environment for one episode. ConfigError for an unknown name, DataError for invalid traits."""
        factory = registry.factory(name)
        declared = self._declared(factory)
        if declared.place == "process":
            return InProcess(name, declared, self.processes)
        env = factory(self._pool, self._task)
        if self._declared(env).place != "thread":
            return env
        if inspect.iscoroutinefunction(env.step):
            raise DataError(f"{name}: place = 'thread' is for plain functions; use 'loop' for coroutines")
        return InThread(env, self.threads)

    def counts(self) -> dict[str, int | dict[str, int]]:
        """Counts of failures so far.

        They count calls in threads that were abandoned (and those that still hang), environment processes and scoring
        workers that were replaced or failed to start, answers that a scorer's guard rejected, and items without a
        score, by cause.
        """
        return {
            "env_threads_abandoned": self.threads.abandoned,
            "env_threads_hanging": self.threads.hanging,
            "env_processes_replaced": self.processes.replaced,
            "env_process_failed_starts": self.processes.failed_starts,
            "scoring_restarts": self._pool.restarts,
            "scoring_failed_starts": self._pool.failed_starts,
            "answers_rejected": dict(self._pool.rejected),
            "scoring_failed": dict(self._pool.failed),
            "scoring_remote": dict(self._pool.remote.counts) if self._pool.remote else {},
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
            raise ConfigError(remote.spent_key, remote.spent_limit, "the run has spent it",
                              "Continue with --resume and a larger one.")  # fmt: skip
        if self._pool.gave_up.is_set():
            raise InfraError(f"the scoring pool does not work: {self._pool.broken}")
        if self.processes.gave_up.is_set():
            raise InfraError(f"environment processes do not start: {self.processes.broken}")
        raise RestartRequired(f"{self.threads.hanging} threads hang in environments; this process starts no more")

    async def close(self) -> None:
        """Kill the processes. Threads are daemons, so hanging ones do not keep this process from ending."""
        await self.processes.close()

    @staticmethod
    def _declared(environment: Any) -> protocols.Traits:
        try:
            return protocols.traits(environment)
        except ValueError as error:
            raise DataError(str(error)) from error


class InThread:
    """A blocking environment as coroutines; each call runs on any free thread."""

    def __init__(self, env: Environment, threads: Threads) -> None:
        self._env, self._threads, self._declared = env, threads, protocols.traits(env)
        self._lost = False  # a thread may still be executing one of its calls
        self.step_limit_s = self.reset_limit_s = math.inf  # `Threads` enforces the limits, from the start on a thread
        self.reset_retries, self.step_retries = self._declared.reset_retries, self._declared.step_retries
        self.max_turns = self._declared.max_turns

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The first messages."""
        return await self._call(lambda: self._env.reset(task, seed), self._declared.reset_limit_s, "reset")

    async def step(self, answer: str) -> StepResult:
        """The result of `answer`."""
        return await self._call(lambda: self._env.step(answer), self._declared.step_limit_s, "step")

    async def close(self) -> None:
        """Close the environment, unless a call never returned: it may not be used from another thread then."""
        if not self._lost:
            await self._call(self._env.close, self._declared.step_limit_s, "close")

    async def _call(self, job: Any, limit_s: float, what: str) -> Any:
        self._lost = True  # also when this is cancelled
        try:
            found = await self._threads.call(job, limit_s, what)
        except Abandoned:
            raise
        except Exception:
            self._lost = False
            raise
        self._lost = False
        return found
