"""Every pair of meshes from {1, 2, 4, 8} devices × {fsdp, tensor, both, replicated}: equal bits, none twice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxroll.config import TransferConfig
from jaxroll.records import Version, VersionRef
from jaxroll.transfer import channels, ends
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.manifest import Box
from tests.harness.transfer_arrays import mesh_of

SHAPES = {"bias": (16,), "embed": (24, 16), "layers.00.q": (16, 8, 5), "scale": ()}
RULES = {
    "fsdp": {"bias": ("fsdp",), "embed": ("fsdp", None), "layers.00.q": ("fsdp", None, None)},
    "tensor": {"bias": ("tensor",), "embed": (None, "tensor"), "layers.00.q": (None, "tensor", None)},
    "both": {"bias": (("fsdp", "tensor"),), "embed": ("fsdp", "tensor"), "layers.00.q": ("fsdp", "tensor", None)},
    "replicated": {},
}
DIMS = {"fsdp": lambda n: (1, n, 1), "tensor": lambda n: (1, 1, n), "replicated": lambda n: (n, 1, 1)}
MESHES = [(n, rule) for n in (1, 2, 4, 8) for rule in RULES]


def shardings_of(count: int, rule: str) -> dict[str, NamedSharding]:
    """Shardings; "both" splits 1, 2, 4 and 8 devices into 1 × 1, 1 × 2, 2 × 2 and 2 × 4."""
    both = {1: (1, 1, 1), 2: (1, 1, 2), 4: (1, 2, 2), 8: (1, 2, 4)}
    mesh = mesh_of(*(both[count] if rule == "both" else DIMS[rule](count)))
    return {name: NamedSharding(mesh, PartitionSpec(*RULES[rule].get(name, ()))) for name in SHAPES}


def boxes_of(count: int, rule: str) -> dict[str, tuple[Box, ...]]:
    return {
        name: manifests.unique(manifests.boxes(sharding, SHAPES[name]))
        for name, sharding in shardings_of(count, rule).items()
    }


class MemoryReader:
    """A reader of a snapshot in this process, instead of a socket; it counts the elements that it is asked for."""

    verified = False

    def __init__(self, snapshot: manifests.HostSnapshot, elements: list[int]) -> None:
        self._snapshot, self._elements = snapshot, elements

    def manifest(self) -> bytes:
        return self._snapshot.encoded

    def view(self, manifest: manifests.Manifest, leaf: int, source: int) -> None:
        """None: every box must be read."""

    def read(self, manifest: manifests.Manifest, parts: Sequence[channels.SlicePart], leaf_read: object = None) -> None:
        for part in parts:
            source = manifest.leaves[part.leaf].boxes[part.source]
            part.into[...] = manifests.bits(self._snapshot.pieces[part.leaf][part.source])[
                manifests.within(part.box, source)
            ]
            self._elements.append(manifests.size_of(part.box))

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("count", "rule"), MESHES)
def test_every_pair_of_meshes_gets_the_same_bits_from_each_source_once(monkeypatch, count: int, rule: str) -> None:
    rng = np.random.default_rng(count)
    values = {name: rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32) for name, shape in SHAPES.items()}
    pieces = {
        name: (SHAPES[name], [(box, values[name][tuple(slice(a, b) for a, b in box)]) for box in boxes])
        for name, boxes in boxes_of(count, rule).items()
    }
    snapshot, elements = manifests.from_pieces(Version(0, 1), pieces), list[int]()
    monkeypatch.setitem(ends._READERS, "memory", lambda *_: MemoryReader(snapshot, elements))
    announced = VersionRef(snapshot.version, "memory", "here", snapshot.manifest_digest)
    shapes = {name: np.empty(shape, np.float32) for name, shape in SHAPES.items()}
    receiver = ends.Receiver(TransferConfig())
    for target_count, target_rule in MESHES:
        target, wanted = shardings_of(target_count, target_rule), boxes_of(target_count, target_rule)
        elements.clear()
        staged = receiver.fetch(announced, target, shapes)
        for leaf in staged._leaves:
            name = leaf.manifest.name
            assert tuple(leaf.buffers) == wanted[name]
            for box, buffer in leaf.buffers.items():
                expected = values[name].view(np.uint32)[tuple(slice(a, b) for a, b in box)]
                assert buffer.tobytes() == expected.tobytes(), (target_count, target_rule, name, box)
        assert sum(elements) == sum(manifests.size_of(box) for boxes in wanted.values() for box in boxes)
