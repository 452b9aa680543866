"""Small disks for tests: full, full for a time, or read-only from one moment on. They need root on Linux.

The calling thread first gets its own mount namespace, which its children inherit. No other process of the machine sees
the mounts, and they end with the test process at the latest. Threads that started earlier do not see them either: they
write to the folder under the mount. Therefore tests/conftest.py calls `own_mounts` before a library starts threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x00020000, 0x4000, 1 << 18  # linux/sched.h, sys/mount.h
_PIECE = b"\0" * 65536


class Disk:
    """A file system at `path`, stored in the file `image` if there is one."""

    def __init__(self, path: Path, image: Path | None = None) -> None:
        self.path, self._image = path, image
        self._filler = path / ".filler"

    def fill(self, leave_bytes: int = 0) -> None:
        """Fill the disk up to `leave_bytes`."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            size = len(_PIECE)
            while size >= 1:
                try:
                    file.write(_PIECE[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 16
        if leave_bytes:
            os.truncate(self._filler, max(0, self._filler.stat().st_size - leave_bytes))

    def free(self) -> None:
        """Free the space again."""
        self._filler.unlink(missing_ok=True)

    def fail(self, writer: int) -> None:
        """Make a `failing_disk` read-only at once, as the kernel does after an error (`errors=remount-ro`).

        The process `writer` and its descendants are stopped meanwhile. Linux 6.18 may answer OK to an fsync that is
        under way and lose its data: 12 times in 150 for a bare loop of writes, never in 150 if the loop is stopped.
        """
        with _stopped(writer):
            subprocess.run(["mount", "-o", "remount,abort", str(self.path)], timeout=30, check=True)

    def repair(self) -> None:
        """Check a failed disk and mount it again; no process may use it."""
        subprocess.run(["umount", str(self.path)], timeout=30, check=True)
        subprocess.run(["e2fsck", "-fy", str(self._image)], capture_output=True, timeout=30, check=False)
        subprocess.run(["mount", "-o", "loop", str(self._image), str(self.path)], timeout=30, check=True)


@contextlib.contextmanager
def small_disk(path: Path, size_mb: int) -> Iterator[Disk]:
    """A disk of `size_mb` in memory at the folder `path`, which is created."""
    _needown_mounts()
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(path))
    try:
        yield Disk(path)
    finally:
        _unmount(path)


@contextlib.contextmanager
def failing_disk(path: Path, image: Path, size_mb: int) -> Iterator[Disk]:
    """An ext4 disk in the file `image` at the new folder `path`; its `fail` works while files are open."""
    _needown_mounts()
    if shutil.which("mkfs.ext4") is None or not os.path.exists("/dev/loop-control"):
        pytest.skip("needs mkfs.ext4 and loop devices")
    with image.open("wb") as file:
        file.truncate(size_mb * 2**20)
    _run("mkfs.ext4", "-qF", str(image))
    path.mkdir(parents=True, exist_ok=True)
    _mount("-o", "loop", str(image), str(path))
    try:
        yield Disk(path, image)
    finally:
        _unmount(path)


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """Stop the process and its descendants: none of their threads is in a system call that writes."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    try:
        for one in family:
            one.suspend()
        deadline_s = time.monotonic() + 30
        while any(map(_is_running, family)):
            assert time.monotonic() < deadline_s, "the processes do not stop"
            time.sleep(0.001)
        yield
    finally:
        for one in family:
            one.resume()


def _is_running(process: psutil.Process) -> bool:
    try:
        stats = [stat.read_text() for stat in Path("/proc", str(process.pid), "task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
        return True
    return any(stat.rpartition(")")[2].split()[0] not in "TZX" for stat in stats)


@functools.cache
def own_mounts() -> str:
    """Give this thread its own mounts; return the reason if that is impossible, else ''."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        return "no mount namespaces here (not Linux)"
    if libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        return f"a mount namespace is refused here ({os.strerror(ctypes.get_errno())}): root is needed"
    return ""


def _needown_mounts() -> None:
    if why := own_mounts():
        pytest.skip(why)


def _mount(*words: str) -> None:
    _run("mount", *words)


def _unmount(path: Path) -> None:
    _run("umount", "--lazy", str(path))


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")
