"""The compiled gradient against a plain reference: one sample a row, no packing, no weights, no mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.config import MeshConfig
from jaxroll.config.derived import settled
from jaxroll.learner import minibatch, packing
from jaxroll.models import transformer

LONGEST = 32
CUBE = MeshConfig(data=2, fsdp=2, tensor=2)


def one_a_row(samples) -> dict[str, np.ndarray]:
    """Every sample alone in a padded row of its own, written without the packer."""
    rows = {name: np.zeros((len(samples), LONGEST), dtype) for name, dtype in packing.STREAMS.items()}
    for row, sample in enumerate(samples):
        n = len(sample.tokens)
        rows["tokens"][row, :n], rows["positions"][row, :n] = sample.tokens, np.arange(n)
        rows["segment_ids"][row, :n], rows["mask"][row, :n] = 1, sample.mask
        rows["behaviour"][row, :n], rows["advantage"][row, :n] = sample.behaviour, sample.advantage
    return rows


def plain_loss(config, spec, samples):
    """params → the loss as a textbook would write it, over padded rows."""
    learner, rows = settled(config.learner), one_a_row(samples)
    mask = jnp.asarray(rows["mask"], jnp.float32)
    tokens, positions, segments = (jnp.asarray(rows[name]) for name in ("tokens", "positions", "segment_ids"))

    def loss(params):
        hidden = transformer.forward(spec, params, tokens, positions, segments)
        log_all = jax.nn.log_softmax(transformer.logits(spec, params, hidden) / config.sampling.temperature)
        logp = jnp.take_along_axis(log_all[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        logp = jnp.pad(logp, ((0, 0), (1, 0)))
        w = jnp.exp(jax.lax.stop_gradient(logp) - rows["behaviour"])
        if learner.correction == "tis":
            each = -jnp.minimum(w, learner.correction_cap) * rows["advantage"] * logp
        else:
            r = jnp.exp(logp - jax.lax.stop_gradient(logp))
            bounded = jnp.clip(r, 1 - learner.clip_low, 1 + learner.clip_high)
            w = jnp.where(
                w > learner.correction_cap, 0.0 if learner.correction_mode == "mask" else learner.correction_cap, w
            )
            each = -w * jnp.minimum(r * rows["advantage"], bounded * rows["advantage"])
        each = each * mask
        return {
            "token_mean": lambda: each.sum() / mask.sum(),
            "seq_mean_token_mean": lambda: jnp.mean(each.sum(1) / mask.sum(1)),
            "seq_mean_token_sum": lambda: jnp.mean(each.sum(1)),
        }[learner.aggregation]()

    return loss


def accumulated(trainer, samples):
    """Loss and gradients as the trainer's programs give them, over as many micro-batches as it takes."""
    accumulator = trainer.programs.zeros()
    batches = packing.pack(samples, trainer.config.learner.row_tokens, trainer.buckets)
    for batch in batches:
        accumulator = trainer.programs.accumulate(
            trainer.state.params, accumulator, trainer.programs.placed(batch.streams)
        )
    host = jax.device_get(accumulator)
    return len(batches), float(host.statistics["loss"].sum()), host.grads


def assert_same_gradients(got, want, tolerance=1e-5):
    scale = max(float(np.abs(leaf).max()) for leaf in want.values())
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize(
    ("correction", "mode", "aggregation"),
    [
        ("decoupled", "truncate", "token_mean"),
        pytest.param("decoupled", "mask", "seq_mean_token_mean", marks=pytest.mark.soak),
        pytest.param("tis", "truncate", "seq_mean_token_sum", marks=pytest.mark.soak),
    ],
)
def test_gradients_are_those_of_the_plain_loss(small_config, make_claim, make_trainer, correction, mode, aggregation):
    config = small_config(
        correction=correction, correction_mode=mode, aggregation=aggregation, correction_cap=0.9, row_tokens=32
    )
    trainer = make_trainer(config)
    (samples,) = minibatch.prepare(make_claim(age=1), config).minibatches
    plain = jax.jit(jax.value_and_grad(plain_loss(config, trainer.spec, samples)))
    want_loss, want = plain(trainer.state.params)
    count, loss, grads = accumulated(trainer, samples)
    assert count > 1  # the denominators span micro-batches
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5, atol=1e-6)
    assert_same_gradients(grads, jax.device_get(want))


def test_gradients_agree_with_a_finite_difference(small_config, make_claim, make_trainer):
    """Along the gradient itself; TIS with a cap far below every ρ has a constant weight, so it can be differenced."""
    config = small_config(correction="tis", correction_cap=1e-2)
    trainer = make_trainer(config)
    (samples,) = minibatch.prepare(make_claim(age=1), config).minibatches
    _, _, grads = accumulated(trainer, samples)
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in grads.values()))
    losses, params = [], trainer.state.params
    for sign in (+1, -1):
        moved = {name: np.asarray(params[name]) + sign * 1e-3 * grads[name] / norm for name in params}
        trainer.set_params(moved)
        losses.append(accumulated(trainer, samples)[1])
    np.testing.assert_allclose((losses[0] - losses[1]) / 2e-3, norm, rtol=1e-2)


def test_neither_rows_nor_order_nor_mesh_change_the_gradient(small_config, make_claim, make_trainer):
    claim = make_claim(age=1)
    config = small_config()
    (samples,) = minibatch.prepare(claim, config).minibatches
    _, loss, want = accumulated(make_trainer(config), samples)
    other = make_trainer(small_config(micro_batch_rows=4, row_tokens=32, mesh=CUBE))
    _, other_loss, got = accumulated(other, samples[::-1])
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5, atol=1e-6)
    assert_same_gradients(got, want)


def test_parameters_and_moments_are_sharded_over_the_mesh(small_config, make_trainer):
    state = make_trainer(small_config(micro_batch_rows=4, mesh=CUBE)).state
    leaves = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.size > 1]
    total = sum(leaf.nbytes for leaf in leaves)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert held < 0.35 * total  # fsdp·tensor = 4


def test_empty_rows_leave_gradients_finite(small_config, make_trainer):
    trainer = make_trainer(small_config())
    empty = trainer.programs.placed(packing.empty_streams(2, 64))
    accumulator = jax.device_get(trainer.programs.accumulate(trainer.state.params, trainer.programs.zeros(), empty))
    assert all(not leaf.any() for leaf in jax.tree.leaves(accumulator))
