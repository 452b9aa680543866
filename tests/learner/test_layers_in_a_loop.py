"""Layers in a loop: gradients are accumulated as stacks, the step is that of single layers, and programs stay small."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxroll import sharding
from jaxroll.config import LearnerConfig, MeshConfig
from jaxroll.learner import minibatch, packing
from jaxroll.learner import state as states
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.critic import Critic
from jaxroll.learner.lora import Lora
from jaxroll.learner.step import Routers, dense, gradients
from jaxroll.learner.trainer import TrainingPrograms
from jaxroll.models import families
from jaxroll.models import params as model_params
from jaxroll.records import Version
from tests.harness.learner_critic import PPO
from tests.learner.test_critic import judging

NANO = families.spec("nano", vocab_size=24)
SPECS = {
    "one window": dataclasses.replace(NANO, layers=3, remat="layer"),
    "a pattern and a rest": dataclasses.replace(NANO, layers=5, windows=(4, 0, 4, 0, 4)),
    "experts": dataclasses.replace(families.spec("tiny_moe", vocab_size=24), router_bias=True),
}
ADAPTERS = {"lora_rank": 3, "lora_alpha": 6.0}


@pytest.fixture
def programs(small_config, make_recipe):
    """The programs for a model on `mesh`, and the micro-batches of a claim."""

    def make(spec: families.ModelSpec, mesh: MeshConfig | None = None, claim=None, lora: Lora | None = None):
        config = small_config(mesh=mesh or MeshConfig(), weight_decay=0.1)
        routers = Routers(replay=False, loss=0.1, bias_rate=0.1) if spec.experts else None
        made = TrainingPrograms(dataclasses.replace(make_recipe(config), spec=spec, routers=routers, lora=lora))
        if claim is None:
            return made
        (samples,) = minibatch.prepare(claim, config).minibatches
        batches = packing.pack(samples, config.learner.row_tokens, packing.learner_buckets(config.learner))
        for batch in batches:
            batch.streams["share"] = (batch.streams["segment_ids"] > 0).astype(np.float32) / 300
        return made, [made.placed({name: batch.streams[name] for name in made.recipe.streams}) for batch in batches]

    return make


def stepped(made: TrainingPrograms, batches) -> dict[str, np.ndarray]:
    """The parameters after one step over the micro-batches, each twice."""
    recipe = made.recipe
    params = model_params.init(recipe.spec, jax.random.key(0), recipe.layout.mesh, sharding.LEARNER)
    state = states.fresh(params, recipe.spec, recipe.layout, recipe.optimizer.transform)
    accumulator = made.zeros()
    for streams in (*batches, *batches):
        accumulator = made.accumulate(state.params, accumulator, streams)
    state, empty, report = made.apply(state, accumulator)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(empty))
    return {"grad_norm": np.asarray(report["grad_norm"])} | jax.device_get(state.opt_state[1][0].mu)


@pytest.mark.soak
@pytest.mark.parametrize("name", SPECS)
def test_a_step_is_that_of_single_layers(programs, make_claim, name: str) -> None:
    """Compared by the first moments of the optimizer, which are the clipped gradients."""
    spec, mesh = SPECS[name], MeshConfig(fsdp=2, tensor=2) if name == "one window" else None
    wanted = stepped(*programs(spec, None, make_claim()))
    found = stepped(*programs(dataclasses.replace(spec, scan=True), mesh, make_claim()))
    assert found.keys() == wanted.keys() and len(found) > 10 * spec.layers
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5 * np.abs(value).max() + 1e-9, err_msg=key)


def test_the_program_of_a_micro_batch_does_not_grow_with_the_number_of_layers(programs) -> None:
    """But for the operations that stack the parameters: a cast and a new axis for each."""

    def operations(layers: int) -> int:
        text = programs(dataclasses.replace(NANO, layers=layers, scan=True)).lowered("accumulate", 4).as_text()
        return sum(text.count(f"stablehlo.{kind} ") for kind in ("add", "slice", "dot_general", "multiply"))

    assert operations(4) == operations(2)


@pytest.mark.soak
def test_programs_of_adapters_and_of_a_critic_do_not_grow_with_the_number_of_layers(programs) -> None:
    def operations(layers: int) -> dict[str, int]:
        spec = dataclasses.replace(NANO, layers=layers, scan=True, remat="layer")
        made = programs(spec, lora=Lora(2, 2.0, ("attn.o", "mlp.up")))
        judge = Critic(LearnerConfig(critic="init"), programs(spec).recipe)
        whole = [of.lowered(name) for of in (made, judge) for name in states.ByLayer.PROGRAMS]
        found = {str(n): one.as_text().count("stablehlo.") for n, one in enumerate([*whole, made.lowered("merge")])}
        for name, of in (("adapters", made), ("critic", judge)):
            text = of.lowered("accumulate", 4).as_text()
            kinds = ("add", "slice", "dot_general", "multiply")
            found[name] = sum(text.count(f"stablehlo.{kind} ") for kind in kinds)
        return found

    assert operations(4) == operations(2)


@pytest.mark.soak
@pytest.mark.parametrize("options", [ADAPTERS | PPO, ADAPTERS, PPO], ids=["both", "adapters", "critic"])
def test_adapters_and_a_critic_are_trained_as_with_single_layers(
    small_config, make_trainer, make_claim, options: dict
) -> None:
    """Compared by the first moments, which are the clipped gradients; then the merged parameters."""
    found = []
    for scan in (False, True):
        config = small_config(max_grad_norm=0.05, scan_layers=scan, remat="layer", **options)
        trainer = make_trainer(config)
        if trainer.critic:
            trainer = judging(trainer)  # of a head of zeros only the head itself has a gradient
        row = trainer.train(make_claim(age=1))
        of = (trainer.state, *([trainer.state.critic] if trainer.state.critic else []))
        found.append([{"norm": row["grad_norm"]}, *(jax.device_get(state.opt_state[1][0].mu) for state in of)])
        recipe, held = trainer.programs.recipe, jax.device_get(trainer.params())
        wanted = dense(recipe, trainer.state.params, trainer.base)
        assert held.keys() == wanted.keys() and all(np.allclose(held[name], wanted[name]) for name in wanted)
    for single, loop in zip(*found, strict=True):
        assert single.keys() == loop.keys()
        for key, value in single.items():
            close = {"rtol": 1e-4, "atol": 1e-5 * np.abs(value).max() + 1e-9}
            np.testing.assert_allclose(loop[key], value, **close, err_msg=key)


def test_a_loop_adds_gradients_to_their_sums_without_a_copy_of_all_layers(programs) -> None:
    """Temporary memory holds the parameters of each further layer (in a stack) and its input, but no gradients."""

    def sizes(layers: int) -> tuple[int, int]:
        made = programs(dataclasses.replace(NANO, layers=layers, scan=True, remat="layer"))
        analysis = made.lowered("accumulate", 1).compile().memory_analysis()
        return analysis.temp_size_in_bytes, sum(4 * leaf.size for leaf in made.accumulator.grads.values())

    (few, small), (many, large) = sizes(4), sizes(16)
    assert (many - few) < 1.5 * (large - small)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["one window", "a pattern and a rest", "experts"])
def test_a_loop_that_sums_adds_the_gradients_of_a_micro_batch(programs, make_claim, name: str) -> None:
    spec = dataclasses.replace(SPECS[name], scan=True, remat="layer")
    made, (streams, *_) = programs(spec, None, make_claim())
    rng = np.random.default_rng(0)
    params = random_like(made.state.params, rng, 0.1)
    held = random_like(made.accumulator, rng)
    before = jax.device_get(model_params.unstacked(spec, held.grads))
    wanted, _ = jax.jit(lambda *given: gradients(made.recipe, *given))(params, streams)
    found = model_params.unstacked(spec, made.accumulate(params, held, streams).grads)
    assert found.keys() == wanted.keys()
    for key, grad in wanted.items():
        np.testing.assert_allclose(found[key], before[key] + np.asarray(grad), rtol=1e-6, atol=1e-6, err_msg=key)


def random_like(tree, rng: np.random.Generator, scale: float = 1.0):
    """Normal numbers instead of every float of an abstract tree, zeros elsewhere."""

    def one(leaf):
        normal = scale * rng.standard_normal(leaf.shape) if leaf.dtype == np.float32 else np.zeros(leaf.shape)
        return jax.device_put(normal.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(one, tree)


@pytest.mark.parametrize(
    "name",
    ["a pattern and a rest", *(pytest.param(name, marks=pytest.mark.soak) for name in ("one window", "experts"))],
)
def test_the_optimizer_step_by_layers_is_that_of_all_parameters_at_once(programs, name: str) -> None:
    """Equal parameters, moments and counters after three steps: clipped, not clipped, clipped.

    With weight decay, moving biases of routers, and a mesh for the pattern.
    """
    mesh, rng = MeshConfig(fsdp=2, tensor=2) if "pattern" in name else None, np.random.default_rng(0)
    made = programs(dataclasses.replace(SPECS[name], scan=True), mesh)
    first = jax.device_get(
        states.fresh(
            random_like(made.state.params, rng), made.recipe.spec, made.recipe.layout, made.recipe.optimizer.transform
        )
    )
    where = sharding.shardings_of(made.state)
    found, wanted = (jax.device_put(first, where, may_alias=False) for _ in range(2))
    whole = jax.jit(made._apply)
    for scale in (1.0, 1e-4, 0.3):
        accumulator = random_like(made.accumulator, rng, scale)
        single = dataclasses.replace(accumulator, grads=model_params.unstacked(made.recipe.spec, accumulator.grads))
        wanted, _, expected = whole(wanted, single)
        found, empty, report = made.apply(found, accumulator)
        np.testing.assert_allclose(report["grad_norm"], expected["grad_norm"], rtol=1e-6)
        assert float(report["learning_rate"]) == float(expected["learning_rate"])
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(empty))
    assert sharding.shardings_of(found) == where and int(found.step) == 3
    (found, tree), (wanted, same) = (jax.tree.flatten(jax.device_get(state)) for state in (found, wanted))
    assert tree == same and len(found) > 30 * made.recipe.spec.layers
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)


def test_the_programs_of_the_optimizer_step_do_not_grow_with_the_number_of_layers(programs) -> None:
    def operations(layers: int) -> dict[str, int]:
        made = programs(dataclasses.replace(NANO, layers=layers, scan=True))
        return {name: made.lowered(name).as_text().count("stablehlo.") for name in states.ByLayer.PROGRAMS}

    assert operations(4) == operations(2)


def test_a_checkpoint_of_single_layers_is_restored_into_a_loop_and_back(programs, tmp_path: Path) -> None:
    single, loop = (programs(dataclasses.replace(NANO, layers=3, scan=scan)).state for scan in (False, True))
    for number, (before, after) in enumerate(((single, loop), (loop, single))):
        checkpoints, version = Checkpoints(tmp_path / str(number), 3), Version(0, 1)
        saved = random_like(before, np.random.default_rng(number))
        checkpoints.save(version, 0, saved)
        assert checkpoints.wait() == [version]
        restored, _ = checkpoints.restore(version, after)
        (wanted, tree), (found, same) = (jax.tree.flatten(jax.device_get(state)) for state in (saved, restored))
        assert tree == same and len(found) > 90
        assert all(np.array_equal(*pair) for pair in zip(wanted, found, strict=True))


@pytest.fixture
def empty_cache(tmp_path: Path):
    """An empty compilation cache for this test."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.soak
def test_gradients_of_36_layers_compile_in_at_most_twice_the_time_of_4(programs, empty_cache, capsys) -> None:
    """Printed: CPU seconds, also of the optimizer step."""

    def compile_s(layers: int, program: str = "accumulate") -> float:
        spec = dataclasses.replace(families.spec("tiny"), layers=layers, scan=True, remat="layer")
        lowered = programs(spec).lowered(program, 4)
        start_s = time.process_time()
        lowered.compile()
        return time.process_time() - start_s

    compile_s(1)  # the first compilation of a process starts threads
    few, many = compile_s(4), compile_s(36)
    apply = [sum(compile_s(layers, program) for program in states.ByLayer.PROGRAMS) for layers in (4, 36)]
    with capsys.disabled():
        print(
            f"\ngradients of layers in a loop: 4 layers {few:.2f} s, 36 layers {many:.2f} s; "
            f"optimizer step: {apply[0]:.2f} s and {apply[1]:.2f} s"
        )
    assert many <= 2 * few
