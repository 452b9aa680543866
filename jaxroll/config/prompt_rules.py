"""Prompts as the config describes them: sources of a mixture, messages before every question, tools; their checks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, get_type_hints

from jaxroll.config.parsing import check_bounds, coerce, nearest
from jaxroll.config.schema import Config, TaskConfig
from jaxroll.errors import ConfigError
from jaxroll.records import Message

FILES = ("jsonl", "parquet", "hf_dataset")  # values of task.source that read task.path
ROLES = ("system", "user", "assistant", "tool")
# Variables of a chat template that JaxRoll sets itself.
RESERVED = ("messages", "tools", "add_generation_prompt")


def opening_messages(task: TaskConfig) -> tuple[Message, ...]:
    """The messages before the question: `task.system_prompt`, then `task.few_shot`. ConfigError for malformed ones."""
    system = (Message("system", task.system_prompt),) if task.system_prompt else ()
    return system + few_shot(task)


def few_shot(task: TaskConfig) -> tuple[Message, ...]:
    """The messages of `task.few_shot`: objects with role and content, or pairs of a question and its answer."""
    found: list[Message] = []
    for number, entry in enumerate(task.few_shot):
        key = f"task.few_shot[{number}]"
        if isinstance(entry, list):
            if len(entry) != 2 or not all(isinstance(text, str) for text in entry):
                raise ConfigError(key, entry, "not a pair of texts", 'Write ["question", "answer"].')
            found += (Message("user", entry[0]), Message("assistant", entry[1]))
        else:
            found.append(_message(entry, key))
    if found and found[-1].role != "assistant":
        last = f"task.few_shot[{len(task.few_shot) - 1}]"
        raise ConfigError(last, found[-1].role, "the last message before the question must be an answer",
                          "End with a message of the assistant, or use pairs.")  # fmt: skip
    return tuple(found)


def _message(entry: Any, key: str) -> Message:
    remedy = 'Write {"role": "user", "content": "…"}, or a pair ["question", "answer"].'
    if not isinstance(entry, Mapping) or set(entry) != {"role", "content"}:
        raise ConfigError(key, entry, "not a message with role and content", remedy)
    role, content = entry["role"], entry["content"]
    if role not in ROLES or role == "system" or not isinstance(content, str):
        reason = "a system message belongs into task.system_prompt" if role == "system" else "role or content is wrong"
        raise ConfigError(key, entry, reason, f"Roles are user, assistant and tool. {remedy}")
    return Message(role, content)


# --- sources: one, or several in a mixture

SOURCE_KEYS = (
    "source", "name", "args", "path", "prompt_style", "prompt_column", "answer_column", "answer_after", "train_start",
    "heldout_start", "heldout_items",
)  # fmt: skip
# Item i of source number n has the index n * SOURCE_ITEMS + i.
SOURCE_ITEMS = 10**12


@dataclass(frozen=True)
class TaskPart:
    """One source: `task` is the section with its keys; `label` is empty and `weight` 1 without a mixture."""

    label: str
    weight: float
    task: TaskConfig
    key: str


def task_parts(task: TaskConfig) -> tuple[TaskPart, ...]:
    """The sources of the config; ConfigError for malformed entries of `task.mixture`."""
    if not task.mixture:
        return (TaskPart("", 1.0, task, "task"),)
    found: list[TaskPart] = []
    for number, entry in enumerate(task.mixture):
        key = f"task.mixture[{number}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(key, entry, "not a source", "Write dict(path=…, weight=1.0).")
        weight = coerce(float, entry.get("weight", 1.0), f"{key}.weight")
        if weight <= 0:
            raise ConfigError(
                f"{key}.weight", weight, "a source needs a share", "Set it above 0, or remove the source."
            )
        part = source_of(task, entry, key, ("label", "weight"))
        label = coerce(str, entry.get("label", PurePath(part.path).stem if part.source in FILES else part.name), key)
        if not label or label in (other.label for other in found):
            raise ConfigError(f"{key}.label", label, "every source needs its own name", "Set label.")
        found.append(TaskPart(label, weight, part, key))
    if any("heldout_items" in entry for entry in task.mixture):
        return tuple(found)
    total = sum(part.weight for part in found)
    return tuple(
        dataclasses.replace(part, task=dataclasses.replace(part.task, heldout_items=share and max(1, share)))
        for part in found
        for share in (round(task.heldout_items * part.weight / total),)
    )


def source_of(task: TaskConfig, entry: Mapping[str, Any], key: str, own: tuple[str, ...]) -> TaskConfig:
    """`task` with the keys of another source; what belongs to the source of `task` alone is not inherited.

    Keys in `own` have a meaning for the caller.
    """
    for name in entry:
        if name not in SOURCE_KEYS + own:
            near = nearest(str(name), SOURCE_KEYS + own)
            raise ConfigError(f"{key}.{name}", entry[name], "unknown key of a source", near)
    hints = get_type_hints(TaskConfig)
    given = {k: coerce(hints[k], value, f"{key}.{k}") for k, value in entry.items() if k not in own}
    other = {"args": {}, "path": "", "prompt_column": "", "answer_column": "", "answer_after": ""}
    inherited = {} if given.keys() <= {"heldout_items", "train_start", "heldout_start"} else other
    found = dataclasses.replace(task, mixture=[], **{**inherited, **given})
    check_bounds(found, key)
    return found


HELDOUT = "heldout"  # the name of the set of task.heldout_items


def evaluation_set(config: Config, name: str) -> tuple[TaskConfig, int]:
    """The source of the set `name` of `evaluator.sets`, and its number of items (0: all rows of a file).

    ConfigError for a malformed entry.
    """
    entry, key = config.evaluator.sets[name], f"evaluator.sets.{name}"
    if not isinstance(entry, Mapping):
        raise ConfigError(key, entry, "not a source", "Write dict(path=…, items=100).")
    items = coerce(int, entry.get("items", 0), f"{key}.items")
    if items < 0:
        raise ConfigError(f"{key}.items", items, "must be at least 0", "Set it to 0 for all rows of a file.")
    task = source_of(config.task, entry, key, ("items",))
    if task.source in FILES and not task.path:
        raise ConfigError(f"{key}.path", "", "there is no file to read", f"Set {key}.path to the file.")
    return task, items


def check_prompts(config: Config) -> None:
    """Raise ConfigError for malformed messages and tools, and for settings that the tokenizer cannot show."""
    opening_messages(config.task)
    for name in config.evaluator.sets:
        if name == HELDOUT or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            raise ConfigError(f"evaluator.sets.{name}", name, "not a name for a set",
                              f"Use letters, digits and '_.-', and another name than {HELDOUT}.")  # fmt: skip
        evaluation_set(config, name)
    if config.task.mixture and config.task.path:
        raise ConfigError("task.path", config.task.path, "task.mixture has the paths of its sources", "Leave it out.")
    for part in task_parts(config.task):
        if (
            config.task.mixture
            and max(part.task.train_start, part.task.heldout_start, config.sft.start) > SOURCE_ITEMS // 2
        ):
            raise ConfigError(f"{part.key}.train_start", part.task.train_start, "too large for a source of a mixture",
                              f"Use starts of at most {SOURCE_ITEMS // 2}.")  # fmt: skip
    for number, tool in enumerate(config.task.tools):
        if not isinstance(tool, Mapping):
            raise ConfigError(
                f"task.tools[{number}]", tool, "not a JSON schema", "Write an object, as for OpenAI's API."
            )
    if config.task.source not in FILES and not config.task.mixture:
        for name in ("prompt_column", "answer_column", "answer_after"):
            if value := getattr(config.task, name):
                raise ConfigError(f"task.{name}", value,
                                  f"task.source = {config.task.source!r} has no rows with columns",
                                  f"Set task.source to one of {', '.join(FILES)}, or leave it out.")  # fmt: skip
    if config.tokenizer.kind != "hf":
        for key, value in (
            ("tokenizer.template_args", config.tokenizer.template_args),
            ("task.tools", config.task.tools),
        ):
            if value:
                raise ConfigError(key, value, "only chat templates read it, and tokenizer.kind is 'char'",
                                  f"Set tokenizer.kind to 'hf', or leave {key} out.")  # fmt: skip
    for name in RESERVED:
        if name in config.tokenizer.template_args:
            remedy = "Use task.tools for tools." if name == "tools" else "Leave it out."
            raise ConfigError(f"tokenizer.template_args.{name}", config.tokenizer.template_args[name],
                              "JaxRoll sets this variable itself", remedy)  # fmt: skip
