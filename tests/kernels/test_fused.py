"""The fused kernels, interpreted on the CPU over a mesh, against the XLA forms: packed rows, prompts, pages."""

import re
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.kernels import attention, placed
from jaxroll.sharding import Layout

B, T, N, K, H = 2, 150, 4, 2, 32
LAYOUT = Layout(sharding.build(MeshConfig(fsdp=2, tensor=2)), sharding.LEARNER)
ROW_KERNELS: dict[str, Callable] = {"splash": placed.splash, "triton": placed.triton}
# Rows of several segments and of different lengths; the rest is padding.
SEGMENTS = np.array([np.repeat([1, 2, 3, 0], [40, 50, 45, 15]), np.repeat([4, 9, 0], [100, 1, 49])], np.int32)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row kernels run on the CPU."""
    monkeypatch.setattr(placed, "_row_kernel", lambda name: partial(ROW_KERNELS[name], interpret=True))


def rows_problem() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, heads, H)), jnp.float32) for heads in (N, K, K))
    return q, k, v


@pytest.mark.parametrize(("name", "window"), [("splash", 0), ("splash", 37), ("triton", 0)])
@pytest.mark.usefixtures("interpreted")
def test_packed_rows_equal_the_masked_form_in_value_and_gradient(name: str, window: int) -> None:
    q, k, v = rows_problem()
    weight = np.random.default_rng(1).normal(size=q.shape) * (SEGMENTS > 0)[:, :, None, None]

    def total(name: str) -> tuple:
        attend = placed.rows(name, T, jnp.asarray(SEGMENTS), LAYOUT, window)

        def weighted(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = attend(q, k, v) * (SEGMENTS > 0)[:, :, None, None]
            return jnp.sum(out * weight), out

        return jax.jit(jax.grad(weighted, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    for got, expected in zip(jax.tree.leaves(total(name)), jax.tree.leaves(total("xla")), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("tokens", "block"), [(100, 128), (300, 128), (500, 512), (700, 256), (2048, 512), (2176, 512), (16_896, 512)]
)
def test_long_rows_on_a_tpu_have_large_blocks(tokens: int, block: int) -> None:
    assert placed.block_tokens(tokens) == block


@pytest.mark.parametrize(
    ("tokens", "block", "head", "keys"),
    [
        (128, 128, 128, 128), (1152, 128, 128, 1152), (4096, 512, 128, 2048), (16_896, 512, 128, 1536),
        (8192, 512, 256, 1024), (15_872, 512, 128, None), (33_792, 512, 128, None),
    ],
)  # fmt: skip
def test_the_backward_kernel_has_few_large_blocks_of_keys(tokens: int, block: int, head: int, keys: int | None) -> None:
    assert placed.backward_keys(tokens, block, head) == keys


@pytest.mark.parametrize(("tokens", "fused"), [(4096, True), (15_872, False)])
def test_the_backward_pass_on_a_tpu_is_one_fused_kernel(tokens: int, fused: bool) -> None:
    """By the names in the program for a TPU: jax gives the fused kernel the name of that for keys and values."""

    def total(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(placed.splash(q, k, v, ids).astype(jnp.float32))

    shape = jax.ShapeDtypeStruct((1, tokens, 2, 128), jnp.bfloat16)
    traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(
        shape, shape, shape, jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    )
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    names = re.findall(r'kernel_name = "splash_mha_(fwd|dq|dkv)', text)
    assert sorted(names) == (["dkv", "fwd"] if fused else ["dkv", "dq", "fwd"])


def test_the_gradient_of_queries_is_the_sum_over_blocks_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed, "_BACKWARD_KEYS", 384)
    tokens, rng = 1100, np.random.default_rng(4)
    assert placed.backward_keys(1152, 128, H) == 384, "three blocks of three parts"
    q, k, v = (jnp.asarray(rng.normal(size=(1, tokens, 1, H)), jnp.float32) for _ in range(3))
    ids = jnp.asarray(np.repeat([1, 2], [700, 400])[None], jnp.int32)

    def gradient(attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> tuple[jax.Array, ...]:
        return jax.jit(jax.grad(lambda *given: jnp.sum(jnp.sin(attend(*given))), argnums=(0, 1, 2)))(q, k, v)

    got = gradient(lambda q, k, v: placed.splash(q, k, v, ids, interpret=True))
    for one, other in zip(got, gradient(placed.rows("xla", tokens, ids, LAYOUT)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize(("fused", "window"), [(True, 0), (False, 0), (True, 150), (False, 150)])
def test_long_rows_with_skipped_blocks_equal_the_masked_form(
    fused: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small blocks, which do not divide the row; segments that share blocks, and padding over several blocks."""
    monkeypatch.setattr(placed, "_LONG", 256)
    monkeypatch.setattr(placed, "_BLOCKS", (128,))
    monkeypatch.setattr(placed, "_BACKWARD_KEYS", 256)
    monkeypatch.setattr(placed, "_COPIES", 12 if fused else 0)
    tokens, rng = 700, np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(2, tokens, heads, H)), jnp.float32) for heads in (2, 1, 1))
    ids = np.array([np.repeat([1, 2, 3, 0], [60, 300, 40, 300]), np.repeat([1, 2], [500, 200])], np.int32)
    assert placed.backward_keys(768, 128, H) == (256 if fused else None)

    def results(attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> tuple[jax.Array, ...]:
        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = attend(q, k, v)
            seen = jnp.where(jnp.asarray(ids > 0)[:, :, None, None], out, 0)
            return jnp.sum(jnp.sin(seen)), out

        gradients, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        assert np.isfinite(out).all(), "padding too"
        return *gradients, jnp.where(jnp.asarray(ids > 0)[:, :, None, None], out, 0)

    got = results(lambda q, k, v: placed.splash(q, k, v, jnp.asarray(ids), window=window, interpret=True))
    expected = results(placed.rows("xla", tokens, jnp.asarray(ids), LAYOUT, window))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


# Of 8 blocks of queries. Causal, a segment of n whole blocks costs n·(n + 1)/2. Keys of the backward pass have blocks
# of four.
@pytest.mark.parametrize(
    ("lengths", "forward", "backward"),
    [([4096], 36, 12), ([1024] * 4, 12, 8), ([512] * 8, 8, 8), ([2048] * 2, 20, 8), ([768] * 4, 12, 9)],
)
def test_a_row_costs_its_segments_and_not_its_square(lengths: list[int], forward: int, backward: int) -> None:
    kernel = placed._splash_kernel(1, 4096, 512, 2048, 0, interpret=True)
    ids = jnp.asarray(np.repeat(np.arange(1, len(lengths) + 1), lengths), jnp.int32)
    ids = jnp.pad(ids, (0, 4096 - len(ids)))
    skipping = placed.sparse(kernel, placed.separate_padding(ids, 512), 512, 2048)
    for name, expected, by_keys in (("fwd_mask_info", forward, False), ("dkv_mask_info", backward, True)):
        static, found = getattr(kernel, name), getattr(skipping, name)
        computed = np.asarray(found.block_mask)[0] > 0
        assert computed.sum() == expected
        assert (np.asarray(found.data_next)[0] == static.data_next[0])[computed].all()
        # Blocks are fetched when the name changes from one visit to the next, so a skipped one fetches the next one's.
        data = np.asarray(found.data_next)[0]
        order, visits = (data.T.ravel(), computed.T.ravel()) if by_keys else (data.ravel(), computed.ravel())
        last = np.flatnonzero(visits)[-1]
        assert all(order[i] == order[i + 1] for i in range(last) if not visits[i])


@pytest.mark.parametrize("name", ROW_KERNELS)
@pytest.mark.usefixtures("interpreted")
def test_prompts_equal_the_masked_form(name: str) -> None:
    """Three rows are not shared evenly by two groups of devices: each computes all."""
    q, k, v = (jnp.concatenate([x, x[:1]]) for x in rows_problem())
    got, expected = (jax.jit(placed.rows(each, T, None, LAYOUT))(q, k, v) for each in (name, "xla"))
    np.testing.assert_allclose(got, expected, atol=2e-6)


# --- pages

D, S, P, U, J = 2, 6, 9, 16, 3  # shards, slots of one, its pages, tokens of a page, pages of a table
POSITIONS = np.array([[-1, 0, 15, 16, 47, 20], [3, -1, -1, 33, 46, 7]], np.int32)


@pytest.fixture
def as_tpu() -> Iterator[None]:
    """TPU kernels run on the CPU."""
    with pltpu.force_tpu_interpret_mode():
        yield


def pages_problem(shards: int = D) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(2)
    q = jnp.asarray(rng.normal(size=(shards, S, 1, N, H)), jnp.bfloat16)
    keys, values = (jnp.asarray(rng.normal(size=(shards, K, P, U, H)), jnp.bfloat16) for _ in range(2))
    tables = jnp.asarray(rng.integers(0, P, (shards, S, J)), jnp.int32)
    return q, keys, values, tables, jnp.asarray(POSITIONS[:shards])


def by_the_loop(q: jax.Array, keys: jax.Array, values: jax.Array, tables: jax.Array, starts: jax.Array) -> np.ndarray:
    far = attention.reach(starts, 1, U)
    return np.asarray(
        jax.vmap(attention.paged, (0, 0, 0, 0, 0, None))(q, keys, values, tables, starts, far), np.float32
    )


def assert_near(got: jax.Array, expected: np.ndarray) -> None:
    """Equal to bfloat16's rounding where a slot sees something; a slot at -1 gets zeros, so that nothing is spoilt."""
    sees = POSITIONS >= 0
    np.testing.assert_allclose(np.asarray(got, np.float32)[sees], expected[sees], atol=0.02)
    np.testing.assert_array_equal(np.asarray(got, np.float32)[~sees], 0)


@pytest.mark.usefixtures("as_tpu")
def test_pages_on_a_tpu_equal_the_loop() -> None:
    problem = pages_problem()
    got = jax.jit(placed.pages("pallas", LAYOUT))(*problem, jnp.int32(0))
    assert got.dtype == jnp.bfloat16
    assert_near(got, by_the_loop(*problem))


def test_pages_on_a_gpu_equal_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "platform", lambda mesh: "gpu")
    monkeypatch.setattr(placed, "paged_on_gpu", partial(placed.paged_on_gpu, interpret=True))
    problem = pages_problem()
    got = jax.jit(placed.pages("pallas", LAYOUT))(*problem, jnp.int32(0))
    assert_near(got, by_the_loop(*problem))


@pytest.mark.usefixtures("as_tpu")
def test_unused_entries_of_a_table_may_be_invalid() -> None:
    """Whole blocks of a table are fetched: an entry that names no page would be read from beyond the pool."""
    q, keys, values, tables, starts = (x[0] for x in pages_problem(1))
    used = np.arange(J) <= np.asarray(starts)[:, None] // U
    stray = jnp.where(used, tables, P + 7)
    got = jax.jit(placed.paged_on_tpu)(q[:, 0], keys, values, stray, starts)
    np.testing.assert_array_equal(got, jax.jit(placed.paged_on_tpu)(q[:, 0], keys, values, tables, starts))


def test_a_kernel_without_a_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="splash needs a layout"):
        placed.rows("splash", T, None, None)


def test_cudnn_is_not_given_segments() -> None:
    with pytest.raises(ValueError, match="takes no segment ids"):
        placed.rows("cudnn", T, jnp.asarray(SEGMENTS), LAYOUT)(*rows_problem())


# --- tokens behind those in pages


@pytest.mark.parametrize(("tokens", "entries"), [(150, 20), (600, 3)])
def test_tokens_behind_pages_equal_the_loop(monkeypatch: pytest.MonkeyPatch, tokens: int, entries: int) -> None:
    """Rows that begin within a page, one without new tokens; unused entries of a table are invalid, or unread pages."""
    monkeypatch.setattr(placed, "_LONG", 256)
    monkeypatch.setattr(placed, "_BLOCKS", (128,))
    rng, starts, lengths = np.random.default_rng(5), np.array([37, 48, 0, 16]), np.array([tokens, 20, 0, 129])
    q, k, v = (jnp.asarray(rng.normal(size=(4, tokens, heads, H)), jnp.float32) for heads in (N, K, K))
    keys, values = (jnp.asarray(rng.normal(size=(K, 4 * entries, U, H)), jnp.float32) for _ in range(2))
    tables = rng.permutation(4 * entries).reshape(4, entries)
    unread = keys.at[:, tables[:, 3:].ravel()].set(jnp.nan), values.at[:, tables[:, 3:].ravel()].set(1e30)
    got = jax.jit(partial(placed.splash_behind, interpret=True))(q, k, v, *unread, tables, starts, lengths)
    assert np.isfinite(got[3]).all(), "padding too"
    for row in np.flatnonzero(lengths):
        start, length = starts[row], lengths[row]
        seen = [
            jnp.concatenate([pool[:, tables[row]].reshape(K, -1, H)[:, :start], new[row, :length].swapaxes(0, 1)], 1)
            for pool, new in ((keys, k), (values, v))
        ]
        mask = jnp.arange(start + length)[None] <= start + jnp.arange(length)[:, None]
        expected = attention.grouped(q[row, None, :length], *(x.swapaxes(0, 1)[None] for x in seen), mask[None])
        np.testing.assert_allclose(got[row, :length], expected[0], atol=2e-6)


def test_blocks_of_unread_pages_are_not_visited() -> None:
    """A row of 512 tokens behind 600 visits the two blocks of its pages and its own, of 17 blocks of 512 keys."""
    kernel = placed._splash_kernel(1, 512, 512, None, 0, interpret=True, before=8192, wide=512)
    ids = jnp.where(jnp.arange(8704) < 600, 1, jnp.where(jnp.arange(8704) < 8192, 0, 1))
    visited = placed._common_blocks(kernel.fwd_mask_info, ids[8192:], ids, 512, 512)
    assert np.flatnonzero(np.asarray(visited.block_mask)[0, 0]).tolist() == [0, 1, 16]
