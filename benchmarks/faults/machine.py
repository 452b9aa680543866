"""Isolation for the fault benchmarks: a mount and network namespace, a small file system, limits, network cuts.

As root on Linux `enter` gives this process and its later children separate namespaces, with a tmpfs of `SIZE_MB` for
the run's folder. Nothing outside changes. Elsewhere `enter` returns the reason why this is impossible, and the faults
that need it are skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

SIZE_MB = 384
_NEW_MOUNTS, _NEW_NETWORK = 0x20000, 0x40000000
_PRIVATE, _RECURSIVE, _BIND, _REMOUNT, _READ_ONLY, _DETACH = 1 << 18, 1 << 14, 4096, 32, 1, 2
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_SEIZE, _INTERRUPT, _DETACH_TRACED, _ANY_THREAD = 0x4206, 0x4207, 17, 0x40000000
_PIDS = Path("/sys/fs/cgroup/pids")


class Refused(Exception):
    """The machine does not allow it; the message is the reason."""


def enter(folder: Path) -> str:
    """Enter separate namespaces and mount the small file system on `folder`; return the reason if that is refused."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "namespaces need root on Linux"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_NETWORK) != 0:
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    try:
        _mount(None, Path("/"), None, _PRIVATE | _RECURSIVE, None)
        set_loopback(True)
        small_disk(folder, SIZE_MB)
    except OSError as error:
        return str(error)
    return ""


def small_disk(folder: Path, size_mb: int) -> None:
    """Mount a file system of this size on `folder`, in this process's mount namespace."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("tmpfs", folder, "tmpfs", 0, f"size={size_mb}m")


def leave(folder: Path) -> None:
    """Unmount the small file system, so that its folder can be removed."""
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(folder), _DETACH)


def _mount(source: str | None, target: Path, kind: str | None, flags: int, data: str | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [None if word is None else os.fsencode(word) for word in (source, str(target), kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), None if data is None else data.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")


def set_loopback(up: bool) -> None:
    """Raise or cut the only network of this namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _GET_FLAGS, name))[1]
        flags = flags | _UP if up else flags & ~_UP
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags))


@contextlib.contextmanager
def network_cut() -> Iterator[None]:
    """No byte passes between any two processes of the run; connections stay open."""
    set_loopback(False)
    try:
        yield
    finally:
        set_loopback(True)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make `folder` read-only for files that are opened during the block.

    A mount whose files are open for writing cannot be made read-only, so a read-only view is mounted over it. Files
    that were open before remain writable, and so do file systems that are mounted below.
    """
    _mount(str(folder), folder, None, _BIND | _RECURSIVE, None)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        _mount(None, folder, None, _BIND | _REMOUNT | _READ_ONLY, None)
        yield
    finally:
        libc.umount2(os.fsencode(folder), _DETACH)


def fill(folder: Path, seconds: float) -> int:
    """Fill the file system of `folder` again and again for `seconds`; return the bytes written."""
    path, taken = folder / "filler", 0
    until = time.monotonic() + seconds
    try:
        with path.open("wb") as file:
            while time.monotonic() < until:
                state = os.statvfs(folder)
                room = state.f_bavail * state.f_frsize
                if room:
                    with contextlib.suppress(OSError):
                        os.posix_fallocate(file.fileno(), taken, room)
                        taken += room
                time.sleep(0.1)
    finally:
        path.unlink(missing_ok=True)
    return taken


@contextlib.contextmanager
def limited(process: psutil.Process, resource: int, value: int) -> Iterator[None]:
    """Set the process's soft limit to `value` during the block."""
    soft, hard = process.rlimit(resource)
    process.rlimit(resource, (value, hard))
    try:
        yield
    finally:
        with contextlib.suppress(psutil.Error):
            process.rlimit(resource, (soft, hard))


@contextlib.contextmanager
def threads_stopped(process: psutil.Process, names: Collection[str]) -> Iterator[None]:
    """Stop the threads of a child with one of the `names` during the block. Raises Refused if it cannot.

    The kernel stops them for a tracer (ptrace), which is the calling thread. The process can be waited for only after
    the block.
    """
    libc, stopped = ctypes.CDLL(None, use_errno=True), []
    try:
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            if (task / "comm").read_text().strip() in names:
                for request in (_SEIZE, _INTERRUPT):
                    if libc.ptrace(request, int(task.name), None, None) != 0:
                        raise Refused(f"ptrace: {os.strerror(ctypes.get_errno())}")
                stopped.append(int(task.name))
        if not stopped:
            raise Refused(f"no thread has one of the names {', '.join(names)}")
        yield
    finally:
        for thread in stopped:
            if libc.ptrace(_DETACH_TRACED, thread, None, None) != 0:
                with contextlib.suppress(ChildProcessError):  # it has ended: its tracer must take note of that
                    os.waitpid(thread, _ANY_THREAD)


@contextlib.contextmanager
def no_more_tasks(process: psutil.Process) -> Iterator[None]:
    """Let the process start neither threads nor processes. Raises Refused where its limits do not bind it."""
    if os.geteuid() != 0:
        with limited(process, psutil.RLIMIT_NPROC, 1):
            yield
        return
    if not (_PIDS / "cgroup.procs").exists():
        raise Refused("root is not bound by RLIMIT_NPROC, and there is no cgroup of pids")
    lines = Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()
    home = next((line.split(":", 2)[2] for line in lines if line.split(":")[1] == "pids"), "/")
    cell = _PIDS / home.strip("/") / f"chaos-{os.getpid()}-{process.pid}"
    try:
        cell.mkdir()
    except OSError as error:
        raise Refused(f"no cgroup can be made: {error}") from error
    try:
        (cell / "cgroup.procs").write_text(str(process.pid))
        (cell / "pids.max").write_text(str(int((cell / "pids.current").read_text())))
        yield
    finally:
        with contextlib.suppress(OSError):
            (cell / "pids.max").write_text("max")
        for pid in (cell / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (cell.parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            cell.rmdir()
