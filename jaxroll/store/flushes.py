"""Flushes: the tokens of members that go on, sent to the store so that another sampler can continue them.

A flush only saves work: errors end the stream of a member and nothing else. The store answers how many tokens it has;
after its restart these may be fewer than it had acknowledged, so a stream keeps all of its pieces until it ends.

A sampler that ends loses the tokens that the store does not have. These are at most `flush_tokens` of a member: its
stream sends pieces of half as many, and its engine waits (`Stream.may_sample`) where the store has not answered in
time. It does not wait for a store that has not answered for `HOLD_S`, or that takes no more tokens of the member.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from jaxroll import wire
from jaxroll.errors import JaxRollError
from jaxroll.protocols import Completion, Supports
from jaxroll.records import Partial, TurnEnd, prompt_digest, versions_after
from jaxroll.store import messages as msg
from jaxroll.store.messages import MAX_PUTS, Key, PutCall

MAX_CALL_BYTES = 2**20  # of pieces in one call, unless a single one has more
HOLD_S = 2.0  # an engine waits this long at most for an answer of the store
UNBOUNDED = 2**31


def answers(pieces: Sequence[Partial]) -> tuple[Partial, ...]:
    """One partial for each answer in `pieces`, which follow one another from token 0 on; () if they do not.

    All but the last answer are complete.
    """
    tokens, found, answer = 0, list[Partial](), list[Partial]()
    for piece in pieces:
        if piece.start != tokens or (answer and piece.prompt != answer[0].prompt):
            return ()
        tokens += len(piece.tokens)
        answer.append(piece)
        if piece.turn is not None:
            found.append(_joined(answer))
            answer = []
    return (*found, *([_joined(answer)] if answer else []))


def _joined(pieces: Sequence[Partial]) -> Partial:
    ids = np.concatenate([piece.tokens for piece in pieces])
    support = Supports.joined([Supports.decoded(piece.support, piece.tokens) for piece in pieces])
    return msgspec.structs.replace(
        pieces[-1],
        start=pieces[0].start,
        tokens=ids,
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        versions=tuple(run for piece in pieces for run in piece.versions),
        support=support.encoded(ids),
    )


class Stream:
    """The conversation of one member on its way to the store (`rollout.episode.AnswerStream`).

    `before` are the answers that the store has, in order. At most `most` tokens are sampled that it does not have.
    """

    def __init__(self, flushes: Flushes, key: Key, most: int, before: Sequence[Partial]) -> None:
        self.key, self._most, self.piece_tokens = key, most, -(-most // 2)
        self._flushes, self._before, self._prompt = flushes, tuple(before), ""
        self._answer = 0  # sampled tokens before the current answer
        self._end = self.sent = 0  # sampled tokens so far; those of them that the store has
        self._pieces: list[Partial] = []

    def turns(self, prompt: np.ndarray) -> tuple[Partial, ...]:
        """The completed turns after `prompt`, the first one, that the store has; the stream continues after them.

        () if the stored answers do not belong to this prompt or to one another, and at a second call: the member then
        starts again.
        """
        found, context = list[Partial](), prompt
        for one in self._before:
            if one.prompt != prompt_digest(context):
                self._before, self._end, self.sent = (), 0, 0
                return ()
            if one.turn is not None:
                found.append(one)
                context = np.concatenate([context, one.tokens, one.turn.shown])
        self._before = self._before[len(found) :]
        self._end = self.sent = sum(len(one.tokens) for one in found)
        return tuple(found)

    def begin(self, prompt: np.ndarray) -> Completion | None:
        """The first tokens of the next answer, if the store has some for this prompt."""
        known, self._before = self._before[:1], ()
        self._prompt, self._answer = prompt_digest(prompt), self._end
        if not known or known[0].prompt != self._prompt or known[0].turn is not None:
            return None
        self._end = self.sent = self._end + len(known[0].tokens)
        return Completion(known[0].tokens, known[0].logprobs, known[0].versions, "", known[0].support)

    def add(self, piece: Completion) -> None:
        """Send these tokens as soon as the flush under way has ended."""
        self._add(piece, None)

    def end_turn(self, answer: Completion, shown: Sequence[int], state: bytes) -> None:
        """Send the rest of the current answer, the tokens shown after it, and the environment's state."""
        rest = _after(answer, self._end - self._answer)
        if len(rest.tokens):
            self._add(rest, TurnEnd(np.asarray(shown, np.int32), state))
        else:  # no piece could carry the turn
            self._flushes.end(self.key)

    def _add(self, piece: Completion, turn: TurnEnd | None) -> None:
        tokens, start = piece.tokens, self._end
        self._pieces.append(
            Partial(*self.key, start, self._prompt, tokens, piece.logprobs, piece.versions, piece.support, turn)
        )
        self._end += len(tokens)
        self._flushes.due(self)

    def may_sample(self, sampled: int) -> int:
        """The number of tokens that may follow the first `sampled` ones of the current answer now; from any thread."""
        if not self._flushes.takes(self):
            return UNBOUNDED
        return max(0, self._most - (self._answer + sampled - self.sent))

    def unended(self) -> int:
        """Sampled tokens of the current answer that have come."""
        return self._end - self._answer

    def unsent(self) -> list[Partial]:
        """The pieces that the store does not have."""
        return [piece for piece in self._pieces if piece.start >= self.sent]

    def answered(self, piece: Partial, known: int) -> bool:
        """Take the store's answer to `piece`; return False if it takes no more of this member."""
        lost_with_store = known < piece.start and any(one.start == known for one in self._pieces)
        self.sent = known
        return known == piece.start + len(piece.tokens) or lost_with_store


def _after(answer: Completion, tokens: int) -> Completion:
    """The completion without its first `tokens` tokens."""
    rest = answer.tokens[tokens:]
    support = Supports.decoded(answer.support, answer.tokens).part(tokens, len(answer.tokens)).encoded(rest)
    return Completion(rest, answer.logprobs[tokens:], versions_after(answer.versions, tokens), "", support)


class Flushes:
    """The streams of the members in flight, sent by `call`, one call at a time. Belongs to one event loop."""

    def __init__(self, call: Callable[[PutCall], Awaitable[msg.FlushReply]]) -> None:
        self._call = call
        self._open: dict[Key, Stream] = {}
        self._due: dict[Key, Stream] = {}
        self._sending: asyncio.Task[None] | None = None
        self._asked_s: float | None = None  # when the call under way began
        self._clock: Callable[[], float] = time.monotonic
        self.on_answer: Callable[[], None] = lambda: None  # called after each answer of the store

    def begin(self, key: Key, most: int, before: Sequence[Partial] = ()) -> Stream:
        """A stream for the member, until `end`."""
        stream = self._open[key] = Stream(self, key, most, before)
        return stream

    def takes(self, stream: Stream) -> bool:
        """True if the stream goes on and the store is not late with an answer; from any thread."""
        asked_s = self._asked_s
        return self._open.get(stream.key) is stream and (asked_s is None or self._clock() - asked_s < HOLD_S)

    def end(self, key: Key) -> None:
        """Send no more tokens of the member."""
        self._open.pop(key, None)
        self._due.pop(key, None)

    def due(self, stream: Stream) -> None:
        """Send what is unsent of the stream."""
        if self._open.get(stream.key) is not stream:
            return
        self._due[stream.key] = stream
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_all())

    async def idle(self) -> None:
        """Wait until nothing is due."""
        if self._sending is not None:
            await asyncio.wait([self._sending])

    async def close(self) -> None:
        """Cancel the call under way."""
        self._open.clear()
        self._due.clear()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    async def _send_all(self) -> None:
        while self._due:
            batch: list[tuple[Stream, Partial]] = []
            bodies: list[bytes] = []
            while self._due and len(bodies) < MAX_PUTS and sum(map(len, bodies)) < MAX_CALL_BYTES:
                stream = self._due.pop(next(iter(self._due)))
                pieces = stream.unsent()[:MAX_PUTS]
                batch += [(stream, piece) for piece in pieces]
                bodies += [wire.encode(piece) for piece in pieces]
            await self._send(batch[:MAX_PUTS], bodies[:MAX_PUTS])

    async def _send(self, batch: list[tuple[Stream, Partial]], bodies: list[bytes]) -> None:
        self._clock = asyncio.get_running_loop().time
        self._asked_s = self._clock()
        try:
            known = (await self._call(PutCall(tuple(bodies)))).tokens
        except (JaxRollError, msgspec.MsgspecError):
            known = ()
        finally:
            self._asked_s = None
        if len(known) != len(batch):
            known = (msg.LOST,) * len(batch)
        ended = {
            stream.key
            for (stream, piece), tokens in zip(batch, known, strict=True)
            if not stream.answered(piece, tokens)
        }
        for key in {stream.key: stream for stream, _ in batch}:
            if key in ended:
                self.end(key)
            elif (stream := self._open.get(key)) is not None and stream.unsent():
                self.due(stream)
        self.on_answer()
