"""Weights that are handed over within a process, on the devices."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxroll.config import TransferConfig
from jaxroll.errors import TransferError, VersionGone
from jaxroll.records import Version, VersionRef
from jaxroll.transfer.channel_device import DevicePublisher
from jaxroll.transfer.ends import Receiver
from tests.harness.transfer_arrays import SHAPES, SPECS, abstract_of, params_of, shardings_of, values_of

V1, V2 = Version(0, 1), Version(0, 2)
MESHES = [
    ((1, 2, 2), "learner"),
    ((1, 1, 4), "sampler"),
    ((2, 1, 2), "sampler"),
    ((1, 1, 2), "sampler"),
    ((1, 1, 1), "replicated"),
]


@pytest.fixture
def publisher():
    made = DevicePublisher("float32")
    yield made
    made.close()


def fetched(snapshot: VersionRef, dims=(1, 1, 4), rules="sampler", dtype="float32"):
    return Receiver(TransferConfig()).fetch(snapshot, shardings_of(dims, rules), abstract_of(SHAPES, dtype))


@pytest.mark.parametrize(("dims", "rules"), MESHES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_of_any_mesh_get_what_was_published(publisher, dims, rules, dtype) -> None:
    values = values_of(1)
    staged = fetched(publisher.publish(V1, params_of(values, shardings_of((1, 2, 2), "learner"))), dims, rules, dtype)
    placed, target = staged.place(), shardings_of(dims, rules)
    on_host = [name for name, array in publisher.kept(V1).items() if array._npy_value is not None]
    assert on_host == [], "by way of the host"
    with pytest.raises(TransferError, match="placed before"):
        staged.place()
    assert staged.fetched_bytes == sum(value.nbytes for value in values.values())
    assert placed.keys() == values.keys()
    for name, value in values.items():
        assert placed[name].sharding.is_equivalent_to(target[name], value.ndim)
        np.testing.assert_array_equal(np.asarray(placed[name]), np.asarray(jax.numpy.asarray(value).astype(dtype)))


def test_published_parameters_are_rounded_as_between_processes() -> None:
    publisher = DevicePublisher("bfloat16")
    values = values_of(2)
    placed = fetched(publisher.publish(V1, params_of(values, shardings_of((1, 2, 2), "learner")))).place()
    for name, value in values.items():
        rounded = np.asarray(jax.numpy.asarray(value).astype("bfloat16").astype("float32"))
        np.testing.assert_array_equal(np.asarray(placed[name]), rounded)
    publisher.close()


def test_the_learner_may_donate_its_parameters_and_go_on(publisher) -> None:
    params = params_of(values_of(3), shardings_of((1, 2, 2), "learner"))
    snapshot = publisher.publish(V1, params)
    step = jax.jit(lambda tree: {name: value + 1 for name, value in tree.items()}, donate_argnums=0)
    step(params)
    assert all(value.is_deleted() for value in params.values())
    for name, value in fetched(snapshot).place().items():
        np.testing.assert_array_equal(np.asarray(value), values_of(3)[name])


def test_an_engine_that_is_laid_out_like_the_learner_computes_with_the_copy_itself(publisher) -> None:
    learners = shardings_of((1, 2, 2), "learner")
    snapshot = publisher.publish(V1, params_of(values_of(4), learners))
    first, second = (fetched(snapshot, (1, 2, 2), "learner").place() for _ in range(2))
    for name in SHAPES:
        pointers = [
            [shard.data.unsafe_buffer_pointer() for shard in one[name].addressable_shards] for one in (first, second)
        ]
        assert pointers[0] == pointers[1], name


def test_only_the_newest_version_is_kept_once_the_store_has_it(publisher) -> None:
    learners = shardings_of((1, 2, 2), "learner")
    old = publisher.publish(V1, params_of(values_of(5), learners))
    watched = weakref.ref(publisher.kept(V1)["embed"])
    started: Future[VersionRef] = publisher.start(V2, params_of(values_of(6), learners))
    new = publisher.finish(V2, started)
    assert fetched(old), "an engine that got its address may still fetch it"
    publisher.drop_older(V2)
    gc.collect()
    assert watched() is None, "its memory is free"
    with pytest.raises(VersionGone, match=r"version 0\.1 is not kept; 0\.2 is"):
        fetched(old)
    np.testing.assert_array_equal(np.asarray(fetched(new).place()["bias"]), values_of(6)["bias"])


def test_frozen_parameters_are_part_of_every_version(publisher) -> None:
    values, learners = values_of(7), shardings_of((1, 2, 2), "learner")
    base = {name: value for name, value in params_of(values, learners).items() if name != "bias"}
    publisher.freeze(V1, base)
    for version, seed in ((V1, 8), (V2, 9)):
        bias = params_of(values_of(seed), learners)["bias"]
        placed = fetched(publisher.publish(version, {"bias": bias})).place()
        np.testing.assert_array_equal(np.asarray(placed["bias"]), values_of(seed)["bias"])
        np.testing.assert_array_equal(np.asarray(placed["embed"]), values["embed"])


def test_weights_of_a_publisher_that_is_gone_or_elsewhere_are_refused(publisher) -> None:
    params = params_of(values_of(1), shardings_of((1, 2, 2), "learner"))
    with pytest.raises(VersionGone, match="a process that is gone, or by another"):
        fetched(VersionRef(V1, "device", "nowhere", ""))
    snapshot = publisher.publish(V1, params)
    publisher.close()
    with pytest.raises(VersionGone, match="a process that is gone"):
        fetched(snapshot)


def test_parameters_of_another_model_are_refused_by_name(publisher) -> None:
    params = params_of(values_of(1), shardings_of((1, 2, 2), "learner"))
    with pytest.raises(TransferError, match=r"leaf 'odd' is in this model but not published"):
        fetched(publisher.publish(V1, {name: value for name, value in params.items() if name != "odd"}))
    with pytest.raises(TransferError, match=r"leaf 'odd': published with shape \(8,\), this model has \(3, 5\)"):
        fetched(publisher.publish(V2, params | {"odd": params["bias"]}))


@pytest.mark.parametrize(
    ("dims", "rules"), [((1, 1, 4), "sampler"), ((1, 1, 2), "sampler"), ((1, 2, 2), "learner")], ids=str
)
def test_an_engine_with_devices_that_the_learner_has_not_is_served_too(publisher, dims, rules) -> None:
    values = values_of(1)
    snapshot = publisher.publish(V1, params_of(values, shardings_of((1, 1, 1), "replicated")))
    for name, value in fetched(snapshot, dims, rules).place().items():
        assert value.sharding.is_equivalent_to(shardings_of(dims, rules)[name], value.ndim)
        np.testing.assert_array_equal(np.asarray(value), values[name])


def test_devices_in_another_order_are_served_too(publisher) -> None:
    values = values_of(1)
    snapshot = publisher.publish(V1, params_of(values, shardings_of((1, 2, 2), "learner")))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4])[::-1].reshape(1, 1, 4), ("data", "fsdp", "tensor"))
    target = {name: NamedSharding(mesh, PartitionSpec(*SPECS["sampler"].get(name, ()))) for name in SHAPES}
    placed = Receiver(TransferConfig()).fetch(snapshot, target, abstract_of(SHAPES)).place()
    for name, value in values.items():
        assert placed[name].sharding.is_equivalent_to(target[name], value.ndim)
        np.testing.assert_array_equal(np.asarray(placed[name]), value)
