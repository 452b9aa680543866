"""The servers that benchmarks/store measures, each as a process: `ours` and `floor`, and the standby of `ours`.

    python -m benchmarks.store.server ours|floor|standby FOLDER PARENT_PID CONFIG_JSON

`ours` is JaxRoll's whole store with prompts from a counter. `floor` is a minimal server for the same calls: bare
grpc.aio, one writer thread that inserts every put with group commit (SQLite, WAL, synchronous=FULL), no state machine,
no digest, no check of the bytes. Both write FOLDER/store.addr. The standby copies the log of the store whose folder is
`of` in CONFIG_JSON.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from jaxroll import lifeline, wire
from jaxroll.config import Config, LearnerConfig, ScheduleConfig, StoreConfig
from jaxroll.records import Grant, Message, Task, Version, VersionRef
from jaxroll.rpc import protocol
from jaxroll.rpc.client import RawClient
from jaxroll.rpc.protocol import Envelope
from jaxroll.store import messages as msg
from jaxroll.store.server.server import serve
from jaxroll.store.server.standby import LogFollower

MAX_MESSAGE_BYTES = 64 * 2**20


def config(changes: dict[str, Any]) -> Config:
    """The config of a run; `changes` has keys of schedule and store."""
    schedule = {k: v for k, v in changes.items() if k in ScheduleConfig.__dataclass_fields__}
    store = {k: v for k, v in changes.items() if k in StoreConfig.__dataclass_fields__}
    learner = LearnerConfig(row_tokens=10**6)  # members here are of any length
    return Config(schedule=ScheduleConfig(**schedule), store=StoreConfig(**store), learner=learner)


def task(index: int) -> Task:
    """A small prompt."""
    return Task(index, (Message("user", f"question {index}"),), "single_turn", "{}", index, f"{index:016x}")


class Counter:
    """A feeder of prompts 0, 1, 2, … without an end."""

    at = 0

    def restore(self, state: bytes | None) -> None:
        self.at = int(state) if state else 0

    async def next(self, count: int) -> list[tuple[Task, bytes]]:
        first, self.at = self.at, self.at + count
        return [(task(i), str(i + 1).encode()) for i in range(first, self.at)]


class Floor:
    """The floor: puts into one table, and constant answers to other calls."""

    def __init__(self, folder: Path, group_size: int) -> None:
        self._group_size, self._next_group = group_size, 0
        self._connection = sqlite3.connect(folder / "store.db", isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("CREATE TABLE payloads (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        self._writer = ThreadPoolExecutor(1)
        self._gathered: list[bytes] = []
        self._gathering: asyncio.Future[None] | None = None
        self._writing = False

    async def put(self, pieces: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        """OK for every member when their bytes are on disk."""
        members = wire.decode(b"".join([piece async for piece in pieces]), msg.PutCall).members
        self._gathered += members
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().create_future()
        waiting = self._gathering
        if not self._writing:
            self._write()
        await waiting
        return _envelope(msg.PutReply((_OK,) * len(members)))

    def _write(self) -> None:
        bodies, self._gathered = self._gathered, []
        waiting, self._gathering = self._gathering, None
        self._writing = True
        job = asyncio.get_running_loop().run_in_executor(self._writer, self._commit, bodies)
        job.add_done_callback(lambda job: self._written(job, waiting))

    def _written(self, job: asyncio.Future[None], waiting: asyncio.Future[None] | None) -> None:
        job.result()
        self._writing = False
        assert waiting is not None
        waiting.set_result(None)
        if self._gathering is not None:
            self._write()

    def _commit(self, bodies: list[bytes]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("INSERT INTO payloads (body) VALUES (?)", [(body,) for body in bodies])
        self._connection.execute("COMMIT")

    async def lease(self, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Groups without end."""
        count = -(-wire.decode(body, msg.LeaseCall).max_members // self._group_size)
        members = tuple((member, 1) for member in range(self._group_size))
        first, self._next_group = self._next_group, self._next_group + count
        grants = tuple(Grant(group, task(group), members, 600.0) for group in range(first, self._next_group))
        return _envelope(msg.LeaseReply(grants))

    async def hello(self, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Accept every caller."""
        return _envelope(msg.Welcome("floor", 0, None, wire.PROTOCOL_VERSION))

    async def published(self, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Version 0.0."""
        return _envelope(msg.PublishedReply(VersionRef(Version(0, 0), "tcp", "nowhere", "none")))


def _envelope(message: Any) -> bytes:
    return wire.encode(Envelope(wire.encode(message)))


_OK = msg.PutAnswer("OK")


async def serve_floor(folder: Path, group_size: int) -> None:
    """Serve until killed."""
    floor = Floor(folder, group_size)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
    methods = {"Lease": floor.lease, "Hello": floor.hello, "Published": floor.published}
    handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    handlers["Put"] = grpc.stream_unary_rpc_method_handler(floor.put)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(msg.SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    (folder / "store.addr.tmp").write_text(f"127.0.0.1:{port}\n")
    (folder / "store.addr.tmp").rename(folder / "store.addr")
    await server.wait_for_termination()


async def copy_log(folder: Path, of: Path) -> None:
    """Follow the store with the folder `of` until killed, as its standby."""
    address, token = (of / "store.addr").read_text().strip(), protocol.load(of)
    client = RawClient(msg.SERVICE, address, role="store", name="standby", token=token, patience_s=0.0,
                       max_message_bytes=MAX_MESSAGE_BYTES)  # fmt: skip
    await LogFollower(folder, client, 3600.0, lambda text: None).stand_by(is_first=False)


async def no_peer(run_id: str, epoch: int) -> int:
    """The epoch of the standby, which never takes over here."""
    return 0


def main() -> None:
    """Run the server that the command line names."""
    kind, folder, parent, changes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    lifeline.bind(parent)
    if kind == "floor":
        asyncio.run(serve_floor(folder, changes["group_size"]))
    elif kind == "standby":
        asyncio.run(copy_log(folder, Path(changes["of"])))
    else:
        peer: dict[str, Any] = {"epoch_of_peer": no_peer} if changes.get("standby") else {}
        ready = lambda address: None  # noqa: E731
        asyncio.run(serve(config(changes), folder, Counter(), host="127.0.0.1", port=0, ready=ready, **peer))


if __name__ == "__main__":
    main()
