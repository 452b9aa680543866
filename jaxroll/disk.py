"""Durable files, network file systems, messages for full or broken disks, and bounded reading of untrusted files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from jaxroll.errors import ConfigError, DataError, one_line

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BROKEN = frozenset({errno.EROFS, errno.EIO})
_LOCKS = Path("/proc/locks")
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
# Messages of SQLite and tensorstore, which raise no OSError.
_FULL_MESSAGES = ("disk is full", "no space left", "quota exceeded")
_LOCKED_MESSAGE = "database is locked"
_BROKEN_MESSAGES = ("read-only file system", "readonly database", "i/o error", "input/output error")


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A draft next to `path`, renamed over it at the end: readers see the old file or the whole new one.

    If the block raises, the draft is removed and `path` stays as it is.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        os.replace(draft, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        name_file(error, path)
        raise


def name_file(error: BaseException, path: Path) -> None:
    """Add `path` to an OSError without a file name, as a write to a full disk raises it."""
    if isinstance(error, OSError):
        error.filename = error.filename or str(path)


def replace_text(path: Path, text: str, *, synced: bool = False) -> None:
    """Write `text` to the file `path` at once (see `replaced`); `synced` makes the content durable before the rename.

    Without the sync, the file may be empty after a power failure.
    """
    with replaced(path) as draft:
        draft.write_text(text, encoding="utf-8")
        if synced:
            sync(draft)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which is made and stays; errors as for `lock`.

    The lock ends with the block, or with the process.
    """
    with path.open("ab") as file:
        lock(file)
        yield


def lock(file: IO[Any]) -> None:
    """Lock an open file until it is closed. BlockingIOError at once if another process holds the lock.

    ConfigError if its file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        path = Path(file.name)
        reason = f"{path.name} cannot be locked: its file system has no locks ({error.strerror})"
        remedy = "Name a folder on a local disk or a block volume."
        raise ConfigError("RUN", str(path.parent), reason, remedy) from error


def lock_holder(path: Path) -> int | None:
    """The process of this machine that holds the lock `path`; None if none does, or if it cannot be known.

    This reads the kernel's table: taking the lock, even for a moment, could refuse a process that needs it just then.
    """
    try:
        inode = path.stat().st_ino
        lines = _LOCKS.read_text(encoding="utf-8").splitlines()
        fields = [line.split() for line in lines if "->" not in line]  # without those that wait
        return next((int(words[4]) for words in fields if words[1] == "FLOCK" and words[5].endswith(f":{inode}")), None)
    except (OSError, ValueError, IndexError):
        return None


def check_new_folder(out: Path) -> None:
    """Raise ConfigError if `out` exists and is not an empty folder."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("OUT", str(out), "it exists already", "Name a new folder.")


def sync_folder(folder: Path, *, reread: bool = False) -> None:
    """Sync `folder`, everything in it, and its name in the parent folder to disk.

    With `reread`, the next reads of its files come from the disk, where the system drops the pages. Linux reports an
    error of writing once; a later sync succeeds, and the memory of the system still holds what the disk does not.
    """
    for path in (*folder.rglob("*"), folder, folder.parent):
        sync(path, reread=reread)


def sync(path: Path, *, reread: bool = False) -> None:
    """Sync the content of one file, or the names in one folder, to disk; `reread` as for `sync_folder`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if reread and hasattr(os, "posix_fadvise"):  # macOS has none, and some file systems refuse it
            with contextlib.suppress(OSError):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def remedy(error: BaseException, folder: Path) -> str:
    """A sentence that names the disk of `folder`, or the lock, and the remedy; '' if `error` is about neither."""
    number, text = error.errno if isinstance(error, OSError) else None, str(error).lower()
    if _LOCKED_MESSAGE in text:
        return "Another program, such as an editor of databases, has locked the file: end that one, then start again."
    is_full = number in _FULL or any(message in text for message in _FULL_MESSAGES)
    if not is_full and number not in _BROKEN and not any(message in text for message in _BROKEN_MESSAGES):
        return ""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        free = f"{shutil.disk_usage(folder).free // 2**20} MB are free at {folder}: make room"
    except OSError:
        free = f"Make room at {folder}"
    also = "" if is_full else ", or repair or remount that disk (dmesg shows the kernel's messages)"
    return f"{free}{also}, then start it again; no acknowledged data is lost."


_MISFITS = frozenset({
    errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
})  # fmt: skip


_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_RAISE = "Raise the limit of open files (`ulimit -n`) or end other programs, then start again."
_LOG_FILES = 8  # more than a log and its connections have open


def few_descriptors() -> str:
    """The remedy if this process cannot open the files of a log for lack of descriptors, which SQLite does not say."""
    opened: list[int] = []
    try:
        for _ in range(_LOG_FILES):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return _RAISE if error.errno in _NO_DESCRIPTOR else ""
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return ""


def misfit(error: OSError) -> str:
    """The reason and the remedy if `error` is due to what is at a path, or to the limit of open files; else ''."""
    if error.errno in _NO_DESCRIPTOR:
        return f"{'' if error.filename is None else f'{str(error.filename)!r}: '}{error.strerror}. {_RAISE}"
    if error.errno not in _MISFITS or error.filename is None:
        return ""
    path = str(error.filename2 or error.filename)
    do = "Give a shorter one" if error.errno == errno.ENAMETOOLONG else "Move it away or change its permissions"
    return f"{path!r}: {error.strerror}. {do}, then start again."


# --- file systems on which a log may live, read from /proc/self/mountinfo
#
# SQLite's WAL and its locks work between processes of one machine. On a network file system two stores on two machines
# could both open the run, and the server may cache an acknowledged `fsync`. So such file systems are refused.

MOUNTINFO = Path("/proc/self/mountinfo")

NETWORK = frozenset({
    "nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "9p", "afs", "coda", "ceph", "lustre", "gpfs",
    "beegfs", "panfs", "pvfs2", "orangefs", "glusterfs", "ocfs2", "gfs", "gfs2", "virtiofs", "vboxsf", "vmhgfs",
    "prl_fs",
})  # fmt: skip
# Most FUSE file systems are remote (sshfs, gcsfuse, s3fs, rclone, …); these are local.
LOCAL_FUSE = frozenset(
    {
        "fuseblk",
        "fuse.fuse-overlayfs",
        "fuse.lxcfs",
        "fuse.mergerfs",
        "fuse.encfs",
        "fuse.gocryptfs",
        "fuse.zfs",
        "fuse.ntfs-3g",
        "fuse.exfat",
        "fusectl",
    }
)


@dataclass(frozen=True)
class Mount:
    """Line of the mount table."""

    id: int
    parent: int
    point: str
    kind: str
    source: str


def unfit(path: Path, mountinfo: str) -> str:
    """The reason why `path` cannot hold a log, by the text of a mount table; '' if it can. `path` contains no links."""
    mount = mount_of(str(path), mounts(mountinfo))
    if mount is None or not is_remote(mount.kind):
        return ""
    return (
        f"{path} is on {mount.source} ({mount.kind}), mounted at {mount.point}: on a network file system neither the "
        "lock on the run nor an acknowledged write can be relied on"
    )


def is_remote(kind: str) -> bool:
    """True if files of this file system type may be served by another machine."""
    return kind in NETWORK or (kind.startswith("fuse") and kind not in LOCAL_FUSE)


def mounts(mountinfo: str) -> list[Mount]:
    """The mounts in the order of the table; malformed lines are skipped."""
    found = []
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        words, kinds = fields.split(), tail.split()
        if len(words) >= 5 and len(kinds) >= 2 and words[0].isdecimal() and words[1].isdecimal():
            found.append(Mount(int(words[0]), int(words[1]), _unescaped(words[4]), kinds[0], _unescaped(kinds[1])))
    return found


def mount_of(path: str, table: Sequence[Mount]) -> Mount | None:
    """The mount that holds `path`, found as the kernel does: from the root into the first mount on the path.

    So mounts that a later mount covers are ignored. None for an empty table.
    """
    ids = {mount.id for mount in table}
    roots = [m for m in table if m.point == "/" and (m.parent not in ids or m.parent == m.id)]
    here = roots[-1] if roots else None
    while here is not None:
        inside = [m for m in table if m.parent == here.id and m.id != here.id and _holds(m.point, path)]
        if not inside:
            return here
        nearest = min(len(m.point) for m in inside)
        here = [m for m in inside if len(m.point) == nearest][-1]
    return max((m for m in table if _holds(m.point, path)), key=lambda m: len(m.point), default=None)


def _holds(point: str, path: str) -> bool:
    return point == "/" or path == point or path.startswith(point + "/")


def _unescaped(word: str) -> str:
    """Decode the octal escapes that the table uses for blanks, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), word)


# --- untrusted files: regular files of bounded size, parsed to a bounded depth
#
# Opening a named pipe waits for a writer, and reading a device may never end, so both are refused. Invalid content
# raises a DataError with a one-line message; an OSError is passed on.

JSON_LIMIT_BYTES = 16 << 20


def opened(path: Path) -> BinaryIO:
    """The regular file at `path`, open for reading. DataError for other kinds of files and for invalid names."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL or a lone surrogate in the name
        raise DataError(f"{str(path)!r} is not the name of a file") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"{path.name} is not a regular file")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """The content of a regular file; DataError when it has more than `limit_bytes`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise DataError(f"{path.name} has {size:,} bytes; at most {limit_bytes:,} are read")
        return file.read(size)  # not `limit_bytes`: read() allocates as many bytes as are requested


def read_text(path: Path, limit_bytes: int = JSON_LIMIT_BYTES) -> str:
    """The UTF-8 text of a regular file, as `read_bytes`."""
    try:
        return read_bytes(path, limit_bytes).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path.name} is not UTF-8 ({error.reason} at byte {error.start})") from error


def read_json(path: Path, limit_bytes: int = JSON_LIMIT_BYTES) -> Any:
    """The JSON value in a regular file, as `read_text` and `parse_json`."""
    return parse_json(read_text(path, limit_bytes), path.name)


def parse_json(text: str | bytes, name: str, *, unique: bool = False) -> Any:
    """The JSON value in `text`. DataError when it is invalid, nests too deep, or (with `unique`) repeats a key."""
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise DataError(f"{name} nests too deep") from error
    except ValueError as error:  # includes UnicodeDecodeError, and numbers with thousands of digits
        raise DataError(f"{name} is not JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:80]!r} occurs twice")
    return found


# --- page headers of Parquet: structs of Thrift's compact protocol (parquet.thrift, PageHeader)

_HEADER_BYTES, _DEEPEST_HEADER = (1 << 10, 64 << 10, 16 << 20), 4  # most headers have less than 100 bytes
_UNCOMPRESSED, _COMPRESSED = 2, 3  # numbers of the fields with the sizes of a page


def parquet_page_sizes(file: BinaryIO, first: int, size: int) -> Iterator[int]:
    """The uncompressed bytes of each page, by its own header, in the column chunk of `size` bytes from offset `first`.

    A reader allocates as many before it decompresses the page. DataError for headers that cannot be read.
    """
    at, end = first, first + size
    while at < end:
        header = body = None
        for longest in _HEADER_BYTES:
            with contextlib.suppress(IndexError):  # the header is longer
                data = os.pread(file.fileno(), min(longest, end - at), at)
                header, body = _compact_struct(data, 0, _DEEPEST_HEADER)
                break
        sizes = [header.get(number, -1) for number in (_UNCOMPRESSED, _COMPRESSED)] if header else [-1]
        if min(sizes) < 0 or body is None:
            raise DataError(f"the page header at byte {at} is damaged")
        yield sizes[0]
        at += body + sizes[1]


def parquet_chunk_bytes(file: BinaryIO, chunk: Any, limit: int) -> int:
    """The uncompressed bytes of a column chunk by its pages' own headers, counted up to `limit`."""
    offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)  # the first is 0 or None if there is none
    total = 0
    for size in parquet_page_sizes(file, min(filter(None, offsets), default=0), chunk.total_compressed_size):
        if (total := total + size) > limit:
            break
    return total


def _compact_struct(data: bytes, at: int, deepest: int) -> tuple[dict[int, int], int]:
    """The integer fields of the struct at `data[at]`, by number, and the offset behind it; IndexError if it is cut."""
    fields, number = dict[int, int](), 0
    while kind := data[at]:
        at, delta, kind = at + 1, kind >> 4, kind & 15
        if delta:
            number += delta
        else:
            number, at = _zigzag(data, at)
        if kind in (4, 5, 6):
            fields[number], at = _zigzag(data, at)
        elif kind == 8:
            length, at = _varint(data, at)
            at += length
        elif kind == 12 and deepest:
            _, at = _compact_struct(data, at, deepest - 1)
        elif kind in (3, 7):
            at += 1 if kind == 3 else 8
        elif kind > 2:  # 1 and 2 are booleans, without data; a page header has no lists
            raise DataError(f"a page header has a field of the kind {kind}")
    return fields, at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        value, shift, at = value | (data[at] & 127) << shift, shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at
    raise DataError("a page header has a number of more than 64 bits")


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


# --- Arrow: metadata of a message (a flatbuffer of the table Message, format/Message.fbs), and values that rows share

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3  # types of a message's header


def arrow_is_compressed(message: bytes) -> bool:
    """True if the buffers after an Arrow message are compressed. `message` is its metadata, a valid flatbuffer."""
    table = int.from_bytes(message[:4], "little")
    kind_at, header_at = _flat_field(message, table, 1), _flat_field(message, table, 2)
    if not kind_at or message[kind_at] not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return False
    batch = _flat_target(message, header_at)
    if message[kind_at] == _DICTIONARY_BATCH:
        batch = _flat_target(message, _flat_field(message, batch, 1))
    return _flat_field(message, batch, 3) != 0


def _flat_field(data: bytes, table: int, number: int) -> int:
    """The place of a field in the table at `table`; 0 if it is not set."""
    rows = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    entry = rows + 4 + 2 * number
    if entry >= rows + int.from_bytes(data[rows : rows + 2], "little"):
        return 0
    offset = int.from_bytes(data[entry : entry + 2], "little")
    return offset and table + offset


def _flat_target(data: bytes, at: int) -> int:
    return at + int.from_bytes(data[at : at + 4], "little")


def arrow_bytes(column: Any) -> int:
    """An upper bound of the bytes of an Arrow array's values when rows share none, as after `to_pylist`.

    DataError for views of lists, run lengths and unions, which are not read.
    """
    import pyarrow
    from pyarrow import compute, types

    kind = column.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        return arrow_bytes(column.storage)
    if types.is_dictionary(kind):
        of = kind.value_type
        if types.is_primitive(of):
            return len(column) * (of.bit_width + 7) // 8
        if types.is_string(of) or types.is_large_string(of) or types.is_binary(of) or types.is_large_binary(of):
            lengths = compute.call_function("binary_length", [column.dictionary]).take(column.indices)
            return compute.call_function("sum", [lengths]).as_py() or 0
        return len(column) * arrow_bytes(column.dictionary)
    if types.is_map(kind):
        return 8 * (len(column) + 1) + arrow_bytes(column.keys) + arrow_bytes(column.items)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return 8 * (len(column) + 1) + arrow_bytes(column.flatten())
    if types.is_struct(kind):
        return sum(map(arrow_bytes, column.flatten()))
    if types.is_string_view(kind) or types.is_binary_view(kind):  # each view of 16 bytes begins with its length
        views = memoryview(column.buffers()[1]).cast("B")[16 * column.offset : 16 * (column.offset + len(column))]
        return sum(views.cast("i")[::4]) + column.nbytes
    if types.is_nested(kind) or types.is_run_end_encoded(kind):
        raise DataError(f"it has a column of the type {one_line(str(kind), 60)}, which is not read")
    return column.nbytes
