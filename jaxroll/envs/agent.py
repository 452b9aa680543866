"""Environment of agents: a program of the user, which calls the model at a URL of its own.

It runs in an environment process, which is killed when it hangs. `jaxroll.serving.agents` serves the model.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Awaitable
from typing import Any

from jaxroll import lifeline, protocols
from jaxroll.config import TaskConfig
from jaxroll.config.rewards import is_function
from jaxroll.envs.registry import register
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import Place, StepResult
from jaxroll.records import Message, Task
from jaxroll.rewards import scorers
from jaxroll.rewards.scoring_pool import ScoringPool

_URLS = ("http://", "https://")
_OUTPUT_CHARS = 300  # of a failed program, in the error


@register("agent")
class Agent:
    """Runs `task.agent` once per episode: a function, a URL that gets a POST, or a command.

    Its only step is the whole program. A result with `done` holds the reward that the program returned.
    """

    place: Place = "process"
    step_limit_s = math.inf  # `task.agent_limit_s` holds

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self._agent, self._row = config.agent, {}

    def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """Nothing: the program sends the messages."""
        messages = [{"role": message.role, "content": message.content} for message in task.messages]
        self._row: dict[str, Any] = {**task.args(), "messages": messages, "index": task.index, "seed": seed}
        return ()

    def step(self, answer: str) -> StepResult | Awaitable[StepResult]:
        """The end of the program; `answer` has its URLs and its key as JSON."""
        job = json.loads(answer)
        if self._agent.startswith(_URLS):
            return _result(_posted(self._agent, {**job, "row": self._row}))
        if not is_function(self._agent):
            return _result(_executed(self._agent, job, self._row))
        found = scorers.load(self._agent)(job["base_url"], job["api_key"], self._row)
        return _awaited(found) if inspect.isawaitable(found) else _result(found)

    def close(self) -> None:
        """Forget the row."""
        self._row = {}


async def _awaited(found: Awaitable[Any]) -> StepResult:
    return _result(await found)


def _result(found: Any) -> StepResult:
    """The result of a program that returned a reward, a dict of `reward` and parts, or nothing."""
    if found is None:
        return StepResult(done=False)
    reward, parts = given(found)
    return StepResult(done=True, reward=reward, reward_parts=parts)


def given(value: Any) -> tuple[float, dict[str, float]]:
    """Reward and parts from a number, or from a dict of `reward` and other numbers. DataError otherwise."""
    if not isinstance(value, dict):
        return protocols.number(value, "the agent's reward"), {}
    if "reward" not in value:
        raise DataError("the agent's result has no key `reward`")
    parts = {name: part for name, part in value.items() if name != "reward"}
    return protocols.number(value["reward"], "the agent's reward"), protocols.parts(parts)


def _posted(url: str, job: dict[str, Any]) -> Any:
    """The JSON value with which the URL answers `job`; DataError for another answer."""
    request = urllib.request.Request(url, json.dumps(job).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise DataError(f"the agent's URL answered with status {error.code}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"the agent's URL did not answer with JSON: {protocols.described(error)}") from error


def _executed(command: str, job: dict[str, Any], row: dict[str, Any]) -> Any:
    """The JSON value in the last line that the program prints, or None; it reads the row from its standard input.

    The program dies with this process, also if that is killed.
    """
    named = {
        "OPENAI_BASE_URL": job["base_url"],
        "OPENAI_API_KEY": job["api_key"],
        "JAXROLL_REWARD_URL": job["reward_url"],
    }
    try:
        done = subprocess.run(
            shlex.split(command),
            input=json.dumps(row),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **named},
            preexec_fn=functools.partial(lifeline.bind, os.getpid()),
        )
    except (OSError, ValueError) as error:
        raise DataError(f"the agent's command does not start: {protocols.described(error)}") from error
    if done.returncode:
        raise DataError(f"the agent's command ended with {done.returncode}: {done.stderr.strip()[-_OUTPUT_CHARS:]}")
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        return json.loads(last)
    except ValueError:
        return None


def check(task: TaskConfig) -> None:
    """Raise ConfigError if the function of `task.agent` cannot be loaded here."""
    if not task.agent or task.agent.startswith(_URLS) or not is_function(task.agent):
        return
    try:
        scorers.load(task.agent)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            "task.agent",
            task.agent,
            f"it cannot be loaded: {protocols.described(error)}",
            "Give the file's path relative to the config, and the name of a function in it.",
        ) from error
