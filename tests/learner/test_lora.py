"""Adapters: the dense gradients projected, the base untouched, exact resumes, the same on every mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError
from jaxroll.learner import lora, step
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.models import families, params
from jaxroll.records import Version

TARGETS = ("attn.q", "attn.o", "mlp.down")
ADAPTERS = {"lora_rank": 3, "lora_alpha": 6.0, "lora_targets": TARGETS}


@pytest.fixture
def adapted(small_config, make_trainer):
    def make(alone=False, **learner):
        return make_trainer(small_config(**(ADAPTERS | learner)), alone=alone)

    return make


def bits(tree) -> dict[str, bytes]:
    return {
        jax.tree_util.keystr(p): np.asarray(leaf).tobytes() for p, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def streams_of(trainer, claim) -> dict[str, jax.Array]:
    from jaxroll.learner import minibatch

    prepared = minibatch.prepare(claim, trainer.config)
    return trainer.programs.placed(trainer.packed(prepared.minibatches[0])[0].streams)


def test_gradients_are_the_dense_ones_projected(adapted, make_claim):
    """Gradients of W + s·A·B: dA = s · dW·Bᵀ and dB = s · Aᵀ·dW, with the dense gradient dW at merged parameters."""
    trainer = adapted()
    recipe, base, adapters = trainer.programs.recipe, trainer.base, dict(trainer.state.params)
    chance = np.random.default_rng(0)
    adapters = {name: jnp.asarray(chance.normal(size=value.shape), jnp.float32) for name, value in adapters.items()}
    streams = streams_of(trainer, make_claim())
    whole = dataclasses.replace(recipe, lora=None)
    found, _ = jax.jit(functools.partial(step.gradients, recipe))(adapters, streams, base)
    dense, _ = jax.jit(functools.partial(step.gradients, whole))(step.dense(recipe, adapters, base), streams)
    assert found.keys() == adapters.keys() and len(found) == 2 * 2 * len(TARGETS)
    for name in dense:
        if not recipe.lora.adapts(name):
            continue
        inputs = 2 if name.endswith("attn.o") else 1
        a, b = (np.asarray(adapters[name + end], np.float64) for end in (".A", ".B"))
        dw, outputs = np.asarray(dense[name], np.float64), b.ndim - 1
        assert np.abs(dw).max() > 1e-6
        over_out = (tuple(range(inputs, dw.ndim)), tuple(range(1, 1 + outputs)))
        over_in = (tuple(range(inputs)), tuple(range(inputs)))
        for end, want in ((".A", 2.0 * np.tensordot(dw, b, over_out)), (".B", 2.0 * np.tensordot(a, dw, over_in))):
            np.testing.assert_allclose(found[name + end], want, rtol=2e-4, atol=2e-5 * np.abs(want).max(), err_msg=name)


@pytest.mark.soak
def test_the_first_step_sees_the_model_that_the_run_starts_from(adapted, small_config, make_trainer, make_claim):
    trainer, whole = adapted(), make_trainer(small_config())
    assert all(np.array_equal(trainer.params()[name], whole.state.params[name]) for name in whole.state.params)
    first, same = trainer.train(make_claim()), whole.train(make_claim())
    assert first["loss"] == pytest.approx(same["loss"], rel=1e-5) and first["entropy"] == pytest.approx(same["entropy"])
    assert first["grad_norm"] < same["grad_norm"]


def test_only_adapters_are_trained_and_the_base_keeps_every_bit(adapted, make_claim):
    trainer = adapted()
    base, digest, before = bits(trainer.base), trainer.base_digest(), bits(trainer.params())
    names = {f"layers.{n:02d}.{target}{end}" for n in range(2) for target in TARGETS for end in (".A", ".B")}
    assert set(trainer.state.params) == names == set(trainer.programs.accumulator.grads)
    size = sum(value.size for value in trainer.state.params.values())
    assert sum(leaf.size for leaf in jax.tree.leaves(trainer.state.opt_state)) < 2 * size + 8
    for number in (1, 2, 3):
        trainer.train(make_claim(number))
    assert bits(trainer.base) == base and lora.digest(trainer.base) == digest
    after = bits(trainer.params())
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {f"['layers.{n:02d}.{target}']" for n in range(2) for target in TARGETS}


def test_the_digest_sees_a_flipped_bit_and_two_that_are_exchanged(adapted):
    base = {name: np.array(value) for name, value in adapted().base.items()}
    digest = lora.digest(base)
    base["embed"].view(np.uint32)[3, 4] ^= 1
    assert lora.digest(base) != digest
    base["embed"].view(np.uint32)[3, 4] ^= 1
    assert lora.digest(base) == digest
    base["embed"][[0, 1]] = base["embed"][[1, 0]]
    assert lora.digest(base) != digest


@pytest.mark.parametrize("bit", range(32))
def test_the_digest_sees_the_same_bit_flipped_in_two_places(bit):
    base = {"embed": np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)}
    digest = lora.digest(base)
    base["embed"].view(np.uint32)[[3, 5], [4, 1]] ^= np.uint32(1 << bit)
    assert lora.digest(base) != digest


@pytest.mark.parametrize("change", [np.negative, np.zeros_like, lambda x: x[::-1], lambda x: x + np.float32(1)])
def test_the_digest_sees_a_whole_parameter_changed(adapted, change):
    """Negated above all: an even number of signs are turned."""
    base = dict(adapted().base)
    assert lora.digest(base | {"embed": change(np.asarray(base["embed"]))}) != lora.digest(base)


def test_the_digest_is_the_same_wherever_the_parameters_lie(adapted):
    one, many = adapted(), adapted(mesh=MeshConfig(fsdp=2, tensor=2))
    assert many.base["embed"].sharding.mesh.size == 4 and many.base_digest() == one.base_digest()


def test_a_checkpoint_holds_adapters_alone_and_a_resume_is_exact(tmp_path, adapted, make_claim):
    trainer = adapted()
    trainer.train(make_claim(1))
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    checkpoints.save(Version(0, 1), 1, trainer.state, trainer.base_digest())
    checkpoints.wait()
    held = checkpoints.about(Version(0, 1))["arrays"]
    assert all(name.split("'")[1].endswith((".A", ".B")) for name in held if "'" in name)
    want = trainer.train(make_claim(2))
    again = adapted()
    again.state, _ = checkpoints.restore(Version(0, 1), again.abstract_state(), again.base_digest())
    assert again.train(make_claim(2)) == want | {"compiles": again._compiles.count}
    assert bits(again.state) == bits(trainer.state) and bits(again.params()) == bits(trainer.params())
    with pytest.raises(ConfigError, match=r"checkpoint 0\.1 = .*trained on other parameters.*as it was"):
        checkpoints.restore(Version(0, 1), again.abstract_state(), "another")
    checkpoints.close()


@pytest.mark.soak
def test_another_mesh_gives_the_same_losses(adapted, make_claim):
    one, many = adapted(), adapted(mesh=MeshConfig(fsdp=2, tensor=2))
    where = {name: value.sharding.spec for name, value in many.state.params.items()}
    embed = ("fsdp", "expert", "sequence")
    assert where["layers.00.attn.q.A"] == jax.P(embed, None)
    assert where["layers.00.attn.q.B"] == jax.P(None, "tensor", None)
    assert where["layers.00.attn.o.A"] == jax.P("tensor", None, None)
    assert where["layers.00.attn.o.B"] == jax.P(None, embed)
    for number in (1, 2, 3):
        rows = [trainer.train(make_claim(number)) for trainer in (one, many)]
        for key in ("loss", "grad_norm", "entropy"):
            assert rows[0][key] == pytest.approx(rows[1][key], rel=1e-3, abs=1e-4), (number, key)


@pytest.mark.soak
def test_nothing_compiles_after_the_warm_up(adapted, make_claim):
    trainer = adapted(
        alone=True, minibatches=2, micro_batch_rows=1
    )  # the proximal log-probs are of the merged parameters
    trainer.warmup()
    assert trainer.train(make_claim())["compiles"] == 0
    trainer.params(), trainer.base_digest()
    assert trainer.train(make_claim(2))["compiles"] == 0


def test_merging_on_the_host_is_merging_on_the_devices(adapted, make_claim):
    trainer = adapted()
    trainer.train(make_claim())
    merged = trainer.params()
    for name, value in trainer.base.items():
        host = lora.merged_on_host(trainer.lora, name, np.asarray(value), trainer.state.params)
        np.testing.assert_allclose(host, merged[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lora_targets=attn.q,attn.p", r"no parameter 'attn\.p' to adapt.*attn\.q"),
        ("lora_targets=()", "nothing to adapt"),
        ("lora_rank=-1", "must be at least 0"),
        ("lora_alpha=0", "must be greater than 0"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(words, said):
    values = configs.to_dict(configs.parse(configs.defaults()))
    with pytest.raises(ConfigError, match=said):
        configs.parse(configs.override(values, [f"learner.{words}"]))


def test_every_target_of_the_schema_is_a_parameter():
    from jaxroll.config.schema import LORA_TARGETS

    spec = families.spec("nano")
    known = {name.split(".", 2)[2] for name in params.abstract(spec) if name.startswith("layers.")}
    assert set(LORA_TARGETS) == {name for name in known if not name.endswith("norm")}
