"""Mappings and strings to frozen dataclasses, strictly, and the sources of prompts that the config lists.

`build` makes a dataclass of a nested mapping; `assign` puts one `--config.a.b=text` override into such a mapping.
Every refusal is a ConfigError that names the key and the nearest valid one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import PurePath
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from jaxroll.config.schema import Config, TaskConfig, ValueRange
from jaxroll.errors import ConfigError
from jaxroll.records import Message
from jaxroll.run_paths import RENAMED

T = TypeVar("T")

_TRUE, _FALSE = ("true", "True", "1"), ("false", "False", "0")


def nearest(word: str, words: tuple[str, ...]) -> str:
    """The sentence that names the word of `words` most like `word`, or lists a few when none is."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Valid: {', '.join(sorted(words))}."


def build(kind: type[T], values: Any, prefix: str = "", root: type | None = None) -> T:
    """The dataclass `kind` made of the mapping `values`; keys that are absent keep their defaults.

    `root` is the dataclass whose keys may be proposed in place of an unknown one.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            prefix or "config", values, f"a section, not {_type_name(values)}", "Set its keys one by one."
        )
    hints = get_type_hints(kind)
    names = tuple(field.name for field in fields(kind))  # type: ignore[arg-type]
    made = {}
    for name, value in values.items():
        if name not in names:
            raise unknown(prefix, str(name), value, names, root or kind)
        key, hint = _join(prefix, name), cast(type, hints[name])
        made[name] = build(hint, value, key, root or kind) if is_dataclass(hint) else coerce(hint, value, key)
    return kind(**made)


def coerce(kind: Any, value: Any, key: str) -> Any:
    """`value` as the field type `kind`, converting only what loses nothing (int to float, list to tuple)."""
    origin = get_origin(kind)
    if origin is Literal:
        choices = get_args(kind)
        if value not in choices:
            raise ConfigError(key, value, f"not one of {', '.join(map(repr, choices))}", nearest(str(value), choices))
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong_type(key, value, "a list of whole numbers", f"Write [{value!r}].")
        return tuple(coerce(get_args(kind)[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if kind is dict:
        if not isinstance(value, Mapping):
            raise _wrong_type(key, value, "a dict", "Write dict(name=value).")
        return plain(value, key)
    if kind is list:
        if not isinstance(value, (list, tuple)):
            raise _wrong_type(key, value, "a list", "Write [value, value].")
        return plain(value, key)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(key, value, "not a finite number", "Give a number.")
        return float(value)
    if kind is not float and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "a string"}
    raise _wrong_type(key, value, names[kind], f"Give {names[kind]}.")


def plain(value: Any, key: str) -> Any:
    """`value` in JSON's own types (dict, list, str, int, float, bool, None), so that it can be written to run.json."""
    if isinstance(value, Mapping):
        return {str(name): plain(item, _join(key, str(name))) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{key}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise _wrong_type(key, value, "something JSON can hold", "Use dicts, lists, strings and numbers.")


def assign(kind: type, values: dict, path: str, text: str) -> None:
    """Put the override `--config.{path}={text}` into the nested dict `values`, typed by the dataclass `kind`."""
    names = path.split(".")
    here, hint = values, kind
    for depth, name in enumerate(names):
        prefix = ".".join(names[:depth])
        if is_dataclass(hint):
            known = tuple(field.name for field in fields(hint))
            if name not in known:
                raise unknown(prefix, name, text, known, kind, rest=names[depth + 1 :])
            hint = get_type_hints(hint)[name]
        elif hint is not dict:
            raise ConfigError(path, text, f"{prefix} has no keys of its own", f"Set --config.{prefix}=VALUE.")
        if depth < len(names) - 1:
            here = here.setdefault(name, {})
    if is_dataclass(hint):
        example = fields(hint)[0].name  # type: ignore[arg-type]
        raise ConfigError(path, text, "a section, not a value", f"Set its keys, as in --config.{path}.{example}=VALUE.")
    inside_dict = hint is dict and len(names) > 2
    here[names[-1]] = _any_from_text(text) if inside_dict else from_text(hint, text, path)


def from_text(kind: Any, text: str, key: str) -> Any:
    """The value of field type `kind` that `text` (from a command line) spells."""
    origin = get_origin(kind)
    if kind is str or origin is Literal:
        return text
    if kind is bool:
        if text not in _TRUE + _FALSE:
            raise _wrong_type(key, text, "true or false", "Write true or false.")
        return text in _TRUE
    if origin is tuple:
        items = [item.strip() for item in text.strip("()[] ").split(",")]
        return [from_text(get_args(kind)[0], item, key) for item in items if item]
    if kind is dict:
        return _dict_from_text(text, key)
    if kind is list:
        return _any_from_text(text)
    try:
        return kind(text.replace("_", "")) if kind in (int, float) else text
    except ValueError:
        name = "a whole number" if kind is int else "a number"
        raise _wrong_type(key, text, name, f"Give {name}.") from None


def _dict_from_text(text: str, key: str) -> dict:
    value = _any_from_text(text)
    if not isinstance(value, dict):
        raise _wrong_type(key, text, "a dict", 'Write it as JSON: {"name": 1}.')
    return value


def _any_from_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def unknown(
    prefix: str, name: str, value: Any, names: Sequence[str], root: type, rest: Sequence[str] = ()
) -> ConfigError:
    """The refusal of a key that nothing reads, with the likeliest full path.

    In this order: a sibling with these initials (lr), the same word elsewhere, a sibling or another word spelled alike.
    `rest` are the words after `name`, which is a section then.
    """
    path = _join(prefix, name)
    if path in RENAMED:
        return ConfigError(path, value, "this key has a new name", f"Write {RENAMED[path]}.")
    paths = leaves(root)
    last = {path: path.rsplit(".", 1)[-1] for path in paths}
    initials = [_join(prefix, known) for known in names if "".join(word[:1] for word in known.split("_")) == name]
    same = [path for path in paths if last[path] == name]
    near = [_join(prefix, known) for known in difflib.get_close_matches(name, names, n=3 if rest else 1, cutoff=0.6)]
    near = _below(near, rest, paths) if rest else near
    spelled = difflib.get_close_matches(name, tuple(dict.fromkeys(last.values())), n=1, cutoff=0.7)
    likely = initials or same or near or [path for path in paths if last[path] in spelled]
    if likely:
        remedy = f"Did you mean {' or '.join(map(repr, likely[:3]))}?"
    else:
        remedy = f"Valid: {', '.join(_join(prefix, known) for known in sorted(names))}."
    return ConfigError(".".join((path, *rest)), value, "unknown key", remedy)


def _below(sections: Sequence[str], rest: Sequence[str], paths: Sequence[str]) -> list[str]:
    """The keys that `rest` may mean in one of `sections`, of which the likeliest comes first; or that section."""
    if whole := [path for section in sections if (path := ".".join((section, *rest))) in paths]:
        return whole
    for section in sections:
        words = {path.rsplit(".", 1)[-1]: path for path in paths if path.startswith(f"{section}.")}
        alike = [word for word in words if "".join(part[:1] for part in word.split("_")) == rest[-1]]
        alike = alike or difflib.get_close_matches(rest[-1], tuple(words), n=1, cutoff=0.7)
        if alike:
            return [words[word] for word in alike]
    return list(sections[:1])


def differences(before: Any, after: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The dotted keys in which two values of `key` differ, with their values in `after`; a list differs as a whole if
    its length does."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in sorted(before.keys() | after.keys()):
            yield from differences(before.get(name), after.get(name), f"{key}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{key}[{number}]")
    elif before != after:
        yield key, after


def leaves(kind: type, prefix: str = "") -> list[str]:
    """The dotted paths of all values of the dataclass `kind`."""
    hints = get_type_hints(kind)
    found = []
    for field in fields(kind):  # type: ignore[arg-type]
        path, hint = _join(prefix, field.name), cast(type, hints[field.name])
        found += leaves(hint, path) if is_dataclass(hint) else [path]
    return found


def _wrong_type(key: str, value: Any, wanted: str, remedy: str) -> ConfigError:
    return ConfigError(key, value, f"{_type_name(value)} where {wanted} is needed", remedy)


def _type_name(value: Any) -> str:
    return {"str": "a string", "int": "a whole number", "float": "a number", "bool": "a bool", "NoneType": "None"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


# --- bounds, as declared in the schema


def check_bounds(section: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first number in the dataclass `section` that is outside its bounds."""
    for name, hint in get_type_hints(type(section), include_extras=True).items():
        key = _join(prefix, name)
        value: Any = getattr(section, name)
        if is_dataclass(hint):
            check_bounds(value, key)
        for bounds in getattr(hint, "__metadata__", ()):
            _check_bounds(key, value, bounds)


def _check_bounds(key: str, value: float, bounds: ValueRange) -> None:
    if bounds.least is not None and value < bounds.least:
        raise ConfigError(key, value, f"must be at least {bounds.least}", f"Set {key} to {bounds.least} or more.")
    if bounds.most is not None and value > bounds.most:
        raise ConfigError(
            key, value, f"must be at most {bounds.most}", f"Set {key} between {bounds.least} and {bounds.most}."
        )
    if bounds.above is not None and value <= bounds.above:
        raise ConfigError(key, value, f"must be greater than {bounds.above}", f"Set {key} to a positive number.")


# --- sources of prompts: one, or several in a mixture; held-out sets

FILES = ("jsonl", "parquet", "hf_dataset")  # values of task.source that read task.path

SOURCE_KEYS = (
    "source", "name", "args", "path", "prompt_style", "prompt_column", "answer_column", "answer_after", "train_start",
    "heldout_start", "heldout_items",
)  # fmt: skip
# How a source is shown, played and scored. It has the values of `task` for keys that its entry leaves out.
PLAY_KEYS = (
    "env", "extract", "reward", "reward_args", "max_turns", "max_prompt_tokens", "max_episode_tokens", "system_prompt",
    "few_shot", "tools",
)  # fmt: skip
_REWARD_KEYS = ("extract", "reward", "reward_args")
# Built-in environments with a reward of their own: they do not read `_REWARD_KEYS`.
UNGRADED_ENVS = (
    "frozen_lake", "gymnasium", "sokoban", "tool_calls", "code_repair", "shop", "textarena", "pettingzoo", "textworld",
    "openenv",
)  # fmt: skip
# Item i of source number n has the index n * SOURCE_ITEMS + i.
SOURCE_ITEMS = 10**12


@dataclass(frozen=True)
class TaskPart:
    """One source: `task` is the section with its keys; without a mixture `label` and `tag` are empty, `weight` is 1.

    `env` is the environment of its tasks (`Task.env`): NAME@LABEL if the source is played or scored in its own way.
    `given` are the keys of its entry.
    """

    label: str
    weight: float
    task: TaskConfig
    key: str
    tag: str = ""
    env: str = ""
    given: frozenset[str] = frozenset()


def task_parts(task: TaskConfig) -> tuple[TaskPart, ...]:
    """The sources of the config; ConfigError for malformed entries of `task.mixture`."""
    if not task.mixture:
        return (TaskPart("", 1.0, task, "task", env=task.env),)
    found: list[TaskPart] = []
    for number, entry in enumerate(task.mixture):
        key = f"task.mixture[{number}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(key, entry, "not a source", "Write dict(path=…, weight=1.0).")
        weight = coerce(float, entry.get("weight", 1.0), f"{key}.weight")
        if weight <= 0:
            raise ConfigError(f"{key}.weight", weight, "a source needs a share", "Use a positive weight.")
        part = source_of(task, entry, key, ("label", "weight", "tag"))
        label = coerce(str, entry.get("label", PurePath(part.path).stem if part.source in FILES else part.name), key)
        if not label or label in (other.label for other in found):
            raise ConfigError(f"{key}.label", label, "every source needs its own name", "Set label.")
        tag = coerce(str, entry.get("tag", label), f"{key}.tag")
        found.append(TaskPart(label, weight, part, key, tag, _env(task, part, entry, label), frozenset(entry)))
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
        if name not in SOURCE_KEYS + PLAY_KEYS + own:
            near = nearest(str(name), SOURCE_KEYS + PLAY_KEYS + own)
            raise ConfigError(f"{key}.{name}", entry[name], "unknown key of a source", near)
    hints = get_type_hints(TaskConfig)
    given = {k: coerce(hints[k], value, f"{key}.{k}") for k, value in entry.items() if k not in own}
    other: dict[str, Any] = {"args": {}, "path": "", "prompt_column": "", "answer_column": "", "answer_after": ""}
    inherited = {} if given.keys() <= {"heldout_items", "train_start", "heldout_start", *PLAY_KEYS} else other
    if given.get("env", task.env) in UNGRADED_ENVS and task.env not in UNGRADED_ENVS:
        usual = TaskConfig()
        inherited |= {name: getattr(usual, name) for name in _REWARD_KEYS}
    elif "reward" in given:  # settings of parts of another reward
        inherited |= {"reward_args": {}}
    found = dataclasses.replace(task, mixture=[], **{**inherited, **given})
    check_bounds(found, key)
    return found


def _env(task: TaskConfig, part: TaskConfig, entry: Mapping[str, Any], label: str) -> str:
    """The environment of the tasks of the source `part` in `task`; a game reads its `args`, too."""
    own = any(key in PLAY_KEYS for key in entry)
    if part.source == "game":  # an entry without `args` does not inherit those of another game
        own |= "args" in entry or part.args != task.args
    return f"{part.env}@{label}" if own else part.env


HELDOUT = "heldout"  # the name of the set of task.heldout_items


def evaluation_set(config: Config, name: str) -> tuple[TaskPart, int]:
    """The source of the set `name` of `evaluator.sets`, and its number of items (0: all rows of a file).

    ConfigError for a malformed entry.
    """
    entry, key = config.evaluator.sets[name], f"evaluator.sets.{name}"
    if not isinstance(entry, Mapping):
        raise ConfigError(key, entry, "not a source", "Write dict(path=…, items=100).")
    if (items := coerce(int, entry.get("items", 0), f"{key}.items")) < 0:
        raise ConfigError(f"{key}.items", items, "must be at least 0", "Set it to 0 for all rows of a file.")
    task = source_of(config.task, entry, key, ("items", "samples"))
    if task.source in FILES and not task.path:
        raise ConfigError(f"{key}.path", "", "there is no file to read", f"Set {key}.path to the file.")
    env = _env(config.task, task, entry, f"sets.{name}")
    return TaskPart("", 1.0, task, key, env=env, given=frozenset(entry)), items


def samples_of(config: Config, name: str, *, samples: int | None = None, temperature: float | None = None) -> int:
    """The number of answers to each item of the held-out set `name`. ConfigError if several would be equal.

    `samples` and `temperature` are the options of `jaxroll eval`: each comes before the config's value, if it is given.
    """
    entry = config.evaluator.sets.get(name, {})  # none for HELDOUT
    key = f"evaluator.sets.{name}.samples" if "samples" in entry else "evaluator.samples"
    count = coerce(int, entry.get("samples", config.evaluator.samples), key)
    remedy = "Set evaluator.temperature, as to 1.0."
    if samples is not None:
        count, key, remedy = samples, "--samples", "Add --temperature=1, for example."
    if temperature is not None:
        remedy = "Set --temperature above 0, or add --samples=1."
    if count < 1:
        raise ConfigError(key, count, "must be at least 1", "Set it to 1 for one answer to each item.")
    if count > 1 and (config.evaluator.temperature if temperature is None else temperature) == 0:
        raise ConfigError(key, count, "greedy answers to an item are all the same", remedy)
    return count


def every_part(config: Config) -> tuple[TaskPart, ...]:
    """The sources of the prompts, then those of the held-out sets."""
    return *task_parts(config.task), *(evaluation_set(config, name)[0] for name in config.evaluator.sets)


def played_tasks(config: Config) -> dict[str, TaskConfig]:
    """The section `task` of each environment with reward that occurs in `Task.env`, for all prompts and held-out sets.

    One entry, unless sources are played or scored in their own way.
    """
    return {part.env: part.task if "@" in part.env else config.task for part in every_part(config)}


def labels(config: Config) -> tuple[str, ...]:
    """The labels of the sources of a mixture, by number; empty without a mixture."""
    return tuple(part.label for part in task_parts(config.task)) if config.task.mixture else ()


@contextlib.contextmanager
def about(part: TaskPart) -> Iterator[None]:
    """Report errors about keys of `task` as errors about the source `part`, if its entry has the key."""
    try:
        yield
    except ConfigError as error:
        task, _, key = error.key.partition(".")
        if part.key == "task" or task != "task":
            raise
        name = re.split(r"[.\[]", key)[0]
        reason = f"{part.label or part.key}: {error.reason}"
        if name in part.given:
            raise ConfigError(f"{part.key}.{key}", error.value, reason, error.remedy) from error
        alone = f" Or set {part.key}.{name} for this source alone." if name in PLAY_KEYS else ""
        raise ConfigError(error.key, error.value, reason, error.remedy + alone) from error


# --- messages before every question

ROLES = ("system", "user", "assistant", "tool")


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
        last, reason = f"task.few_shot[{len(task.few_shot) - 1}]", "the last message before the question is no answer"
        raise ConfigError(last, found[-1].role, reason, "End with a message of the assistant, or use pairs.")
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
