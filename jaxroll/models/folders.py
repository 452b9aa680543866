"""Model folders, read without JAX: the spec, the completeness of the weights, safetensors files.

There are two kinds: a Hugging Face checkpoint (config.json, tensors under Hugging Face's names), and a JaxRoll folder
as written by `jaxroll sft` and `jaxroll weights import` (model.json, arrays under JaxRoll's names; see
`jaxroll.learner.weights`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np

from jaxroll import disk
from jaxroll.config import MODEL_SIZES, Config, ModelConfig, SamplerConfig
from jaxroll.config.derived import model_folder
from jaxroll.errors import ConfigError, DataError
from jaxroll.models import families, hf_config
from jaxroll.models.families import TEXT_PARTS, ModelSpec

# --- Safetensors files, read and written one tensor at a time. No JAX; tensors are memory-mapped, not copied
#
# A file is the length of its header (8 bytes), the header (JSON: name → dtype, shape, offsets), and the bytes of all
# tensors without gaps. A folder holds one file, or several with an index from tensors to files.

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADER_LIMIT = 32 << 20  # about 300,000 tensors; a third of the reference implementation's limit
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_DIMS = 32  # numpy supports 64
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


@dataclass(frozen=True)
class TensorShape:
    """Dtype and shape of one tensor."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the tensor."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Placed:
    """The position of one tensor: byte `start` of `file`."""

    leaf: TensorShape
    file: Path
    start: int


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A header's entry of one tensor."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA, _ENTRY = msgspec.json.Decoder(dict[str, str]), msgspec.json.Decoder(_Entry)


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of some files by name; each is memory-mapped on access, read-only."""

    def __init__(self, placed: Mapping[str, Placed]) -> None:
        self._placed = dict(placed)

    def __getitem__(self, name: str) -> np.ndarray:
        placed = self._placed[name]
        if not placed.leaf.size_bytes:
            return np.zeros(placed.leaf.shape, placed.leaf.dtype)
        return np.memmap(placed.file, placed.leaf.dtype, "r", placed.start, placed.leaf.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._placed)

    def __len__(self) -> int:
        return len(self._placed)

    def renamed(self, names: Mapping[str, str]) -> Tensors:
        """Some of the tensors, by new name: `names` maps it to the old one."""
        return Tensors({new: self._placed[old] for new, old in names.items()})

    def leaf(self, name: str) -> TensorShape:
        """Dtype and shape of a tensor, without reading it."""
        return self._placed[name].leaf

    @property
    def elements(self) -> int:
        """The total number of elements of all tensors."""
        return sum(math.prod(placed.leaf.shape) for placed in self._placed.values())


Index = tuple[slice, ...]  # one per axis


class Converted(Mapping[str, np.ndarray]):
    """Arrays by name, computed on access and not kept.

    `make` computes a whole array, `slice_of` a slice of it without reading the rest.
    """

    def __init__(
        self,
        names: Mapping[str, Any],
        make: Callable[[str], np.ndarray],
        slice_of: Callable[[str, Index], np.ndarray] | None = None,
    ) -> None:
        self._names, self._make, self._slice_of = tuple(names), make, slice_of

    def slice_of(self, name: str, index: Index) -> np.ndarray:
        """`self[name][index]`, without reading the rest if the arrays were created so."""
        return self._slice_of(name, index) if self._slice_of else self[name][index]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def opened(path: Path) -> Tensors:
    """The tensors of one file. DataError for an invalid file; OSError when it cannot be opened.

    It needs memory in proportion to the header. Sizes in the header are checked against the file before they are used.
    """
    with disk.opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise DataError(f"{path.name} is not a safetensors file")
        text = file.read(length)
    try:
        placed = {name: _placed(path, 8 + length, entry) for name, entry in _entries(text).items()}
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        raise DataError(f"the header of {path.name} cannot be read ({error})") from error
    disk.parse_json(text, f"the header of {path.name}", unique=True)
    _check_contiguous(path, placed, 8 + length, size)
    return Tensors(placed)


def _entries(text: bytes) -> dict[str, _Entry]:
    header = _HEADER.decode(text)
    if (metadata := header.pop("__metadata__", None)) is not None:
        _METADATA.decode(metadata)
    return {name: _ENTRY.decode(entry) for name, entry in header.items()}


def _check_contiguous(path: Path, placed: Mapping[str, Placed], data: int, size: int) -> None:
    """Raise DataError when tensors overlap, leave gaps, or extend beyond the file."""
    end = data
    for name, one in sorted(placed.items(), key=lambda item: (item[1].start, item[1].leaf.size_bytes)):
        if one.start != end:
            raise DataError(f"{path.name}: {name!r} begins at byte {one.start}, but the previous tensor ends at {end}")
        end += one.leaf.size_bytes
    if end != size:
        raise DataError(f"{path.name} has {size} bytes and its header needs {end}: it was not copied whole")


def opened_folder(folder: Path) -> Tensors | None:
    """All tensors of a folder, from one file or by its index; None when it has neither. DataError as `opened`."""
    if not (folder / INDEX).exists():
        return opened(folder / SINGLE) if (folder / SINGLE).exists() else None
    index = disk.read_json(folder / INDEX, HEADER_LIMIT)
    files: Any = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise DataError(f"its {INDEX} has no weight_map")
    held = {file: opened(_in_folder(folder, file)) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in held[file]:
            raise DataError(f"its {INDEX} puts {name!r} in {file}, which does not hold it")
    return Tensors({name: placed for tensors in held.values() for name, placed in tensors._placed.items()})


def write(path: Path, leaves: Mapping[str, TensorShape], value: Callable[[str], np.ndarray]) -> None:
    """Write a file of `leaves` in their order; call `value` for one tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, leaf in leaves.items():
        start, end = end, end + leaf.size_bytes
        header[name] = {"dtype": code(leaf.dtype), "shape": list(leaf.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, leaf in leaves.items():
            array = np.ascontiguousarray(value(name), leaf.dtype)
            if array.shape != leaf.shape:
                raise ValueError(f"{name} has shape {array.shape}, declared was {leaf.shape}")
            file.write(array.reshape(-1).view(np.uint8).data)


def write_folder(
    folder: Path, leaves: Mapping[str, TensorShape], value: Callable[[str], np.ndarray], shard_bytes: int
) -> int:
    """Write `leaves` into one file, or into several with an index if they exceed `shard_bytes`; return their number."""
    shards = _shards(leaves, shard_bytes)
    if len(shards) == 1:
        write(folder / SINGLE, leaves, value)
        return 1
    files = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(folder / file, {name: leaves[name] for name in names}, value)
        files |= dict.fromkeys(names, file)
    total = sum(leaf.size_bytes for leaf in leaves.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(shards)


def code(dtype: np.dtype) -> str:
    """The header's code of this dtype."""
    return _CODES[np.dtype(dtype)]


def _shards(leaves: Mapping[str, TensorShape], shard_bytes: int) -> list[list[str]]:
    """The names in order, divided into shards of at most `shard_bytes`; a larger tensor gets its own shard."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, leaf in leaves.items():
        if shards[-1] and held + leaf.size_bytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += leaf.size_bytes
    return shards


def _placed(path: Path, data: int, entry: _Entry) -> Placed:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"dtype {entry.dtype[:20]!r} is not supported; known: {', '.join(DTYPES)}")
    leaf = TensorShape(dtype, entry.shape)
    start, end = entry.data_offsets
    if end - start != leaf.size_bytes:
        raise ValueError(f"{end - start} bytes for a tensor of {leaf.size_bytes}")
    if leaf.size_bytes == 0 and math.prod(size or 1 for size in leaf.shape) >= 2**48:
        raise ValueError(f"an empty tensor of shape {leaf.shape}")
    return Placed(leaf, path, data + start)


def _in_folder(folder: Path, file: str) -> Path:
    """The path of `file` in `folder`; DataError when an index names a file outside of it."""
    if Path(file).name != file or file in ("", ".", ".."):
        raise DataError(f"its {INDEX} names {file!r}, which is not a file of the folder")
    return folder / file


# --- Model folders, read without JAX

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


def with_transfer_deadline(config: Config) -> Config:
    """`config` with the deadline of a transfer of all parameters: `transfer.deadline_s` for each 6 GB, at least once.

    If the folder of the model cannot be read here, `model.size` decides.
    """
    folder = model_folder(config)
    try:
        model = described(folder) if folder else families.spec(config.model.size)
    except (ConfigError, DataError):
        if config.model.size not in MODEL_SIZES:
            return config
        model = families.spec(config.model.size)
    size_bytes = families.parameter_count(model) * (2 if config.transfer.dtype == "bfloat16" else 4)
    limit_s = config.transfer.deadline_s * max(1.0, size_bytes / 6e9)  # by default a tenth of a link of 10 Gb/s
    return dataclasses.replace(config, transfer=dataclasses.replace(config.transfer, deadline_s=limit_s))


def described(folder: Path, compute_dtype: str = "float32") -> ModelSpec:
    """The model that a folder of either kind describes; ConfigError when it is not supported."""
    name = MODEL_FILE if is_ours(folder) else CONFIG_FILE
    values = read_json(folder, name)
    try:
        if name == CONFIG_FILE:
            return hf_config.from_huggingface(values, compute_dtype=compute_dtype)
        fields: dict[str, Any] = {**values, "compute_dtype": compute_dtype, "draft": None}
        return ModelSpec(**fields)
    except TypeError as error:
        reason = f"its {name} has a key that is unknown, or lacks one ({error})"
        raise ConfigError("model.path", str(folder), reason, "Copy it again.") from error


def with_draft(config: SamplerConfig, model: ModelSpec) -> ModelSpec:
    """`model` with the draft model in the folder `config.draft_model`, if one is set; its weights are not read."""
    if not config.draft_model:
        return model
    with of_draft(config.draft_model):
        draft = described(Path(config.draft_model), model.compute_dtype)
        if draft.value_head:
            raise ConfigError("model", draft.name, "it is no language model", "Give one.")
    return dataclasses.replace(model, draft=draft)


def check_draft(config: SamplerConfig, model: ModelSpec) -> None:
    """Raise ConfigError when the draft model of `with_draft` or its weights cannot be used. Reads only headers."""
    if draft := with_draft(config, model).draft:
        with of_draft(config.draft_model):
            check_weights(ModelConfig(path=config.draft_model), draft)


@contextlib.contextmanager
def of_draft(folder: str) -> Iterator[None]:
    """Errors are about the draft model in `folder`."""
    try:
        yield
    except ConfigError as error:
        here = "" if folder in str(error.value) else f"{error.key} = {error.value!r}: "
        raise ConfigError("sampler.draft_model", folder, f"{here}{error.reason}", error.remedy) from error


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
        raise ConfigError(
            "model.path",
            str(folder),
            f"it has {labels} labels, a reward model has one",
            "Give a model that was trained with num_labels=1.",
        )
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
        found = opened_folder(folder)
    except (OSError, DataError) as error:
        raise ConfigError("model.path", str(folder), str(error), "Copy the checkpoint again.") from error
    if found is None:
        reason = f"holds neither {SINGLE} nor {INDEX}"
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
