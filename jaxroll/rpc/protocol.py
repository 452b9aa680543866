"""Envelope of every reply (a body, or a typed refusal that the client raises), limits of a service, bearer tokens."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import hmac
import ipaddress
import os
import re
import resource
import secrets
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from jaxroll import disk, errors
from jaxroll.errors import ConfigError, DataError
from jaxroll.run_paths import RunPaths

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


class CallRefusal(msgspec.Struct, frozen=True, array_like=True):
    """A refusal: its code and reason."""

    code: str
    reason: str
    retry_after_s: float = 0.0


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A reply; `position` is the position of the server's log when it was sent."""

    body: bytes = b""
    refusal: CallRefusal | None = None
    position: int = 0


def refusal_of(error: errors.StoreRefusal) -> CallRefusal:
    """The wire form of `error`."""
    if isinstance(error, errors.NoCredit):
        return CallRefusal("NO_CREDIT", error.reason, error.retry_after_s)
    return CallRefusal(_CODES.get(type(error), "REFUSED"), str(error))


def error_of(refusal: CallRefusal) -> errors.StoreRefusal:
    """The error to raise for `refusal`; an unknown code becomes a plain StoreRefusal."""
    if refusal.code == "NO_CREDIT":
        return errors.NoCredit(refusal.reason, refusal.retry_after_s)
    kind = _REFUSALS.get(refusal.code, errors.StoreRefusal)
    return kind(refusal.reason)


# --- Limits of a service, and the hosts where it may listen
#
# A server accepts `MAX_CONNECTIONS` connections of `CALLS_PER_CONNECTION` calls each; an unread body costs at most the
# flow-control window. A connection that has not completed its handshake (TLS, HTTP/2 settings) is closed after
# `HANDSHAKE_S`, one without a call after `IDLE_S`.

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a process ("sampler-0"), a session, a request
MAX_WAIT_S = 30.0  # of one long poll; clients repeat it
MAX_CONNECTIONS = 1024
CALLS_PER_CONNECTION = 64
GENERATIONS_PER_CONNECTION = 4096  # of an actor at one sampler: each of its episodes may wait for a completion
POLLS_PER_CONNECTION, MAX_POLLS = 16, 1024  # calls that are held until an event
POLLS_ASSURED = 4  # per connection even beyond MAX_POLLS: a sampler waits for leases, weights, cancellations and moves
ASKS_FIRST = "jaxroll-asks-first"  # in a call's metadata: its body is sent after the server announces that it reads it,
READS_NOW = "jaxroll-reads-now"  # in its initial metadata; that of a refusal does not contain it
PIECE_BYTES = 256 * 1024  # a longer body is sent in pieces of this size, the last one shorter
HANDSHAKE_S, IDLE_S = 10.0, 300.0
MAX_METADATA_BYTES = 16 * 1024
MIN_SECRET_CHARS = 16  # if other machines can connect
LOOPBACK_NAMES = ("localhost", "ip6-localhost")
_SPARE_DESCRIPTORS = 512  # in addition to the connections: database, logs, the feeder


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`. A name counts only if all it resolves to is loopback."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return _is_loopback_address(bare)
    except ValueError:
        pass
    if bare.lower() not in LOOPBACK_NAMES:
        return False
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(_is_loopback_address(address) for address in found)


def _is_loopback_address(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def address(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_address(text: str) -> bool:
    """True if `text` is HOST:PORT, an IPv6 host in brackets."""
    host, _, port = text.rpartition(":")
    is_host = bool(host) and (":" not in host or host.startswith("["))
    return is_host and port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16


def check_exposure(host: str, *, secret: str | None, has_tls: bool, insecure: bool) -> None:
    """Raise ConfigError if other machines can reach `host` and there is no token, or neither TLS nor `insecure`."""
    if is_loopback(host):
        return
    if not secret:
        raise ConfigError(
            "host",
            host,
            "other machines can reach it and the run has no token",
            "Create RUN/token (`jaxroll tls RUN` does), or set JAXROLL_TOKEN.",
        )
    if len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            "host",
            host,
            "other machines can reach it and the run's token can be guessed",
            f"Use at least {MIN_SECRET_CHARS} characters.",
        )
    _check_encrypted("host", host, has_tls=has_tls, insecure=insecure)


def _check_encrypted(key: str, value: str, *, has_tls: bool, insecure: bool) -> None:
    if not (has_tls or insecure):
        raise ConfigError(
            key,
            value,
            "would carry plain text to other machines",
            "Make certificates with `jaxroll tls RUN`, or allow it with --insecure on a trusted network.",
        )


def listening(option: str, text: str, *, insecure: bool, has_tls: bool) -> tuple[str, int]:
    """Host and port of `text`, where this process can listen. ConfigError that names `option` if it cannot."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or len(port) > 5 or int(port) > 65535:
        raise ConfigError(option, text, "not HOST:PORT", f"Write for example {option}=127.0.0.1:7077.")
    if not is_loopback(host):
        _check_encrypted(option, text, has_tls=has_tls, insecure=insecure)
    if error := bind_error(host, int(port)):
        taken = error.errno == errno.EADDRINUSE
        reason = "another process has this port" if taken else f"cannot listen there ({error.strerror})"
        raise ConfigError(option, text, reason, "Choose another one.")
    return host, int(port)


def bind_error(host: str, port: int) -> OSError | None:
    """The reason why this process cannot listen on `port` (0: on any) of `host` now; None if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return error
    return None


def raise_descriptor_limit() -> int:
    """Raise the limit of open files up to what `MAX_CONNECTIONS` needs; the limit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def make_full_collections_rare() -> None:
    """Let the garbage collector of this process look at all objects seldom, and never at those of now.

    A full collection stops a server for 100 ms with the imported modules alone, and for 400 ms with 8,000 open calls.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)


def connections(descriptors: int) -> int:
    """Number of connections that a server with a limit of `descriptors` open files may accept."""
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(16, min(MAX_CONNECTIONS, descriptors - min(_SPARE_DESCRIPTORS, descriptors // 2)))


def _common_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(
    max_message_bytes: int, max_connections: int = MAX_CONNECTIONS, calls: int = CALLS_PER_CONNECTION
) -> list[tuple[str, int]]:
    """gRPC options of a server that reads messages of up to `max_message_bytes`, with `calls` open per connection.

    `so_reuseport` is off: two servers on one port would share its callers.
    """
    return [
        *_common_options(),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", calls),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
    ]


def client_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """gRPC options of a client that accepts replies of up to `max_message_bytes`.

    Every client has connections of its own and reconnects to a restarted server within half a second.
    """
    return [
        *_common_options(),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]


# --- Bearer tokens, one per run and role, compared in constant time
#
# A run has one secret (RUN/token, or JAXROLL_TOKEN). Processes send the token of their role, `role.HMAC(secret, role)`,
# instead of the secret: a machine with the sampler's token cannot call as the learner.

TOKEN_VARIABLE = "JAXROLL_TOKEN"
_SECRET_BYTES = 4096
ROLES = frozenset({"sampler", "learner", "admin", "observer"})
_ALIASES = {"actor": "sampler", "evaluator": "observer", "report": "observer", "supervisor": "admin", "store": "admin"}
_ROLE_TOKEN = re.compile(rf"({'|'.join(sorted(ROLES))})\.[0-9a-f]{{64}}")
_MAX_CHARS = 1024


def right_of(role: str) -> str:
    """The right (one of ROLES) that a process of `role` has."""
    right = _ALIASES.get(role, role)
    if right not in ROLES:
        raise ConfigError("role", role, "unknown role", f"Use one of {', '.join(sorted({*ROLES, *_ALIASES}))}.")
    return right


def load(run_dir: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The secret or role token in the environment, else in the run's folder; None when the run has none.

    ConfigError for a token file that is empty or cannot be made private.
    """
    text = environment.get(TOKEN_VARIABLE, "").strip()
    if not (text.isascii() and text.isprintable()):
        raise ConfigError(TOKEN_VARIABLE, "(not shown)", "a token is printable ASCII", "Set it to a token or a secret.")
    if text or run_dir is None:
        return text or None
    return _read(RunPaths(run_dir).token)


def load_secret(run_dir: Path, environment: Mapping[str, str] = os.environ) -> str | None:
    """The run's secret, for a process that checks tokens; ConfigError if there is only a role's token."""
    secret = load(run_dir, environment)
    if secret is not None and _ROLE_TOKEN.fullmatch(secret):
        raise ConfigError(
            TOKEN_VARIABLE,
            "(a role's token)",
            "the store checks the tokens of all roles",
            "Give the store the run's secret.",
        )
    return secret


def _read(path: Path) -> str | None:
    if not os.path.lexists(path):  # first: another process may be making it
        return None
    if not path.is_file():
        remedy = "Remove it: `jaxroll train` makes a new one."  # without a secret every process would be admitted
        raise ConfigError(str(path), "", "is not a file with a secret", remedy)
    keep_private(path)
    try:
        text = disk.read_bytes(path, _SECRET_BYTES).decode(errors="replace").strip()
    except DataError as error:
        raise ConfigError(str(path), "", str(error), "Remove it: `jaxroll train` makes a new one.") from error
    if not text.isascii():
        raise ConfigError(
            str(path),
            "(not text)",
            "holds no secret that JaxRoll makes",
            "Restore it from a copy, or remove it: `jaxroll train` makes a new one.",
        )
    if not text:
        raise ConfigError(
            str(path),
            "",
            "is empty, which would admit every process",
            "Write a secret into it, or remove the file: then only this machine is served.",
        )
    return text


def keep_private(path: Path) -> None:
    """Make `path` readable by its owner only, with a warning if it was not; ConfigError if that fails."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o077:
        return
    try:
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(str(path), f"{mode:o}", "others can read it", "Its owner must chmod 600 it.") from error
    print(
        f"warning: other users could read {path} (mode {mode:o}); it is private now, make a new one if in doubt",
        file=sys.stderr,
        flush=True,
    )


def create(run_dir: Path) -> str:
    """The run's secret, made (readable by its owner only) if there is none yet."""
    path = RunPaths(run_dir).token
    kept = _read(path)
    if kept is not None:
        return kept
    secret = secrets.token_hex(32)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secret + "\n")
            file.flush()
            os.fsync(file.fileno())  # after a power failure an unsynced file may be empty, which would end the run
        os.link(draft, path)  # atomic, and never replaces the file of another process
    except FileExistsError:
        return create(run_dir)
    finally:
        draft.unlink(missing_ok=True)
    return secret


def bearer(token: str, right: str) -> str:
    """The token of `right`, derived from the run's secret; a role token is returned unchanged."""
    return token if _ROLE_TOKEN.fullmatch(token) else _role_token(token, right)


def _role_token(secret: str, right: str) -> str:
    return f"{right}.{derived(secret, right)}"


def derived(secret: str, purpose: str) -> str:
    """A token for one purpose, from which `secret` and the tokens of other purposes do not follow."""
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def admits(secret: str | None, right: str, shown: str) -> bool:
    """True if `shown` is the token of `right`; a run without a secret admits every local process."""
    return secret is None or matches(tokens(secret), right, shown)


def tokens(secret: str) -> dict[str, bytes]:
    """The token of every right; a server computes them once."""
    return {right: _role_token(secret, right).encode() for right in ROLES}


def matches(expected: Mapping[str, bytes], right: str, shown: str) -> bool:
    """True if `shown` is the expected token of `right`, compared in constant time."""
    known = expected.get(right)
    sent = shown.encode("utf-8", "surrogatepass")[:_MAX_CHARS]
    return known is not None and hmac.compare_digest(known, sent)
