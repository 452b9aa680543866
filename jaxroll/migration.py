"""Migration of a run's folder that an earlier version of JaxRoll wrote: config keys, `run.json`, metrics rows.

`run.json` has the version of the folder as `format` (absent in version 1). Rows of `metrics.jsonl` have no version: a
resumed run appends new rows to old ones, and a retired name is never given another meaning. `store.db` has a version
and migrations of its own (`jaxroll.store.log.database`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxroll.errors import ConfigError

FORMAT = 2

RENAMED: Mapping[str, str] = MappingProxyType({
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
})  # fmt: skip
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


def run_file(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return `values`, the content of the run.json at `path`, with the names of this version.

    ConfigError if a newer version of JaxRoll wrote it.
    """
    version = values.get("format", 1)
    if not isinstance(version, int) or version > FORMAT:
        raise ConfigError("RUN", str(path), f"its format is {version!r}, this version of JaxRoll reads up to {FORMAT}",
                          "Use the version of JaxRoll that wrote it.")  # fmt: skip
    config = values.get("config")
    if version == 1 and isinstance(config, dict):
        config = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in config.items()}
        for old, new in RENAMED.items():
            section, key = old.split(".")
            if isinstance(keys := config.get(section), dict) and key in keys:
                keys.setdefault(new.split(".")[1], keys.pop(key))
        values = values | {"config": config}
    return values | {"format": FORMAT}


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
