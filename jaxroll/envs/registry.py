"""Registry of environments by name, those of one turn and of agents, and the reward of a completion.

A new environment is one file: a class with `reset`, `step` and `close` under `@register("name")`, and a scorer under
`@scorers.register(…)` if it needs its own. A config names it as `package.module:name`; this process and the scoring
workers then import that module.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jaxroll import lifeline, protocols
from jaxroll.config import Config, TaskConfig
from jaxroll.config.parsing import nearest, played_tasks
from jaxroll.config.rewards import (
    SHAPING,
    EndpointSettings,
    GymSettings,
    LengthSettings,
    Term,
    functions,
    is_function,
    terms,
)
from jaxroll.errors import ConfigError, DataError, described
from jaxroll.protocols import Environment, Place, StepResult, traits
from jaxroll.records import Message, Task
from jaxroll.rewards import parts, scorers
from jaxroll.rewards.parts import MATH_LIBRARY
from jaxroll.rewards.remote import BACKOFF_MAX_S, JudgeRequest, RemoteParts
from jaxroll.rewards.scorers import IN_WORKERS, Grading, LocalPart, max_answer_chars
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.run_paths import RunPaths

Factory = Callable[[ScoringPool, TaskConfig], Environment]
AnyFactory = TypeVar("AnyFactory", bound=Factory)

_BUILT_IN = ("jaxroll.envs.frozen_lake", "jaxroll.envs.calculator")
# Loaded when they are named. A class that is named here does not register itself: its module has other ones, too.
ADAPTERS: Mapping[str, str] = {
    "gymnasium": "jaxroll.envs.adapters.gymnasium_env",
    "sokoban": "jaxroll.envs.adapters.text_games:Sokoban",
    "tool_calls": "jaxroll.envs.adapters.tool_calls",
    "code_repair": "jaxroll.envs.adapters.code_repair",
    "shop": "jaxroll.envs.adapters.games:Shop",
    "textarena": "jaxroll.envs.adapters.text_games:TextArena",
    "pettingzoo": "jaxroll.envs.adapters.gymnasium_env",
    "textworld": "jaxroll.envs.adapters.text_games:TextWorld",
    "openenv": "jaxroll.envs.adapters.openenv_env",
}
_FACTORIES: dict[str, Factory] = {}


def register(name: str) -> Callable[[AnyFactory], AnyFactory]:
    """A decorator that registers a class or function of (pool, config) as the environment `name`."""

    def add(factory: AnyFactory) -> AnyFactory:
        if _FACTORIES.get(name, factory) is not factory:
            raise ValueError(f"the environment {name!r} is registered already")
        _FACTORIES[name] = factory
        return factory

    return add


def create(name: str, pool: ScoringPool, config: TaskConfig) -> Environment:
    """A fresh environment for one episode. An unknown name raises ConfigError."""
    return factory(name)(pool, config)


def factory(name: str) -> Factory:
    """The factory of the environment `name`, after importing its module. ConfigError when there is none."""
    for module in (*_BUILT_IN, *scorer_modules(name)):
        _load(module, name)
    if name in ADAPTERS:
        module, _, cls = ADAPTERS[name].partition(":")
        _load(module, name, cls)
    short = name.rpartition(":")[2]
    if short not in _FACTORIES:
        remedy = f"{nearest(short, (*_FACTORIES, *ADAPTERS))} Others: package.module:name, registered there."
        raise ConfigError("task.env", name, "there is no such environment", remedy)
    return _FACTORIES[short]


def uses_processes(config: Config) -> bool:
    """True if an environment of the run declares place = "process"."""
    return any(traits(factory(task.env)).place == "process" for task in played_tasks(config).values())


def section(tasks: Mapping[str, TaskConfig], env: str) -> TaskConfig:
    """The section `task` for the environment `env` of a task, among `tasks` by environment (`played_tasks`).

    DataError if it names a source that is not there. `tasks[""]` is for environments without a source.
    """
    found = tasks.get(env) if "@" in env else tasks[""]
    if found is None:
        raise DataError(f"the config has no source {env.partition('@')[2]!r}, of which this task is")
    return found


def scorer_modules(name: str) -> tuple[str, ...]:
    """The modules a scoring pool must load for the environment `name` (`ScoringPool(modules=…)`)."""
    module = name.rpartition(":")[0]
    return (module,) if module else ()


def runs_programs(name: str) -> bool:
    """True if the environment `name` declares that it runs programs in the sandbox of the scoring pool."""
    return name in ADAPTERS and bool(getattr(factory(name), "runs_programs", False))


def scoring_pool(config: Config, run_dir: Path | None = None, make: type[ScoringPool] = ScoringPool) -> ScoringPool:
    """Return a pool of the class `make` that scores answers for the run's environments; it is not started.

    Verdicts of judges and reward models are kept in `run_dir`; None keeps them in memory.
    """
    played = played_tasks(config).values()
    library = any(task.source == "reasoning_gym" or task.env != "single_turn" for task in played)
    libraries = ("reasoning_gym",) if library else ()
    kinds = [term.kind for task in played for term in terms(task.reward, task.reward_args)]
    if "math" in kinds:
        libraries = (*libraries, MATH_LIBRARY)
    pool = make(
        config.sampler.scoring_workers,
        libraries=libraries,
        modules=tuple(dict.fromkeys(module for task in played for module in scorer_modules(task.env))),
        functions=tuple(dict.fromkeys(name for task in played for name in functions(task))),
        max_answer_chars=max_answer_chars(config.sampling.max_tokens),
        programs="code" in kinds or any(runs_programs(task.env) for task in played),
        idle_s=config.sampler.scoring_idle_s,
    )
    pool.remote = RemoteParts(RunPaths(run_dir).verdicts if run_dir else None)
    return pool


def _load(module: str, name: str, cls: str = "") -> None:
    """Import `module` for the environment `name`, and register its class `cls`. ConfigError where that fails."""
    try:
        loaded = importlib.import_module(module)
        if cls:
            register(name)(getattr(loaded, cls))
    except ConfigError:  # of an adapter whose package is missing
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # foreign code: a script that ends by sys.exit() is no module, either
        reason = f"its module cannot be imported: {described(e)}"
        remedy = "Install or fix it, or start the run in a folder from which it can be imported."
        raise ConfigError("task.env", name, reason, remedy) from e


# --- settings of a game, from `task.args`


def settings_given(task: TaskConfig) -> dict[str, Any]:
    """A copy of `task.args`, from which `share` takes its keys."""
    return dict(task.args)


def identity(name: str, task: TaskConfig) -> str:
    """The identity of the source `name` with the settings of `task`."""
    return f"{name}/{json.dumps(dict(task.args), sort_keys=True, default=str)}"


def share(args: dict[str, Any], name: str) -> float:
    """Remove the share `name` from `args` and return it (default 0). ConfigError unless it is between 0 and 1."""
    share = args.pop(name, 0.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"task.args.{name}", share, "it must be a share", "Give a number between 0 and 1.")
    return float(share)


def settings_of(kind: type, args: Mapping[str, Any]) -> Any:
    """The dataclass `kind` made from `args`. ConfigError for an unknown name, a wrong type or a refused value."""
    refuse_unknown(args, tuple(field.name for field in dataclasses.fields(kind)))
    try:
        return msgspec.convert(dict(args), kind)
    except (TypeError, ValueError) as error:
        reason, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`").partition("[")[0].partition(".")[0]
        key, value = (f"task.args.{name}", args[name]) if name in args else ("task.args", dict(args))
        raise ConfigError(key, value, reason.replace("`", ""), "See docs/environments.md.") from error


def refuse_unknown(args: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ConfigError for a key of `args` that is not in `known`."""
    for name in args:
        if name not in known:
            raise ConfigError(f"task.args.{name}", args[name], "nothing reads it", nearest(name, known))


# --- The reward of a completion: values from the scoring pool and remote parts, as a weighted sum with named parts

QUEUE_ALLOWANCE_S = 120.0  # for earlier requests in the pool's queue, and for a worker that is starting
CORRECT = "correct"


@dataclass(frozen=True)
class Grade:
    """A reward with its parts; `extracted` is the answer found in the completion, None if extraction is off."""

    reward: float
    parts: dict[str, float]
    extracted: str | None = None


class Grader:
    """Grades completions as `task.extract` and `task.reward` say.

    With "auto" the reward is 1 if the raw score of the task's scorer is exactly 1.0, else 0. A sum has a part of its
    own name for each term, and the part `correct`: 1 if the first term that is not mere shaping has the value 1.
    """

    # Exactly 1.0: some scorers give wrong answers partial credit of 0.9999999999999999 or 1.0000000000000002.

    def __init__(self, pool: ScoringPool, task: TaskConfig) -> None:
        self.limit_s = pool.time_limit_s + QUEUE_ALLOWANCE_S
        self._pool, (self._terms, self._grading) = pool, _parsed(task)
        self._cuts = task.extract != "none"
        self._plain = not self._terms and not self._cuts
        self._remote = [term for term in self._terms if isinstance(term.settings, EndpointSettings)]
        self.limit_s += max((_patience_s(term.settings) for term in self._remote), default=0.0)

    async def grade(self, env_args: str, completion: str, tokens: int, messages: tuple[Message, ...] = ()) -> Grade:
        """The grade of `completion`, which has `tokens` tokens and answers `messages`.

        DataError when one of its parts has no value, InfraError when an endpoint fails.
        """
        if self._plain:
            raw = await self._pool.score(env_args, completion)
            return Grade(_binary(raw), {"raw_score": raw})
        graded = await self._pool.grade(env_args, completion, self._grading)
        extracted = graded.answer if self._cuts else None
        if not self._terms:
            raw = graded.values["raw_score"]
            return Grade(_binary(raw), {"raw_score": raw}, extracted)
        values = dict(graded.values)
        values |= await self._remote_values(env_args, completion, graded.answer, messages)
        more: dict[str, float] = {}
        for term in self._terms:
            if isinstance(term.settings, GymSettings):
                more["raw_score"] = values[term.label]
                values[term.label] = values[term.label] if term.settings.partial else _binary(values[term.label])
        first = next(term.label for term in self._terms if term.kind not in SHAPING)
        correct = values[first] == 1.0
        for term in self._terms:
            if isinstance(term.settings, LengthSettings):
                values[term.label] = parts.length(tokens, correct, term.settings)
        reward = sum(term.weight * values[term.label] for term in self._terms)
        named = {term.label: values[term.label] for term in self._terms}
        return Grade(reward, {**named, **more, CORRECT: float(correct)}, extracted)

    async def _remote_values(
        self, env_args: str, completion: str, answer: str, messages: tuple[Message, ...]
    ) -> dict[str, float]:
        """The values of remote parts, computed concurrently; a judge does not see an empty answer, whose value is 0."""
        asked = [term for term in self._remote if term.kind != "judge" or answer or not self._cuts]
        values = dict.fromkeys((term.label for term in self._remote), 0.0)
        if not asked:
            return values
        if self._pool.remote is None:
            raise DataError("reward models and judges work within a run only")
        wanted = parts.truth_or_empty(msgspec.json.decode(env_args))
        shown = tuple({"role": message.role, "content": message.content} for message in messages)
        request = JudgeRequest(shown, completion, answer, wanted)
        found = await asyncio.gather(*(self._pool.remote.value(term.label, term.settings, request) for term in asked))
        return values | dict(zip((term.label for term in asked), found, strict=True))


def _patience_s(settings: EndpointSettings) -> float:
    """The longest time of all attempts of a call, and as long again in the queue of the endpoint."""
    return 2 * (settings.retries + 1) * (settings.timeout_s + BACKOFF_MAX_S)


def _binary(raw: float) -> float:
    return 1.0 if raw == 1.0 else 0.0


_PARSED: dict[tuple[str, str, str], tuple[tuple[Term, ...], str]] = {}


def _parsed(task: TaskConfig) -> tuple[tuple[Term, ...], str]:
    """The terms of the task's reward, and the instructions of scoring workers as JSON.

    They are parsed once for each reward of the run, because every episode makes a grader.
    """
    key = task.extract, task.reward, repr(task.reward_args)
    if key not in _PARSED:
        instructed = msgspec.json.encode(instructions(task)).decode()
        _PARSED[key] = terms(task.reward, task.reward_args), instructed
    return _PARSED[key]


def instructions(task: TaskConfig) -> Grading:
    """The work of scoring workers that `task.extract` and `task.reward` require."""
    named = terms(task.reward, task.reward_args)
    if not named:
        return Grading(task.extract, (LocalPart("raw_score"),))
    found = (
        LocalPart(term.label, term.kind, msgspec.to_builtins(term.settings))
        for term in named
        if term.is_function or term.kind in IN_WORKERS
    )
    return Grading(task.extract, tuple(found))


def check(task: TaskConfig) -> None:
    """Raise ConfigError if the functions or libraries that the task's reward needs cannot be loaded here."""
    named = terms(task.reward, task.reward_args)
    functions = [("task.extract", task.extract)] if is_function(task.extract) else []
    functions += [("task.reward", term.kind) for term in named if term.is_function]
    for key, name in functions:
        try:
            scorers.load(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ConfigError(
                key,
                name,
                f"it cannot be loaded: {described(error)}",
                "Give the file's path relative to the config, and the name of a function in it.",
            ) from error
    if any(term.kind == "math" for term in named) and importlib.util.find_spec(parts.MATH_LIBRARY) is None:
        raise ConfigError("task.reward", task.reward, "math-verify is not installed", "pip install 'jaxroll[math]'.")


# --- Environment with one turn for verifiable rewards: question, answer, score


@register("single_turn")
class SingleTurn:
    """Environment that shows the task's messages and grades the answer as `task.extract` and `task.reward` say."""

    def __init__(self, pool: ScoringPool, task: TaskConfig) -> None:
        self._grader = Grader(pool, task)
        self.step_limit_s = self._grader.limit_s
        self.answer_tokens = 0
        self._env_args: str | None = None
        self._messages: tuple[Message, ...] = ()

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's messages; `seed` has no effect."""
        self._env_args, self._messages = task.env_args, task.messages
        return task.messages

    async def step(self, answer: str) -> StepResult:
        """The end of the episode with its reward; DataError when the answer cannot be scored."""
        if self._env_args is None:
            raise DataError("step() before reset(): there is no question to answer")
        grade = await self._grader.grade(self._env_args, answer, self.answer_tokens, self._messages)
        return StepResult(done=True, reward=grade.reward, reward_parts=grade.parts, extracted=grade.extracted)

    async def close(self) -> None:
        """Forget the task; the pool is shared and stays open."""
        self._env_args = None


# --- Environment of agents: a program of the user, which calls the model at a URL of its own
#
# It runs in an environment process, which is killed when it hangs. `jaxroll.serving.agents` serves the model.

_URLS = ("http://", "https://")
_OUTPUT_CHARS = 300  # of a failed program, in the error


@register("agent")
class Agent:
    """Runs `task.agent` once per episode: a function, a URL that gets a POST, or a command.

    Its only step is the whole program. A result with `done` holds the reward that the program returned.
    """

    place: Place = "process"
    step_limit_s = math.inf  # `task.agent_limit_s` holds

    def __init__(self, pool: ScoringPool, task: TaskConfig) -> None:
        self._agent, self._row = task.agent, {}

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
        raise DataError(f"the agent's URL did not answer with JSON: {described(error)}") from error


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
        raise DataError(f"the agent's command does not start: {described(error)}") from error
    if done.returncode:
        raise DataError(f"the agent's command ended with {done.returncode}: {done.stderr.strip()[-_OUTPUT_CHARS:]}")
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        return json.loads(last)
    except ValueError:
        return None


def check_agent(task: TaskConfig) -> None:
    """Raise ConfigError if the function of `task.agent` cannot be loaded here."""
    if not task.agent or task.agent.startswith(_URLS) or not is_function(task.agent):
        return
    try:
        scorers.load(task.agent)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(
            "task.agent",
            task.agent,
            f"it cannot be loaded: {described(error)}",
            "Give the file's path relative to the config, and the name of a function in it.",
        ) from error
