"""Checks of the values that an environment or a scorer returned: they fit the records, or DataError names the field.

User code returns numpy scalars, booleans, lists, and values that cannot be serialised. Values that can be converted
without loss are converted here, where the member is known; otherwise the store would refuse the whole put.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxroll.errors import DataError
from jaxroll.protocols import StepResult
from jaxroll.records import MAX_EXTRACTED_CHARS, MAX_LABEL_CHARS, MAX_PARTS, Message

MAX_SHOWN_CHARS = 2**20  # in the messages of one turn, because they are tokenised on the event loop
_NOT_REAL = "cOSUmM"  # kinds of numpy dtypes that `float` converts with loss, or by parsing text
_OWN_PARTS = 1  # the episode adds `truncated`


def step_result(value: Any) -> StepResult:
    """`value` as a StepResult whose fields have their declared types; DataError otherwise."""
    if not isinstance(value, StepResult):
        raise DataError(f"step() returned {_named(value)}, not a StepResult")
    done = flag(value.done, "StepResult.done")
    extracted = value.extracted
    if extracted is not None:
        extracted = text(extracted, "StepResult.extracted", MAX_SHOWN_CHARS)[:MAX_EXTRACTED_CHARS]
    shown = () if done else messages(value.messages, "StepResult.messages")
    return StepResult(done, shown, number(value.reward, "the reward"), parts(value.reward_parts), extracted)


def messages(value: Any, field: str) -> tuple[Message, ...]:
    """`value`, a list or tuple of Message, as a tuple whose texts can be encoded; DataError otherwise."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise DataError(f"{field} is {_named(value)}, not a tuple of Message")
    size = 0
    for place, message in enumerate(value):
        if not isinstance(message, Message):
            raise DataError(f"{field}[{place}] is {_named(message)}, not a Message")
        text(message.role, f"{field}[{place}].role", MAX_LABEL_CHARS)
        size += len(text(message.content, f"{field}[{place}].content", MAX_SHOWN_CHARS))
    if size > MAX_SHOWN_CHARS:
        raise DataError(f"{field}: {size} characters in one turn, at most {MAX_SHOWN_CHARS} are taken")
    return tuple(value)


def parts(value: Any) -> dict[str, float]:
    """`value`, a mapping from label to number, with finite floats; DataError otherwise."""
    if not isinstance(value, Mapping):
        raise DataError(f"StepResult.reward_parts is {_named(value)}, not a dict of label to number")
    if len(value) > MAX_PARTS - _OWN_PARTS:
        raise DataError(f"StepResult.reward_parts has {len(value)} entries, at most {MAX_PARTS - _OWN_PARTS} are taken")
    return {
        text(name, "a label of StepResult.reward_parts", MAX_LABEL_CHARS): number(
            part, f"reward part {str(name)[:40]!a}"
        )
        for name, part in value.items()
    }


def number(value: Any, field: str) -> float:
    """`value` (a real number, a boolean, or an array without dimensions) as a finite float; DataError otherwise."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if isinstance(value, str | bytes | bytearray) or getattr(value, "shape", ()) != () or kind in _NOT_REAL:
        raise DataError(f"{field} is {_named(value)}, not a finite number")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{field} is {_named(value)}, not a finite number: {error}") from error
    if not math.isfinite(found):
        raise DataError(f"{field} is {found}, which is not a finite number")
    return found


def flag(value: Any, field: str) -> bool:
    """`value` (a boolean of Python or numpy) as a bool; DataError otherwise."""
    if isinstance(value, bool) or (str(getattr(value, "dtype", "")) == "bool" and getattr(value, "shape", None) == ()):
        return bool(value)
    raise DataError(f"{field} is {_named(value)}, not True or False")


def text(value: Any, field: str, max_chars: int) -> str:
    """`value`, a str of at most `max_chars` characters that UTF-8 can encode; DataError otherwise."""
    if not isinstance(value, str):
        raise DataError(f"{field} is {_named(value)}, not a str")
    if len(value) > max_chars:
        raise DataError(f"{field} has {len(value)} characters, at most {max_chars} are taken")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{field} holds the lone surrogate {value[error.start]!a} at {error.start}, which UTF-8 cannot encode"
        ) from error
    return str(value)  # a plain str, because subclasses cannot be serialised


def described(error: BaseException, max_chars: int = 1000) -> str:
    """The error as text that can be serialised: lone surrogates, or a message that raises, become question marks."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - user code may raise here, too
        message = "?"
    return f"{type(error).__name__}: {message[:max_chars]}"[:max_chars].encode(errors="replace").decode()


def _named(value: Any) -> str:
    """A description of `value` for an error message: None, or its type."""
    return "None" if value is None else f"a value of type {type(value).__name__}"
