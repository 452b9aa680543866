"""Costs of a program compiled ahead of time, against arithmetic, on the CPU's forced devices."""

import jax
import jax.numpy as jnp
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError
from jaxroll.tools import aot, chips

MESH = sharding.build(MeshConfig(fsdp=2, tensor=2))
SPLIT = jax.NamedSharding(MESH, jax.P("fsdp", "tensor"))
WHOLE = jax.NamedSharding(MESH, jax.P())


def test_costs_are_those_of_one_device():
    shapes = {"a": jax.ShapeDtypeStruct((64, 32), jnp.float32), "b": jax.ShapeDtypeStruct((32, 16), jnp.float32)}
    args = aot.abstract(shapes, {"a": SPLIT, "b": WHOLE})
    product = jax.jit(lambda x: x["a"] @ x["b"], out_shardings=jax.NamedSharding(MESH, jax.P("fsdp")))
    program, cost = aot.compiled("product", product, args)
    assert (cost.name, cost.argument_bytes, cost.output_bytes) == ("product", 4 * (32 * 16 + 32 * 16), 4 * 32 * 16)
    assert cost.flops >= 2 * 32 * 16 * 16
    assert cost.peak_bytes >= cost.argument_bytes + cost.output_bytes
    assert cost.compile_s > 0
    out = program({name: jax.device_put(jnp.ones(leaf.shape), leaf.sharding) for name, leaf in args.items()})
    assert (out == 32).all()


def test_a_donated_argument_is_not_counted_twice():
    args = aot.abstract([jax.ShapeDtypeStruct((128, 128), jnp.float32)], SPLIT)
    _, kept = aot.compiled("kept", jax.jit(lambda x: x + 1), *args)
    _, donated = aot.compiled("donated", jax.jit(lambda x: x + 1, donate_argnums=0), *args)
    assert (kept.alias_bytes, donated.alias_bytes) == (0, 4 * 64 * 64)
    assert kept.peak_bytes - donated.peak_bytes == 4 * 64 * 64


def test_a_platform_without_topologies_is_refused():
    with pytest.raises(ConfigError, match="cannot be described on abacus"):
        aot.topology_mesh(MeshConfig(), "v5e:2x2", platform="abacus")


def test_the_childs_environment_disables_the_search_for_a_tpu_and_its_lock():
    expected = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    assert expected.items() <= chips.tpu_environment().items()
