"""The configuration: config files to checked Configs, and Configs to text. Other packages import from here.

`schema` says what can be set, `parsing` how text becomes typed values, `rules` what must not run together, `derived`
what follows from the keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxroll import disk
from jaxroll.config import derived
from jaxroll.config.parsing import assign, build, plain, unknown
from jaxroll.config.rewards import relative_to
from jaxroll.config.rules import check
from jaxroll.config.schema import (
    MODEL_SIZES,
    Config,
    EvaluatorConfig,
    LearnerConfig,
    MeshConfig,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SamplerConfig,
    SamplingConfig,
    ScheduleConfig,
    SftConfig,
    StoreConfig,
    SupervisorConfig,
    TaskConfig,
    TokenizerConfig,
    TransferConfig,
    WeightSwap,
)
from jaxroll.errors import ConfigError, DataError, described
from jaxroll.policy.limiter import max_age
from jaxroll.run_paths import RunPaths

if TYPE_CHECKING:  # it takes a tenth of the time to start a command; only config files need it
    import ml_collections

__all__ = [
    "MODEL_SIZES",
    "Config",
    "EvaluatorConfig",
    "LearnerConfig",
    "MeshConfig",
    "ModelConfig",
    "PlacementConfig",
    "RoleArgs",
    "RunConfig",
    "SamplerConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "SftConfig",
    "StoreConfig",
    "SupervisorConfig",
    "TaskConfig",
    "TokenizerConfig",
    "TransferConfig",
    "WeightSwap",
    "canonical_json",
    "check",
    "defaults",
    "digest",
    "load",
    "of_model_folder",
    "override",
    "parse",
    "read",
    "to_dict",
]

# A ConfigDict is typed as Any, because type checkers do not know its attributes.


# --- automatic values: they depend on other keys

_AUTO_STEPS, _AUTO_RATE, _AUTO_MB = -1, -1.0, -1
_AUTOMATIC: Mapping[str, Mapping[str, Any]] = {
    "sft": {"steps": _AUTO_STEPS},
    "learner": {"learning_rate": _AUTO_RATE},
    "store": {"retention_mb": _AUTO_MB},
}
# A warm start would overwrite an imported model, and the learning rate for a fresh model would destroy it. The rates of
# imported models are those of published GRPO runs: 1e-6 for all parameters, ten times as much for adapters.
_IMPORTED_RATE, _ADAPTER_RATE = 1e-6, 1e-5


def _chosen(config: Config) -> Config:
    """`config` with its automatic values chosen: `sft.steps`, `learner.learning_rate` and `store.retention_mb`."""
    fresh, sft, learner, store = not config.model.path, config.sft, config.learner, config.store
    if sft.steps == _AUTO_STEPS:
        sft = dataclasses.replace(sft, steps=SftConfig().steps if fresh else 0)
    if learner.learning_rate == _AUTO_RATE:
        imported = _ADAPTER_RATE if learner.lora_rank else _IMPORTED_RATE
        learner = dataclasses.replace(learner, learning_rate=LearnerConfig().learning_rate if fresh else imported)
    if store.retention_mb == _AUTO_MB:
        store = dataclasses.replace(store, retention_mb=_retention_mb(config))
    return dataclasses.replace(config, sft=sft, learner=learner, store=store)


# A stored token has an id and a log-prob of 4 bytes, and two masks. Recorded experts come on top.
_TOKEN_BYTES, _MEMBER_BYTES = 10, 4096
_STEPS_UNTIL_DURABLE = 2  # steps that are trained while a checkpoint is written


def _retention_mb(config: Config) -> int:
    """MB of trajectories that can exist between two checkpoints, if all have full length; 512 or more.

    With this `store.retention_mb`, none causes a checkpoint before `learner.checkpoint_every`.
    """
    schedule, learner = config.schedule, config.learner
    tokens = min(derived.episode_tokens(config), derived.sample_tokens(learner))
    member_bytes = tokens * (_TOKEN_BYTES + 4 * derived.support_tokens(config.sampling)) + _MEMBER_BYTES
    trained = learner.checkpoint_every + _STEPS_UNTIL_DURABLE
    outstanding = max_age(min(max(0.0, schedule.alpha), schedule.steps)) + 1
    groups = (trained + outstanding) * (schedule.groups_per_step + schedule.redundant_groups)
    size_bytes = groups * schedule.members_per_group * member_bytes
    return max(StoreConfig().retention_mb, size_bytes // int(derived.CHECKPOINT_WANTED_AT * 2**20) + 1)


def defaults() -> Any:
    """Return every key with its default, for a `get_config()` to start from; some are automatic until `parse`.

    ml_collections' own type checks are off, because `parse` makes the same checks with better messages.
    """
    import ml_collections

    values = to_dict(Config())
    for section, automatic in _AUTOMATIC.items():
        values[section] |= automatic
    return ml_collections.ConfigDict(values, type_safe=False)


def _with_automatic(values: Mapping[str, Any]) -> dict:
    """`values` with the automatic values of keys that are absent."""
    sections = {name: values.get(name, {}) for name in _AUTOMATIC}
    filled = {name: {**_AUTOMATIC[name], **own} for name, own in sections.items() if isinstance(own, Mapping)}
    return {**values, **filled}


def advice(config: Config) -> list[str]:
    """Lines about keys of an accepted config with which a run works, but waits more than it has to."""
    tokens, waits = config.sampler.flush_tokens, 4 * config.sampler.decode_chunk
    if not 0 < tokens <= waits:
        return []
    named = f"sampler.flush_tokens = {tokens}: a sampler waits for the store at every flush"
    return [f"{named}, up to 4 × sampler.decode_chunk = {waits}. Set it well above that (docs/machines.md)."]


_FILE_BYTES = 1 << 20  # of a config file, which a person writes


def read(path: str | Path) -> Any:
    """Return what `get_config()` of the config file `path` returns, unchecked."""
    path = Path(path)
    if not _is_file(path):
        reason = "is a folder" if os.path.isdir(path) else "no such file"
        raise ConfigError("--config", str(path), reason, "Give a Python file with get_config(), as in configs/.")
    try:
        disk.read_bytes(path, _FILE_BYTES)  # Python would read a file of any size
    except (OSError, DataError) as error:
        reason = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
        raise ConfigError("--config", str(path), reason, "Give a Python file that you may read.") from error
    spec = importlib.util.spec_from_file_location(f"jaxroll_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError("--config", str(path), "not a Python file", "Config files end in .py.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except ConfigError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a program of the user's, which may raise anything
        known: Any = getattr(error, "obj", None)
        if isinstance(error, AttributeError) and _is_config_dict(known):  # a key that the ConfigDict does not have
            raise unknown("", str(error.name), None, tuple(known), Config) from error
        reason = described(error).partition("\n")[0]
        raise ConfigError("--config", str(path), reason, "Give a Python file whose get_config() runs.") from error
    if not _is_config_dict(config):
        raise ConfigError("--config", str(path), "get_config() returned no ConfigDict", "Start from config.defaults().")
    return config


def _is_config_dict(values: object) -> bool:
    """True if `values` are a ConfigDict; there is none while nothing has imported its package."""
    package = sys.modules.get("ml_collections")
    return package is not None and isinstance(values, package.ConfigDict)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a folder that must not be searched
        return False


_PATHS = (("model", "path"), ("tokenizer", "path"), ("task", "path"), ("learner", "lora_path"))
_TEXT_FROM_FILE, _JSON_FROM_FILE = ("system_prompt",), ("few_shot", "tools")
_FILE, _FILE_LIMIT_BYTES = "file:", 1 << 20


def parse(values: ml_collections.ConfigDict | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The checked Config that `values` describe; keys that are absent have their values of `defaults()`.

    `overrides` are those that `values` contain: a key that they name and `schedule.mode` fixes must have its value.
    """
    given: Any = values
    if _is_config_dict(given):
        given = given.to_dict()
    config = build(Config, _with_automatic(with_files(given, Path())))
    named = {_key_and_value(text)[0].removeprefix("schedule.") for text in overrides}
    config = dataclasses.replace(config, schedule=derived.with_mode(config.schedule, config.schedule.mode, named))
    config = _chosen(config)
    check(config)
    return config


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the checked Config of file `path` with `--config.key=value` overrides (`--config.` may be absent).

    Paths in the file are relative to its folder, paths in overrides to the working directory.
    """
    values = read(path).to_dict()
    for section, key in _PATHS:
        if found := (values.get(section) or {}).get(key):
            values[section][key] = os.path.normpath(Path(path).resolve().parent / found)
    _resolve_sources(values, Path(path).resolve().parent)
    return parse(override(with_files(values, Path(path).resolve().parent), overrides), overrides)


_FOLDER_TOKENS, _FOLDER_BUCKETS = 4096, (64, 256)  # of a model that is served without a config of its own


def of_model_folder(folder: Path) -> Config:
    """The config to serve the model in `folder`, which has Hugging Face's layout: 4096 tokens a request."""
    sizes = {
        "sampler": {"prefill_buckets": _FOLDER_BUCKETS, "decode_chunk": 4},
        "sampling": {"max_tokens": _FOLDER_BUCKETS[-1]},
        "task": {"max_prompt_tokens": _FOLDER_TOKENS - _FOLDER_BUCKETS[-1]},
        "model": {"path": str(folder)},
        "tokenizer": {"kind": "hf", "path": str(folder)},
    }
    return _chosen(build(Config, sizes))


def _resolve_sources(values: dict, folder: Path) -> None:
    """Make paths absolute, in place: those of a mixture's sources, held-out sets, reward models and functions."""
    task = values.get("task") or {}
    mixture = task.get("mixture") or []
    sets = (values.get("evaluator") or {}).get("sets") or {}
    sources = [
        *(mixture if isinstance(mixture, (list, tuple)) else ()),
        *(sets.values() if isinstance(sets, dict) else ()),
    ]
    for entry in (entry for entry in (task, *sources) if isinstance(entry, dict)):
        rewards = entry.get("reward_args")
        model = rewards.get("reward_model") if isinstance(rewards, dict) else None
        for named in (model, None if entry is task else entry):  # that of `task` is absolute already
            if isinstance(named, dict) and named.get("path"):
                named["path"] = os.path.normpath(folder / str(named["path"]))
        for key in ("extract", "reward", "agent"):
            if isinstance(function := entry.get(key), str):
                entry[key] = relative_to(str(folder), function)


def with_files(values: Mapping[str, Any], folder: Path) -> dict:
    """`values` with the content of each file that `task` or a source names as file:PATH, relative to `folder`.

    The content becomes part of the config, so that a run does not change when the file does, and needs no copy of it.
    """
    found = dict(values)
    if isinstance(task := values.get("task"), Mapping):
        found["task"] = _with_files(task, "task", folder)
        if isinstance(entries := task.get("mixture"), list | tuple):
            read = [_with_files(entry, f"task.mixture[{number}]", folder) for number, entry in enumerate(entries)]
            found["task"]["mixture"] = read
    if isinstance(evaluator := values.get("evaluator"), Mapping) and isinstance(sets := evaluator.get("sets"), Mapping):
        read = {name: _with_files(entry, f"evaluator.sets.{name}", folder) for name, entry in sets.items()}
        found["evaluator"] = {**evaluator, "sets": read}
    return found


def _with_files(section: Any, key: str, folder: Path) -> Any:
    if not isinstance(section, Mapping):
        return section
    found = dict(section)
    for name in _TEXT_FROM_FILE + _JSON_FROM_FILE:
        value = found.get(name)
        if not isinstance(value, str) or not value.startswith(_FILE):
            continue
        path = folder / Path(value.removeprefix(_FILE))
        try:
            text = disk.read_text(path, _FILE_LIMIT_BYTES)
            found[name] = text.rstrip("\n") if name in _TEXT_FROM_FILE else disk.parse_json(text, path.name)
        except (OSError, DataError) as error:
            reason = f"{path} cannot be read: {error.strerror if isinstance(error, OSError) else error}"
            raise ConfigError(f"{key}.{name}", value, reason, "Paths are relative to the config's folder.") from error
    return found


def override(values: dict, overrides: Sequence[str]) -> dict:
    """`values` (changed in place) with the overrides put in, each typed by its key."""
    for text in overrides:
        path, value = _key_and_value(text)
        if value is None:
            raise ConfigError(path, "", "an override without a value", f"Write --config.{path}=VALUE.")
        assign(Config, values, path, value)
    return values


def _key_and_value(text: str) -> tuple[str, str | None]:
    path, equals, value = text.removeprefix("--").removeprefix("config.").partition("=")
    return path, value if equals else None


def to_dict(config: Config) -> dict:
    """Plain nested dicts, lists and scalars: what JSON holds."""
    return plain(dataclasses.asdict(config), "")


def canonical_json(config: Config) -> str:
    """The one JSON text of a config: keys sorted, no blanks."""
    return json.dumps(to_dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(config: Config) -> str:
    """32 hex digits that identify the config between processes."""
    return hashlib.blake2b(canonical_json(config).encode(), digest_size=16).hexdigest()


# --- arguments of a role


@dataclass(frozen=True)
class RoleArgs:
    """Arguments of a role's `main`. Without `store_address` the address is read from `run_dir/store.addr`.

    For the store itself `store_address` is where it listens (default: any free port of the loopback). `index` is which
    of several samplers, actors or hosts of the learner, and `process` which host of the sampler; `coordinator` is where
    the hosts of a role meet, HOST:PORT (None: JAX finds that out; port 0: any, written to a file in `run_dir`). `host`
    is the name under which samplers reach the learner, or actors a sampler, which listens for them on `port` (0: any).
    `samplers` are their addresses, for an actor that does not find them in `run_dir`. Traffic beyond the loopback takes
    certificates (`jaxroll.rpc.tls`), or `insecure`: plain text. `fork` is for the learner: the checkpoint to fork the
    run at, as STEP@NAME (see `jaxroll.policy.selection`); None resumes. With `new_log` the learner begins the store's
    log, if that is new, at the newest checkpoint. A sampler or actor that is asked to stop leases no more and has
    `drain_s` to finish its running members; it returns the others. `peer` is the address of the other store
    (`store.standby`), of which that with index 0 begins the run.
    """

    config: Config
    run_dir: Path
    store_address: str | None = None
    index: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    samplers: tuple[str, ...] = ()
    insecure: bool = False
    fork: str | None = None
    new_log: bool = False
    coordinator: str | None = None
    process: int = 0
    drain_s: float = 0.0
    peer: str | None = None

    @property
    def paths(self) -> RunPaths:
        """The files and folders of the run."""
        return RunPaths(self.run_dir)

    def hosts(self, role: Literal["learner", "sampler"]) -> RoleHosts:
        """The processes of the learner, or of this sampler."""
        placement, name = self.config.placement, role
        if role == "learner":
            count, index, mesh = placement.learner_hosts, self.index, self.config.learner.mesh
        else:
            name, count, index = f"{role}-{self.index}", placement.sampler_hosts, self.process
            mesh = self.config.sampler.mesh
        key, meeting = f"placement.{role}_hosts", self.paths.coordinator_address(name)
        return RoleHosts(name, key, count, index, mesh, meeting)

    @property
    def config_digest(self) -> str:
        """The digest every role shows to the store."""
        return digest(self.config)


@dataclass(frozen=True)
class RoleHosts:
    """The processes of a role, one per host: its name, their number, the index of this one, the mesh over all devices.

    `key` is the config key of their number. To `meeting` process 0 writes JAX's coordinator if it chooses the port.
    """

    name: str
    key: str
    count: int
    index: int
    mesh: MeshConfig
    meeting: Path
