"""Answers of the HTTP front end: text, tool calls and log-probs of tokens that arrive in pieces.

An answer that arrives at once is one piece, so a stream and a single answer have the same content.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxroll.protocols import Completion, Tokenizer
from jaxroll.records import VersionRun
from jaxroll.serving.http_requests import Wanted

CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the end of a text whose last character needs another token
_WINDOW = 8  # tokens before a piece with which it is decoded: the text of a token depends on the ones before


class TextStream:
    """The text of tokens that arrive in pieces, as far as later tokens cannot change it.

    It holds back incomplete characters and what may be the beginning of one of `stops`, which end the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._ids: list[int] = []
        self._from = self._to = 0  # the tokens before `_to` are in the text; decoding begins at `_from`
        self._held = ""

    def add(self, ids: Sequence[int]) -> str:
        """The text that is final after `ids`."""
        self._ids.extend(ids)
        before = self._decode(self._ids[self._from : self._to])
        text = self._decode(self._ids[self._from :])
        if len(text) > len(before) and not text.endswith(_INCOMPLETE):
            self._held += text[len(before) :]
            self._from, self._to = max(len(self._ids) - _WINDOW, 0), len(self._ids)
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        return self._release(len(self._held) - keep)

    def end(self, *, stopped: bool) -> str:
        """The remaining text; `stopped`: it ends before the first of `stops` in it."""
        before = self._decode(self._ids[self._from : self._to])
        self._held += self._decode(self._ids[self._from :])[len(before) :]
        ends = [self._held.find(stop) for stop in self._stops if stopped and stop in self._held]
        return self._release(min(ends, default=len(self._held)))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` with which `mark` begins, or of the text from `mark` on."""
    if mark in text:
        return len(text) - text.index(mark)
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool; `arguments` is a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def shown(self) -> dict[str, Any]:
        """OpenAI's layout."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallStream:
    """Separates the calls of tools from a text that arrives in pieces. Blanks around calls are dropped.

    A block that is not a call stays in the text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._after_call = False  # blanks are dropped until other text follows

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
        """The content and the calls that are complete after `text`."""
        self._held += text
        content, calls = "", []
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held
        while CALL_OPENS in self._held:
            before, _, block = self._held.partition(CALL_OPENS)
            inside, closed, rest = block.partition(CALL_CLOSES)
            if not closed:
                break
            if (call := _call(inside)) is None:
                content += f"{before}{CALL_OPENS}{inside}{CALL_CLOSES}"
            else:
                content, rest = content + before.rstrip(), rest.lstrip()
                calls.append(call)
                self._after_call = not rest
            self._held = rest
        free = len(self._held) - _overlap(self._held, CALL_OPENS)
        free = len(self._held[:free].rstrip())
        content, self._held = content + self._held[:free], self._held[free:]
        return content, calls

    def end(self) -> str:
        """The remaining content."""
        return self._held


def _call(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
        arguments = value.get("arguments", {})
        name = value["name"]
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


@dataclass
class Piece:
    """New content of an answer."""

    text: str
    calls: list[ToolCall]
    tokens: list[int]
    logprobs: list[float]
    versions: tuple[VersionRun, ...]
    finish: str | None = None


class Answer:
    """One answer, whose tokens arrive in pieces."""

    def __init__(self, tokenizer: Tokenizer, wanted: Wanted) -> None:
        self._params, self._text = wanted.params, TextStream(tokenizer.decode, wanted.params.stop_strings)
        self._calls = CallStream() if wanted.tools else None
        self.count, self.called = 0, 0

    def add(self, piece: Completion) -> Piece:
        """The content of new tokens."""
        ids = piece.tokens.tolist()
        self.count += len(ids)
        return self._piece(self._text.add(ids), piece)

    def end(self, rest: Completion) -> Piece:
        """The content of the last tokens, and of those before that was held back."""
        ids = rest.tokens.tolist()
        self.count += len(ids)
        stopped = rest.finish == "stop"
        by_token = stopped and bool(ids) and ids[-1] in self._params.stop_tokens
        text = self._text.add(ids[:-1] if by_token else ids)
        text += self._text.end(stopped=stopped and not by_token)
        piece = self._piece(text, rest)
        if self._calls is not None:
            piece.text += self._calls.end()
        piece.finish = "tool_calls" if self.called and stopped else rest.finish
        return piece

    def _piece(self, text: str, new: Completion) -> Piece:
        content, calls = (text, []) if self._calls is None else self._calls.add(text)
        self.called += len(calls)
        return Piece(content, calls, new.tokens.tolist(), [float(one) for one in new.logprobs], new.versions)
