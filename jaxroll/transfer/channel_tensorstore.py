"""The tensorstore channel: every leaf a zarr array under PATH/VERSION/, in a folder or an object store.

A version exists when its manifest does: the manifest is written last, in one atomic step (a rename for files, one
object in a store), and removed first. So readers never find the files of a publisher that died while writing, and the
next publisher on the same path removes them. Readers fetch only the chunks that overlap their boxes.

A sender does not know its readers: it removes a version when `keep` newer ones exist, even if a reader still uses it;
the reader then gets VersionGone. One PATH belongs to one run.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import stat
from collections.abc import Sequence
from typing import Any, NoReturn
from urllib.parse import quote, unquote

import numpy as np
import tensorstore as ts

from jaxroll.errors import ConfigError, DigestMismatch, TransferError, VersionGone, VersionMixed, one_line
from jaxroll.records import Version
from jaxroll.rpc.tls import Material
from jaxroll.transfer import channels
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.channels import Deadline, LeafRead, SlicePart, ignore
from jaxroll.transfer.manifest import HostSnapshot, Leaf, Manifest

_MANIFEST = "manifest.msgpack"
_CHUNK_BYTES = 4 << 20
_VERSION_KEY = re.compile(r"(\d+)\.(\d+)/")


_FILE = "file://"


def url_of(path: str | os.PathLike[str]) -> str:
    """The URL of a folder, quoted and ending in a slash; a URL is returned as it is, ending in a slash.

    ConfigError for a folder whose name tensorstore does not support: it reads a backslash as a slash, and needs UTF-8.
    """
    text = os.fspath(path)
    if "://" in text:
        return text.rstrip("/") + "/"
    folder = str(pathlib.Path(text).resolve())
    if "\\" in folder or not folder.isprintable():
        reason = "the tensorstore channel cannot write to a folder with a backslash or an unprintable character"
        raise ConfigError("transfer.path", folder, reason, "Name another folder.")
    return _FILE + quote(folder).rstrip("/") + "/"


def _context() -> ts.Context:
    # No fsync: snapshots are replaced every step and verified by digest, so they need not survive a power failure.
    return ts.Context({"file_io_sync": False})


class TensorstoreSender:
    """A sender that writes snapshots under `path` and keeps the newest `keep` of them."""

    name = "tensorstore"

    sent_bytes = 0  # readers read files

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 2, limit_s: float = 60.0) -> None:
        self._url, self._keep, self._limit_s = url_of(path), keep, limit_s
        self._context = _context()
        deadline = Deadline(limit_s, f"opening {self._url}")
        self._store = _opened(self._url, self._context, deadline)
        self._prune(deadline)

    def hold(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The same pieces."""
        return list(pieces)

    def offer(self, snapshot: HostSnapshot) -> str:
        """Write the snapshot with its manifest and return the URL of the version's folder."""
        deadline = Deadline(self._limit_s, f"writing version {snapshot.version} to {self._url}")
        folder = f"{snapshot.version}/"
        self._remove(folder, deadline)
        arrays = [
            ts.open(_spec(self._url + folder, leaf, snapshot.version), context=self._context)
            for leaf in snapshot.manifest.leaves
        ]
        writes = []
        for array, leaf, pieces in zip(arrays, snapshot.manifest.leaves, snapshot.pieces, strict=True):
            opened = _result(array, deadline)
            whole = manifests.whole(leaf.shape)
            writes += [
                opened[manifests.within(box, whole)].write(piece)
                for box, piece in zip(leaf.boxes, pieces, strict=True)
                if manifests.size_of(box)
            ]
        for write in writes:
            _result(write, deadline)
        _result(self._store.write(folder + _MANIFEST, snapshot.encoded), deadline)
        self._prune(deadline)
        return (self._url + folder).rstrip("/")

    def versions(self) -> tuple[Version, ...]:
        """The versions that can be read, oldest first."""
        return self._versions(Deadline(self._limit_s, f"listing {self._url}"))[0]

    def close(self) -> None:
        """Do nothing: written versions stay for late readers."""

    def _versions(self, deadline: Deadline) -> tuple[tuple[Version, ...], set[Version]]:
        """The complete versions in order, and all versions of which any key exists."""
        complete, some = set(), set()
        for key in _result(self._store.list(), deadline):
            name = key.decode()
            if found := _VERSION_KEY.match(name):
                version = Version(int(found[1]), int(found[2]))
                some.add(version)
                if name == f"{version}/{_MANIFEST}":
                    complete.add(version)
        return tuple(sorted(complete)), some

    def _prune(self, deadline: Deadline) -> None:
        complete, some = self._versions(deadline)
        for version in sorted(some - set(complete[-self._keep :])):
            self._remove(f"{version}/", deadline)

    def _remove(self, folder: str, deadline: Deadline) -> None:
        _result(self._store.delete_range(ts.KvStore.KeyRange(folder + _MANIFEST, folder + _MANIFEST + "\0")), deadline)
        if self._url.startswith(_FILE):
            _remove_folder(pathlib.Path(unquote(self._url.removeprefix(_FILE))) / folder)
        else:
            _result(self._store.delete_range(ts.KvStore.KeyRange(folder, folder[:-1] + "0")), deadline)  # "0" after "/"


class TensorstoreReader:
    """A reader of one version from its folder."""

    verified = False

    def __init__(
        self, address: str, version: Version, token: str, deadline: Deadline, tls: Material | None = None
    ) -> None:
        del token, tls  # the file system or the object store controls access
        self._url, self._version, self._deadline = address.rstrip("/") + "/", version, deadline
        self._context = _context()
        self._store = _opened(self._url, self._context, deadline)

    def close(self) -> None:
        """Do nothing: no connection is held open."""

    def manifest(self) -> bytes:
        """The manifest's bytes, unchecked."""
        _check_size(self._url, self._version)
        found = _result(self._store.read(_MANIFEST), self._deadline)
        if found.state != "value":
            raise VersionGone(f"{self._url} holds no complete version {self._version} (any more)")
        return found.value

    def view(self, manifest: Manifest, leaf: int, source: int) -> None:
        """None: every box must be read."""

    def read(self, manifest: Manifest, parts: Sequence[SlicePart], leaf_read: LeafRead = ignore) -> None:
        """Fill every part. All reads are started at once; tensorstore limits their concurrency."""
        del leaf_read  # they end in any order
        try:
            arrays = self._open({part.leaf for part in parts}, manifest)
            leaves = manifest.leaves
            reads = [
                ts.array(part.into.view(manifests.DTYPES[leaves[part.leaf].dtype])).write(
                    arrays[part.leaf][
                        manifests.within(part.box, manifests.whole(leaves[part.leaf].shape))
                    ].translate_to[(0,) * len(part.box)]
                )
                for part in parts
                if part.into.size
            ]
            for read in reads:
                _result(read, self._deadline)
        except VersionMixed:
            raise
        except TransferError as error:
            self.manifest()  # raises VersionGone when the version was removed during the read
            raise error

    def _open(self, wanted: set[int], manifest: Manifest) -> dict[int, ts.TensorStore]:
        opening = {
            number: ts.open(
                {
                    "driver": "zarr3",
                    "kvstore": f"{self._url}{manifest.leaves[number].name}/",
                    # Required, because other chunk shapes or codecs could make a read allocate any amount of memory.
                    "metadata": _layout(manifest.leaves[number]),
                    "fill_missing_data_reads": False,
                },
                open=True,
                context=self._context,
            )
            for number in sorted(wanted)
        }
        opened = {}
        for number, future in opening.items():
            array, leaf = _result(future, self._deadline), manifest.leaves[number]
            stamp = array.spec().to_json()["metadata"].get("attributes", {}).get("version")
            if stamp != str(self._version):
                raise VersionMixed(f"leaf {leaf.name!r} is of version {stamp}, requested {self._version}")
            if tuple(array.shape) != leaf.shape or array.dtype.name != leaf.dtype:
                raise TransferError(
                    f"leaf {leaf.name!r}: {array.dtype.name} {tuple(array.shape)} is stored, "
                    f"the manifest says {leaf.dtype} {leaf.shape}"
                )
            opened[number] = array
        return opened


def _chunk_shape(leaf: Leaf) -> tuple[int, ...]:
    """The shape of the first source box, cut along leading axes to at most `_CHUNK_BYTES`, so that no two writers
    share a chunk."""
    first = manifests.split(leaf.boxes[0], _CHUNK_BYTES // manifests.DTYPES[leaf.dtype].itemsize)[0]
    return tuple(max(1, n) for n in manifests.shape_of(first))


def _layout(leaf: Leaf) -> dict[str, Any]:
    return {
        "shape": list(leaf.shape),
        "data_type": leaf.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(_chunk_shape(leaf))}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }


def _check_size(url: str, version: Version) -> None:
    """Raise TransferError when the manifest in a folder is not a regular file or too large; skip object stores."""
    if not url.startswith(_FILE):
        return
    try:
        found = os.stat(pathlib.Path(unquote(url.removeprefix(_FILE))) / _MANIFEST)
    except (OSError, ValueError):
        return  # reading it raises the proper error
    if not stat.S_ISREG(found.st_mode) or found.st_size > channels.MAX_MANIFEST_BYTES:
        raise TransferError(
            f"the manifest of {version} in {url} is not a file of at most {channels.MAX_MANIFEST_BYTES} bytes"
        )


def _spec(folder_url: str, leaf: Leaf, version: Version) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": f"{folder_url}{leaf.name}/",
        "metadata": {**_layout(leaf), "attributes": {"version": str(version)}},
        "store_data_equal_to_fill_value": True,  # otherwise a chunk of zeros looks like a missing one
        "create": True,
        "delete_existing": True,
    }


def _opened(url: str, context: ts.Context, deadline: Deadline) -> ts.KvStore:
    try:
        opening = ts.KvStore.open(url, context=context)
    except (ValueError, RuntimeError) as error:  # not a URL, or not valid text
        raise TransferError(one_line(f"{url!r} is not the URL of a folder: {error}")) from error
    return _result(opening, deadline)


def _result(future: Any, deadline: Deadline) -> Any:
    try:
        return future.result(timeout=deadline.left_s())
    except TimeoutError as error:
        raise deadline.passed() from error
    except (ValueError, OSError) as error:
        _raise_typed(error)


def _raise_typed(error: Exception) -> NoReturn:
    """Raise DigestMismatch for a chunk with a wrong crc32c, otherwise TransferError."""
    # tensorstore's messages begin with the status code; DATA_LOSS means a wrong crc32c.
    kind = DigestMismatch if str(error).startswith("DATA_LOSS") else TransferError
    raise kind(one_line(str(error))) from error


def _remove_folder(folder: pathlib.Path) -> None:
    """Remove `folder` if it exists. Deleting its keys through tensorstore would leave empty folders."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise TransferError(f"cannot remove the old version in {folder}: {error}") from error
