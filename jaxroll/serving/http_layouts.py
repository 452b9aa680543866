"""Layouts of the HTTP front end's answers: OpenAI's completions and chat completions, and answers by token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from jaxroll.clock import unix_s
from jaxroll.engine.stats import EngineStats
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, Tokenizer
from jaxroll.records import Version, VersionRun
from jaxroll.serving.engine_thread import PauseMode
from jaxroll.serving.http_answers import Piece
from jaxroll.serving.http_requests import Room, Wanted

MAX_OPEN = 512  # answers that are computed or wait for a slot


class Generator(Protocol):
    """The engine's proxy (`EngineProxy`)."""

    paused: PauseMode | None

    async def generate(
        self, prompt: Any, key: GenerationKey, params: SamplingParams, *, keep: bool = False, allowed: Any = None,
        on_tokens: Callable[[Completion], None] | None = None,
    ) -> Completion: ...  # fmt: skip

    async def pause(self, mode: PauseMode) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True)
class Served:
    """The model that a front end serves: its name, its engine, and their state."""

    name: str
    proxy: Generator
    room: Room
    version: Callable[[], Version | None]
    stats: Callable[[], EngineStats]
    latencies: Callable[[], Mapping[str, float | None]] = dict
    max_open: int = MAX_OPEN


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


class Layout:
    """The JSON objects of a request's"""

    object = ""

    def __init__(self, model: Served, wanted: Wanted, id: str) -> None:
        self.model, self.wanted, self.id, self.created = model, wanted, id, int(unix_s())
        self.tokens, self.texts = 0, Counter[int]()

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """The answer to a request that does not stream: one piece for each choice."""
        self.tokens = sum(len(piece.tokens) for piece in pieces)
        choices = [self.choice(index, piece) for index, piece in enumerate(pieces)]
        return self.head(self.object) | self.prompt(0) | {"choices": choices, "usage": self.usage()}

    async def events(self, pieces: AsyncGenerator[tuple[int, Piece], None]) -> AsyncGenerator[bytes, None]:
        """The events of a stream, without the last one."""
        begun: set[int] = set()
        async with aclosing(pieces):
            async for index, piece in pieces:
                first = index not in begun
                begun.add(index)
                self.tokens += len(piece.tokens)
                for choice in self.chunk(index, piece, first):
                    prompt = self.prompt(index) if first else {}
                    yield event(self.head(self.chunk_object) | prompt | {"choices": [choice]})
                self.texts[index] += len(piece.text)
        if self.wanted.usage:
            yield event(self.head(self.chunk_object) | {"choices": [], "usage": self.usage()})

    @property
    def chunk_object(self) -> str:
        return self.object

    def head(self, kind: str) -> dict[str, Any]:
        version = self.model.version()
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model.name,
                "system_fingerprint": f"weights {version}"}  # fmt: skip

    def prompt(self, index: int) -> dict[str, Any]:
        ids = self.wanted.prompts[index // self.wanted.count]
        return {"prompt_token_ids": ids} if self.wanted.token_ids else {}

    def usage(self) -> dict[str, int]:
        prompts = sum(map(len, self.wanted.prompts))
        return {"prompt_tokens": prompts, "completion_tokens": self.tokens, "total_tokens": prompts + self.tokens}

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def chunk(self, index: int, piece: Piece, first: bool) -> list[dict[str, Any]]:
        return [self.choice(index, piece)]


class TextLayout(Layout):
    object = "text_completion"

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        tokenizer = self.model.room.tokenizer
        logprobs = text_logprobs(piece, self.texts[index], tokenizer, self.wanted)
        shown = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}
        return shown | self.prompt(index) | extension(piece, self.wanted)


class ChatLayout(Layout):
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

    def chunk(self, index: int, piece: Piece, first: bool) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if piece.text or first:
            delta["content"] = piece.text
        if piece.calls:
            numbers = range(self._called[index], self._called[index] + len(piece.calls))
            delta["tool_calls"] = [{"index": n, **call.shown()} for n, call in zip(numbers, piece.calls, strict=True)]
            self._called[index] += len(piece.calls)
        return [{"index": index, "delta": delta, **self._rest(piece)}]

    def _rest(self, piece: Piece) -> dict[str, Any]:
        logprobs = chat_logprobs(piece, self.model.room.tokenizer, self.wanted)
        return {"logprobs": logprobs, "finish_reason": piece.finish, **extension(piece, self.wanted)}


class TokenLayout(Layout):
    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        self.tokens = sum(len(piece.tokens) for piece in pieces)
        choices = [
            {"index": index, "finish_reason": piece.finish, **extension(piece, self.wanted),
             "logprobs": chat_logprobs(piece, self.model.room.tokenizer, self.wanted)}
            for index, piece in enumerate(pieces)
        ]  # fmt: skip
        return {"request_id": self.id, "choices": choices, **self.prompt(0), "usage": self.usage()}
