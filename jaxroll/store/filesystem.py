"""Which file system a folder is on, and whether a log may live there: read from the text of /proc/self/mountinfo.

SQLite's WAL and its locks hold between processes of one machine. On a network file system two stores on two machines
would both believe to be the only one, and an acknowledged `fsync` may sit in a cache of the server: they are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")

NETWORK = frozenset({
    "nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "9p", "afs", "coda", "ceph", "lustre", "gpfs",
    "beegfs", "panfs", "pvfs2", "orangefs", "glusterfs", "ocfs2", "gfs", "gfs2", "virtiofs", "vboxsf", "vmhgfs",
    "prl_fs",
})  # fmt: skip
# What stands behind FUSE is mostly a server (sshfs, gcsfuse, s3fs, rclone, …); these are local.
LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.encfs", "fuse.gocryptfs",
                        "fuse.zfs", "fuse.ntfs-3g", "fuse.exfat", "fusectl"})  # fmt: skip


@dataclass(frozen=True)
class Mount:
    """One line of the mount table."""

    id: int
    parent: int
    point: str
    kind: str
    source: str


def unfit(path: Path, mountinfo: str) -> str:
    """Why no log may be kept at `path`, by the text of a mount table; '' when it may. `path` has no links in it."""
    mount = mount_of(str(path), mounts(mountinfo))
    if mount is None or not is_remote(mount.kind):
        return ""
    return (
        f"{path} is on {mount.source} ({mount.kind}), mounted at {mount.point}: on a network file system neither the "
        "lock on the run nor an acknowledged write can be relied on. Put the run on a local disk or a block volume "
        "(--run=/local/path) and copy it away afterwards."
    )


def is_remote(kind: str) -> bool:
    """Whether files of this file system type may be served by another machine."""
    return kind in NETWORK or (kind.startswith("fuse") and kind not in LOCAL_FUSE)


def mounts(mountinfo: str) -> list[Mount]:
    """The mounts in order of the table; lines that are no mounts are left out."""
    found = []
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        words, kinds = fields.split(), tail.split()
        if len(words) >= 5 and len(kinds) >= 2 and words[0].isdecimal() and words[1].isdecimal():
            found.append(Mount(int(words[0]), int(words[1]), _unescaped(words[4]), kinds[0], _unescaped(kinds[1])))
    return found


def mount_of(path: str, table: Sequence[Mount]) -> Mount | None:
    """The mount that holds `path`, walked as the kernel walks it: from the root into the first mount it meets.

    A mount that was covered later, by another at its point or above it, is never met. None in an empty table.
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
    """Blanks, tabs, newlines and backslashes stand in the table as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), word)
