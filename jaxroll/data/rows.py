"""Layouts of prompt rows: columns of a dataset to items. docs/prompts.md shows an example of each.

    columns   question, prompt or problem; answer
    trl       prompt (text or chat messages); solution or ground_truth
    verl      prompt (text or chat messages); reward_model.ground_truth (SkyRL: also reward_spec); data_source

`task.prompt_column` and `task.answer_column` name any other columns; a dotted path leads into a nested one. A column
without a value in a row does not count as one of its columns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec

from jaxroll.config import TaskConfig
from jaxroll.config.prompt_rules import ROLES
from jaxroll.errors import ConfigError, one_line
from jaxroll.records import Item, Message

ROW_BYTES = 1 << 20  # limit of one row as JSON, because each task carries its row through the store
NO_ANSWER = "none"  # value of task.answer_column for rows that only a reward model or a judge can score
_PROMPTS, _ANSWERS = ("question", "prompt", "problem"), ("answer", "solution", "ground_truth")
_REWARDS = ("reward_model", "reward_spec")
_COLUMNS_SHOWN, _COLUMN_CHARS = 20, 40


@dataclass(frozen=True)
class Layout:
    """The columns of prompt and answer; `answer` is a path into nested columns, empty if there is no answer."""

    name: str
    prompt: tuple[str, ...]
    answer: tuple[str, ...]

    def __str__(self) -> str:
        answer = ".".join(self.answer) or "none"
        return f"{self.name} (prompt: {'.'.join(self.prompt)}, answer: {answer})"


class UnknownLayout(Exception):
    """The columns have no known layout, or more than one."""


@functools.lru_cache(maxsize=1024)
def layout_of(columns: frozenset[str], prompt_column: str, answer_column: str) -> Layout:
    """The layout of a row with these columns; UnknownLayout if none or several fit."""
    shown = f"; its columns are {described(columns)}"
    prompt = prompt_column or _only(_PROMPTS, columns, "prompt", "task.prompt_column", shown)
    reward = [name for name in _REWARDS if name in columns]
    if answer_column == NO_ANSWER:
        answer = ""
    elif answer_column:
        answer = answer_column
    elif reward:
        answer = f"{reward[0]}.ground_truth"
    else:
        answer = _only(_ANSWERS, columns, "answer", "task.answer_column", shown)
    for column in filter(None, (prompt, answer)):
        if column.partition(".")[0] not in columns:
            raise UnknownLayout(f"the row has no {'answer' if column == answer else 'prompt'} {column!r}{shown}")
    name = (
        "verl" if reward and not answer_column else "columns" if prompt == "question" or answer == "answer" else "trl"
    )
    return Layout(name, tuple(prompt.split(".")), tuple(answer.split(".")) if answer else ())


def _only(names: tuple[str, ...], columns: frozenset[str], what: str, key: str, shown: str) -> str:
    found = [name for name in names if name in columns]
    if len(found) > 1:
        raise UnknownLayout(f"the row has several columns for the {what} ({', '.join(found)}): set {key}{shown}")
    if not found:
        raise UnknownLayout(f"the row has no {what} ({', '.join(names)}): set {key}{shown}")
    return found[0]


def described(columns: Iterable[str]) -> str:
    """The names of columns in one bounded line."""
    names = sorted(one_line(name, _COLUMN_CHARS) for name in columns)
    rest = f" and {len(names) - _COLUMNS_SHOWN} more" if len(names) > _COLUMNS_SHOWN else ""
    return f"{', '.join(names[:_COLUMNS_SHOWN]) or 'none'}{rest}"


def bad_row(where: str, reason: str) -> ConfigError:
    """The refusal of a row."""
    return ConfigError("task.path", where, reason, "docs/prompts.md shows the layouts of rows.")


def item(row: dict[str, Any], where: str, cfg: TaskConfig, plain: Mapping[str, Any] | None = None) -> Item:
    """The row as an item; ConfigError with `where` if it has no known layout or a value of a wrong type.

    `plain` is the row in JSON's own types, for the reward and the environment (default: the row itself).
    """
    columns = frozenset(name for name, value in row.items() if value is not None)
    try:
        layout = layout_of(columns, cfg.prompt_column, cfg.answer_column)
        messages = _messages(_at(row, layout.prompt))
        answer = _answer(row, layout, cfg.answer_after)
    except UnknownLayout as error:
        raise bad_row(where, str(error)) from None
    text = _text(messages)
    args = {"scorer": "exact", "answer": answer or "", "row": row if plain is None else plain}
    if tools := _tools(row.get("tools"), where):
        args["tools"] = tools
    if layout.name == "verl" and isinstance(source := row.get("data_source"), str):
        args["source"] = source
    return Item(text, text, answer, args, messages=messages)


def layout(row: Mapping[str, Any], cfg: TaskConfig) -> Layout:
    """The layout of a row that `item` accepts."""
    columns = frozenset(name for name, value in row.items() if value is not None)
    return layout_of(columns, cfg.prompt_column, cfg.answer_column)


def _at(row: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


def _messages(prompt: Any) -> tuple[Message, ...]:
    """The prompt as chat messages; text is a message of the user."""
    if isinstance(prompt, str) and prompt:
        return (Message("user", prompt),)
    if not isinstance(prompt, list) or not prompt:
        raise UnknownLayout("the prompt (question) is neither text nor a list of chat messages")
    found = tuple(_message(entry) for entry in prompt)
    if found[-1].role not in ("user", "tool"):
        raise UnknownLayout(f"the last message of the prompt has the role {found[-1].role}; the model answers a user")
    return found


def _message(entry: Any) -> Message:
    if not isinstance(entry, Mapping):
        raise UnknownLayout("a message of the prompt is not an object with role and content")
    extra = [name for name, value in entry.items() if name not in ("role", "content") and value]
    if extra:
        raise UnknownLayout(f"a message of the prompt has {described(extra)}, which JaxRoll cannot show")
    role, content = entry.get("role"), entry.get("content")
    if isinstance(content, list):  # parts, as in OpenAI's API
        texts = [part["text"] for part in content if _is_text(part)]
        content = "".join(texts) if len(texts) == len(content) else None
    if role not in ROLES or not isinstance(content, str):
        raise UnknownLayout(f"a message of the prompt needs a role ({', '.join(ROLES)}) and content as text")
    return Message(role, content)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _text(messages: tuple[Message, ...]) -> str:
    """The question without system messages, which identifies it."""
    shown = [message for message in messages if message.role != "system"]
    return shown[0].content if len(shown) == 1 else "\n".join(f"{each.role}: {each.content}" for each in shown)


def _answer(row: Mapping[str, Any], layout: Layout, after: str) -> str | None:
    if not layout.answer:
        return None
    value = _at(row, layout.answer)
    if value is None:
        raise UnknownLayout(f"the row has no answer in {'.'.join(layout.answer)}; its columns are {described(row)}")
    if layout.name == "verl" and isinstance(value, (dict, list)):
        return msgspec.json.encode(value).decode()
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise UnknownLayout(f"the answer is a {type(value).__name__}, not text or a number")
    return final_answer(str(value), after) if after else str(value)


def final_answer(text: str, after: str) -> str:
    """The text after the last `after`, without white space around it and without commas in a number.

    GSM8K's answers end with `#### 1,234`: with `after="####"` that is 1234. UnknownLayout if `after` does not occur.
    """
    _, marker, final = text.rpartition(after)
    if not marker:
        raise UnknownLayout(f"the answer does not contain task.answer_after = {after!r}")
    final = final.strip()
    bare = final.replace(",", "")
    return bare if bare.lstrip("-").replace(".", "", 1).isdecimal() else final


def _tools(value: Any, where: str) -> list[dict[str, Any]]:
    """The tool schemas of a row: a list, or a list as JSON text. Keys that Arrow filled with None are left out."""
    if isinstance(value, str) and value:
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_row(where, f"its column tools is not JSON: {error}") from error
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise bad_row(where, "its column tools is not a list of JSON schemas")
    return [_without_none(tool) for tool in value]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
