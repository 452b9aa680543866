"""Chat templates: the text of messages in the format that a Hugging Face model was trained on.

A template is Jinja source in the model's folder. It runs in Jinja's sandbox. Without a template a plain format is used,
which no checkpoint was trained on but every base model can continue.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from jaxroll.errors import ConfigError, DataError, one_line
from jaxroll.records import Message

Tools = Sequence[Mapping[str, Any]]


class ChatFormat(Protocol):
    """Renders messages and tools, with a generation prompt at the end unless the conversation is `whole`."""

    def __call__(self, messages: tuple[Message, ...], tools: Tools = (), *, whole: bool = False) -> str: ...


# Placeholder of an earlier exchange when only the text after it is needed; no template produces it by itself. Messages
# that contain it, such as a dump of this file, get another one.
_EARLIER_QUESTION = "jaxroll-earlier-question"
_EARLIER_ANSWER = "jaxroll-earlier-answer"


def plain_format(messages: tuple[Message, ...], tools: Tools = (), *, whole: bool = False) -> str:
    """`Role: content` lines, ending with `Assistant:` unless they are `whole`; the default without a chat template.

    ConfigError for `tools`, which it cannot show.
    """
    if tools:
        raise ConfigError(
            "task.tools",
            _names(tools),
            "the model's folder has no chat template that shows tools",
            "Use a model with such a template, or describe the tools in task.system_prompt.",
        )
    return "".join(f"{message.role.capitalize()}: {message.content}\n" for message in messages) + "Assistant:" * (
        not whole
    )


def jinja_format(
    source: str, special_tokens: Mapping[str, str], where: str, template_args: Mapping[str, Any] | None = None
) -> ChatFormat:
    """The chat template `source` as a function of messages and tools, with a generation prompt at its end.

    `special_tokens` (eos_token, …) and `template_args` are its variables; `where` names its file in errors. ConfigError
    for a template that does not parse, exceeds `template_bounds` or reads no variable of the name of an argument. The
    function raises DataError for messages that the template refuses, and ConfigError for tools that it does not show.
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

    remedy = "Fix the template, or remove it to use the plain format."
    environment = template_bounds.BoundedEnvironment(_tojson)
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": _strftime_now}
    try:
        template = environment.from_string(environment.parsed(source))
    except template_bounds.TooMuch as error:
        raise ConfigError("tokenizer.path", where, f"its chat template is too large: {error}", remedy) from error
    except Exception as error:  # for deep nesting, the parser and Python's compiler raise more than TemplateError
        reason = f"its chat template does not parse: {_cause(error)}"
        raise ConfigError("tokenizer.path", where, reason, remedy) from error
    _check_args(template_args or {}, template_bounds.variables(environment, source), where)
    shown: set[str] = set()  # tools that the template is known to show

    def render(messages: tuple[Message, ...], tools: Tools = (), *, whole: bool = False) -> str:
        if tools and (named := _tojson(tools, sort_keys=True)) not in shown:
            if rendered(messages, tools) == rendered(messages, ()):
                raise ConfigError(
                    "task.tools",
                    _names(tools),
                    f"the chat template of {where} does not show tools",
                    "Describe them in task.system_prompt, or use a model that has tools.",
                )
            shown.add(named)
        return rendered(messages, tools, whole)

    def rendered(messages: tuple[Message, ...], tools: Tools, whole: bool = False) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        variables = {
            "documents": None,
            **(template_args or {}),
            "messages": turns,
            "tools": list(tools) or None,
            "add_generation_prompt": not whole,
        }
        try:
            return template_bounds.metered(template.render, **{**special_tokens, **variables})
        except template_bounds.TooMuch as error:
            raise ConfigError("tokenizer.path", where, f"its chat template does too much: {error}", remedy) from error
        except Exception as error:  # a template is a program, so its expressions may raise anything
            raise DataError(f"the chat template of {where} refused the messages: {_cause(error)}") from error

    return render


def _check_args(args: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Refuse arguments that the template does not read, because they would have no effect."""
    for name, value in args.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            remedy = f"Did you mean {close[0]!r}?" if close else f"It reads {', '.join(sorted(known)) or 'none'}."
            raise ConfigError(
                f"tokenizer.template_args.{name}", value, f"the chat template of {where} does not read it", remedy
            )


def _names(tools: Tools) -> str:
    functions = [tool.get("function", tool) for tool in tools]
    return ", ".join(str(each.get("name", "?")) if isinstance(each, Mapping) else "?" for each in functions)


def _cause(error: Exception) -> str:
    """The error's message, with its type unless it is one of Jinja's."""
    named = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
    return one_line(f"{named}{error}", 300)


def continuation(render: ChatFormat, messages: tuple[Message, ...], eos_token: str, tools: Tools = ()) -> str:
    """The text of `messages` after an answer of the assistant that ended with `eos_token`."""
    # Templates render whole conversations, so an earlier exchange is put in front and its text is removed.
    answer, number = _EARLIER_ANSWER, 0
    while any(answer in message.content or answer in message.role for message in messages):
        answer, number = f"{_EARLIER_ANSWER}-{number}-", number + 1
    earlier = (Message("user", _EARLIER_QUESTION), Message("assistant", answer))
    _, marker, rest = render(earlier + messages, tools).rpartition(answer)
    if not marker:
        raise DataError("the chat template does not show earlier answers, so it cannot serve more than one turn")
    return rest.removeprefix(eos_token)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which is not what models were trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    # A fixed day, so that a resumed run has the same prompts as an uninterrupted one.
    return datetime(2025, 1, 1).strftime(pattern)
