"""Adapters in the format of Hugging Face's PEFT, read as the adapters that a run starts from, and written by export.

    adapter_config.json         rank, alpha, the adapted modules
    adapter_model.safetensors   for each weight W [out, in]: A [r, in] and B [out, r]

There ΔW = (α/r)·B·A; the adapters here are A [*in, r] and B [r, *out] (see `lora`). Experts are weights of their own
there, and the first axis of A and B here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxroll import disk
from jaxroll.config import LearnerConfig
from jaxroll.config.schema import LORA_TARGETS
from jaxroll.errors import ConfigError, DataError
from jaxroll.models import folders, hf_config
from jaxroll.models.families import ModelSpec
from jaxroll.models.folders import Tensors, TensorShape

CONFIG_FILE, ARRAYS = "adapter_config.json", "adapter_model.safetensors"
_KEY = "learner.lora_path"
_A, _B = "lora_A", "lora_B"
# Options that change the product, with the values that mean "not used".
_UNUSED: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None), "use_dora": (False, None), "use_rslora": (False, None), "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []), "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "lora_bias": (False, None),
    "layers_to_transform": (None,), "layer_replication": (None,), "trainable_token_indices": (None,),
    "megatron_config": (None,), "alora_invocation_tokens": (None,), "target_parameters": (None, []),
}  # fmt: skip


def check(learner: LearnerConfig, spec: ModelSpec) -> None:
    """Raise ConfigError unless the adapters in `learner.lora_path` are those of this config. Reads only headers."""
    _opened(learner, spec)


def read(learner: LearnerConfig, spec: ModelSpec) -> dict[str, np.ndarray]:
    """The adapters in `learner.lora_path`, float32 by our names; ConfigError as `check`."""
    tensors, found = _opened(learner, spec), {}

    def read_one(name: str, end: str, shape: tuple[int, ...]) -> np.ndarray:
        value = np.asarray([tensors[theirs] for theirs in _theirs(spec, name, end)], np.float32)
        return np.ascontiguousarray(value.swapaxes(1, 2).reshape(shape))

    for name, shape in _parameters(spec, learner.lora_targets).items():
        each, inputs, outputs = divided(name, shape)
        found[f"{name}.A"] = read_one(name, _A, (*each, *inputs, learner.lora_rank))
        found[f"{name}.B"] = read_one(name, _B, (*each, learner.lora_rank, *outputs))
    return found


def write(
    folder: Path,
    learner: LearnerConfig,
    spec: ModelSpec,
    adapters: Mapping[str, np.ndarray],
    dtype: np.dtype,
    base: str,
) -> None:
    """Write adapters with our names into `folder` (which exists), for PEFT; `base` is the path of their base model."""
    names, rank, values = _parameters(spec, learner.lora_targets), learner.lora_rank, {}
    for name in names:
        theirs = [_theirs(spec, name, end) for end in (_A, _B)]
        a, b = (np.asarray(adapters[f"{name}.{end}"]) for end in ("A", "B"))
        a, b = a.reshape(len(theirs[0]), -1, rank), b.reshape(len(theirs[1]), rank, -1)
        for keys, value in zip(theirs, (a, b), strict=True):
            values |= zip(keys, value.swapaxes(1, 2).astype(dtype), strict=True)
    leaves = {name: TensorShape(dtype, value.shape) for name, value in values.items()}
    folders.write(folder / ARRAYS, leaves, values.__getitem__)
    modules = sorted({hf_config.name(spec, name).rsplit(".", 2)[1] for name in names})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": learner.lora_rank,
        "lora_alpha": learner.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _opened(learner: LearnerConfig, spec: ModelSpec) -> Tensors:
    """The tensors of `learner.lora_path`, after the check of config, names and shapes."""
    folder = Path(learner.lora_path)
    try:
        config, tensors = disk.read_json(folder / CONFIG_FILE), folders.opened(folder / ARRAYS)
    except (OSError, DataError) as error:
        raise ConfigError(_KEY, str(folder), f"cannot be read: {error}", "Give a folder that PEFT wrote.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(_KEY, str(folder), f"its {CONFIG_FILE} is not that of LoRA adapters", "Give another folder.")
    for key, unused in _UNUSED.items():
        if config.get(key) not in unused:
            reason = f"its {CONFIG_FILE} has {key} = {config[key]!r}, which is not supported"
            raise ConfigError(_KEY, str(folder), reason, "Merge such adapters into the model with PEFT.")
    for ours, theirs in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        if config.get(theirs) != (value := getattr(learner, ours)):
            reason = f"the adapters in {folder} have {theirs} = {config.get(theirs)!r}"
            raise ConfigError(f"learner.{ours}", value, reason, f"Set it to {config.get(theirs)!r}.")
    _check_tensors(learner, spec, tensors)
    return tensors


def _check_tensors(learner: LearnerConfig, spec: ModelSpec, tensors: Tensors) -> None:
    held, everywhere = set(tensors), _parameters(spec, LORA_TARGETS)
    adapted = {target(name) for name in everywhere if held.intersection(_theirs(spec, name, _A))}
    if adapted and adapted != set(learner.lora_targets):
        reason = f"the adapters in {learner.lora_path} are for {', '.join(sorted(adapted))}"
        raise ConfigError("learner.lora_targets", learner.lora_targets, reason, "Set it to these.")
    wanted = _shapes(spec, learner)
    if different := sorted(held ^ wanted.keys()):
        reason = f"{'lacks' if different[0] in wanted else 'has an unknown'} tensor {different[0]}"
        raise ConfigError(_KEY, learner.lora_path, reason, "Are these adapters of this model?")
    for name, shape in wanted.items():
        if (found := tensors.leaf(name).shape) != shape:
            reason = f"tensor {name} has shape {found}; this model needs {shape}"
            raise ConfigError(_KEY, learner.lora_path, reason, "Are these adapters of this model?")


def _parameters(spec: ModelSpec, targets: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The adapted parameters by our name, with their shapes [*in, *out]."""
    D, N, K, H, F = spec.width, spec.heads, spec.kv_heads, spec.head_dim, spec.hidden
    E = (spec.experts,) if spec.experts else ()
    shapes = {
        "attn.q": (D, N, H),
        "attn.k": (D, K, H),
        "attn.v": (D, K, H),
        "attn.o": (N, H, D),
        "mlp.gate": (*E, D, F),
        "mlp.up": (*E, D, F),
        "mlp.down": (*E, F, D),
    }
    chosen = set(targets)
    return {name: shapes[kind] for name in hf_config.ours(spec) if (kind := target(name)) in chosen}


def _shapes(spec: ModelSpec, learner: LearnerConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors by their names in the file."""
    found = {}
    for name, shape in _parameters(spec, learner.lora_targets).items():
        _, inputs, outputs = divided(name, shape)
        found |= dict.fromkeys(_theirs(spec, name, _A), (learner.lora_rank, math.prod(inputs)))
        found |= dict.fromkeys(_theirs(spec, name, _B), (math.prod(outputs), learner.lora_rank))
    return found


def _theirs(spec: ModelSpec, name: str, end: str) -> list[str]:
    """The tensors' names: "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" for "layers.00.attn.q"."""
    return [f"base_model.model.{one.removesuffix('weight')}{end}.weight" for one in hf_config.names(spec, name)]


# --- parameters that adapters belong to, also for `lora`


def target(name: str) -> str:
    """The target that a parameter belongs to: "mlp.up" for "layers.03.mlp.up" and "layers.03.mlp.experts.up"."""
    return name.split(".", 2)[2].replace("mlp.experts.", "mlp.") if name.startswith("layers.") else ""


def divided(name: str, axes: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """The axes of a parameter: those with adapters for each entry (experts), its inputs, and its outputs.

    The output projection has two inputs (heads, head dimension), every other parameter has one.
    """
    each = int(hf_config.of_experts(name))
    outputs = each + (2 if name.endswith(".attn.o") else 1)
    return axes[:each], axes[each:outputs], axes[outputs:]
