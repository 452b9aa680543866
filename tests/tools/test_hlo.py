"""The reader of compiled programs, against arithmetic: trips of loops, collectives, FLOPs, memory traffic."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.tools import hlo

# In the style of libtpu: a loop of 3 trips holds one whose counter grows by 2 below 8, so of 4 trips; weights are
# sliced in a fusion, a buffer is updated in place, and an all-gather is spread over a second fusion.
TEXT = Path(__file__).with_name("loops.hlo").read_text()
WEIGHTS, ROWS, GATHERED = (
    2 * 64 * 32,
    4 * 8 * 16,
    4 * 32 * 16,
)  # bytes of one layer, of the activations, of them gathered


def compiled(function, *args: jax.ShapeDtypeStruct) -> str:
    return jax.jit(function).lower(*args).compile().as_text() or ""


def test_collectives_count_the_trips_of_all_loops_around_them():
    sent = hlo.statistics(TEXT).by_kind()
    assert sent["collective-permute"] == 3 * 4 * WEIGHTS
    assert sent["all-reduce"] == 3 * 2 * ROWS * 3 / 4, (
        "twice the operand, but for a device's own fourth, in each of 3 trips"
    )


def test_an_all_gather_that_is_spread_over_fusions_is_sent_once():
    assert hlo.statistics(TEXT).by_kind()["all-gather"] == 3 * ROWS, "to the other three of the mesh's axis of four"


def test_the_largest_transfer_comes_first_with_its_trips_and_its_operation():
    largest = hlo.statistics(TEXT).transfers[0]
    assert (largest.kind, largest.trips, largest.source) == (
        "collective-permute",
        12,
        "jit(step)/while/body/dot_general",
    )


def test_flops_count_the_trips():
    assert hlo.statistics(TEXT).flops == 3 * 2 * 8 * 16 * 16


def test_memory_counts_slices_and_updates_not_whole_buffers_and_nothing_in_vector_memory():
    layer = (WEIGHTS + WEIGHTS) + 4 * 2 * WEIGHTS  # the slice is read and written; the permuted layer as well, 4 times
    other = 2 * ROWS + 2 * ROWS  # the product reads and writes activations; so does the reduction
    small = 4 * (1 + 1 + 4 * 2 * 3 + 3)  # scalars: counters of slices, broadcast and additions
    begun = (ROWS + 2 * ROWS) + (ROWS + GATHERED)  # an update in place: source, and target twice; and the all-gather
    found = hlo.statistics(TEXT).memory_bytes
    assert found == pytest.approx(3 * (layer + other + small) + begun, abs=64)


def test_a_slice_outside_of_a_fusion_reads_and_writes_its_result_only():
    text = "\n".join(
        (
            "HloModule m",
            "",
            "ENTRY %main (a: f32[64,32]) -> f32[2,32] {",
            "  %a = f32[64,32]{1,0} parameter(0)",
            "  ROOT %s = f32[2,32]{1,0} slice(%a), slice={[0:2], [0:32]}",
            "}",
        )
    )
    assert hlo.statistics(text).memory_bytes == 2 * 4 * 2 * 32


def test_an_update_in_place_outside_of_a_fusion_reads_and_writes_the_update_only():
    text = "\n".join(
        (
            "HloModule m",
            "",
            "ENTRY %main (a: f32[64,32], b: f32[2,32], i: s32[]) -> f32[64,32] {",
            "  %a = f32[64,32]{1,0} parameter(0)",
            "  %b = f32[2,32]{1,0} parameter(1)",
            "  %i = s32[] parameter(2)",
            "  ROOT %u = f32[64,32]{1,0} dynamic-update-slice(%a, %b, %i, %i)",
            "}",
        )
    )
    assert hlo.statistics(text).memory_bytes == 2 * 4 * 2 * 32


def test_of_the_branches_of_a_condition_the_one_that_costs_most_counts():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    branches = (lambda x: x, lambda x: x @ x @ x, lambda x: x @ x)
    text = compiled(lambda which, x: jax.lax.switch(which, branches, x), jax.ShapeDtypeStruct((), jnp.int32), x)
    assert hlo.statistics(text).flops == 2 * 2 * 8 * 8 * 8


def test_a_loop_of_unknown_length_takes_the_given_number():
    text = TEXT.replace(
        "%constant.9 = s32[]{:T(128)} constant(3)", "%constant.9 = s32[]{:T(128)} copy(%get-tuple-element.11)"
    )
    once, often = (hlo.statistics(text, unknown_trips=n) for n in (1, 5))
    assert (once.unknown_loops, once.flops, often.flops) == (1, 2 * 8 * 16 * 16, 5 * 2 * 8 * 16 * 16)


def test_a_scan_costs_as_much_as_its_unrolled_form():
    x, w = jax.ShapeDtypeStruct((8, 32), jnp.float32), jax.ShapeDtypeStruct((6, 32, 32), jnp.float32)
    text = compiled(lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], x, w)
    assert hlo.statistics(text).flops == 6 * 2 * 8 * 32 * 32


def test_collectives_of_a_real_program():
    mesh = sharding.build(MeshConfig(tensor=4))
    split = jax.NamedSharding(mesh, jax.P(None, "tensor"))
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=split)
    w = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("tensor")))
    text = jax.jit(jnp.matmul, out_shardings=jax.NamedSharding(mesh, jax.P())).lower(x, w).compile().as_text() or ""
    found = hlo.statistics(text)
    assert found.by_kind() == {"all-reduce": 2 * 4 * 8 * 16 * 3 / 4}
    assert found.flops == 2 * 8 * 16 * 16


@pytest.mark.parametrize("batched", [False, True])
def test_a_convolution_counts_positions_inside_the_input_only(batched: bool):
    window = "window={size=4 stride=3 pad=3_3 lhs_dilate=4}" if batched else "window={size=4 pad=3_3}"
    shapes = "f32[7,4,5]{2,1,0}", "f32[4,5,6]{2,1,0}", f"f32[7,{4 if batched else 7},6]{{2,1,0}}"
    text = "\n".join(
        (
            "HloModule m",
            "",
            "ENTRY %main (a: f32[7,4,5], b: f32[4,5,6]) -> f32[7,7,6] {",
            f"  %a = {shapes[0]} parameter(0)",
            f"  %b = {shapes[1]} parameter(1)",
            f"  ROOT %c = {shapes[2]} convolution(%a, %b), {window}, dim_labels=b0f_0io->b0f",
            "}",
        )
    )
    size, stride, dilate, outs = (4, 3, 4, 4) if batched else (4, 1, 1, 7)
    places = [o * stride + k - 3 for o in range(outs) for k in range(size)]
    pairs = sum(0 <= at <= 3 * dilate and at % dilate == 0 for at in places)
    assert hlo.statistics(text).flops == 2 * 7 * 5 * 6 * pairs
    assert pairs == (4 if batched else 16), "a batch of 4 matrices; or every pair of 4 inputs and 4 weights"


def kernel(name: str, query: str, keys: str) -> str:
    call = 'custom_call_target="tpu_custom_call"'
    return "\n".join(
        (
            "HloModule m",
            "",
            f"ENTRY %main (q: {query}, k: {keys}) -> {query} {{",
            f"  %q = {query} parameter(0)",
            f"  %k = {keys} parameter(1)",
            f"  ROOT %{name} = {query} custom-call(%q, %k, %k), {call}",
            "}",
        )
    )


@pytest.mark.parametrize(
    ("name", "products"), [("splash_mha_fwd.1", 2), ("splash_mha_dq.1", 3), ("splash_mha_dkv.1", 4)]
)
def test_attention_kernels_count_half_the_square(name: str, products: int):
    found = hlo.statistics(kernel(name, "bf16[4,512,128]{2,1,0}", "bf16[2,512,128]{2,1,0}"))
    assert found.flops == products * 2 * 4 * 512 * 512 * 128 / 2


def test_a_kernel_with_all_gradients_counts_five_products():
    """Splash attention's fused kernel also returns the queries' gradient, once per block of keys."""
    query, keys = "bf16[4,512,128]{2,1,0}", "bf16[2,512,128]{2,1,0}"
    text = kernel("splash_mha_dkv.1", query, keys)
    fused = text.replace(f"%splash_mha_dkv.1 = {query}", f"%splash_mha_dkv.1 = (bf16[2,4,512,128]{{3,2,1,0}}, {keys})")
    assert fused != text
    assert hlo.statistics(fused).flops == 5 * 2 * 4 * 512 * 512 * 128 / 2


def test_a_decoding_kernel_reads_the_context_not_the_pool():
    text = kernel("paged_attention.3", "f32[16,4,1,128]{3,2,1,0}", "bf16[2,1000,64,128]{3,2,1,0}")
    found = hlo.statistics(text, context_tokens=100)
    assert found.flops == 4 * 16 * 4 * 128 * 100
    read = 2 * 16 * 100 * 2 * 2 * 128  # keys and values of two heads, bfloat16
    assert found.memory_bytes == read + 2 * 4 * 16 * 4 * 128
