"""A second store with a copy of the log (`store.standby`): nothing is acknowledged before it is on both disks.

The store that serves (`Standby`) notes the statements of each commit; the other one (`LogFollower`) asks for them,
commits them in its own database and asks for the next, which acknowledges these. A follower without a current copy gets
one first, and the metrics come along. It serves nothing until the other store has been silent for `store.takeover_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from jaxroll import disk, wire
from jaxroll.errors import ConfigError, InfraError, StoreRefusal, Unauthorized
from jaxroll.rpc.client import RawClient
from jaxroll.rpc.server import Caller, Method
from jaxroll.run_paths import RunPaths
from jaxroll.store import messages as msg
from jaxroll.store.log import database
from jaxroll.store.log.commit_log import Log, commit
from jaxroll.store.log.schema import Statement

EpochOfPeer = Callable[[str, int], Awaitable[int]]  # (run id, own epoch) → the epoch in which the other store serves
SILENT_S = 5.0  # without a call, after which a standby counts as missing
_PIECE_BYTES, _REPLY_BYTES = 4 * 2**20, 8 * 2**20
_WAIT_S, _CALL_S, _RETRY_S = 2.0, 3.0, 0.2  # of a follower: a long poll, an attempt beyond it, between attempts
_POLL_S, _LOOK_S = 0.02, 1.0
_FAILURES = 4  # attempts that fail before a takeover, so that a follower that was suspended asks again first


class Standby:
    """Delivers every commit to a standby (`LogFollower`), which has it on disk before it is acknowledged.

    A log belongs to an epoch; a standby that takes over begins the next one. In the first epoch, and in one that has
    had a standby, a store without its standby acknowledges nothing, because that may have taken over. So no two stores
    acknowledge calls of one run, and the standby's disk has all that was acknowledged.
    """

    def __init__(
        self,
        log: Log,
        run_dir: Path,
        now_s: Callable[[], float],
        epoch_of_peer: EpochOfPeer,
    ) -> None:
        known = log.meta
        self._run_id, self.epoch = known["run_id"], int(known.get("epoch", 1))
        self._waits = self.epoch == 1 or known.get("followed") == str(self.epoch)
        self._log, self._now_s, self._epoch_of_peer = log, now_s, epoch_of_peer
        self._copy, self._metrics = RunPaths(run_dir).database_copy, RunPaths(run_dir).metrics
        self._session, self._follower = uuid.uuid4().hex, ""
        self._number = self._copied = 0  # of the last commit, and of the last one in the copy
        self._called_s = -math.inf
        self._made: tuple[str, asyncio.Future[msg.FollowReply]] | None = None  # a standby's session, and its copy
        self._commits: deque[tuple[int, bytes, asyncio.Future[None] | None]] = deque()  # that the standby may lack
        self._arrived, self._ending = asyncio.Event(), False
        log.replication = self

    def guarded(self, methods: Mapping[str, Method]) -> dict[str, Method]:
        """The methods of the store with `Follow`; the others are unavailable while the standby is missing.

        So callers ask the other store, which may have taken over, and a store that has begun another run, because its
        disk was lost, answers no caller of the run.
        """

        async def answer(method: Method, caller: Caller, body: bytes) -> bytes:
            if self.is_missing or (self._waits and not self._follower):
                raise InfraError("this store waits for its standby")
            return await method.handler(caller, body)

        held = {name: replace(method, handler=partial(answer, method)) for name, method in methods.items()}
        return held | {"Follow": Method(self.follow, frozenset({"admin"}), held=True)}

    @property
    def is_missing(self) -> bool:
        """True if calls wait for a standby that is not connected."""
        return self._waits and self._now_s() - self._called_s > SILENT_S

    def ship(self, executed: Sequence[Statement], done: asyncio.Future[None] | None) -> None:
        """See `schema.Replication`."""
        self._number += 1
        if not self._waits:
            if done is not None:
                done.set_result(None)
            return
        self._commits.append((self._number, wire.encode(executed), done))
        self._arrived.set()

    def abandon(self, error: InfraError) -> None:
        """See `schema.Replication`."""
        for _, _, done in self._commits:
            if done is not None and not done.done():
                done.set_exception(error)
        self._commits.clear()

    async def follow(self, caller: Caller, body: bytes) -> bytes:
        """Answer a `FollowCall`."""
        call = wire.decode(body, msg.FollowCall)
        reply = msg.FollowReply(self._run_id, self.epoch)
        if call.run_id not in ("", self._run_id):
            raise StoreRefusal(f"{caller.name} has the log of another run ({call.run_id})")
        if call.epoch > self.epoch:
            self._log.fail(InfraError(f"the standby has taken over in epoch {call.epoch}"))
        if call.probe or call.epoch > self.epoch:
            return wire.encode(reply)
        self._called_s = self._now_s()
        if (call.session, caller.session) != (self._session, self._follower):
            made = self._copy_for(caller.session)
            await asyncio.wait([made], timeout=min(call.wait_s, SILENT_S / 2))
            return wire.encode(made.result() if made.done() else reply)
        if call.offset >= 0:
            piece = await asyncio.to_thread(_piece, self._copy, call.offset)
            return wire.encode(msgspec.structs.replace(reply, session=self._session, piece=piece))
        self._acknowledge(call.after)
        if not self._commits and not self._ending:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(call.wait_s, SILENT_S / 2)):  # wait_for may lose a cancellation
                    await self._arrived.wait()
        while self._ending and not self._commits and not self._log.is_idle:
            await asyncio.sleep(_POLL_S)
        self._called_s = self._now_s()
        sent, size = list[bytes](), 0
        for _, body_of_commit, _ in self._commits:
            if size and size + len(body_of_commit) > _REPLY_BYTES:
                break
            sent.append(body_of_commit)
            size += len(body_of_commit)
        self._made = None
        self._copy.unlink(missing_ok=True)
        rows = await asyncio.to_thread(_piece, self._metrics, call.metrics)
        ended = self._ending and len(sent) == len(self._commits)
        return wire.encode(
            msgspec.structs.replace(reply, session=self._session, commits=tuple(sent), metrics=rows, ended=ended)
        )

    async def watch(self) -> None:
        """End the log if the standby has taken over while it could not call; without end."""
        while True:
            await asyncio.sleep(SILENT_S / 2)
            if self.is_missing and (epoch := await self._epoch_of_peer(self._run_id, self.epoch)) > self.epoch:
                self._log.fail(InfraError(f"the standby has taken over in epoch {epoch}"))

    async def end(self) -> None:
        """Let the standby end, too, once it has all commits; wait a second for it."""
        self._ending = True
        self._arrived.set()
        until_s = self._now_s() + 1.0
        while self._waits and not self.is_missing and not self._has_all() and self._now_s() < until_s:
            await asyncio.sleep(_POLL_S)
        if self._commits:
            self._log.fail(InfraError(f"stopped without the standby, which lacks {len(self._commits)} commits"))

    def _has_all(self) -> bool:
        return not self._commits and self._log.is_idle

    def _copy_for(self, session: str) -> asyncio.Future[msg.FollowReply]:
        """The reply with a copy of the database for a standby without one, which gets the same one if it asks again."""
        if self._made is None or self._made[0] != session or (self._made[1].done() and self._made[1].exception()):
            self._made = session, asyncio.ensure_future(self._make_copy(session))
        return self._made[1]

    async def _make_copy(self, session: str) -> msg.FollowReply:
        note = ("INSERT OR REPLACE INTO meta VALUES ('followed', ?)", (str(self.epoch),))

        def mark() -> None:  # the standby gets the commits after these
            self._follower, self._waits, self._copied = session, True, self._number

        self._follower = ""
        await self._log.copy(self._copy, note, mark)
        size = self._copy.stat().st_size
        return msg.FollowReply(self._run_id, self.epoch, self._session, self._copied, size)

    def _acknowledge(self, number: int) -> None:
        while self._commits and self._commits[0][0] <= number:
            _, _, done = self._commits.popleft()
            if done is not None and not done.done():
                done.set_result(None)


def _piece(path: Path, offset: int) -> bytes:
    """At most `_PIECE_BYTES` of a file from `offset` on."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_PIECE_BYTES)
    except FileNotFoundError:
        return b""


# --- the other side


async def _to_the_end(function: Callable[..., object], *values: object) -> None:
    """Call the function in a thread, and wait for it also when this task is cancelled: it uses an open connection."""
    job = asyncio.ensure_future(asyncio.to_thread(function, *values))
    try:
        await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait([job])
        raise


class LogFollower:
    """The copy of another store's log in the folder of this one."""

    def __init__(self, run_dir: Path, peer: RawClient, takeover_s: float, say: Callable[[str], None]) -> None:
        self._paths, self._peer, self._takeover_s, self._say = RunPaths(run_dir), peer, takeover_s, say
        self._run_id, self._epoch, self._follows = "", 0, False
        self._session, self._after, self._last = "", 0, ""
        if self._paths.database.exists():
            with contextlib.closing(database.connected(self._paths.database)) as connection:
                database.prepare(connection, self._paths.database)
                self._note(database.meta(connection))

    async def epoch_of_peer(self, run_id: str, epoch: int) -> int:
        """The epoch in which the other store serves; 0 if it serves nothing or is not reached."""
        try:
            return (await self._call(msg.FollowCall(run_id, epoch, probe=True))).epoch
        except InfraError as error:
            self._report(f"the other store does not serve ({error})")
            return 0

    async def stand_by(self, *, is_first: bool) -> bool:
        """Follow the other store while it serves. True: serve; False: it has ended in order.

        Without a log of its own the second one waits for the other store. The first one begins the run if it has not
        reached another store for twice the silence of a takeover: its disk may be new, and the other one serve soon.
        """
        began_s = time.monotonic()
        with contextlib.closing(database.locked(self._paths.store_lock)):
            while True:
                served = await self.epoch_of_peer(self._run_id, self._epoch)
                if served and (served >= self._epoch or self._follows):
                    break
                if self._epoch and not self._follows:
                    return True
                if self._follows:
                    break
                if is_first and time.monotonic() - began_s > 2 * self._takeover_s:
                    return True
                await asyncio.sleep(_LOOK_S)
            if not await self._follow():
                return False
            await asyncio.to_thread(self._take_over)
        return True

    async def _follow(self) -> bool:
        """Copy commits until the other store is silent (True) or has ended (False)."""
        connection: sqlite3.Connection | None = None
        heard_s, failures = time.monotonic(), 0
        try:
            while True:
                if connection is None and self._follows:
                    connection = database.connected(self._paths.database)
                size = self._paths.metrics.stat().st_size if self._paths.metrics.exists() else 0
                call = msg.FollowCall(
                    self._run_id, self._epoch, self._session, self._after, metrics=size, wait_s=_WAIT_S
                )
                try:
                    reply = await self._call(call)
                    if reply.size >= 0:
                        if connection is not None:
                            connection.close()
                        connection = None
                        await self._fetch(reply)
                        heard_s, failures = time.monotonic(), 0
                        continue
                except InfraError as error:
                    failures += 1
                    silent_s = time.monotonic() - heard_s
                    if self._follows and failures >= _FAILURES and silent_s >= self._takeover_s:
                        self._report(f"takes over: the other store has been silent for {silent_s:.0f} s ({error})")
                        return True
                    await asyncio.sleep(_RETRY_S)
                    continue
                heard_s, failures = time.monotonic(), 0
                if not reply.session:  # it makes the copy
                    continue
                assert connection is not None, "a store sends commits only after its copy"
                for body in reply.commits:
                    await _to_the_end(commit, connection, wire.decode(body, list[Statement]), None)
                    self._after += 1
                if reply.metrics:
                    with self._paths.metrics.open("ab") as rows:
                        rows.write(reply.metrics)
                if reply.ended:
                    with contextlib.suppress(InfraError):  # it waits for this, but not long
                        await self._call(msgspec.structs.replace(call, after=self._after, wait_s=0.0))
                    return False
        finally:
            if connection is not None:
                connection.close()

    async def _fetch(self, reply: msg.FollowReply) -> None:
        """Replace the database by the copy that the other store has made."""
        session = reply.session
        with disk.replaced(self._paths.database) as path:
            with path.open("wb") as file:
                while (offset := file.tell()) < reply.size:
                    piece = (await self._call(msg.FollowCall(self._run_id, self._epoch, session, offset=offset))).piece
                    if not piece:
                        raise InfraError("the other store has removed its copy")
                    file.write(piece)
            disk.sync(path)
            for suffix in ("-wal", "-shm"):
                self._paths.database.with_name(self._paths.database.name + suffix).unlink(missing_ok=True)
        disk.sync_folder(self._paths.folder)
        self._paths.metrics.unlink(missing_ok=True)
        with contextlib.closing(database.connected(self._paths.database)) as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('follows', '1')")
            self._note(database.meta(connection))
        self._session, self._after = session, reply.after
        self._report(f"follows the other store in epoch {self._epoch}: {reply.size:,} bytes copied")

    def _take_over(self) -> None:
        with contextlib.closing(database.connected(self._paths.database)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DELETE FROM meta WHERE key = 'follows'")
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (str(self._epoch + 1),))
            connection.execute("COMMIT")

    def _report(self, text: str) -> None:
        """Print a change of what this store does, once."""
        if text != self._last:
            self._last = text
            self._say(text)

    def _note(self, meta: dict[str, str]) -> None:
        self._run_id, self._epoch = meta["run_id"], int(meta.get("epoch", 1))
        self._follows = meta.get("follows") == "1"

    async def _call(self, call: msg.FollowCall) -> msg.FollowReply:
        """One attempt. InfraError if the other store does not answer; ConfigError if it has another run."""
        try:
            body = await self._peer.call("Follow", wire.encode(call), call.wait_s + _CALL_S, patience_s=0.0)
        except Unauthorized:
            raise
        except StoreRefusal as error:
            remedy = "Give both stores folders of the same run, or the second one an empty folder."
            raise ConfigError("RUN", str(self._paths.folder), str(error), remedy) from error
        return wire.decode(body, msg.FollowReply)
