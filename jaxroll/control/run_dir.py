"""A run's folder: its name, its `run.json` (config, commit, versions, devices), its lock, its link.

Only the process that started the run writes `run.json`, always as a whole file renamed into place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jaxroll
from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.errors import ConfigError

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
LOGS = "logs"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorstore", "numpy", "grpcio", "msgspec",
            "reasoning-gym", "libtpu")  # fmt: skip
# What may change when a run is resumed: how long, how watched, how placed; never what is learned from what.
RESUMABLE = ("schedule.steps", "supervisor.", "placement.", "evaluator.", "store.", "sampler.count", "sampler.slots",
             "sampler.scoring_workers", "sampler.mesh.", "learner.checkpoint", "learner.mesh.", "learner.micro_rows",
             "transfer.")  # fmt: skip


def new_name(name: str, now_s: float, suffix: str = "") -> str:
    """`NAME-YYYYmmdd-HHMMSS[suffix]` in local time."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}{suffix}"


def create(path: Path, config: Config, argv: Sequence[str]) -> Path:
    """The new run folder `path` with its run.json; ConfigError when a run is there already. Absolute."""
    path = Path(os.path.abspath(path))
    if (path / RUN_FILE).exists():
        raise ConfigError("--run", str(path), "there is a run here already",
                          "Add --resume to continue it, or name another folder.")  # fmt: skip
    try:
        (path / LOGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--run", str(path), f"cannot be made ({error.strerror})", "Name another folder.") from error
    write(path, {"created": time.time(), "argv": list(argv), **description(), **_config_part(config), "devices": {}})
    return path


def create_unique(parent: Path, name: str, config: Config, argv: Sequence[str], suffix: str = "") -> Path:
    """A new run folder in `parent`, named by the second it was made in; never one that exists."""
    parent.mkdir(parents=True, exist_ok=True)
    base = new_name(name, time.time(), suffix)
    for attempt in range(1, 1000):
        path = parent / (base if attempt == 1 else f"{base}-{attempt}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return create(path, config, argv)
    raise ConfigError("--run", str(parent / base), "no free name", "Name the folder with --run.")


def load(path: Path) -> dict[str, Any]:
    """What run.json of the folder says; ConfigError when there is none."""
    file = Path(path) / RUN_FILE
    try:
        values = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError("--run", str(path), "no run here (no run.json)", "`jaxroll list` shows the runs.") from None
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError("--run", str(file), f"unreadable: {error}", "Restore the file from a copy.") from error
    if not isinstance(values, dict) or "config" not in values:
        raise ConfigError("--run", str(file), "holds no config", "Restore the file from a copy.")
    return values


def load_config(path: Path) -> Config:
    """The config of the run."""
    return configs.parse(load(path)["config"])


def resume(path: Path, overrides: Sequence[str], check: Callable[[Config], object]) -> Config:
    """The config to continue the run with; overrides may change what does not change the experiment.

    It is kept in run.json once `check` has let it pass.
    """
    values = load(path)
    for text in overrides:
        key = text.removeprefix("--").removeprefix("config.").partition("=")[0]
        if not key.startswith(RESUMABLE):
            raise ConfigError(key, text.partition("=")[2], "cannot change in the middle of a run",
                              f"Start a new run. On --resume may change: {', '.join(RESUMABLE)}.")  # fmt: skip
    config = configs.parse(configs.override(values["config"], overrides))
    check(config)
    if configs.digest(config) != values.get("digest"):
        write(path, values | _config_part(config))
    return config


def note_devices(path: Path, role: str, row: dict[str, Any]) -> None:
    """Write into run.json what devices a role found."""
    values = load(path)
    told = ("platform", "devices", "mesh", "attention")
    values.setdefault("devices", {})[role] = {key: row[key] for key in told if key in row}
    write(path, values)


def write(path: Path, values: dict[str, Any]) -> None:
    """Replace run.json."""
    scratch = path / f".{RUN_FILE}.{os.getpid()}"
    scratch.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    os.replace(scratch, path / RUN_FILE)


def description() -> dict[str, Any]:
    """Commit, versions, interpreter and machine."""
    return {"jaxroll": jaxroll.__version__, "commit": commit(), "python": platform.python_version(),
            "versions": versions(PACKAGES), "system": platform.platform(), "cores": os.cpu_count()}  # fmt: skip


def versions(names: Sequence[str]) -> dict[str, str]:
    """Installed versions of the packages that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    """The commit of the source tree, with `+` when files differ from it; empty outside a checkout."""
    root = Path(jaxroll.__file__).parent.parent
    if not (root / ".git").exists():
        return ""
    head = _git(root, "rev-parse", "HEAD")
    return f"{head}+" if head and _git(root, "status", "--porcelain", "--untracked-files=no") else head


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _config_part(config: Config) -> dict[str, Any]:
    return {"config": configs.to_dict(config), "digest": configs.digest(config)}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the run: a second supervisor of the same folder is refused. The lock ends with the process."""
    with (path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("--run", str(path), "another process is running this run", "Stop it first.") from None
        yield


def link(path: Path, name: str) -> Path:
    """The symlink `name` beside the run, (re)pointed at it; a real file or folder of that name stays as it is."""
    target = path.parent / name
    if target.exists() and not target.is_symlink():
        print(f"{target} is not a link and stays as it is; the run is {path}", file=sys.stderr)
        return path
    scratch = path.parent / f".{name}.{os.getpid()}"
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(path.name)
    os.replace(scratch, target)
    return target


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """One line of `jaxroll list`."""

    path: Path
    created_s: float
    steps: int
    of_steps: int
    accuracy: float | None


def find_runs(parent: Path) -> list[RunSummary]:
    """The runs in `parent`, oldest first; links are left out."""
    from jaxroll import metrics

    found = []
    for folder in sorted(parent.iterdir()) if parent.is_dir() else []:
        if folder.is_symlink() or not (folder / RUN_FILE).is_file():
            continue
        try:
            values = load(folder)
            config = configs.parse(values["config"])
        except ConfigError as error:
            print(f"{folder}: {error}", file=sys.stderr)
            continue
        rows = metrics.read(folder / METRICS_FILE)
        steps = max((row.get("step", 0) for row in rows if row.get("kind") == "step"), default=0)
        scores = [row.get("accuracy") for row in rows if row.get("kind") == "eval"]
        found.append(
            RunSummary(folder, values.get("created", 0.0), steps, config.schedule.steps, scores[-1] if scores else None)
        )
    return sorted(found, key=lambda run: run.created_s)
