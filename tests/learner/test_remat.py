"""Rematerialization in the backward pass: less memory for more work, and the same gradients."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.learner import packing
from jaxroll.learner.trainer import TrainingPrograms
from jaxroll.models import families, params

ROWS, TOKENS = 2, 256
SPEC = dataclasses.replace(families.spec("nano"), layers=6)


@functools.cache
def streams() -> dict[str, np.ndarray]:
    chance, out = np.random.default_rng(0), packing.empty_streams(ROWS, TOKENS)
    out["tokens"][:] = chance.integers(0, SPEC.vocab_size, (ROWS, TOKENS))
    out["positions"][:], out["segment_ids"][:], out["mask"][:, 1:] = np.arange(TOKENS), 1, True
    out["advantage"][:], out["weight"][:, 1:] = chance.normal(size=(ROWS, TOKENS)), 0.01
    return out


@pytest.fixture
def programs(small_config, make_recipe):
    """The programs of a learner with `learner.remat`."""

    def make(remat: str) -> TrainingPrograms:
        recipe = make_recipe(small_config(micro_batch_rows=ROWS, row_tokens=TOKENS, remat=remat))
        return TrainingPrograms(dataclasses.replace(recipe, spec=dataclasses.replace(SPEC, remat=recipe.spec.remat)))

    return make


@pytest.mark.soak
def test_less_is_kept_more_is_computed_and_the_gradients_stay(programs):
    kept, work, gradients = {}, {}, {}
    weights = params.init(SPEC, jax.random.key(0), sharding.build(MeshConfig()), sharding.LEARNER)
    for remat in ("none", "dots", "layer"):
        made = programs(remat)
        assert made.recipe.spec.remat == remat
        compiled = made.lowered("accumulate", ROWS).compile()
        kept[remat] = compiled.memory_analysis().temp_size_in_bytes
        work[remat] = compiled.cost_analysis()["flops"]
        gradients[remat] = jax.device_get(compiled(weights, made.zeros(), made.placed(streams()), {}).grads)
    assert kept["none"] > kept["dots"] > kept["layer"], kept
    assert work["none"] < work["dots"] < work["layer"], work
    for remat in ("dots", "layer"):
        for name, want in gradients["none"].items():
            scale = float(np.abs(want).max())
            np.testing.assert_allclose(gradients[remat][name], want, rtol=0, atol=1e-5 * scale, err_msg=name)


def test_remat_auto_is_the_models_choice(programs):
    assert programs("auto").recipe.spec.remat == families.spec("nano").remat == "none"
    assert families.spec("qwen3_8b").remat == "layer"
