"""docs/recipes.md shows what `.ci/recipes.py` computes, and its formulas give what is worked out by hand here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("recipes", ROOT / ".ci" / "recipes.py")
assert _spec is not None and _spec.loader is not None
recipes = importlib.util.module_from_spec(_spec)
sys.modules["recipes"] = recipes
_spec.loader.exec_module(recipes)


def test_the_page_is_up_to_date() -> None:
    assert recipes.PAGE.read_text(encoding="utf-8") == recipes.page(), "run python .ci/recipes.py"


def test_every_model_of_the_issue_has_a_config() -> None:
    sizes = ("qwen2p5_0p5b", "qwen3_0p6b", "qwen3_1p7b", "qwen3_8b", "llama3p2_1b", "gemma3_1b", "qwen3_30b_a3b")
    found = recipes.recipes()
    assert [f"gsm8k_{size}.py" in found for size in sizes] == [True] * len(sizes)


def test_the_formulas_by_hand() -> None:
    """Qwen3-8B: 8.19e9 parameters, 36 layers of width 4096; 8 rows of 2048 tokens on 8 + 8 devices."""
    config = recipes.recipes()["gsm8k_qwen3_8b.py"]
    residuals, logits = 2048 * 4096 * 37 * 2, 512 * 2**20
    assert recipes.learner_gb(config) == pytest.approx((16 * 8.1907e9 / 8 + residuals + logits) / 1e9, rel=1e-3)
    parameters, cache = recipes.sampler_bytes(config)
    assert parameters == pytest.approx(2 * 8.1907e9 / 8, rel=1e-3)
    assert cache == 128 * 1536 * 36 * 2 * 128 * 2  # slots, tokens, layers, key and value, one head's width, bytes
    v5p = recipes.CHIPS[0]
    assert recipes.learner_s(config, v5p) == pytest.approx(8 * 8.1907e9 * 256 * 1536 / (8 * 459e12 * 0.4), rel=1e-3)
    reads = 2 * 1024 * (parameters + cache / 2)  # two waves of 128 answers
    assert recipes.sampler_s(config, v5p) == pytest.approx(reads / (2.765e12 * 0.6))
