"""The plan against numpy: every target element once, nothing that is not needed."""

from __future__ import annotations

import itertools
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxroll.records import Version
from jaxroll.transfer import channels
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.channels import SlicePart
from jaxroll.transfer.manifest import Box, Leaf, Manifest, copies, shape_of, within
from jaxroll.wire import Scattered


@st.composite
def _cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """The spans between random cuts of an axis; any partition, even or not."""
    inner = draw(st.lists(st.integers(1, max(1, size - 1)), max_size=4)) if size > 1 else []
    edges = sorted({0, size, *inner})
    return list(itertools.pairwise(edges)) or [(0, 0)]


@st.composite
def _shape_and_partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[manifests.Box], list[manifests.Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    partitions = [list(itertools.product(*(draw(_cuts(n)) for n in shape))) for _ in range(2)]
    return shape, partitions[0], partitions[1]


def _index(box: manifests.Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


@given(_shape_and_partitions(), st.data())
def test_copies_rebuild_any_targets_from_any_partition(case: tuple, data: st.DataObject) -> None:
    shape, sources, targets = case
    targets = data.draw(st.lists(st.sampled_from(targets), unique=True))  # a process holds some of the boxes
    leaf = np.arange(int(np.prod(shape))).reshape(shape)
    pieces = [leaf[_index(box)].copy() for box in sources]
    filled = [np.full(manifests.shape_of(box), -1) for box in targets]
    times = [np.zeros(manifests.shape_of(box), int) for box in targets]

    asked = 0
    for copy in manifests.copies(sources, targets):
        into = manifests.within(copy.box, targets[copy.target])
        filled[copy.target][into] = pieces[copy.source][manifests.within(copy.box, sources[copy.source])]
        times[copy.target][into] += 1
        asked += manifests.size_of(copy.box)

    for box, got, count in zip(targets, filled, times, strict=True):
        np.testing.assert_array_equal(got, leaf[_index(box)])
        assert (count == 1).all()
    assert asked == sum(leaf[_index(box)].size for box in targets)


@given(_shape_and_partitions(), st.data())
def test_covers_once_accepts_partitions_and_nothing_else(case: tuple, data: st.DataObject) -> None:
    shape, sources, _ = case
    assert manifests.covers_once(sources, shape)
    filled = [box for box in sources if manifests.size_of(box)]
    if filled:
        victim = data.draw(st.sampled_from(filled))
        assert not manifests.covers_once([box for box in sources if box != victim], shape)
        assert not manifests.covers_once([*sources, victim], shape)


def test_covers_once_counts_elements_not_volumes() -> None:
    twice_here, never_there = ((0, 2),), ((1, 3),)
    assert not manifests.covers_once([twice_here, never_there], (4,))
    assert not manifests.covers_once([((-1, 3),)], (4,))
    assert not manifests.covers_once([((0, 4), (0, 1))], (4,))


@given(_shape_and_partitions(), st.integers(1, 40))
def test_split_partitions_a_box_into_contiguous_slabs(case: tuple, limit: int) -> None:
    shape, _, targets = case
    leaf = np.zeros(shape, int)
    for box in targets:
        parts = manifests.split(box, limit)
        assert all(manifests.size_of(part) <= limit for part in parts)
        held = leaf[(*_index(box), ...)].copy()
        for part in parts:
            view = held[(*manifests.within(part, box), ...)]
            view += 1
            assert view.flags.c_contiguous
        assert (held == 1).all()


@pytest.mark.parametrize("spec", [(), ("fsdp",), (("fsdp", "tensor"),), (None, "tensor"), ("tensor", "fsdp")])
def test_boxes_equal_the_shards_that_jax_puts_on_each_device(kit, spec: tuple) -> None:
    import jax

    mesh = kit.mesh(2, 2, 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    leaf = np.arange(64).reshape(16, 4)
    on_devices = jax.device_put(leaf, sharding)
    boxes = manifests.boxes(sharding, leaf.shape)
    assert boxes == manifests.local_boxes(sharding, leaf.shape)
    for shard in on_devices.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), leaf[_index(boxes[shard.device])])
    assert manifests.covers_once(manifests.unique(boxes), leaf.shape)
    assert len(manifests.unique(boxes)) < 8  # the data axis replicates


def _with_gaps(rng: np.random.Generator, box: Box) -> np.ndarray:
    """An array for `box`, of which a random number of axes have gaps in memory."""
    held = np.zeros([n + int(rng.integers(3)) for n in shape_of(box)], np.uint16)
    return held[tuple(slice(0, n) for n in shape_of(box))]


@pytest.mark.parametrize("seed", range(12))
def test_scattered_bytes_pass_a_socket_in_the_order_of_the_box(monkeypatch, seed: int) -> None:
    """Two halves of a box as one stream, written from arrays with gaps and read into others."""
    rng = np.random.default_rng(seed)
    box = tuple((int(a), int(a) + 2 * int(n)) for a, n in rng.integers(1, 5, (int(rng.integers(1, 5)), 2)))
    axis = int(rng.integers(len(box)))
    start, stop = box[axis]
    halves = [(*box[:axis], span, *box[axis + 1 :]) for span in itertools.pairwise((start, (start + stop) // 2, stop))]
    whole = rng.integers(1, 1 << 16, shape_of(box), np.uint16)
    sources, targets = ([_with_gaps(rng, half) for half in halves] for _ in range(2))
    for half, source in zip(halves, sources, strict=True):
        source[...] = whole[within(half, box)]

    monkeypatch.setattr(channels, "RUN_BYTES", 1)

    def stream(arrays: list[np.ndarray]) -> Scattered:
        made = channels.scattered(box, list(zip(halves, arrays, strict=True)))
        assert made is not None
        return made

    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent, received, wire = stream(sources), stream(targets), b""
        while len(sent):
            sent.skip(sent.write(ours.fileno()))
            wire += theirs.recv(whole.nbytes)
        assert wire == whole.tobytes()
        while len(received):
            at = whole.nbytes - len(received)
            ours.sendall(wire[at : at + int(rng.integers(1, 9))])  # so that it ends in the middle of a run
            received.skip(received.read(theirs.fileno()))
    for half, target in zip(halves, targets, strict=True):
        assert np.array_equal(target, whole[within(half, box)])


def test_columns_are_requested_as_the_contiguous_slices_that_their_sender_has() -> None:
    """A learner of four rows of boxes, a receiver of two columns: a slice per source box, none gathered there."""
    source = tuple(((4 * n, 4 * n + 4), (0, 6)) for n in range(4))
    targets = (((0, 16), (0, 3)), ((0, 16), (3, 6)))
    buffers = [np.zeros(shape_of(box), np.float32) for box in targets]
    parts = [
        SlicePart(0, one.source, one.box, buffers[one.target][within(one.box, targets[one.target])], False)
        for one in copies(source, targets)
    ]
    manifest = Manifest(Version(0, 1), (Leaf("w", (16, 6), "float32", source, (0,) * 4),))
    merged = list(channels.requests(manifest, parts, merges=True))
    assert [(one.source, one.box) for one in merged] == list(enumerate(source))
    assert [len(one.into) for one in merged] == [2] * 4
    alone = list(channels.requests(manifest, parts, merges=False))
    assert sorted(one.box for one in alone) == sorted(part.box for part in parts)
    checked = list(channels.requests(manifest, [part._replace(checked=True) for part in parts], merges=True))
    assert sorted(one.box for one in checked) == sorted(part.box for part in parts)
