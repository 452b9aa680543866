"""Observation of an environment under test: messages, results, how its close went, leaks."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jaxroll.protocols import Environment, StepResult
from jaxroll.records import Message, Task

_TASK_NAME = re.compile(r"name='([^']+)'")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Observed:
    """Passes every call on to `env` and remembers what came of it."""

    step_limit_s: float  # the environment's own, like everything that is not here

    def __init__(self, env: Environment) -> None:
        self._env = env
        self.first: tuple[Message, ...] | None = None
        self.results: list[StepResult] = []
        self.calls = 0
        self.close_s, self.close_error = 0.0, ""
        self.entered = asyncio.Event()  # a step waits for something

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """See Environment."""
        self.calls += 1
        found = self._env.reset(task, seed)
        self.first = await found if inspect.isawaitable(found) else found
        return self.first

    async def step(self, answer: str) -> StepResult:
        """See Environment."""
        self.calls += 1
        found = self._env.step(answer)
        if inspect.isawaitable(found):
            asyncio.get_running_loop().call_soon(self.entered.set)
            found = await found
        self.results.append(found)
        return found

    async def close(self) -> None:
        """See Environment."""
        began_s = time.monotonic()
        try:
            found = self._env.close()
            if inspect.isawaitable(found):
                await found
        except BaseException as error:
            self.close_error = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.close_s = time.monotonic() - began_s


class SlowCallbacks(logging.Handler):
    """What asyncio's debug mode says about callbacks that held the loop: where, how often and how long."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.times: Counter[str] = Counter()
        self.longest_s: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if not isinstance(record.args, tuple) or len(record.args) != 2 or "took" not in str(record.msg):
            return
        handle, seconds = str(record.args[0]), record.args[1]
        found = _TASK_NAME.search(handle)
        where = found.group(1) if found else "making the environment"
        where = "making the environment" if where.startswith("Task-") else where
        self.times[where] += 1
        self.longest_s[where] = max(self.longest_s.get(where, 0.0), float(str(seconds)))


@dataclass(frozen=True)
class Held:
    """What this process and the environment's own hold: by kind, a count or bytes. Empty where the machine does not
    tell."""

    counts: dict[str, int] = field(default_factory=dict)
    memory_bytes: int = 0

    @classmethod
    def now(cls, pids: list[int]) -> Held:
        """After a collection of garbage; `pids` are the environment's processes."""
        gc.collect()
        everyone = [os.getpid(), *pids]
        tasks = [task for task in asyncio.all_tasks() if not task.done()]
        counts = {"threads": threading.active_count() + _counted(pids, "task"), "tasks": len(tasks),
                  "file descriptors": _counted(everyone, "fd")}  # fmt: skip
        return cls(counts, sum(map(_resident_bytes, everyone)))


def _counted(pids: list[int], what: str) -> int:
    total = 0
    for pid in pids:
        try:
            total += len(os.listdir(f"/proc/{pid}/{what}"))
        except OSError:
            continue
    return total


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


# --- remedies for failed members, by the text of the error

_REMEDY = "a wrong answer is a reward, not a failure; raise DataError for a task that nobody could work on"
# The first whose sign occurs in the error says what to do.
_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("longer than",), "return sooner, or declare a larger step_limit_s or reset_limit_s"),
    (("SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError", "cancelled itself"),
     "raise DataError or InfraError instead"),
    (("process died", "process is gone"), "it must not end its process"),
    (("no scoring pool",), "an environment in a process judges the answer itself"),
    (("scoring took", "scoring process", "scoring failed"), "mend the scorer: it must return a finite number in time"),
    (("no room for an answer",), "show a shorter first message, or raise task.max_prompt_tokens"),
    (("not in the alphabet",), "use characters of the task's prompts and answers, or tokenizer.kind='hf'"),
    (("shows nothing",), "return done=True, or messages to answer"),
    (("a value of type", "is None", "nan", "inf,", "finite", "surrogate", "characters", "entries"),
     "return a StepResult whose fields have the types of jaxroll/protocols.py"),
    (("must be between", "it is no number", "place ="), "see the table of attributes in docs/add_an_environment.md"),
    (("InfraError",), "it says that the machinery failed: see whether what it needs is running"),
)  # fmt: skip


def remedy(error: str) -> str:
    """What the author of the environment can do about `error`."""
    return next((do for signs, do in _REMEDIES if any(sign in error for sign in signs)), _REMEDY)
