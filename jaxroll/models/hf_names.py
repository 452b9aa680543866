"""Hugging Face's names of our parameters, and what is wrong with a checkpoint's names. Strings only, no JAX."""

from __future__ import annotations

from collections.abc import Collection

from jaxroll.models.families import ModelSpec

_TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_QK_NORM = ("attn.q_norm", "attn.k_norm")


def name(ours: str) -> str:
    """Their name of our parameter: "model.layers.0.self_attn.q_proj.weight" for "layers.00.attn.q"."""
    if ours in _TOP:
        return _TOP[ours]
    _, layer, rest = ours.split(".", 2)
    return f"model.layers.{int(layer)}.{_LAYER[rest]}.weight"


def ours(spec: ModelSpec) -> tuple[str, ...]:
    """Our names of all parameters of this model, sorted; what the flax module declares, known without JAX."""
    top = [key for key in _TOP if key != "head" or not spec.tied_embeddings]
    layer = [key for key in _LAYER if spec.qk_norm or key not in _QK_NORM]
    return tuple(sorted([*top, *(f"layers.{number:02d}.{key}" for number in range(spec.layers) for key in layer)]))


def misfit(spec: ModelSpec, held: Collection[str]) -> str:
    """The missing or unexpected tensors of a checkpoint with these names; empty when there is none."""
    wanted = {name(one): one for one in ours(spec)}
    if missing := sorted(wanted.keys() - set(held)):
        return f"has no tensor {missing[0]!r}, which {wanted[missing[0]]!r} is read from{_more(missing)}"
    allowed = {*wanted, _TOP["head"]}  # a tied head may be written out; it is the embedding then
    if unexpected := sorted(set(held) - allowed):
        return f"has a tensor {unexpected[0]!r}, which this model has no place for{_more(unexpected)}"
    return ""


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
