"""Fault 7 on the files of a killed store: the log is cut at every byte of its last commit."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxroll import wire
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings
from jaxroll.store.core.machine import Core
from jaxroll.store.core.state import conservation_residual
from jaxroll.store.log.commit_log import Log
from tests.harness.cluster.cluster import Cluster
from tests.harness.cluster.criteria import Row, acknowledged, judge, lost_puts

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
SHAPE = (
    "schedule.groups_per_step=3",
    "schedule.group_size=4",
    "schedule.alpha=1",
    "schedule.steps=100000",
    "store.lease_s=5",
    "store.rpc_deadline_s=3",
)
KILOBYTE: dict[str, Any] = {"tokens_low": 100, "tokens_high": 110}
SMALL_BYTES = 50_000  # a put touches some seven pages of 4 KB
_HEADER, _FRAME_HEADER = 32, 24  # bytes, in SQLite's WAL


@dataclass(frozen=True)
class Wal:
    """The WAL of a killed store: the offsets of its frames, and of its commits (first byte, end)."""

    data: bytes
    frames: tuple[int, ...]
    commits: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, path: Path) -> Wal:
        """Frames up to the first whose salts differ from the header's: it is left over from before a checkpoint."""
        data = path.read_bytes()
        page_bytes = struct.unpack_from(">I", data, 8)[0]
        size, salts = _FRAME_HEADER + page_bytes, data[16:24]
        frames, commits, begun = [], [], _HEADER
        for at in range(_HEADER, len(data) - size + 1, size):
            if data[at + 8 : at + 16] != salts:
                break
            frames.append(at)
            if struct.unpack_from(">I", data, at + 4)[0]:  # the size of the database: only a commit's last frame has it
                commits.append((begun, at + size))
                begun = at + size
        return cls(data, tuple(frames), tuple(commits))


@pytest.mark.parametrize("stride", [4001, pytest.param(1, marks=pytest.mark.soak)])
def test_7_the_log_cut_at_every_byte_of_its_last_commit(
    tmp_path: Path, note: Callable[[Row], None], stride: int
) -> None:
    """With one byte missing, only the last commit is lost. Bytes after the last commit change nothing."""
    with Cluster(tmp_path / "run", *SHAPE) as run:
        run.learner(step_s=0.0)
        run.sampler(seed=7, slots=1, work_s=0.001, **KILOBYTE)  # one put per commit
        run.until_acked(3)
        files, wal = killed_after_a_put(run, tmp_path / "files")
        for role in (*run.samplers(), *run.learners()):
            role.kill()  # they would give up before the last cut
        sampled, settings = run.sampled(), Settings.of(run.config)
        begun, end = wal.commits[-1]
        frames = [at for at in wal.frames if begun <= at < end]
        full, before = recovered_at(files, wal, end, settings), recovered_at(files, wal, begun, settings)
        assert full.state.position > before.state.position
        with cut_to(files, wal, begun) as folder:
            gone = {text.partition(":")[0] for text in lost_puts(folder, sampled)}
        assert gone <= puts_behind(files, before.state.position), "a cut lost more than the commit that it cut"
        edges = {at + shift for at in (*frames, end) for shift in (-1, 0, 1, _FRAME_HEADER)}
        cuts = sorted(cut for cut in {*range(begun, end + 1, stride), *edges} if begun <= cut <= end)
        for cut in cuts:
            expected = full if cut == end else before
            with cut_to(files, wal, cut) as folder:
                assert last_position(folder) == expected.state.position, f"cut at byte {cut} of {begun} to {end}"
        for cut in sorted(edges & {*cuts}):
            core = recovered_at(files, wal, cut, settings)
            assert core.state == (full if cut == end else before).state
            assert conservation_residual(core.state) == 0
        for tail in (b"\0" * 5000, wal.data[begun:end]):  # bytes that a crash may leave after the last commit
            with cut_to(files, wal, end, tail) as folder:
                assert last_position(folder) == full.state.position
                assert lost_puts(folder, sampled) == []
        for role in run.roles.values():
            role.start()
        at = run.acked()
        run.until_acked(at + 2)
        note(judge(run, "7 log cut in its last commit", len(cuts), went_on_from=at))


def killed_after_a_put(run: Cluster, copy: Path) -> tuple[Path, Wal]:
    """Copies of store.db and its WAL after `kill -9`, with a put and little else in the last commit."""
    for _ in range(60):
        sent = len(acknowledged(run.sampled()))
        run.until(lambda sent=sent: len(acknowledged(run.sampled())) > sent + 5, "puts")
        run.store.kill()
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name in ("store.db", "store.db-wal"):
            shutil.copy(run.run_dir / name, copy)
        wal = Wal.of(copy / "store.db-wal")
        if len(wal.commits) >= 2 and wal.commits[-1][1] - wal.commits[-1][0] <= SMALL_BYTES:
            with cut_to(copy, wal, wal.commits[-1][0]) as folder:
                before = last_position(folder)
            if puts_behind(copy, before):
                return copy, wal
        run.store.start()
    pytest.fail("no kill of sixty left a put alone in the last commit")


@contextlib.contextmanager
def cut_to(files: Path, wal: Wal, size_bytes: int, tail: bytes = b"") -> Iterator[Path]:
    """A folder with the database and the first `size_bytes` of its WAL, then `tail`."""
    folder = files.parent / "cut"
    folder.mkdir()
    try:
        shutil.copyfile(files / "store.db", folder / "store.db")
        (folder / "store.db-wal").write_bytes(wal.data[:size_bytes] + tail)
        yield folder
    finally:
        shutil.rmtree(folder)


def recovered_at(files: Path, wal: Wal, size_bytes: int, settings: Settings) -> Core:
    """The state machine from which a store starts if the WAL is `size_bytes` long."""

    async def read(folder: Path) -> Core:
        log = Log(folder)
        core = Core.recovered(settings, log.recovered.state, log.recovered.events, 0.0)
        await log.close()
        return core

    with cut_to(files, wal, size_bytes) as folder:
        return asyncio.run(read(folder))


def last_position(folder: Path) -> int:
    """The position of the newest record of the log; asserts that the log has no holes before it."""
    with contextlib.closing(sqlite3.connect(folder / "store.db")) as db:
        db.execute("PRAGMA synchronous = OFF")  # closing merges the WAL; the copy is discarded
        last, count, first = db.execute("SELECT MAX(position), COUNT(*), MIN(position) FROM log").fetchone()
    assert count == last - first + 1
    return last


def puts_behind(files: Path, position: int) -> set[str]:
    """Keys of the puts that the whole log holds after `position`, in the format of `lost_puts`."""
    copy = files.parent / "whole"
    shutil.copytree(files, copy)
    try:
        with contextlib.closing(sqlite3.connect(copy / "store.db")) as db:
            sql = "SELECT body FROM log WHERE position > ? AND kind = 'put'"
            found = [wire.decode(body, ev.Event) for (body,) in db.execute(sql, (position,))]
            return {f"({put.group}, {put.member}, {put.attempt})" for put in found}
    finally:
        shutil.rmtree(copy)
