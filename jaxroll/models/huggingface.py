"""Hugging Face names and layouts ↔ our tree: pure renaming and reshaping of numpy arrays, no files, no torch.

Their linear weights are [out, in] with heads and head dimension in one axis; ours are [in, heads, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from jaxroll.errors import DataError
from jaxroll.models import params
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


def name(ours: str) -> str:
    """Their name of our parameter: "model.layers.0.self_attn.q_proj.weight" for "layers.00.attn.q"."""
    if ours in _TOP:
        return _TOP[ours]
    _, layer, rest = ours.split(".", 2)
    return f"model.layers.{int(layer)}.{_LAYER[rest]}.weight"


def imported(spec: ModelSpec, tensor: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """Our parameters (float32) read from `tensor(their name)`; DataError for a tensor that is missing or misshapen."""
    return {ours: _ours(ours, leaf.shape, tensor) for ours, leaf in params.abstract(spec).items()}


def exported(spec: ModelSpec, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Their tensors by their names, contiguous, in the dtype of `values`."""
    return {name(ours): np.ascontiguousarray(_theirs(ours, np.asarray(values[ours]))) for ours in params.abstract(spec)}


def _ours(ours: str, shape: tuple[int, ...], tensor: Callable[[str], np.ndarray]) -> np.ndarray:
    try:
        value = np.asarray(tensor(name(ours)), np.float32)
    except KeyError as error:
        raise DataError(f"the checkpoint has no tensor {name(ours)!r}, which {ours!r} is read from") from error
    expected = _theirs(ours, np.empty(shape, np.bool_)).shape
    if value.shape != expected:
        raise DataError(f"tensor {name(ours)!r} has shape {value.shape}; {ours!r} of this model needs {expected}")
    return np.ascontiguousarray((value.T if _transposed(ours) else value).reshape(shape))


def _theirs(ours: str, value: np.ndarray) -> np.ndarray:
    if not _transposed(ours):
        return value
    inputs = value.shape[:-1] if ours.endswith(".attn.o") else value.shape[:1]
    return value.reshape(int(np.prod(inputs)), -1).T


def _transposed(ours: str) -> bool:
    return not (ours == "embed" or ours.endswith("norm"))
