"""The tiny model's own programs compile ahead of time for a TPU v5e of four chips, on a machine without one.

One child process compiles them all (about 15 s): libtpu reads its environment once, when it is loaded. Bounds are
arithmetic where there is one, for each chip: 4 chips share the parameters of a learner of fsdp=2, tensor=2, and 2 those
of a sampler of data=2, tensor=2.
"""

from __future__ import annotations

import dataclasses

import pytest

from jaxroll.models import families
from tests.harness.programs import tpu_programs
from tests.harness.programs.tpu_compiler import CHIP_BYTES, NEEDS_LIBTPU, Costs, compiled

SPEC = families.spec("tiny")
PARAMETERS = families.parameter_count(SPEC)
PARAMETER_BYTES = 4 * PARAMETERS  # float32
LAYER_BYTES = 4 * (PARAMETERS - families.parameter_count(dataclasses.replace(SPEC, layers=SPEC.layers - 1)))
# Keys and values of one chip: a page of 32 tokens for each of 16 slots and 16 prompts, 1 of 2 heads.
CACHE_BYTES = 2 * SPEC.layers * (16 + 16) * 32 * 1 * SPEC.head_dim * 4
# A TPU pads the last axis to 128: halves of the tiny width of 128 take twice their bytes, its heads of 32 four times.
LANES, HEAD_LANES = 2, 4

# Program to the MB of device memory that it may need on one chip: about twice what libtpu 0.0.42 and 0.0.50 say, which
# is accumulate 23.3 and 23.1, apply 4.8 and 15.0; of the others 0.0.42 says prefill_16 9.1, extend_16 9.7, insert 7.4,
# decode 11.0.
PEAK_MB = {"accumulate": 48, "apply": 30, "prefill_16": 18, "extend_16": 20, "insert": 15, "decode": 22}

pytestmark = [NEEDS_LIBTPU]


@pytest.fixture(scope="module")
def costs() -> Costs:
    """Program name to its cost."""
    return {row["name"]: row for row in compiled("tpu_programs.py", "v5e:2x2", "tiny", limit_s=240)}


@pytest.mark.soak
def test_the_programs_of_learner_and_engine_compile(costs: Costs) -> None:
    assert costs.keys() == {*PEAK_MB, "publish", *tpu_programs.UPDATES}


@pytest.mark.soak
def test_moments_in_host_memory_are_on_a_chip_a_layer_at_a_time(costs: Costs) -> None:
    held, moved = (costs[name] for name in tpu_programs.UPDATES)
    moments = 2 * LAYER_BYTES // 4  # of which a chip has a quarter
    assert held["host_argument_bytes"] == 0 and moved["host_argument_bytes"] >= moments
    assert moved["host_alias_bytes"] >= moments  # written in place
    assert held["argument_bytes"] - moved["argument_bytes"] >= moments
    # While a layer is updated, a chip holds its moments and those after the update.
    assert moved["highest_bytes"] - moved["argument_bytes"] < 2.25 * moved["host_argument_bytes"]


@pytest.mark.soak
@pytest.mark.parametrize("name", PEAK_MB)
def test_a_program_fits_a_chip(costs: Costs, name: str) -> None:
    cost = costs[name]
    assert 0 < cost["code_bytes"] < cost["peak_bytes"] < PEAK_MB[name] * 1e6 < CHIP_BYTES
    assert cost["accessed_bytes"] > cost["argument_bytes"]  # everything is read once


@pytest.mark.soak
def test_temporaries_are_counted(costs: Costs) -> None:
    """In all programs together: one alone may say 0, where the compiler keeps its few in a chip's own vector memory."""
    assert sum(cost["temp_bytes"] for cost in costs.values()) > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "parameters", "cache"),
    [
        ("accumulate", PARAMETER_BYTES // 2, 0),  # a quarter of parameters and gradients
        ("apply", PARAMETER_BYTES, 0),  # a quarter of parameters, gradients and two moments
        ("prefill_16", PARAMETER_BYTES // 2, CACHE_BYTES),
        ("extend_16", PARAMETER_BYTES // 2, CACHE_BYTES),
        ("decode", PARAMETER_BYTES // 2, CACHE_BYTES),
    ],
)
def test_a_chip_holds_its_share_of_the_state(costs: Costs, name: str, parameters: int, cache: int) -> None:
    assert parameters + cache <= costs[name]["argument_bytes"] < LANES * parameters + HEAD_LANES * cache + 128 * 1024


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "bytes_at_least"),
    [
        ("accumulate", PARAMETER_BYTES // 4),
        ("apply", PARAMETER_BYTES),
        ("prefill_16", CACHE_BYTES),
        ("extend_16", CACHE_BYTES),
        ("insert", CACHE_BYTES),
        ("decode", CACHE_BYTES),
    ],
)
def test_state_is_updated_in_place(costs: Costs, name: str, bytes_at_least: int) -> None:
    """Outputs are stored in donated arguments, except for statistics and the tokens of a dispatch."""
    cost = costs[name]
    assert cost["alias_bytes"] >= bytes_at_least
    assert cost["output_bytes"] - cost["alias_bytes"] < 32 * 1024


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "tokens", "flops_a_parameter"),
    [
        ("accumulate", 8 * 128, 6),  # forward, and twice that backward
        ("prefill_16", 8 * 16, 2),
        ("extend_16", 8 * 16, 2),
        ("decode", 32, 2),  # one step: the compiler counts a loop's body once
    ],
)
def test_chips_share_the_arithmetic(costs: Costs, name: str, tokens: int, flops_a_parameter: int) -> None:
    """Each does a quarter. Attention and sampling add something; a product that both halves of an axis do, far more."""
    share = flops_a_parameter * PARAMETERS * tokens / 4
    assert share < costs[name]["flops"] < 1.3 * share


@pytest.mark.soak
def test_an_optimizer_step_gathers_no_parameters(costs: Costs) -> None:
    found = costs["apply"]["collectives"]
    assert found["all-gather"] == 0
    assert found["all-reduce"] > 0  # the norm of the gradients
    assert costs["apply"]["flops"] > 10 * PARAMETERS / 4  # clipping and AdamW


@pytest.mark.soak
def test_the_learner_gathers_over_fsdp_and_every_forward_reduces_over_tensor(costs: Costs) -> None:
    assert costs["accumulate"]["collectives"]["all-gather"] > 0
    gather = ("accumulate", "prefill_16", "extend_16")
    assert all(0 < costs[name]["gathered_bytes"] <= costs[name]["largest_bytes"] for name in gather)
    for name in ("insert", "decode"):  # without a sort, no chip needs the logits of the whole vocabulary
        assert costs[name]["gathered_bytes"] < 8 * SPEC.vocab_size * 4
    forward = ("accumulate", "prefill_16", "extend_16", "decode")
    assert all(costs[name]["collectives"]["all-reduce"] > 0 for name in forward)


# As libtpu writes them; operands follow the name of the operation.
LINES = """
  %copy.1 = bf16[832,64,2,128]{3,2,1,0:T(8,128)(2,1)} copy(%param.1), metadata={op_name="a"}
  ROOT %copy.2 = f32[1024,512]{1,0:T(8,128)S(1)} copy(%fusion.2)
  %copy-start.3 = (f32[2048,512]{1,0:T(8,128)S(1)}, f32[2048,512]{0,1:T(8,128)}, u32[]{:S(2)}) copy-start(%param.3)
  %copy-start.4 = (f32[512,512]{1,0:T(8,128)}, f32[512,512]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%fusion.4)
  %copy-start.5 = (f32[2048,512]{1,0:T(8,128)}, f32[2048,512]{0,1:T(8,128)}, u32[]{:S(2)}) copy-start(%fusion.5)
  %copy-done.4 = f32[512,512]{1,0:T(8,128)} copy-done(%copy-start.4)
  %all-gather.5 = f32[64,128]{1,0} all-gather(f32[16,128]{1,0} %param.5), replica_groups=[4,4]<=[16]
  %all-gather.6 = (f32[32,128]{1,0}, bf16[256,128]{1,0:T(8,128)S(1)}) all-gather(%param.6, %param.7), dimensions={0}
  %all-gather-start.7 = ((f32[32,128]{1,0}), (f32[128,128]{1,0})) all-gather-start(%param.8), dimensions={0}
  %all-gather-done.7 = f32[4096,128]{1,0} all-gather-done(%all-gather-start.7)
"""


def test_copies_and_gathers_are_found_in_every_form() -> None:
    """Done at once or begun, of one array or several; what is fetched into the vector memory is no copy."""
    pool = 832 * 64 * 2 * 128 * 2
    assert tpu_programs.copied(LINES) == [pool, 2**22] and tpu_programs.written_back(LINES) == [2**20]
    assert list(map(tpu_programs.size_bytes, tpu_programs.results("all-gather", LINES))) == [2**15, 2**16, 2**16]
    seen = tpu_programs.described(LINES)
    assert seen["copies"] == {pool: 1, 2**22: 1} and seen["written_back"] == {2**20: 1}
    assert seen["gathered_bytes"] == 2**16
    assert tpu_programs.described("")["gathered_bytes"] == 0
