"""Parameters by name: derived from the module, sharded at birth, the same on every mesh."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxroll import sharding as layout
from jaxroll.config import MeshConfig
from jaxroll.errors import DataError
from jaxroll.models import families, params, transformer
from jaxroll.models.layers import Decoder

NANO = families.spec("nano")
UNTIED = dataclasses.replace(NANO, tied_embeddings=False)
CRITIC = dataclasses.replace(UNTIED, value_head=True)
ONE = layout.build(MeshConfig())
EIGHT = layout.build(MeshConfig(data=2, fsdp=2, tensor=2))


def test_names_are_dotted_and_sorted():
    names = list(params.abstract(UNTIED))
    assert names == sorted(names)
    assert {"embed", "head", "final_norm", "layers.00.attn.q", "layers.01.mlp.down", "layers.01.attn.k_norm"} <= set(
        names
    )
    assert "head" not in params.abstract(NANO)


def test_every_parameter_declares_its_axes():
    shapes, axes = params.abstract(UNTIED), params.logical_axes(UNTIED)
    assert shapes.keys() == axes.keys()
    assert all(len(axes[name]) == len(shapes[name].shape) for name in shapes)
    assert axes["layers.00.attn.o"] == ("heads", "head_dim", "embed")


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
def test_an_engine_holds_them_in_the_dtype_that_they_are_cast_to_anyway(dtype):
    spec = dataclasses.replace(UNTIED, compute_dtype=dtype)
    shapes = params.abstract(spec)
    held = params.served(spec)
    assert {leaf.dtype for leaf in held.values()} == {jnp.dtype(dtype)}
    assert {n: leaf.shape for n, leaf in held.items()} == {n: leaf.shape for n, leaf in shapes.items()}
    values = params.init(spec, jax.random.key(0), ONE, layout.SAMPLER)
    cast = {name: value.astype(held[name].dtype) for name, value in values.items()}
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    places, segments = jnp.tile(jnp.arange(6, dtype=jnp.int32), (2, 1)), jnp.ones((2, 6), jnp.int32)
    # One operation after the other: in one program XLA may leave out a rounding to bfloat16 that is undone at once.
    with jax.disable_jit():
        scores = [
            transformer.logits(spec, each, transformer.forward(spec, each, tokens, places, segments))
            for each in (values, cast)
        ]
        np.testing.assert_array_equal(*scores)


def test_a_critic_has_one_number_in_place_of_the_scores():
    shapes, axes = params.abstract(CRITIC), params.logical_axes(CRITIC)
    assert shapes.keys() - {"value"} == params.abstract(UNTIED).keys() - {"head"}
    assert shapes["value"].shape == (NANO.width, 1) and axes["value"] == ("embed", "value")
    assert params.shardings(CRITIC, EIGHT, layout.LEARNER)["value"].spec == jax.P(("fsdp", "expert", "sequence"), None)
    assert sum(leaf.size for leaf in shapes.values()) == families.parameter_count(CRITIC)
    values = params.init(CRITIC, jax.random.key(0), ONE, layout.LEARNER)
    weights = jnp.arange(NANO.width, dtype=jnp.float32)
    hidden = jax.random.normal(jax.random.key(1), (2, 3, NANO.width))
    assert not transformer.values(CRITIC, values, hidden).any()
    said = transformer.values(CRITIC, values | {"value": weights[:, None]}, hidden)
    np.testing.assert_allclose(said, (np.asarray(hidden, np.float64) * np.asarray(weights)).sum(-1), rtol=1e-4)


@pytest.mark.parametrize("size", ("nano", "tiny", "qwen3_0p6b", "qwen2p5_7b", "gemma3_27b"))
def test_at_least_nine_tenths_of_the_bytes_are_sharded(size):
    spec = families.spec(size)
    spec = dataclasses.replace(spec, layers=2, windows=spec.windows[4:6])
    leaves, placed = params.abstract(spec), params.shardings(spec, EIGHT, layout.LEARNER)
    split = sum(leaf.size for name, leaf in leaves.items() if not placed[name].is_fully_replicated)
    assert split >= 0.9 * sum(leaf.size for leaf in leaves.values())
    per_device = sum(math.prod(placed[name].shard_shape(leaf.shape)) for name, leaf in leaves.items())
    assert per_device <= 0.3 * sum(leaf.size for leaf in leaves.values())  # a quarter, and the norms


def test_init_is_sharded_at_birth_and_equal_on_every_mesh():
    here = params.init(NANO, jax.random.key(3), ONE, layout.LEARNER)
    for table in (layout.LEARNER, layout.SAMPLER):
        there = params.init(NANO, jax.random.key(3), EIGHT, table)
        for name, sharding in params.shardings(NANO, EIGHT, table).items():
            assert there[name].sharding.is_equivalent_to(sharding, there[name].ndim)
            np.testing.assert_array_equal(here[name], there[name])


@pytest.mark.parametrize("spec", [UNTIED, CRITIC], ids=["head", "value head"])
def test_init_layer_by_layer_is_that_of_the_whole_decoder(spec):
    """Bit for bit: a seed names the same model as before layers were created by one program."""
    key = jax.random.key(3)
    whole = jax.jit(lambda key: nnx.state(Decoder(spec, nnx.Rngs(params=key)), nnx.Param))(key)
    wanted = {params._name(path): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(whole)}
    found = params.init(spec, key, ONE, layout.LEARNER)
    assert list(found) == sorted(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_init_differs_between_keys_and_between_layers():
    first, second = (params.init(NANO, jax.random.key(seed), ONE, layout.LEARNER) for seed in (0, 1))
    assert not np.array_equal(first["layers.00.attn.q"], second["layers.00.attn.q"])
    assert not np.array_equal(first["layers.00.attn.q"], first["layers.01.attn.q"])
    np.testing.assert_allclose(np.std(first["layers.00.mlp.gate"]), 1 / math.sqrt(NANO.width), rtol=0.1)


def test_parameters_that_do_not_fit_the_model_are_named():
    values = params.init(NANO, jax.random.key(0), ONE, layout.LEARNER)
    with pytest.raises(ValueError, match=r"missing \['head'\]"):
        params.module(UNTIED, values)
    with pytest.raises(ValueError, match=r"unknown \['heda'\]"):
        params.module(NANO, values | {"heda": values["embed"]})
    with pytest.raises(ValueError, match=r"final_norm has shape \(31,\)"):
        params.module(NANO, values | {"final_norm": jnp.ones(31)})


def test_hugging_face_tensors_come_back_unchanged():
    values = {
        name: np.asarray(leaf) for name, leaf in params.init(UNTIED, jax.random.key(1), ONE, layout.LEARNER).items()
    }
    theirs = params.exported(UNTIED, values)
    assert theirs["model.layers.1.self_attn.q_proj.weight"].shape == (4 * 8, 32)
    assert theirs["model.layers.0.self_attn.o_proj.weight"].shape == (32, 4 * 8)
    assert theirs["model.layers.0.mlp.down_proj.weight"].shape == (32, 96)
    assert theirs["lm_head.weight"].shape == (64, 32)
    back = params.imported(UNTIED, theirs.__getitem__)
    assert back.keys() == values.keys()
    for name in values:
        np.testing.assert_array_equal(back[name], values[name])


def test_a_checkpoint_of_another_model_says_what_is_wrong():
    values = params.init(NANO, jax.random.key(1), ONE, layout.LEARNER)
    theirs = params.exported(NANO, values)
    with pytest.raises(DataError, match=r"no tensor 'lm_head\.weight'"):
        params.imported(UNTIED, theirs.__getitem__)
    with pytest.raises(DataError, match=r"embed_tokens\.weight' has shape \(64, 32\).*needs \(72, 32\)"):
        params.imported(dataclasses.replace(NANO, vocab_size=72), theirs.__getitem__)
