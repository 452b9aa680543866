"""Losses, gradients, optimizer steps and saved states of models that clients train."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxroll import sharding
from jaxroll.config import Config, LearnerConfig, ModelConfig
from jaxroll.errors import DataError
from jaxroll.learner import lora
from jaxroll.learner.lora import Lora
from jaxroll.models import transformer
from jaxroll.tinker.messages import Datum, ForwardBackward
from jaxroll.tinker.trainer import LOSSES, ClientModel, Terms, Trainer

ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
LENGTHS = (9, 26, 9, 26, 9)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    learner = replace(LearnerConfig(), micro_batch_rows=4)
    return Trainer(replace(Config(), model=ModelConfig(size="nano"), learner=learner), tmp_path_factory.mktemp("run"))


def datums(trainer: Trainer, seed: int = 0) -> list[Datum]:
    """Datums of several lengths; their targets are not the next tokens."""
    chance, found = np.random.default_rng(seed), []
    for length in LENGTHS:
        tokens, targets = chance.integers(0, trainer.spec.vocab_size, (2, length))
        inputs = {"logprobs": -chance.uniform(2, 4, length), "advantages": chance.normal(size=length)}
        inputs |= {"weights": chance.uniform(size=length)}
        floats = {name: value.astype(np.float32) for name, value in inputs.items()}
        found.append(Datum(tokens.astype(np.int32), {"target_tokens": targets, **floats}))
    return found


def asked(loss: str, data: list[Datum], forward_only: bool = False, **settings: float) -> ForwardBackward:
    needs = (*LOSSES[loss].needs, "weights") if loss in LOSSES else ("target_tokens",)
    data = [Datum(one.tokens, {name: one.inputs[name] for name in needs}) for one in data]
    return ForwardBackward(loss, settings, forward_only, data)


def logprobs_of(trainer: Trainer, params: Mapping[str, Any], datum: Datum) -> jax.Array:
    """log π of the targets of one datum, without packing and from all logits."""
    length = len(datum.tokens)
    rows = (datum.tokens[None], np.arange(length, dtype=np.int32)[None], np.ones((1, length), np.int32))
    hidden, _ = transformer.forward_with_load(trainer.spec, dict(params), *map(jnp.asarray, rows))
    logits = transformer.logits(trainer.spec, dict(params), hidden)[0]
    return jax.nn.log_softmax(logits)[np.arange(length), datum.inputs["target_tokens"]]


def expected_loss(name: str, new: Any, datum: Datum) -> Any:
    """The sum over the tokens of one datum, from its definition."""
    old, A, w = (jnp.asarray(datum.inputs[key]) for key in ("logprobs", "advantages", "weights"))
    ratio = jnp.exp(new - old)
    if name == "cross_entropy":
        return -(w * new).sum()
    if name == "importance_sampling":
        return -(w * ratio * A).sum()
    if name == "ppo":
        return -(w * jnp.minimum(ratio * A, jnp.clip(ratio, 0.8, 1.2) * A)).sum()
    if name == "cispo":
        return -(w * jax.lax.stop_gradient(jnp.clip(ratio, 0.8, 1.2)) * new * A).sum()
    if name == "dro":
        return -(w * (new * A - 0.5 * 0.05 * (new - old) ** 2)).sum()
    whole = jnp.exp((new - old).mean())
    return -jnp.minimum(whole * A, jnp.clip(whole, 0.8, 1.2) * A).mean()


def adapted(trainer: Trainer, seed: int = 3) -> ClientModel:
    """Adapters that change the model: B is not zero."""
    model = trainer.create(4, seed)
    chance = np.random.default_rng(seed)
    where = sharding.shardings_of(model.params)
    moved = {
        name: np.asarray(value) + chance.normal(size=value.shape).astype(np.float32) * 0.05
        for name, value in model.params.items()
    }
    model.params = jax.device_put(moved, where)
    return model


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients_are_those_of_the_definition(name: str) -> None:
    """In one row with two datums and padding."""
    chance, spans = np.random.default_rng(1), (slice(0, 5), slice(5, 8))
    segments = np.array([[1] * 5 + [2] * 3 + [0] * 2], np.int32)
    logprob, behaviour = -chance.uniform(1, 3, (2, 1, 10)).astype(np.float32)
    advantage = chance.normal(size=(1, 10)).astype(np.float32)
    weights = np.where(segments > 0, chance.uniform(0.5, 1, (1, 10)), 0).astype(np.float32)

    def found(new: Any) -> Any:
        kind = LOSSES[name]
        terms = Terms(new, jnp.asarray(behaviour), jnp.asarray(advantage), jnp.asarray(weights), jnp.asarray(segments))
        return jnp.where(segments > 0, kind.loss(terms, kind.settings), 0.0).sum()

    def expected(new: Any) -> Any:
        given = {"logprobs": behaviour, "advantages": advantage, "weights": weights}
        parts = [Datum(np.zeros(0), {key: value[0, span] for key, value in given.items()}) for span in spans]
        return sum(expected_loss(name, new[0, span], part) for span, part in zip(spans, parts, strict=True))

    both = (jax.jit(jax.value_and_grad(of))(logprob) for of in (found, expected))
    for one, other in zip(*both, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_packed_passes_give_the_log_probs_and_gradients_of_single_datums(trainer: Trainer) -> None:
    model, data = adapted(trainer), datums(trainer)
    found, metrics = trainer.run(model, asked("importance_sampling", data))

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def total(adapters: Any, tokens: Any, targets: Any, inputs: Any) -> tuple[jax.Array, jax.Array]:
        params = lora.merged(trainer.spec, None, cast(Lora, model.lora), trainer.base, adapters)
        new = logprobs_of(trainer, params, Datum(tokens, {"target_tokens": targets}))
        return expected_loss("importance_sampling", new, Datum(tokens, inputs)), new

    value, grads = 0.0, {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in model.params.items()}
    for one, datum in zip(found, data, strict=True):
        inputs = {name: value for name, value in datum.inputs.items() if name != "target_tokens"}
        given = (datum.tokens, datum.inputs["target_tokens"], inputs)
        (loss, new), each = jax.device_get(total(model.params, *given))
        np.testing.assert_allclose(one["logprobs"], new, atol=2e-5)
        value, grads = value + loss, jax.tree.map(np.add, grads, each)
    np.testing.assert_allclose(metrics["loss:sum"], value, rtol=2e-5)
    assert model.grads is not None and model.grads.keys() == grads.keys()
    for key, grad in grads.items():
        np.testing.assert_allclose(model.grads[key], grad, atol=2e-5 * max(1.0, float(np.abs(grad).max())))


def test_passes_accumulate_and_forward_only_adds_nothing(trainer: Trainer) -> None:
    data, once, twice = datums(trainer), adapted(trainer), adapted(trainer)
    trainer.run(once, asked("cross_entropy", data))
    for part in (data[:2], data[2:]):
        trainer.run(twice, asked("cross_entropy", part))
    trainer.run(twice, asked("cross_entropy", data, forward_only=True))
    assert once.grads and twice.grads
    for name, grad in once.grads.items():
        np.testing.assert_allclose(twice.grads[name], grad, atol=1e-4)
    assert trainer.run(twice, asked("cross_entropy", [])) == ([], {"loss:sum": 0.0})


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_step_is_adam_with_decoupled_decay_after_clipping(trainer: Trainer, decay: float, clip: float) -> None:
    model = adapted(trainer)
    chain = [optax.clip_by_global_norm(clip)] if clip else []
    reference = optax.chain(*chain, optax.adamw(0.01, 0.9, 0.95, eps=1e-8, weight_decay=decay))
    params = jax.tree.map(np.array, model.params)  # a step donates
    state = jax.jit(reference.init)(params)

    @jax.jit
    def updated(grads: Any, state: Any, params: Any) -> tuple[Any, Any, jax.Array]:
        updates, state = reference.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    for seed in range(3):
        trainer.run(model, asked("cross_entropy", datums(trainer, seed)))
        grads = jax.tree.map(np.array, model.grads)
        norm = trainer.step(model, ADAM | {"weight_decay": decay, "grad_clip_norm": clip})["grad_norm:mean"]
        params, state, length = updated(grads, state, params)
        np.testing.assert_allclose(norm, length, rtol=1e-5)
        for name, value in params.items():
            np.testing.assert_allclose(model.params[name], value, atol=1e-6)
    assert model.steps == 3 and model.grads is None


def test_models_share_the_base_and_nothing_else(trainer: Trainer) -> None:
    base = {name: np.array(value) for name, value in trainer.base.items()}
    one, other, whole = trainer.create(4, 1), trainer.create(4, 1, mlp=False), trainer.create(None, 0)
    kept = {name: np.array(value) for name, value in other.params.items()}
    for model in (one, whole):
        trainer.run(model, asked("cross_entropy", datums(trainer)))
        trainer.step(model, ADAM)
    assert all((np.array(trainer.base[name]) == value).all() for name, value in base.items())
    assert all((np.array(other.params[name]) == value).all() for name, value in kept.items())
    assert any((np.array(whole.params[name]) != value).any() for name, value in base.items())
    assert not any("mlp" in name for name in other.params) and any("mlp" in name for name in one.params)


@pytest.mark.parametrize("rank", [4, None], ids=["adapters", "all parameters"])
def test_a_saved_state_goes_on_bit_for_bit(trainer: Trainer, tmp_path: Path, rank: int | None) -> None:
    model = trainer.create(rank, 5)

    def train(one: ClientModel, seed: int) -> None:
        trainer.run(one, asked("cross_entropy", datums(trainer, seed)))
        trainer.step(one, ADAM)

    train(model, 0)
    trainer.save(model, tmp_path / "state", whole=True, about={"base_model": "base"})
    trainer.save(model, tmp_path / "sampler", whole=False, about={"base_model": "base"})
    resumed = trainer.load(tmp_path / "state", optimizer=True)
    fresh, sampled = (trainer.load(tmp_path / kind, optimizer=False) for kind in ("state", "sampler"))
    for name, value in model.params.items():
        for other in (resumed, fresh, sampled):
            assert (np.array(other.params[name]) == np.array(value)).all()
    for one in (model, resumed, fresh):
        train(one, 1)
    assert resumed.steps == 2 and fresh.steps == 1 and resumed.number != model.number
    assert all((np.array(resumed.params[name]) == np.array(value)).all() for name, value in model.params.items())
    assert any((np.array(fresh.params[name]) != np.array(value)).any() for name, value in model.params.items())
    with pytest.raises(DataError, match="without the optimizer"):
        trainer.load(tmp_path / "sampler", optimizer=True)
    with pytest.raises(DataError, match="no weights"):
        trainer.load(tmp_path / "other", optimizer=False)
    with pytest.raises(DataError, match="the model trains"):
        trainer.load(tmp_path / "state", optimizer=False, into=trainer.create(7, 0))


def changed(**inputs: Any) -> Callable[[Datum], Datum]:
    return lambda datum: Datum(datum.tokens, {**datum.inputs, **inputs})


@pytest.mark.parametrize(
    ("loss", "settings", "change", "reason"),
    [
        ("mine", {}, None, "loss_fn = 'mine'"),
        ("ppo", {"beta": 1.0}, None, "loss_fn_config.beta"),
        ("cross_entropy", {}, lambda one: Datum(one.tokens, {}), "lacks target_tokens"),
        ("cross_entropy", {}, changed(target_tokens=np.full(9, 999)), "ids outside of 0.."),
        ("cross_entropy", {}, changed(weights=np.full(9, np.nan, np.float32)), "weights has numbers"),
        ("cross_entropy", {}, lambda one: Datum(np.zeros(0, np.int32), one.inputs), "datum 0 has 0 tokens"),
        ("cross_entropy", {}, changed(mask=np.ones(9)), "has mask, which cross_entropy does not use"),
    ],
)
def test_what_cannot_be_trained_on_is_named_and_the_next_step_refused(
    trainer: Trainer, loss: str, settings: dict[str, float], change: Any, reason: str
) -> None:
    model, (first, *_) = trainer.create(4, 0), datums(trainer)
    request = asked(loss, [first], **settings)
    if change is not None:
        request = replace(request, data=[change(request.data[0])])
    with pytest.raises(DataError, match=reason):
        trainer.run(model, request)
    with pytest.raises(DataError, match="its gradients are discarded"):
        trainer.step(model, ADAM)
    with pytest.raises(DataError, match="there are no gradients"):
        trainer.step(model, ADAM)
