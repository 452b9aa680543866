"""Run record: run.json, metrics.jsonl, heldout.json and store.db of a run's folder, read once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxroll import config as configs
from jaxroll import metrics
from jaxroll.config import Config
from jaxroll.errors import ConfigError
from jaxroll.records import Version
from jaxroll.report.figures import history
from jaxroll.report.figures.history import History
from jaxroll.store.core.state import on_line

RUN_FILE, METRICS_FILE, HELDOUT_FILE = "run.json", "metrics.jsonl", "heldout.json"
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """`about` is run.json without its config. `rows` are of the surviving line of ancestry."""

    path: Path
    config: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    history: History = field(default_factory=History)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.name

    @property
    def created_s(self) -> float | None:
        """Unix time at which the run was made, before its warm start."""
        return self.about.get("created")

    @property
    def steps_wanted(self) -> int:
        """The length of its schedule."""
        return int(self.config["schedule"]["steps"])


def load(run_dir: Path) -> Run:
    """The run in `run_dir`, finished or live; ConfigError when there is none."""
    path = Path(run_dir).resolve()
    about = _about(path)
    config = about.pop("config")
    facts = history.read(path, heldout_hashes(path))
    return Run(path, config, about, surviving(metrics.read(path / METRICS_FILE), facts), facts)


def _about(path: Path) -> dict[str, Any]:
    file = path / RUN_FILE
    remedy = "Name the folder of a run; `jaxroll list` shows them."
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        reason = "no run here (no run.json)" if path.is_dir() else "no such folder"
        raise ConfigError("RUN", str(path), reason, remedy) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("RUN", str(file), f"unreadable: {error}", "Restore the file from a copy.") from error
    config = about.get("config") if isinstance(about, dict) else None
    if isinstance(config, dict) and (misfit := _misfit(config, configs.to_dict(Config()))):
        raise ConfigError("RUN", str(file), f"{misfit} of its config has another type", "Restore the file from a copy.")
    for room, key in (("schedule", "alpha"), ("schedule", "steps"), ("learner", "mesh"), ("sampler", "mesh")):
        if not isinstance(config, dict) or key not in (config.get(room) or {}):
            raise ConfigError("RUN", str(file), f"its config lacks {room}.{key}", remedy)
    return about


def _misfit(values: dict[str, Any], defaults: dict[str, Any]) -> str:
    """The first key of `values` that is of another type than in `defaults`, dotted; '' when there is none.

    Keys of other versions are left alone: the report reads old runs too.
    """
    for key, default in defaults.items():
        value = values.get(key, default)
        if isinstance(default, (int, float)):
            fits = isinstance(value, (int, float)) and abs(value) < 1e100
        else:
            fits = default is None or isinstance(value, type(default))
        if not fits:
            return key
        if isinstance(default, dict) and isinstance(value, dict) and (inner := _misfit(value, default)):
            return f"{key}.{inner}"
    return ""


def heldout_hashes(path: Path) -> frozenset[str] | None:
    """The question hashes of the held-out set as the evaluator wrote them; None when it has not (yet)."""
    try:
        hashes = json.loads((path / HELDOUT_FILE).read_text(encoding="utf-8"))
        if not isinstance(hashes, list):
            raise ValueError("not a list of hashes")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("RUN", str(path / HELDOUT_FILE), f"unreadable: {error}", "Remove it.") from error
    return frozenset(map(str, hashes))


def surviving(rows: list[Row], facts: History) -> list[Row]:
    """The rows without steps and evaluations of weights that a rewind threw away."""
    lineages = list(facts.lineages)
    if len(lineages) < 2:
        return rows
    return [row for row in rows if row.get("kind") not in ("step", "eval") or on_line(lineages, _version(row))]


def _version(row: Row) -> Version:
    return Version(int(row.get("lineage") or 0), int(row["step"]))


# --- whether a process on this machine has the run open, without touching its locks

LOCK = "store.lock"
_SUPERVISOR_LOCK = ".lock"  # control.run_dir.LOCK_FILE, which this package may not import
_LOCKS = Path("/proc/locks")


def store_pid(run_dir: Path) -> int | None:
    """The process that serves the run on this machine; None when none does, or nothing is known of it."""
    path = run_dir / LOCK
    try:
        return int(path.read_text(encoding="utf-8")) if _is_held(path) else None
    except (OSError, ValueError):
        return None


def is_open(run_dir: Path) -> bool:
    """Whether a store or a supervisor on this machine holds the run."""
    return any(_is_held(run_dir / name) for name in (LOCK, _SUPERVISOR_LOCK))


def _is_held(path: Path) -> bool:
    try:
        inode = path.stat().st_ino
        return any(line.split()[1] == "FLOCK" and line.split()[5].endswith(f":{inode}") for line in _lines())
    except (OSError, ValueError, IndexError):
        return False


def _lines() -> list[str]:
    # Taking the lock, even for a moment, could turn away a store that starts just then; the kernel's table says it too.
    return [line for line in _LOCKS.read_text(encoding="utf-8").splitlines() if "->" not in line]
