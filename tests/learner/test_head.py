"""The logits of a step in parts: the same numbers, never the whole array, and the head is gathered once."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import sharding as layouts
from jaxroll.algorithms import sampling
from jaxroll.algorithms.advantages import Tokens
from jaxroll.config import MeshConfig
from jaxroll.learner import packing, step
from jaxroll.learner.trainer import TrainingPrograms
from jaxroll.models import families, params, transformer
from jaxroll.sharding import Layout
from jaxroll.tools import hlo

ROWS, TOKENS = 4, 64
SPEC = families.spec("nano", vocab_size=1024)
WHOLE_MB = ROWS * TOKENS * SPEC.vocab_size * 4 / 2**20
CUBE = MeshConfig(data=2, fsdp=2, tensor=2)


@pytest.fixture
def programs(small_config, make_recipe):
    """The programs of a learner whose logits may take `logits_mb` on a device."""

    def make(logits_mb: float, mesh: MeshConfig, dtype: str = "float32", tokens: int = TOKENS) -> TrainingPrograms:
        recipe = make_recipe(small_config(micro_batch_rows=ROWS, row_tokens=tokens, mesh=mesh))
        spec = dataclasses.replace(SPEC, compute_dtype=dtype)
        return TrainingPrograms(dataclasses.replace(recipe, spec=spec, logits_mb=logits_mb))

    return make


def streams(tokens: int) -> dict[str, np.ndarray]:
    chance, out = np.random.default_rng(0), packing.empty_streams(ROWS, tokens)
    out["tokens"][:] = chance.integers(0, SPEC.vocab_size, (ROWS, tokens))
    out["positions"][:], out["segment_ids"][:], out["mask"][:, 1:] = np.arange(tokens), 1, True
    out["behaviour"][:], out["advantage"][:] = -chance.random((ROWS, tokens)), chance.normal(size=(ROWS, tokens))
    out["weight"][:, 1:] = 1 / (ROWS * (tokens - 1))
    return out


def gradients(made: TrainingPrograms) -> dict[str, np.ndarray]:
    layout = made.recipe.layout
    weights = params.init(SPEC, jax.random.key(0), layout.mesh, layout.rules)
    out = made.accumulate(weights, made.zeros(), made.placed(streams(made.recipe.row_tokens)))
    return jax.device_get({**out.grads, **out.statistics})


def largest_array(program: jax.stages.Lowered) -> int:
    """Elements of the largest array of any dtype that has the vocabulary among its axes, in the compiled program."""
    text = program.compile().as_text()
    assert text is not None
    shapes = [[int(n) for n in found.split(",")] for found in re.findall(r"\b[a-z]\w*\[([0-9,]+)\]", text)]
    return max(math.prod(shape) for shape in shapes if SPEC.vocab_size in shape and SPEC.width not in shape)


@pytest.mark.parametrize("name", ["accumulate", "logprobs"])
@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [("float32", TOKENS - 1), *(pytest.param(one, TOKENS, marks=pytest.mark.soak) for one in ("float32", "bfloat16"))],
)
def test_no_array_of_all_tokens_and_the_vocabulary_is_in_the_program(programs, name, dtype, tokens):
    whole, parts = (programs(mb, MeshConfig(), dtype, tokens).lowered(name, ROWS) for mb in (WHOLE_MB, WHOLE_MB / 8))
    assert largest_array(whole) == ROWS * tokens * SPEC.vocab_size  # or this would not see it
    assert largest_array(parts) == ROWS * TOKENS * SPEC.vocab_size // 8


@pytest.mark.parametrize("tokens", [pytest.param(TOKENS, marks=pytest.mark.soak), TOKENS - 3])
def test_parts_change_neither_gradients_nor_statistics(programs, tokens):
    whole, parts = (
        gradients(programs(mb, mesh, tokens=tokens)) for mb, mesh in ((WHOLE_MB, MeshConfig()), (WHOLE_MB / 64, CUBE))
    )
    for name, want in whole.items():
        scale = max(1e-6, float(np.abs(want).max()))
        np.testing.assert_allclose(parts[name], want, rtol=0, atol=2e-5 * scale, err_msg=name)


def test_a_part_of_the_logits_fits_the_limit_of_a_device():
    layout = Layout(layouts.build(CUBE), layouts.LEARNER)
    spec = families.spec("qwen3_0p6b")
    a_row = 4 * spec.vocab_size // 2  # bytes of a token's logits on one of two tensor shards
    assert step.part_tokens(spec, layout, (4, 4096), 512) == 1024 < 512 * 2**20 / a_row < 2048
    assert step.part_tokens(spec, layout, (8, 4096), 512) == 512
    assert step.part_tokens(spec, layout, (4, 4096), math.inf) == 4096
    assert step.part_tokens(spec, layout, (4, 4095), 512) == 1024  # the last part is filled up
    assert step.part_tokens(spec, layout, (4, 100), 1e-6) == 1


def test_supports_give_the_gradients_of_masked_logits_in_parts_on_a_sharded_vocabulary(programs):
    made = programs(WHOLE_MB / 64, CUBE)
    made = TrainingPrograms(dataclasses.replace(made.recipe, support=8))
    given, chance = streams(TOKENS), np.random.default_rng(1)
    others = chance.permuted(np.tile(np.arange(1, SPEC.vocab_size), (ROWS, TOKENS, 1)), axis=-1)[..., :7]
    support = np.concatenate([np.zeros_like(others[..., :1]), others], axis=-1).astype(np.int32)
    support = (support + given["tokens"][..., None]) % SPEC.vocab_size  # the token itself, and seven others
    support[::2, :, 5:] = -1
    support[:, ::7] = -1  # sampled from the whole vocabulary
    weights = params.init(SPEC, jax.random.key(0), made.recipe.layout.mesh, made.recipe.layout.rules)
    out = made.accumulate(weights, made.zeros(), made.placed(given | {packing.SUPPORT: support}))
    inside = np.zeros((ROWS, TOKENS, SPEC.vocab_size), bool)
    np.put_along_axis(inside, np.where(support < 0, given["tokens"][..., None], support), True, axis=-1)
    inside |= (support < 0).all(-1, keepdims=True)
    recipe = dataclasses.replace(made.recipe, layout=Layout(layouts.build(MeshConfig()), layouts.LEARNER))

    def plain(weights: dict[str, jax.Array]) -> jax.Array:
        given = jax.tree.map(jnp.asarray, streams(TOKENS))
        hidden = step.hidden_states(recipe, weights, given)
        logits = transformer.logits(SPEC, weights, jnp.roll(hidden, 1, axis=1)) / recipe.temperature
        every = jax.nn.log_softmax(jnp.where(inside, logits, -jnp.inf))
        logprob = jnp.take_along_axis(every, given["tokens"][..., None], -1)[..., 0]
        logprob = jnp.where(given["mask"], logprob, 0.0)
        fixed = (jax.lax.stop_gradient(logprob), given["behaviour"], jnp.zeros_like(logprob))
        loss = recipe.token_loss(Tokens(logprob, *fixed, given["advantage"], given["mask"], given["segment_ids"])).loss
        return jnp.sum(given["weight"] * loss)

    for name, want in jax.device_get(jax.jit(jax.grad(plain))(jax.device_get(weights))).items():
        scale = max(1e-6, float(np.abs(want).max()))
        np.testing.assert_allclose(out.grads[name], want, rtol=0, atol=2e-5 * scale, err_msg=name)


def head_problem(tied: bool, dtype: str, support: bool) -> tuple[families.ModelSpec, dict[str, np.ndarray]]:
    """A head with hidden states and tokens of rows, supports, and the cotangents of log-probs."""
    spec = families.spec("nano", vocab_size=8192, compute_dtype=dtype)
    spec = dataclasses.replace(spec, tied_embeddings=tied, width=16, logit_softcap=30.0)
    chance, rows = np.random.default_rng(2), (8, 30)
    tokens = chance.integers(0, spec.vocab_size, rows).astype(np.int32)
    given = {
        "weight": chance.normal(size=(spec.vocab_size, 16) if tied else (16, spec.vocab_size)).astype(np.float32),
        "hidden": chance.normal(size=(*rows, 16)).astype(jnp.dtype(dtype)),
        "tokens": tokens,
        "cotangent": chance.normal(size=rows).astype(np.float32),
    }
    if support:
        given["support"] = ((tokens[..., None] + 7 * np.arange(6)) % spec.vocab_size).astype(np.int32)
        given["support"][::3] = -1
    return spec, given


@pytest.mark.parametrize(
    ("mesh", "tied", "dtype", "support"),
    [
        (CUBE, False, "float32", True),
        (MeshConfig(fsdp=4, sequence=2), True, "float32", False),
        pytest.param(MeshConfig(fsdp=2, sequence=2, tensor=2), True, "bfloat16", False, marks=pytest.mark.soak),
        pytest.param(MeshConfig(data=8), True, "float32", True, marks=pytest.mark.soak),
        pytest.param(MeshConfig(tensor=8), False, "float32", False, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_the_head_is_gathered_once_and_its_gradient_reduced_once(mesh, tied, dtype, support):
    spec, given = head_problem(tied, dtype, support)
    layout = Layout(layouts.build(mesh), layouts.LEARNER)
    logical = {"weight": ("vocab", "embed") if tied else ("embed", "vocab"), "hidden": ("rows", "stream", "width")}
    where = {
        name: layout.sharding(logical.get(name, ("rows", "tokens", None)[: x.ndim]), x.shape)
        for name, x in given.items()
    }

    def total(terms, weight: jax.Array, hidden: jax.Array, rest: dict[str, jax.Array]) -> tuple:
        found = terms(weight, hidden, rest["tokens"], rest.get("support"))
        return jnp.sum(jnp.where(jnp.arange(30) > 0, found[0] * rest["cotangent"], 0.0)), found

    def in_parts(weight, hidden, tokens, support):
        params, most_mb = {"embed" if tied else "head": weight}, 0.125  # four tokens of each row on a device
        return step.token_terms(spec, layout, 0.7, params, hidden, tokens, most_mb, support)

    def whole(weight, hidden, tokens, support):
        before = jnp.roll(hidden, 1, axis=1).astype(jnp.float32)
        logits = before @ (weight.T if tied else weight).astype(hidden.dtype).astype(jnp.float32)
        logits = 30.0 * jnp.tanh(logits / 30.0)
        terms = sampling.token_logprobs(logits, tokens, 0.7, support), sampling.entropies(logits, 0.7, support)
        return *terms, logits.var(axis=-1)

    def gradient(terms, arrays, **where):
        rest = {name: x for name, x in arrays.items() if name not in ("weight", "hidden")}
        found = jax.jit(jax.grad(functools.partial(total, terms), argnums=(0, 1), has_aux=True), **where)
        lowered = found.lower(arrays["weight"], arrays["hidden"], rest)
        compiled = lowered.compile()
        return compiled, jax.device_get(compiled(arrays["weight"], arrays["hidden"], rest))

    out = ((where["weight"], where["hidden"]), where["tokens"])
    compiled, got = gradient(in_parts, jax.device_put(given, where), out_shardings=out)
    with jax.default_matmul_precision("highest"):
        _, want = gradient(whole, jax.tree.map(jnp.asarray, given))
    limit = 1e-5 if dtype == "float32" else 2e-2
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(tuple(want)), strict=True):
        one, other = (np.asarray(x, np.float32)[:, 1:] if x.shape[:2] == (8, 30) else x for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=0, atol=limit * float(np.abs(other).max()))
    found = hlo.statistics(compiled.as_text() or "").transfers
    vocabulary = [one for one in found if one.sent_bytes / one.trips > 4 * spec.vocab_size]  # others are by token
    assert mesh.tensor == 1 or max(one.trips for one in found) > 1, "sums over tensor are in the loops"
    assert [one for one in vocabulary if one.trips > 1] == []
    divided = mesh.devices > mesh.data * mesh.tensor
    kinds = ["all-gather", "reduce-scatter"] * divided + ["all-reduce"] * (mesh.data > 1)
    assert sorted(one.kind for one in vocabulary) == sorted(kinds)
