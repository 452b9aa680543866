"""Source of reasoning-gym tasks: procedural, offline, endless."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from typing import Any

from jaxroll.config import TaskConfig
from jaxroll.config.parsing import nearest
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import Item
from jaxroll.rewards.gym_tasks import MIXTURE, PRINTABLE, TASKS, UNSOLVED, GymTask
from jaxroll.rewards.scorers import import_library, importable

# Exceptions of third-party generators for seeds that they do not support.
_GENERATOR_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# Item i of seed s is Random(s + i), so neighbouring seeds share items. JaxRoll uses one seed and disjoint index ranges.
_SEED = 0
_VIRTUAL_SIZE = 2**62
_SPEC = {"name", "weight", "config"}  # keys of a task in a mixture


class GymSource:
    """Items of the reasoning-gym task `cfg.name` with the settings `cfg.args`."""

    def __init__(self, cfg: TaskConfig) -> None:
        self._task = allowed(cfg.name)
        self.size = self._task.size
        if cfg.prompt_style == "compact" and self._task.compact is None:
            raise ConfigError(
                "task.prompt_style",
                cfg.prompt_style,
                f"{cfg.name} has no compact prompt",
                f"Use task.prompt_style='full' (compact: {', '.join(_with_compact())}).",
            )
        self._name = cfg.name
        self._as_compact = cfg.prompt_style == "compact"
        args = dict(cfg.args)
        self._settings_by_task = {cfg.name: args}
        if cfg.name == MIXTURE:
            self._settings_by_task = _settings_in_mixture(args)
            args = {"datasets": _specs(args["datasets"])}
        self._dataset = _create_dataset(cfg.name, args, self.size or _VIRTUAL_SIZE)
        self.identity = f"reasoning_gym/{cfg.name}/{json.dumps(dict(cfg.args), sort_keys=True, default=list)}"

    def item(self, index: int) -> Item:
        """Item `index`; DataError when the generator fails for that index."""
        try:
            entry = self._dataset[index]
        except _GENERATOR_ERRORS as error:
            raise DataError(f"{self._name}[{index}] cannot be generated: {error!r}") from error
        metadata, answer = entry["metadata"], entry["answer"]
        name = metadata["source_dataset"] if self._name == MIXTURE else self._name
        task, settings = TASKS[name], self._settings_by_task[name]
        if task.scorer_metadata is None:
            fields = json.loads(json.dumps(metadata, default=str))  # numpy's subclasses of float and str become plain
        else:
            fields = {field: metadata[field] for field in task.scorer_metadata}
        lower = task.lower_case and self._as_compact
        return Item(
            question=entry["question"],
            compact=entry["question"] if task.compact is None else task.compact(metadata),
            answer=None if answer is None or UNSOLVED in answer else answer.lower() if lower else answer,
            env_args={
                "scorer": "reasoning_gym",
                "dataset": name,
                "entry": {"answer": answer, "metadata": fields},
                **({"settings": settings} if settings and task.scorer_metadata is None else {}),
            },
        )

    def alphabet(self) -> str:
        """The characters of prompts and answers: declared for compact prompts, printable ASCII for full ones."""
        if not self._as_compact:
            known = PRINTABLE + self._task.prompt_alphabet + self._task.answer_alphabet
            return _sorted_characters(known + (self._task.characters or ""))
        if self._name == "spell_backward":  # its words are known, and most ranges of lengths contain no digit
            return _sorted_characters("".join(self._dataset.words).lower())
        return _sorted_characters(self._task.prompt_alphabet + self._task.answer_alphabet)


def _sorted_characters(text: str) -> str:
    return "".join(sorted(set(text)))


def _with_compact() -> list[str]:
    return sorted(name for name, task in TASKS.items() if task.compact is not None)


def _create_dataset(name: str, args: dict[str, Any], size: int) -> Any:
    """The dataset object; its output on stdout is dropped."""
    for key in ("seed", "size"):
        if key in args:
            raise ConfigError(
                f"task.args.{key}",
                args[key],
                "JaxRoll chooses the ranges of items",
                "Use task.train_start, task.heldout_start and sft.start.",
            )
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            reasoning_gym = import_library("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            "task.source",
            "reasoning_gym",
            f"reasoning-gym cannot be imported ({error})",
            "pip install 'jaxroll[envs]'.",
        ) from error
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return reasoning_gym.create_dataset(name, seed=_SEED, size=size, **args)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError("task.args", args, f"{name} refuses them: {error}", _settings_of(name, args)) from error


def _settings_in_mixture(args: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of each task in `datasets`. ConfigError for one that is not an endless task."""
    given = args.get("datasets")
    if set(args) != {"datasets"} or not given or not all({"name"} <= set(each) <= _SPEC for each in given):
        remedy = "Set datasets=[{'name': 'chain_sum', 'weight': 1.0, 'config': {}}, …]."
        raise ConfigError("task.args", args, f"{MIXTURE} needs the list `datasets` and nothing else", remedy)
    for each in given:
        if allowed(each["name"]).size is not None or each["name"] == MIXTURE:
            raise ConfigError("task.args.datasets", each["name"], "it has a limited number of items", "Leave it out.")
    return {each["name"]: dict(each.get("config", {})) for each in given}


def _specs(given: list[dict[str, Any]]) -> list[Any]:
    from reasoning_gym.composite import DatasetSpec

    return [DatasetSpec(**{"weight": 1.0, "config": {}, **each}) for each in given]


def _settings_of(name: str, args: dict[str, Any]) -> str:
    """A remedy: the known setting nearest to the first unknown one, or a list of all settings."""
    from reasoning_gym.factory import DATASETS

    known = tuple(field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size"))
    unknown = [key for key in args if key not in known]
    return nearest(unknown[0], known) if unknown else f"Its settings: {', '.join(sorted(known))}."


# --- known tasks


def allowed(name: str) -> GymTask:
    """The task `name`; ConfigError if there is none, or if a package that its generator needs is missing."""
    if name not in TASKS:
        raise ConfigError("task.name", name, "reasoning-gym has no such task", nearest(name, tuple(TASKS)))
    missing = [package for package in TASKS[name].needs if not importable(package)]
    if missing:
        reason = f"its generator needs {', '.join(missing)}, without wheels on PyPI"
        raise ConfigError("task.name", name, reason, f"pip install {' '.join(missing)} (with a C compiler).")
    return TASKS[name]
