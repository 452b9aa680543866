"""Every error JaxRoll raises on purpose, as one tree: catch `JaxRollError` and you catch them all.

The branches say who can mend it: the user (`ConfigError`), nobody but the protocol itself (`StoreRefusal` and its
leaves, which are answers rather than accidents), the machine (`InfraError`), or the data (`DataError`).
"""

from __future__ import annotations


class JaxRollError(Exception):
    """Base of all errors raised by JaxRoll."""


class ConfigError(JaxRollError):
    """A config that must not run: says which key, what value, why, and what to do instead."""

    def __init__(self, key: str, value: object, reason: str, remedy: str = "") -> None:
        self.key, self.value, self.reason, self.remedy = key, value, reason, remedy
        tail = f" {remedy}" if remedy else ""
        super().__init__(f"{key} = {_shown(value)}: {one_line(reason)}.{tail}")


def _shown(value: object) -> str:
    """The value in at most `_SHOWN` characters: it may come from a file and be a whole document."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


_SHOWN, _LINE = 300, 1000


def one_line(text: str, limit: int = _LINE) -> str:
    """`text` as one printable line of at most `limit` characters: it may come from a file, and reach a terminal."""
    line = text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= limit else f"{line[:limit]}…"


class InfraError(JaxRollError):
    """The machinery failed (a peer is gone, a deadline passed); the same work may be tried again unchanged."""


class RestartRequired(InfraError):
    """This process can do no more of its work and another one can: it is to be started again, which is no fault."""


class DeadlineExceeded(InfraError):
    """A wait ended without its event; the message says what was being waited for."""


class DataError(JaxRollError):
    """This item cannot be worked on (its environment raised, its scorer failed); trying again will not help."""


class CheckpointDamaged(InfraError):
    """A checkpoint whose files are not what was written."""


class TransferError(InfraError):
    """A parameter transfer that must not be used."""


class DigestMismatch(TransferError):
    """Bytes arrived that are not the bytes that were published."""


class VersionMixed(TransferError):
    """Slices of more than one parameter version arrived in one transfer."""


class VersionGone(TransferError):
    """The version asked for is not kept any more (or not yet): ask the store for the newest one."""


class StoreRefusal(JaxRollError):
    """A typed negative answer of the store."""


class NoCredit(StoreRefusal):
    """No lease now: `reason` says what is full, `retry_after_s` when to ask again."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        self.reason, self.retry_after_s = reason, retry_after_s
        super().__init__(f"no credit: {reason} (ask again in {retry_after_s:.2f} s)")


class NotReady(StoreRefusal):
    """The claim is not complete yet; the message says what it waits for."""


class StaleClient(StoreRefusal):
    """The caller belongs to another lineage or run and must start again."""


class Fenced(StoreRefusal):
    """A later attempt or a later lineage owns this work."""


class Conflict(StoreRefusal):
    """The same key was put before with other bytes."""


class Closed(StoreRefusal):
    """The run is over; the message says why."""


class Unauthorized(StoreRefusal):
    """Wrong token, role, protocol version or config digest."""


EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_CONFIG = 64  # starting again will not help
EXIT_CLOSED = 69  # the run is over
EXIT_WORN = 75  # to be started again, as often as it takes
EXIT_INTERRUPTED = 130  # the user stopped it


def exit_code(error: JaxRollError) -> int:
    """The exit code by which a process tells its supervisor what kind of `error` ended it."""
    if isinstance(error, (ConfigError, Unauthorized)):
        return EXIT_CONFIG
    if isinstance(error, RestartRequired):
        return EXIT_WORN
    return EXIT_CLOSED if isinstance(error, Closed) else EXIT_FAILURE
