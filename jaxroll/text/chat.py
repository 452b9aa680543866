"""Chat templates: messages to the text that a Hugging Face model was trained to see.

A template is Jinja source that came with the model's folder. It runs in Jinja's sandbox; without a template a plain
format serves, which no checkpoint was trained on but every base model can continue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jaxroll.errors import ConfigError, DataError, one_line
from jaxroll.records import Message

ChatFormat = Callable[[tuple[Message, ...]], str]

# Stands for an earlier conversation when only what follows it is wanted; no template produces it by itself. Messages
# that hold it, as a dump of this file does, get another one.
_EARLIER_QUESTION = "jaxroll-earlier-question"
_EARLIER_ANSWER = "jaxroll-earlier-answer"


def plain_format(messages: tuple[Message, ...]) -> str:
    """`Role: content` lines, ending with `Assistant:`; the default where a model's folder has no chat template."""
    return "".join(f"{message.role.capitalize()}: {message.content}\n" for message in messages) + "Assistant:"


def jinja_format(source: str, special_tokens: Mapping[str, str], where: str) -> ChatFormat:
    """The chat template `source` as a function of messages, with a generation prompt at its end.

    `special_tokens` (eos_token, …) are its variables, `where` names its file in errors: ConfigError for a template that
    does not parse or exceeds `template_bounds`, DataError for messages that it refuses.
    """
    try:
        import jinja2

        from jaxroll.text import template_bounds
    except ImportError as error:
        raise ConfigError(
            "tokenizer.path",
            where,
            "its chat template needs jinja2, which is not installed",
            "pip install 'jaxroll[hf]', or remove the template to use the plain format.",
        ) from error

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    remedy = "Mend the template, or remove it to use the plain format."
    environment = template_bounds.BoundedEnvironment(_tojson)
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": _strftime_now}
    try:
        template = environment.from_string(environment.parsed(source))
    except template_bounds.TooMuch as error:
        raise ConfigError("tokenizer.path", where, f"its chat template is too large: {error}", remedy) from error
    except Exception as error:  # the parser and Python's compiler raise more than TemplateError for what nests too deep
        reason = f"its chat template does not parse: {_cause(error)}"
        raise ConfigError("tokenizer.path", where, reason, remedy) from error

    def render(messages: tuple[Message, ...]) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        variables = {"messages": turns, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return template_bounds.metered(template.render, **variables, **special_tokens)
        except template_bounds.TooMuch as error:
            raise ConfigError("tokenizer.path", where, f"its chat template does too much: {error}", remedy) from error
        except Exception as error:  # a template is a program: it may raise whatever its expressions raise
            raise DataError(f"the chat template of {where} refused the messages: {_cause(error)}") from error

    return render


def _cause(error: Exception) -> str:
    """The error's message, after its kind where that says more than "the template raised"."""
    named = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
    return one_line(f"{named}{error}", 300)


def continuation(render: ChatFormat, messages: tuple[Message, ...], eos_token: str) -> str:
    """The text that `messages` add after an assistant's answer that the model itself ended with `eos_token`.

    Templates render whole conversations, so an earlier exchange is put in front and cut off again.
    """
    answer, number = _EARLIER_ANSWER, 0
    while any(answer in message.content or answer in message.role for message in messages):
        answer, number = f"{_EARLIER_ANSWER}-{number}-", number + 1
    earlier = (Message("user", _EARLIER_QUESTION), Message("assistant", answer))
    _, marker, rest = render(earlier + messages).rpartition(answer)
    if not marker:
        raise DataError("the chat template does not show earlier answers, so it cannot serve more than one turn")
    return rest.removeprefix(eos_token)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
    # Jinja's own filter escapes for HTML, which models have not seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    # A fixed day: a prompt that changes overnight would make a resumed run differ from an undisturbed one.
    return datetime(2025, 1, 1).strftime(pattern)
