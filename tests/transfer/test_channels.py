"""The contract of every channel between processes, tested on each."""

from __future__ import annotations

import concurrent.futures

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxroll.errors import DigestMismatch, TransferError, VersionGone, VersionMixed
from jaxroll.records import Version
from jaxroll.transfer.manifest import HostSnapshot, from_pieces

pytestmark = pytest.mark.parametrize("channel", ["tcp", "shm", "tensorstore"])

MESHES = [  # learner's dims and rules → sampler's
    ((1, 2, 1), "learner", (1, 1, 2), "sampler"),
    ((1, 4, 1), "learner", (1, 1, 2), "sampler"),
    ((1, 1, 1), "learner", (1, 1, 8), "sampler"),
    ((2, 2, 2), "learner", (1, 1, 2), "sampler"),
    ((1, 1, 2), "sampler", (2, 2, 2), "learner"),
    ((1, 2, 2), "learner", (2, 1, 1), "replicated"),
    ((8, 1, 1), "replicated", (1, 8, 1), "learner"),
]


def _bits_equal(got: jax.Array, wanted: np.ndarray) -> None:
    host = np.asarray(got)
    assert host.dtype == wanted.dtype
    assert host.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("source", "source_rules", "target", "target_rules"), MESHES)
def test_parameters_arrive_exactly_on_unequal_meshes(kit, channel, source, source_rules, target, target_rules) -> None:
    values = kit.values(0)
    shardings = kit.shardings(target, target_rules)
    announced = kit.publisher(channel).publish(Version(0, 1), kit.params(values, kit.shardings(source, source_rules)))
    got = kit.receiver().fetch(announced, shardings, kit.abstract(kit.shapes)).place()
    assert sorted(got) == sorted(values)
    for name, value in values.items():
        assert got[name].sharding == shardings[name]
        assert got[name].committed
        _bits_equal(got[name], value)


def test_bfloat16_on_the_way_and_float32_on_arrival(kit, channel) -> None:
    values = kit.values(0)
    publisher = kit.publisher(channel, dtype="bfloat16")
    announced = publisher.publish(Version(0, 1), kit.params(values, kit.shardings((1, 2, 1), "learner")))
    shardings = kit.shardings((1, 1, 2), "sampler")
    for dtype in ("bfloat16", "float32"):
        staged = kit.receiver().fetch(announced, shardings, kit.abstract(kit.shapes, dtype))
        assert staged.size_bytes == sum(value.nbytes for value in values.values()) // 2
        got = staged.place()
        for name, value in values.items():
            assert got[name].sharding == shardings[name]
            _bits_equal(got[name], value.astype(ml_dtypes.bfloat16).astype(np.dtype(dtype)))


def test_the_newest_two_versions_are_kept_and_older_ones_are_gone(kit, channel) -> None:
    publisher = kit.publisher(channel)
    shardings = kit.shardings((1, 1, 1), "replicated")
    announced = [publisher.publish(Version(0, step), kit.params(kit.values(step), shardings)) for step in range(4)]
    for old in announced[:2]:
        with pytest.raises(VersionGone, match=str(old.version)):
            kit.receiver().fetch(old, shardings, kit.abstract(kit.shapes))
    for step in (2, 3):
        got = kit.receiver().fetch(announced[step], shardings, kit.abstract(kit.shapes)).place()
        _bits_equal(got["embed"], kit.values(step)["embed"])


def test_how_many_versions_are_kept_is_the_publisher_s_choice(kit, channel) -> None:
    publisher, shardings = kit.publisher(channel, keep=3), kit.shardings((1, 1, 1), "replicated")
    announced = [publisher.offer(kit.host_snapshot(Version(0, step), kit.values(step))) for step in range(4)]
    for kept in announced[1:]:
        assert kit.receiver().fetch(kept, shardings, kit.abstract(kit.shapes)).version == kept.version
    with pytest.raises(VersionGone):
        kit.receiver().fetch(announced[0], shardings, kit.abstract(kit.shapes))


def test_a_version_can_be_published_again(kit, channel) -> None:
    publisher = kit.publisher(channel)
    shardings = kit.shardings((1, 1, 1), "replicated")
    first = publisher.publish(Version(0, 1), kit.params(kit.values(1), shardings))
    second = publisher.publish(Version(0, 1), kit.params(kit.values(2), shardings))
    got = kit.receiver().fetch(second, shardings, kit.abstract(kit.shapes)).place()
    _bits_equal(got["embed"], kit.values(2)["embed"])
    with pytest.raises(DigestMismatch, match="not the one that was announced"):
        kit.receiver().fetch(first, shardings, kit.abstract(kit.shapes))


def test_a_snapshot_that_changes_after_its_manifest_is_refused(kit, channel) -> None:
    values = kit.values(0)
    taken = kit.host_snapshot(Version(0, 1), values)
    values["layers.00.q"][3, 1, 2] += 1
    with pytest.raises(DigestMismatch, match=r"layers\.00\.q"):
        announced = kit.publisher(channel).offer(taken)  # raises for shm: its readers compute no digests
        kit.receiver().fetch(announced, kit.shardings((1, 1, 2), "sampler"), kit.abstract(kit.shapes))


def test_slices_of_another_version_are_refused(kit, channel) -> None:
    publisher = kit.publisher(channel)
    shardings = kit.shardings((1, 1, 2), "sampler")
    announced = publisher.offer(kit.host_snapshot(Version(0, 1), kit.values(0)))
    publisher.offer(kit.host_snapshot(Version(0, 2), kit.values(0)))
    _mix(kit, publisher, channel)
    with pytest.raises(VersionMixed, match=r"0\.2"):
        kit.receiver().fetch(announced, shardings, kit.abstract(kit.shapes))


def _mix(kit, publisher, channel: str) -> None:
    """Make version 0.1 answer with slices of 0.2."""
    if channel == "tensorstore":
        folder = kit.folder / "transfer"
        (folder / "0.1" / "embed").rename(folder / "was")
        (folder / "0.2" / "embed").rename(folder / "0.1" / "embed")
        return
    kept = publisher._sender._shelf._kept
    one, two = kept[Version(0, 1)], kept[Version(0, 2)]
    kept[Version(0, 1)] = HostSnapshot(two.manifest, one.encoded, two.pieces)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed": (24, 17)}, r"leaf 'embed': published with shape \(24, 16\), this model has \(24, 17\)"),
        ({"extra": (2,)}, "leaf 'extra' is in this model but not published"),
        ({"embed": None}, "leaf 'embed' is published but not in this model"),
    ],
)
def test_a_model_that_differs_is_named_before_anything_is_allocated(kit, channel, monkeypatch, change, message) -> None:
    announced = kit.publisher(channel).offer(kit.host_snapshot(Version(0, 1), kit.values(0)))
    shapes = {name: shape for name, shape in {**kit.shapes, **change}.items() if shape is not None}
    replicated = next(iter(kit.shardings((1, 1, 1), "replicated").values()))

    def nothing(*_: object) -> None:
        raise AssertionError("a buffer was allocated")

    monkeypatch.setattr(np, "empty", nothing)
    with pytest.raises(TransferError, match=message):
        kit.receiver().fetch(announced, dict.fromkeys(shapes, replicated), kit.abstract(shapes))


def test_many_receivers_at_once_off_the_main_thread(kit, channel) -> None:
    values = kit.values(0)
    announced = kit.publisher(channel).offer(kit.host_snapshot(Version(0, 1), values))
    receiver, shardings = kit.receiver(), kit.shardings((1, 1, 2), "sampler")
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        fetching = [pool.submit(receiver.fetch, announced, shardings, kit.abstract(kit.shapes)) for _ in range(12)]
        staged = [future.result(timeout=30) for future in fetching]
    for one in staged:
        for name, array in one.place().items():
            _bits_equal(array, values[name])


def test_placed_arrays_do_not_change_when_later_versions_arrive(kit, channel) -> None:
    publisher, receiver = kit.publisher(channel), kit.receiver()
    shardings = kit.shardings((1, 1, 2), "sampler")
    placed = []
    for step in range(4):
        announced = publisher.offer(kit.host_snapshot(Version(0, step), kit.values(step)))
        placed.append(receiver.fetch(announced, shardings, kit.abstract(kit.shapes)).place())
    for step, params in enumerate(placed):
        for name, value in kit.values(step).items():
            _bits_equal(params[name], value)


def test_staged_parameters_are_placed_once(kit, channel) -> None:
    announced = kit.publisher(channel).offer(kit.host_snapshot(Version(0, 1), kit.values(0)))
    staged = kit.receiver().fetch(announced, kit.shardings((1, 1, 1), "replicated"), kit.abstract(kit.shapes))
    assert staged.version == Version(0, 1)
    staged.place()
    assert staged.size_bytes == 0
    with pytest.raises(TransferError, match="placed before"):
        staged.place()


class _SecondHost:
    """A sharding over two processes as seen by one of them: all devices exist, half are addressable."""

    def __init__(self, sharding: jax.sharding.NamedSharding) -> None:
        self._sharding = sharding

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict:
        everything = self._sharding.devices_indices_map(shape)
        return dict(list(everything.items())[len(everything) // 2 :])


def test_one_host_of_many_fetches_its_own_boxes_only(kit, channel) -> None:
    values = kit.values(0)
    announced = kit.publisher(channel).offer(kit.host_snapshot(Version(0, 1), values))
    target = {name: _SecondHost(sharding) for name, sharding in kit.shardings((1, 1, 2), "sampler").items()}
    staged = kit.receiver().fetch(announced, target, kit.abstract(kit.shapes))
    buffers = {leaf.manifest.name: leaf.buffers for leaf in staged._leaves}
    assert list(buffers["embed"]) == [((0, 24), (8, 16))]
    (held,) = buffers["embed"].values()
    np.testing.assert_array_equal(held.view(np.float32), values["embed"][:, 8:])
    assert list(buffers["odd"]) == [((0, 3), (0, 5))]


def test_one_host_of_many_compares_source_boxes_that_it_holds_whole(kit, channel) -> None:
    values = kit.values(0)
    halves = {
        name: (
            (value.shape, [(((0, 12), (0, 16)), value[:12]), (((12, 24), (0, 16)), value[12:])])
            if name == "embed"
            else (value.shape, [(tuple((0, n) for n in value.shape), value)])
        )
        for name, value in values.items()
    }
    taken = from_pieces(Version(0, 1), halves)
    values["embed"][20, 3] += 1
    target = {name: _SecondHost(sharding) for name, sharding in kit.shardings((1, 2, 1), "learner").items()}
    with pytest.raises(DigestMismatch, match="embed"):
        announced = kit.publisher(channel).offer(taken)
        kit.receiver().fetch(announced, target, kit.abstract(kit.shapes))
