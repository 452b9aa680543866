"""Sampler and learner agree on the log-probs of the same tokens under the same weights, on unequal meshes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll import sharding
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request
from jaxroll.errors import DataError
from jaxroll.learner import minibatch, step
from jaxroll.learner.trainer import Trainer
from jaxroll.models import families, params
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, Supports
from jaxroll.records import Claim, ClaimedGroup, Finished, Member, Segment, Task, Version
from tests.golden.write_families import VARIANTS
from tests.models.test_family_goldens import golden, logits_of, whole_rows

VOCAB, GROUPS, MEMBERS = 32, 4, 4
GREEDY = GROUPS, 0  # group and member of a request for the likeliest tokens
CONFIG_SAMPLER = {"mesh": {"tensor": 2}, "slots": 8, "prefill_rows": 2}
CONFIG = configs.parse(
    {
        "model": {"size": "nano"},
        "schedule": {"groups_per_step": GROUPS, "group_size": MEMBERS},
        "learner": {"mesh": {"fsdp": 2}, "micro_batch_rows": 6, "row_tokens": 64},  # three rows a shard: one program
        "sampler": CONFIG_SAMPLER,
    }
)


CUT = (
    SamplingParams(12, 0.8, top_k=6),
    SamplingParams(12, 0.8, top_p=0.9),
    SamplingParams(12, 0.8, min_p=0.2),
    SamplingParams(12, 0.8, top_k=7, top_p=0.8, min_p=0.1),
)
TRUNCATED = configs.parse({
    "model": {"size": "nano"},
    "schedule": {"groups_per_step": GROUPS, "group_size": MEMBERS},
    "sampling": {"temperature": 0.8, "top_p": 0.9, "support_tokens": 8},
    "learner": {
        "mesh": {"fsdp": 2, "tensor": 2}, "micro_batch_rows": 24, "row_tokens": 32, "minibatches": 2,
        "shared_prompt_tokens": 16, "shared_prompt_rows": 4, "reference": "init", "kl_coef": 0.1,
    },
    "sampler": CONFIG_SAMPLER,
})  # fmt: skip


def sampled(
    trainer: Trainer,
    spec: families.ModelSpec,
    cut: tuple[SamplingParams, ...] = (),
    support_tokens: int = 0,
    *,
    experts: bool = False,
) -> dict[tuple[int, int], tuple[np.ndarray, Completion]]:
    """Prompt and completion of every member, from an engine on the sampler's mesh that got the trainer's weights.

    In addition to the members of the claim, there is the request GREEDY.
    """
    mesh = sharding.build(CONFIG.sampler.mesh)
    weights = jax.device_put(trainer.state.params, params.shardings(spec, mesh, sharding.SAMPLER))
    config = EngineConfig(
        slots=8,
        max_tokens=28,
        prefill_rows=2,
        prefill_buckets=(16,),
        decode_chunk=4,
        seed=3,
        support_tokens=support_tokens,
        experts=experts,
    )
    engine = Engine(spec, mesh, sharding.SAMPLER, config)
    engine.warmup(weights)
    engine.swap(Version(0, 0), weights)
    done, chance = {}, np.random.default_rng(0)
    for number in range(GROUPS * MEMBERS):
        key = GenerationKey(number // MEMBERS, number % MEMBERS)
        prompt = chance.integers(4, VOCAB, 5 + number % 8).astype(np.int32)
        wanted = cut[number % len(cut)] if cut else SamplingParams(12, CONFIG.sampling.temperature, stop_tokens=(2,))

        def keep(result, key=key, prompt=prompt) -> None:
            done[key.group, key.member] = (prompt, result.completion)

        engine.add(Request(number, prompt, key, wanted), keep)
    prompt = np.arange(4, 15, dtype=np.int32)
    keep_it = functools.partial(keep, key=GenerationKey(*GREEDY), prompt=prompt)
    engine.add(Request(GROUPS * MEMBERS, prompt, GenerationKey(*GREEDY), SamplingParams(12, 0.0)), keep_it)
    while len(done) <= GROUPS * MEMBERS:
        engine.step()
    return done


def claim_of(done: dict[tuple[int, int], tuple[np.ndarray, Completion]]) -> Claim:
    """A claim of these members; rewards differ inside each group, so that every member is computed."""

    def member(group: int, number: int) -> Member:
        prompt, completion = done[group, number]
        nothing = np.zeros(len(prompt), np.uint8)
        shown = Segment(prompt, nothing, nothing.astype(np.float32))
        said = sampled_segments(completion)
        outcome = Finished(
            (shown, *said), completion.finish, float(number), {}, completion.versions, experts=completion.experts
        )
        return Member(group, number, 1, outcome)

    task = Task(0, (), "single_turn", "{}", 0, "0")
    groups = tuple(ClaimedGroup(g, task, tuple(member(g, number) for number in range(MEMBERS))) for g in range(GROUPS))
    return Claim(0, 0, groups, 0, replayed=False)


def sampled_segments(completion: Completion) -> tuple[Segment, Segment]:
    """The tokens of `completion` as two segments, as if they were two turns."""
    tokens, half = completion.tokens, len(completion.tokens) // 2
    found = Supports.decoded(completion.support, tokens)
    rows = found.rows(int(found.sizes.max()))

    def part(at: slice) -> Segment:
        packed = Supports.of_rows(rows[at]).encoded(tokens[at])
        return Segment(tokens[at], np.ones(len(tokens[at]), np.uint8), completion.logprobs[at], support=packed)

    return part(slice(half)), part(slice(half, None))


@pytest.mark.soak
def test_log_probs_of_truncated_samples_agree_and_a_learner_without_the_supports_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TRL 6789, vLLM 42259: the importance ratio of truncated samples is biased.

    With shared prompts, minibatches, a sharded vocabulary and a reference; members are truncated in four ways."""
    spec, mesh = families.spec("nano", vocab_size=VOCAB), sharding.build(TRUNCATED.learner.mesh)
    trainer = Trainer(TRUNCATED, spec, mesh, sharding.LEARNER, key=jax.random.key(1))
    claim = claim_of(sampled(trainer, spec, CUT, TRUNCATED.sampling.support_tokens))
    ready = trainer.prepare(claim)
    row = trainer.await_step(trainer.dispatch_step(ready))
    assert row["logprob_mismatch_tokens"] == row["tokens_trained"] == GROUPS * MEMBERS * 12
    assert 0 < row["logprob_mismatch_max"] < 1e-4 * max(1.0, row["logits_std"])
    assert row["ess"] == pytest.approx(1.0, abs=1e-5)
    trainer.set_params(jax.tree.map(lambda value: 1.1 * np.asarray(value), jax.device_get(trainer.params())))
    assert trainer.train(claim)["logprob_mismatch_max"] > 1e-3, "other weights are not seen as a mismatch"

    def planted(original):
        return lambda logits, tokens, temperature, support, over: original(logits, tokens, temperature, None, over)

    monkeypatch.setattr(step.logprob, "token_logprobs", planted(step.logprob.token_logprobs))
    plain = dataclasses.replace(TRUNCATED.learner, minibatches=1, reference="none", kl_coef=0.0)
    ignoring = Trainer(
        dataclasses.replace(TRUNCATED, learner=plain), spec, mesh, sharding.LEARNER, key=jax.random.key(1)
    )
    ignored = ignoring.train(claim)
    assert ignored["logprob_mismatch_max"] > 0.1
    smaller = dataclasses.replace(TRUNCATED.sampling, support_tokens=3)
    for config, words in (
        (CONFIG, "expects no truncation"),
        (dataclasses.replace(TRUNCATED, sampling=smaller), "expects 1 to 3: sampling.top_k, top_p and min_p differ"),
    ):
        with pytest.raises(DataError, match=words):
            minibatch.prepare(claim, config)


@pytest.mark.soak
def test_log_probs_agree_across_the_two_meshes_and_other_weights_are_seen_as_a_mismatch() -> None:
    spec = families.spec("nano", vocab_size=VOCAB)
    mesh = sharding.build(CONFIG.learner.mesh)
    trainer = Trainer(CONFIG, spec, mesh, sharding.LEARNER, key=jax.random.key(1))
    claim, other = claim_of(sampled(trainer, spec)), params.init(spec, jax.random.key(2), mesh, sharding.LEARNER)
    row = trainer.train(claim)
    assert row["logprob_mismatch_tokens"] == row["tokens_trained"] > 100, "every token is of the trained version"
    assert 0 < row["logprob_mismatch_max"] < 1e-4 * max(1.0, row["logits_std"])
    assert row["age_max"] == 0 and row["ess"] == pytest.approx(1.0, abs=1e-5)
    trainer.set_params(jax.device_get(other))
    assert trainer.train(claim)["logprob_mismatch_max"] > 1e-3


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
def test_sampler_and_learner_agree_for_every_family(variant: str) -> None:
    """Log-probs agree, and greedy tokens are the learner's likeliest ones; windows are shorter than most samples."""
    spec, weights, _ = golden(variant)
    trainer = Trainer(CONFIG, spec, sharding.build(CONFIG.learner.mesh), sharding.LEARNER, key=jax.random.key(1))
    trainer.set_params({name: np.asarray(value) for name, value in weights.items()})
    done = sampled(trainer, spec)
    prompt, greedy = done[GREEDY]
    text = np.concatenate([prompt, greedy.tokens])[None]
    likeliest = np.asarray(logits_of(spec, trainer.params(), *whole_rows(text))).argmax(-1)[0]
    assert len(greedy.tokens) == 12 and np.array_equal(likeliest[len(prompt) - 1 : -1], greedy.tokens)
    row = trainer.train(claim_of(done))
    assert row["logprob_mismatch_tokens"] == row["tokens_trained"] > 100
    assert 0 < row["logprob_mismatch_max"] < 1e-4 * max(1.0, row["logits_std"])


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
def test_truncated_samples_agree_for_every_family_and_experts_are_replayed(variant: str) -> None:
    """With top-p 0.9; a mixture of experts with routing replay."""
    spec, weights, _ = golden(variant)
    experts = spec.experts > 0
    config = dataclasses.replace(
        CONFIG,
        sampling=dataclasses.replace(CONFIG.sampling, temperature=0.8, top_p=0.9, support_tokens=8),
        learner=dataclasses.replace(CONFIG.learner, routing_replay=experts),
    )
    trainer = Trainer(config, spec, sharding.build(config.learner.mesh), sharding.LEARNER, key=jax.random.key(1))
    trainer.set_params({name: np.asarray(value) for name, value in weights.items()})
    cut = (SamplingParams(12, 0.8, top_p=0.9),)
    done = sampled(trainer, spec, cut, config.sampling.support_tokens, experts=experts)
    assert all(bool(completion.experts.size) == experts for _, completion in done.values())
    kept = [Supports.decoded(completion.support, completion.tokens).sizes for _, completion in done.values()]
    assert min(sizes.min() for sizes in kept) < 8, "nothing was cut"
    row = trainer.train(claim_of(done))
    assert row["logprob_mismatch_tokens"] == row["tokens_trained"] > 100
    assert 0 < row["logprob_mismatch_max"] < 1e-4 * max(1.0, row["logits_std"])
