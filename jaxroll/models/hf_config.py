"""Hugging Face's names of parameters, and conversion between ModelSpec and its config.json. No JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxroll.errors import ConfigError
from jaxroll.models.families import (
    FAMILIES,
    IMAGES,
    METADATA,
    MOE,
    ROPE,
    TEXT_PARTS,
    Family,
    ModelSpec,
    RopeScaling,
    check_flag,
    check_number,
    check_size,
)

# --- Hugging Face's names of JaxRoll's parameters, and the check of a checkpoint's names

_TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_SCORE = "score.weight"  # of a model for sequence classification
_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "attn.q": "self_attn.q_proj.weight",
    "attn.k": "self_attn.k_proj.weight",
    "attn.v": "self_attn.v_proj.weight",
    "attn.o": "self_attn.o_proj.weight",
    "attn.q_bias": "self_attn.q_proj.bias",
    "attn.k_bias": "self_attn.k_proj.bias",
    "attn.v_bias": "self_attn.v_proj.bias",
    "attn.q_norm": "self_attn.q_norm.weight",
    "attn.k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
}
# With norms after attention and MLP, "post_attention_layernorm" is the norm of the attention's output.
_POST_NORMS = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
# Parameters of mixtures of experts. Hugging Face stores one matrix per expert, JaxRoll all of them in one array.
_MOE_LAYER = {
    "mlp.router": "mlp.gate.weight",
    "mlp.router_bias": "mlp.gate.e_score_correction_bias",  # in families that have one, such as DeepSeek-V3
    "mlp.experts.gate": "mlp.experts.{}.gate_proj.weight",
    "mlp.experts.up": "mlp.experts.{}.up_proj.weight",
    "mlp.experts.down": "mlp.experts.{}.down_proj.weight",
}
_DENSE_ONLY = ("mlp.gate", "mlp.up", "mlp.down")
_OF_OPTIONS = {
    "qk_norm": ("attn.q_norm", "attn.k_norm"),
    "attention_bias": ("attn.q_bias", "attn.k_bias", "attn.v_bias"),
    "router_bias": ("mlp.router_bias",),
}


def name(spec: ModelSpec, ours: str) -> str:
    """Hugging Face's name of a parameter: "model.layers.0.self_attn.q_proj.weight" for "layers.00.attn.q".

    For the experts of a layer it has a field for the expert's number: "model.layers.0.mlp.experts.{}.up_proj.weight".
    """
    if ours in _TOP:
        return _TOP[ours]
    if ours == "value":
        return _SCORE
    _, layer, rest = ours.split(".", 2)
    return f"model.layers.{int(layer)}.{_layer(spec)[rest]}"


def _layer(spec: ModelSpec) -> dict[str, str]:
    """The parameters of a layer and their names."""
    found = _LAYER | (_POST_NORMS if spec.post_norms else {})
    if spec.experts:
        found = {key: found[key] for key in found if key not in _DENSE_ONLY} | _MOE_LAYER
    left_out = [key for option, keys in _OF_OPTIONS.items() if not getattr(spec, option) for key in keys]
    return {key: found[key] for key in found if key not in left_out}


def of_experts(ours: str) -> bool:
    """True for a parameter of all experts of a layer, which Hugging Face stores as one tensor per expert."""
    return ".experts." in ours


def names(spec: ModelSpec, ours: str) -> tuple[str, ...]:
    """The names of all Hugging Face tensors of a parameter: one, or one per expert."""
    pattern = name(spec, ours)
    return tuple(pattern.format(expert) for expert in range(spec.experts)) if of_experts(ours) else (pattern,)


def ours(spec: ModelSpec) -> tuple[str, ...]:
    """JaxRoll's names of all parameters of this model, sorted, as the flax module declares them."""
    head = "value" if spec.value_head else "" if spec.tied_embeddings else "head"
    top = ["embed", "final_norm", *([head] if head else [])]
    layer = _layer(spec)
    return tuple(sorted([*top, *(f"layers.{number:02d}.{key}" for number in range(spec.layers) for key in layer)]))


def name_error(spec: ModelSpec, held: Collection[str]) -> str:
    """The first missing or unexpected tensor of a checkpoint with these names, as a message; empty if there is none."""
    wanted = {theirs: one for one in ours(spec) for theirs in names(spec, one)}
    if missing := sorted(wanted.keys() - set(held)):
        return f"has no tensor {missing[0]!r}, which {wanted[missing[0]]!r} is read from{_more(missing)}"
    allowed = {*wanted, _TOP["head"]}  # a tied head, equal to the embedding, may be stored separately
    if unexpected := sorted(set(held) - allowed):
        return f"has a tensor {unexpected[0]!r}, which this model does not have{_more(unexpected)}"
    return ""


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


# --- models of text and images, of which only the text model is read

_OF_TEXT = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",  # as transformers 5 writes it
}
_OF_IMAGES = tuple(
    f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)


def of_text_model(held: Iterable[str]) -> dict[str, str]:
    """The tensors of the text model, by the names that they have in a model of text alone."""
    found = {}
    for theirs in held:
        prefix = next((prefix for prefix in _OF_TEXT if theirs.startswith(prefix)), "")
        if not theirs.startswith(_OF_IMAGES):
            found[_OF_TEXT.get(prefix, "") + theirs.removeprefix(prefix)] = theirs
    return found


# --- Conversion between ModelSpec and Hugging Face's config.json

LONGEST_CONTEXT = 40_960  # Qwen3's value; the decoder does not depend on it
FULL, SLIDING = "full_attention", "sliding_attention"
# Keys that an export does not take from the original config.json.
_WRITTEN = frozenset({*ROPE, "rope_local_base_freq", "layer_types", "torch_dtype", "num_local_experts"})


# --- config.json → ModelSpec


def from_huggingface(config: Mapping[str, Any], *, compute_dtype: str = "float32") -> ModelSpec:
    """The spec of a checkpoint from its parsed config.json; of a model of text and images, its text model's.

    ConfigError for an unknown family, and for a key or value that is not supported.
    """
    family, values = _values(config)
    for theirs in family.required:
        if theirs not in values:
            missing = ", ".join(key for key in family.required if key not in values)
            remedy = f"Is this a checkpoint of {family.model_type}?"
            raise ConfigError("config.json", sorted(config), f"lacks {missing}", remedy)
    for key, supported in family.fixed.items():
        if values.get(key, supported[0]) not in supported:
            raise _not_supported(key, values[key], f"{supported[0]!r}")
    values = _with_heads(values)
    for ours, theirs in family.sizes.items():
        check_size(f"config.json {theirs}", values[theirs], ours)
    eps, tied = values.get("rms_norm_eps", 1e-6), values.get("tie_word_embeddings", False)
    check_number("config.json rms_norm_eps", eps)
    check_flag("config.json tie_word_embeddings", tied)
    check_flag("config.json norm_topk_prob", values.get("norm_topk_prob", True))
    return ModelSpec(
        name=str(values.get("_name_or_path") or family.model_type),
        family=family.model_type,
        tied_embeddings=tied,
        norm_eps=float(eps),
        compute_dtype=compute_dtype,
        remat="layer",
        windows=_windows(family, values),
        normalized_gates=values.get("norm_topk_prob", True),
        **{ours: values[theirs] for ours, theirs in family.sizes.items()},
        **_rope(values),
        **_gemma_numbers(values),
        **family.traits,
    )


def _values(config: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The family of a config.json, and its keys with the family's defaults; ConfigError for a key that is unknown."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in TEXT_PARTS:
        _refuse_unknown(config, METADATA | IMAGES, kind)
        config = {"model_type": TEXT_PARTS[kind], **_object("text_config", config.get("text_config"))}
        kind = config["model_type"]
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *TEXT_PARTS]))
        raise ConfigError("config.json model_type", kind, "not a family that JaxRoll knows", f"Known: {known}.")
    family = FAMILIES[kind]
    _refuse_unknown(config, family.keys, kind)
    if "num_local_experts" in family.keys and "num_experts" not in config:  # the name in transformers 5
        config = {**config, "num_experts": config.get("num_local_experts")}
    return family, {**family.defaults, **config}


def _refuse_unknown(config: Mapping[str, Any], known: frozenset[str], family: str) -> None:
    if unknown := sorted(config.keys() - known):
        reason = f"not an option that JaxRoll knows for {family}; it may change what the model computes"
        raise ConfigError(
            f"config.json {unknown[0]}",
            config[unknown[0]],
            reason,
            "Remove the key from config.json if the model computes the same without it.",
        )


def _not_supported(key: str, value: Any, supported: str) -> ConfigError:
    return ConfigError(f"config.json {key}", value, "not supported by this decoder", f"Supported: {supported}.")


def _object(key: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise _not_supported(key, value, "an object")
    return dict(value or {})


def _with_heads(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the heads that a config.json may leave out."""
    heads = values["num_attention_heads"]
    check_size("config.json num_attention_heads", heads)
    check_size("config.json hidden_size", values["hidden_size"])
    kv_heads, head_dim = values.get("num_key_value_heads"), values.get("head_dim")
    return values | {
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": values["hidden_size"] // heads if head_dim is None else head_dim,
    }


def _windows(family: Family, values: Mapping[str, Any]) -> tuple[int, ...]:
    """The window of every layer; empty if none has one."""
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    if window is not None:
        check_size("config.json sliding_window", window)
    layers, kinds = values["num_hidden_layers"], values.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if window and one else FULL for one in _sliding(family, values)]
    possible = (FULL, SLIDING) if window else (FULL,)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in possible for kind in kinds):
        raise _not_supported("layer_types", kinds, f"{' or '.join(possible)} for each of {layers} layers")
    windows = tuple((window or 0) if kind == SLIDING else 0 for kind in kinds)
    return windows if any(windows) else ()


def _sliding(family: Family, values: Mapping[str, Any]) -> list[bool]:
    """True for each layer to which the window belongs if layer_types does not say."""
    layers, key = range(values["num_hidden_layers"]), family.sliding_key
    if not key:
        return [True for _ in layers]
    number = values.get(f"_{key}") or values[key]
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise _not_supported(key, number, "a whole number")
    if key == "max_window_layers":  # the number of layers without a window, which are the first ones
        return [layer >= number for layer in layers]
    return [number == 0 or (layer + 1) % number != 0 for layer in layers]


def _gemma_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for ours, theirs in (("query_scalar", "query_pre_attn_scalar"), ("logit_softcap", "final_logit_softcapping")):
        if values.get(theirs) is not None:
            check_number(f"config.json {theirs}", values[theirs])
            found[ours] = float(values[theirs])
    return found


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelSpec for the rotary embedding."""
    given = _object("rope_parameters", values.get("rope_parameters"))
    local: dict[str, Any] = {}
    if FULL in given or SLIDING in given:  # transformers 5, for families that have both kinds of layers
        if unknown := sorted(key for key in given if key not in (FULL, SLIDING) and given[key] is not None):
            raise _not_supported(f"rope_parameters {unknown[0]}", given[unknown[0]], f"{FULL} and {SLIDING}")
        local, given = _object("rope_parameters", given.get(SLIDING)), _object("rope_parameters", given.get(FULL))
        if local.get("rope_type", "default") != "default":
            raise _not_supported(f"rope_parameters {SLIDING}", local, "rope_type default")
        _scaling({key: value for key, value in local.items() if key != "rope_theta"}, None)
    rope = _object("rope_scaling", values.get("rope_scaling")) | given
    theta = rope.pop("rope_theta", values.get("rope_theta", 1e4))
    local_theta = local.get("rope_theta", values.get("rope_local_base_freq"))
    check_number("config.json rope_theta", theta)
    fields = {"rope_theta": float(theta), "rope_scaling": _scaling(rope, values.get("max_position_embeddings"))}
    if local_theta is not None:
        check_number("config.json rope_local_base_freq", local_theta)
        fields["local_rope_theta"] = float(local_theta)
    return fields


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate")
_STRETCHES = {
    "default": tuple(sorted({*_LLAMA3, *_YARN})),  # transformers ignores these without a scaling, and others not
    "linear": ("factor",),
    "llama3": _LLAMA3,
    "yarn": _YARN,
}


def _scaling(rope: dict[str, Any], longest: Any) -> RopeScaling | None:
    """The scaling that an object `rope_scaling` or `rope_parameters` describes."""
    older = rope.pop("type", None)  # its name before transformers 4.45
    kind = rope.pop("rope_type", older)
    kind = "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in _STRETCHES:
        raise _not_supported("rope_scaling", kind, f"rope_type {', '.join(_STRETCHES)}")
    off = ("partial_rotary_factor", 1.0)  # all of a head is rotated
    given = {key: value for key, value in rope.items() if value is not None and (key, value) != off}
    if unknown := sorted(given.keys() - set(_STRETCHES[kind])):
        raise _not_supported("rope_scaling", unknown[0], f"{', '.join(_STRETCHES[kind])} for rope_type {kind}")
    if kind == "default":
        return None
    check_number("config.json rope_scaling factor", given.get("factor"))
    factor, context = float(given["factor"]), given.get("original_max_position_embeddings", longest)
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "llama3":
        return RopeScaling(
            "llama3", factor, context, given.get("low_freq_factor", 1.0), given.get("high_freq_factor", 4.0)
        )
    attention = given.get("attention_factor", 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1)
    slow, fast = given.get("beta_slow") or 1.0, given.get("beta_fast") or 32.0
    return RopeScaling("yarn", factor, context, slow, fast, attention, given.get("truncate", True))


# --- ModelSpec → config.json


def to_huggingface(spec: ModelSpec, dtype: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of this model with weights of `dtype`, read by transformers 4.51 and newer.

    Fields that the model lacks (token ids, the longest context) are taken from `base`, the original config.json.
    ConfigError for a model with options that its family does not have.
    """
    family = FAMILIES[MOE if spec.experts and spec.family == "qwen3" else spec.family]
    base = dict(base or {"max_position_embeddings": LONGEST_CONTEXT})
    base = {**base, **_object("text_config", base.get("text_config"))}
    fields = {key: value for key, value in base.items() if key in family.keys - _WRITTEN}
    fields |= {key: supported[0] for key, supported in family.fixed.items() if supported[0] is not None}
    fields |= {theirs: getattr(spec, ours) for ours, theirs in family.sizes.items()}
    if spec.experts:
        fields |= {"norm_topk_prob": spec.normalized_gates}
        fields.setdefault("intermediate_size", spec.hidden)  # of dense layers, of which the model has none
    fields |= _written_rope(spec) | _written_windows(spec)
    if spec.family == "gemma3_text":
        scalar = float(spec.query_scalar or spec.head_dim)
        fields |= {
            "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,  # transformers 5 takes no 256.0
            "final_logit_softcapping": spec.logit_softcap or None,
        }
    fields |= {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    _check_readable(spec, fields)
    return fields


def _check_readable(spec: ModelSpec, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError unless `fields` describe `spec`."""
    if spec.router_bias:
        raise ConfigError(
            "model.router_bias",
            True,
            f"transformers' {spec.family} has no biases of its router",
            "Use the run or its folders with JaxRoll, or balance by learner.router_loss.",
        )
    read = from_huggingface(fields, compute_dtype=spec.compute_dtype)
    ignored = {"name": spec.name, "remat": spec.remat, "value_head": spec.value_head, "family": spec.family}
    read = dataclasses.replace(read, **ignored)
    for one in dataclasses.fields(ModelSpec):
        ours, theirs = getattr(spec, one.name), getattr(read, one.name)
        if ours != theirs and not _same_option(spec, one.name):
            reason = f"a config.json of {spec.family} would describe it as {theirs!r}"
            raise ConfigError(f"model.{one.name}", ours, reason, "Export it as a model of another family.")


def _same_option(spec: ModelSpec, option: str) -> bool:
    """True for an option that changes nothing in this model: a query scalar equal to head_dim, an unused base."""
    return (option == "query_scalar" and spec.query_scalar == 0) or (option == "local_rope_theta" and not spec.windows)


def _written_rope(spec: ModelSpec) -> dict[str, Any]:
    """The keys of transformers 4 and of transformers 5."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if (scaling := spec.rope_scaling) is not None:
        values = {
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.context,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "beta_slow": scaling.low,
            "beta_fast": scaling.high,
            "attention_factor": scaling.attention_factor,
            "truncate": scaling.truncate,
        }
        rope = {"rope_type": scaling.kind, **{key: values[key] for key in _STRETCHES[scaling.kind]}}
    older = {"rope_theta": spec.rope_theta} | ({"rope_scaling": rope} if spec.rope_scaling else {})
    if not spec.local_rope_theta:
        return older | {"rope_parameters": rope | {"rope_theta": spec.rope_theta}}
    return older | {
        "rope_local_base_freq": spec.local_rope_theta,
        "rope_parameters": {
            FULL: rope | {"rope_theta": spec.rope_theta},
            SLIDING: {"rope_type": "default", "rope_theta": spec.local_rope_theta},
        },
    }


def _written_windows(spec: ModelSpec) -> dict[str, Any]:
    """The keys of sliding windows; without any, the unused size of a window stays as it is."""
    family, window = FAMILIES[spec.family], spec.narrowest
    if "sliding_window" not in family.defaults:
        return {}
    if spec.family == "mistral":
        return {"sliding_window": window or None}
    kinds = [SLIDING if one else FULL for one in spec.each_window]
    fields: dict[str, Any] = {"layer_types": kinds} | ({"sliding_window": window} if window else {})
    if "use_sliding_window" in family.defaults:
        fields["use_sliding_window"] = window > 0
    return fields
