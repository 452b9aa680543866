"""Paths of the files in a run's folder, migration of a folder that an earlier version wrote, and roles by process."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxroll.errors import ConfigError


@dataclass(frozen=True)
class RunPaths:
    """Paths in the run's folder, by meaning; the only place that knows their names.

    A property returns the path whether or not there is a file. docs/run_folder.md describes the folder for users.
    """

    folder: Path

    def owns(self, path: Path) -> bool:
        """True if `path` is a file or folder of the run, or is within one; these must not be overwritten."""
        names = (name for name, value in vars(RunPaths).items() if isinstance(value, property))
        own = {Path(os.path.realpath(getattr(self, name))) for name in names}  # `resolve` raises for a loop of links
        own |= {
            Path(os.path.realpath(self.database)).with_name(f"{self.database.name}{end}") for end in ("-wal", "-shm")
        }
        real = Path(os.path.realpath(path))
        return not own.isdisjoint((real, *real.parents))

    @property
    def run_file(self) -> Path:
        """Config, digest, versions and devices of the run. A folder without it is no run."""
        return self.folder / "run.json"

    def handed_config(self, name: str) -> Path:
        """A config that is too large for an environment variable, for the processes of its supervisor."""
        return self.folder / f".config-{name}.json"

    @property
    def lock(self) -> Path:
        """Lock of the supervisor, or of a store that was started alone."""
        return self.folder / ".lock"

    @property
    def metrics(self) -> Path:
        """Metric rows and events, one JSON object a line, written by store and supervisor."""
        return self.folder / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.folder / "tb"

    @property
    def logs(self) -> Path:
        """Folder of the processes' output."""
        return self.folder / "logs"

    def log_of(self, process: str) -> Path:
        """Output of a process that the supervisor started."""
        return self.logs / f"{process}.log"

    @property
    def profiles(self) -> Path:
        """Folder of the traces of `jaxroll profile`, one folder each."""
        return self.folder / "profiles"

    @property
    def page(self) -> Path:
        """The page that `jaxroll report` writes."""
        return self.folder / "report.html"

    @property
    def launch(self) -> Path:
        """Folder of the files for the engine that starts the roles."""
        return self.folder / "launch"

    @property
    def mlflow(self) -> Path:
        """Folder of the tracker `mlflow` where MLFLOW_TRACKING_URI is not set."""
        return self.folder / "mlruns"

    @property
    def trackio(self) -> Path:
        """Folder of the tracker `trackio` where TRACKIO_DIR is not set."""
        return self.folder / "trackio"

    @property
    def verdicts(self) -> Path:
        """Verdicts of judges and reward models, and the budget that they used (SQLite)."""
        return self.folder / "verdicts.db"

    # --- the store

    @property
    def database(self) -> Path:
        """The store's log and its tables (SQLite)."""
        return self.folder / "store.db"

    @property
    def database_copy(self) -> Path:
        """The copy of the log on its way to a standby, removed when that has it."""
        return self.folder / "store-copy.db"

    @property
    def store_lock(self) -> Path:
        """Lock of the store process; it contains its pid."""
        return self.folder / "store.lock"

    @property
    def store_address(self) -> Path:
        """HOST:PORT of the store, written once it answers."""
        return self.folder / "store.addr"

    @property
    def token(self) -> Path:
        """The run's secret, from which the tokens of its roles are derived."""
        return self.folder / "token"

    @property
    def tls(self) -> Path:
        """Folder of the certificates."""
        return self.folder / "tls"

    # --- the roles

    @property
    def alphabet(self) -> Path:
        """Alphabet of a `char` tokenizer, which the config does not contain."""
        return self.folder / "alphabet.json"

    @property
    def warm_start(self) -> Path:
        """Folder of the warm start's parameters."""
        return self.folder / "warm"

    @property
    def warm_start_done(self) -> Path:
        """Mark that the warm start need not be repeated on `--resume`."""
        return self.folder / ".warm-done"

    @property
    def checkpoints(self) -> Path:
        """Folder of the learner's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def forked(self) -> Path:
        """Mark that the learner has made its fork, so that the supervisor starts the other roles."""
        return self.folder / ".forked"

    def coordinator_address(self, role: str) -> Path:
        """HOST:PORT of JAX's coordinator, where `role` has several hosts and chooses the port itself."""
        return self.folder / ("learner.addr" if role == "learner" else f"{role}.hosts.addr")

    def sampler_address(self, name: str) -> Path:
        """HOST:PORT at which the sampler `name` serves generation requests of actors."""
        return self.folder / f"{name}.addr"

    def http_address(self, name: str) -> Path:
        """Base URL at which the sampler `name` answers HTTP requests."""
        return self.folder / f"{name}.http"

    @property
    def http_token(self) -> Path:
        """Token of HTTP clients."""
        return self.folder / "http.token"

    @property
    def tinker(self) -> Path:
        """Folder of the weights and states that clients of `jaxroll tinker-serve` have saved."""
        return self.folder / "tinker"

    @property
    def tinker_url(self) -> Path:
        """Base URL, name of the model and token file of `jaxroll tinker-serve`, written once it answers."""
        return self.folder / "tinker.addr"

    @property
    def tinker_sampler_address(self) -> Path:
        """HOST:PORT of the sampler of `jaxroll tinker-serve`."""
        return self.folder / "tinker-sampler.addr"

    @property
    def transfer(self) -> Path:
        """Folder of published weights, where `transfer.channel` is "tensorstore" and `transfer.path` is not set."""
        return self.folder / "transfer"

    @property
    def heldout(self) -> Path:
        """Hashes of the held-out questions, written by the evaluator."""
        return self.folder / "heldout.json"


# --- Migration of a run's folder that an earlier version of JaxRoll wrote: config keys, `run.json`, metrics rows
#
# `run.json` has the version of the folder as `format` (absent in version 1). Rows of `metrics.jsonl` have no version: a
# resumed run appends new rows to old ones, and a retired name is never given another meaning. `store.db` has a version
# and migrations of its own (`jaxroll.store.log.database`).

FORMAT = 2

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "learner.discount": "learner.turn_discount",
        "learner.level": "learner.ratio_level",
        "learner.micro_rows": "learner.micro_batch_rows",
        "learner.prompt_rows": "learner.shared_prompt_rows",
        "learner.prompt_tokens": "learner.shared_prompt_tokens",
        "learner.substeps": "learner.minibatches",
        "sampler.episodes": "sampler.concurrent_episodes",
        "schedule.flip": "schedule.weight_swap",
        "schedule.replicate": "schedule.group_placement",
        "schedule.rolling": "schedule.rolling_updates",
        "schedule.window": "schedule.in_flight_window",
        "supervisor.finish_s": "supervisor.final_eval_s",
        "task.prompt": "task.prompt_style",
    }
)
"""Config keys of format 1 and their present names. A config file or an override with an old key is refused."""

ROW_FIELDS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "restart": {"who": "process"},
    "stats": {
        "env_overdue": "env_timeouts", "open": "members_in_flight", "repeated": "requests_retried",
        "served": "requests_served", "tokens_let_go": "tokens_aborted_done", "unput": "members_unstored",
    },
    "store": {
        "learner_waiting_share": "learner_wait_share", "outstanding": "groups_in_flight", "resting": "backoff",
        "window": "in_flight_window", "window_full": "in_flight_window_max",
    },
})  # fmt: skip
"""Fields of metrics rows of format 1 and their present names, by kind of row."""

# Environments with a reward of their own. Earlier configs could set the reward of answers for them, which nothing
# read; it is refused now (`jaxroll.config.rewards`). Environments that came later never had such a config.
_OWN_REWARD = (
    "frozen_lake", "gymnasium", "sokoban", "tool_calls", "code_repair", "shop", "textarena", "pettingzoo", "textworld",
    "openenv",
)  # fmt: skip


def run_file(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return `values`, the content of the run.json at `path`, with the names of this version.

    Settings that had no effect, and that this version refuses, have their defaults. ConfigError if a newer version of
    JaxRoll wrote it.
    """
    version = values.get("format", 1)
    if not isinstance(version, int) or version > FORMAT:
        raise ConfigError(
            "RUN",
            str(path),
            f"its format is {version!r}, this version of JaxRoll reads up to {FORMAT}",
            "Use the version of JaxRoll that wrote it.",
        )
    config = values.get("config")
    if version == 1 and isinstance(config, dict):
        config = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in config.items()}
        for old, new in RENAMED.items():
            section, key = old.split(".")
            if isinstance(keys := config.get(section), dict) and key in keys:
                keys.setdefault(new.split(".")[1], keys.pop(key))
        values = values | {"config": config}
    if isinstance(config, dict) and all(isinstance(section, dict) for section in config.values()):
        values = values | {"config": _without_unread(config)}
    return values | {"format": FORMAT}


def _without_unread(config: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`config` without settings that had no effect and are refused now."""
    task, empty = config.get("task", {}), dict[str, Any]()
    if task.get("env") in _OWN_REWARD:
        config = config | {"task": task | {"extract": "none", "reward": "auto", "reward_args": {}}}
    if config.get("placement", empty).get("colocated") and config.get("sampler", empty).get("count", 1) == 1:
        config = config | {"schedule": config.get("schedule", empty) | {"repack_s": 0.0}}  # for several samplers
    return config


def row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a metrics row with the names of this version: `row` itself if it has no old name."""
    kind = row.get("kind")
    if kind == "span":
        return row | {"what": "weight_swap"} if row.get("what") == "flip" else row
    fields = ROW_FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or fields.keys().isdisjoint(row):
        return row
    if "served" in row:  # of a sampler that serves actors, whose `open` counted requests
        fields = {**fields, "open": "requests_in_flight"}
    return {fields.get(name, name): value for name, value in row.items()}


# --- roles by process

COLOCATED = "colocated"  # name of the one process of all roles with devices


def lives_in(role: str, process: str, of_learner: Collection[str] = ()) -> bool:
    """True if the supervisor's process `process` runs `role`; `of_learner` are the samplers in the learner's."""
    if process == COLOCATED:
        return role == process or role.partition("-")[0] in ("learner", "sampler", "evaluator")
    return role == process or (process == "learner" and role in of_learner)


def names_of_learner(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the samplers in the learner's process, by a run's config (`placement.learner_samplers`)."""
    count = config.get("sampler", {}).get("count", 0)
    least = count - config.get("placement", {}).get("learner_samplers", 0)
    return tuple(f"sampler-{index}" for index in range(max(0, least), count))
