"""Model sizes as data, for decoders of the Qwen3 architecture; conversion from and to config.json. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError

_DTYPES = ("float32", "bfloat16")
# Recomputed in the backward pass: nothing; whole layers; layers except products with parameters.
Remat = Literal["none", "layer", "dots"]


@dataclass(frozen=True)
class ModelSpec:
    """One decoder. Query head n reads key-value head n // (heads / kv_heads); `hidden` is the SwiGLU's inner width."""

    name: str
    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tied_embeddings: bool = True
    qk_norm: bool = True
    compute_dtype: str = "float32"
    remat: Remat = "none"  # what the backward pass recomputes instead of storing
    value_head: bool = False  # of a critic: one number per token instead of logits
    # Mixture of experts (0: one SwiGLU per layer); `hidden` is then the inner width of each expert.
    experts: int = 0
    experts_per_token: int = 0
    normalized_gates: bool = True  # the weights of a token's experts are divided by their sum

    def __post_init__(self) -> None:
        for key in _FROM_HUGGINGFACE:
            _check_size(f"model.{key}", getattr(self, key), key)
        for key in ("rope_theta", "norm_eps"):
            _check_number(f"model.{key}", getattr(self, key))
        for key in ("tied_embeddings", "qk_norm", "value_head", "normalized_gates"):
            _check_flag(f"model.{key}", getattr(self, key))
        self._check_experts()
        if not isinstance(self.name, str) or self.remat not in get_args(Remat):
            kinds = ", ".join(get_args(Remat))
            raise ConfigError("model", (self.name, self.remat), "invalid name or remat", f"remat is one of {kinds}.")
        if self.heads % self.kv_heads:
            raise ConfigError("model.kv_heads", self.kv_heads, f"does not divide the {self.heads} query heads")
        if self.head_dim % 2:
            raise ConfigError("model.head_dim", self.head_dim, "rotary embedding rotates pairs", "Use an even number.")
        if self.compute_dtype not in _DTYPES:
            raise ConfigError("model.dtype", self.compute_dtype, "unknown dtype", f"Known: {', '.join(_DTYPES)}.")

    def _check_experts(self) -> None:
        if self.experts == 0 == self.experts_per_token:
            return
        for key in ("experts", "experts_per_token"):
            _check_size(f"model.{key}", getattr(self, key), key)
        if not self.experts_per_token <= self.experts < _MOST_EXPERTS:
            reason = f"a token has {self.experts_per_token} experts"
            raise ConfigError("model.experts", self.experts, reason, f"Use at least as many and below {_MOST_EXPERTS}.")


_MOST_LAYERS, _MOST = 4096, 1 << 24  # limits of layers and of other sizes, against damaged or hostile files
_MOST_EXPERTS = 65_535  # choices are recorded as 16-bit numbers


def _check_size(key: str, value: Any, size: str) -> None:
    most = _MOST_LAYERS if size == "layers" else _MOST
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(key, value, f"must be at least 1, and a whole number of at most {most}")


def _check_number(key: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:  # NaN is refused, too
        raise ConfigError(key, value, "must be a number between 0 and 1e30")


def _check_flag(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(key, value, "must be true or false")


# The fields of ModelSpec, with their names in a config.json.
_FROM_HUGGINGFACE = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden": "intermediate_size",
}
_MOE_FROM_HUGGINGFACE = _FROM_HUGGINGFACE | {
    "hidden": "moe_intermediate_size",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}

_FAMILIES = {
    "nano": ModelSpec("nano", 64, 2, 32, 4, 2, 8, 96, rope_theta=1e4),
    "tiny": ModelSpec("tiny", 96, 3, 128, 4, 2, 32, 320, rope_theta=1e4),
    "tiny_moe": ModelSpec("tiny_moe", 96, 2, 64, 4, 2, 16, 48, rope_theta=1e4, experts=8, experts_per_token=2),
    "qwen3_0p6b": ModelSpec("qwen3_0p6b", 151_936, 28, 1024, 16, 8, 128, 3072, remat="layer"),
    "qwen3_1p7b": ModelSpec("qwen3_1p7b", 151_936, 28, 2048, 16, 8, 128, 6144, remat="layer"),
    "qwen3_8b": ModelSpec("qwen3_8b", 151_936, 36, 4096, 32, 8, 128, 12_288, tied_embeddings=False, remat="layer"),
    "qwen3_30b_a3b": ModelSpec(
        "qwen3_30b_a3b", 151_936, 48, 2048, 32, 4, 128, 768, tied_embeddings=False, remat="layer",
        experts=128, experts_per_token=8,
    ),
}  # fmt: skip


def names() -> tuple[str, ...]:
    """The names of the known sizes."""
    return tuple(_FAMILIES)


def spec(size: str, *, vocab_size: int | None = None, compute_dtype: str = "float32") -> ModelSpec:
    """The named size, with the vocabulary of the tokenizer; ConfigError for an unknown name."""
    if size not in _FAMILIES:
        raise ConfigError("model.size", size, "unknown size", f"Known: {', '.join(_FAMILIES)}.")
    family = _FAMILIES[size]
    return dataclasses.replace(family, vocab_size=vocab_size or family.vocab_size, compute_dtype=compute_dtype)


def from_huggingface(config: Mapping[str, Any], *, compute_dtype: str = "float32") -> ModelSpec:
    """The spec of a Qwen3 checkpoint from its parsed config.json; ConfigError for features not supported here."""
    moe = config.get("model_type") == _MOE
    if moe and "num_experts" not in config and "num_local_experts" in config:  # as transformers 5 writes it
        config = {**config, "num_experts": config["num_local_experts"]}
    sizes = _MOE_FROM_HUGGINGFACE if moe else _FROM_HUGGINGFACE
    for key, covered in (_COVERED | (_MOE_COVERED if moe else {})).items():
        if config.get(key, covered[0]) not in covered:
            raise _not_covered(key, config[key], str(covered))
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise _not_covered("layer_types", kinds, "full_attention")
    missing = [key for key in sizes.values() if key not in config]
    if missing:
        raise ConfigError("config.json", sorted(config), f"lacks {', '.join(missing)}", "Is this a Qwen3 checkpoint?")
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise _not_covered("rope_parameters", rope, "rope_type default")
    for ours, theirs in sizes.items():
        _check_size(f"config.json {theirs}", config[theirs], ours)
    rope_theta = config.get("rope_theta", rope.get("rope_theta", 1e4))
    norm_eps, tied = config.get("rms_norm_eps", 1e-6), config.get("tie_word_embeddings", False)
    _check_number("config.json rope_theta", rope_theta)
    _check_number("config.json rms_norm_eps", norm_eps)
    _check_flag("config.json tie_word_embeddings", tied)
    normalized = config.get("norm_topk_prob", False) if moe else True
    _check_flag("config.json norm_topk_prob", normalized)
    return ModelSpec(
        name=str(config.get("_name_or_path") or config.get("model_type", "qwen3")),
        rope_theta=float(rope_theta),
        tied_embeddings=tied,
        norm_eps=float(norm_eps),
        compute_dtype=compute_dtype,
        remat="layer",
        normalized_gates=normalized,
        **{ours: config[theirs] for ours, theirs in sizes.items()},
    )


def _not_covered(key: str, value: Any, covered: str) -> ConfigError:
    return ConfigError(f"config.json {key}", value, "not supported by this decoder", f"Supported: {covered}.")


def to_huggingface(spec: ModelSpec, dtype: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of this model with weights of `dtype`, read by transformers 4.51 and newer.

    Fields that the model lacks (token ids, the longest context) are taken from `base`, the original config.json.
    """
    fields = dict(base or {"max_position_embeddings": LONGEST_CONTEXT})
    for old in ("rope_theta", "torch_dtype", "rope_scaling", "num_local_experts"):
        fields.pop(old, None)
    sizes = _MOE_FROM_HUGGINGFACE if spec.experts else _FROM_HUGGINGFACE
    fields |= {theirs: getattr(spec, ours) for ours, theirs in sizes.items()}
    fields |= {key: covered[0] for key, covered in _COVERED.items() if key != "rope_scaling"}
    if spec.experts:
        fields |= {key: covered[0] for key, covered in _MOE_COVERED.items()} | {"model_type": _MOE}
        fields |= {"norm_topk_prob": spec.normalized_gates}
        fields.setdefault("intermediate_size", spec.hidden)  # of dense layers, of which the model has none
    rope = {"rope_type": "default", "rope_theta": spec.rope_theta}
    return fields | {
        "architectures": ["Qwen3MoeForCausalLM" if spec.experts else "Qwen3ForCausalLM"],
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "rope_theta": spec.rope_theta,  # read by transformers 4; transformers 5 reads rope_parameters
        "rope_parameters": rope,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


LONGEST_CONTEXT = 40_960  # Qwen3's value; the decoder does not depend on it

# Allowed values of a config.json under these keys (the first is the default).
_COVERED: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3", "qwen3_moe"),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "rope_scaling": (None,),
}
_MOE = "qwen3_moe"
_MOE_COVERED: dict[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}


def check_mesh(spec: ModelSpec, mesh: MeshConfig, key: str = "mesh") -> None:
    """Raise ConfigError when the mesh does not divide the model evenly."""
    # The rules would replicate such an axis, which is correct but not what a mesh is for. Key-value heads and
    # vocabulary may be replicated (fewer key-value heads than devices is common); query heads and hidden may not.
    for axis, size, what, count in (
        ("tensor", mesh.tensor, "query heads", spec.heads),
        ("tensor", mesh.tensor, "hidden units", spec.hidden),
        ("fsdp", mesh.fsdp, "of width", spec.width),
        ("expert", mesh.expert, "experts", spec.experts or 1),
    ):
        if count % size:
            fits = [n for n in range(1, size) if count % n == 0]
            raise ConfigError(
                f"{key}.{axis}", size, f"does not divide the {count} {what} of {spec.name}", f"Use one of {fits}."
            )


def parameter_count(spec: ModelSpec) -> int:
    """The number of parameters, computed from the sizes without JAX."""
    attention = spec.width * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads) + 2 * spec.head_dim * spec.qk_norm
    router = spec.width * spec.experts
    layer = attention + 3 * spec.width * spec.hidden * (spec.experts or 1) + router + 2 * spec.width
    head = spec.width if spec.value_head else 0 if spec.tied_embeddings else spec.vocab_size * spec.width
    return spec.layers * layer + spec.vocab_size * spec.width + head + spec.width


def active_parameter_count(spec: ModelSpec) -> int:
    """The number of parameters that one token is multiplied with: of all experts only its own count."""
    idle = spec.experts - spec.experts_per_token
    return parameter_count(spec) - spec.layers * 3 * spec.width * spec.hidden * idle
