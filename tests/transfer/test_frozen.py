"""Parameters that nothing changes: part of every version, sent to a receiver once."""

import numpy as np
import pytest

from jaxroll.errors import DigestMismatch
from jaxroll.records import Version, VersionRef

FROZEN = ("embed", "layers.00.q", "odd")
SAMPLER = (1, 1, 2)


def split(values):
    """The frozen values, and those that change."""
    return {n: values[n] for n in FROZEN}, {n: v for n, v in values.items() if n not in FROZEN}


def published(kit, publisher, step, values, freeze=None):
    """The snapshot of `values` on the learner's mesh, with `freeze` (if given) frozen first."""
    placed = kit.shardings((1, 2, 2), "learner")
    if freeze is not None:
        publisher.freeze(Version(0, step), kit.params(freeze, placed))
    return publisher.publish(Version(0, step), kit.params(values, placed))


def fetched(kit, snapshot, held=None, mesh=SAMPLER):
    return kit.receiver().fetch(
        snapshot, kit.shardings(mesh, "sampler"), kit.abstract(kit.shapes), *([] if held is None else [held])
    )


@pytest.mark.parametrize("channel", ["tcp", "shm", "tensorstore"])
def test_frozen_parameters_are_fetched_once_and_part_of_every_version(kit, channel):
    publisher = kit.publisher(channel)
    frozen, first = split(kit.values(1))
    _, second = split(kit.values(2))
    staged = fetched(kit, published(kit, publisher, 1, first, frozen))
    assert staged.fetched_bytes == staged.size_bytes == sum(v.nbytes for v in kit.values(1).values())
    held = staged.held(FROZEN)
    assert held.keys() == set(FROZEN)
    staged.place()
    staged = fetched(kit, published(kit, publisher, 2, second), held)
    assert staged.fetched_bytes == sum(v.nbytes for v in second.values()) < staged.size_bytes
    for name, value in staged.place().items():
        np.testing.assert_array_equal(value, (frozen | second)[name], err_msg=name)


def test_leaves_published_with_another_digest_are_fetched_again(kit):
    frozen, own = split(kit.values(1))
    held = fetched(kit, published(kit, kit.publisher(), 1, own, frozen)).held(FROZEN)
    other = frozen | {"odd": frozen["odd"] + 1}
    staged = fetched(kit, published(kit, kit.publisher(), 2, own, other), held)
    assert staged.fetched_bytes == frozen["odd"].nbytes + sum(v.nbytes for v in own.values())
    np.testing.assert_array_equal(staged.place()["odd"], other["odd"])


def test_leaves_held_for_another_mesh_are_fetched_again(kit):
    frozen, own = split(kit.values(1))
    publisher = kit.publisher()
    snapshot = published(kit, publisher, 1, own, frozen)
    held = fetched(kit, snapshot).held(FROZEN)
    staged = fetched(kit, snapshot, held, (1, 1, 1))
    assert staged.fetched_bytes == staged.size_bytes
    np.testing.assert_array_equal(staged.place()["embed"], frozen["embed"])


def test_a_version_without_frozen_parameters_holds_only_its_own(kit):
    publisher = kit.publisher()
    snapshot = published(kit, publisher, 1, kit.values(3))
    assert fetched(kit, snapshot).held(()) == {}


def test_fetched_leaves_are_verified_next_to_held_ones(kit):
    frozen, own = split(kit.values(1))
    publisher = kit.publisher()
    held = fetched(kit, published(kit, publisher, 1, own, frozen)).held(FROZEN)
    snapshot = published(kit, publisher, 2, split(kit.values(2))[1])
    middle = kit.middle(snapshot.address, flip_at=_end_of_answers(kit, snapshot, held) - 2)  # in "scale"
    with pytest.raises(DigestMismatch):
        fetched(kit, VersionRef(snapshot.version, "tcp", middle.address, snapshot.manifest_digest), held)


def _end_of_answers(kit, snapshot, held):
    """The number of bytes that the publisher sends for one fetch."""
    middle = kit.middle(snapshot.address)
    fetched(kit, VersionRef(snapshot.version, "tcp", middle.address, snapshot.manifest_digest), held)
    return middle.passed_bytes
