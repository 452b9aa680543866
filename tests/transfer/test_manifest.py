"""A manifest that is not the announced one, or contradicts itself, is refused before it is used."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from jaxroll import wire
from jaxroll.errors import DigestMismatch, TransferError, VersionMixed
from jaxroll.records import Version, VersionRef
from jaxroll.transfer import manifest as manifests

VERSION = Version(1, 5)
GOOD = manifests.Leaf("w", (4, 2), "float32", (((0, 2), (0, 2)), ((2, 4), (0, 2))), (2**64 - 1, 3))


def _decoded(*leaves: manifests.Leaf, version: Version = VERSION, asked: Version = VERSION) -> manifests.Manifest:
    data = manifests.encode(manifests.Manifest(version, leaves))
    return manifests.decode(data, VersionRef(asked, "tcp", "x:1", wire.digest(data)))


def _changed(**changes: object) -> manifests.Leaf:
    return msgspec.structs.replace(GOOD, **changes)


def test_it_comes_back_as_it_was() -> None:
    assert _decoded(GOOD) == manifests.Manifest(VERSION, (GOOD,))
    assert GOOD.total == 2  # 2⁶⁴ − 1 + 3, mod 2⁶⁴
    assert GOOD.size_bytes == 32


def test_one_of_another_version_is_refused() -> None:
    with pytest.raises(VersionMixed, match=r"is of version 1\.5, requested 1\.6"):
        _decoded(GOOD, asked=Version(1, 6))


def test_one_that_was_not_announced_is_refused() -> None:
    data = manifests.encode(manifests.Manifest(VERSION, (GOOD,)))
    with pytest.raises(DigestMismatch, match="not the one that was announced"):
        manifests.decode(data, VersionRef(VERSION, "tcp", "x:1", wire.digest(data + b"x")))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (_changed(dtype="object"), "leaf 'w': dtype 'object' is unsupported"),
        (_changed(digests=(1,)), "leaf 'w': 2 boxes, 1 digests"),
        (_changed(shape=(-4, 2)), "is not a manifest"),
        (_changed(boxes=GOOD.boxes[:1], digests=(1,)), "do not cover"),
        (_changed(boxes=(GOOD.boxes[0], GOOD.boxes[0])), "do not cover"),
        (_changed(boxes=(((0, 2),), ((2, 4),))), "do not cover"),
        (_changed(shape=(1 << 40, 1 << 20)), "do not cover"),
    ],
)
def test_one_that_contradicts_itself_is_refused(leaf: manifests.Leaf, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        _decoded(leaf)


def test_a_leaf_named_twice_is_refused() -> None:
    with pytest.raises(TransferError, match="names a leaf twice"):
        manifests.check(_decoded(GOOD, GOOD), {"w": np.zeros((4, 2))})
