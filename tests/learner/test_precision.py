"""A step computed in bfloat16: what is kept, and what is summed, is float32."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxroll.learner import minibatch, packing


def short(values: np.ndarray) -> np.ndarray:
    """bool: which of the float32 numbers are bfloat16 numbers."""
    return values == np.asarray(values.astype(jnp.bfloat16), np.float32)


def gradients(trainer, claim) -> list[dict[str, np.ndarray]]:
    """The gradients of the micro-batches one by one, and of all of them accumulated."""
    (samples,) = minibatch.prepare(claim, trainer.config).minibatches
    batches = packing.pack(samples, trainer.config.learner.row_tokens, trainer.buckets)
    programs, params = trainer.programs, trainer.state.params
    each, every = [], programs.zeros()
    for streams in [programs.placed(batch.streams) for batch in batches]:
        each.append(jax.device_get(programs.accumulate(params, programs.zeros(), streams).grads))
        every = programs.accumulate(params, every, streams)
    return [*each, jax.device_get(every.grads)]


def off(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """The largest relative error of a leaf."""
    return max(float(np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name])) for name in want)


def test_bfloat16_is_for_the_computation_alone(small_config, make_claim, make_trainer):
    """The gradient, the parameters and the moments are float32, and what bfloat16 cannot hold is in them.

    The step is so small that parameters in bfloat16 would stay where they are.
    """
    claim, config = make_claim(age=1), small_config(micro_batch_rows=1, learning_rate=1e-5)
    made = {}
    for dtype in ("float32", "bfloat16"):
        trainer = make_trainer(replace(config, model=replace(config.model, dtype=dtype)))
        assert trainer.spec.compute_dtype == dtype
        before, grads = jax.device_get(trainer.state.params), gradients(trainer, claim)
        row = trainer.train(claim)
        after = jax.device_get(trainer.state)
        moments = {kind: optax.tree.get(after.opt_state, kind) for kind in ("mu", "nu")}
        for tree in (*grads, after.params, *moments.values()):
            assert {leaf.dtype for leaf in tree.values()} == {np.dtype(np.float32)}
        moved = {name: after.params[name] != before[name] for name in before}
        made[dtype] = grads, moments, moved, row
    (whole, of_whole, _, row_whole), (grads, moments, moved, row) = made.values()
    *each, every = grads
    assert len(each) > 1
    assert not all(short(leaf).all() for leaf in each[0].values()), "the gradient of one micro-batch"
    for name, leaf in every.items():
        np.testing.assert_allclose(leaf, sum(of[name] for of in each), rtol=0, atol=1e-6 * np.abs(leaf).max())
        assert not short(leaf).all(), f"the sum over micro-batches: {name}"
        assert not short(moments["mu"][name]).all() and not short(moments["nu"][name]).all(), name
        assert moved[name][leaf != 0].all(), name
    assert 1e-3 < off(every, whole[-1]) < 0.08, "or it was not computed in bfloat16"
    assert 1e-3 < off(moments["mu"], of_whole["mu"]) < 0.08
    for key in ("loss", "grad_norm", "entropy", "logprob_delta", "ess"):
        assert row[key] == pytest.approx(row_whole[key], rel=1e-2), key
