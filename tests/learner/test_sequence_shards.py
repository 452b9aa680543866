"""Rows whose tokens are divided over the mesh axis `sequence`: the gradients and statistics of one device."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from jaxroll.config import MeshConfig
from jaxroll.kernels.attention import SharedRows
from jaxroll.learner import packing
from jaxroll.learner.step import Recipe
from jaxroll.learner.trainer import TrainingPrograms
from jaxroll.models import families, params

ROWS, TOKENS = 4, 96
SPEC = families.spec("nano", vocab_size=256)
DIVIDED = MeshConfig(fsdp=2, tensor=2, sequence=2)


@pytest.fixture
def programs(small_config, make_recipe):
    """The programs of a learner on `mesh`, with logits in parts of at most 1 / `parts`."""

    def make(mesh: MeshConfig, parts: int = 8, **changes) -> TrainingPrograms:
        made: Recipe = make_recipe(small_config(micro_batch_rows=ROWS, row_tokens=TOKENS, mesh=mesh))
        whole_mb = ROWS * TOKENS * SPEC.vocab_size * 4 / 2**20
        changes = {"spec": SPEC} | changes
        return TrainingPrograms(dataclasses.replace(made, logits_mb=whole_mb / parts / mesh.devices, **changes))

    return make


def streams(recipe: Recipe) -> dict[str, np.ndarray]:
    """Rows of random segments, of which some lie in both shards of a row, with padding at the end."""
    chance, out = np.random.default_rng(0), packing.empty_streams(ROWS, TOKENS, recipe.support)
    for row in range(ROWS):
        start, segment = 0, 1
        while start < TOKENS - 8:
            end = min(start + int(chance.integers(5, 60)), TOKENS - 8)
            at = row, slice(start, end)
            out["positions"][at], out["segment_ids"][at] = np.arange(end - start), segment
            out["mask"][row, start + 1 : end] = True
            start, segment = end, segment + 1
    assert (out["segment_ids"][:, TOKENS // 2 - 1] == out["segment_ids"][:, TOKENS // 2]).any()
    out["tokens"][:] = chance.integers(0, SPEC.vocab_size, (ROWS, TOKENS))
    out["behaviour"][:], out["advantage"][:] = -chance.random((ROWS, TOKENS)), chance.normal(size=(ROWS, TOKENS))
    out["weight"][:] = out["mask"] / out["mask"].sum()
    if recipe.support:
        ids = (out["tokens"][..., None] + np.arange(recipe.support)) % SPEC.vocab_size
        out[packing.SUPPORT][:] = np.where(out["mask"][..., None], ids, -1)
    if recipe.rows:
        first = recipe.rows.prompt_tokens
        out["segment_ids"][:, :first] = np.where(np.arange(first) < first // 2, 1, 2)
        out["segment_ids"][:, first:] += 2
        out["mask"][:, :first] = False
        out[packing.PROMPT_IDS] = np.where(np.arange(TOKENS) < first, 0, out["segment_ids"] % 3).astype(np.int32)
    return out


def gradients(made: TrainingPrograms) -> dict[str, np.ndarray]:
    layout = made.recipe.layout
    weights = params.init(SPEC, jax.random.key(0), layout.mesh, layout.rules)
    out = made.accumulate(weights, made.zeros(), made.placed(streams(made.recipe)))
    return jax.device_get({**out.grads, **out.statistics})


@pytest.mark.parametrize(
    "changes",
    [pytest.param({"support": 6}, marks=pytest.mark.soak), {"rows": SharedRows(32, 2, 32)}],
    ids=["truncated samples", "shared prompts"],
)
def test_gradients_and_statistics_are_those_of_one_device(programs, changes):
    one, divided = (gradients(programs(mesh, **changes)) for mesh in (MeshConfig(), DIVIDED))
    for name, want in one.items():
        scale = max(1e-6, float(np.abs(want).max()))
        np.testing.assert_allclose(divided[name], want, rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.mark.soak
def test_gradients_are_those_of_one_device_where_heads_cannot_be_divided(programs):
    """Four query heads over 2 × 4 devices: keys and values are gathered."""
    one, divided = (gradients(programs(mesh)) for mesh in (MeshConfig(), MeshConfig(tensor=2, sequence=4)))
    for name, want in one.items():
        scale = max(1e-6, float(np.abs(want).max()))
        np.testing.assert_allclose(divided[name], want, rtol=0, atol=1e-5 * scale, err_msg=name)


def test_a_device_holds_its_part_of_the_tokens_and_of_the_parameters(programs):
    made = programs(DIVIDED)
    batch = made.placed(streams(made.recipe))["tokens"]
    assert {shard.data.shape for shard in batch.addressable_shards} == {(ROWS // 2, TOKENS // 2)}
    weights = params.init(SPEC, jax.random.key(0), made.recipe.layout.mesh, made.recipe.layout.rules)
    of_device = sum(leaf.addressable_shards[0].data.size for leaf in weights.values())
    assert of_device < 1.1 * sum(leaf.size for leaf in weights.values()) / 8
    text = made.lowered("accumulate", ROWS).compile().as_text()
    assert text is not None and "all-to-all" in text
    shapes = [tuple(map(int, found.split(","))) for found in re.findall(r"\b[a-z]\w*\[([0-9,]+)\]", text)]
    embedding = {SPEC.width, SPEC.width // 2, SPEC.width // 4}
    logits = max(math.prod(shape) for shape in shapes if SPEC.vocab_size // 2 in shape and not embedding & {*shape})
    assert logits == ROWS * TOKENS * SPEC.vocab_size / 8 / 8, "the logits of a part on one device"


@pytest.mark.soak
def test_between_layers_the_tokens_are_divided_over_tensor_too(programs):
    """The states that are kept for the backward pass: one array of [layers, rows, tokens, width] in a loop."""
    text = programs(DIVIDED, spec=dataclasses.replace(SPEC, remat="layer", scan=True)).lowered("accumulate", ROWS)
    kept = re.findall(rf"f32\[{SPEC.layers},{ROWS // 2},(\d+),{SPEC.width}\]", text.compile().as_text() or "")
    assert set(kept) == {str(TOKENS // 4)}
