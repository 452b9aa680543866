"""Training a mixture of experts: replayed experts reach their tokens, and the balance loss has its weight."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.algorithms.sampling import token_logprobs
from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError, DataError
from jaxroll.learner import minibatch, packing, step
from jaxroll.learner.trainer import Trainer
from jaxroll.models import families, moe, transformer

VOCAB = 24
SPEC = families.spec("tiny_moe", vocab_size=VOCAB)
BIASED = dataclasses.replace(SPEC, router_bias=True)
WIDTH, DTYPE = moe.recorded_width(SPEC), moe.recorded_dtype(SPEC)


@pytest.fixture
def make(small_config):
    def trainer(mesh: MeshConfig | None = None, spec: families.ModelSpec = SPEC, **learner) -> Trainer:
        config = small_config(mesh=mesh or MeshConfig(), **({"micro_batch_rows": 4} | learner))
        return Trainer(config, spec, sharding.build(config.learner.mesh), sharding.LEARNER, key=jax.random.key(0))

    return trainer


def with_experts(claim, missing: int = 1):
    """`claim` with random experts for all tokens of every member but the last `missing`."""
    rng = np.random.default_rng(7)

    def recorded(member):
        tokens = sum(segment.tokens.size for segment in member.outcome.segments) - missing
        chosen = np.array([rng.permutation(SPEC.experts)[:2] for _ in range(tokens * SPEC.layers)])
        outcome = msgspec.structs.replace(member.outcome, experts=chosen.reshape(tokens, WIDTH).astype(DTYPE))
        return msgspec.structs.replace(member, outcome=outcome)

    groups = [msgspec.structs.replace(one, members=tuple(map(recorded, one.members))) for one in claim.groups]
    return msgspec.structs.replace(claim, groups=tuple(groups))


@functools.partial(jax.jit, static_argnums=0)
def alone(padded: int, params, tokens, experts):
    """The log-probs of one unpacked sequence, padded to `padded`, with these experts."""
    choices = experts.reshape(1, padded, SPEC.layers, -1)
    at, segment = jnp.arange(padded)[None], jnp.ones((1, padded), jnp.int32)
    hidden = transformer.forward(SPEC, params, tokens[None], at, segment, choices=choices)
    return token_logprobs(transformer.logits(SPEC, params, hidden[0, :-1]), tokens[1:], 1.0)


@pytest.mark.parametrize("shared", [{}, {"shared_prompt_tokens": 24, "shared_prompt_rows": 2}], ids=["own", "shared"])
def test_packed_rows_use_the_recorded_experts_of_each_token(make, make_claim, shared) -> None:
    trainer, claim = make(routing_replay=True, **shared), with_experts(make_claim())
    if shared:  # members of a group have one prompt, whose experts are stored once
        for group in claim.groups:
            first = group.members[0].outcome
            for member in group.members[1:]:
                n = len(first.segments[0].tokens) - 1
                member.outcome.experts[:n] = first.experts[:n]
    samples = [sample for group in minibatch.prepare(claim, trainer.config).minibatches for sample in group]
    batches = trainer.packed(samples)
    values = [trainer.programs.logprobs(trainer.params(), trainer.programs.placed(one.streams)) for one in batches]
    found = packing.gathered(batches, jax.device_get(values), len(samples))
    for sample, ours in zip(samples, found, strict=True):
        tokens, experts = np.zeros(32, np.int32), np.full((32, WIDTH), 255, DTYPE)
        assert sample.experts is not None
        tokens[: len(sample.tokens)], experts[: len(sample.experts)] = sample.tokens, sample.experts
        wanted = np.asarray(alone(32, trainer.params(), tokens, experts))
        at = np.flatnonzero(sample.mask)
        np.testing.assert_allclose(ours[at], wanted[at - 1], atol=2e-5)


@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [
        {"routing_replay": True, "router_loss": 0.1},
        {"spec": BIASED, "router_bias_rate": 0.1},
        {"lora_rank": 3},
    ],
    ids=["replay and balance loss", "biases", "adapters"],
)
def test_a_step_trains_on_eight_devices_as_on_one(make, make_claim, options) -> None:
    claim = with_experts(make_claim())
    one, eight = make(**options), make(MeshConfig(expert=4, tensor=2), **options)
    first, same = one.train(claim), eight.train(claim)
    assert first["loss"] == pytest.approx(same["loss"], rel=1e-4)
    assert first["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-4)
    assert first["expert_balance"] == pytest.approx(same["expert_balance"], rel=1e-5) and first["expert_balance"] >= 1
    for name, value in one.params().items():
        if name.endswith("router_bias"):
            np.testing.assert_array_equal(value, eight.params()[name], err_msg=name)


def test_router_biases_move_by_the_sign_of_the_load_s_error_and_by_nothing_else(make, make_claim) -> None:
    trainer = make(spec=BIASED, router_bias_rate=0.25, weight_decay=0.1)
    rng = np.random.default_rng(0)
    before = {name: np.asarray(value) for name, value in trainer.params().items()}
    before |= {name: rng.normal(size=SPEC.experts).astype(np.float32) for name in before if name.endswith("_bias")}
    trainer.set_params(before)
    (samples,) = minibatch.prepare(make_claim(), trainer.config).minibatches
    forward = jax.jit(functools.partial(transformer.forward_with_load, BIASED))
    chosen = np.zeros((SPEC.layers, SPEC.experts))
    for batch in trainer.packed(samples):
        streams = (batch.streams[name] for name in ("tokens", "positions", "segment_ids"))
        chosen += forward(before, *streams)[1].chosen
    row = trainer.train(make_claim())
    assert row["expert_load_max"] == pytest.approx(np.max(chosen / chosen.mean(-1, keepdims=True)))
    for layer in range(SPEC.layers):
        name = f"layers.{layer:02d}.mlp.router_bias"
        wanted = before[name] + np.float32(0.25) * np.sign(chosen[layer].mean() - chosen[layer])
        np.testing.assert_allclose(trainer.params()[name], wanted, atol=1e-6)


@pytest.mark.soak
def test_an_unbalanced_router_becomes_balanced_by_biases_alone(make, make_claim) -> None:
    def loads(rate: float, steps: int) -> list[float]:
        trainer = make(spec=BIASED, router_bias_rate=rate, learning_rate=1e-9)
        params = {name: np.array(value) for name, value in trainer.params().items()}
        params["embed"] += 0.02  # what all tokens have in common, by which the routers prefer one expert
        for layer in range(SPEC.layers):
            params[f"layers.{layer:02d}.mlp.router"][:, 0] += 0.1
        trainer.set_params(params)
        return [trainer.train(make_claim())["expert_load_max"] for _ in range(steps)]

    moved, kept = loads(0.15, 30), loads(0.0, 2)
    assert moved[0] == kept[0] == kept[-1] == SPEC.experts / SPEC.experts_per_token, "one expert has every token"
    assert np.mean(moved[-8:]) < 1.8, moved


@pytest.mark.soak
def test_the_balance_loss_is_added_with_each_micro_batch_s_share_of_the_tokens(make, make_claim) -> None:
    trainer = make(router_loss=0.5, row_tokens=32, micro_batch_rows=2)
    (samples,) = minibatch.prepare(make_claim(), trainer.config).minibatches
    batches = trainer.packed(samples)
    assert len(batches) > 1, "one micro-batch has all tokens"
    recipe, params = trainer.programs.recipe, trainer.params()
    tokens = sum(int((batch.streams["segment_ids"] > 0).sum()) for batch in batches)
    plain = dataclasses.replace(recipe, routers=step.Routers(False, 0.0))

    def balance(params, streams):
        names = ("tokens", "positions", "segment_ids")
        _, loads = transformer.forward_with_load(SPEC, params, *(streams[name] for name in names))
        return moe.balance_loss(loads)

    @jax.jit  # one program, so that what they share is compiled once
    def all_three(params, streams):
        both = (step.gradients(one, params, streams)[0] for one in (recipe, plain))
        return *both, jax.grad(balance)(params, streams)

    share = int((batches[0].streams["segment_ids"] > 0).sum()) / tokens
    with_it, without, wanted = all_three(params, batches[0].streams)
    for name in ("layers.00.mlp.router", "layers.01.mlp.router", "embed"):
        assert np.abs(wanted[name]).max() > 1e-4
        added = with_it[name] - without[name]
        np.testing.assert_allclose(added, 0.5 * share * wanted[name], atol=2e-6, err_msg=name)


def test_records_of_another_model_are_refused(make, make_claim) -> None:
    claim = with_experts(make_claim())
    outcome = claim.groups[0].members[0].outcome
    wrong = msgspec.structs.replace(outcome, experts=outcome.experts[:, :-1])
    members = (msgspec.structs.replace(claim.groups[0].members[0], outcome=wrong), *claim.groups[0].members[1:])
    group = msgspec.structs.replace(claim.groups[0], members=members)
    with pytest.raises(DataError, match=f"records {WIDTH - 1} uint8 per token, this model has {WIDTH} uint8"):
        make(routing_replay=True).prepare(msgspec.structs.replace(claim, groups=(group, *claim.groups[1:])))


@pytest.mark.parametrize("option", [{"routing_replay": True}, {"router_loss": 0.1}])
def test_options_of_experts_are_refused_for_a_dense_model(small_config, option) -> None:
    with pytest.raises(ConfigError, match=rf"learner\.{next(iter(option))} = .*: nano has no experts"):
        families.check_routing(families.spec("nano"), small_config(**option))


@pytest.mark.parametrize("replay", [False, True])
def test_streamed_groups_have_the_gradients_and_the_load_of_the_whole_batch(make, make_claim, replay: bool):
    """The micro-batches of the whole batch have other neighbors, so the balance differs a little without replay."""
    claim, rows, norms = with_experts(make_claim(groups=8, age=1)), [], []
    for streaming in (False, True):
        trainer = make(micro_batch_rows=1, row_tokens=48, routing_replay=replay, streaming=streaming)
        if streaming:
            for part in (claim.groups[:3], claim.groups[5:]):
                trainer.stream(msgspec.structs.replace(claim, groups=part, whole=False))
        rows.append(trainer.train(claim))
        norms.append(rows[-1]["grad_norm"])
    whole, streamed = rows
    assert streamed["micro_batches_early"] > 2 and norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert streamed["expert_balance"] == pytest.approx(whole["expert_balance"], rel=0.1)
    assert streamed["expert_load_max"] == pytest.approx(whole["expert_load_max"], rel=1e-6)
