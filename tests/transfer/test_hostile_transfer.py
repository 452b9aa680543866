"""Publishers, folders and addresses that lie: a typed error in one line, within bounds of memory and time."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxroll import wire
from jaxroll.errors import DigestMismatch, TransferError
from jaxroll.records import Version, VersionRef
from jaxroll.transfer import channels
from jaxroll.transfer import manifest as manifests
from tests.harness.resource_bounds import bounded, check_refusal

VERSION = Version(0, 1)


def packed(leaves: bytes) -> bytes:
    """A manifest of this version with these bytes as its leaves."""
    whole = wire.encode(manifests.Manifest(VERSION, ()))
    assert whole.endswith(b"\x90")
    return whole[:-1] + leaves


def array(count: int, item: bytes = b"", times: int = 0) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + item * times


def leaf(name: Any = "w", shape: Any = (4,), dtype: Any = "float32", boxes: Any = None, digests: Any = (1,)) -> bytes:
    boxes = boxes if boxes is not None else (tuple((0, n) for n in shape),)
    return b"\x91" + msgspec.msgpack.encode((name, shape, dtype, boxes, digests))


EMPTY = b"\x95\xa0\x90\xa0\x90\x90"
MANIFESTS = {
    "10**9 leaves announced": packed(array(10**9)),
    "2**32 - 1 leaves announced": packed(array(2**32 - 1, EMPTY, 10)),
    "10**6 leaves": packed(array(10**6, EMPTY, 10**6)),
    "nested": packed(b"\x91" * 100_000),
    "a size of 2**63": packed(leaf(shape=(2**63,))),
    "a negative size": packed(leaf(shape=(-4,), boxes=(((0, 4),),))),
    "a float size": packed(leaf(shape=(4.5,), boxes=(((0, 4),),))),
    "a size beyond memory": packed(leaf(shape=(2**47,))),
    "1000 dimensions": packed(leaf(shape=(1,) * 1000)),
    "overlapping boxes": packed(leaf(boxes=(((0, 3),), ((1, 4),)), digests=(1, 2))),
    "boxes outside": packed(leaf(boxes=(((4, 8),),))),
    "boxes turned round": packed(leaf(boxes=(((4, 0),),))),
    "10**6 boxes": packed(b"\x91\x95\xa1w\x90\xa7float32" + array(10**6, b"\x90", 10**6) + b"\x90"),
    "a name of 10**6 letters": packed(leaf(name="a" * 10**6)),
    "a name above": packed(leaf(name="../../w")),
    "a dtype of objects": packed(leaf(dtype="object")),
    "text that is not UTF-8": packed(leaf().replace(b"\xa1w", b"\xa1\xff")),
    "no manifest": b"\xc1" * 1000,
    "another version": wire.encode(manifests.Manifest(Version(0, 2), ())),
    "no leaves": packed(b"\x90"),
}  # fmt: skip


def refused(data: bytes) -> None:
    announced = VersionRef(VERSION, "tcp", "x:1", wire.digest(data))  # a publisher that lies lies here, too
    with bounded(), pytest.raises(TransferError) as error:
        manifests.check(manifests.decode(data, announced), {"w": np.zeros(4)})
    check_refusal(error.value)


@pytest.mark.parametrize("data", MANIFESTS.values(), ids=MANIFESTS)
def test_a_hostile_manifest_is_refused(data: bytes) -> None:
    refused(data)


def test_many_boxes_are_compared_within_bounds() -> None:
    boxes = tuple(((row, row + 1), (0, 4)) for row in range(8000))
    with bounded():
        assert manifests.covers_once(boxes, (8000, 4))
        assert not manifests.covers_once((*boxes[:-1], boxes[0]), (8000, 4))


@pytest.fixture
def liar(kit) -> Callable[..., str]:
    """Serve prepared bytes to one reader, some at a time; the address."""

    def serve(*pieces: bytes, pause_s: float = 0.0, forever: bytes = b"") -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        stopping = threading.Event()

        def work() -> None:
            with contextlib.suppress(OSError):
                sock, _ = listening.accept()
                with sock:
                    sock.recv(1 << 16)
                    for piece in pieces:
                        sock.sendall(piece)
                        stopping.wait(pause_s)
                    while forever and not stopping.is_set():
                        sock.sendall(forever)
                        stopping.wait(pause_s)
                    stopping.wait(20)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()

        def close() -> None:
            stopping.set()
            listening.close()
            thread.join(10)

        kit.stack.callback(close)
        return f"127.0.0.1:{listening.getsockname()[1]}"

    return serve


def fetch(kit, announced: VersionRef, limit_s: float = 5.0) -> TransferError:
    """The error of a fetch, which must be typed and bounded."""
    target, shapes = kit.shardings((1, 1, 2), "sampler"), kit.abstract(kit.shapes)
    with bounded(None), pytest.raises(TransferError) as error:  # not counted: tracemalloc and C++ threads do not mix
        kit.receiver(deadline_s=limit_s).fetch(announced, target, shapes)
    check_refusal(error.value)
    return error.value


def test_a_stream_that_never_ends_ends_at_the_deadline(kit, liar) -> None:
    slow = liar(channels.frame(channels.ManifestReply(VERSION, 1 << 20)), pause_s=0.05, forever=b"x")
    error = fetch(kit, VersionRef(VERSION, "tcp", slow, "0" * 40), limit_s=1.0)  # all of it would take 14 hours
    assert "not done within 1 s" in str(error)


@pytest.mark.parametrize("size", [-1, -(2**62), 2**40, 2**63])
def test_a_manifest_of_an_impossible_size_is_refused(kit, liar, size: int) -> None:
    fetch(kit, VersionRef(VERSION, "tcp", liar(channels.frame(channels.ManifestReply(VERSION, size))), "0" * 40))


def test_a_refusal_that_fills_the_screen_is_one_line(kit, liar) -> None:
    answer = channels.frame(channels.RefusedReading("gone", "no\x1b[2J\n" * 100_000))
    fetch(kit, VersionRef(VERSION, "tcp", liar(answer), "0" * 40))


def test_the_digest_of_another_version_is_seen(kit) -> None:
    publisher = kit.publisher()
    one, two = (publisher.offer(kit.host_snapshot(Version(0, step), kit.values(step))) for step in (1, 2))
    mixed = VersionRef(one.version, one.channel, one.address, two.manifest_digest)
    assert isinstance(fetch(kit, mixed), DigestMismatch)


@pytest.mark.parametrize(
    "address",
    ["", "nowhere", ":1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:99999", "127.0.0.1:²", "127.0.0.1:-1", "a\0b:1",
     f"127.0.0.1:{'9' * 5000}", f"{'a' * 70}.example:1", "é" * 300 + ":1", "[::1:1", "..:1", "x\n:1"],
)  # fmt: skip
def test_an_invalid_address_is_refused(kit, address: str) -> None:
    fetch(kit, VersionRef(VERSION, "tcp", address, "0" * 40))


# --- folders of the tensorstore channel


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _metadata(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


FOLDERS: dict[str, Callable[[Path], None]] = {
    "a manifest of 1 TB": lambda folder: _replace(folder / "manifest.msgpack", _sparse),
    "a manifest that is a pipe": lambda folder: _replace(folder / "manifest.msgpack", os.mkfifo),
    "a manifest that is a folder": lambda folder: _replace(folder / "manifest.msgpack", os.mkdir),
    "a manifest that is a device": lambda folder: _replace(
        folder / "manifest.msgpack", lambda path: path.symlink_to("/dev/zero")
    ),
    "no metadata": lambda folder: (folder / "embed" / "zarr.json").unlink(),
    "metadata that is not JSON": lambda folder: (folder / "embed" / "zarr.json").write_text("{"),
    "metadata that nests": lambda folder: (folder / "embed" / "zarr.json").write_text("[" * 10_000),
    "another shape": lambda folder: _metadata(folder / "embed" / "zarr.json", shape=[2**40, 2**20]),
    "other chunks": lambda folder: _metadata(
        folder / "embed" / "zarr.json",
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [2**15, 2**15]}},
    ),
    "other codecs": lambda folder: _metadata(
        folder / "embed" / "zarr.json",
        codecs=[{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip", "configuration": {}}],
    ),
    "another version": lambda folder: _metadata(folder / "embed" / "zarr.json", attributes={"version": "9.9"}),
    "attributes of another kind": lambda folder: _metadata(folder / "embed" / "zarr.json", attributes={"version": [1]}),
}  # fmt: skip


@pytest.mark.parametrize("make", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_that_no_publisher_wrote_is_refused(kit, make: Callable[[Path], None]) -> None:
    announced = kit.publisher("tensorstore").offer(kit.host_snapshot(VERSION, kit.values(0)))
    make(kit.folder / "transfer" / str(VERSION))
    fetch(kit, announced)


@pytest.mark.parametrize(
    "address", ["", "nowhere", "file:///no/such/folder", "code://x", "file://\0", "http://127.0.0.1:1/"]
)
def test_a_path_that_is_not_a_folder_is_refused(kit, address: str) -> None:
    fetch(kit, VersionRef(VERSION, "tensorstore", address, "0" * 40))
