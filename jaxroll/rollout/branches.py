"""The conversations of a member whose program calls the model itself, recorded as segments.

Token truth: a call that extends a recorded conversation appends to its tokens; only the new messages are rendered. So
sampled tokens stay as they were sampled, also where the chat template would rewrite earlier answers. Any other call
begins another conversation. If it shares recorded answers with an earlier one, it starts with the tokens of those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from jaxroll.errors import DataError
from jaxroll.protocols import Completion, GenerationKey, LLMProxy, SamplingParams, Tokenizer
from jaxroll.records import Finished, Message
from jaxroll.rollout import episode
from jaxroll.rollout.episode import Bounds, Transcript

MAX_CALLS = 256  # of one member; with its tools a call is two or three segments
ENDED = "the member has ended: it takes no more calls"
_SALT = 1 << 16  # between the random keys of two conversations; attempts of a member take the numbers below


class NoRoom(DataError):
    """The conversation has no room for another answer, or the member for another call."""


@dataclass
class _Conversation:
    """Messages and their tokens; `ends` has (messages, segments) after every answer, which later calls may extend."""

    number: int
    tools: list[Any]
    messages: list[Message] = field(default_factory=list)
    transcript: Transcript = field(default_factory=Transcript)
    ends: list[tuple[int, int]] = field(default_factory=list)
    busy: bool = False
    first: int = 0  # tokens of its first prompt


@dataclass(frozen=True)
class Call:
    """One answer: its prompt, the completion, its sampling parameters, and the number of its conversation."""

    prompt: list[int]
    completion: Completion
    params: SamplingParams
    conversation: int


class Branches:
    """Records the calls of one member, which may run concurrently, on one event loop.

    `transcript` counts the sampled tokens of all calls while they run.
    """

    def __init__(
        self, proxy: LLMProxy, key: GenerationKey, tokenizer: Tokenizer, sampling: SamplingParams, bounds: Bounds,
        transcript: Transcript | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.sampling, self._bounds = tokenizer, episode.with_stop(sampling, tokenizer), bounds
        self._proxy, self._key, self._counted = proxy, key, transcript or Transcript()
        self._conversations: list[_Conversation] = []
        self._calls: set[asyncio.Task[Completion]] = set()
        self.begun = 0
        self.cut = self.out_of_room = self.closed = False
        self.answer, self.answer_tokens = "", 0
        self.failure: BaseException | None = None  # of the engine, which the program may hide

    async def chat(self, messages: tuple[Message, ...], tools: list[Any], params: SamplingParams) -> Call:
        """The answer to `messages`. NoRoom, or what the tokenizer and the engine raise."""
        conversation, shared = self._extended(messages, tools)
        new = tuple(messages[shared:])
        if not new:
            raise DataError("messages: the last one is an answer of the model; a new message must follow")
        with _busy(conversation):
            ids = self._ended(conversation) + self.tokenizer.render(new, first=not shared, tools=tools)
            call = await self._answered(conversation, ids, params)
            conversation.messages = list(messages)
            return call

    async def tokens(self, prompt: list[int], params: SamplingParams) -> Call:
        """The answer to a prompt of token ids, which extends the longest recorded conversation that it begins with."""
        known = [(one.transcript.length, one) for one in self._conversations if not one.busy and one.ends]
        found = [one for length, one in known if prompt[:length] == one.transcript.context().tolist()]
        conversation = max(found, key=lambda one: one.transcript.length, default=None) or self._begun([])
        rest = prompt[conversation.transcript.length :]
        if not rest:
            raise DataError("token_ids: nothing follows the last answer")
        with _busy(conversation):
            call = await self._answered(conversation, rest, params)
            conversation.messages = []
            return call

    def heard(self, call: Call, answer: Message) -> None:
        """Record the text of the answer of `call`, by which a later call recognises it."""
        for conversation in self._conversations:
            if conversation.number == call.conversation:
                conversation.messages.append(answer)
                conversation.ends[-1] = (len(conversation.messages), conversation.ends[-1][1])
        self.answer, self.answer_tokens = answer.content, len(call.completion.tokens)

    @property
    def calls(self) -> int:
        """Number of answers."""
        return sum(len(one.ends) for one in self._conversations)

    async def close(self) -> None:
        """Abort the calls that run; later ones are refused."""
        self.closed = True
        for call in (calls := list(self._calls)):
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def finished(self, finish: str, reward: float, parts: dict[str, float], extracted: str | None = None) -> Finished:
        """The outcome with the segments of all conversations; DataError if the model was never called."""
        whole = Transcript()
        for conversation in self._conversations:
            segments = list(conversation.transcript.segments)
            if not conversation.ends:
                continue
            segments[0] = msgspec.structs.replace(segments[0], branch=bool(whole.segments))
            whole.segments += segments
            whole.add_versions(conversation.transcript.versions)
        if not whole.segments:
            raise DataError("the agent ended without an answer of the model: there is nothing to train on")
        return whole.finished(finish, reward, parts, extracted)

    def _extended(self, messages: Sequence[Message], tools: list[Any]) -> tuple[_Conversation, int]:
        """The conversation for a call, and how many of the messages it has already."""
        best: tuple[int, int, _Conversation] | None = None
        for one in self._conversations:
            for known, segments in one.ends if one.tools == tools else ():
                shares = known <= len(messages) and one.messages[:known] == list(messages[:known])
                if shares and known and (best is None or known > best[0]):
                    best = (known, segments, one)
        if best is None:
            return self._begun(tools), 0
        known, segments, one = best
        if segments == len(one.transcript.segments) and not one.busy:
            return one, known
        fork = self._begun(tools)
        tokens = np.concatenate([segment.tokens for segment in one.transcript.segments[:segments]])
        fork.transcript.show(tokens.tolist())
        return fork, known

    def _begun(self, tools: list[Any]) -> _Conversation:
        self.begun += 1
        return _Conversation(self.begun - 1, tools)

    def _ended(self, conversation: _Conversation) -> list[int]:
        """The end of turn, if the last answer was cut before the model sampled it."""
        segments, stops = conversation.transcript.segments, self.sampling.stop_tokens
        return [self.tokenizer.eos_id] if segments and int(segments[-1].tokens[-1]) not in stops else []

    async def _answered(self, conversation: _Conversation, ids: list[int], params: SamplingParams) -> Call:
        if self.closed:
            raise DataError(ENDED)
        transcript = conversation.transcript
        prompt = np.concatenate([*(s.tokens for s in transcript.segments), np.asarray(ids, np.int32)])
        conversation.first = conversation.first or len(prompt)
        room = episode.room(self._bounds.most(conversation.first), len(prompt), params)
        if room is None or self.calls + len(self._calls) >= MAX_CALLS:
            self.out_of_room = True
            what = f"the member made {MAX_CALLS} calls" if room else f"the conversation has {len(prompt)} tokens"
            raise NoRoom(f"{what}: there is no room for another answer")
        key = msgspec.structs.replace(self._key, salt=self._key.salt + conversation.number * _SALT)
        task = asyncio.ensure_future(
            episode.generated(self._proxy, prompt, key, room, self._bounds.generation_s, keep=True)
        )
        self._calls.add(task)
        try:
            completion = await task
        except asyncio.CancelledError:
            if self.closed:
                raise DataError(ENDED) from None
            raise
        except Exception as error:
            self.failure = error
            raise
        finally:
            task.cancel()
            self._calls.discard(task)
        transcript.show(ids)
        transcript.add(completion)
        self._counted.add_versions(completion.versions)
        if conversation not in self._conversations:
            self._conversations.append(conversation)
        conversation.ends.append((0, len(transcript.segments)))
        self.cut = self.cut or completion.finish == "length"
        return Call(prompt.tolist(), completion, room, conversation.number)


@contextmanager
def _busy(conversation: _Conversation) -> Iterator[None]:
    """While a call is under way, another call with the same messages begins a conversation of its own."""
    conversation.busy = True
    try:
        yield
    finally:
        conversation.busy = False
