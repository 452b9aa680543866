"""Sizes as data: arithmetic, published figures, a config.json read back, and what is refused."""

import dataclasses

import pytest

from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError
from jaxroll.models import families, hf_config, params

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


ONE_OF_EACH = ("nano", "qwen3_8b", "qwen2p5_7b", "llama3p2_1b", "mistral_7b", "gemma3_27b")


@pytest.mark.parametrize("size", ONE_OF_EACH)
def test_the_module_has_as_many_parameters_as_arithmetic_says(size):
    whole = families.spec(size)
    spec = dataclasses.replace(whole, layers=2, windows=whole.windows[4:6])
    assert sum(leaf.size for leaf in params.abstract(spec).values()) == families.parameter_count(spec)


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ("nano", 0.027), ("tiny", 0.53), ("qwen3_0p6b", 596), ("qwen3_1p7b", 1721), ("qwen3_4b", 4022),
        ("qwen3_8b", 8191), ("qwen3_14b", 14_768), ("qwen3_32b", 32_762), ("qwen2p5_0p5b", 494), ("qwen2p5_1p5b", 1544),
        ("qwen2p5_3b", 3086), ("qwen2p5_7b", 7616), ("qwen2p5_14b", 14_770), ("qwen2p5_32b", 32_764),
        ("qwen2p5_72b", 72_706), ("llama3p2_1b", 1236), ("llama3p2_3b", 3213), ("llama3p1_8b", 8030),
        ("llama3p1_70b", 70_554), ("mistral_7b", 7248), ("gemma3_270m", 268), ("gemma3_1b", 1000), ("gemma3_4b", 3880),
        ("gemma3_12b", 11_766), ("gemma3_27b", 27_009), ("qwen3_30b_a3b", 30_532),
    ],
)  # fmt: skip
def test_sizes_are_what_their_names_promise(size, millions):
    """Published counts, in millions; of Gemma 3 from 4B on, without the model of images."""
    assert families.parameter_count(families.spec(size)) / 1e6 == pytest.approx(millions, rel=0.01)


def test_every_size_but_that_of_14_heads_splits_over_four():
    refused = []
    for size in families.names():
        try:
            families.check_mesh(families.spec(size), MeshConfig(fsdp=4, tensor=4))
        except ConfigError:
            refused.append(size)
    assert refused == ["qwen2p5_0p5b"]


def test_the_tokenizer_decides_the_vocabulary():
    assert families.spec("tiny", vocab_size=72, compute_dtype="bfloat16") == dataclasses.replace(
        families.spec("tiny"), vocab_size=72, compute_dtype="bfloat16"
    )


def test_a_hugging_face_config_gives_the_published_size():
    read = hf_config.from_huggingface(QWEN3_0P6B)
    assert read == dataclasses.replace(families.spec("qwen3_0p6b"), name="qwen3")
    newer = {**QWEN3_0P6B, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
    del newer["rope_theta"]
    assert hf_config.from_huggingface(newer) == read


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type = 'gpt2'.*Known: gemma3, gemma3_text, llama, mistral, qwen2, qwen3"),
        ({"model_type": ["qwen3"]}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias = True: not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0: not supported"),
        ({"use_qk_norm": True}, "config.json use_qk_norm = True: not an option that JaxRoll knows for qwen3"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar = 256: not an option .* qwen3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling = 'dynamic'.*llama3, yarn"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling factor: "),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "rope_scaling = 'mscale'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 0}},
            "context = 0",
        ),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\]"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "= 'partial_rotary_factor'"),
        ({"rope_scaling": {"mrope_section": [16, 24, 24]}}, "rope_scaling = 'mrope_section'"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window = 0"),
        ({"layer_types": ["sliding_attention"] * 28}, "layer_types"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 27}, "for each of 28 layers"),
        ({"head_dim": 127}, "head_dim = 127"),
    ],
)
def test_a_config_that_is_not_covered_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        hf_config.from_huggingface({**QWEN3_0P6B, **change})


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_every_family_refuses_an_option_that_it_does_not_know(family: str) -> None:
    size = next(size for size in families.names() if families.spec(size).family == family or family in size)
    config = hf_config.to_huggingface(families.spec(size), "float32")
    assert config["model_type"] == family
    rope = config["rope_parameters"]
    for place in (config, rope, *(one for one in rope.values() if isinstance(one, dict))):
        place["surprise"] = 1
        with pytest.raises(ConfigError, match="surprise"):
            hf_config.from_huggingface(config)
        del place["surprise"]
    hf_config.from_huggingface(config)


def test_a_model_of_more_than_text_and_images_is_refused() -> None:
    config = {"model_type": "gemma3", "text_config": {}, "audio_config": {}}
    with pytest.raises(ConfigError, match=r"audio_config = \{\}: not an option that JaxRoll knows for gemma3"):
        hf_config.from_huggingface(config)


def test_options_of_a_config_are_read() -> None:
    """As transformers 5 derives them (`configuration_*.py`), for keys that a config.json has or leaves out."""
    read = lambda **change: hf_config.from_huggingface({**QWEN3_0P6B, **change})  # noqa: E731
    assert read(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 1.0}) == read()
    assert read(use_sliding_window=True, sliding_window=9, max_window_layers=26).windows == (0,) * 26 + (9,) * 2
    mistral = {key: value for key, value in QWEN3_0P6B.items() if key != "use_sliding_window"} | {
        "model_type": "mistral"
    }
    assert hf_config.from_huggingface(mistral).windows == (4096,) * 28
    assert hf_config.from_huggingface({**mistral, "sliding_window": None}).windows == ()
    stretched = read(rope_scaling={"rope_type": "yarn", "factor": 4.0}, max_position_embeddings=99).rope_scaling
    assert (stretched.kind, stretched.context, stretched.low, stretched.high) == ("yarn", 99, 1.0, 32.0)
    assert stretched.attention_factor == pytest.approx(1.1386294)  # 0.1·ln 4 + 1
    llama = {**mistral, "model_type": "llama"}
    del llama["head_dim"], llama["num_key_value_heads"]
    assert (hf_config.from_huggingface(llama).head_dim, hf_config.from_huggingface(llama).kv_heads) == (64, 16)
    # The whole text_config of google/gemma-3-4b-it: all other keys have the defaults of transformers.
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    named = dataclasses.replace(families.spec("gemma3_4b"), name="gemma3_text")
    assert hf_config.from_huggingface({"model_type": "gemma3", "text_config": text, "vision_config": {}}) == named


@pytest.mark.parametrize("size", families.names())
def test_a_config_that_is_written_is_read_back(size) -> None:
    spec = families.spec(size)
    written = hf_config.to_huggingface(spec, "float32")
    read = hf_config.from_huggingface(written)
    assert read == dataclasses.replace(spec, name=read.name, remat="layer")
    assert isinstance(written.get("query_pre_attn_scalar", 0), int), "transformers 5 refuses 256.0"
    if spec.rope_scaling:  # for transformers 4, which does not know rope_parameters
        del written["rope_parameters"]
        assert hf_config.from_huggingface(written) == read


def test_a_model_that_its_family_does_not_describe_is_not_exported() -> None:
    with pytest.raises(ConfigError, match=r"model\.post_norms = True: a config\.json of qwen3"):
        hf_config.to_huggingface(dataclasses.replace(families.spec("nano"), post_norms=True), "float32")


def test_a_config_without_a_key_says_which():
    with pytest.raises(ConfigError, match="lacks num_key_value_heads"):
        hf_config.from_huggingface({key: value for key, value in QWEN3_0P6B.items() if key != "num_key_value_heads"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "does not divide the 4 query heads"),
        ({"head_dim": 7}, "rotates pairs"),
        ({"layers": 0}, r"model\.layers = 0"),
        ({"compute_dtype": "float16"}, "unknown dtype"),
        ({"windows": (4,)}, "holds 1 windows for 2 layers"),
        ({"windows": (4, -1)}, "windows = -1"),
        ({"activation": "relu"}, "unknown activation"),
        ({"query_scalar": -1.0}, "query_scalar"),
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
