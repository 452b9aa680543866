"""`jaxroll weights import HF_FOLDER OUT` and `jaxroll weights export SOURCE OUT`, with one tensor in memory at a time.

Import writes a JaxRoll folder (see `jaxroll.learner.weights`), which `model.path` and `tokenizer.path` may name.
Export writes a Hugging Face folder for transformers, from a run's newest checkpoint (or its warm start), from one
checkpoint, or from a JaxRoll folder; with `--adapters`, the adapters alone for PEFT. Import and export of a model copy
the files of tokenizer and chat template byte for byte.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxroll import disk, sharding
from jaxroll.config import Config, MeshConfig
from jaxroll.config.derived import model_folder, tokenizer_folder
from jaxroll.errors import ConfigError
from jaxroll.learner import checkpoint_files, lora, peft, weights
from jaxroll.learner.lora import Lora
from jaxroll.models import folders, hf_config, params
from jaxroll.models.families import ModelSpec
from jaxroll.models.folders import DTYPES, TensorShape
from jaxroll.run_paths import RunPaths
from jaxroll.text import tokenizers
from jaxroll.text.tokenizers import CharTokenizer

ORIGIN_FILE = "huggingface.json"  # the config.json that a folder was imported with
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_DTYPES = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"]}
AS_STORED = "as-stored"
FRESH = "a fresh init"  # the description of parameters that no folder holds
NEWEST, BEST = "newest", "best"  # checkpoints of a run
CHOICES = (AS_STORED, *_DTYPES)


@dataclass(frozen=True)
class WeightSource:
    """Parameters to write: `value` reads one of `leaves`. `text` is a folder with the tokenizer's files, if any."""

    description: str
    spec: ModelSpec
    leaves: Mapping[str, TensorShape]
    value: Callable[[str], np.ndarray]
    text: Path | None
    origin: Mapping[str, Any] | None


@dataclass(frozen=True)
class OfRun:
    """A run folder with its config."""

    path: Path
    config: Config


def import_folder(folder: Path, out: Path, dtype: str) -> str:
    """Write the Hugging Face checkpoint in `folder` as the JaxRoll folder `out`; return a summary for the user."""
    if folders.is_ours(folder):
        raise ConfigError("HF_FOLDER", str(folder), "is a JaxRoll folder already", "Name it in model.path.")
    source = cast_to(_of_folder(folder), dtype)
    text, config = _text_files(folder), _file_of(folder, folders.CONFIG_FILE)
    with _new(out) as unfinished:
        about = {"kind": "hf", "path": "."} if "tokenizer.json" in text else {}
        weights.write(unfinished, source.leaves, source.value, source.spec, about)
        _copy(text | {ORIGIN_FILE: config}, unfinished)
    return _summary(source, 1, out, text)


def export(source: WeightSource, out: Path, dtype: str, shard_bytes: int) -> str:
    """Write `source` as the Hugging Face checkpoint `out`; return a summary for the user."""
    source = cast_to(source, dtype)
    spec, origin = source.spec, source.origin
    leaves = {
        theirs: (ours, expert, replace(leaf, shape=params.shape(ours, leaf.shape[1:] if experts else leaf.shape)))
        for ours, leaf in source.leaves.items()
        for experts in (params.of_experts(ours),)
        for expert, theirs in enumerate(params.names(spec, ours))
    }

    read = functools.lru_cache(maxsize=1)(source.value)  # the experts of a layer are slices of one array

    def tensor(theirs: str) -> np.ndarray:
        ours, expert, _ = leaves[theirs]
        return params.theirs(ours, read(ours)[expert] if params.of_experts(ours) else read(ours))

    text = {} if source.text is None else _text_files(source.text)
    with _new(out) as unfinished:
        count = folders.write_folder(
            unfinished,
            {name: leaf for name, (_, _, leaf) in leaves.items()},
            tensor,
            shard_bytes,
        )
        config = hf_config.to_huggingface(spec, next(iter(source.leaves.values())).dtype.name, origin)
        (unfinished / folders.CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _copy(text, unfinished)
    return _summary(source, count, out, text)


def export_adapters(path: Path, run: OfRun | None, out: Path, dtype: str, which: str = NEWEST) -> str:
    """Write the adapters of a run's newest or best checkpoint, or of one checkpoint, for PEFT; return a summary."""
    learner = None if run is None else run.config.learner
    path = _chosen(path, run, which)
    if run is None or learner is None or not learner.lora_rank or folders.is_ours(path):
        raise ConfigError("SOURCE", str(path), "has no adapters", "Give a run with learner.lora_rank above 0.")
    with weights.params(path) as values, _new(out) as unfinished:
        to = _DTYPES.get(dtype, DTYPES["F32"])
        peft.write(unfinished, learner, _base(run).spec, values, to, str(model_folder(run.config) or ""))
    return f"adapters of checkpoint {path} -> {out}: rank {learner.lora_rank}, {to.name}"


@contextlib.contextmanager
def opened(path: Path, run: OfRun | None, which: str = NEWEST) -> Iterator[WeightSource]:
    """The parameters in `path` (a run, one of its checkpoints, or a JaxRoll folder), for export; of a run, the newest
    checkpoint or the best one."""
    path = _chosen(path, run, which)
    if run is None:
        if not folders.is_ours(path):
            reason = "is neither a run, nor a checkpoint in a run's folder, nor a folder that JaxRoll wrote"
            raise ConfigError("SOURCE", str(path), reason, "Give RUN, RUN/checkpoints/LINEAGE.STEP, or RUN/warm.")
        yield _of_folder(path)
        return
    text = tokenizer_folder(run.config)
    if folders.is_ours(path):
        with weights.blaming(path, run.path):
            source = _of_folder(path)
        yield replace(source, text=text, origin=_origin(run))
        return
    with weights.params(path) as values:
        about = checkpoint_files.about(path)
        if (adapters := Lora.of(run.config.learner)) is not None:
            merged = _merged(adapters, _base(run), values, about["base"])
            description = f"checkpoint {path}, adapters merged"
            yield replace(merged, description=description, text=text, origin=_origin(run))
            return
        held = checkpoint_files.params(about)
        leaves = {name: TensorShape(np.dtype(dtype), shape) for name, (dtype, shape) in held.items()}
        spec = params.spec(run.config.model, leaves["embed"].shape[0])
        yield WeightSource(f"checkpoint {path}", spec, leaves, values.__getitem__, text, _origin(run))


def cast_to(source: WeightSource, dtype: str) -> WeightSource:
    """`source` with its numbers in `dtype`, one of CHOICES."""
    if dtype == AS_STORED:
        return source
    to = _DTYPES[dtype]
    leaves = {name: replace(leaf, dtype=to) for name, leaf in source.leaves.items()}
    return replace(source, leaves=leaves, value=lambda name: np.asarray(source.value(name)).astype(to, copy=False))


def _merged(adapters: Lora, base: WeightSource, trained: Mapping[str, np.ndarray], digest: str) -> WeightSource:
    """`base` merged with a checkpoint's adapters, float32; ConfigError when they were trained on another base."""
    shapes = {name: TensorShape(DTYPES["F32"], leaf.shape) for name, leaf in base.leaves.items()}
    frozen = folders.Converted(shapes, lambda name: np.asarray(base.value(name), np.float32))
    if lora.digest(frozen) != digest:
        reason = "the checkpoint's adapters were trained on other parameters"
        remedy = (
            "A fresh init has the same bits only with the jax version, platform and XLA_FLAGS of the run."
            if base.description == FRESH
            else "Restore the parameters that the run started from."
        )
        raise ConfigError("model.path", base.description, reason, remedy)
    return replace(base, leaves=shapes, value=lambda name: lora.merged_on_host(adapters, name, frozen[name], trained))


def _base(run: OfRun) -> WeightSource:
    """The parameters that the run starts from (see `weights.initial_folder`), in their stored dtype."""
    if (folder := weights.initial_folder(run.config, run.path)) is not None:
        with weights.blaming(folder, run.path):
            return _of_folder(folder)
    text = tokenizers.of_run(run.path, run.config.tokenizer)
    if text is None:
        reason = f"has no {RunPaths(run.path).alphabet.name}, which determines the size of its model's vocabulary"
        raise ConfigError("RUN", str(run.path), reason, "Restore the file from a copy.")
    spec = params.spec(run.config.model, text.vocab_size)
    made = params.init(spec, params.key(run.config), sharding.build(MeshConfig()), sharding.LEARNER)
    leaves = {name: TensorShape(DTYPES["F32"], value.shape) for name, value in made.items()}
    return WeightSource(FRESH, spec, leaves, lambda name: np.asarray(made[name]), None, None)


def _of_folder(folder: Path) -> WeightSource:
    spec = folders.described(folder)
    values = params.leaves(folder, spec)
    leaves = params.stored(folder, spec, folders.weight_tensors(folder))
    config = folder / (ORIGIN_FILE if folders.is_ours(folder) else folders.CONFIG_FILE)
    origin = folders.read_json(folder, config.name) if config.is_file() else None
    return WeightSource(str(folder), spec, leaves, values.__getitem__, folder, origin)


def _chosen(path: Path, run: OfRun | None, which: str) -> Path:
    """The checkpoint to export: `path` itself, or if that is a run its newest or best one."""
    if run is not None and path == run.path:
        return _best(run) if which == BEST else _newest(run)
    if which == BEST:
        raise ConfigError("--checkpoint", which, f"{path} is not a run", "Give the folder of a run, or leave it out.")
    return path


def _best(run: OfRun) -> Path:
    """The checkpoint that `learner.keep_best` keeps; ConfigError when the run keeps or has none."""
    if not (metric := run.config.learner.keep_best):
        raise ConfigError(
            "--checkpoint",
            BEST,
            "learner.keep_best is empty: no metric chooses a checkpoint",
            "Name a checkpoint, RUN/checkpoints/LINEAGE.STEP (`jaxroll checkpoints RUN`).",
        )
    found = checkpoint_files.best_of(run.path, metric)
    if found is None:
        raise ConfigError(
            "--checkpoint",
            BEST,
            f"no checkpoint of {run.path} has a value of {metric} yet",
            "Wait for the first evaluation, or export the newest one.",
        )
    return checkpoint_files.path_of(RunPaths(run.path).checkpoints, found[0])


def _newest(run: OfRun) -> Path:
    """The run's newest checkpoint, or its warm start if there is none; ConfigError when it has neither."""
    folder, warm = RunPaths(run.path).checkpoints, RunPaths(run.path).warm_start
    if versions := checkpoint_files.versions(folder):
        return checkpoint_files.path_of(folder, max(versions))
    if folders.is_ours(warm):
        return warm
    raise ConfigError("RUN", str(run.path), "has neither checkpoints nor a warm start", "Train first: jaxroll train.")


def _origin(run: OfRun) -> Mapping[str, Any]:
    """The config.json of the run's imported model, or the ids of its tokenizer's special tokens."""
    folder = model_folder(run.config)
    for name in (ORIGIN_FILE, folders.CONFIG_FILE):
        if folder and (folder / name).is_file():
            return folders.read_json(folder, name)
    ids = {"max_position_embeddings": hf_config.LONGEST_CONTEXT}
    if not tokenizer_folder(run.config):
        kind = CharTokenizer
        ids |= {"eos_token_id": kind.eos_id, "pad_token_id": kind.pad_id, "bos_token_id": kind.bos_id}
    return ids


@contextlib.contextmanager
def _new(out: Path) -> Iterator[Path]:
    """A temporary folder, renamed to `out` at the end; ConfigError when `out` exists and is not an empty folder."""
    disk.check_new_folder(out)
    with weights.written_whole(out) as unfinished:
        yield unfinished


def _text_files(folder: Path) -> dict[str, Path]:
    """The files of the folder's tokenizer, by name."""
    return {name: _file_of(folder, name) for name in TEXT_FILES if (folder / name).is_file()}


def _file_of(folder: Path, name: str) -> Path:
    """The file `name` of `folder`; ConfigError when it is a link that leads out of the folder, which is untrusted.

    In Hugging Face's cache, the names in `snapshots/REVISION` are links to files in `blobs` of the same model.
    """
    top, file = folder.resolve(), (folder / name).resolve()
    cache = (top.parent.parent / "blobs",) if top.parent.name == "snapshots" else ()
    if not any(file.is_relative_to(allowed) for allowed in (top, *cache)):
        reason = f"it is a link that leads out of the folder, to {file}"
        raise ConfigError(str(folder), name, reason, "Put the file itself there if it belongs to the model.")
    return file


def _copy(files: Mapping[str, Path], out: Path) -> None:
    for name, file in files.items():
        with disk.opened(file) as data, (out / name).open("xb") as copy:
            shutil.copyfileobj(data, copy)


def _summary(source: WeightSource, files: int, out: Path, copied: Iterable[str]) -> str:
    size = sum(leaf.size_bytes for leaf in source.leaves.values())
    dtypes = ", ".join(sorted({leaf.dtype.name for leaf in source.leaves.values()}))
    text = ", ".join(copied) or "none (it has no tokenizer files)"
    return (
        f"{source.description} -> {out}: {len(source.leaves)} tensors, {size / 1e6:.1f} MB of {dtypes} in {files} file"
        f"{'s' * (files != 1)}; text files: {text}"
    )
