"""Tokenizer files made to break a reader: refused in one line that names the file, within bounds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from jaxroll.config import TokenizerConfig
from jaxroll.errors import ConfigError, DataError, JaxRollError
from jaxroll.records import Message
from jaxroll.run_paths import RunPaths
from jaxroll.text import tokenizers
from jaxroll.text.tokenizers import HFTokenizer
from tests.harness.resource_bounds import bounded, check_refusal

NESTED = "[" * 100_000 + "]" * 100_000
GOOD: dict[str, Any] = json.loads(Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).to_str())


def tokenizer(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


def model(**changes: Any) -> str:
    return tokenizer(model={**GOOD["model"], **changes})


TOKENIZERS = {
    "empty": "",
    "cut off": tokenizer()[:-20],
    "not UTF-8": b'{"version": "\xff"}',
    "null": "null",
    "a list": "[]",
    "no model": "{}",
    "nested": NESTED,
    "nested inside": tokenizer().replace('"1.0"', NESTED),
    "a vocabulary that is a list": model(vocab=["a"]),
    "no vocabulary": model(vocab={}),
    "negative ids": model(vocab={"a": -1}),
    "ids as floats": model(vocab={"a": 0.5}),
    "an id of 2**32 - 1": model(vocab={"a": 0, "</s>": 1, "b": 2**32 - 1}),
    "an id of 2**64": model(vocab={"a": 2**64}),
    "a charsmap that panics": tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "merges that panic": tokenizer(model={"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}),
    "an unknown model": tokenizer(model={"type": "Code", "vocab": {}}),
    "an invalid regular expression": tokenizer(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(tokenizer())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return tmp_path


def put(path: Path, content: str | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("content", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_hostile_tokenizer_is_refused(folder: Path, content: str | bytes) -> None:
    put(folder / "tokenizer.json", content)
    with bounded(), pytest.raises(ConfigError) as refused:
        HFTokenizer(folder)
    check_refusal(refused.value, "tokenizer.path", folder)


def test_a_tokenizer_that_is_too_large_is_not_read(folder: Path) -> None:
    os.truncate(folder / "tokenizer.json", 1 << 40)  # sparse
    with bounded(), pytest.raises(ConfigError) as refused:
        HFTokenizer(folder)
    check_refusal(refused.value, "tokenizer.path", "tokenizer.json")


def test_prompts_are_neither_cut_nor_filled_up_as_a_training_script_left_it(folder: Path) -> None:
    """A Fixed padding is memory at will, and a truncation trains on prompts without their ends."""
    fixed = {
        "strategy": {"Fixed": 10**8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    words = {"type": "Whitespace"}
    put(folder / "tokenizer.json", tokenizer(padding=fixed, truncation=cut, pre_tokenizer=words))
    with bounded():
        assert HFTokenizer(folder).encode("a b a") == [0, 0, 0]


SETTINGS = {
    "cut off": '{"eos_token": ',
    "not UTF-8": b'{"eos_token": "\xff"}',
    "nested": NESTED,
    "a list": "[]",
    "no such eos": '{"eos_token": "<end>"}',
    "eos as a number": '{"eos_token": 1}',
    "eos as a list": '{"eos_token": ["</s>"]}',
    "a template that is a number": '{"eos_token": "</s>", "chat_template": 3}',
    "templates that are numbers": '{"eos_token": "</s>", "chat_template": [{"name": "default", "template": 3}]}',
}
GENERATION = {
    "eos out of range": '{"eos_token_id": 17}',
    "a negative eos": '{"eos_token_id": -1}',
    "eos 1e400": '{"eos_token_id": 1e400}',
    "eos as text": '{"eos_token_id": "1"}',
    "eos as lists": '{"eos_token_id": [[1]]}',
    "no eos": '{"eos_token_id": []}',
    "nested": NESTED,
    "a number": "1",
}


@pytest.mark.parametrize("content", SETTINGS.values(), ids=SETTINGS)
def test_a_hostile_tokenizer_config_is_refused(folder: Path, content: str | bytes) -> None:
    put(folder / "tokenizer_config.json", content)
    with bounded(), pytest.raises(ConfigError) as refused:
        HFTokenizer(folder)
    check_refusal(refused.value, "tokenizer.path", folder)


@pytest.mark.parametrize("content", GENERATION.values(), ids=GENERATION)
def test_a_hostile_generation_config_is_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer_config.json").unlink()
    put(folder / "generation_config.json", content)
    with bounded(), pytest.raises(ConfigError) as refused:
        HFTokenizer(folder)
    check_refusal(refused.value, "tokenizer.path", folder)


def test_templates_in_a_list_that_are_no_objects_are_passed_over(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "chat_template": [1, "x", null]}')
    assert HFTokenizer(folder).render((Message("user", "hello"),))


def test_a_special_token_that_is_not_text_is_not_a_template_variable(folder: Path) -> None:
    pytest.importorskip("jinja2", reason="chat templates are an optional extra")
    settings = {"eos_token": "</s>", "bos_token": {"content": [1]}, "chat_template": "{{ bos_token }}{{ eos_token }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert HFTokenizer(folder).render((Message("user", "hello"),))


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_not_waited_for(folder: Path, file: str, make: Callable[[Path], None]) -> None:
    (folder / "tokenizer_config.json").unlink()
    if file == "chat_template.jinja":
        (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / file).unlink(missing_ok=True)
    make(folder / file)
    with bounded(), pytest.raises(ConfigError) as refused:
        HFTokenizer(folder)
    check_refusal(refused.value, "tokenizer.path", file)


@pytest.mark.parametrize("text", ["\ud800", "a" * 10 + "\udfff"])
def test_text_that_is_not_unicode_is_a_data_error(folder: Path, text: str) -> None:
    with pytest.raises(DataError) as refused:
        HFTokenizer(folder).encode(text)
    check_refusal(refused.value)


def test_a_tokenizer_that_knows_no_such_word_is_a_data_error(folder: Path) -> None:
    put(folder / "tokenizer.json", model(unk_token="none"))
    with pytest.raises(DataError) as refused:
        HFTokenizer(folder).encode("zebra\n" * 10**5)
    check_refusal(refused.value)


@pytest.mark.parametrize("content", ["", "{", "3", '["a"]', NESTED, '"\\ufffd"', '""', b'"\xff"'])
def test_a_hostile_alphabet_is_refused(tmp_path: Path, content: str | bytes) -> None:
    put(RunPaths(tmp_path).alphabet, content)
    with bounded(), pytest.raises(JaxRollError) as refused:
        tokenizers.of_run(tmp_path, TokenizerConfig(kind="char"))
    check_refusal(refused.value)
