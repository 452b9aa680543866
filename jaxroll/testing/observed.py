"""Instruments of the environment check: recorded calls, slow callbacks, leaks, a scripted model."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxroll.envs.processes import resident_bytes
from jaxroll.errors import DataError
from jaxroll.protocols import Completion, Environment, GenerationKey, SamplingParams, StepResult, Tokenizer
from jaxroll.records import Message, Task, Version, VersionRun

_TASK_NAME = re.compile(r"name='([^']+)'")


class Observed:
    """An environment that passes every call on to `env` and records the results."""

    step_limit_s: float  # that of `env`, like all attributes that are not defined here

    def __init__(self, env: Environment) -> None:
        self._env = env
        self.first: tuple[Message, ...] | None = None
        self.answers: list[str] = []
        self.results: list[StepResult] = []
        self.calls = 0
        self.close_s, self.close_error = 0.0, ""
        self.entered = asyncio.Event()  # set when a step waits for something

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
        self.answers.append(answer)
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
    """Log handler that collects asyncio's debug messages about callbacks that block the event loop."""

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
class HeldResources:
    """Resources held by this process and the environment's processes; empty if the system does not report them."""

    counts: dict[str, int] = field(default_factory=dict)
    memory_bytes: int = 0

    @classmethod
    def now(cls, pids: list[int]) -> HeldResources:
        """The resources after a garbage collection; `pids` are the environment's processes."""
        gc.collect()
        processes = [os.getpid(), *pids]
        tasks = [task for task in asyncio.all_tasks() if not task.done()]
        counts = {
            "threads": threading.active_count() + _counted(pids, "task"),
            "tasks": len(tasks),
            "file descriptors": _counted(processes, "fd"),
        }
        return cls(counts, sum(map(resident_bytes, processes)))


def _counted(pids: list[int], what: str) -> int:
    total = 0
    for pid in pids:
        try:
            total += len(os.listdir(f"/proc/{pid}/{what}"))
        except OSError:
            continue
    return total


# --- remedies for failed members, by the text of the error

_REMEDY = "a wrong answer is a reward, not a failure; raise DataError only for a task that is broken"
# The first entry of which a text occurs in the error gives the remedy.
_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("longer than",), "return sooner, or declare a larger step_limit_s or reset_limit_s"),
    (("SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError", "cancelled itself"),
     "raise DataError or InfraError instead"),
    (("process died", "process is gone"), "it must not end its process"),
    (("no scoring pool",), "an environment in a process judges the answer itself"),
    (("scoring took", "scoring process", "scoring failed"), "fix the scorer: it must return a finite number in time"),
    (("no room for an answer",), "show a shorter first message, or raise task.max_prompt_tokens"),
    (("not in the alphabet",), "use characters of the task's prompts and answers, or tokenizer.kind='hf'"),
    (("no method restore",), "give it a method restore(state), or return state=None"),
    (("shows nothing",), "return done=True, or messages to answer"),
    (("a value of type", "is None", "nan", "inf,", "finite", "surrogate", "characters", "entries"),
     "return a StepResult whose fields have the types of jaxroll/protocols.py"),
    (("must be between", "it is not a number", "place ="), "see the table of attributes in docs/add_an_environment.md"),
    (("InfraError",), "it reports a failure of its infrastructure: check that its services are running"),
)  # fmt: skip


def remedy(error: str) -> str:
    """The remedy for `error`, for the author of the environment."""
    return next((do for signs, do in _REMEDIES if any(sign in error for sign in signs)), _REMEDY)


# --- A model that answers by a script, and a tokenizer for tasks without one

VERSION = Version(0, 0)
# Answers of untrained models. The check uses each of them as the answer of every turn.
ODD_ANSWERS = ("", " ", "0", "-1", "a", "é", "²", "no\nsuch\tanswer", "{}[]()<>\\'\"", "x" * 200)


class ByteTokenizer:
    """One token for each byte of UTF-8, after pad 0, bos 1, eos 2 and turn 3."""

    pad_id, bos_id, eos_id, turn_id, vocab_size = 0, 1, 2, 3, 260

    def encode(self, text: str) -> list[int]:
        """The ids of the bytes of `text`."""
        return [byte + 4 for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` without special tokens."""
        return bytes(i - 4 for i in ids if i >= 4).decode(errors="replace")

    def render(
        self, messages: tuple[Message, ...], *, first: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Ids of `messages`, each after bos, ending at the start of the assistant's turn."""
        ids = [i for message in messages for i in (self.bos_id, *self.encode(message.content))]
        return [*ids, self.turn_id]


class ScriptedModel:
    """An `LLMProxy` that gives the answers of a script in order, and repeats the last one."""

    def __init__(self, answers: Sequence[list[int]], eos_id: int) -> None:
        self._answers, self._eos_id, self._turn = answers, eos_id, 0

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        """The next answer, followed by eos."""
        answer = self._answers[min(self._turn, len(self._answers) - 1)]
        self._turn += 1
        tokens = np.asarray([*answer, self._eos_id], np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), (VersionRun(VERSION, len(tokens)),), "stop")


def scripts(task: Task, worked: Sequence[Message], tokenizer: Tokenizer, max_tokens: int) -> list[list[list[int]]]:
    """The answers of each episode of `task`, as ids: the worked answers, unusual ones, and random choices.

    Answers that the tokenizer cannot encode, or that leave no room for eos within `max_tokens`, are left out.
    """
    right = [message.content for message in worked if message.role == "assistant"]
    texts = [right] if right else []
    texts += [[odd] for odd in ODD_ANSWERS]
    random_one = random.Random(task.index)
    known = [answer for answer in (*right, *ODD_ANSWERS) if answer]
    texts += [[random_one.choice(known) for _ in range(4)] for _ in range(2)]
    found = (_encoded(answers, tokenizer, max_tokens) for answers in texts)
    return [script for script in found if script]


def _encoded(answers: Sequence[str], tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    found = []
    for answer in answers:
        try:
            ids = [i for i in tokenizer.encode(answer) if i != tokenizer.eos_id]
        except DataError:
            continue
        if len(ids) < max_tokens:
            found.append(ids)
    return found
