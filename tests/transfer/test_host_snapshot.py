"""A snapshot is a copy: what happens to the live parameters afterwards does not reach it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxroll.records import Version
from jaxroll.transfer import channel_device
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.manifest import HostSnapshot

VERSION = Version(0, 3)


def _rebuilt(taken: HostSnapshot) -> dict[str, np.ndarray]:
    whole = {}
    for leaf, pieces in zip(taken.manifest.leaves, taken.pieces, strict=True):
        array = np.empty(leaf.shape, pieces[0].dtype)
        for box, piece in zip(leaf.boxes, pieces, strict=True):
            array[(*manifests.within(box, manifests.whole(leaf.shape)), ...)] = piece
        whole[leaf.name] = array
    return whole


def test_host_arrays_handed_over_are_shown_read_only(kit) -> None:
    taken = kit.host_snapshot(VERSION, kit.values(0))
    for pieces in taken.pieces:
        for piece in pieces:
            assert not piece.flags.writeable


@pytest.mark.parametrize("dims", [(1, 1, 1), (1, 2, 1), (2, 2, 2), (8, 1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_holds_the_cast_values_once(kit, dims: tuple, dtype: str) -> None:
    values = kit.values(0)
    taken = channel_device.take(VERSION, kit.params(values, kit.shardings(dims, "learner")), dtype)
    wanted = {
        name: value.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for name, value in values.items()
    }
    got = _rebuilt(taken)
    assert list(got) == sorted(values)
    for name in values:
        assert got[name].dtype == wanted[name].dtype
        np.testing.assert_array_equal(manifests.bits(got[name]), manifests.bits(wanted[name]))
    assert taken.size_bytes == sum(value.nbytes for value in wanted.values())  # replicas are not kept
    for leaf in taken.manifest.leaves:
        assert leaf.total == manifests.of_box(wanted[leaf.name], manifests.whole(leaf.shape))
    assert (
        taken.manifest_digest
        == channel_device.take(VERSION, kit.params(values, kit.shardings(dims, "learner")), dtype).manifest_digest
    )


def test_donating_the_live_parameters_afterwards_changes_nothing(kit) -> None:
    values = kit.values(1)
    live = kit.params(values, kit.shardings((1, 2, 1), "learner"))
    train = functools.partial(jax.jit, donate_argnums=0)(lambda p: jax.tree.map(lambda x: x * 0 - 7, p))
    pending = channel_device.begin(live, "float32")
    trained = train(live)
    assert live["embed"].is_deleted()
    for _ in range(3):  # the freed memory is used again
        trained = train(trained)
    jax.block_until_ready(trained)
    got = _rebuilt(channel_device.finish(VERSION, pending))
    for name, value in values.items():
        np.testing.assert_array_equal(got[name], value)


def test_no_memory_is_shared_with_the_live_parameters(kit) -> None:
    live = kit.params(kit.values(1), kit.shardings((1, 2, 1), "learner"))
    taken = channel_device.take(VERSION, live, "float32")
    ours = {piece.ctypes.data for pieces in taken.pieces for piece in pieces if piece.size}
    theirs = {shard.data.unsafe_buffer_pointer() for leaf in live.values() for shard in leaf.addressable_shards}
    assert not ours & theirs


def test_pieces_are_read_only(kit) -> None:
    taken = channel_device.take(VERSION, kit.params(kit.values(2), kit.shardings((1, 1, 1), "learner")), "float32")
    for pieces in taken.pieces:
        for piece in pieces:
            with pytest.raises(ValueError, match="read-only"):
                piece[...] = 0


def test_leaves_that_are_not_floats_keep_their_dtype() -> None:
    taken = channel_device.take(VERSION, {"w": jnp.ones(4), "n": jnp.arange(4)}, "bfloat16")
    assert {leaf.name: leaf.dtype for leaf in taken.manifest.leaves} == {"w": "bfloat16", "n": "int32"}


def test_the_second_snapshot_does_not_compile(kit) -> None:
    shardings = kit.shardings((1, 2, 1), "learner")
    channel_device.take(VERSION, kit.params(kit.values(0), shardings), "float32")
    compiled = manifests.cast_and_copy._cache_size()
    channel_device.take(Version(0, 4), kit.params(kit.values(1), shardings), "float32")
    assert manifests.cast_and_copy._cache_size() == compiled
