"""Adapters exchanged with PEFT: the logits with them are the same on both sides, in both directions."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxroll.config import LearnerConfig
from jaxroll.errors import ConfigError
from jaxroll.learner import lora, peft
from jaxroll.learner import weights as own
from jaxroll.learner.lora import Lora
from jaxroll.tools import weights
from tests.golden.write_families import VARIANTS
from tests.learner.test_peft import FLOAT32, LEARNER, adapters_of
from tests.models.test_family_goldens import golden, logits_of, whole_rows

pytestmark = [pytest.mark.soak, pytest.mark.process, pytest.mark.timeout(300)]
ATTENTION = {"attn.q": "q_proj", "attn.k": "k_proj", "attn.v": "v_proj", "attn.o": "o_proj"}
MLP = {"mlp.gate": "gate_proj", "mlp.up": "up_proj", "mlp.down": "down_proj"}
CLOSE = 1e-4


def base_of(folder: Path, variant: str) -> np.ndarray:
    """Write the base model of a golden into folder/base, and rows of tokens as the input of PEFT; return the rows."""
    spec, values, expected = golden(variant)
    own.save(folder / "ours", values, spec, {})
    with weights.opened(folder / "ours", None) as source:
        weights.export(source, folder / "base", "float32", shard_bytes=1 << 20)
    np.save(folder / "adapters.tokens.npy", expected["tokens"])
    return expected["tokens"]


def adapted_logits(
    variant: str, learner: LearnerConfig, adapters: dict[str, np.ndarray], tokens: np.ndarray
) -> np.ndarray:
    """The logits of our model with adapters; without these they must be others."""
    spec, base, expected = golden(variant)
    made = Lora.of(learner)
    assert made is not None
    merge = functools.partial(lora.merged, spec, None, made, base)
    found = np.asarray(logits_of(spec, jax.jit(merge)(adapters), *whole_rows(tokens)))
    assert np.abs(found - expected["logits"]).max() > 0.1, "adapters without effect would prove nothing"
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_that_peft_saves_give_the_same_logits_here(tmp_path: Path, peer, variant: str) -> None:
    """Experts are left out, because PEFT saves their adapters in a format of its own (the test below)."""
    chosen = ATTENTION if "moe" in variant else ATTENTION | MLP
    tokens = base_of(tmp_path, variant)
    report = peer(
        "trl", "peft_adapters.py", "write", *map(str, (tmp_path / "base", tmp_path / "adapters")), *chosen.values()
    )
    spec = golden(variant)[0]
    assert report == {"peft": "0.21.0", "adapted": spec.layers * len(chosen)}
    learner = dataclasses.replace(LEARNER, lora_path=str(tmp_path / "adapters"), lora_targets=tuple(chosen))
    peft.check(learner, spec)
    found = adapted_logits(variant, learner, peft.read(learner, spec), tokens)
    assert np.abs(found - np.load(tmp_path / "adapters.logits.npy")).max() < CLOSE


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_of_a_run_give_the_same_logits_in_peft(tmp_path: Path, peer, variant: str) -> None:
    """Those of experts, too: PEFT stacks them as transformers stacks the experts."""
    tokens, spec = base_of(tmp_path, variant), golden(variant)[0]
    adapters = {name: value * np.float32(0.3) for name, value in adapters_of(variant).items()}
    (tmp_path / "adapters").mkdir()
    peft.write(tmp_path / "adapters", LEARNER, spec, adapters, FLOAT32, str(tmp_path / "base"))
    report = peer("trl", "peft_adapters.py", "read", *map(str, (tmp_path / "base", tmp_path / "adapters")))
    assert report["adapted"] == spec.layers * (6 if spec.experts else 7), "gate and up of experts are one weight there"
    found = adapted_logits(variant, LEARNER, adapters, tokens)
    assert np.abs(found - np.load(tmp_path / "adapters.logits.npy")).max() < CLOSE


def test_adapters_that_peft_saves_for_stacked_experts_are_refused(tmp_path: Path, peer) -> None:
    base_of(tmp_path, "qwen3_moe")
    peer("trl", "peft_adapters.py", "write", *map(str, (tmp_path / "base", tmp_path / "adapters")), *MLP.values())
    learner = dataclasses.replace(LEARNER, lora_path=str(tmp_path / "adapters"), lora_targets=tuple(MLP))
    with pytest.raises(ConfigError, match=r"(rank_pattern|target_parameters) = .*not supported"):
        peft.check(learner, golden("qwen3_moe")[0])
