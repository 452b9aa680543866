"""All errors that JaxRoll raises on purpose; `JaxRollError` is their base class.

The subclass tells what to fix: the config (`ConfigError`), the machine or the network (`InfraError`), or the data
(`DataError`). A `StoreRefusal` is a regular answer of the store, which its client handles.
"""

from __future__ import annotations

import re


class JaxRollError(Exception):
    """Base of all errors raised by JaxRoll."""


class ConfigError(JaxRollError):
    """A config that cannot run; the message gives the key, the value, the reason and a remedy."""

    def __init__(self, key: str, value: object, reason: str, remedy: str) -> None:
        self.key, self.value, self.reason, self.remedy = key, value, reason, remedy
        named = key if value is None else f"{key} = {_shown(value)}"
        super().__init__(f"{named}: {one_line(reason)}. {remedy}")


def _shown(value: object) -> str:
    """The value in at most `_SHOWN` characters, because it may come from a file and be a whole document."""
    try:
        text = _ADDRESS.sub("", repr(_listed(value)))
    except (ValueError, RecursionError):  # an integer with more digits than Python prints, a list in itself
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


_SHOWN, _LINE = 300, 1000
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object without a text of its own


def _listed(value: object) -> object:
    """`value` with lists in place of tuples, as users write them."""
    if isinstance(value, (tuple, list)):
        return [_listed(each) for each in value]
    if isinstance(value, dict):
        return {key: _listed(each) for key, each in value.items()}
    return value


def one_line(text: str, limit: int = _LINE) -> str:
    """`text` as one printable line of at most `limit` characters, safe to print even if it comes from a file."""
    line = text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= limit else f"{line[:limit]}…"


class InfraError(JaxRollError):
    """The infrastructure failed (a peer is gone, a deadline passed); the same work may be retried unchanged."""


class RestartRequired(InfraError):
    """This process cannot continue its work, but a new one can; the supervisor restarts it without counting a fault."""


class DeadlineExceeded(InfraError):
    """A wait ended without its event; the message names the event."""


class DataError(JaxRollError):
    """This item cannot be processed (its environment raised, its scorer failed); a retry would not help."""


class CheckpointDamaged(InfraError):
    """A checkpoint whose files differ from what was written."""


class TransferError(InfraError):
    """A parameter transfer that must not be used."""


class DigestMismatch(TransferError):
    """The received bytes differ from the published bytes."""


class VersionMixed(TransferError):
    """Slices of more than one parameter version arrived in one transfer."""


class VersionGone(TransferError):
    """The requested version is not available any more, or not yet; ask the store for the newest one."""


class StoreRefusal(JaxRollError):
    """A typed negative answer of the store."""


class NoCredit(StoreRefusal):
    """No lease now. `reason` names the limit that is reached; retry after `retry_after_s` seconds."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        self.reason, self.retry_after_s = reason, retry_after_s
        super().__init__(f"no credit: {reason} (ask again in {retry_after_s:.2f} s)")


class NotReady(StoreRefusal):
    """The claim is not complete yet; the message tells what is missing."""


class StaleClient(StoreRefusal):
    """The caller belongs to another lineage or run and must restart."""


class Fenced(StoreRefusal):
    """A later attempt or a later lineage owns this work."""


class Conflict(StoreRefusal):
    """The same key was put before with different bytes."""


class Closed(StoreRefusal):
    """The run is over; the message gives the reason."""


class Unauthorized(StoreRefusal):
    """Wrong token, role, protocol version or config digest."""


EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_CONFIG = 64  # a restart would not help
EXIT_CLOSED = 69  # the run is over
EXIT_WORN = 75  # restart this process, without a limit on restarts
EXIT_INTERRUPTED = 130  # the user stopped it


def exit_code(error: Exception) -> int:
    """The exit code that tells the supervisor which kind of `error` ended a process."""
    if isinstance(error, (ConfigError, Unauthorized)):
        return EXIT_CONFIG
    if isinstance(error, RestartRequired):
        return EXIT_WORN
    return EXIT_CLOSED if isinstance(error, Closed) else EXIT_FAILURE


def described(error: BaseException, max_chars: int = 1000) -> str:
    """The error as text that can be serialized: lone surrogates, or a message that raises, become question marks."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - user code may raise here, too
        message = "?"
    return f"{type(error).__name__}: {message[:max_chars]}"[:max_chars].encode(errors="replace").decode()


def no_memory_limit(fraction: float, platform: str) -> ConfigError:
    """The error of a sampler on devices that do not report their memory."""
    return ConfigError(
        "sampler.memory_fraction",
        fraction,
        f"devices of the platform {platform} report no limit of their memory",
        "Set it to 0, and sampler.cache_pages to the pages that the KV cache may have.",
    )
