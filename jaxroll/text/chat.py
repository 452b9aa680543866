"""Chat templates: messages to the text that a Hugging Face model was trained to see.

A template is Jinja source that came with the model's folder. It runs in Jinja's sandbox; without a template a plain
format serves, which no checkpoint was trained on but every base model can continue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, ClassVar

from jaxroll.errors import ConfigError, DataError
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

    `special_tokens` (eos_token, …) are its variables, `where` names its file in errors.
    """
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigError(
            "tokenizer.path",
            where,
            "its chat template needs jinja2, which is not installed",
            "pip install 'jaxroll[hf]', or remove the template to use the plain format.",
        ) from error

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said, for masks made from text; it shows as it is."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(
            "tokenizer.path",
            where,
            f"its chat template does not parse: {error}",
            "Mend the template, or remove it to use the plain format.",
        ) from error

    def render(messages: tuple[Message, ...]) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return template.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=True, **special_tokens
            )
        except TemplateError as error:
            raise DataError(f"the chat template of {where} refused the messages: {error}") from error

    return render


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
