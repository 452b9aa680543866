"""The processes of benchmarks/store, seen from the parent: a server in its own folder, and its clients."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.store.server import config
from jaxroll.config import digest
from jaxroll.records import Version, VersionRef
from jaxroll.rpc import protocol
from jaxroll.store.client import StoreClient

_ROOT = Path(__file__).resolve().parents[2]
_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Scale:
    """The amount of work. Members have `payload_bytes`; every client has `in_flight` concurrent puts."""

    puts: int = 4096  # a round
    rounds: int = 6
    loop_steps: int = 40
    loop_groups: int = 16  # a claim
    killed_puts: int = 12288  # about nine in ten are put before the kill
    disk_s: float = 2.0
    clients: int = 4
    in_flight: int = 8
    group_size: int = 8
    payload_bytes: int = 65536


class Server:
    """One of the servers of benchmarks/store/server.py as a child process with its own folder."""

    def __init__(self, kind: str, folder: Path, changes: dict[str, Any]) -> None:
        self.kind, self.folder, self.changes = kind, folder, changes
        self.config_digest = digest(config(changes))
        self.start()

    def start(self) -> None:
        """Start or restart the server and wait until it answers."""
        self.started = time.monotonic()
        before = self._address_changed()
        program = [sys.executable, "-m", "benchmarks.store.server", self.kind, str(self.folder), str(os.getpid())]
        self.process = subprocess.Popen([*program, json.dumps(self.changes)], stdin=subprocess.DEVNULL, cwd=_ROOT)
        while self._address_changed() == before:
            if self.process.poll() is not None:
                raise RuntimeError(f"the {self.kind} server ended with {self.process.returncode} before it answered")
            if time.monotonic() - self.started > _DEADLINE_S:
                raise RuntimeError(f"the {self.kind} server does not answer")
            time.sleep(0.005)

    def _address_changed(self) -> int:
        path = self.folder / "store.addr"
        return path.stat().st_mtime_ns if path.exists() else 0

    def ask(self, job: Callable[[StoreClient], Any], role: str = "learner") -> Any:
        """Run `job(client)` and return its result."""

        async def asked() -> Any:
            client = await self.connect(role)
            try:
                return await job(client)
            finally:
                await client.aclose()

        return asyncio.run(asked())

    async def connect(self, role: str) -> StoreClient:
        """A client of this server."""
        address = self.folder / "store.addr"
        return await StoreClient.connect(
            address, role=role, name=f"bench-{role}", config_digest=self.config_digest, patience_s=30.0
        )

    def usage(self) -> dict[str, float]:
        """CPU seconds, and bytes that it wrote to the disk (/proc/PID/io)."""
        process = psutil.Process(self.process.pid)
        times = process.cpu_times()
        return {"cpu_s": times.user + times.system, "written": process.io_counters().write_bytes}

    def log_facts(self) -> dict[str, Any]:
        """The store's facts about its open database connection, and its commits."""
        return self.ask(lambda client: client.status())["log"] if self.kind == "ours" else {}

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def serving(kind: str, parent: Path, changes: dict[str, Any]) -> Iterator[Server]:
    """A server in a new folder under `parent`, with a standby if `changes` ask for one; all are removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=parent))
    protocol.create(folder)  # a run has a token, and checking it is part of a put
    server, standby, copy = Server(kind, folder, changes), None, folder.with_name(f"{folder.name}-standby")
    try:
        if changes.get("standby"):
            copy.mkdir()
            words = ["standby", str(copy), str(os.getpid()), json.dumps({"of": str(folder)})]
            program = [sys.executable, "-m", "benchmarks.store.server", *words]
            standby = subprocess.Popen(program, stdin=subprocess.DEVNULL, cwd=_ROOT)
        yield server
        if standby is not None and standby.poll() is not None:
            raise RuntimeError(f"the standby ended with {standby.returncode} during the round")
    finally:
        server.kill()
        if standby is not None:
            standby.kill()
            standby.wait(30)
        for each in (folder, copy):
            shutil.rmtree(each, ignore_errors=True)


class Samplers:
    """The client processes, which wait for `go`."""

    def __init__(self, server: Server, kind: str, scale: Scale, **settings: Any) -> None:
        settings = {
            "in_flight": scale.in_flight,
            "payload_bytes": scale.payload_bytes,
            "patience_s": 60.0,
            "config_digest": server.config_digest,
            **settings,
        }
        self.processes = [self._started(server, kind, f"sampler-{i}", settings) for i in range(scale.clients)]
        for process in self.processes:
            if self._lines(process).readline().strip() != "ready":
                raise RuntimeError(f"a client ended with {process.wait(30)} before it was ready")

    @staticmethod
    def _started(server: Server, kind: str, name: str, settings: dict[str, Any]) -> subprocess.Popen[str]:
        program = [sys.executable, "-m", "benchmarks.store.client", kind, str(server.folder), name, str(os.getpid())]
        return subprocess.Popen(
            [*program, json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
        )

    @staticmethod
    def _lines(process: subprocess.Popen[str]) -> IO[str]:
        assert process.stdout is not None
        return process.stdout

    def go(self) -> None:
        """Begin to put."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def results(self) -> list[dict[str, Any]]:
        """Wait for the end of all clients; return their measurements."""
        found = []
        for process in self.processes:
            text, _ = process.communicate(timeout=_DEADLINE_S)
            if process.returncode != 0:
                raise RuntimeError(f"a client failed with {process.returncode}; its error is above")
            found.append(json.loads(text.splitlines()[-1]))
        return found


def put_config(scale: Scale, puts: int) -> dict[str, Any]:
    """A window that holds `puts` members, so that only the put is measured."""
    groups = -(-puts // scale.group_size) + 2 * scale.clients
    retention_mb = 2 * puts * scale.payload_bytes // 2**20 + 64
    return {
        "steps": 1000,
        "groups_per_step": -(-groups // 2),
        "group_size": scale.group_size,
        "alpha": 1.0,
        "lease_s": 600.0,
        "retention_mb": retention_mb,
    }


def open_run(server: Server) -> None:
    """Publish version 0.0, without which samplers wait."""

    async def first(learner: StoreClient) -> None:
        version = await learner.begin(None)
        await learner.publish(version_ref(version))

    if server.kind == "ours":
        server.ask(first)


def version_ref(version: Version) -> VersionRef:
    """Weights that no sampler fetches."""
    return VersionRef(version, "tcp", "nowhere", "none")
