"""Adapters of every family: gradients, and the files that PEFT reads and writes."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxroll.config import LearnerConfig
from jaxroll.errors import ConfigError
from jaxroll.learner import lora, peft
from jaxroll.learner.lora import Lora
from jaxroll.models import params, transformer
from tests.golden.write_families import VARIANTS
from tests.models.test_family_goldens import MOST_OPTIONS, golden, whole_rows

LEARNER = LearnerConfig(lora_rank=3, lora_alpha=6.0)
FLOAT32 = np.dtype(np.float32)


def adapters_of(variant: str, learner: LearnerConfig = LEARNER) -> dict[str, np.ndarray]:
    """Random adapters for the golden of a family."""
    rng, made = np.random.default_rng(1), Lora.of(learner)
    assert made is not None
    shapes = lora.abstract(golden(variant)[0], made)
    return {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in shapes.items()}


@pytest.mark.parametrize("variant", [*MOST_OPTIONS, "qwen3_moe"])
def test_files_of_adapters_mean_the_merged_model_and_are_read_back(tmp_path: Path, variant: str) -> None:
    """PEFT's definition on Hugging Face's weights: W + (α/r)·B·A."""
    spec, base, _ = golden(variant)
    adapters, made = adapters_of(variant), Lora.of(LEARNER)
    peft.write(tmp_path, LEARNER, spec, adapters, FLOAT32, "base")
    config = json.loads((tmp_path / peft.CONFIG_FILE).read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 6.0, "LORA")
    modules = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == modules
    held, host = load_file(tmp_path / peft.ARRAYS), {name: np.asarray(value) for name, value in base.items()}
    merged = {name: lora.merged_on_host(made, name, value, adapters) for name, value in host.items()}
    theirs, wanted = params.exported(spec, host), params.exported(spec, merged)
    for name, weight in theirs.items():
        stem, *_ = name.rpartition(".weight")
        a, b = (held.get(f"base_model.model.{stem}.lora_{end}.weight") for end in "AB")
        assert (a is not None) == (stem.rpartition(".")[2] in modules), name
        product = 0 if a is None or b is None else 6.0 / 3 * b @ a
        np.testing.assert_allclose(weight + product, wanted[name], atol=1e-4, err_msg=name)
    learner = dataclasses.replace(LEARNER, lora_path=str(tmp_path))
    peft.check(learner, spec)
    back = peft.read(learner, spec)
    assert back.keys() == adapters.keys() and all(np.array_equal(back[name], adapters[name]) for name in back)


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_adapters_are_the_dense_ones_projected(variant: str) -> None:
    """dA = s · dW·Bᵀ and dB = s · Aᵀ·dW, for each expert, with the dense gradient dW at the merged parameters."""
    spec, base, expected = golden(variant)
    tokens = expected["tokens"]
    adapters, made = {name: value / 10 for name, value in adapters_of(variant).items()}, Lora.of(LEARNER)
    assert made is not None
    weigh = np.random.default_rng(2).normal(size=(*tokens.shape, spec.vocab_size)).astype(np.float32)

    def loss(values):
        hidden = transformer.forward(spec, values, *map(jnp.asarray, whole_rows(tokens)))
        return jnp.mean(weigh * transformer.logits(spec, values, hidden))

    merge = functools.partial(lora.merged, spec, None, made, base)
    found = jax.jit(jax.grad(lambda given: loss(merge(given))))(adapters)
    dense = jax.jit(jax.grad(loss))(merge(adapters))
    assert len(found) == 2 * 7 * spec.layers
    for name, dw in dense.items():
        if not made.adapts(name):
            continue
        each, inputs, outputs = (math.prod(axes) for axes in peft.divided(name, dw.shape))
        dw = np.asarray(dw, np.float64).reshape(each, inputs, outputs)
        a = adapters[name + ".A"].astype(np.float64).reshape(each, inputs, 3)
        b = adapters[name + ".B"].astype(np.float64).reshape(each, 3, outputs)
        for end, want in ((".A", 2.0 * dw @ b.swapaxes(1, 2)), (".B", 2.0 * a.swapaxes(1, 2) @ dw)):
            assert np.abs(want).max() > 1e-5, "gradients too small to compare"
            got = np.asarray(found[name + end]).reshape(want.shape)
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5 * np.abs(want).max(), err_msg=name)


def _config(**change) -> None:
    path = Path(peft.CONFIG_FILE)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def _tensors(change) -> None:
    held = load_file(peft.ARRAYS)
    change(held)
    save_file(held, peft.ARRAYS)


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
MISFITS = {
    "another rank": (lambda: _config(r=4), "learner.lora_rank = 3.*r = 4. Set it to 4"),
    "another alpha": (lambda: _config(lora_alpha=16), "learner.lora_alpha = 6.0.*Set it to 16"),
    "not LoRA": (lambda: _config(peft_type="IA3"), "not that of LoRA"),
    "a scale of its own": (lambda: _config(use_rslora=True), "use_rslora = True, which is not supported"),
    "a trained head": (lambda: _config(modules_to_save=["lm_head"]), "modules_to_save"),
    "fewer modules": (
        lambda: _tensors(lambda held: [held.pop(name) for name in list(held) if "down_proj" in name]),
        r"lora_targets.*are for attn\.k, attn\.o, attn\.q, attn\.v, mlp\.gate, mlp\.up",
    ),
    "a tensor missing": (lambda: _tensors(lambda held: held.pop(FIRST)), f"lacks tensor {FIRST}"),
    "a tensor too many": (lambda: _tensors(lambda held: held.update(x=np.ones(1))), "unknown tensor x"),
    "a shape": (lambda: _tensors(lambda held: held.update({FIRST: np.ones((3, 8))})), r"needs \(3, 40\)"),
    "no config": (lambda: Path(peft.CONFIG_FILE).unlink(), "cannot be read"),
    "no tensors": (lambda: Path(peft.ARRAYS).write_bytes(b"no"), "cannot be read"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_adapters_that_do_not_fit_the_config_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, misfit: str
) -> None:
    spec = golden("gemma3_text")[0]
    peft.write(tmp_path, LEARNER, spec, adapters_of("gemma3_text"), FLOAT32, "")
    monkeypatch.chdir(tmp_path)
    change, message = MISFITS[misfit]
    change()
    with pytest.raises(ConfigError, match=message):
        peft.check(dataclasses.replace(LEARNER, lora_path=str(tmp_path)), spec)


def test_a_learner_starts_from_given_adapters(tmp_path: Path, small_config, make_trainer) -> None:
    words = {"lora_rank": 3, "lora_alpha": 6.0, "lora_targets": ("attn.q", "mlp.down")}
    fresh = make_trainer(small_config(**words))
    learner = fresh.config.learner
    rng = np.random.default_rng(3)
    given = {name: rng.normal(size=value.shape).astype(np.float32) for name, value in fresh.state.params.items()}
    peft.write(tmp_path, learner, fresh.spec, given, FLOAT32, "")
    trainer = make_trainer(small_config(**words, lora_path=str(tmp_path)))
    assert all(np.array_equal(trainer.state.params[name], given[name]) for name in given)
    moved = np.abs(np.asarray(trainer.params()["layers.00.attn.q"]) - fresh.params()["layers.00.attn.q"])
    assert moved.max() > 0.1 and fresh.base_digest() == trainer.base_digest()
