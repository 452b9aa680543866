"""Hugging Face's names of JaxRoll's parameters, and the check of a checkpoint's names. Strings only, no JAX."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jaxroll.models.spec import ModelSpec

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
