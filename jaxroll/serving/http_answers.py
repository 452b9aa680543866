"""Answers of the HTTP front end: text, tool calls and log-probs of tokens that arrive in pieces, and their layouts.

An answer that arrives at once is one piece, so a stream and a single answer have the same content.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from jaxroll.clock import unix_s
from jaxroll.engine.sequence import EngineStats
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, Tokenizer
from jaxroll.records import Version, VersionRun
from jaxroll.serving.engine_thread import PauseMode, WakeQueue
from jaxroll.serving.http_requests import EngineLimits, Wanted

CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the end of a text whose last character needs another token
_WINDOW = 8  # the fewest tokens before a piece with which it is decoded: the text of a token depends on them


class TextStream:
    """The text of tokens that arrive in pieces, as far as later tokens cannot change it.

    It holds back incomplete characters and what may be the beginning of one of `stops`, which end the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._ids: list[int] = []
        self._from = 0  # decoding begins here
        self._before = ""  # the text from there on that is final
        self._held = ""

    def add(self, ids: Sequence[int]) -> str:
        """The text that is final after `ids`."""
        self._ids.extend(ids)
        text = self._decode(self._ids[self._from :])
        if len(text) > len(self._before) and not text.endswith(_INCOMPLETE):
            self._held += text[len(self._before) :]
            if len(self._ids) - self._from > 2 * _WINDOW:
                self._from = len(self._ids) - _WINDOW
                text = self._decode(self._ids[self._from :])
            self._before = text
        if not self._stops:
            text, self._held = self._held, ""
            return text
        return self._release(len(self._held) - max(_overlap(self._held, stop) for stop in self._stops))

    def end(self, *, stopped: bool) -> str:
        """The remaining text; `stopped`: it ends before the first of `stops` in it."""
        self._held += self._decode(self._ids[self._from :])[len(self._before) :]
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


class StreamedAnswer:
    """One answer, whose tokens arrive in pieces."""

    def __init__(self, tokenizer: Tokenizer, wanted: Wanted) -> None:
        self._wanted, self._text = wanted, TextStream(tokenizer.decode, wanted.params.stop_strings)
        self._calls = CallStream() if wanted.tools else None
        self.count, self.called = 0, 0

    def add(self, new: Sequence[Completion]) -> Piece:
        """The content of new tokens: without log-probs and versions that are not wanted, to save time."""
        ids: list[int] = []
        for piece in new:
            ids += piece.tokens.tolist()
        self.count += len(ids)
        logprobs = [one for piece in new for one in piece.logprobs.tolist()] if self._wanted.logprobs else []
        return self._piece(self._text.add(ids), ids, logprobs, joined_versions(new) if self._wanted.token_ids else ())

    def end(self, rest: Completion) -> Piece:
        """The content of the last tokens, and of those before that was held back."""
        ids = rest.tokens.tolist()
        self.count += len(ids)
        stopped = rest.finish == "stop"
        by_token = stopped and bool(ids) and ids[-1] in self._wanted.params.stop_tokens
        text = self._text.add(ids[:-1] if by_token else ids)
        text += self._text.end(stopped=stopped and not by_token)
        piece = self._piece(text, ids, rest.logprobs.tolist(), rest.versions)
        if self._calls is not None:
            piece.text += self._calls.end()
        piece.finish = "tool_calls" if self.called and stopped else rest.finish
        return piece

    def _piece(self, text: str, ids: list[int], logprobs: list[float], versions: tuple[VersionRun, ...]) -> Piece:
        content, calls = (text, []) if self._calls is None else self._calls.add(text)
        self.called += len(calls)
        return Piece(content, calls, ids, logprobs, versions)


class JoinedTokens:
    """The new tokens of one request's answers, joined until it is the turn of its client."""

    def __init__(self, client: str, wake_queue: WakeQueue) -> None:
        self._client, self._wake_queue, self._asked, self._urgent = client, wake_queue, False, True
        self._turn = asyncio.get_running_loop().create_future()
        self._new: dict[int, list[Completion]] = {}
        self._error: BaseException | None = None

    def add(self, choice: int, new: Completion | BaseException) -> None:
        """Tokens of an answer, its end (with all of its tokens), or its error."""
        if isinstance(new, BaseException):
            self._error = self._error or new
        else:
            self._new.setdefault(choice, []).append(new)
        ends = isinstance(new, BaseException) or bool(new.finish)
        if not self._asked or (ends and not self._urgent):
            self._asked, self._urgent = True, self._urgent or ends
            self._wake_queue.wake(self._client, self._wake, urgent=self._urgent)

    async def take(self) -> list[tuple[int, list[Completion]]]:
        """The answers with new tokens: the pieces of each since the last call; the last one may be its end.

        Raises the first error.
        """
        await self._turn
        self._turn = asyncio.get_running_loop().create_future()
        self._asked, self._urgent, taken, self._new = False, False, self._new, {}
        if self._error is not None:
            raise self._error
        return list(taken.items())

    def _wake(self) -> None:
        if self._asked and not self._turn.done():  # it is done, if the request was cancelled
            self._turn.set_result(None)


def joined_versions(pieces: Sequence[Completion]) -> tuple[VersionRun, ...]:
    """The versions of the tokens of `pieces`, which follow each other."""
    versions: list[VersionRun] = []
    for run in (run for piece in pieces for run in piece.versions):
        if versions and versions[-1].version == run.version:
            run = VersionRun(run.version, versions.pop().count + run.count)
        versions.append(run)
    return tuple(versions)


# --- Layouts of the HTTP front end's answers: OpenAI's completions and chat completions, and answers by token ids

MAX_OPEN = 512  # answers that are computed or wait for a slot


class Generator(Protocol):
    """The engine's proxy (`EngineProxy`)."""

    paused: PauseMode | None

    async def generate(
        self,
        prompt: Any,
        key: GenerationKey,
        params: SamplingParams,
        *,
        keep: bool = False,
        allowed: Any = None,
        on_tokens: Callable[[Completion], None] | None = None,
    ) -> Completion: ...

    async def pause(self, mode: PauseMode) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True)
class Served:
    """The model that a front end serves: its name, its engine, and their state."""

    name: str
    proxy: Generator
    room: EngineLimits
    version: Callable[[], Version | None]
    stats: Callable[[], EngineStats]
    latencies: Callable[[], Mapping[str, float | None]] = dict
    max_open: int = MAX_OPEN
    slots: int | None = None  # requests in the engine at once; None: as many as are open
    swap: str = "keep_kv"  # what happens to running requests when weights change (`schedule.weight_swap`)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def version_runs(versions: Sequence[VersionRun]) -> list[dict[str, Any]]:
    """The weight version of every token, run-length encoded."""
    return [{"version": str(run.version), "count": run.count} for run in versions]


def token_name(tokenizer: Tokenizer, token: int, wanted: Wanted) -> str:
    """The name of a token among log-probs."""
    return f"token_id:{token}" if wanted.token_names else tokenizer.decode([token])


def chat_logprobs(piece: Piece, tokenizer: Tokenizer, wanted: Wanted) -> dict[str, Any] | None:
    """`logprobs` of a chat answer; None if they are not wanted."""
    if not wanted.logprobs:
        return None
    content = []
    for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
        name = token_name(tokenizer, token, wanted)
        text = None if wanted.token_names else list(name.encode())
        one: dict[str, Any] = {"token": name, "logprob": logprob, "bytes": text}
        content.append({**one, "top_logprobs": [one] if wanted.top_logprobs else []})
    return {"content": content}


def text_logprobs(piece: Piece, offset: int, tokenizer: Tokenizer, wanted: Wanted) -> dict[str, Any] | None:
    """`logprobs` of a completion whose text so far has `offset` characters; None if they are not wanted."""
    if not wanted.logprobs:
        return None
    names = [token_name(tokenizer, token, wanted) for token in piece.tokens]
    offsets = []
    for token in piece.tokens:
        offsets.append(offset)
        offset += len(tokenizer.decode([token]))
    tops = [{name: one} for name, one in zip(names, piece.logprobs, strict=True)] if wanted.top_logprobs else None
    return {"tokens": names, "token_logprobs": piece.logprobs, "top_logprobs": tops, "text_offset": offsets}


def extension(piece: Piece, wanted: Wanted) -> dict[str, Any]:
    """Token ids and weight versions, if wanted."""
    return {"token_ids": piece.tokens, "weight_versions": version_runs(piece.versions)} if wanted.token_ids else {}


class AnswerFormat:
    """The JSON objects of the answer to a request: whole, or as the events of a stream."""

    object = ""

    def __init__(self, model: Served, wanted: Wanted, id: str) -> None:
        self.model, self.wanted, self.id, self.created = model, wanted, id, int(unix_s())
        self.tokens, self.texts = 0, Counter[int]()
        self._begun: set[int] = set()
        self._opening = b""
        self._opened_at: Version | None = None

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """The answer to a request that does not stream: one piece for each choice."""
        self.tokens = sum(len(piece.tokens) for piece in pieces)
        choices = [self.choice(index, piece) for index, piece in enumerate(pieces)]
        return self.head(self.object) | self.prompt(0) | {"choices": choices, "usage": self.usage()}

    async def events(self, pieces: AsyncGenerator[tuple[int, Piece], None]) -> AsyncGenerator[bytes, None]:
        """The events of a stream, without the last one."""
        async with aclosing(pieces):
            async for index, piece in pieces:
                yield self.event_of(index, piece)
        for one in self.closing():
            yield one

    def event_of(self, index: int, piece: Piece) -> bytes:
        """The event of the next piece of an answer."""
        first = index not in self._begun
        self.tokens += len(piece.tokens)
        choice = self.chunk(index, piece, first)
        self.texts[index] += len(piece.text)
        if first:
            self._begun.add(index)
            return event(self.head(self.chunk_object) | self.prompt(index) | {"choices": [choice]})
        return b'%b,"choices":[%b]}\n\n' % (self._opened(), msgspec.json.encode(choice))

    def closing(self) -> list[bytes]:
        """The events after the last piece: the usage, if it is wanted."""
        if not self.wanted.usage:
            return []
        return [event(self.head(self.chunk_object) | {"choices": [], "usage": self.usage()})]

    def _opened(self) -> bytes:
        """The head of an event, encoded once for each weight version: all later events of a stream begin with it."""
        version = self.model.version()
        if not self._opening or version != self._opened_at:
            self._opening, self._opened_at = event(self.head(self.chunk_object))[: -len(b"}\n\n")], version
        return self._opening

    @property
    def chunk_object(self) -> str:
        return self.object

    def head(self, kind: str) -> dict[str, Any]:
        version = self.model.version()
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"weights {version}",
        }

    def prompt(self, index: int) -> dict[str, Any]:
        ids = self.wanted.prompts[index // self.wanted.count]
        return {"prompt_token_ids": ids} if self.wanted.token_ids else {}

    def usage(self) -> dict[str, int]:
        prompts = sum(map(len, self.wanted.prompts))
        return {"prompt_tokens": prompts, "completion_tokens": self.tokens, "total_tokens": prompts + self.tokens}

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def chunk(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        return self.choice(index, piece)


class TextLayout(AnswerFormat):
    object = "text_completion"

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        tokenizer = self.model.room.tokenizer
        logprobs = text_logprobs(piece, self.texts[index], tokenizer, self.wanted)
        shown = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}
        return shown | self.prompt(index) | extension(piece, self.wanted) if self.wanted.token_ids else shown


class ChatLayout(AnswerFormat):
    object = "chat.completion"

    def __init__(self, model: Served, wanted: Wanted, id: str) -> None:
        super().__init__(model, wanted, id)
        self._called = Counter[int]()

    @property
    def chunk_object(self) -> str:
        return "chat.completion.chunk"

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text or (None if piece.calls else "")}
        if piece.calls:
            message["tool_calls"] = [call.shown() for call in piece.calls]
        return {"index": index, "message": message, **self._rest(piece)}

    def chunk(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if piece.text or first:
            delta["content"] = piece.text
        if piece.calls:
            numbers = range(self._called[index], self._called[index] + len(piece.calls))
            delta["tool_calls"] = [{"index": n, **call.shown()} for n, call in zip(numbers, piece.calls, strict=True)]
            self._called[index] += len(piece.calls)
        return {"index": index, "delta": delta, **self._rest(piece)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        logprobs = chat_logprobs(piece, self.model.room.tokenizer, self.wanted)
        return {"logprobs": logprobs, "finish_reason": piece.finish, **extension(piece, self.wanted)}


class TokenLayout(AnswerFormat):
    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        self.tokens = sum(len(piece.tokens) for piece in pieces)
        choices = [
            {
                "index": index,
                "finish_reason": piece.finish,
                **extension(piece, self.wanted),
                "logprobs": chat_logprobs(piece, self.model.room.tokenizer, self.wanted),
            }
            for index, piece in enumerate(pieces)
        ]
        return {"request_id": self.id, "choices": choices, **self.prompt(0), "usage": self.usage()}
