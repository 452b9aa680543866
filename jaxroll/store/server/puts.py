"""Put: one pipeline from the bytes of a call to the answer on disk, in four stages.

parse        read the key of each member, later decode and check it (large members in a thread)
deduplicate  answer repeated and fenced puts from the state and the log, without decoding them
decide       core.puts decides, the machine applies the events, the keeper passes them to the log with the payload
commit       answer for all members of the call once the log has them on disk
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated

import msgspec
import numpy as np

from jaxroll import wire
from jaxroll.config.rules import MAX_MEMBER_MB
from jaxroll.errors import DataError, NotReady, StaleClient, StoreRefusal
from jaxroll.protocols import Supports
from jaxroll.records import MAX_SEGMENTS, Count, Finished, Member, Partial, Segment, ages
from jaxroll.rpc.protocol import refusal_of
from jaxroll.rpc.server import Caller
from jaxroll.store import messages as msg
from jaxroll.store.core import puts
from jaxroll.store.core.events import Flush, PutMember, Recorded
from jaxroll.store.core.state import slot_of
from jaxroll.store.log import commit_log, schema
from jaxroll.store.log.schema import Audit
from jaxroll.store.server.keeper import Keeper

_TURN_S = 0.005  # a put yields to other calls after this time
_ON_LOOP_BYTES, _ON_LOOP_SEGMENTS = 2**18, 64  # members up to this size are decoded on the loop, mostly in 1 ms
FAILURE_KINDS = ("INFRA", "DATA")
_ERROR_CHARS = 2000
_KINDS = (np.dtype("int32"), np.dtype("uint8"), np.dtype("float32"))
_LARGEST_ID = 2**53  # ids below this are exact in SQLite and in every JSON reader


class PutPipeline:
    """RPC method Put. Use it from the store's event loop; `close` it at the end."""

    def __init__(self, keeper: Keeper, audit: Audit, vocab_size: Callable[[], int]) -> None:
        """`vocab_size` returns the number of token ids of the model, 0 if unknown; it is called for each member."""
        self._keeper, self._audit, self._vocab_size = keeper, audit, vocab_size
        self._large_puts = ThreadPoolExecutor(1, "large-puts")  # one thread, which shares the GIL with the loop

    async def __call__(self, caller: Caller, body: bytes) -> msg.PutReply:
        """Decide member by member, then answer for all of them once all are on disk.

        A call may need seconds of decoding, so it yields to other calls between members.
        """
        answers, now_s = [], asyncio.get_running_loop().time
        turn_ends = now_s() + _TURN_S
        for one in wire.decode(body, msg.PutBodies).members:
            answers.append(await self._answer(caller, one))
            if now_s() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = now_s() + _TURN_S
        await self._keeper.log.committed()
        return msg.PutReply(tuple(answers))

    async def _answer(self, caller: Caller, body: memoryview) -> msg.PutAnswer:
        try:
            key = key_of(body)
            reply = puts.by_key(self._keeper.state, key.group, key.member, key.attempt)
            if reply is None:  # otherwise the answer needs no decoding
                was_alive = self._is_alive(key.group)
                recorded = None if was_alive else await self._keeper.log.recorded(key.group, key.member)
                request = await self._parse(key, body, recorded)
                if was_alive and not self._is_alive(key.group):  # its group ended while the thread decoded it
                    request = replace(request, recorded=await self._keeper.log.recorded(key.group, key.member))
                reply = self._decide(caller, request, commit_log.payload(key.group, key.member, body))
        except StoreRefusal as refusal:  # keep no reference to it: its traceback holds the decoded member
            return msg.PutAnswer("", refusal_of(refusal))
        return msg.PutAnswer("", refusal_of(reply)) if isinstance(reply, StoreRefusal) else msg.PutAnswer(reply)

    def _is_alive(self, group: int) -> bool:
        return self._keeper.state.find(group) is not None

    async def _parse(self, key: Key, body: memoryview, recorded: Recorded | None) -> PutMember:
        """Decode a member; large ones in a thread, because one with thousands of segments would block all calls."""
        if len(body) <= _ON_LOOP_BYTES and len(key.outcome.segments) <= _ON_LOOP_SEGMENTS:
            return self._read(body, recorded)
        return await asyncio.get_running_loop().run_in_executor(self._large_puts, self._read, body, recorded)

    def _read(self, body: memoryview, recorded: Recorded | None) -> PutMember:
        settings = self._keeper.settings
        return put_request(
            body,
            recorded,
            row_tokens=settings.row_tokens,
            prompt_tokens=settings.prompt_tokens,
            vocab_size=self._vocab_size(),
            support_tokens=settings.support_tokens,
        )

    def _decide(self, caller: Caller, request: PutMember, payload: schema.Statement) -> str | StoreRefusal:
        """Decide a put; if its failure ends a group, add an audit row."""
        if request.failure is None:
            return self._keeper.decide(request, payload)
        alive = self._keeper.state.find(request.group) is not None
        reply = self._keeper.decide(request)
        if alive and self._keeper.state.find(request.group) is None:
            kind, error = request.failure
            self._audit.record(caller, "dead-letter", f"group {request.group}: {kind}: {error}", reply)
        return reply

    async def flush(self, caller: Caller, body: bytes) -> msg.FlushReply:
        """RPC method Flush: take tokens of members that go on. It does not wait for the disk (store_contract.md)."""
        known = []
        for one in wire.decode(body, msg.PutBodies).members:
            settings = self._keeper.settings
            partial = flush_request(one, self._vocab_size(), settings.support_tokens)
            statement = schema.partial(partial, one)
            reply = self._keeper.decide(partial, statement)
            if isinstance(reply, StoreRefusal):
                raise reply
            known.append(reply)
        return msg.FlushReply(tuple(known))

    async def partial(self, caller: Caller, body: bytes) -> msg.PartialReply:
        """RPC method Partial: the flushed tokens of a member that the caller leases."""
        group, member, attempt = wire.decode(body, msg.PartialCall).member
        slot = slot_of(self._keeper.state.open.get(group), member)
        if slot is None or slot.session != caller.session or slot.attempt != attempt:
            raise StaleClient(f"member {group}.{member}: the caller does not lease attempt {attempt}")
        return msg.PartialReply(tuple(await self._keeper.log.partials(group, member)))

    def close(self) -> None:
        """Stop the thread that decodes large members."""
        self._large_puts.shutdown(wait=False, cancel_futures=True)


# --- parse: the key without the arrays, then the whole member with its checks


class Outline(msgspec.Struct, frozen=True):
    """Undecoded segments of a member, of which only the number is used; a failed member has none."""

    segments: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_SEGMENTS)] = ()


class Key(msgspec.Struct, frozen=True):
    """Key of a `records.Member`, read without decoding the arrays."""

    group: Count
    member: Count
    attempt: Count
    outcome: Outline


def key_of(body: bytes | memoryview) -> Key:
    """Read the key from the bytes of a member; StoreRefusal unless its numbers are in the range of the log."""
    if len(body) > MAX_MEMBER_MB * 2**20:
        raise StoreRefusal(f"put: a member of {len(body)} bytes; at most {MAX_MEMBER_MB} MB are accepted")
    key = wire.decode(body, Key)
    if not all(0 <= number < _LARGEST_ID for number in (key.group, key.member, key.attempt)):
        raise StoreRefusal(f"put {(key.group, key.member, key.attempt)}: not a member of any group")
    return key


def put_request(
    body: bytes | memoryview,
    recorded: Recorded | None = None,
    *,
    row_tokens: int = 0,
    prompt_tokens: int = 0,
    vocab_size: int = 0,
    support_tokens: int = 0,
) -> PutMember:
    """Decode the bytes of a member into a request. StoreRefusal if it is inconsistent; msgspec's errors if malformed.

    `row_tokens` (0: no limit) and `prompt_tokens` are the learner's limits; it could not train a longer member.
    `vocab_size` is the model's; 0: unknown. With `support_tokens` every sampled token needs a support of 1 to so many
    ids, otherwise it must have none.
    """
    member = wire.decode(body, Member)
    outcome = member.outcome
    key, digest = (member.group, member.member, member.attempt), wire.digest(body)
    if isinstance(outcome, Finished):
        _check(outcome, key, vocab_size)
        for index, segment in enumerate(outcome.segments):
            _check_support(segment, f"put {key}: segment {index}", vocab_size, support_tokens)
        _check_length(outcome, key, row_tokens, prompt_tokens)
        return PutMember(*key, digest, len(body), outcome.versions, None, recorded, outcome.reward)
    if outcome.kind not in FAILURE_KINDS:
        raise StoreRefusal(f"put {key}: a failure is {' or '.join(FAILURE_KINDS)}, not {outcome.kind!r}")
    return PutMember(*key, digest, len(body), (), (outcome.kind, outcome.error[:_ERROR_CHARS]), recorded)


def _shown(tokens: np.ndarray) -> Segment:
    return Segment(tokens, np.zeros(tokens.shape, np.uint8), np.zeros(tokens.shape, np.float32))


_SHOWN = _shown(np.zeros(1, np.int32))


def flush_request(body: bytes | memoryview, vocab_size: int = 0, support_tokens: int = 0) -> Flush:
    """Decode the bytes of a `records.Partial` into a request; raises as `put_request` does."""
    if len(body) > MAX_MEMBER_MB * 2**20:
        raise StoreRefusal(f"flush: {len(body)} bytes of one member; at most {MAX_MEMBER_MB} MB are accepted")
    part = wire.decode(body, Partial)
    key = (part.group, part.member, part.attempt)
    segment = Segment(part.tokens, np.ones(part.tokens.shape, np.uint8), part.logprobs, support=part.support)
    shown = () if part.turn is None else (_shown(part.turn.shown),)
    _check(Finished((_SHOWN, segment, *shown), "", 0.0, {}, part.versions), key, vocab_size)
    _check_support(segment, f"flush {key}", vocab_size, support_tokens)
    return Flush(*key, part.start, part.tokens.size, part.versions, len(body))


def _check(outcome: Finished, key: tuple[int, int, int], vocab_size: int) -> None:
    """Raise StoreRefusal unless the arrays match one another and the versions cover the sampled tokens."""
    sampled = shown = 0
    for i, segment in enumerate(outcome.segments):
        kinds = (segment.tokens.dtype, segment.loss_mask.dtype, segment.logprobs.dtype)
        if kinds != _KINDS:
            named, wanted = (" ".join(map(str, of)) for of in (kinds, _KINDS))
            raise StoreRefusal(f"put {key}: segment {i} is {named}; tokens, loss mask, log-probs are {wanted}")
        shapes = {segment.tokens.shape, segment.loss_mask.shape, segment.logprobs.shape}
        if len(shapes) != 1 or segment.tokens.ndim != 1:
            raise StoreRefusal(f"put {key}: segment {i} has shapes {sorted(shapes)}; all must be [T]")
        if segment.tokens.size and segment.tokens.min() < 0:
            raise StoreRefusal(f"put {key}: segment {i} has the token id {segment.tokens.min()}; ids are not negative")
        if segment.tokens.size and 0 < vocab_size <= segment.tokens.max():
            named = f"segment {i} has the token id {segment.tokens.max()}"
            raise StoreRefusal(f"put {key}: {named}; the model's ids are 0 to {vocab_size - 1}")
        ones = np.count_nonzero(segment.loss_mask)
        if np.count_nonzero(segment.loss_mask == 1) != ones:
            raise StoreRefusal(f"put {key}: segment {i} has a loss mask with values other than 0 and 1")
        if segment.sampled.size:
            raise StoreRefusal(f"put {key}: segment {i} has the field `sampled`, which only claims have")
        if not np.isfinite(segment.logprobs).all():
            raise StoreRefusal(f"put {key}: segment {i} has a log-prob that is not a finite number")
        if (sampled + shown == 0 or segment.branch) and ones and segment.loss_mask[0]:
            raise StoreRefusal(f"put {key}: it starts with a sampled token: a prompt must come first")
        sampled, shown = sampled + ones, shown + segment.tokens.size - ones
    _check_experts(outcome.experts, int(sampled + shown), key)
    covered = sum(run.count for run in outcome.versions)
    if covered != sampled:
        raise StoreRefusal(f"put {key}: versions cover {covered} tokens, {sampled} were sampled")
    if not np.isfinite(outcome.reward):
        raise StoreRefusal(f"put {key}: reward {outcome.reward} is not a finite number")


def _check_support(segment: Segment, where: str, vocab_size: int, most: int) -> None:
    """Raise StoreRefusal unless the supports of the sampled tokens are those of a run with these limits."""
    given = segment.support
    if given.dtype != np.uint8 or given.ndim != 1:
        raise StoreRefusal(f"{where} has a support of {given.dtype} {given.shape}; it must be uint8 [N]")
    if given.size and not most:
        raise StoreRefusal(f"{where} has a support, but this run does not truncate its samples (sampling.top_p)")
    if not most:
        return
    try:
        found = Supports.decoded(given, segment.tokens[segment.sampled_mask])
    except DataError as error:
        raise StoreRefusal(f"{where}: {error}") from error
    if len(found.sizes) and not 1 <= found.sizes.min() <= found.sizes.max() <= most:
        sizes = f"{found.sizes.min()} to {found.sizes.max()}"
        raise StoreRefusal(f"{where} has supports of {sizes} ids; in this run they have 1 to {most}")
    if 0 < vocab_size <= found.ids.max(initial=0):
        raise StoreRefusal(f"{where} has a support with the id {found.ids.max()}; ids are 0 to {vocab_size - 1}")


def _check_experts(experts: np.ndarray, tokens: int, key: tuple[int, int, int]) -> None:
    if experts.dtype not in (np.uint8, np.uint16) or experts.ndim != 2 or len(experts) > tokens:
        found = f"{experts.dtype} {experts.shape}"
        raise StoreRefusal(f"put {key}: experts are {found}; they must be uint8 or uint16, [up to {tokens}, X]")


def _check_length(outcome: Finished, key: tuple[int, int, int], row_tokens: int, prompt_tokens: int) -> None:
    """Raise StoreRefusal if a conversation does not fit into the learner's row; see `rollout.episode.Bounds`."""
    conversations: list[list[Segment]] = [[]]
    for segment in outcome.segments:
        conversations += [[]] if segment.branch else []
        conversations[-1].append(segment)
    for conversation in conversations:
        _check_room(conversation, key, row_tokens, prompt_tokens)


def _check_room(segments: Sequence[Segment], key: tuple[int, int, int], row_tokens: int, prompt_tokens: int) -> None:
    total, first = sum(segment.tokens.size for segment in segments), 0
    for segment in segments:
        if segment.loss_mask.any():
            first += int(segment.loss_mask.argmax())
            break
        first += segment.tokens.size
    apart = first - 1 if 0 < first <= prompt_tokens + 1 else 0
    if 0 < row_tokens < total - apart:
        raise StoreRefusal(
            f"put {key}: {total} tokens, {apart} of them in a prompt that is kept apart, do not fit into "
            f"learner.row_tokens = {row_tokens}: the learner could never train it"
        )


# --- claims: their pages, and masking of stale tokens in them


async def page(
    keeper: Keeper, call: msg.ClaimCall, groups: Sequence[int], most_bytes: int
) -> tuple[tuple[msg.ClaimPart, ...], int | None]:
    """The members of `groups` that `call` asks for, up to `most_bytes` (at least one), and the first of the next page.

    NotReady if a group has ended, which can happen before its batch is claimed.
    """
    masks, limiter = keeper.settings.on_stale == "mask", keeper.settings.limiter
    parts: list[msg.ClaimPart] = []
    position, size, next_start = 0, 0, None
    for gid in groups:
        if (group := keeper.state.find(gid)) is None:
            raise NotReady(f"group {gid} has ended")
        numbers = [m for m, _ in group.done()]
        if call.stop is not None and position >= call.stop:
            break
        if position + len(numbers) <= call.start:
            position += len(numbers)
            continue
        bodies = await keeper.log.payloads(gid)
        if keeper.state.find(gid) is None:  # it ended while they were read
            raise NotReady(f"group {gid} has ended")
        taken: list[bytes] = []
        for number in numbers:
            data = bodies[number]
            if call.start <= position and (call.stop is None or position < call.stop) and next_start is None:
                if size and size + len(data) > most_bytes:
                    next_start = position
                else:
                    taken.append(masked(data, call.step, limiter.max_age) if masks else data)
                    size += len(data)
            position += 1
        if taken:
            parts.append(msg.ClaimPart(gid, group.task, tuple(taken)))
        if next_start is not None:
            break
    return tuple(parts), next_start


def masked(body: bytes, step: int, max_age: int) -> bytes:
    """Return `body` with loss mask 0 for tokens older than `max_age` at `step`; unchanged if there are none.

    A changed member gets the field `sampled`: with loss mask 0, stale tokens would look like prompt tokens.
    """
    member = wire.decode(body, Member)
    outcome = member.outcome
    if not isinstance(outcome, Finished):
        return body
    stale = ages(outcome.versions, step) > max_age
    if not stale.any():
        return body
    segments, start = [], 0
    for segment in outcome.segments:
        mask = segment.loss_mask.copy()
        sampled = np.flatnonzero(mask)
        mask[sampled[stale[start : start + sampled.size]]] = 0
        start += sampled.size
        segments.append(msgspec.structs.replace(segment, loss_mask=mask, sampled=segment.loss_mask))
    kept = msgspec.structs.replace(outcome, segments=tuple(segments))
    return wire.encode(msgspec.structs.replace(member, outcome=kept))
