"""A critic in a run: how it begins, that it learns, nothing to learn, warm-up, checkpoints, adapters, other meshes."""

from __future__ import annotations

import jax
import msgspec
import numpy as np
import pytest

from jaxroll.config import MeshConfig
from jaxroll.learner import minibatch, packing
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.checkpoint_files import params as params_of
from jaxroll.learner.step import CompileCounter
from jaxroll.records import Version
from jaxroll.tools import generate
from tests.harness.learner_critic import CUBE, PPO, bits, sample_of


def test_it_starts_as_the_policy_says_zero_and_learns(small_config, make_claim, make_trainer):
    slow = {
        "learning_rate": 1e-4,
        "critic_learning_rate": 5e-3,
    }  # so that the policy, and with it the values to learn, hardly changes
    config = small_config(value_clip=0.0, **(PPO | slow))
    trainer, claim = make_trainer(config), make_claim(age=1)
    policy, critic = jax.device_get((trainer.state.params, trainer.state.critic.params))
    assert critic.keys() - policy.keys() == {"value"} and critic["value"].shape == (trainer.spec.width, 1)
    assert all(np.array_equal(critic[name], policy[name]) for name in policy) and not critic["value"].any()
    rows = [trainer.train(claim) for _ in range(25)]
    assert rows[0]["value_explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert rows[-1]["value_loss"] < 0.5 * rows[0]["value_loss"] and rows[-1]["value_explained_variance"] > 0.5
    assert trainer.params().keys() == policy.keys(), "samplers are given the policy alone"
    msgspec.json.encode(rows[-1])


@pytest.mark.soak
def test_nothing_compiles_after_the_warm_up(small_config, make_claim, make_trainer):
    learner = {"critic_offload": True, "minibatches": 2, "micro_batch_rows": 4, "mesh": MeshConfig(fsdp=2)}
    kl = {"reference": "init", "kl_coef": 0.1, "kl_in": "reward"}
    trainer = make_trainer(small_config(**(PPO | learner | kl)), alone=True)
    trainer.warmup()
    counter = CompileCounter()
    for step, (groups, size) in enumerate([(4, 4), (1, 1), (2, 3), (8, 4)], start=1):
        assert trainer.train(make_claim(step, groups, size, age=step % 2))["compiles"] == 0
    counter.close()
    assert counter.count == 0


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("groups", "size", "reward"), [(0, 1, None), (1, 1, None), (4, 4, 1.0), (4, 4, 0.0)])
def test_claims_with_nothing_to_learn_stay_finite(small_config, make_claim, make_trainer, groups, size, reward, raw):
    trainer = make_trainer(small_config(raw_advantages=raw, **PPO))
    claim = make_claim(groups=groups, size=size)
    if reward is not None:
        change = lambda m: msgspec.structs.replace(m, outcome=msgspec.structs.replace(m.outcome, reward=reward))  # noqa: E731
        members = [tuple(change(member) for member in group.members) for group in claim.groups]
        equal = [msgspec.structs.replace(g, members=m) for g, m in zip(claim.groups, members, strict=True)]
        claim = msgspec.structs.replace(claim, groups=tuple(equal))
    before = bits(trainer.state.params)
    for _ in range(2):
        row = trainer.train(claim)
        assert row["tokens_computed"] == row["tokens_trained"], "also of members without an advantage"
        assert all(np.isfinite(row[key]) for key in ("loss", "value_loss", "grad_norm", "critic_grad_norm"))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(trainer.state)))
    if groups == 0 or reward == 0.0:
        assert row["value_loss"] == 0.0 and bits(trainer.state.params) == before, "nothing was earned nor expected"


def test_a_member_without_trained_tokens_has_no_say():
    empty = sample_of([0, 0, 0], 5.0)
    assert not minibatch.token_rewards(empty).any()
    assert packing.gathered([], [], 2)[0].shape == (0,)


@pytest.mark.parametrize(
    ("lora", "offload"),
    [
        ({}, True),
        pytest.param({"lora_rank": 2}, False, marks=pytest.mark.soak),
        pytest.param({}, False, marks=pytest.mark.soak),
        pytest.param({"lora_rank": 2}, True, marks=pytest.mark.soak),
    ],
    ids=["all, offloaded", "adapters, colocated", "all, colocated", "adapters, offloaded"],
)
def test_a_resume_is_exact(tmp_path, small_config, make_claim, make_trainer, lora, offload):
    """The critic and its moments come back, while the state that was saved is already donated."""
    config = small_config(critic_offload=offload, **PPO, **lora)
    trainer = make_trainer(config)
    trainer.train(make_claim(1))
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    checkpoints.save(Version(0, 1), 1, trainer.state, trainer.base_digest())
    want = trainer.train(make_claim(2))
    checkpoints.wait()
    again = make_trainer(config)
    again.state, _ = checkpoints.restore(Version(0, 1), again.abstract_state(), again.base_digest())
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(again.state.critic)}
    assert kinds == {"pinned_host" if offload else "device"}
    assert again.train(make_claim(2)) == want | {"compiles": again._compiles.count}
    assert bits(again.state) == bits(trainer.state)
    about = checkpoints.about(Version(0, 1))
    assert "critic.params['value']" in about["arrays"]
    assert params_of(about).keys() == trainer.state.params.keys(), "an export takes the policy alone"
    checkpoints.close()


@pytest.mark.soak
def test_a_resume_on_another_mesh(tmp_path, small_config, make_claim, make_trainer):
    trainer = make_trainer(small_config(**PPO))
    trainer.train(make_claim(1))
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    checkpoints.save(Version(0, 1), 1, trainer.state)
    checkpoints.wait()
    want = [trainer.train(make_claim(step)) for step in (2, 3)]
    other = make_trainer(small_config(micro_batch_rows=4, mesh=CUBE, critic_offload=True, **PPO))
    other.state, _ = checkpoints.restore(Version(0, 1), other.abstract_state())
    got = [other.train(make_claim(step)) for step in (2, 3)]
    for key in ("loss", "value_loss", "returns_mean", "critic_grad_norm"):
        values, others = ([row[key] for row in rows] for rows in (want, got))
        np.testing.assert_allclose(others, values, rtol=1e-3, atol=1e-4, err_msg=key)
    checkpoints.close()


def test_the_policy_of_a_checkpoint_with_a_critic_is_found(tmp_path, small_config, make_claim, make_trainer):
    """`generate` and `eval` of a run restore its newest checkpoint; they are given the policy."""
    trainer = make_trainer(small_config(critic_offload=True, **PPO))
    trainer.train(make_claim(1))
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    checkpoints.save(Version(0, 1), 1, trainer.state)
    checkpoints.close()
    values, version, _ = generate.newest_params(trainer.config, trainer.spec, tmp_path, trainer.layout)
    assert version == Version(0, 1) and bits(values) == bits(trainer.state.params)
