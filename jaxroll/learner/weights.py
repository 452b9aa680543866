"""Weights folders, which other tools can open: parameters as safetensors, model and tokenizer as JSON.

    model.safetensors   arrays under JaxRoll's flat names, float32 or with their imported dtype
    model.json          the ModelSpec
    text.json           the arguments from which `jaxroll.text.tokenizers` builds the tokenizer

A warm start is such a folder, and `jaxroll weights import` writes one (with the files of its tokenizer). Unlike a
checkpoint it contains no optimizer state and no run's metadata. Arrays are written and read one at a time.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxroll import disk
from jaxroll.config import Config
from jaxroll.config.derived import has_warm_start, model_folder
from jaxroll.errors import CheckpointDamaged, ConfigError, DataError
from jaxroll.learner import checkpoint_files
from jaxroll.learner.checkpoint_files import STATE
from jaxroll.models import folders
from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.models.folders import Converted, TensorShape
from jaxroll.run_paths import RunPaths

_ARRAYS, _MODEL, _TOKENIZER = folders.SINGLE, folders.MODEL_FILE, "text.json"
_FLOAT32 = np.dtype(np.float32)


def save(folder: Path, params: Mapping[str, Any], spec: ModelSpec, tokenizer: Mapping[str, Any]) -> None:
    """Write everything into a temporary folder, then rename it to `folder`, which is replaced if it exists."""
    leaves = {name: TensorShape(_FLOAT32, tuple(value.shape)) for name, value in params.items()}
    with written_whole(folder) as unfinished:
        write(unfinished, leaves, lambda name: jax.device_get(params[name]), spec, tokenizer)


def write(
    folder: Path,
    leaves: Mapping[str, TensorShape],
    value: Callable[[str], np.ndarray],
    spec: ModelSpec,
    tokenizer: Mapping[str, Any],
) -> None:
    """Write the three files into `folder`; call `value` for one parameter at a time."""
    folders.write(folder / _ARRAYS, leaves, value)
    (folder / _MODEL).write_text(json.dumps(dataclasses.asdict(spec), indent=1), encoding="utf-8")
    (folder / _TOKENIZER).write_text(json.dumps(dict(tokenizer), indent=1, ensure_ascii=False), encoding="utf-8")


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder to write into, renamed to `folder` at the end, or removed when writing fails.

    An existing `folder` is moved aside for the rename and then removed. The new folder is synced to disk before the
    rename, and the rename before this returns.
    """
    folder = Path(folder)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        disk.sync_folder(unfinished)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        disk.name_file(error, folder)
        raise
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)  # not removed first: if this process is killed here, the old data still exists
    unfinished.rename(folder)
    disk.sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def load(folder: Path) -> Mapping[str, np.ndarray]:
    """The parameters as float32 host arrays under JaxRoll's flat names; each is read on access and not kept.

    ConfigError when the file is missing or is not a safetensors file.
    """
    path = _file(folder, _ARRAYS)
    try:
        tensors = folders.opened(path)
    except DataError as error:
        raise ConfigError("weights", str(path), f"not a safetensors file ({error})", "Write it again.") from error
    return Converted(tensors, lambda name: np.asarray(tensors[name], np.float32))


# --- the parameters that a run starts from: its warm start, else the model of `model.path`, else a fresh init


def initial_folder(config: Config, run_dir: Path) -> Path | None:
    """The folder of the run's initial parameters: its warm start, or `model.path`. None for a fresh init."""
    if (warm := RunPaths(run_dir).warm_start).is_dir():
        return warm
    return model_folder(config)


def initial(config: Config, run_dir: Path, spec: ModelSpec) -> Mapping[str, np.ndarray] | None:
    """The parameters in `initial_folder`, as float32 host arrays that are read on access; None for a fresh init."""
    folder = initial_folder(config, run_dir)
    with blaming(folder, run_dir):
        return folder and model_params.weights(dataclasses.replace(config.model, path=str(folder)), spec)


@contextmanager
def blaming(folder: Path | None, run_dir: Path) -> Iterator[None]:
    """Errors of `folder` name the run if it is the run's warm start: the user did not set `model.path`."""
    try:
        yield
    except ConfigError as error:
        if folder != RunPaths(run_dir).warm_start:
            raise
        reason, remedy = f"its warm start in {folder}: {error.reason}", f"Make it again with `jaxroll sft {run_dir}`."
        raise ConfigError("RUN", str(run_dir), reason, remedy) from error


def initial_of_role(config: Config, run_dir: Path, spec: ModelSpec) -> Mapping[str, np.ndarray] | None:
    """`initial`, for a role: `jaxroll train` makes the warm start, roles do not.

    ConfigError if the config asks for a warm start and there is none.
    """
    warm = RunPaths(run_dir).warm_start
    if has_warm_start(config) and not warm.is_dir():
        remedy = f"Run `jaxroll sft {run_dir}` first, or set sft.steps=0."
        raise ConfigError("sft.steps", config.sft.steps, f"the warm start is not in {warm}", remedy)
    return initial(config, run_dir, spec)


# --- model and tokenizer of a weights folder


def model_spec(folder: Path) -> ModelSpec:
    """The model that the parameters belong to; ConfigError when the file is missing or describes another version's."""
    try:
        return ModelSpec(**_json(folder, _MODEL))
    except TypeError as error:
        reason = f"{_MODEL} describes no model of this version ({error})"
        raise ConfigError("weights", str(folder), reason, "Use the JaxRoll that wrote it.") from error


def tokenizer(folder: Path) -> dict[str, Any]:
    """The tokenizer's arguments, as given to `save`."""
    return _json(folder, _TOKENIZER)


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = _file(folder, name)
    try:
        found = disk.read_json(path)
    except DataError as error:
        raise ConfigError("weights", str(path), str(error), "Write it again.") from error
    if not isinstance(found, dict):
        raise ConfigError("weights", str(path), "not a JSON object", "Write it again.")
    return found


def _file(folder: Path, name: str) -> Path:
    path = Path(folder) / name
    if not path.is_file():
        raise ConfigError("weights", str(folder), f"holds no {name}", "Give a folder that `jaxroll sft` wrote.")
    return path


# --- The parameters of a checkpoint as host arrays, one at a time, without the mesh and the devices of the run


@contextmanager
def params(checkpoint: Path) -> Iterator[Converted]:
    """The parameters by flat name, each read on access.

    Every file is compared with its checksum first; CheckpointDamaged when one differs.
    """
    if wrong := checkpoint_files.damage(checkpoint):
        raise CheckpointDamaged(
            f"checkpoint {checkpoint} cannot be read ({wrong}); export another one (`jaxroll checkpoints RUN`)"
        )
    shapes = checkpoint_files.params(checkpoint_files.about(checkpoint))
    handler = ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler())
    with ocp.Checkpointer(handler) as reader:
        yield Converted(shapes, lambda name: _read(reader, checkpoint, name, *shapes[name]))


def _read(reader: ocp.Checkpointer, checkpoint: Path, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    key = f"params['{name}']"
    item = {key: jax.ShapeDtypeStruct(shape, np.dtype(dtype))}
    as_host_array = {key: ocp.RestoreArgs(restore_type=np.ndarray)}
    wanted = ocp.args.PyTreeRestore(item=item, restore_args=as_host_array, partial_restore=True)
    try:
        found = reader.restore(checkpoint, args=ocp.args.Composite(state=wanted))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointDamaged(f"{name} of checkpoint {checkpoint} cannot be read ({error})") from error
    return cast(np.ndarray, found[STATE][key])
