"""Registry of environments by name.

A new environment is one file: a class with `reset`, `step` and `close` under `@register("name")`, and a scorer under
`@scorers.register(…)` if it needs its own. A config names it as `package.module:name`; this process and the scoring
workers then import that module.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxroll.config import Config, TaskConfig
from jaxroll.config.parsing import nearest
from jaxroll.config.rewards import functions, terms
from jaxroll.errors import ConfigError
from jaxroll.protocols import Environment, described
from jaxroll.rewards.parts import MATH_LIBRARY
from jaxroll.rewards.remote import RemoteParts
from jaxroll.rewards.scorers import max_answer_chars
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.run_paths import RunPaths

Factory = Callable[[ScoringPool, TaskConfig], Environment]
AnyFactory = TypeVar("AnyFactory", bound=Factory)

_BUILT_IN = ("jaxroll.envs.single_turn", "jaxroll.envs.frozen_lake", "jaxroll.envs.calculator", "jaxroll.envs.agent")
ADAPTERS: Mapping[str, str] = {  # loaded when they are named
    "gymnasium": "jaxroll.envs.adapters.gymnasium_env",
    "sokoban": "jaxroll.envs.adapters.sokoban",
    "tool_calls": "jaxroll.envs.adapters.tool_calls",
    "code_repair": "jaxroll.envs.adapters.code_repair",
    "shop": "jaxroll.envs.adapters.shop",
    "textarena": "jaxroll.envs.adapters.textarena_env",
    "pettingzoo": "jaxroll.envs.adapters.pettingzoo_env",
    "textworld": "jaxroll.envs.adapters.textworld_env",
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
    adapter = (ADAPTERS[name],) if name in ADAPTERS else ()
    for module in (*_BUILT_IN, *adapter, *scorer_modules(name)):
        _load(module, name)
    short = name.rpartition(":")[2]
    if short not in _FACTORIES:
        remedy = f"{nearest(short, (*_FACTORIES, *ADAPTERS))} Others are named package.module:name."
        raise ConfigError("task.env", name, "there is no such environment", remedy)
    return _FACTORIES[short]


def scorer_modules(name: str) -> tuple[str, ...]:
    """The modules a scoring pool must load for the environment `name` (`ScoringPool(modules=…)`)."""
    module = name.rpartition(":")[0]
    return (module,) if module else ()


def runs_programs(name: str) -> bool:
    """True if the environment `name` declares that it runs programs in the sandbox of the scoring pool."""
    return name in ADAPTERS and bool(getattr(factory(name), "runs_programs", False))


def scoring_pool(config: Config, run_dir: Path | None = None) -> ScoringPool:
    """Return a pool that scores answers for the run's environment; it is not started.

    Verdicts of judges and reward models are kept in `run_dir`; None keeps them in memory.
    """
    task = config.task
    libraries = ("reasoning_gym",) if task.source == "reasoning_gym" or task.env != "single_turn" else ()
    kinds = [term.kind for term in terms(task.reward, task.reward_args)]
    if "math" in kinds:
        libraries = (*libraries, MATH_LIBRARY)
    pool = ScoringPool(
        config.sampler.scoring_workers,
        libraries=libraries,
        modules=scorer_modules(task.env),
        functions=functions(task),
        max_answer_chars=max_answer_chars(config.sampling.max_tokens),
        programs="code" in kinds or runs_programs(task.env),
        idle_s=config.sampler.scoring_idle_s,
    )
    pool.remote = RemoteParts(RunPaths(run_dir).verdicts if run_dir else None)
    return pool


def _load(module: str, name: str) -> None:
    try:
        importlib.import_module(module)
    except ConfigError:  # of an adapter whose package is missing
        raise
    except (Exception, SystemExit) as e:  # foreign code: a script that ends by sys.exit() is no module, either
        reason = f"its module cannot be imported: {described(e)}"
        remedy = "Install or fix it, or start the run in a folder from which it can be imported."
        raise ConfigError("task.env", name, reason, remedy) from e


# --- settings of a game, from `task.args`


def share(args: dict[str, Any], name: str) -> float:
    """Remove the share `name` from `args` and return it (default 0). ConfigError unless it is between 0 and 1."""
    share = args.pop(name, 0.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"task.args.{name}", share, "it must be a share", "Give a number between 0 and 1.")
    return float(share)


def settings_of(kind: type, args: Mapping[str, Any]) -> Any:
    """The dataclass `kind` made from `args`. ConfigError for an unknown name or a value that `kind` refuses."""
    refuse_unknown(args, tuple(field.name for field in dataclasses.fields(kind)))
    try:
        return kind(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError("task.args", dict(args), str(error), "See docs/add_an_environment.md.") from error


def refuse_unknown(args: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ConfigError for a key of `args` that is not in `known`."""
    for name in args:
        if name not in known:
            raise ConfigError(f"task.args.{name}", args[name], "nothing reads it", nearest(name, known))
