"""Layers in a loop: the same loss and gradients as layer by layer, and one compiled layer for any depth."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxroll import sharding as layouts
from jaxroll.algorithms.sampling import token_logprobs
from jaxroll.config import MeshConfig
from jaxroll.models import families, moe, params, transformer
from jaxroll.sharding import Layout
from tests.models.test_sharded import ONE, batch

NANO = dataclasses.replace(families.spec("nano"), layers=3)
SPECS = {
    "one window": NANO,
    "a pattern and a rest": dataclasses.replace(NANO, layers=5, windows=(4, 0, 4, 0, 4), local_rope_theta=50.0),
    "experts": dataclasses.replace(families.spec("tiny_moe"), vocab_size=64, remat="layer"),
}


def gradients(spec: families.ModelSpec, mesh: MeshConfig, choices: np.ndarray | None):
    layout = Layout(layouts.build(mesh), layouts.LEARNER)

    @jax.jit
    def loss(values, tokens, positions, segments):
        hidden, loads = transformer.forward_with_load(
            spec,
            values,
            tokens,
            positions,
            segments,
            layout=layout,
            choices=None if choices is None else jnp.asarray(choices),
        )
        logprobs = token_logprobs(transformer.logits(spec, values, hidden[:, :-1]), tokens[:, 1:], 1.0)
        trained = (segments[:, 1:] > 0) & (segments[:, 1:] == segments[:, :-1])
        balance = moe.balance_loss(loads) if loads is not None else 0.0
        return -jnp.sum(logprobs * trained) / jnp.sum(trained) + 0.1 * balance

    values = params.init(spec, jax.random.key(0), layout.mesh, layouts.LEARNER)
    return jax.jit(jax.value_and_grad(loss))(values, *batch())


@pytest.mark.parametrize(
    "name", [name if name == "experts" else pytest.param(name, marks=pytest.mark.soak) for name in SPECS]
)
def test_loss_and_gradients_are_those_of_single_layers(name: str) -> None:
    spec, choices = SPECS[name], None
    if spec.experts:
        rng = np.random.default_rng(0)
        shape = (*batch()[0].shape, spec.layers, spec.experts_per_token)
        choices = rng.integers(0, spec.experts, shape).astype(np.uint8)
        choices[:, 5:9] = 255
    expected_loss, expected = gradients(spec, ONE, choices)
    mesh = {"one window": MeshConfig(fsdp=2, tensor=2), "experts": MeshConfig(fsdp=2, expert=2)}.get(name, ONE)
    loss, found = gradients(dataclasses.replace(spec, scan=True), mesh, choices)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, rtol=1e-5, err_msg=name)


def compile_s(layers: int, scan: bool) -> float:
    """CPU seconds that the forward pass takes to compile."""
    spec = dataclasses.replace(families.spec("tiny"), layers=layers, scan=scan)
    lowered = jax.jit(functools.partial(transformer.forward, spec)).lower(params.abstract(spec), *batch())
    start_s = time.process_time()
    lowered.compile()
    return time.process_time() - start_s


@pytest.fixture
def empty_cache(tmp_path: Path) -> Iterator[None]:
    """An empty compilation cache for this test."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.soak
def test_36_layers_compile_in_at_most_twice_the_time_of_4(empty_cache) -> None:
    compile_s(1, scan=True)  # the first compilation of a process starts threads
    few, many, unrolled = compile_s(4, scan=True), compile_s(36, scan=True), compile_s(36, scan=False)
    print(f"scan: 4 layers {few:.2f} s, 36 layers {many:.2f} s; layer by layer: 36 layers {unrolled:.2f} s")
    assert many <= 2 * few and unrolled > 2 * many


def test_the_program_does_not_grow_with_the_number_of_layers() -> None:
    def operations(layers: int, scan: bool) -> int:
        spec = dataclasses.replace(NANO, layers=layers, scan=scan)
        forward = jax.jit(functools.partial(transformer.forward, spec))
        return forward.lower(params.abstract(spec), *batch()).as_text().count("stablehlo.dot_general")

    assert operations(12, scan=True) == operations(3, scan=True)
    assert operations(12, scan=False) == 4 * operations(3, scan=False), "the comparison would prove nothing"
