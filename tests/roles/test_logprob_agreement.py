"""Sampler and learner agree on the log-probs of the same tokens under the same weights, on unequal meshes."""

import jax
import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request
from jaxroll.learner.trainer import Trainer
from jaxroll.models import families, params
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Claim, ClaimedGroup, Finished, Member, Segment, Task, Version
from jaxroll.sharding import layout

VOCAB, GROUPS, MEMBERS = 32, 4, 4
CONFIG = configs.parse({
    "model": {"size": "nano"},
    "schedule": {"groups_per_step": GROUPS, "group_size": MEMBERS},
    "learner": {"mesh": {"fsdp": 2}, "micro_batch_rows": 8, "row_tokens": 64},
    "sampler": {"mesh": {"tensor": 2}, "slots": 8, "prefill_rows": 2},
})  # fmt: skip


def sampled(trainer: Trainer, spec: families.ModelSpec) -> dict[tuple[int, int], tuple[np.ndarray, Completion]]:
    """Prompt and completion of every member, from an engine on the sampler's mesh that got the trainer's weights."""
    mesh = layout.build(CONFIG.sampler.mesh)
    weights = jax.device_put(trainer.state.params, params.shardings(spec, mesh, layout.SAMPLER))
    config = EngineConfig(slots=8, max_tokens=28, prefill_rows=2, prefill_buckets=(16,), decode_chunk=4, seed=3)
    engine = Engine(spec, mesh, layout.SAMPLER, config)
    engine.warmup(weights)
    engine.swap(Version(0, 0), weights)
    done, chance = {}, np.random.default_rng(0)
    for number in range(GROUPS * MEMBERS):
        key = GenerationKey(number // MEMBERS, number % MEMBERS)
        prompt = chance.integers(4, VOCAB, 5 + number % 8).astype(np.int32)
        wanted = SamplingParams(max_tokens=12, temperature=CONFIG.sampling.temperature, stop_tokens=(2,))

        def keep(result, key=key, prompt=prompt) -> None:
            done[key.group, key.member] = (prompt, result.completion)

        engine.add(Request(number, prompt, key, wanted), keep)
    while len(done) < GROUPS * MEMBERS:
        engine.step()
    return done


def claim_of(done: dict[tuple[int, int], tuple[np.ndarray, Completion]]) -> Claim:
    """A claim of these members; rewards differ inside each group, so that every member is computed."""

    def member(group: int, number: int) -> Member:
        prompt, completion = done[group, number]
        nothing = np.zeros(len(prompt), np.uint8)
        shown = Segment(prompt, nothing, nothing.astype(np.float32))
        said = Segment(completion.tokens, np.ones(len(completion.tokens), np.uint8), completion.logprobs)
        outcome = Finished((shown, said), completion.finish, float(number), {}, completion.versions)
        return Member(group, number, 1, outcome)

    task = Task(0, (), "single_turn", "{}", 0, "0")
    groups = tuple(ClaimedGroup(g, task, tuple(member(g, number) for number in range(MEMBERS))) for g in range(GROUPS))
    return Claim(0, 0, groups, 0, replayed=False)


def test_log_probs_agree_across_the_two_meshes() -> None:
    spec = families.spec("nano", vocab_size=VOCAB)
    trainer = Trainer(CONFIG, spec, layout.build(CONFIG.learner.mesh), layout.LEARNER, key=jax.random.key(1))
    row = trainer.train(claim_of(sampled(trainer, spec)))
    assert row["logprob_mismatch_tokens"] == row["tokens_trained"] > 100, "every token is of the trained version"
    assert 0 < row["logprob_mismatch_max"] < 1e-4 * max(1.0, row["logits_std"])
    assert row["age_max"] == 0 and row["ess"] == pytest.approx(1.0, abs=1e-5)


def test_other_weights_are_seen_as_a_mismatch() -> None:
    spec = families.spec("nano", vocab_size=VOCAB)
    mesh = layout.build(CONFIG.learner.mesh)
    claim = claim_of(sampled(Trainer(CONFIG, spec, mesh, layout.LEARNER, key=jax.random.key(1)), spec))
    row = Trainer(CONFIG, spec, mesh, layout.LEARNER, key=jax.random.key(2)).train(claim)
    assert row["logprob_mismatch_max"] > 1e-3
