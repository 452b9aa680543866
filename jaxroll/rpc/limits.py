"""What a peer may send at most, and where a service may listen."""

from __future__ import annotations

import ipaddress
import re

from jaxroll.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a process ("sampler-0"), a session, a request
MAX_CONCURRENT_CALLS = 4096
MAX_WAIT_S = 30.0  # of one long poll; clients ask again
LOOPBACK_NAMES = ("localhost", "ip6-localhost")


def is_name(text: str) -> bool:
    """Whether `text` may name a process, session or request."""
    return NAME.fullmatch(text) is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def address(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def check_exposure(host: str, *, has_token: bool, insecure: bool) -> None:
    """ConfigError when `host` can be reached from outside without what that needs."""
    if is_loopback(host):
        return
    if not has_token:
        raise ConfigError("host", host, "other machines can reach it and the run has no token", "Create RUN/token.")
    if not insecure:
        raise ConfigError("host", host, "would carry plain text to other machines", "Allow it with insecure=True.")


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """gRPC's options for both sides: the size limit is checked before a message is read."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """`so_reuseport` is off: two servers on one port would share its callers."""
    return [
        *channel_options(max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def client_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Every client has connections of its own and comes back to a restarted server within half a second."""
    return [
        *channel_options(max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]
