"""Rules turn logical axes into shardings: collisions and unknown names are errors, uneven axes stay whole."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxroll import sharding as layouts
from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError

MESH = layouts.build(MeshConfig(data=2, fsdp=2, tensor=2))


@pytest.mark.parametrize(
    ("logical", "learner", "sampler"),
    [
        (("vocab", "embed"), P("tensor", ("fsdp", "expert", "sequence")), P("tensor", None)),
        (("embed", "heads", "head_dim"), P(("fsdp", "expert", "sequence"), "tensor", None), P(None, "tensor", None)),
        (("mlp", "embed"), P("tensor", ("fsdp", "expert", "sequence")), P("tensor", None)),
        (("norm",), P(None), P(None)),
        (("experts", "expert_embed", "mlp"), P("expert", ("fsdp", "sequence"), "tensor"), P("expert", None, "tensor")),
        (
            ("layers", "slots", "tokens", "kv_heads", "head_dim"),
            P(None, ("data", "fsdp", "expert"), "sequence", "tensor", None),
            P(None, ("data", "fsdp", "expert"), None, "tensor", None),
        ),
    ],
)
def test_the_tables_say_where_arrays_lie(logical, learner, sampler):
    assert layouts.spec(logical, layouts.LEARNER) == learner
    assert layouts.spec(logical, layouts.SAMPLER) == sampler


def test_batches_are_split_over_all_axes_but_tensor():
    for table, tokens in ((layouts.LEARNER, "sequence"), (layouts.SAMPLER, None)):
        assert layouts.batch_spec(table) == P(("data", "fsdp", "expert"), tokens)


def test_one_mesh_axis_cannot_split_two_axes_of_an_array():
    with pytest.raises(ConfigError, match=r"two axes use the mesh axis 'tensor'"):
        layouts.spec(("heads", "mlp"), layouts.LEARNER)
    with pytest.raises(ConfigError, match=r"two axes use the mesh axis 'fsdp'"):
        layouts.spec(("rows", "embed"), layouts.LEARNER)


def test_an_unknown_logical_axis_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"hedas.*heads"):
        layouts.spec(("hedas",), layouts.LEARNER)


def test_a_sharding_has_an_axis_name_for_every_axis():
    with pytest.raises(ConfigError, match="names 1 axes"):
        layouts.sharding(MESH, ("mlp",), layouts.LEARNER, (4, 4))


@given(size=st.integers(1, 12), rows=st.integers(1, 12))
def test_an_axis_is_split_exactly_when_its_devices_divide_it(size, rows):
    placed = layouts.sharding(MESH, ("rows", "mlp"), layouts.LEARNER, (rows, size))
    shard = placed.shard_shape((rows, size))
    assert shard == (rows // 4 if rows % 4 == 0 else rows, size // 2 if size % 2 == 0 else size)


def test_a_layout_pins_an_activation():
    layout = layouts.Layout(MESH, layouts.LEARNER)
    x = jax.jit(lambda: layout.constrain(jnp.ones((8, 4, 6)), ("rows", "tokens", "mlp")))()
    assert x.sharding.is_equivalent_to(layout.sharding(("rows", "tokens", "mlp"), x.shape), 3)
    assert x.addressable_shards[0].data.shape == (2, 4, 3)
