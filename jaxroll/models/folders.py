"""Model folders, read without JAX: the spec, and the completeness of the weights.

There are two kinds: a Hugging Face checkpoint (config.json, tensors under Hugging Face's names), and a JaxRoll folder
as written by `jaxroll sft` and `jaxroll weights import` (model.json, arrays under JaxRoll's names; see
`jaxroll.learner.weights`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxroll import disk
from jaxroll.config import ModelConfig
from jaxroll.errors import ConfigError, DataError
from jaxroll.models import families, hf_config, tensor_files
from jaxroll.models.families import TEXT_PARTS, ModelSpec
from jaxroll.models.tensor_files import Tensors

CONFIG_FILE = "config.json"  # of a Hugging Face checkpoint
MODEL_FILE = "model.json"  # of a JaxRoll folder
CLASSIFIER = "ForSequenceClassification"


def spec(config: ModelConfig, vocab_size: int) -> ModelSpec:
    """The model of `config.path`, or of `config.size` if no path is set. ConfigError if its vocabulary is too small."""
    if not config.path:
        named = families.spec(config.size, vocab_size=vocab_size, compute_dtype=config.dtype)
        return dataclasses.replace(named, router_bias=config.router_bias)
    found = described(Path(config.path), config.dtype)
    found = dataclasses.replace(found, router_bias=found.router_bias or config.router_bias)
    if vocab_size > found.vocab_size:
        reason = f"its model has {found.vocab_size} token ids and the tokenizer has {vocab_size}"
        raise ConfigError(
            "model.path", config.path, reason, "Set tokenizer.kind = hf and tokenizer.path to its folder."
        )
    return found


def described(folder: Path, compute_dtype: str = "float32") -> ModelSpec:
    """The model that a folder of either kind describes; ConfigError when it is not supported."""
    name = MODEL_FILE if is_ours(folder) else CONFIG_FILE
    values = read_json(folder, name)
    try:
        if name == CONFIG_FILE:
            return hf_config.from_huggingface(values, compute_dtype=compute_dtype)
        fields: dict[str, Any] = {**values, "compute_dtype": compute_dtype}
        return ModelSpec(**fields)
    except TypeError as error:
        reason = f"its {name} has a key that is unknown, or lacks one ({error})"
        raise ConfigError("model.path", str(folder), reason, "Copy it again.") from error


def as_stored(folder: Path, model: ModelSpec) -> ModelSpec:
    """`model` without the router biases that its folder lacks: they start at 0."""
    return dataclasses.replace(model, router_bias=model.router_bias and described(folder).router_bias)


def classifier(folder: Path, compute_dtype: str = "float32") -> ModelSpec:
    """The reward model in a Hugging Face folder: a model for sequence classification with one label.

    ConfigError for an unknown family, another number of labels, and a model without a score head. Reads only headers.
    """
    values = read_json(folder, CONFIG_FILE)
    kinds = values.get("architectures")
    if not isinstance(kinds, list) or not any(str(kind).endswith(CLASSIFIER) for kind in kinds):
        reason = f"its config.json describes {kinds}, not a model for sequence classification"
        raise ConfigError("model.path", str(folder), reason, f"Give a reward model: a folder of a *{CLASSIFIER}.")
    named = values.get("id2label")
    labels = len(named) if isinstance(named, dict) else values.get("num_labels", 2)  # 2, as transformers assumes
    if labels != 1:
        raise ConfigError("model.path", str(folder), f"it has {labels} labels, a reward model has one",
                          "Give a model that was trained with num_labels=1.")  # fmt: skip
    known = {key: value for key, value in values.items() if key not in ("num_labels", "classifier_dropout")}
    found = dataclasses.replace(hf_config.from_huggingface(known, compute_dtype=compute_dtype), value_head=True)
    if wrong := weights_error(folder, found, weight_tensors(folder)):
        raise ConfigError("model.path", str(folder), wrong, "Is its score head in the checkpoint?")
    return found


def is_ours(folder: Path) -> bool:
    """True for a JaxRoll folder; otherwise the folder is read as a Hugging Face checkpoint."""
    return (folder / MODEL_FILE).is_file()


def weight_tensors(folder: Path) -> Tensors:
    """The tensors of the folder's weights, from their headers; ConfigError when there are none or one is damaged."""
    try:
        found = tensor_files.opened_folder(folder)
    except (OSError, DataError) as error:
        raise ConfigError("model.path", str(folder), str(error), "Copy the checkpoint again.") from error
    if found is None:
        reason = f"holds neither {tensor_files.SINGLE} nor {tensor_files.INDEX}"
        raise ConfigError("model.path", str(folder), reason, "Give a checkpoint's folder.")
    if not is_ours(folder) and (folder / CONFIG_FILE).is_file():
        if read_json(folder, CONFIG_FILE).get("model_type") in TEXT_PARTS:
            return found.renamed(hf_config.of_text_model(found))
    return found


def check_weights(config: ModelConfig, model: ModelSpec) -> None:
    """Raise ConfigError when the weights of `config.path` cannot be those of `model`. Reads only headers."""
    folder = Path(config.path)
    tensors, model = weight_tensors(folder), as_stored(folder, model)
    remedy = f"Is this the checkpoint of its {MODEL_FILE if is_ours(folder) else CONFIG_FILE}?"
    if wrong := weights_error(folder, model, tensors):
        raise ConfigError("model.path", config.path, wrong, remedy)
    needed = families.parameter_count(model)
    if tensors.elements < needed:  # more is allowed: a tied head may be stored separately
        reason = f"its weights hold {tensors.elements} numbers and its model has {needed}"
        raise ConfigError("model.path", config.path, reason, remedy)


def weights_error(folder: Path, model: ModelSpec, tensors: Tensors) -> str:
    """The first tensor that is missing in the folder or unknown to `model`, as a message; empty if there is none."""
    if not is_ours(folder):
        return hf_config.name_error(model, tensors.keys())
    wanted = set(hf_config.ours(model))
    different = sorted(wanted ^ set(tensors))
    if not different:
        return ""
    return f"has no array {different[0]!r}" if different[0] in wanted else f"has an unknown array {different[0]!r}"


def read_json(folder: Path, name: str) -> dict:
    """The JSON object in a file of the folder; ConfigError when it cannot be read or is not an object."""
    try:
        found = disk.read_json(folder / name)
    except (OSError, DataError) as error:
        reason = f"{name} cannot be read ({error})"
        raise ConfigError("model.path", str(folder), reason, "Give the folder of a Hugging Face checkpoint.") from error
    if not isinstance(found, dict):
        raise ConfigError("model.path", str(folder), f"{name} is not a JSON object", "Copy it again.")
    return found
