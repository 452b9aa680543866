"""Device memory between two steps, by all live arrays, with and without offloading."""

from __future__ import annotations

import gc
from dataclasses import replace

import jax
import pytest

from tests.harness.learner_critic import PPO

KL = {"kl_coef": 0.5, "reference": "init"}


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


class Made:
    """Bytes of the arrays made since then that are alive, by the memory that they lie in."""

    def __init__(self) -> None:
        gc.collect()
        self.known = jax.live_arrays()  # held, so that no new one has the identity of one of them

    def alive(self, kind: str) -> int:
        gc.collect()
        known = {id(array) for array in self.known}
        return nbytes([a for a in jax.live_arrays() if id(a) not in known and a.sharding.memory_kind == kind])


def holds(made: Made, trainer, beside: int, host: int) -> None:
    """Assert that the devices hold the policy's state, its accumulator and `beside` bytes, the host's memory `host`."""
    policy = nbytes(replace(trainer.state, critic=None)) + nbytes(trainer._accumulator)
    crumbs = nbytes(trainer.state.params) // 50  # constants of programs
    assert policy + beside <= made.alive("device") < policy + beside + crumbs
    assert host <= made.alive("pinned_host") < host + crumbs


@pytest.mark.parametrize(
    ("offload", "where"),
    [
        pytest.param(False, "reward", marks=pytest.mark.soak),
        (True, "loss"),
        pytest.param(False, "loss", marks=pytest.mark.soak),
        pytest.param(True, "reward", marks=pytest.mark.soak),
    ],
)
def test_the_reference_is_on_the_devices_only_while_it_is_used(small_config, make_claim, make_trainer, offload, where):
    trainer = make_trainer(small_config(reference_offload=offload, kl_in=where, **KL))
    params = jax.device_get(trainer.state.params)
    size, made = nbytes(params), Made()
    trainer.set_params(params)
    for step in (1, 2):
        trainer.train(make_claim(step, age=1))
        holds(made, trainer, beside=0 if offload else size, host=size if offload else 0)
    before = made.alive("device")
    with trainer.reference.params() as lent:
        assert nbytes(lent) == size
        assert made.alive("device") - before == (size if offload else 0)
    del lent
    assert made.alive("device") == before


@pytest.mark.parametrize("offload", [pytest.param(False, marks=pytest.mark.soak), True], ids=["colocated", "offloaded"])
def test_the_critic_is_on_the_devices_only_while_it_is_used(small_config, make_claim, make_trainer, offload):
    """Its parameters and its moments; it is used twice in a step, to say values and to be trained."""
    trainer = make_trainer(small_config(critic_offload=offload, minibatches=2, **PPO))
    params, made = jax.device_get(trainer.state.params), Made()
    trainer.set_params(params)
    for step in (1, 2):
        trainer.train(make_claim(step, age=1))
        size = nbytes(trainer.state.critic)
        assert size > 3 * nbytes(params), "value head and two moments"
        holds(made, trainer, beside=0 if offload else size, host=size if offload else 0)
