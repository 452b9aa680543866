"""Every answer travels in an envelope: a body, or a typed refusal that the caller's side raises again."""

from __future__ import annotations

import msgspec

from jaxroll import errors

_REFUSALS: dict[str, type[errors.StoreRefusal]] = {
    "NO_CREDIT": errors.NoCredit,
    "NOT_READY": errors.NotReady,
    "STALE_CLIENT": errors.StaleClient,
    "FENCED": errors.Fenced,
    "CONFLICT": errors.Conflict,
    "CLOSED": errors.Closed,
    "UNAUTHORIZED": errors.Unauthorized,
    "REFUSED": errors.StoreRefusal,
}
_CODES = {kind: code for code, kind in _REFUSALS.items()}


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """A refusal by code, with its reason."""

    code: str
    reason: str
    retry_after_s: float = 0.0


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """`position` is that of the server's log when it answered."""

    body: bytes = b""
    refusal: Refusal | None = None
    position: int = 0


def refusal_of(error: errors.StoreRefusal) -> Refusal:
    """The refusal that travels for `error`."""
    if isinstance(error, errors.NoCredit):
        return Refusal("NO_CREDIT", error.reason, error.retry_after_s)
    return Refusal(_CODES.get(type(error), "REFUSED"), str(error))


def error_of(refusal: Refusal) -> errors.StoreRefusal:
    """The error to raise for `refusal`; a code of a later protocol is a plain StoreRefusal."""
    if refusal.code == "NO_CREDIT":
        return errors.NoCredit(refusal.reason, refusal.retry_after_s)
    kind = _REFUSALS.get(refusal.code, errors.StoreRefusal)
    return kind(refusal.reason)
