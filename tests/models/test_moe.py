"""Mixture of experts: the layer by definition, replayed choices, the load, and the same results on eight devices."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError
from jaxroll.models import families, hf_config, moe, params
from tests.models.test_golden import GOLDEN
from tests.models.test_sharded import ONE, loss_and_gradients

SPEC = families.spec("tiny_moe")
LAYER = "layers.00.mlp."
EXPERTS = [f"layers.{layer:02d}.mlp.experts.{part}" for layer in range(SPEC.layers) for part in ("gate", "up", "down")]


@functools.cache
def weights() -> dict[str, np.ndarray]:
    made = params.init(SPEC, jax.random.key(3), sharding.build(ONE), sharding.LEARNER)
    return {name: np.asarray(value) for name, value in made.items()}


def by_definition(x: np.ndarray, chosen: np.ndarray | None, normalized: bool) -> np.ndarray:
    """One token at a time, in float64."""
    router, gate, up, down = (
        weights()[LAYER + name].astype(np.float64) for name in ("router", "experts.gate", "experts.up", "experts.down")
    )
    rows = []
    for at, token in enumerate(x.astype(np.float64)):
        logits = token @ router
        probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        picked = np.argsort(-logits)[: SPEC.experts_per_token] if chosen is None else chosen[at]
        scale = probabilities[picked] / (probabilities[picked].sum() if normalized else 1)
        inner = [(g := token @ gate[e]) / (1 + np.exp(-g)) * (token @ up[e]) for e in picked]
        rows.append(sum(s * (h @ down[e]) for s, h, e in zip(scale, inner, picked, strict=True)))
    return np.array(rows)


@functools.partial(jax.jit, static_argnames="normalized")
def layer(x, values, choices=None, normalized=True):
    logits = moe.router_logits(x, values["router"])
    choose = moe.largest(SPEC.experts_per_token) if choices is None else moe.replayed(choices)
    chosen = choose(logits, logits)
    experts = moe.ExpertWeights(*(values[f"experts.{name}"] for name in moe.ExpertWeights._fields))
    return moe.mixed(x, chosen, moe.gates(logits, chosen, normalized), experts, None), chosen


def of_layer() -> dict[str, np.ndarray]:
    return {name.removeprefix(LAYER): value for name, value in weights().items() if name.startswith(LAYER)}


@pytest.mark.parametrize("normalized", [True, False])
def test_every_token_gets_the_weighted_sum_of_its_experts(normalized: bool) -> None:
    x = np.random.default_rng(0).normal(size=(40, SPEC.width)).astype(np.float32)
    found, chosen = layer(x, of_layer(), normalized=normalized)
    np.testing.assert_allclose(found, by_definition(x, None, normalized), atol=2e-5)
    assert len(np.unique(chosen)) == SPEC.experts, "the example must use every expert"


def block_of(spec: families.ModelSpec, more: Mapping[str, jax.Array] = MappingProxyType({})):
    """The first block with `weights()`."""
    of_block = {name.removeprefix("layers.00."): jnp.asarray(value) for name, value in weights().items()}
    return params.block(spec, {name: of_block[name] for name in params.block_axes(SPEC)} | more)


@pytest.mark.parametrize(
    ("option", "normalized"), [({"norm_topk_prob": True}, True), ({"norm_topk_prob": False}, False), ({}, False)]
)
def test_a_block_weighs_its_experts_as_its_config_json_says(option: dict[str, bool], normalized: bool) -> None:
    config = json.loads((GOLDEN / "moe" / "config.json").read_text())
    del config["norm_topk_prob"]
    read = hf_config.from_huggingface(config | option)
    assert hf_config.to_huggingface(read, "float32")["norm_topk_prob"] is normalized
    x = np.random.default_rng(4).normal(size=(20, SPEC.width)).astype(np.float32)
    mixture = block_of(dataclasses.replace(SPEC, normalized_gates=read.normalized_gates)).mlp
    found = mixture(jnp.asarray(x), moe.Routing(moe.largest(SPEC.experts_per_token)))
    np.testing.assert_allclose(found, by_definition(x, None, normalized), atol=2e-5)


def test_the_router_of_a_bfloat16_model_computes_in_float32() -> None:
    """Its weights, logits, softmax and division; the weighted sum is rounded once."""
    rng, k = np.random.default_rng(5), SPEC.experts_per_token
    x, asked = jnp.asarray(rng.normal(size=(200, SPEC.width)), jnp.bfloat16), []

    def choose(logits, scores):
        asked.append(logits)
        return moe.largest(k)(logits, scores)

    mixture = block_of(dataclasses.replace(SPEC, compute_dtype="bfloat16")).mlp
    mixture(x, moe.Routing(choose))
    (logits,) = asked
    exact = np.asarray(x, np.float64) @ weights()[LAYER + "router"].astype(np.float64)
    np.testing.assert_allclose(logits, exact, atol=1e-5)
    chosen = np.argsort(-exact, axis=-1)[:, :k]
    np.testing.assert_array_equal(moe.largest(k)(logits, logits), chosen)
    shares = np.take_along_axis(np.exp(exact) / np.exp(exact).sum(-1, keepdims=True), chosen, -1)
    scales = {False: shares, True: shares / shares.sum(-1, keepdims=True)}
    for normalized, scale in scales.items():
        np.testing.assert_allclose(moe.gates(logits, jnp.asarray(chosen), normalized), scale, rtol=1e-5)
    experts = moe.ExpertWeights(*(jnp.asarray(of_layer()[f"experts.{name}"]) for name in moe.ExpertWeights._fields))
    one_hot = np.eye(k, dtype=np.float32)
    pairs = [moe.mixed(x, jnp.asarray(chosen), jnp.tile(one, (len(x), 1)), experts, None) for one in one_hot]
    whole = sum(
        np.asarray(pair, np.float32) * scale for pair, scale in zip(pairs, scales[True].T[..., None], strict=True)
    )
    found = np.asarray(mixture(x, moe.Routing(moe.largest(k))), np.float32)
    np.testing.assert_allclose(found, whole, rtol=2**-8 * 1.001, atol=1e-6)


def test_replayed_choices_replace_those_of_the_router_and_unknown_ones_do_not() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(30, SPEC.width)).astype(np.float32)
    dtype = moe.recorded_dtype(SPEC)
    choices = np.array([rng.permutation(SPEC.experts)[:2] for _ in x]).astype(dtype)
    choices[10:20] = np.iinfo(dtype).max
    found, chosen = layer(x, of_layer(), choices)
    np.testing.assert_array_equal(chosen[:10], choices[:10])
    np.testing.assert_array_equal(chosen[10:20], layer(x, of_layer())[1][10:20])
    np.testing.assert_allclose(found, by_definition(x, np.asarray(chosen), True), atol=2e-5)


def test_router_biases_choose_experts_and_do_not_weigh_them() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(40, SPEC.width)).astype(np.float32)
    bias = 2 * rng.normal(size=SPEC.experts).astype(np.float32)
    spec = dataclasses.replace(SPEC, router_bias=True)
    mixture = block_of(spec, {"mlp.router_bias": jnp.asarray(bias)}).mlp
    found = mixture(jnp.asarray(x), moe.Routing(moe.largest(SPEC.experts_per_token)))
    logits = x @ weights()[LAYER + "router"]
    chosen = np.argsort(-(logits + bias), axis=-1)[:, : SPEC.experts_per_token]
    assert (np.sort(chosen) != np.sort(np.argsort(-logits, axis=-1)[:, : SPEC.experts_per_token])).any(-1).sum() > 10
    np.testing.assert_allclose(found, by_definition(x, chosen, True), atol=2e-5)


def test_the_balance_loss_is_that_of_its_definition() -> None:
    """By hand: 1 for an even load with even probabilities, E if one expert gets everything."""
    E, real = 4, np.array([[True, True, True, False]])
    logits = np.array([[[9.0, 0, 0, 0], [9, 0, 0, 0], [0, 9, 0, 0], [0, 0, 0, 9]]], np.float32)
    chosen = logits.argmax(-1)[..., None]
    loads = jax.tree.map(lambda x: x[None], moe.load(jnp.asarray(logits), jnp.asarray(chosen), jnp.asarray(real)))
    mean = np.exp(logits[0, :3]) / np.exp(logits[0, :3]).sum(-1, keepdims=True)
    expected = E * np.sum(np.array([2, 1, 0, 0]) / 3 * mean.mean(0))
    assert float(moe.balance_loss(loads)) == pytest.approx(expected, rel=1e-6)
    even = jnp.full((1, E), 5.0)
    assert float(moe.balance_loss(moe.ExpertLoad(even, even))) == pytest.approx(1)
    one = jnp.array([[8.0, 0, 0, 0]])
    assert float(moe.balance_loss(moe.ExpertLoad(one, one))) == pytest.approx(E)
    assert float(moe.balance_loss(moe.ExpertLoad(0 * one, 0 * one))) == 0


@functools.cache
def alone():
    return loss_and_gradients(SPEC, ONE, "propagated")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("mesh", "remat"), [(MeshConfig(expert=8), "none"), (MeshConfig(expert=2, sequence=2, tensor=2), "layer")]
)
def test_loss_and_gradients_on_eight_devices_equal_one(mesh: MeshConfig, remat: families.Remat) -> None:
    spec = dataclasses.replace(SPEC, remat=remat)
    expected_loss, expected = alone()
    loss, gradients = loss_and_gradients(spec, mesh, "pinned")
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name in expected:
        np.testing.assert_allclose(gradients[name], expected[name], atol=1e-5, rtol=1e-5, err_msg=name)
    assert max(float(jnp.abs(expected[name]).max()) for name in EXPERTS) > 1e-3, "gradients too small to compare"


@pytest.mark.parametrize("mesh", [MeshConfig(expert=8), MeshConfig(fsdp=2, expert=4), MeshConfig(expert=4, tensor=2)])
@pytest.mark.parametrize("table", [sharding.LEARNER, sharding.SAMPLER], ids=["learner", "sampler"])
def test_experts_are_divided_over_the_axis(mesh: MeshConfig, table: sharding.Rules) -> None:
    placed, shapes = params.shardings(SPEC, sharding.build(mesh), table), params.abstract(SPEC)
    parts = {name: math.prod(placed[name].shard_shape(shapes[name].shape)) for name in EXPERTS}
    whole = {name: math.prod(shapes[name].shape) for name in EXPERTS}
    divisor = mesh.devices if table is sharding.LEARNER else mesh.expert * mesh.tensor
    assert sum(parts.values()) * divisor == sum(whole.values())


def test_a_mesh_that_does_not_divide_the_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.mesh\.expert = 3: does not divide the 8 experts of tiny_moe"):
        families.check_mesh(SPEC, MeshConfig(expert=3), "learner.mesh")
    with pytest.raises(ConfigError, match="expert = 2"):
        families.check_mesh(families.spec("tiny"), MeshConfig(expert=2), "learner.mesh")
