"""Device memory between two steps, by all live arrays, with and without offloading."""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import LearnerConfig, MeshConfig
from jaxroll.errors import ConfigError
from jaxroll.learner import packing
from jaxroll.learner import state as states
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.trainer import TrainingPrograms
from jaxroll.models import params as model_params
from jaxroll.records import Version
from tests.harness.learner_critic import PPO, bits

KL = {"kl_coef": 0.5, "reference": "init"}


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def memory_kinds(tree) -> list[str | None]:
    """The kind of memory of every leaf."""
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


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


@pytest.mark.soak
@pytest.mark.parametrize("where", ["reward", "loss"])
@pytest.mark.parametrize("offload", [False, True])
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


@pytest.mark.soak
@pytest.mark.parametrize("offload", [False, True], ids=["colocated", "offloaded"])
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


def test_the_moments_are_on_the_devices_only_in_the_update(small_config, make_recipe, tmp_path: Path):
    """Two steps have the bits of those with moments on the devices; a checkpoint restores them to host memory."""
    found = []
    for offload in (False, True):
        config = small_config(optimizer_offload=offload, scan_layers=True, weight_decay=0.1, mesh=MeshConfig(fsdp=2))
        programs = TrainingPrograms(make_recipe(config))
        recipe, drawn = programs.recipe, np.random.default_rng(1)
        params = model_params.init(recipe.spec, jax.random.key(0), recipe.layout.mesh, sharding.LEARNER)
        state = states.fresh(params, recipe.spec, recipe.layout, recipe.optimizer.transform, offload=offload)
        for _ in range(2):
            grads = {
                name: jax.device_put(drawn.normal(size=leaf.shape).astype(np.float32), leaf.sharding)
                for name, leaf in programs.accumulator.grads.items()
            }
            state, _, report = programs.apply(state, dataclasses.replace(programs.zeros(), grads=grads))
        assert float(report["grad_norm"]) > recipe.optimizer.max_grad_norm, "clipped"
        count, kind = len(state.params), memory_kinds(state)
        assert kind == memory_kinds(programs.state) and kind.count("pinned_host") == (2 * count if offload else 0)
        found.append(bits(state))
    assert found[0] == found[1]

    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(Version(0, 2), 1, state)
    checkpoints.wait()
    again, _ = checkpoints.restore(Version(0, 2), programs.state)
    checkpoints.close()
    assert bits(again) == found[1] and memory_kinds(again) == kind


WINDOWS = (8, 8, 0, 8, 8)  # with layers in a loop: a cycle of three, and two layers behind it


def inputs_in_host_memory(recipe, scan: bool) -> TrainingPrograms:
    """The programs of `recipe` for five layers, whose inputs are in host memory between the two passes."""
    spec = dataclasses.replace(recipe.spec, layers=len(WINDOWS), windows=WINDOWS, scan=scan)
    return TrainingPrograms(replace(recipe, spec=spec))


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({}, 5),
        ({"scan_layers": True}, 1 + 2),  # the loop that sums moves the input of a cycle
        ({"scan_layers": True, "lora_rank": 2}, 3 + 2),
        ({"remat": "layer"}, 0),
    ],
    ids=["single layers", "loop", "adapters", "on the devices"],
)
def test_the_inputs_of_layers_are_moved_to_host_memory(small_config, make_recipe, options: dict, moved: int):
    """Counted in the program of a micro-batch before it is compiled; `tests/tools/test_tpu_pod.py` compiles one."""
    recipe = make_recipe(small_config(**{"remat": "offload", "mesh": MeshConfig(fsdp=2)} | options))
    made = inputs_in_host_memory(recipe, recipe.spec.scan)
    streams = {name: made._stream(2, dtype) for name, dtype in recipe.streams.items()}
    text = str(jax.make_jaxpr(made._accumulate)(made.state.params, made.accumulator, streams, made.base))
    assert text.count("MemorySpace.Host") == moved and ("<host>" in text) == bool(moved)


@pytest.mark.soak
@pytest.mark.parametrize("scan", [False, True], ids=["single layers", "loop"])
def test_gradients_have_the_bits_of_those_with_inputs_on_the_devices(small_config, make_recipe, scan: bool):
    found, drawn, T = [], np.random.default_rng(0), 64
    streams = packing.empty_streams(2, T)
    streams["tokens"][:], streams["positions"][:] = drawn.integers(0, 10, (2, T)), np.arange(T)
    streams["segment_ids"][:], streams["mask"][:, 1:] = 1, True
    streams["advantage"][:], streams["weight"][:, 1:] = drawn.normal(size=(2, T)), 0.01
    for remat in ("layer", "offload"):
        mesh = MeshConfig(fsdp=2)
        recipe = make_recipe(small_config(remat=remat, scan_layers=scan, row_tokens=T, micro_batch_rows=2, mesh=mesh))
        made = inputs_in_host_memory(recipe, scan)
        spec, where = made.recipe.spec, recipe.layout.mesh
        weights = model_params.init(spec, jax.random.key(0), where, sharding.LEARNER)
        program = made.lowered("accumulate", 2).compile()
        found.append(bits(program(weights, made.zeros(), made.placed(streams), {}).grads))
    assert found[0] == found[1]


@pytest.mark.parametrize("key", ["optimizer_offload", "reference_offload", "critic_offload", "remat"])
def test_devices_without_host_memory_are_refused(key: str):
    devices = [
        SimpleNamespace(device_kind="strange", addressable_memories=lambda: [SimpleNamespace(kind="device")]),
        *jax.devices()[:1],
    ]
    learner = replace(LearnerConfig(), **{key: "offload" if key == "remat" else True})
    states.check_host_memory(learner, devices[1:])
    states.check_host_memory(LearnerConfig(), devices)
    with pytest.raises(ConfigError, match="strange has no memory pinned_host, only device") as caught:
        states.check_host_memory(learner, devices)
    assert caught.value.key == f"learner.{key}"
