"""Common parts of the scripted roles: orders, a journal that survives `kill -9`, a client that times every RPC.

A journal line is one `write` to a file in append mode: the kernel keeps it when the process is killed. It is not
synced, because no test crashes the machine and its syncs would compete with the store's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jaxroll import lifeline
from jaxroll.metrics import JsonlTracker
from jaxroll.records import Version
from jaxroll.rpc.client import RawClient
from jaxroll.store.client import StoreClient

BEAT_S = 0.1
T = TypeVar("T", bound="Orders")


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """Orders of a scripted role, as JSON in its only argument. The run's token is next to `address_file`."""

    name: str
    address_file: str
    journal: str
    config_digest: str
    lease_s: float = 5.0
    call_s: float = 10.0
    patience_s: float = 60.0
    seed: int = 0


class Journal:
    """A file with one line per action or answer of a role, with the time of the machine's monotonic clock."""

    def __init__(self, path: str) -> None:
        self._lines = JsonlTracker(path)

    def log(self, kind: str, **facts: Any) -> None:
        """Write one line."""
        self._lines.log({"kind": kind, "pid": os.getpid(), "at_s": time.monotonic(), **facts})


class Heartbeat:
    """The total time for which this process's event loop was stopped (no core, or a signal), which no RPC caused."""

    def __init__(self) -> None:
        self.stood_s, self._expected_s = 0.0, time.monotonic()

    async def beat(self) -> None:
        """Measure without end."""
        while True:
            self._expected_s = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.stood_s += max(0.0, time.monotonic() - self._expected_s)

    def so_far_s(self) -> float:
        """Seconds stopped until now, a present stop included."""
        return self.stood_s + max(0.0, time.monotonic() - self._expected_s)


def orders_of(kind: type[T]) -> T:
    """Bind this process to its parent's life; return its orders."""
    lifeline.bind_from_env()
    return msgspec.json.decode(sys.argv[1], type=kind)


@contextlib.asynccontextmanager
async def connected(orders: Orders, journal: Journal, role: str) -> AsyncIterator[StoreClient]:
    """A client of the store that journals every attempt of every call with its duration and deadline."""
    heart = Heartbeat()
    beating = asyncio.ensure_future(heart.beat())
    _time_attempts(journal, heart)
    client = None
    try:
        client = await StoreClient.connect(
            Path(orders.address_file),
            role=role,
            name=orders.name,
            config_digest=orders.config_digest,
            patience_s=orders.patience_s,
            call_s=orders.call_s,
        )
        journal.log("life", name=orders.name)
        yield client
    finally:
        beating.cancel()
        if client is not None:
            await client.aclose()


def _time_attempts(journal: Journal, heart: Heartbeat) -> None:
    attempt = RawClient._attempt

    async def timed(self: RawClient, method: str, body: bytes, deadline_s: float, **how: bool):
        began, stood_s, outcome = time.monotonic(), heart.so_far_s(), "OK"
        try:
            return await attempt(self, method, body, deadline_s, **how)
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            took_s, stood_s = time.monotonic() - began, heart.so_far_s() - stood_s
            journal.log("rpc", method=method, took_s=took_s, deadline_s=deadline_s, stood_s=stood_s, outcome=outcome)

    RawClient._attempt = timed


def stop_event() -> asyncio.Event:
    """Set by SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop


async def first_of(*jobs: asyncio.Future) -> None:
    """Wait for the first of `jobs`, cancel the others, and raise the error of the first if it has one."""
    try:
        done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        for job in done:
            job.result()
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


def pair(version: Version | None) -> list[int] | None:
    """A version in the journal's format."""
    return None if version is None else [version.lineage, version.step]
