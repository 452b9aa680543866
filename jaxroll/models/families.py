"""Model families and sizes as data (see `hf_config` for config.json). No JAX.

All families are one decoder with different options (`spec.ModelSpec`). A family states the options that it fixes, the
values that transformers assumes for keys that a config.json leaves out, and the keys that it knows. A key is read,
fixed to supported values, or metadata; any other is refused, since it may change what the model computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxroll.errors import ConfigError
from jaxroll.models.spec import (
    ModelSpec,
    RopeScaling,
    active_parameter_count,
    check_mesh,
    check_routing,
    parameter_count,
)

__all__ = [
    "FAMILIES",
    "ModelSpec",
    "active_parameter_count",
    "check_mesh",
    "check_routing",
    "names",
    "parameter_count",
    "spec",
]


# The fields of ModelSpec, with their names in a config.json.
SIZES = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden": "intermediate_size",
}
EXPERTS = {"hidden": "moe_intermediate_size", "experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_READ = frozenset({*SIZES.values(), *ROPE, "rms_norm_eps", "tie_word_embeddings", "model_type", "layer_types"})
# Keys that change nothing in the model's computation: provenance, token ids, generation, initialization, training.
METADATA = frozenset({
    "_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "max_position_embeddings",
    "initializer_range", "use_cache", "cache_implementation", "_attn_implementation_autoset", "attn_implementation",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "tokenizer_class", "unsloth_fixed", "unsloth_version", "id2label", "label2id", "problem_type", "return_dict",
    "output_hidden_states", "output_attentions", "pretraining_tp", "task_specific_params", "finetuning_task",
    "chunk_size_feed_forward",
})  # fmt: skip
IMAGES = frozenset({
    "vision_config", "text_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
    "model_type", "tie_word_embeddings",
})  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family of models. `traits` are its fields of ModelSpec; the other mappings are keys of a config.json.

    `defaults` hold for keys that a config.json leaves out, `fixed` lists the supported values (the first is written on
    export, unless it is None), and `read` names further keys that are read (all families have those of
    sizes, rotary embedding and layer types).
    """

    model_type: str
    architecture: str
    traits: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    required: tuple[str, ...] = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads",
                                 "intermediate_size")  # fmt: skip
    sliding_key: str = ""  # whose value decides which layers have the window, without layer_types
    sizes: Mapping[str, str] = field(default_factory=lambda: SIZES)

    @property
    def keys(self) -> frozenset[str]:
        """The keys of a config.json that this family knows."""
        return _READ | METADATA | self.read | self.fixed.keys() | self.defaults.keys()


# Options of some families that no model here has; None is written nowhere.
_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False), "mlp_bias": (None, False), "use_mrope": (None, False),
    "rope_interleaved": (None, False), "use_bidirectional_attention": (None, False), "attn_logit_softcapping": (None,),
    "attention_dropout": (0.0, None), "quantization_config": (None,),
}  # fmt: skip
_SILU = _OFF | {"hidden_act": ("silu",)}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA3 = {
    "norm_offset": True, "post_norms": True, "scaled_embeddings": True, "activation": "gelu", "qk_norm": True,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "qwen2", "Qwen2ForCausalLM", {"attention_bias": True, "qk_norm": False}, _QWEN_WINDOW,
            _SILU, sliding_key="max_window_layers",
        ),
        Family(
            "qwen3", "Qwen3ForCausalLM", {"qk_norm": True}, _QWEN_WINDOW, _SILU | {"attention_bias": (False, None)},
            required=tuple(SIZES.values()), sliding_key="max_window_layers",
        ),
        Family(
            "qwen3_moe", "Qwen3MoeForCausalLM", {"qk_norm": True}, _QWEN_WINDOW | {"norm_topk_prob": False},
            _SILU | {"attention_bias": (False, None), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
            frozenset({"num_local_experts", *EXPERTS.values(), "output_router_logits", "router_aux_loss_coef"}),
            required=tuple((SIZES | EXPERTS).values()), sliding_key="max_window_layers", sizes=SIZES | EXPERTS,
        ),
        Family(
            "llama", "LlamaForCausalLM", {"qk_norm": False}, {},
            _SILU | {"attention_bias": (False, None), "mlp_bias": (False, None)},
        ),
        Family(
            "mistral", "MistralForCausalLM", {"qk_norm": False}, {"sliding_window": 4096, "num_key_value_heads": 8},
            _SILU,
        ),
        Family(
            "gemma3_text", "Gemma3ForCausalLM", _GEMMA3,
            {
                "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
                "sliding_window_pattern": 6, "_sliding_window_pattern": None, "rope_theta": 1e6,
                "rope_local_base_freq": 1e4, "final_logit_softcapping": None,
            },
            _OFF | {
                "hidden_activation": ("gelu_pytorch_tanh",), "hidden_act": (None, "gelu_pytorch_tanh"),
                "attention_bias": (False, None),
            },
            required=("num_hidden_layers", "hidden_size", "intermediate_size"), sliding_key="sliding_window_pattern",
        ),
    )
}  # fmt: skip
MOE = "qwen3_moe"
TEXT_PARTS = {"gemma3": "gemma3_text"}  # models of text and images, with the family of their text model


# --- sizes


def _sized(family: str, name: str, *sizes: int, **options: Any) -> ModelSpec:
    fields = {"remat": "layer"} | dict(FAMILIES[family].traits) | options
    return ModelSpec(name, *sizes, family=family, **fields)  # type: ignore[arg-type]


def _llama(name: str, *sizes: int, stretch: float, tied: bool = False) -> ModelSpec:
    scaling = RopeScaling("llama3", stretch, context=8192)
    return _sized("llama", name, 128_256, *sizes, rope_theta=5e5, norm_eps=1e-5, rope_scaling=scaling,
                  tied_embeddings=tied)  # fmt: skip


def _gemma(name: str, *sizes: int, window: int, stretch: float = 0.0, **options: Any) -> ModelSpec:
    """A Gemma 3, in which every sixth layer sees all tokens."""
    windows = tuple(0 if layer % 6 == 0 else window for layer in range(1, sizes[1] + 1))
    scaling = RopeScaling("linear", stretch) if stretch else None
    options = {"query_scalar": 256.0} | options
    return _sized("gemma3_text", name, *sizes, windows=windows, rope_scaling=scaling, local_rope_theta=1e4, **options)


_UNTIED = {"tied_embeddings": False}
_NAMED: Mapping[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec("nano", 64, 2, 32, 4, 2, 8, 96, rope_theta=1e4),
        ModelSpec("tiny", 96, 3, 128, 4, 2, 32, 320, rope_theta=1e4),
        _sized(
            "qwen3_moe",
            "tiny_moe",
            96,
            2,
            64,
            4,
            2,
            16,
            48,
            rope_theta=1e4,
            remat="none",
            experts=8,
            experts_per_token=2,
        ),
        #                                  vocabulary, layers, width, heads, KV heads, head, hidden
        _sized("qwen3", "qwen3_0p6b", 151_936, 28, 1024, 16, 8, 128, 3072),
        _sized("qwen3", "qwen3_1p7b", 151_936, 28, 2048, 16, 8, 128, 6144),
        _sized("qwen3", "qwen3_4b", 151_936, 36, 2560, 32, 8, 128, 9728),
        _sized("qwen3", "qwen3_8b", 151_936, 36, 4096, 32, 8, 128, 12_288, **_UNTIED),
        _sized("qwen3", "qwen3_14b", 151_936, 40, 5120, 40, 8, 128, 17_408, **_UNTIED),
        _sized("qwen3", "qwen3_32b", 151_936, 64, 5120, 64, 8, 128, 25_600, **_UNTIED),
        _sized(
            "qwen3_moe",
            "qwen3_30b_a3b",
            151_936,
            48,
            2048,
            32,
            4,
            128,
            768,
            **_UNTIED,
            experts=128,
            experts_per_token=8,
        ),
        _sized("qwen2", "qwen2p5_0p5b", 151_936, 24, 896, 14, 2, 64, 4864),
        _sized("qwen2", "qwen2p5_1p5b", 151_936, 28, 1536, 12, 2, 128, 8960),
        _sized("qwen2", "qwen2p5_3b", 151_936, 36, 2048, 16, 2, 128, 11_008),
        _sized("qwen2", "qwen2p5_7b", 152_064, 28, 3584, 28, 4, 128, 18_944, **_UNTIED),
        _sized("qwen2", "qwen2p5_14b", 152_064, 48, 5120, 40, 8, 128, 13_824, **_UNTIED),
        _sized("qwen2", "qwen2p5_32b", 152_064, 64, 5120, 40, 8, 128, 27_648, **_UNTIED),
        _sized("qwen2", "qwen2p5_72b", 152_064, 80, 8192, 64, 8, 128, 29_568, **_UNTIED),
        _llama("llama3p2_1b", 16, 2048, 32, 8, 64, 8192, stretch=32.0, tied=True),
        _llama("llama3p2_3b", 28, 3072, 24, 8, 128, 8192, stretch=32.0, tied=True),
        _llama("llama3p1_8b", 32, 4096, 32, 8, 128, 14_336, stretch=8.0),
        _llama("llama3p1_70b", 80, 8192, 64, 8, 128, 28_672, stretch=8.0),
        _sized("mistral", "mistral_7b", 32_768, 32, 4096, 32, 8, 128, 14_336, norm_eps=1e-5, **_UNTIED),
        _gemma("gemma3_270m", 262_144, 18, 640, 4, 1, 256, 2048, window=512),
        _gemma("gemma3_1b", 262_144, 26, 1152, 4, 1, 256, 6912, window=512),
        _gemma("gemma3_4b", 262_208, 34, 2560, 8, 4, 256, 10_240, window=1024, stretch=8.0),
        _gemma("gemma3_12b", 262_208, 48, 3840, 16, 8, 256, 15_360, window=1024, stretch=8.0),
        _gemma("gemma3_27b", 262_208, 62, 5376, 32, 16, 128, 21_504, window=1024, stretch=8.0, query_scalar=168.0),
    )
}


def names() -> tuple[str, ...]:
    """The names of the known sizes."""
    return tuple(_NAMED)


def spec(size: str, *, vocab_size: int | None = None, compute_dtype: str = "float32") -> ModelSpec:
    """The named size, with the vocabulary of the tokenizer; ConfigError for an unknown name."""
    if size not in _NAMED:
        raise ConfigError("model.size", size, "unknown size", f"Known: {', '.join(_NAMED)}.")
    named = _NAMED[size]
    return dataclasses.replace(named, vocab_size=vocab_size or named.vocab_size, compute_dtype=compute_dtype)
