"""Safetensors files, their index and a model's config.json made to break a reader are refused in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxroll.config import ModelConfig
from jaxroll.errors import ConfigError, DataError
from jaxroll.learner import weights
from jaxroll.models import folders
from jaxroll.models.families import ModelSpec
from tests.harness.resource_bounds import bounded, check_refusal

NESTED = "[" * 100_000 + "]" * 100_000


def entry(start: int = 0, end: int = 8, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def header(**tensors: Any) -> str:
    return json.dumps(tensors)


def file_of(text: str | bytes, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


HEADERS = {
    "empty file": b"",
    "length only": (100).to_bytes(8, "little"),
    "length 2**63": file_of("{}", length=2**63),
    "length 2**64 - 1": file_of("{}", length=2**64 - 1),
    "length beyond the file": file_of(header(w=entry()), length=30 << 20),
    "length 0": file_of("", length=0),
    "not JSON": file_of("{" * 64),
    "not UTF-8": file_of(b'{"\xff\xfe": 3}'),
    "a list": file_of("[]"),
    "a number": file_of("17"),
    "nested lists": file_of(NESTED),
    "a nested shape": file_of(f'{{"w": {{"dtype": "F32", "shape": {NESTED}, "data_offsets": [0, 8]}}}}'),
    "nested metadata": file_of(f'{{"__metadata__": {NESTED}}}', b""),
    "metadata of numbers": file_of('{"__metadata__": {"a": 1}}', b""),
    "1e400 as a size": file_of('{"w": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 8]}}'),
    "1e400 as an offset": file_of('{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e400]}}'),
    "NaN as a size": file_of('{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}'),
    "5000 digits": file_of(f'{{"w": {{"dtype": "F32", "shape": [{"9" * 5000}], "data_offsets": [0, 8]}}}}'),
    "negative sizes": file_of(header(w=entry(shape=[-1, -2]))),
    "a negative size of an empty tensor": file_of(header(w=entry(0, 0, shape=[0, -1])), b""),
    "a size of 2**64": file_of(header(w=entry(shape=[2**64]))),
    "an empty tensor of 2**96 columns": file_of(header(w=entry(0, 0, shape=[0, 2**48, 2**48])), b""),
    "100 dimensions": file_of(header(w=entry(0, 4, shape=[1] * 100)), b"\0" * 4),
    "float sizes": file_of(header(w=entry(shape=[2.5]))),
    "sizes as text": file_of(header(w=entry(shape="22"))),
    "a shape of booleans": file_of(header(w=entry(shape=[True, True], end=4)), b"\0" * 4),
    "float offsets": file_of(header(w=entry(0.0, 8.5))),
    "negative offsets": file_of(header(w=entry(-8, 0))),
    "three offsets": file_of('{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 16]}}'),
    "offsets as a number": file_of('{"w": {"dtype": "F32", "shape": [2], "data_offsets": 8}}'),
    "offsets out of the file": file_of(header(w=entry(2**40, 2**40 + 8))),
    "overlapping tensors": file_of(header(a=entry(0, 8), b=entry(4, 12)), b"\0" * 12),
    "the same bytes twice": file_of(header(a=entry(0, 8), b=entry(0, 8))),
    "a hole": file_of(header(a=entry(0, 8), b=entry(16, 24)), b"\0" * 24),
    "bytes behind": file_of(header(w=entry()), b"\0" * 16),
    "bytes missing": file_of(header(w=entry()), b"\0" * 4),
    "an unknown dtype": file_of(header(w=entry(dtype="F8_E4M3"))),
    "a dtype of 10**6 letters": file_of(header(w=entry(dtype="F" * 10**6))),
    "a list as dtype": file_of(header(w=entry(dtype=["F32"]))),
    "a key twice": file_of(
        '{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
        '"w": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}'
    ),
    "an entry that is null": file_of('{"w": null}'),
    "a key too many": file_of('{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "code": "x"}}'),
    "no shape": file_of('{"w": {"dtype": "F32", "data_offsets": [0, 8]}}'),
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS)
def test_a_hostile_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with bounded(16 << 20), pytest.raises(DataError) as refused:
        folders.opened(path)
    check_refusal(refused.value, path.name)
    with pytest.raises(ConfigError) as told:
        folders.weight_tensors(tmp_path)
    check_refusal(told.value, "model.path", tmp_path)


def test_a_header_costs_memory_in_proportion_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(f"[{'[],' * (4 << 20)}[]]"))  # 12 MiB, and 200 MiB as Python objects
    with bounded(memory_bytes=40 << 20), pytest.raises(DataError):
        folders.opened(path)


def test_files_of_the_reference_implementation_are_read(tmp_path: Path) -> None:
    reference = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 4), np.float32), "c": np.float32(3)}
    reference.save_file({name: np.asarray(value) for name, value in arrays.items()}, tmp_path / "model.safetensors")
    found = folders.opened(tmp_path / "model.safetensors")
    assert {name: found[name].tolist() for name in found} == {name: value.tolist() for name, value in arrays.items()}


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / "model.safetensors")


def _device(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("/dev/zero")


def _folder(folder: Path) -> None:
    (folder / "model.safetensors").mkdir()


def _loop(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to(folder / "model.safetensors")


def _shard_fifo(folder: Path) -> None:
    os.mkfifo(folder / "one.safetensors")
    (folder / folders.INDEX).write_text(json.dumps({"weight_map": {"w": "one.safetensors"}}))


def _index_fifo(folder: Path) -> None:
    os.mkfifo(folder / folders.INDEX)


@pytest.mark.parametrize("make", [_fifo, _device, _folder, _loop, _shard_fifo, _index_fifo])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    with bounded(), pytest.raises(ConfigError) as refused:
        folders.weight_tensors(tmp_path)
    check_refusal(refused.value, "model.path", tmp_path)


def _indexed(weight_map: Any) -> str:
    return json.dumps({"metadata": {}, "weight_map": weight_map})


INDICES = {
    "not JSON": "{",
    "not UTF-8": b'{"weight_map": "\xff"}',
    "nested": NESTED,
    "a list": "[]",
    "null": "null",
    "no map": "{}",
    "a map of numbers": _indexed({"w": 3}),
    "a list of files": _indexed(["one.safetensors"]),
    "a missing shard": _indexed({"w": "two.safetensors"}),
    "a file above": _indexed({"w": "../one.safetensors"}),
    "a file elsewhere": _indexed({"w": "/etc/passwd"}),
    "the folder above": _indexed({"w": ".."}),
    "no name": _indexed({"w": ""}),
    "a NUL": _indexed({"w": "one.safetensors\0"}),
    "a surrogate": '{"weight_map": {"w": "\\ud800"}}',
    "a name of 10**5 letters": _indexed({"w": "a" * 10**5}),
    "a tensor that its shard lacks": _indexed({"v": "one.safetensors"}),
}


@pytest.mark.parametrize("content", INDICES.values(), ids=INDICES)
def test_a_hostile_index_is_refused(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / "one.safetensors").write_bytes(file_of(header(w=entry())))
    (tmp_path / folders.INDEX).write_bytes(content if isinstance(content, bytes) else content.encode())
    with bounded(), pytest.raises(ConfigError) as refused:
        folders.weight_tensors(tmp_path)
    check_refusal(refused.value, "model.path", tmp_path)


QWEN3 = {
    "model_type": "qwen3", "vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 96, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}  # fmt: skip


def _config(**changes: Any) -> str:
    return json.dumps({**QWEN3, **changes})


CONFIGS = {
    "empty": "",
    "not JSON": "{",
    "not UTF-8": b'{"model_type": "\xff"}',
    "nested": f'{{"layer_types": {NESTED}}}',
    "a list": "[]",
    "10**12 layers": _config(num_hidden_layers=10**12),
    "5000 digits of layers": _config().replace('"num_hidden_layers": 2', f'"num_hidden_layers": {"9" * 5000}'),
    "4000 digits of layers": _config().replace('"num_hidden_layers": 2', f'"num_hidden_layers": {"9" * 4000}'),
    "1e400 layers": _config().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1e400'),
    "negative layers": _config(num_hidden_layers=-1),
    "2.5 layers": _config(num_hidden_layers=2.5),
    "true layers": _config(num_hidden_layers=True),
    "layers as text": _config(num_hidden_layers="2"),
    "layers as a list": _config(num_hidden_layers=[2]),
    "no layers": _config(num_hidden_layers=None),
    "NaN as width": _config(hidden_size=float("nan")),
    "a vocabulary of 2**62": _config(vocab_size=2**62),
    "no heads": _config(num_attention_heads=0),
    "no key-value heads": _config(num_key_value_heads=0),
    "an odd head": _config(head_dim=7),
    "rope_theta NaN": _config(rope_theta=float("nan")),
    "rope_theta infinite": _config(rope_theta=float("inf")),
    "rope_theta of 400 digits": _config(rope_theta=10**400),
    "rope_theta as text": _config(rope_theta="1e6"),
    "rope_theta as an object": _config(rope_theta={}),
    "an epsilon of -1": _config(rms_norm_eps=-1),
    "an epsilon as a list": _config(rms_norm_eps=[]),
    "rope_parameters as a list": _config(rope_parameters=["default"]),
    "an unhashable rope_type": _config(rope_parameters={"rope_type": {}}),
    "layer_types as objects": _config(layer_types=[{}]),
    "layer_types as a number": _config(layer_types=3),
    "tied as text": _config(tie_word_embeddings="no"),
    "a model_type of 10**6 letters": _config(model_type="q" * 10**6),
    "a model_type as a list": _config(model_type=["qwen3"]),
    "10**5 unknown keys and no sizes": json.dumps({f"k{i}": i for i in range(10**5)}),
    "17 MB": json.dumps({"a": "b" * (17 << 20)}),
}


@pytest.mark.parametrize("content", CONFIGS.values(), ids=CONFIGS)
def test_a_hostile_config_is_refused(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / folders.CONFIG_FILE).write_bytes(content if isinstance(content, bytes) else content.encode())
    with bounded(), pytest.raises(ConfigError) as refused:
        folders.described(tmp_path)
    check_refusal(refused.value)


def _spec(**changes: Any) -> str:
    spec = ModelSpec("own", 64, 2, 32, 4, 2, 8, 96)
    return json.dumps({**vars(spec), **changes})


SPECS = {
    "10**12 layers": _spec(layers=10**12),
    "2.5 layers": _spec(layers=2.5),
    "layers as text": _spec(layers="2"),
    "no layers": _spec(layers=None),
    "an unknown key": _spec(code="x"),
    "a key missing": '{"name": "own"}',
    "rope_theta NaN": _spec(rope_theta=float("nan")),
    "qk_norm as text": _spec(qk_norm="no"),
    "a remat that there is not": _spec(remat="all"),
    "a name that is not a string": _spec(name=[1]),
    "nested": NESTED,
    "a list": "[1]",
}


@pytest.mark.parametrize("content", SPECS.values(), ids=SPECS)
def test_a_hostile_model_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / folders.MODEL_FILE).write_text(content)
    with bounded(), pytest.raises(ConfigError) as refused:
        folders.described(tmp_path)
    check_refusal(refused.value)


@pytest.mark.parametrize("layers", [512, pytest.param(4096, marks=pytest.mark.soak)])
def test_a_config_with_many_layers_and_no_such_weights_is_refused_soon(tmp_path: Path, layers: int) -> None:
    (tmp_path / folders.CONFIG_FILE).write_text(_config(num_hidden_layers=layers, hidden_size=1 << 24))
    (tmp_path / folders.SINGLE).write_bytes(file_of(header(w=entry())))
    config = ModelConfig(path=str(tmp_path))
    with bounded(), pytest.raises(ConfigError) as refused:
        folders.check_weights(config, folders.spec(config, 8))
    check_refusal(refused.value, "model.path")


def test_a_value_of_an_error_is_shown_in_part() -> None:
    check_refusal(ConfigError("key", "x" * 10**6, "reason", "remedy"), "key")
    check_refusal(ConfigError("key", 10**5000, "reason", "remedy"), "key")


@pytest.mark.parametrize("content", ["", "{", NESTED, "[1]", '{"a": 1' + "0" * 5000 + "}"])
def test_a_hostile_warm_start_is_refused(tmp_path: Path, content: str) -> None:
    for name in (folders.MODEL_FILE, "text.json", folders.SINGLE):
        (tmp_path / name).write_text(content)
    for read in (weights.model_spec, weights.tokenizer, weights.load):
        with bounded(), pytest.raises(ConfigError) as refused:
            read(tmp_path)
        check_refusal(refused.value, "weights", tmp_path)
