"""Qwen3-0.6B's own programs compile ahead of time for a TPU v5e of sixteen chips, on a machine without one.

One child process compiles them all (about five minutes), by `configs/rlvr_qwen3_0p6b.py` with both roles on all chips:
the learner on fsdp=4, tensor=4, the sampler on data=4, tensor=4. Bounds are arithmetic, for each chip.
"""

from __future__ import annotations

import pytest

from jaxroll.models import families
from tests.harness.programs.tpu_compiler import CHIP_BYTES, NEEDS_LIBTPU, Costs, compiled
from tests.harness.programs.tpu_programs import UPDATES

SPEC = families.spec("qwen3_0p6b")
CHIPS, FSDP, DATA, TENSOR = 16, 4, 4, 4
PARAMETERS = families.parameter_count(SPEC)
PARAMETER_BYTES = 4 * PARAMETERS  # float32
HEAD = SPEC.vocab_size * SPEC.width  # of these: the embedding, which is the head too
DOWN = SPEC.layers * SPEC.hidden * SPEC.width  # and each layer's last product

ROWS, ROW_TOKENS, LOGITS_BYTES = 32, 1024, 512 * 2**20  # learner.micro_batch_rows, row_tokens, logits_mb
PARTS = 4  # the fewest, halving, at which the float32 logits of a chip's 8 rows by 37,984 words stay below that
SLOTS, PROMPTS, LOGIT_ROWS = 256, 32, 64  # sampler.slots, prefill_rows, and twice as many rows of logits
PAGES = SLOTS // DATA * 12 + LOGIT_ROWS  # 12 of 64 tokens for 256 + 512, and a copy for each prompt
POOL_BYTES = PAGES * 64 * SPEC.kv_heads // TENSOR * SPEC.head_dim * 2  # one layer's keys, or values, bfloat16
CACHE_BYTES = 2 * SPEC.layers * POOL_BYTES
LOGIT_BYTES = LOGIT_ROWS * SPEC.vocab_size // TENSOR * 4  # float32

PREFILLS = ("prefill_128", "prefill_256", "extend_128", "extend_256")
FORWARD = ("accumulate", *PREFILLS, "decode")
NAMES = ("accumulate", "apply", *PREFILLS, "insert", "decode")

pytestmark = [NEEDS_LIBTPU, pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def costs() -> Costs:
    """Program name to its cost."""
    return {row["name"]: row for row in compiled("tpu_programs.py", "v5e:4x4", "qwen3_0p6b", limit_s=1700)}


def test_every_program_fits_a_chip(costs: Costs, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed: what each takes of a chip's memory, and its arithmetic."""
    with capsys.disabled():
        print(
            "\nQwen3-0.6B on v5e:4x4: MB and GFLOP of one chip and call, kernels and further turns of loops not counted"
        )
        print(
            f"{'':12}{'peak':>8}{'arguments':>11}{'temporaries':>13}{'code':>6}{'GFLOP':>9}{'compiled':>11}  attention"
        )
        for name, cost in costs.items():
            peak, arguments, temporaries, code = (
                cost[f"{what}_bytes"] / 1e6 for what in ("peak", "argument", "temp", "code")
            )
            print(
                f"{name:12}{peak:8,.0f}{arguments:11,.0f}{temporaries:13,.0f}{code:6,.0f}{cost['flops'] / 1e9:9,.1f}"
                f"{cost['compile_s']:9.0f} s  {cost['attention'] or '-'}"
            )
    assert costs.keys() == {*NAMES, "publish", *UPDATES}
    assert all(0 < cost["code_bytes"] < cost["peak_bytes"] < CHIP_BYTES for cost in costs.values())
    # Each role has its chips for itself: what its programs keep, all their code, and the temporaries of one.
    for programs in (NAMES[:2], NAMES[2:]):
        state = max(costs[name]["argument_bytes"] for name in programs)
        code = sum(costs[name]["code_bytes"] for name in programs)
        assert state + code + max(costs[name]["temp_bytes"] for name in programs) < CHIP_BYTES


@pytest.mark.parametrize(
    ("name", "bytes_of_state"),
    [
        ("accumulate", 2 * PARAMETER_BYTES // CHIPS),  # parameters and gradients
        ("apply", 4 * PARAMETER_BYTES // CHIPS),  # and two moments
        # An engine's parameters are bfloat16.
        *((name, PARAMETER_BYTES // 2 // TENSOR + CACHE_BYTES + LOGIT_BYTES) for name in (*PREFILLS, "decode")),
        ("insert", CACHE_BYTES + LOGIT_BYTES),
    ],
)
def test_a_chip_holds_its_share_of_the_state(costs: Costs, name: str, bytes_of_state: int) -> None:
    """And hardly more: norms are whole on every chip, and every row of Qwen3 fills a TPU's lanes."""
    assert bytes_of_state <= costs[name]["argument_bytes"] < 1.01 * bytes_of_state


@pytest.mark.parametrize(
    ("name", "bytes_at_least"),
    [
        ("accumulate", PARAMETER_BYTES // CHIPS),
        ("apply", 4 * PARAMETER_BYTES // CHIPS),
        *((name, CACHE_BYTES + LOGIT_BYTES) for name in (*PREFILLS, "insert", "decode")),
    ],
)
def test_state_is_updated_in_place(costs: Costs, name: str, bytes_at_least: int) -> None:
    """Outputs are stored in donated arguments, except for statistics and the tokens of a dispatch."""
    cost = costs[name]
    assert cost["alias_bytes"] >= bytes_at_least
    assert cost["output_bytes"] - cost["alias_bytes"] < 32 * 1024


@pytest.mark.parametrize("name", ["prefill_128", "prefill_256", "extend_128", "extend_256", "decode"])
def test_no_pool_is_copied(costs: Costs, name: str) -> None:
    """One that is laid out again to be written costs more than all that a decode step, or a prompt, reads of it."""
    logits = SLOTS // DATA * SPEC.vocab_size * 4  # of the sampling rows, over the vocabulary
    assert max({int(size) for size in costs[name]["copies"]} - {logits}, default=0) < POOL_BYTES / 2


def test_only_a_short_extend_takes_pools_through_the_vector_memory(costs: Costs) -> None:
    """There, where one has room, the compiler fetches each pool whole, reads and writes its pages, and brings it back:
    twice its bytes of traffic. A pool that is larger than the vector memory would stay."""
    taken = {name: cost["written_back"].get(str(POOL_BYTES), 0) for name, cost in costs.items()}
    assert {name for name, times in taken.items() if times} == {"extend_128"}
    assert max(taken.values()) <= 2 * SPEC.layers


@pytest.mark.parametrize(
    ("name", "flops", "more"),
    [
        # Twice forward and once backward, which costs two; what a layer's last product gave is not made again. The head
        # is a loop over parts of the rows, of which the compiler counts one.
        ("accumulate", ROWS * ROW_TOKENS * (8 * (PARAMETERS - HEAD + HEAD / PARTS) - 2 * DOWN), 1.05),
        # The head only for the last token of a prompt.
        ("prefill_128", PROMPTS * 2 * (128 * (PARAMETERS - HEAD) + HEAD), 1.05),
        ("prefill_256", PROMPTS * 2 * (256 * (PARAMETERS - HEAD) + HEAD), 1.05),
        # Attention here is no kernel: one of its pages is counted.
        ("extend_128", PROMPTS * 2 * (128 * (PARAMETERS - HEAD) + HEAD), 1.1),
        ("extend_256", PROMPTS * 2 * (256 * (PARAMETERS - HEAD) + HEAD), 1.1),
        # One step, with its drawing.
        ("decode", SLOTS * 2 * PARAMETERS, 1.2),
    ],
)
def test_chips_share_the_arithmetic(costs: Costs, name: str, flops: float, more: float) -> None:
    """Each does a sixteenth. A product that two chips both do would show."""
    assert flops / CHIPS < costs[name]["flops"] < more * flops / CHIPS


@pytest.mark.parametrize(
    ("name", "bytes_at_most"),
    [
        ("accumulate", 2 * HEAD // TENSOR),  # over fsdp, in bfloat16: no chip sees more of a parameter than its share
        ("apply", 0),
        *((name, PROMPTS * SPEC.vocab_size // TENSOR * 4) for name in PREFILLS),  # over data: keys, values, logits
    ],
)
def test_nothing_larger_is_gathered(costs: Costs, name: str, bytes_at_most: int) -> None:
    assert costs[name]["gathered_bytes"] <= bytes_at_most
    for seen in (costs[name]["gathered_bytes"], costs[name]["collectives"]["all-gather"]):
        assert (seen > 0) == (bytes_at_most > 0)


@pytest.mark.parametrize("name", ["insert", "decode"])
def test_no_logits_are_gathered_to_sample(costs: Costs, name: str) -> None:
    """Nothing is truncated, so nothing is sorted."""
    assert costs[name]["gathered_bytes"] < SLOTS // DATA * SPEC.vocab_size // TENSOR * 4


def test_every_forward_reduces_over_tensor(costs: Costs) -> None:
    """After attention and after the hidden units of each layer; training more often, backwards and where the first is
    made again. Three of a layer were operations of their own at 23361007, five in an earlier program."""
    for name in FORWARD:
        times = 3 if name == "accumulate" else 2
        assert costs[name]["collectives"]["all-reduce"] >= times * SPEC.layers, name
    assert costs["apply"]["collectives"]["all-reduce"] > 0  # the norm of the gradients


def test_logits_are_never_computed_whole(costs: Costs) -> None:
    """A training step computes logits a part at a time, a prefill only those of last tokens.

    So no array is larger than the head's parameter, and none of a step is larger than the config allows.
    """
    assert LOGITS_BYTES / 2 < costs["accumulate"]["largest_bytes"] <= LOGITS_BYTES
    assert all(costs[name]["largest_bytes"] == 2 * HEAD // TENSOR for name in (*PREFILLS, "decode"))
    # A layer's input is kept for the backward pass; what else lives at once is a few times the logits of a part.
    kept = SPEC.layers * ROWS // FSDP * ROW_TOKENS * SPEC.width * 2
    assert kept < costs["accumulate"]["temp_bytes"] < kept + 4 * LOGITS_BYTES
    # Of a sampler: a few times the logits of all slots of a shard. Its parameters are used as they lie.
    logits = 8 * SLOTS // DATA * SPEC.vocab_size * 4
    assert all(costs[name]["temp_bytes"] < logits for name in NAMES[2:])


def test_attention_is_by_kernels(costs: Costs) -> None:
    """One a layer; of training forward, the same made again, and all gradients. `extend` has none to choose."""
    kernels = {name: cost["custom_calls"] for name, cost in costs.items() if cost["attention"]}
    assert kernels == {"accumulate": 3 * SPEC.layers, "decode": SPEC.layers} | dict.fromkeys(PREFILLS[:2], SPEC.layers)
    said = {name: costs[name]["attention"] for name in kernels}
    assert said == {"decode": "pallas (auto on tpu)"} | dict.fromkeys(
        ("accumulate", *PREFILLS[:2]), "splash (auto on tpu)"
    )


def test_packed_rows_of_32k_compile_for_eight_v5p_chips(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed: the memory of a gradient step over two rows, with tokens divided over sequence and tensor."""
    rows = compiled("tpu_programs.py", "v5p:2x2x2", "rows_of_32k", limit_s=1700)
    (cost,) = (row for row in rows if row["name"] == "accumulate")
    peak, temporaries = cost["peak_bytes"] / 1e9, cost["temp_bytes"] / 1e9
    with capsys.disabled():
        print("\nQwen3-0.6B, gradients of 2 rows of 32,768 tokens on v5p:2x2x2, of one chip: ", end="")
        print(f"{peak:.2f} GB, {temporaries:.2f} GB of them temporaries; compiled in {cost['compile_s']:.0f} s")
    # Every layer's input of one row in bfloat16, of which a chip has a quarter of the tokens.
    kept = SPEC.layers * 32_768 // 4 * SPEC.width * 2
    assert kept < cost["temp_bytes"] < 2.7e9, "with a copy on each device of tensor it needs 3.0 GB"
    assert cost["peak_bytes"] < 4e9


def test_packed_rows_of_32k_with_inputs_of_layers_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed: the memory of the gradient step of the test above, with `learner.remat=offload`."""
    rows = compiled("tpu_programs.py", "v5p:2x2x2", "inputs_on_host", limit_s=1700)
    (cost,) = (row for row in rows if row["name"] == "accumulate")
    with capsys.disabled():
        print(f"\nthe same with {cost['host_temp_bytes'] / 1e9:.2f} GB in host memory: ", end="")
        print(f"{cost['peak_bytes'] / 1e9:.2f} GB, {cost['temp_bytes'] / 1e9:.2f} GB of them temporaries")
    kept = SPEC.layers * 32_768 // 4 * SPEC.width * 2
    assert kept <= cost["host_temp_bytes"] < 1.1 * kept
    assert cost["temp_bytes"] < 1.9e9, "with the inputs on the chips 2.4 GB"


def test_an_engine_with_rings_compiles_for_four_v5e_chips(capsys: pytest.CaptureFixture[str]) -> None:
    """Six layers of Gemma 3 1B, five of which see 512 tokens, for 128 requests of 8,704 tokens. Printed: the cache."""
    found = {row["name"]: row for row in compiled("tpu_programs.py", "v5e:2x2", "rings", limit_s=1700)}
    assert set(found) == {"prefill_512", "extend_512", "insert", "decode"}
    assert found["decode"]["attention"].startswith("xla") and found["prefill_512"]["attention"].startswith("splash")
    page = 64 * families.spec("gemma3_1b").head_dim * 2  # one key-value head in bfloat16
    slots, prompts = 128 // 4, 16
    ring, whole = page * 9 * (slots + prompts // 4), page * (slots * 8_704 // 64 + prompts)
    state = 2 * (5 * ring + whole) + prompts * families.spec("gemma3_1b").vocab_size * 4  # and the logits of prompts
    assert state <= found["insert"]["argument_bytes"] < 1.01 * state
    assert all(row["alias_bytes"] >= state for row in found.values()), "a second state"
    copies = {name: max(map(int, row["copies"]), default=0) for name, row in found.items()}
    assert max(copies.values()) < ring / 2, copies
    assert max(row["temp_bytes"] for row in found.values()) < whole / 2
    with capsys.disabled():
        peak = max(row["peak_bytes"] for row in found.values())
        share = (5 * ring + whole) / (6 * whole)
        print(f"\nGemma 3 1B on v5e:2x2: {share:.0%} of the cache without rings, peak {peak / 1e9:.2f} GB")
