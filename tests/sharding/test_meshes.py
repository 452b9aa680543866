"""Meshes have four named axes, take the first devices, and refuse what is not there."""

import jax
import pytest
from jax.sharding import AxisType

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError


def test_axes_have_one_order_and_auto_type():
    mesh = sharding.build(MeshConfig(data=2, fsdp=1, tensor=4))
    assert mesh.axis_names == ("data", "fsdp", "expert", "sequence", "tensor")
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "expert": 1, "sequence": 1, "tensor": 4}
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_a_smaller_mesh_takes_the_first_devices():
    mesh = sharding.build(MeshConfig(tensor=2), jax.devices()[4:])
    assert sorted(device.id for device in mesh.devices.flat) == [device.id for device in jax.devices()[4:6]]


def test_too_few_devices_say_how_many_are_here():
    with pytest.raises(ConfigError, match=r"needs 16 devices, this process has 8"):
        sharding.build(MeshConfig(data=16))


def test_an_axis_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"mesh\.fsdp = 0"):
        sharding.build(MeshConfig(fsdp=0))


def test_the_platform_is_that_of_the_mesh():
    assert sharding.platform(sharding.build(MeshConfig())) == sharding.platform() == "cpu"
    assert sharding.memory_bytes(jax.devices()[0]) is None
