"""Validation of members and metric rows that callers send, and masking of stale tokens in claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from jaxroll import wire
from jaxroll.config.rules import MAX_MEMBER_MB
from jaxroll.errors import StoreRefusal
from jaxroll.metrics import checked_row
from jaxroll.records import MAX_SEGMENTS, Count, Finished, Member, Segment, ages
from jaxroll.store.core.requests import PutMember, Recorded

FAILURE_KINDS = ("INFRA", "DATA")
_ERROR_CHARS = 2000
_KINDS = (np.dtype("int32"), np.dtype("uint8"), np.dtype("float32"))
_LARGEST_ID = 2**53  # ids below this are exact in SQLite and in every JSON reader


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
) -> PutMember:
    """Decode the bytes of a member into a request. StoreRefusal if it is inconsistent; msgspec's errors if malformed.

    `row_tokens` (0: no limit) and `prompt_tokens` are the learner's limits; it could not train a longer member.
    `vocab_size` is the model's; 0: unknown.
    """
    member = wire.decode(body, Member)
    outcome = member.outcome
    key, digest = (member.group, member.member, member.attempt), wire.digest(body)
    if isinstance(outcome, Finished):
        _check(outcome, key, vocab_size)
        _check_length(outcome, key, row_tokens, prompt_tokens)
        return PutMember(*key, digest, len(body), outcome.versions, None, recorded, outcome.reward)
    if outcome.kind not in FAILURE_KINDS:
        raise StoreRefusal(f"put {key}: a failure is {' or '.join(FAILURE_KINDS)}, not {outcome.kind!r}")
    return PutMember(*key, digest, len(body), (), (outcome.kind, outcome.error[:_ERROR_CHARS]), recorded)


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
        if sampled + shown == 0 and ones and segment.loss_mask[0]:
            raise StoreRefusal(f"put {key}: it starts with a sampled token: a prompt must come first")
        sampled, shown = sampled + ones, shown + segment.tokens.size - ones
    covered = sum(run.count for run in outcome.versions)
    if covered != sampled:
        raise StoreRefusal(f"put {key}: versions cover {covered} tokens, {sampled} were sampled")
    if not np.isfinite(outcome.reward):
        raise StoreRefusal(f"put {key}: reward {outcome.reward} is not a finite number")


def _check_length(outcome: Finished, key: tuple[int, int, int], row_tokens: int, prompt_tokens: int) -> None:
    """Raise StoreRefusal if the conversation does not fit into the learner's row; see `rollout.episode.Bounds`."""
    total, first = sum(segment.tokens.size for segment in outcome.segments), 0
    for segment in outcome.segments:
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
        segments.append(Segment(segment.tokens, mask, segment.logprobs, sampled=segment.loss_mask))
    kept = msgspec.structs.replace(outcome, segments=tuple(segments))
    return wire.encode(msgspec.structs.replace(member, outcome=kept))


# --- metric rows: each role may write only its own kinds

_ALL = frozenset({"span", "compile", "devices", "warm", "event"})
# Right of the caller → kinds that it may report. The store and the supervisor write theirs without a call.
KINDS: Mapping[str, frozenset[str]] = {
    "learner": _ALL | {"step"},
    "sampler": _ALL | {"stats", "members"},
    "observer": _ALL | {"eval"},
    "admin": _ALL | {"step", "stats", "members", "eval", "restart"},
}
KNOWN = frozenset().union(*KINDS.values()) | {"store"}
_ROLES: Mapping[str, frozenset[str]] = {  # right of the caller → roles that a row may name; admin: any
    "learner": frozenset({"learner"}),
    "sampler": frozenset({"sampler", "actor"}),
    "observer": frozenset({"evaluator", "observer", "report"}),
}


def rows_of(lines: Iterable[bytes], right: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The well-formed rows in `lines`, and the reasons why the others are left out.

    StoreRefusal (for all of them) if one is not a JSON object, or a caller with this right may not write it.
    """
    rows, left_out = [], []
    for place, line in enumerate(lines):
        row = _row(line, place, right)
        if checked_row(row) is not None:
            rows.append(row)
        else:
            left_out.append(f"a {row.get('kind')!r:.40} row lacks a field, or has one of another type")
    return rows, left_out


def _row(line: bytes, place: int, right: str) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line, type=dict)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise StoreRefusal(f"row {place} of a report is not a JSON object: {error}") from error
    kind, role = row.get("kind"), row.get("role")
    if isinstance(kind, str) and kind in KNOWN and kind not in KINDS[right]:
        raise StoreRefusal(f"row {place} of a report: a caller with the right of {right} may not write {kind} rows")
    if role is not None and right in _ROLES and str(role).partition("-")[0] not in _ROLES[right]:
        raise StoreRefusal(f"row {place} of a report: a caller with the right of {right} may not write as {role!r:.40}")
    return row
