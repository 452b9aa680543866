"""Algorithms in the learner: sequence losses for any packing, micro-batches and mesh; pairs; the reference."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.config import MeshConfig
from jaxroll.learner import minibatch, packing
from jaxroll.learner.step import PROXIMAL, REFERENCE, CompileCounter
from tests.harness.learner_padded import Padded

CUBE = MeshConfig(data=2, fsdp=2, tensor=2)
DPO = {"algorithm": "dpo", "reference": "init", "dpo_beta": 0.5}
GSPO = {"algorithm": "gspo", "correction_cap": 1e4}


def perturbed(trainer, scale=0.05):
    """Host copies of the trainer's parameters, each moved a little."""
    rng = np.random.default_rng(0)
    params = jax.device_get(trainer.state.params)
    return {name: value + scale * rng.normal(size=value.shape).astype(np.float32) for name, value in params.items()}


def moved(make_trainer, config):
    """A trainer whose reference differs from its policy, so that nothing is 1 or 0 by accident."""
    trainer = make_trainer(config)
    if config.learner.reference == "init":
        trainer.set_reference(perturbed(trainer))
    return trainer


def accumulated(trainer, samples):
    """Micro-batches, loss and gradients as `train` computes them."""
    batches = trainer.packed(samples, trainer.algorithm.together)
    placed = [[trainer.programs.placed(batch.streams) for batch in batches]]
    for name in trainer.programs.recipe.added:
        placed = trainer._with_logprobs(placed, name)
    accumulator = trainer.programs.zeros()
    for streams in placed[0]:
        accumulator = trainer.programs.accumulate(trainer.state.params, accumulator, streams)
    host = jax.device_get(accumulator)
    return len(batches), float(host.statistics["loss"].sum()), host.grads


def plain_gspo(trainer, rows, params):
    """Each sequence's −w·s·A over all sequences of the step; s = 1, so no clip is met."""
    logp, before = rows.logprobs(params), rows.logprobs(trainer.state.params)
    w = jnp.minimum(jnp.exp((before - rows.behaviour).sum(1)), 1e4)
    s = jnp.exp((logp - before).sum(1) / rows.mask.sum(1))
    return -(w * s * rows.advantage).sum() / 16  # members of the claim, those without advantage too


def plain_dpo(trainer, rows, params):
    """Mean over pairs of −log σ(β·margin)."""
    gain = (rows.logprobs(params) - rows.logprobs(dict(trainer.reference._kept))).sum(1) * rows.advantage
    return jnp.mean(jnp.log1p(jnp.exp(-0.5 * (gain[::2] + gain[1::2]))))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("learner", "plain"),
    [(GSPO, plain_gspo), (DPO, plain_dpo)],
    ids=["gspo", "dpo"],
)
def test_whole_sequences_whatever_rows_order_micro_batches_and_mesh(
    small_config, make_claim, make_trainer, learner, plain
):
    """The gradient of a sequence loss is that of sequences one by one, and no layout changes it."""
    config = small_config(micro_batch_rows=1, **learner)
    trainer = moved(make_trainer, config)
    (samples,) = minibatch.prepare(make_claim(age=1), config).minibatches
    count, loss, grads = accumulated(trainer, samples)
    assert count > 1, "the denominators must span micro-batches"
    rows = Padded(trainer.spec, samples)
    textbook = jax.jit(jax.value_and_grad(lambda params: plain(trainer, rows, params)))
    want_loss, want = textbook(trainer.state.params)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-4, atol=1e-6)
    same_gradients(grads, jax.device_get(want))
    other = moved(make_trainer, small_config(micro_batch_rows=4, row_tokens=40, mesh=CUBE, **learner))
    others, other_loss, got = accumulated(other, samples[::-1])
    assert others != count or other.config.learner.row_tokens != config.learner.row_tokens
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5, atol=1e-6)
    same_gradients(got, grads)


def same_gradients(got, want):
    scale = max(float(np.abs(leaf).max()) for leaf in want.values())
    assert scale > 0
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=2e-5 * scale, err_msg=name)


def test_pairs_are_adjacent_in_a_row(small_config, make_claim):
    config = small_config(**DPO)
    (samples,) = minibatch.prepare(make_claim(groups=4), config).minibatches
    assert samples and len(samples) % 2 == 0
    assert [s.advantage + t.advantage for s, t in zip(samples[::2], samples[1::2], strict=True)] == [0] * (
        len(samples) // 2
    )
    np.testing.assert_allclose(sum(s.weight * s.trained_tokens for s in samples), 1.0, rtol=1e-5)
    for shards in (1, 2):
        batches = packing.pack(samples, 64, (4, 2), shards=shards, together=2)
        places = {place.sample: place for batch in batches for place in batch.placements}
        assert len(places) == len(samples)
        for number in range(0, len(samples), 2):
            first, second = places[number], places[number + 1]
            assert (first.row, first.start + first.length) == (second.row, second.start)
        for batch in batches:
            for place in batch.placements:
                assert batch.streams["segment_ids"][place.row, place.start] % 2 == 1 - place.sample % 2


def test_the_reference_stays_where_the_run_began_also_in_the_hosts_memory(small_config, make_claim, make_trainer):
    """Two steps with and without offloading: the same bits, and the parameters of the start in the end."""
    states, rows = [], []
    for offload in (False, True):
        trainer = make_trainer(small_config(kl_coef=0.5, reference="init", reference_offload=offload))
        start = jax.device_get(trainer.state.params)
        rows.append([trainer.train(make_claim(step, age=1)) for step in (1, 2)])
        with trainer.reference.params() as params:
            assert {value.sharding.memory_kind for value in params.values()} == {"device"}
            assert all(np.array_equal(params[name], start[name]) for name in start)
        assert trainer.reference.memory_kinds == {"pinned_host" if offload else "device"}
        states.append(jax.device_get(trainer.state.params))
        assert any(not np.array_equal(states[-1][name], start[name]) for name in start)
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])
    assert rows[0][0]["tokens_computed"] == rows[0][0]["tokens_trained"], "those without advantage are held near it too"


def test_a_kl_in_the_loss_holds_the_policy_near_the_reference(small_config, make_claim, make_trainer):
    """Equal rewards: only the KL moves the parameters, and towards the reference."""
    config = small_config(kl_coef=1.0, reference="init", learning_rate=1e-3)
    trainer = make_trainer(config)
    trainer.set_reference(perturbed(trainer))
    claim = make_claim()
    samples = minibatch.prepare(claim, config).minibatches[0]
    losses = []
    for _ in range(4):
        silent = [replace(sample, advantage=0.0) for sample in samples]
        _, loss, _ = accumulated(trainer, silent)
        losses.append(loss)
        trainer.train(claim)
    assert losses[0] > 0 and losses[-1] < losses[0]


@pytest.mark.parametrize("algorithm", ["raft", pytest.param("raft_pp", marks=pytest.mark.soak)])
def test_a_kl_in_the_loss_is_added_to_a_loss_of_the_credited(small_config, make_claim, make_trainer, algorithm):
    """Its gradient over all members (that of `grpo` with rewards of 0) is added to the gradient without a KL."""
    held = {"kl_coef": 0.5, "reference": "init"}
    configs = [small_config(algorithm=algorithm, **held), small_config(algorithm=algorithm), small_config(**held)]
    claim, found = make_claim(), []
    for config, silent in zip(configs, (False, False, True), strict=True):
        trainer = moved(make_trainer, config)
        (samples,) = minibatch.prepare(claim, config).minibatches
        found.append(accumulated(trainer, [replace(s, advantage=0.0) if silent else s for s in samples])[2])
    for name, both in found[0].items():
        np.testing.assert_allclose(both, found[1][name] + found[2][name], rtol=1e-3, atol=1e-5, err_msg=name)
    assert max(np.abs(penalty).max() for penalty in found[2].values()) > 1e-2


def test_a_kl_in_the_reward_is_charged_by_the_token(small_config, make_claim, make_trainer):
    learner = {"kl_coef": 0.2, "kl_in": "reward", "reference": "init", "advantage": "group_mean"}
    config = small_config(**learner)
    trainer, claim = moved(make_trainer, config), make_claim(groups=1)
    given = minibatch.prepare(claim, config, costs=trainer._kl_costs)
    rows = Padded(trainer.spec, given.groups[0])
    costs = rows.logprobs(trainer.state.params) - rows.logprobs(dict(trainer.reference._kept))
    earned = [sample.reward for sample in given.groups[0]] - 0.2 * np.asarray(costs).sum(1)
    assert np.abs(costs).max() > 0.01
    want = earned - earned.mean()
    assert [s.reward for s in given.groups[0]] == [m.outcome.reward for m in claim.groups[0].members]
    np.testing.assert_allclose([s.advantage for s in given.minibatches[0]], want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("learner", "added"),
    [(DPO | {"minibatches": 2}, (PROXIMAL, REFERENCE)), ({"kl_coef": 0.1, "kl_in": "reward", "reference": "init"}, ())],
    ids=["both streams", "prices only"],
)
def test_with_a_reference_nothing_compiles_after_the_warm_up(small_config, make_claim, make_trainer, learner, added):
    trainer = make_trainer(small_config(**learner, micro_batch_rows=1), alone=True)
    trainer.warmup()
    assert trainer.programs.recipe.added == added
    counter = CompileCounter()
    for step, (groups, size) in enumerate([(4, 4), (2, 3), (1, 1)], start=1):
        assert np.isfinite(trainer.train(make_claim(step, groups, size, age=step % 2))["loss"])
    counter.close()
    assert counter.count == 0


def test_a_loss_of_ones_own_sees_how_old_tokens_are(small_config, make_claim, make_trainer):
    """It weighs by age: nothing at age 0, and at age 2 twice what it does at age 1."""
    config = small_config(alpha=2.0, algorithm="tests.harness.age_loss:by_age")
    norms, shares = [], []
    for age in (0, 1, 2):
        row = make_trainer(config).train(make_claim(step=2, age=age, seed=0))
        norms.append(row["grad_norm"])
        shares.append(row["clip_share"])
    assert norms[0] == 0 < norms[1] and norms[2] == pytest.approx(2 * norms[1], rel=1e-5)
    assert shares == [0, 0, 1]
