"""A prefill computes its rows in blocks: unused rows cost nothing, and the answers are those of one row at a time."""

import jax
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine import programs, requests
from jaxroll.engine.requests import Request, Sizes
from jaxroll.protocols import GenerationKey, SamplingParams
from tests.engine.conftest import SPEC


@pytest.fixture
def two_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PREFILL_TOKENS", 32)


@pytest.mark.parametrize(
    "overrides",
    [
        {"prefill_rows": 3},
        pytest.param({"prefill_rows": 4, "scan_layers": True}, marks=pytest.mark.soak),
        pytest.param({"prefill_rows": 4, "mesh": MeshConfig(data=2)}, marks=pytest.mark.soak),
    ],
    ids=str,
)
@pytest.mark.usefixtures("two_rows_at_once")
def test_answers_are_those_of_the_naive_reference(bench, assert_naive, overrides):
    """Three rows are a block of two and one of a row and padding. Prompts need several chunks, and some are shared."""
    b = bench(**({"slots": 6, "max_tokens": 64, "prefill_buckets": (16,), "page_tokens": 8} | overrides))
    assert b.engine._sizes.rows_at_once(16) == 2 < b.engine._sizes.rows
    rng, wanted = np.random.default_rng(7), list[Request]()
    for index in range(24):
        prompt = (
            rng.integers(0, 64, rng.integers(1, 40)).astype(np.int32) if index % 3 else np.arange(20, dtype=np.int32)
        )
        params = SamplingParams(int(rng.integers(1, 20)), temperature=float(index % 2))
        wanted.append(Request(index, prompt, GenerationKey(index, 0), params))
    assert_naive(wanted, b.run(wanted))


@pytest.mark.usefixtures("two_rows_at_once")
def test_only_blocks_in_use_are_computed():
    """A row with an undefined number spoils the pages of what is computed."""
    sizes, mesh = Sizes(6, 64, 6, 4, (16,), 4, 4, page_tokens=8), sharding.build(MeshConfig())
    built = programs.build(SPEC, mesh, sharding.SAMPLER, sizes)
    weights = {name: jax.numpy.full(leaf.shape, np.nan, leaf.dtype) for name, leaf in built.held.items()}
    for fresh in (True, False):
        for used, blocks in ((0, 0), (1, 1), (2, 1), (3, 2), (6, 3)):
            row = requests.PrefillRow(np.ones(16, np.int32), 0, 0, (0, 1), None)
            packed = requests.pack_prefill(16, [row] * used, sizes)
            packed[:, 16 + 3] = np.arange(6)  # every row of the logits belongs to a row of the prefill
            state = built.prefill[fresh, 16](weights, built.empty(), packed)
            spoilt = np.isnan(np.asarray(state.logits)).any(axis=1)
            assert spoilt[: 2 * blocks].all() and not spoilt[2 * blocks :].any(), (fresh, used, spoilt)


def test_blocks_keep_a_device_busy_and_are_shared_evenly_by_shards():
    sizes = Sizes(64, 4096, 16, 4, (64, 1024), 4, 4)
    assert [sizes.rows_at_once(bucket) for bucket in (8, 64, 100, 256, 1024)] == [16, 4, 3, 1, 1]
    assert Sizes(64, 4096, 16, 4, (64,), 4, 4, shards=4).rows_at_once(1024) == 4
