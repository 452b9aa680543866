"""The model's vocabulary size, as far as the store knows it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jaxroll.config import Config, ModelConfig, TokenizerConfig
from jaxroll.models import folders
from jaxroll.roles.store import Vocabulary
from jaxroll.run_paths import RunPaths
from jaxroll.text import tokenizers

QWEN3 = Path(__file__).resolve().parents[1] / "golden" / "qwen3" / "tied" / folders.CONFIG_FILE


def test_without_a_folder_the_model_has_the_ids_of_the_alphabet_that_the_feeder_noted(tmp_path: Path) -> None:
    vocabulary, text = Vocabulary(Config(), tmp_path), tokenizers.CharTokenizer("abc")
    assert vocabulary() == 0, "there is no prompt yet"
    tokenizers.note(tmp_path, text)
    assert vocabulary() == folders.spec(Config().model, text.vocab_size).vocab_size >= text.vocab_size
    RunPaths(tmp_path).alphabet.unlink()
    assert vocabulary() > 0, "a known size is not read again"


def test_a_folder_says_how_many_its_model_has_and_one_of_other_hosts_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = replace(Config(), model=ModelConfig(path=str(folder)), tokenizer=TokenizerConfig("hf", str(folder)))
    assert Vocabulary(config, tmp_path)() == 0
    folder.mkdir()
    shutil.copy(QWEN3, folder)
    assert Vocabulary(config, tmp_path)() == json.loads(QWEN3.read_text())["vocab_size"]


@pytest.mark.parametrize("content", ["[", "3"])
def test_an_alphabet_that_is_damaged_bounds_nothing(tmp_path: Path, content: str) -> None:
    RunPaths(tmp_path).alphabet.write_text(content)
    assert Vocabulary(Config(), tmp_path)() == 0
