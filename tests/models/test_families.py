"""Sizes as data: arithmetic, published figures, a config.json read back, and what is refused."""

import dataclasses

import pytest

from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError
from jaxroll.models import families, params

QWEN3_0P6B = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize("size", families.names())
def test_the_module_has_as_many_parameters_as_arithmetic_says(size):
    spec = families.spec(size)
    assert sum(leaf.size for leaf in params.abstract(spec).values()) == families.parameter_count(spec)


@pytest.mark.parametrize(
    ("size", "millions"),
    [("nano", 0.027), ("tiny", 0.53), ("qwen3_0p6b", 596), ("qwen3_1p7b", 1721), ("qwen3_8b", 8191)],
)
def test_sizes_are_what_their_names_promise(size, millions):
    assert families.parameter_count(families.spec(size)) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("size", families.names())
def test_every_size_splits_over_four(size):
    families.check_mesh(families.spec(size), MeshConfig(fsdp=4, tensor=4))


def test_the_tokenizer_decides_the_vocabulary():
    assert families.spec("tiny", vocab_size=72, compute_dtype="bfloat16") == dataclasses.replace(
        families.spec("tiny"), vocab_size=72, compute_dtype="bfloat16"
    )


def test_a_hugging_face_config_gives_the_published_size():
    read = families.from_huggingface(QWEN3_0P6B)
    assert read == dataclasses.replace(families.spec("qwen3_0p6b"), name="qwen3")
    newer = {**QWEN3_0P6B, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
    del newer["rope_theta"]
    assert families.from_huggingface(newer) == read


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type = 'llama'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "rope_type"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"head_dim": 127}, "head_dim = 127"),
    ],
)
def test_a_config_that_is_not_covered_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        families.from_huggingface({**QWEN3_0P6B, **change})


def test_a_config_without_a_key_says_which():
    with pytest.raises(ConfigError, match="lacks num_key_value_heads"):
        families.from_huggingface({key: value for key, value in QWEN3_0P6B.items() if key != "num_key_value_heads"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "does not divide the 4 query heads"),
        ({"head_dim": 7}, "rotates pairs"),
        ({"layers": 0}, r"model\.layers = 0"),
        ({"compute_dtype": "float16"}, "unknown dtype"),
    ],
)
def test_an_impossible_model_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(families.spec("nano"), **change)


def test_an_unknown_size_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"model\.size = 'tyni'.*tiny"):
        families.spec("tyni")


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            MeshConfig(tensor=8),
            r"sampler\.mesh\.tensor = 8: does not divide the 4 query heads of nano\. Use one of \[1, 2, 4\]",
        ),
        (MeshConfig(fsdp=5), r"sampler\.mesh\.fsdp = 5: does not divide the 32 of width"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(mesh, message):
    with pytest.raises(ConfigError, match=message):
        families.check_mesh(families.spec("nano"), mesh, "sampler.mesh")
