"""reasoning-gym tasks as a source: procedural, offline, endless."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from typing import Any

from jaxroll.config import TaskConfig
from jaxroll.config.parsing import nearest
from jaxroll.data.gym_tasks import PRINTABLE, TASKS, allowed
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import Item

# What generators of third parties raise when a seed does not suit them.
_GENERATOR_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# Item i of seed s is Random(s + i): one seed and disjoint index ranges, never neighbouring seeds.
_SEED = 0
_VIRTUAL_SIZE = 2**62


class GymSource:
    """Items of the reasoning-gym task `cfg.name` with the settings `cfg.args`."""

    size = None

    def __init__(self, cfg: TaskConfig) -> None:
        self._task = allowed(cfg.name)
        if cfg.prompt == "compact" and self._task.compact is None:
            raise ConfigError(
                "task.prompt",
                cfg.prompt,
                f"{cfg.name} has no compact prompt",
                f"Use task.prompt='full' (compact: {', '.join(_with_compact())}).",
            )
        self._name = cfg.name
        self._as_compact = cfg.prompt == "compact"
        self._dataset = _create_dataset(cfg.name, dict(cfg.args))
        self.identity = f"reasoning_gym/{cfg.name}/{json.dumps(dict(cfg.args), sort_keys=True, default=list)}"

    def item(self, index: int) -> Item:
        """Item `index`; raises DataError where the generator fails for that index."""
        try:
            entry = self._dataset[index]
        except _GENERATOR_ERRORS as error:
            raise DataError(f"{self._name}[{index}] cannot be generated: {error!r}") from error
        metadata, answer, task = entry["metadata"], entry["answer"], self._task
        lower = task.lower_case and self._as_compact
        return Item(
            question=entry["question"],
            compact=entry["question"] if task.compact is None else task.compact(metadata),
            answer=answer.lower() if lower and answer is not None else answer,
            env_args={
                "scorer": "reasoning_gym",
                "dataset": self._name,
                "entry": {"answer": answer, "metadata": {field: metadata[field] for field in task.scorer_metadata}},
            },
        )

    def alphabet(self) -> str:
        """The characters of prompts and answers: declared for compact prompts, printable ASCII for full ones."""
        if not self._as_compact:
            return _sorted_characters(PRINTABLE + self._task.prompt_alphabet + self._task.answer_alphabet)
        if self._name == "spell_backward":  # the words are known: most ranges of lengths hold no digit
            return _sorted_characters("".join(self._dataset.words).lower())
        return _sorted_characters(self._task.prompt_alphabet + self._task.answer_alphabet)


def _sorted_characters(text: str) -> str:
    return "".join(sorted(set(text)))


def _with_compact() -> list[str]:
    return sorted(name for name, task in TASKS.items() if task.compact is not None)


def _create_dataset(name: str, args: dict[str, Any]) -> Any:
    """The dataset object; anything it prints is dropped, since stdout belongs to the command."""
    for key in ("seed", "size"):
        if key in args:
            raise ConfigError(
                f"task.args.{key}",
                args[key],
                "ranges of items are chosen by JaxRoll",
                "Use task.train_start, task.heldout_start and sft.start.",
            )
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "task.source",
            "reasoning_gym",
            f"reasoning-gym cannot be imported ({error})",
            "pip install 'jaxroll[envs]'.",
        ) from error
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return reasoning_gym.create_dataset(name, seed=_SEED, size=_VIRTUAL_SIZE, **args)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError("task.args", args, f"{name} refuses them: {error}", _settings_of(name, args)) from error


def _settings_of(name: str, args: dict[str, Any]) -> str:
    """What the task can be told: the setting nearest to the first unknown one, else all of them."""
    from reasoning_gym.factory import DATASETS

    known = tuple(field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size"))
    unknown = [key for key in args if key not in known]
    return nearest(unknown[0], known) if unknown else f"Its settings: {', '.join(sorted(known))}."
