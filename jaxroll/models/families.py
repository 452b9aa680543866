"""One decoder as data: its sizes and the options in which families differ; the known families and sizes. No JAX.

All families are one decoder with different options (`spec.ModelSpec`). A family states the options that it fixes, the
values that transformers assumes for keys that a config.json leaves out, and the keys that it knows. A key is read,
fixed to supported values, or metadata; any other is refused, since it may change what the model computes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jaxroll.config import Config, MeshConfig
from jaxroll.config.derived import episode_tokens, max_message_bytes
from jaxroll.config.rules import MAX_MEMBER_MB, TOKEN_BYTES
from jaxroll.errors import ConfigError

# --- One decoder as data: its sizes, and the options in which model families differ; the known families. No JAX

_DTYPES = ("float32", "bfloat16")
# Recomputed in the backward pass: nothing; layers; all but products with parameters; layers from inputs on the host.
Remat = Literal["none", "layer", "dots", "offload"]
Activation = Literal["silu", "gelu"]  # gelu: the tanh approximation
Stretch = Literal["linear", "llama3", "yarn"]
_MOST_LAYERS, _MOST = 4096, 1 << 24  # limits of layers and of other sizes, against damaged or hostile files
_MOST_EXPERTS = 65_535  # choices are recorded as 16-bit numbers
SIZE_KEYS = ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "hidden")


@dataclass(frozen=True)
class RopeScaling:
    """Lower rotary frequencies, for contexts that are `factor` times longer than the `context` of pretraining.

    `linear` divides every frequency by `factor`. The others divide the frequencies that turn less than `low` times
    within `context`, keep those that turn more than `high` times, and interpolate between: `llama3` by that number,
    `yarn` by index (Peng et al., arXiv 2309.00071). Cos and sin are multiplied by `attention_factor`.
    """

    kind: Stretch
    factor: float
    context: int = 0
    low: float = 1.0
    high: float = 4.0
    attention_factor: float = 1.0
    truncate: bool = True  # yarn: the indices at which interpolation begins and ends are whole

    def __post_init__(self) -> None:
        if self.kind not in get_args(Stretch):
            raise ConfigError("model.rope_scaling", self.kind, "unknown", f"Known: {', '.join(get_args(Stretch))}.")
        for key in ("factor", "low", "high", "attention_factor"):
            check_number(f"model.rope_scaling.{key}", getattr(self, key))
        check_flag("model.rope_scaling.truncate", self.truncate)
        if self.kind != "linear":
            check_size("model.rope_scaling.context", self.context)
            if self.low >= self.high:
                raise ConfigError("model.rope_scaling.low", self.low, "not below high", f"Use less than {self.high}.")


@dataclass(frozen=True)
class ModelSpec:
    """One decoder. Query head n reads key-value head n // (heads / kv_heads); `hidden` is the gated MLP's inner width.

    The defaults are Qwen3's architecture. `windows` holds for each layer the number of tokens that a query sees, itself
    included (0: all before it); empty if every layer sees all.
    """

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
    scan: bool = False  # programs have one layer (of each kind), which they run in a loop
    kv_dtype: str = ""  # of pages in an engine (`kernels.quantised`); empty: the compute dtype
    weight_dtype: str = ""  # of the layers' matrices in an engine, likewise
    draft: ModelSpec | None = None  # the model that drafts tokens in an engine (speculative decoding)
    value_head: bool = False  # of a critic: one number per token instead of logits
    family: str = "qwen3"  # see `families`: names and config.json of the parameters' files
    attention_bias: bool = False  # of queries, keys and values
    activation: Activation = "silu"  # of the gate
    rope_scaling: RopeScaling | None = None
    windows: tuple[int, ...] = ()
    local_rope_theta: float = 0.0  # layers with a window: their base, without scaling (0: as the other layers)
    post_norms: bool = False  # attention and MLP are normed before they are added, too
    norm_offset: bool = False  # norms multiply by 1 + scale
    scaled_embeddings: bool = False  # multiplied by √width
    query_scalar: float = 0.0  # scores are divided by its root (0: by that of head_dim)
    logit_softcap: float = 0.0  # c: logits become c·tanh(logits / c) (0: as they are)
    # Mixture of experts (0: one MLP per layer); `hidden` is then the inner width of each expert.
    experts: int = 0
    experts_per_token: int = 0
    normalized_gates: bool = True  # the weights of a token's experts are divided by their sum
    router_bias: bool = False  # the logits that choose experts, but not their weights, have a bias of each expert

    def __post_init__(self) -> None:
        # A model.json holds lists and objects.
        if isinstance(self.windows, list):
            object.__setattr__(self, "windows", tuple(self.windows))
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        for key in SIZE_KEYS:
            check_size(f"model.{key}", getattr(self, key), key)
        for key in ("rope_theta", "norm_eps"):
            check_number(f"model.{key}", getattr(self, key))
        for key in ("local_rope_theta", "query_scalar", "logit_softcap"):
            if getattr(self, key) != 0:
                check_number(f"model.{key}", getattr(self, key))
        for key in _FLAGS:
            check_flag(f"model.{key}", getattr(self, key))
        if not isinstance(self.name, str) or self.remat not in get_args(Remat):
            kinds = ", ".join(get_args(Remat))
            raise ConfigError("model", (self.name, self.remat), "invalid name or remat", f"remat is one of {kinds}.")
        if self.activation not in get_args(Activation):
            known = ", ".join(get_args(Activation))
            raise ConfigError("model.activation", self.activation, "unknown activation", f"Known: {known}.")
        if self.heads % self.kv_heads:
            reason = f"does not divide the {self.heads} query heads"
            raise ConfigError("model.kv_heads", self.kv_heads, reason, "Use a divisor.")
        if self.head_dim % 2:
            raise ConfigError("model.head_dim", self.head_dim, "rotary embedding rotates pairs", "Use an even number.")
        if self.compute_dtype not in _DTYPES:
            raise ConfigError("model.dtype", self.compute_dtype, "unknown dtype", f"Known: {', '.join(_DTYPES)}.")
        self._check_windows()
        self._check_experts()

    def _check_windows(self) -> None:
        if self.windows and len(self.windows) != self.layers:
            reason = f"holds {len(self.windows)} windows for {self.layers} layers"
            raise ConfigError("model.windows", self.windows, reason, "Use one for each layer, or none.")
        for window in self.windows:
            if window != 0:
                check_size("model.windows", window)

    def _check_experts(self) -> None:
        if self.experts == 0 == self.experts_per_token:
            if self.router_bias:
                raise ConfigError("model.router_bias", True, f"{self.name} has no experts", "Set it to False.")
            return
        for key in ("experts", "experts_per_token"):
            check_size(f"model.{key}", getattr(self, key), key)
        if not self.experts_per_token <= self.experts < _MOST_EXPERTS:
            reason = f"a token has {self.experts_per_token} experts"
            raise ConfigError("model.experts", self.experts, reason, f"Use at least as many and below {_MOST_EXPERTS}.")

    @property
    def each_window(self) -> tuple[int, ...]:
        """The window of every layer; 0 for a layer without one."""
        return self.windows or (0,) * self.layers

    @property
    def period(self) -> int:
        """The length of the pattern of windows: layer i has the window of layer i + period."""
        windows = self.each_window
        return next(n for n in range(1, self.layers + 1) if windows[n:] == windows[: self.layers - n])

    @property
    def narrowest(self) -> int:
        """The smallest window of any layer; 0 if no layer has one."""
        return min((window for window in self.windows if window), default=0)

    @property
    def query_factor(self) -> float:
        """The factor of queries before attention, which divides scores by √head_dim."""
        return math.sqrt(self.head_dim / self.query_scalar) if self.query_scalar else 1.0


_FLAGS = (
    "tied_embeddings",
    "qk_norm",
    "value_head",
    "scan",
    "attention_bias",
    "post_norms",
    "norm_offset",
    "scaled_embeddings",
    "normalized_gates",
    "router_bias",
)


def check_size(key: str, value: Any, size: str = "") -> None:
    """Raise ConfigError unless `value` is a whole number from 1 to the limit of `size`."""
    most = _MOST_LAYERS if size == "layers" else _MOST
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(key, value, "not such a size", f"Use a whole number of at least 1 and at most {most}.")


def check_number(key: str, value: Any) -> None:
    """Raise ConfigError unless `value` is a number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:  # NaN is refused, too
        raise ConfigError(key, value, "out of range or no number", "Use a number above 0 and below 1e30.")


def check_flag(key: str, value: Any) -> None:
    """Raise ConfigError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(key, value, "not a boolean", "Use true or false.")


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


def check_routing(spec: ModelSpec, config: Config) -> None:
    """Raise ConfigError for options of experts with a model that has none, and for records too large for the store."""
    learner = config.learner
    for key, value, off in (("routing_replay", learner.routing_replay, False), ("router_loss", learner.router_loss, 0)):
        if value != off and not spec.experts:
            raise ConfigError(f"learner.{key}", value, f"{spec.name} has no experts", f"Set it to {off}.")
    if spec.router_bias and learner.router_bias_rate and learner.lora_rank:
        raise ConfigError(
            "learner.router_bias_rate",
            learner.router_bias_rate,
            "with adapters the parameters of routers are frozen",
            "Set it to 0.",
        )
    if not learner.routing_replay:
        return
    a_token = TOKEN_BYTES + spec.layers * spec.experts_per_token * (1 if spec.experts < 255 else 2)
    limit_mb = min(MAX_MEMBER_MB, max_message_bytes(config) >> 20)
    if episode_tokens(config) * a_token > limit_mb * 2**20:
        reason = f"{episode_tokens(config)} tokens of {a_token} bytes exceed the {limit_mb} MB of a member in the store"
        raise ConfigError(
            "learner.routing_replay", True, reason, f"Let an episode have at most {limit_mb * 2**20 // a_token} tokens."
        )


def parameter_count(spec: ModelSpec) -> int:
    """The number of parameters, computed from the sizes without JAX."""
    attention = spec.width * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads) + 2 * spec.head_dim * spec.qk_norm
    attention += spec.head_dim * (spec.heads + 2 * spec.kv_heads) * spec.attention_bias
    norms = (4 if spec.post_norms else 2) * spec.width
    router = (spec.width + spec.router_bias) * spec.experts
    layer = attention + 3 * spec.width * spec.hidden * (spec.experts or 1) + router + norms
    head = spec.width if spec.value_head else 0 if spec.tied_embeddings else spec.vocab_size * spec.width
    return spec.layers * layer + spec.vocab_size * spec.width + head + spec.width


def active_parameter_count(spec: ModelSpec) -> int:
    """The number of parameters that one token is multiplied with: of all experts only its own count."""
    idle = spec.experts - spec.experts_per_token
    return parameter_count(spec) - spec.layers * 3 * spec.width * spec.hidden * idle


# --- One decoder as data

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
    required: tuple[str, ...] = (
        "vocab_size",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
    )
    sliding_key: str = ""  # whose value decides which layers have the window, without layer_types
    sizes: Mapping[str, str] = field(default_factory=lambda: SIZES)

    @property
    def keys(self) -> frozenset[str]:
        """The keys of a config.json that this family knows."""
        return frozenset(_READ | METADATA | self.read | self.fixed.keys() | self.defaults.keys())


# Options of some families that no model here has; None is written nowhere.
_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False), "mlp_bias": (None, False), "use_mrope": (None, False),
    "rope_interleaved": (None, False), "use_bidirectional_attention": (None, False), "attn_logit_softcapping": (None,),
    "attention_dropout": (0.0, None), "quantization_config": (None,),
}  # fmt: skip
_SILU = _OFF | {"hidden_act": ("silu",)}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA3 = {
    "norm_offset": True,
    "post_norms": True,
    "scaled_embeddings": True,
    "activation": "gelu",
    "qk_norm": True,
}

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
    return _sized(
        "llama", name, 128_256, *sizes, rope_theta=5e5, norm_eps=1e-5, rope_scaling=scaling, tied_embeddings=tied
    )


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
