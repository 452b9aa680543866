"""Validation of what callers send: members as bytes, metrics rows. Masks stale tokens on the way out."""

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
_LARGEST_ID = 2**53  # of a group: what every table and JSON reader can hold


class Outline(msgspec.Struct, frozen=True):
    """How many segments a member has; a failed one has none."""

    segments: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_SEGMENTS)] = ()


class Key(msgspec.Struct, frozen=True):
    """Which member the bytes of a records.Member are of; what it carries is counted, not looked at."""

    group: Count
    member: Count
    attempt: Count
    outcome: Outline


def key_of(body: bytes | memoryview) -> Key:
    """The key in the bytes of a member; StoreRefusal unless it is made of numbers the log can hold."""
    if len(body) > MAX_MEMBER_MB * 2**20:
        raise StoreRefusal(f"put: a member of {len(body)} bytes; at most {MAX_MEMBER_MB} MB are taken")
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
    """The request that the bytes of a member make; StoreRefusal when it contradicts itself, else msgspec's errors.

    `row_tokens` (0: no limit) and `prompt_tokens` are those of the learner, which could not train a longer member.
    `vocab_size` is that of the model; 0: not known.
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
    """Raise unless the arrays fit one another and the versions cover the sampled tokens."""
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
            raise StoreRefusal(f"put {key}: segment {i} has a loss mask beside 0 and 1")
        if segment.sampled.size:
            raise StoreRefusal(f"put {key}: segment {i} marks sampled tokens beside its loss mask, as only claims do")
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
    """Raise if the conversation has more tokens than the learner has room for; see `rollout.episode.Bounds`."""
    total, first = sum(segment.tokens.size for segment in outcome.segments), 0
    for segment in outcome.segments:
        if segment.loss_mask.any():
            first += int(segment.loss_mask.argmax())
            break
        first += segment.tokens.size
    apart = first - 1 if 0 < first <= prompt_tokens + 1 else 0
    if 0 < row_tokens < total - apart:
        raise StoreRefusal(
            f"put {key}: {total} tokens, {apart} of them of a prompt that is kept apart, do not fit into "
            f"learner.row_tokens = {row_tokens}: the learner could never train it"
        )


def masked(body: bytes, step: int, max_age: int) -> bytes:
    """`body` with loss mask 0 wherever a token is older than `max_age` at `step`; unchanged when none is.

    Its segments then say which tokens were sampled: a stale one cannot be told from a shown one by its values.
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


# --- metrics rows: only kinds that belong to the caller's role

_ALL = frozenset({"span", "compile", "devices", "warm", "event"})
# The kinds that a caller with this right may report. Those of the store and the supervisor are written without a call.
KINDS: Mapping[str, frozenset[str]] = {
    "learner": _ALL | {"step"},
    "sampler": _ALL | {"stats", "members"},
    "observer": _ALL | {"eval"},
    "admin": _ALL | {"step", "stats", "members", "eval", "restart"},
}
KNOWN = frozenset().union(*KINDS.values()) | {"store"}
_ROLES: Mapping[str, frozenset[str]] = {  # the roles whose name a row may carry, by right; admin: any
    "learner": frozenset({"learner"}),
    "sampler": frozenset({"sampler", "actor"}),
    "observer": frozenset({"evaluator", "observer", "report"}),
}


def rows_of(lines: Iterable[bytes], right: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows in `lines` that every reader can work with, and why the others are left out.

    StoreRefusal when one is no JSON object, or is not for a caller with this right to write: then none is taken.
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
        raise StoreRefusal(f"row {place} of a report is no JSON object: {error}") from error
    kind, role = row.get("kind"), row.get("role")
    if isinstance(kind, str) and kind in KNOWN and kind not in KINDS[right]:
        raise StoreRefusal(f"row {place} of a report: a caller with the right of {right} may not write {kind} rows")
    if role is not None and right in _ROLES and str(role).partition("-")[0] not in _ROLES[right]:
        raise StoreRefusal(f"row {place} of a report: a caller with the right of {right} may not write as {role!r:.40}")
    return row
