"""Slots of very uneven lengths: a long request does not change the others, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from jaxroll.config import MeshConfig
from jaxroll.engine.requests import Request
from jaxroll.protocols import GenerationKey, SamplingParams

SIZES = {"slots": 10, "max_tokens": 96, "page_tokens": 8, "prefill_buckets": (16,)}


def uneven(count: int = 10) -> list[Request]:
    """One that goes on and on among nine that soon end."""
    rng = np.random.default_rng(3)
    lengths = [80 if number == 6 else int(rng.integers(4, 12)) for number in range(count)]
    prompts = [rng.integers(0, 64, rng.integers(2, 16)).astype(np.int32) for _ in range(count)]
    return [
        Request(number, prompt, GenerationKey(number, 0), SamplingParams(length))
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2)], ids=str)
def test_tokens_do_not_depend_on_how_long_the_neighbours_are(bench, mesh):
    """On two devices each has a half of the slots, in an order of their own."""
    requests = uneven()
    alone = {request.id: bench(mesh, **SIZES).run([request])[request.id].completion for request in requests}
    for order in (range(10), reversed(range(10))):  # every slot is the long one's neighbor once
        together = bench(mesh, **SIZES).run([requests[number] for number in order])
        for id, result in together.items():
            np.testing.assert_array_equal(result.completion.tokens, alone[id].tokens)
            np.testing.assert_array_equal(result.completion.logprobs, alone[id].logprobs)
