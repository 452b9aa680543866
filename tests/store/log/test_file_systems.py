"""The mount that holds a folder, and the file systems that may hold a log: golden mount tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxroll.disk import LOCAL_FUSE, NETWORK, is_remote, mount_of, mounts, unfit

LAPTOP = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 27 0:30 / /home/ann/My\040Drive rw,nosuid - fuse.rclone drive: rw,user_id=1000
32 27 0:31 / /mnt/c rw,noatime - 9p C:\134 rw,dirsync,aname=drvfs
33 27 8:1 / /media/stick rw - fuseblk /dev/sdb1 rw
34 27 0:40 / /tmp rw - tmpfs tmpfs rw
"""
# A cluster node: home on NFS with a local scratch mounted inside it, a project on Lustre bound into home.
CLUSTER = """
20 1 8:2 / / rw - xfs /dev/sda2 rw
21 20 0:50 / /home rw shared:5 - nfs4 filer:/export/home rw,vers=4.2,addr=10.0.0.1
22 21 259:1 / /home/ann/scratch rw - ext4 /dev/nvme0n1 rw
23 20 0:60 / /lustre rw master:1 - lustre mgs@tcp:/work rw,flock
24 21 0:60 /ann /home/ann/project rw - lustre mgs@tcp:/work rw,flock
25 22 0:61 / /home/ann/scratch/bucket rw - fuse.gcsfuse bucket rw
26 20 0:62 / /srv rw - cifs //filer/srv rw
27 26 259:1 /srv /srv/local rw - ext4 /dev/nvme0n1 rw
"""
# A container: overlay root, a volume bound over a folder, and a mount that was covered by a later one above it.
CONTAINER = """
500 400 0:70 / / rw - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w
501 500 0:71 / /data/old rw - nfs filer:/old rw
502 500 8:16 /pods/7 /data rw - ext4 /dev/sdb rw
503 500 0:72 / /stacked rw - ext4 /dev/sdc rw
504 503 0:73 / /stacked rw - fuse.sshfs far:/home rw
505 500 0:74 / /oddly rw - fuse.fuse-overlayfs fuse-overlayfs rw
"""


@pytest.mark.parametrize(
    ("table", "path", "point", "kind"),
    [
        (LAPTOP, "/home/ann/runs", "/", "ext4"),
        (LAPTOP, "/home/ann/My Drive/runs", "/home/ann/My Drive", "fuse.rclone"),
        (LAPTOP, "/home/ann/My Drives", "/", "ext4"),
        (LAPTOP, "/mnt/c/runs", "/mnt/c", "9p"),
        (LAPTOP, "/media/stick", "/media/stick", "fuseblk"),
        (LAPTOP, "/", "/", "ext4"),
        (CLUSTER, "/home/ann/runs", "/home", "nfs4"),
        (CLUSTER, "/home/ann/scratch/runs", "/home/ann/scratch", "ext4"),
        (CLUSTER, "/home/ann/scratch/bucket/runs", "/home/ann/scratch/bucket", "fuse.gcsfuse"),
        (CLUSTER, "/home/ann/project", "/home/ann/project", "lustre"),
        (CLUSTER, "/srv/local/run", "/srv/local", "ext4"),
        (CLUSTER, "/srv/locals", "/srv", "cifs"),
        (CONTAINER, "/work/run", "/", "overlay"),
        (CONTAINER, "/data/old/run", "/data", "ext4"),
        (CONTAINER, "/stacked/run", "/stacked", "fuse.sshfs"),
        (CONTAINER, "/oddly/run", "/oddly", "fuse.fuse-overlayfs"),
    ],
)
def test_the_mount_of_a_path_and_whether_it_may_hold_a_log(table: str, path: str, point: str, kind: str) -> None:
    found = mount_of(path, mounts(table))
    assert found is not None and (found.point, found.kind) == (point, kind)
    local = kind in ("ext4", "overlay", "fuseblk", "fuse.fuse-overlayfs", "xfs", "tmpfs")
    why = unfit(Path(path), table)
    assert (why == "") is local
    assert local or (point in why and kind in why)


def test_the_kinds() -> None:
    assert all(map(is_remote, NETWORK)) and not any(map(is_remote, LOCAL_FUSE))
    assert all(map(is_remote, ("fuse", "fuse.s3fs", "fuse.glusterfs", "fuse.unheard_of")))
    assert not any(map(is_remote, ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "apfs", "nsfs")))


def test_an_empty_or_strange_table_says_nothing() -> None:
    assert unfit(Path("/run"), "") == ""
    assert unfit(Path("/run"), "what is this\n1 2\n- - -\n") == ""
    assert mount_of("/a", mounts("7 6 0:1 / /a rw - nfs s:/ rw")) is not None, "a table without a root still says it"


def test_this_machine_is_read() -> None:
    table = Path("/proc/self/mountinfo").read_text()
    assert mount_of("/", mounts(table)) is not None
    assert mount_of("/proc/self", mounts(table)).kind == "proc"  # type: ignore[union-attr]
