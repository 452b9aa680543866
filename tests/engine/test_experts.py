"""A mixture of experts in the engine: tokens of the reference, recorded experts, and their replay by the learner."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.algorithms.sampling import token_logprobs
from jaxroll.config import MeshConfig
from jaxroll.engine import decoding
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request, Result
from jaxroll.models import families, moe, params, transformer
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version
from tests.harness import naive_engine

SPEC = dataclasses.replace(families.spec("tiny_moe"), router_bias=True)
ONE, SEED, LENGTH = MeshConfig(), 5, 48


@functools.cache
def weights(mesh: MeshConfig = ONE, seed: int = 0) -> params.Params:
    made = params.init(SPEC, jax.random.key(seed), sharding.build(mesh), sharding.SAMPLER)
    biases = np.random.default_rng(6).normal(size=(SPEC.layers, SPEC.experts)).astype(np.float32)
    for layer, name in enumerate(name for name in sorted(made) if name.endswith("router_bias")):
        made[name] = jax.device_put(jnp.asarray(biases[layer]), made[name].sharding)
    return made | {"embed": made["embed"] * 12.0}


@functools.cache
def engine(
    mesh: MeshConfig = ONE, paged: str = "xla", cache_pages: int = 0, spec: ModelSpec = SPEC, drafts: int = 0
) -> Engine:
    config = EngineConfig(
        slots=4,
        max_tokens=LENGTH,
        prefill_rows=2,
        prefill_buckets=(16,),
        decode_chunk=4,
        seed=SEED,
        page_tokens=4,
        cache_pages=cache_pages,
        experts=True,
        paged_attention=paged,
        draft_tokens=drafts,
    )
    made = Engine(spec, sharding.build(mesh), sharding.SAMPLER, config)
    made.warmup(None)
    return made


@pytest.fixture(scope="module", autouse=True)
def engines_can_be_forgotten(program_holders) -> None:
    program_holders.append(engine.cache_clear)


def requests(count: int) -> list[Request]:
    """Prompts of several chunks; every second one shares its first 20 tokens with the one before."""
    rng, found = np.random.default_rng(4), []
    for id in range(count):
        own = rng.integers(0, SPEC.vocab_size, rng.integers(3, 9)).astype(np.int32)
        front = found[-1].prompt[:20] if id % 2 else rng.integers(0, SPEC.vocab_size, 20).astype(np.int32)
        wanted = SamplingParams(max_tokens=int(rng.integers(6, 16)), ignore_eos=True)
        found.append(Request(id, np.concatenate([front, own]), GenerationKey(id // 2, id % 2), wanted))
    return found


@functools.cache
def naive_trace(id: int) -> naive_engine.Trace:
    return naive_engine.trace(SPEC, weights(), requests(id + 1)[id], SEED)


def results(of: Engine, wanted: list[Request], weights: params.Params) -> dict[int, Result]:
    found: dict[int, Result] = {}
    of.swap(Version(0, 1), weights)
    for request in wanted:
        of.add(request, functools.partial(found.__setitem__, request.id))
    for _ in range(2000):
        if not of.step():
            return found
    raise AssertionError("still working")


@functools.partial(jax.jit, static_argnames=("replay", "spec"))
def of_learner(values, tokens, experts, replay, spec):
    """Log-prob of each token after the first, and the logits, of one sequence [T]."""
    T = len(tokens)
    choices = experts.reshape(1, T, SPEC.layers, -1) if replay else None
    at, segment = jnp.arange(T)[None], jnp.ones((1, T), jnp.int32)
    hidden = transformer.forward(spec, values, tokens[None], at, segment, choices=choices)
    logits = transformer.logits(spec, values, hidden[0, :-1])
    return token_logprobs(logits, tokens[1:], 1.0), logits


def mismatch(
    values: params.Params, request: Request, result: Result, *, replay: bool, spec: ModelSpec = SPEC
) -> tuple[float, float]:
    """The largest difference of the log-probs of sampler and learner, and the standard deviation of the logits."""
    done, total = result.completion, len(request.prompt) + len(result.completion.tokens)
    tokens = np.zeros(LENGTH, np.int32)
    tokens[:total] = np.concatenate([request.prompt, done.tokens])
    experts = np.full((LENGTH, moe.recorded_width(SPEC)), np.iinfo(done.experts.dtype).max, done.experts.dtype)
    experts[: total - 1] = done.experts
    ours, logits = of_learner(values, tokens, experts, replay, spec)
    sampled = slice(len(request.prompt) - 1, total - 1)
    return float(np.abs(np.asarray(ours)[sampled] - done.logprobs).max()), float(np.std(np.asarray(logits)[sampled]))


@pytest.mark.parametrize(
    ("mesh", "paged", "pages"),
    [
        (ONE, "dense", 0),
        pytest.param(ONE, "xla", 18, marks=pytest.mark.soak),
        pytest.param(MeshConfig(expert=4), "xla", 0, marks=pytest.mark.soak),
    ],
    ids=["dense", "few pages", "expert=4"],
)
def test_tokens_equal_the_naive_reference_and_replayed_experts_give_their_log_probs(
    mesh: MeshConfig, paged: str, pages: int
) -> None:
    """Through shared prompts, chunks of prompts, and (with few pages) preemptions."""
    wanted, values = requests(6), weights(mesh)
    done = results(engine(mesh, paged, pages), wanted, values)
    assert not pages or engine(mesh, paged, pages).stats().preemptions, "no request was preempted"
    for request in wanted:
        completion = done[request.id].completion
        reference = naive_trace(request.id)
        assert (
            completion.tokens.tolist() == reference.tokens.tolist() or reference.margins.min() < naive_engine.NEAR_TIE
        )
        shape = (len(request.prompt) + len(completion.tokens) - 1, SPEC.layers * SPEC.experts_per_token)
        assert completion.experts.shape == shape and completion.experts.dtype == np.uint8
        for replay in (True, False):
            largest, deviation = mismatch(weights(), request, done[request.id], replay=replay)
            assert largest < 1e-4 * max(1.0, deviation)
    neutral = {
        name: np.zeros_like(value) if name.endswith("router_bias") else value for name, value in weights().items()
    }
    assert max(mismatch(neutral, one, done[one.id], replay=False)[0] for one in wanted) > 0.01, "biases change nothing"


@pytest.mark.soak
def test_the_experts_of_drafted_tokens_are_those_of_one_token_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is verified. The prompts repeat, and greedy answers too, so that drafts are kept and rejected."""
    monkeypatch.setattr(decoding, "SHORTEST_RUN", 1)
    monkeypatch.setattr(decoding, "WORTH", 0.0)
    greedy = SamplingParams(max_tokens=15, temperature=0.0, ignore_eos=True)
    wanted = [dataclasses.replace(one, params=greedy) for one in requests(6)]
    alone, drafting = engine(ONE, "dense", 0), engine(ONE, "dense", 0, drafts=3)
    before, found = results(alone, wanted, weights()), results(drafting, wanted, weights())
    stats = drafting.stats()
    assert 0 < stats.tokens_accepted < stats.tokens_drafted
    for request in wanted:
        one, other = before[request.id].completion, found[request.id].completion
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.experts, other.experts)


def test_replay_keeps_the_sampler_s_experts_when_the_learner_would_choose_others() -> None:
    """After a change of the routers alone, replay changes only gates: the difference is far smaller than without."""
    wanted = requests(6)
    done = results(engine(ONE, "dense", 0), wanted, weights())
    rng = np.random.default_rng(0)
    moved = {
        name: value + 0.02 * rng.normal(size=value.shape).astype(np.float32) if name.endswith("router") else value
        for name, value in weights().items()
    }
    with_replay, without = (
        max(mismatch(moved, request, done[request.id], replay=replay)[0] for request in wanted)
        for replay in (True, False)
    )
    assert 4 * with_replay < without, (with_replay, without)


@pytest.mark.soak
def test_mismatch_in_bfloat16_with_and_without_replay(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed: the largest differences of log-probs, by seed of the weights. Rounding chooses other experts."""
    spec, found = dataclasses.replace(SPEC, compute_dtype="bfloat16", router_bias=False), []
    wanted, shapes = requests(40), params.served(spec)
    for seed in range(5):
        held = {name: value.astype(shapes[name].dtype) for name, value in weights(ONE, seed).items() if name in shapes}
        done = results(engine(ONE, "xla", 0, spec), wanted, held)
        found.append(
            [
                max(mismatch(held, one, done[one.id], replay=replay, spec=spec)[0] for one in wanted)
                for replay in (True, False)
            ]
        )
    with capsys.disabled():
        print(
            "\nlargest mismatch of log-probs in bfloat16, with and without replay, by seed: "
            + ", ".join(f"{with_replay:.2f} and {without:.2f}" for with_replay, without in found)
        )
    with_replay, without = np.array(found).T
    assert with_replay.max() < 0.25 and 2 * with_replay.mean() < without.mean()
