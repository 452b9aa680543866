"""google-jetstream in an environment with JaxRoll: it drives our model, and its test engine serves our evaluation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine.requests import Request
from jaxroll.models import families, params
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import GenerationKey, SamplingParams
from tests.harness import naive_engine

pytestmark = [pytest.mark.soak, pytest.mark.process, pytest.mark.timeout(300)]

SPEC = families.spec("nano")
SERVING = {"slots": 3, "max_prefill": 32, "max_tokens": 44, "page_tokens": 8}
LENGTHS = (5, 1, 17, 32, 9, 16, 3)  # of prompts: both lengths that JetStream pads to, and one less and one more
MOST = (9, 12, 6, 20, 1, 8, 11)  # new tokens; the fourth prompt leaves room for 12 only
SEED, STEPS = 11, 8
CHARACTERS, REQUESTS = 128, 64  # of the client's tokenizer, one token each; of the client, all sent at once


def test_its_test_engine_generates_what_can_be_worked_out(peer) -> None:
    said = peer("jetstream", "jetstream_generate.py")
    # prefill doubles (2, 65, 66), which sums to 266; then 266 + 266 / 2, then 266 + (266 + 399) / 2
    assert said["tokens"] == [266, 399, 598]
    assert said["slots"] == 2


def scaled_up(spec: ModelSpec) -> params.Params:
    """Weights scaled up, so that the model's distributions are not flat."""
    made = params.init(spec, jax.random.key(0), sharding.build(MeshConfig()), sharding.SAMPLER)
    return {name: leaf * (12.0 if name == "embed" else 1.0) for name, leaf in made.items()}


@pytest.fixture
def weights() -> params.Params:
    return scaled_up(SPEC)


def assert_naive(
    weights: params.Params,
    prompt: list[int],
    key: GenerationKey,
    wanted: SamplingParams,
    got: list[int],
    spec: ModelSpec = SPEC,
) -> None:
    """Assert that `got` is the naive generation without its stop token, up to a near-tie."""
    expected = naive_engine.trace(spec, weights, Request(0, np.array(prompt, np.int32), key, wanted), SEED)
    tokens = [token for token in expected.tokens.tolist() if token not in wanted.stop_tokens]
    if tokens != got:
        same = next(
            (i for i, (a, b) in enumerate(zip(tokens, got, strict=False)) if a != b), min(len(tokens), len(got))
        )
        assert expected.margins[same] < naive_engine.NEAR_TIE, (tokens, got)


def test_its_orchestrator_and_server_drive_our_model_to_our_tokens(tmp_path: Path, peer, weights) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, SPEC.vocab_size, length).tolist() for length in LENGTHS]
    room = [min(most, SERVING["max_tokens"] - len(prompt)) for prompt, most in zip(prompts, MOST, strict=True)]
    greedy = [SamplingParams(most, 0.0) for most in room]
    free = naive_engine.trace(
        SPEC, weights, Request(0, np.array(prompts[0], np.int32), GenerationKey(0, 0), greedy[0]), SEED
    )
    eos = int(free.tokens[3])  # so that one request ends before its limit
    np.savez(tmp_path / "weights.npz", **{name: np.asarray(leaf) for name, leaf in weights.items()})
    work = {"eos": eos, "serving": SERVING, "prompts": prompts, "max_tokens": MOST, "seed": SEED, "steps": STEPS}
    (tmp_path / "work.json").write_text(json.dumps(work))

    said = peer("jetstream", "jetstream_serve.py", str(tmp_path))

    for prompt, most, got in zip(prompts, room, said["orchestrated"], strict=True):
        assert_naive(weights, prompt, GenerationKey(0, 0), SamplingParams(most, 0.0, stop_tokens=(eos,)), got)
    assert len(said["orchestrated"][0]) <= 3
    assert said["served"] == said["orchestrated"]
    assert said["texts"] == ["".join(f"n{token} " for token in tokens) for tokens in said["served"]]
    assert len(said["sampled"]) == SERVING["slots"]
    for member, (prompt, got) in enumerate(zip(prompts, said["sampled"], strict=False)):
        ended = got.index(eos) if eos in got else len(got)
        wanted = SamplingParams(STEPS, 1.0, stop_tokens=(eos,))
        assert_naive(weights, prompt, GenerationKey(7, member), wanted, got[:ended])


def test_its_benchmark_client_gets_our_tokens_from_its_server(tmp_path: Path, peer) -> None:
    spec = dataclasses.replace(SPEC, vocab_size=CHARACTERS)
    weights = scaled_up(spec)
    np.savez(tmp_path / "weights.npz", **{name: np.asarray(leaf) for name, leaf in weights.items()})
    serving = SERVING | {"slots": 8}
    work = {"eos": CHARACTERS, "serving": serving, "vocabulary": CHARACTERS, "requests": REQUESTS}
    (tmp_path / "work.json").write_text(json.dumps(work))

    said = peer("jetstream", "jetstream_client.py", str(tmp_path))

    assert len(said["answers"]) == REQUESTS
    assert said["reported"] == [REQUESTS, sum(most for _, most, _ in said["answers"])]
    for prompt, most, text in said["answers"]:
        got, wanted = [*text.encode("ascii")], SamplingParams(most, 0.0)
        assert len(got) == most
        assert_naive(weights, [*prompt.encode("ascii")], GenerationKey(0, 0), wanted, got, spec)


def test_its_test_engine_answers_a_held_out_evaluation(peer) -> None:
    said = peer("jetstream", "jetstream_evaluate.py")
    assert said["marks"] == "11001"
    assert said["accuracy"] == 0.6
    # Sampled tokens, the stop token too; the third is cut off at four, 26 + (26 + 39 + 58.5) / 2 being the last.
    assert said["texts"] == ["n20 n30", "n22 n33", "n26 n39 n58 n87", "n14 n21", "n20 n30"]
