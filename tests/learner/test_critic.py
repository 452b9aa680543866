"""PPO's critic: the whole update against numpy, hand-worked GAE, and what must not change it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

from jaxroll import sharding
from jaxroll.learner import critic, minibatch
from jaxroll.learner.critic import Critic
from jaxroll.learner.state import Accumulator
from jaxroll.models import transformer
from tests.harness import numpy_losses as plain
from tests.harness.learner_critic import CUBE, PPO, bits, sample_of

LONGEST = 32


def judging(trainer, seed=1):
    """`trainer` with a critic whose values are not 0, unlike those of a fresh critic."""
    chance, critic = np.random.default_rng(seed), trainer.state.critic
    host = {name: np.asarray(value) for name, value in sorted(critic.params.items())}
    moved = {name: value + chance.normal(0, 0.05, value.shape).astype(np.float32) for name, value in host.items()}
    placed = {name: jax.device_put(moved[name], value.sharding) for name, value in critic.params.items()}
    trainer.state = replace(trainer.state, critic=replace(critic, params=placed))
    return trainer


def moments(state) -> dict[str, np.ndarray]:
    """The first moments of Adam: after one step the clipped gradient times 1 − β₁."""
    return jax.device_get(optax.tree.get(state.opt_state, "mu"))


def same_moments(got, want, tolerance=2e-5):
    scale = max(float(np.abs(leaf).max()) for leaf in want.values())
    assert scale > 0 and got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=tolerance * scale, err_msg=name)


# --- the whole update


class Textbook:
    """A claim one member a row, without the packer: log π, V, GAE and the two losses as they are written in papers."""

    def __init__(self, trainer, claim):
        self.learner, self.spec = trainer.config.learner, trainer.spec
        members = [sample for group in minibatch.of_claim(claim) for sample in group]
        shape = (len(members), LONGEST)
        self.tokens, self.segments, self.mask = np.zeros(shape, int), np.zeros(shape, int), np.zeros(shape, bool)
        self.behaviour = np.zeros(shape)
        for row, sample in enumerate(members):
            n = len(sample.tokens)
            self.tokens[row, :n], self.segments[row, :n] = sample.tokens, 1
            self.mask[row, :n], self.behaviour[row, :n] = sample.mask, sample.behaviour
        self.rewards = [sample.reward for sample in members]

    def hidden(self, spec, params):
        positions = np.broadcast_to(np.arange(LONGEST), self.tokens.shape)
        rows = map(jnp.asarray, (self.tokens, positions, self.segments))
        return transformer.forward(spec, params, *rows)

    def values(self, params):
        spec = dataclasses.replace(self.spec, value_head=True)
        after = (self.hidden(spec, params) @ params["value"])[..., 0]
        return jnp.pad(after[:, :-1], ((0, 0), (1, 0)))

    def logprobs(self, params):
        log_all = jax.nn.log_softmax(transformer.logits(self.spec, params, self.hidden(self.spec, params)))
        logp = jnp.take_along_axis(log_all[:, :-1], self.tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.pad(logp, ((0, 0), (1, 0)))

    def credited(self, values):
        """Standardized advantages and returns [N, T], in float64, row by row."""
        advantages, returns = np.zeros(self.mask.shape), np.zeros(self.mask.shape)
        for row, reward in enumerate(self.rewards):
            at = np.flatnonzero(self.mask[row])
            rewards = np.zeros(len(at))
            rewards[-1:] = reward
            said = np.asarray(values[row], np.float64)[at]
            advantages[row, at] = plain.gae(rewards, said, self.learner.gae_discount, self.learner.gae_lambda)
            returns[row, at] = advantages[row, at] + said
        every = advantages[self.mask]
        whitened = np.where(self.mask, (advantages - every.mean()) / every.std(ddof=1), 0.0)
        return whitened, returns

    def policy_loss(self, advantages):
        def loss(params):
            logp = self.logprobs(params)
            before = jax.lax.stop_gradient(logp)
            weight = jnp.minimum(jnp.exp(before - self.behaviour), 2.0)
            return jnp.where(self.mask, -weight * jnp.exp(logp - before) * advantages, 0.0).sum() / self.mask.sum()

        return loss

    def critic_loss(self, returns):
        return lambda params: (
            jnp.where(self.mask, 0.5 * (self.values(params) - returns) ** 2, 0.0).sum() / self.mask.sum()
        )


def first_update(params, grads, rate, clip):
    """Parameters and first moments after AdamW's first step, in numpy: its update is the sign of the gradient."""
    norm = np.sqrt(sum(np.square(np.float64(grad)).sum() for grad in grads.values()))
    clipped = {name: np.float64(grad) * min(1.0, clip / norm) for name, grad in grads.items()}
    moved = {name: params[name] - rate * grad / (np.abs(grad) + 1e-8) for name, grad in clipped.items()}
    return moved, {name: 0.1 * grad for name, grad in clipped.items()}, norm


def test_the_whole_update_is_that_of_the_papers(small_config, make_claim, make_trainer):
    """Values, GAE, whitening, both losses, clipping and Adam, against formulas without packing, weights or mesh."""
    config = small_config(micro_batch_rows=1, max_grad_norm=0.05, gae_lambda=0.8, gae_discount=0.97, **PPO)
    trainer, claim = judging(make_trainer(config)), make_claim(age=1)
    before, judge = jax.device_get(trainer.state.params), jax.device_get(trainer.state.critic.params)
    book = Textbook(trainer, claim)
    said = jax.jit(book.values)(judge)
    advantages, returns = book.credited(said)
    value_loss, of_critic = jax.jit(jax.value_and_grad(book.critic_loss(returns)))(judge)
    of_policy = jax.jit(jax.grad(book.policy_loss(advantages)))(before)
    row = trainer.train(claim)
    assert row["micro_batches"] > 1, "the denominators must span micro-batches"
    assert row["tokens_computed"] == row["tokens_trained"], "the critic learns from every member"
    for state, params, grads, rate, norm in (
        (trainer.state, before, of_policy, 1e-2, row["grad_norm"]),
        (trainer.state.critic, judge, of_critic, 2e-2, row["critic_grad_norm"]),
    ):
        moved, first, length = first_update(params, jax.device_get(grads), rate, 0.05)
        assert length > 0.05, "each is clipped by its own norm"
        np.testing.assert_allclose(norm, length, rtol=1e-4)
        same_moments(moments(state), first, 1e-4)
        scale = max(np.abs(moment).max() for moment in first.values())
        for name, moment in first.items():
            sure = np.abs(moment) > 1e-3 * scale  # of smaller ones rounding decides the sign
            np.testing.assert_allclose(np.asarray(state.params[name])[sure], moved[name][sure], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(row["value_loss"], value_loss, rtol=1e-4)
    np.testing.assert_allclose(row["returns_mean"], returns[book.mask].mean(), rtol=1e-4)
    error = (returns - np.asarray(said))[book.mask]
    want = 1 - error.var() / returns[book.mask].var()
    np.testing.assert_allclose(row["value_explained_variance"], want, rtol=1e-3, atol=1e-4)


def test_the_critics_gradient_agrees_with_a_finite_difference(small_config, make_claim, make_trainer):
    """Along the gradient itself; the targets are data, so the loss can be differenced."""
    trainer = judging(make_trainer(small_config(micro_batch_rows=1, max_grad_norm=1e9, **PPO)))
    claim = make_claim(age=1)
    (ones,) = minibatch.prepare(claim, trainer.config, values=trainer._values).minibatches
    batches = [(batch, trainer.programs.placed(batch.streams)) for batch in trainer.packed(ones)]
    streams = [trainer.critic.placed(batch, ones, of) for batch, of in batches]

    def copied(state):
        return jax.device_put(jax.device_get(state), sharding.shardings_of(state), may_alias=False)

    def loss(params) -> float:
        _, (report,) = trainer.critic.trained(replace(trainer.state.critic, params=placed(params)), [streams])
        return float(report["statistics"]["loss"])

    def placed(params):
        where = trainer.critic.here.params
        trainer.state = replace(trainer.state, critic=copied(trainer.state.critic))  # the one before is donated
        return {name: jax.device_put(np.float32(value), where[name].sharding) for name, value in params.items()}

    start = {name: np.asarray(value) for name, value in trainer.state.critic.params.items()}
    kept = copied(trainer.state.critic)
    after, _ = trainer.critic.trained(replace(kept, params=placed(start)), [streams])
    grads = {name: 10 * value for name, value in moments(after).items()}
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in grads.values()))
    ahead, behind = (loss({name: start[name] + sign * 1e-3 * grads[name] / norm for name in start}) for sign in (1, -1))
    np.testing.assert_allclose((ahead - behind) / 2e-3, norm, rtol=1e-2)


def accumulated(monkeypatch, values, streams, clip) -> Accumulator:
    """The critic's sums, added to an accumulator of ones, for a model whose parameters are its values."""
    monkeypatch.setattr(critic, "token_values", lambda recipe, params, streams, *_: params[critic.HEAD])
    held = Accumulator({critic.HEAD: np.ones(values.shape, np.float32)}, {"loss": np.float32(1.0)})
    recipe = SimpleNamespace(spec=SimpleNamespace(scan=False, remat="none"), layout=None, lora=None)
    accumulate = functools.partial(Critic._accumulate, SimpleNamespace(recipe=recipe, clip=clip))
    return jax.jit(accumulate)({critic.HEAD: values}, held, streams)


@pytest.mark.parametrize("clip", [0.0, 0.2])
@pytest.mark.parametrize("share", [0.6, 0.0], ids=["some", "none"])
def test_the_value_loss_is_of_trained_tokens_by_their_weight(monkeypatch, clip, share):
    """Σ weight · loss and its gradients against numpy; one row has no trained token, and other tokens have 10³⁰."""
    rng, shape = np.random.default_rng(5), (6, 8)
    mask = rng.random(shape) < share
    mask[2] = False
    weight = rng.random(shape).astype(np.float32)
    values, before, target = (np.where(mask, rng.normal(size=shape), junk) for junk in (1e30, -1e30, 0.0))
    given = {critic.BEFORE: before, critic.TARGET: target, "weight": weight}
    streams = {name: np.float32(stream) for name, stream in given.items()} | {"mask": mask}
    got = accumulated(monkeypatch, np.float32(values), streams, clip)
    trained = [stream[mask] for stream in (values, before, target)]
    want = (weight[mask] * plain.value_loss(*trained, clip)).sum()
    np.testing.assert_allclose(got.statistics["loss"] - 1, want, rtol=1e-5)
    slopes, (below, above) = np.zeros(shape), plain.value_slopes(*trained, clip)
    slopes[mask] = weight[mask] * (below + above) / 2
    np.testing.assert_allclose(got.grads[critic.HEAD] - 1, slopes, rtol=1e-4, atol=1e-5)
    assert not np.any(got.grads[critic.HEAD][~mask] - 1)


# --- credit


def test_gae_of_two_turns_worked_by_hand(small_config):
    """γ 1, λ ½, values ½ at the four trained tokens, reward 1 at the last: δ = 0, 0, 0, ½ and A = 1/16, 1/8, ¼, ½.

    Environment tokens between the turns and a masked stale token of the second turn are not steps, so the critic's
    values there have no effect.
    """
    config = small_config(gae_lambda=0.5, raw_advantages=True, **PPO)
    mask = [0, 0, 1, 1, 0, 0, 0, 1, 1]
    said = np.where(mask, 0.5, 1e6).astype(np.float32)
    (judged,) = minibatch.critic_advantages([sample_of(mask, 1.0)], [said], config)
    np.testing.assert_allclose(judged.advantage, [0, 0, 1 / 16, 1 / 8, 0, 0, 0, 1 / 4, 1 / 2])
    np.testing.assert_allclose(judged.target[judged.mask], [9 / 16, 5 / 8, 3 / 4, 1])


def test_costs_are_paid_at_their_tokens(small_config):
    """Earned 1, charged ¼ and ½ at two tokens: with γ = λ = 1 and V = 0 every token has what is still to come."""
    config = small_config(gae_lambda=1.0, raw_advantages=True, **PPO)
    charged = sample_of([0, 1, 1, 1], 1.0).with_costs(np.array([9, 0.25, 0.5, 0]))
    assert charged.reward == 0.25
    np.testing.assert_allclose(minibatch.token_rewards(charged), [0, -0.25, -0.5, 1.0])
    (judged,) = minibatch.critic_advantages([charged], [np.zeros(4, np.float32)], config)
    np.testing.assert_allclose(judged.advantage, [0, 0.25, 0.5, 1.0])


def test_advantages_are_standardised_over_all_tokens_and_targets_are_not(small_config):
    ones = [sample_of([0, 1, 1], 1.0), sample_of([0, 1], 0.0), sample_of([0, 0], 1.0), sample_of([0, 1, 1, 1], 0.5)]
    said = [np.full(len(one.mask), 0.25, np.float32) for one in ones]
    raw = minibatch.critic_advantages(ones, said, small_config(raw_advantages=True, **PPO))
    white = minibatch.critic_advantages(ones, said, small_config(**PPO))
    every = np.concatenate([one.advantage[one.mask] for one in raw])
    got = np.concatenate([one.advantage[one.mask] for one in white])
    np.testing.assert_allclose(got, (every - every.mean()) / every.std(ddof=1), rtol=1e-5)
    assert all(np.array_equal(a.target, b.target) for a, b in zip(raw, white, strict=True))
    assert not any(one.advantage[~one.mask].any() for one in white)


# --- what must not change the update


@pytest.mark.soak
def test_neither_rows_nor_order_nor_mesh_change_the_update(small_config, make_claim, make_trainer):
    claim = make_claim(age=1)
    turned = msgspec.structs.replace(claim, groups=claim.groups[::-1])
    rows, found = [], []
    for config, given in (
        (small_config(micro_batch_rows=1, **PPO), claim),
        (small_config(micro_batch_rows=4, row_tokens=40, mesh=CUBE, **PPO), turned),
    ):
        trainer = judging(make_trainer(config))
        rows.append(trainer.train(given))
        found.append((moments(trainer.state), moments(trainer.state.critic)))
    assert len({row["micro_batches"] for row in rows}) > 1
    for row, both in zip(rows[1:], found[1:], strict=True):
        for got, want in zip(both, found[0], strict=True):
            same_moments(got, want)
        for key in ("loss", "value_loss", "value_explained_variance", "returns_mean", "critic_grad_norm"):
            np.testing.assert_allclose(row[key], rows[0][key], rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.soak
def test_offloaded_it_does_the_same_bit_for_bit(small_config, make_claim, make_trainer):
    states = []
    for offload in (False, True):
        trainer = make_trainer(small_config(critic_offload=offload, minibatches=2, **PPO))
        trainer.set_params(jax.device_get(trainer.state.params))
        for step in (1, 2):
            leaves = jax.tree.leaves(trainer.state.critic)
            assert {leaf.sharding.memory_kind for leaf in leaves} == {"pinned_host" if offload else "device"}
            trainer.train(make_claim(step, age=1))
        states.append(bits(trainer.state))
        assert int(trainer.state.critic.step) == int(trainer.state.step) == 4
    assert states[0] == states[1]


@pytest.mark.soak
def test_the_value_clip_binds_from_the_second_minibatch_on(small_config, make_claim, make_trainer):
    """At the start of a claim V is V₀ and nothing is clipped; a step later a narrow clip takes the worse of two."""
    losses = {}
    for clip in (0.0, 1e-3):
        for minibatches in (1, 2):
            trainer = judging(make_trainer(small_config(value_clip=clip, minibatches=minibatches, **PPO)))
            losses[clip, minibatches] = trainer.train(make_claim(age=1))["value_loss"]
    assert losses[0.0, 1] == losses[1e-3, 1]
    assert losses[0.0, 2] < losses[1e-3, 2]
