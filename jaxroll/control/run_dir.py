"""Run folder: name, path rules, `run.json` (config, commit, versions, devices), lock, link.

Only the process that holds the run's lock writes `run.json`, always as a whole file renamed into place. A supervisor
hands its config to the roles that it starts (`child.config_environment`), so that they do not depend on the file.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import importlib.metadata
import json
import math
import os
import platform
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jaxroll
from jaxroll import config as configs
from jaxroll import disk, run_paths
from jaxroll.config import Config
from jaxroll.config.parsing import differences
from jaxroll.config.rewards import CHANGEABLE, REMOTE
from jaxroll.errors import ConfigError
from jaxroll.run_paths import RunPaths

RUN_FILE_BYTES = 16 * 2**20  # a larger one is not ours
CREATION_S = 10.0  # how long a role waits for another process that is creating the same run
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorstore", "numpy", "grpcio", "msgspec",
            "reasoning-gym", "libtpu")  # fmt: skip
# Keys that may change when a run is resumed: duration, monitoring and placement; never the data or the objective.
RESUMABLE = (
    "schedule.steps",
    "supervisor.",
    "placement.",
    "evaluator.",
    "store.",
    "sampler.count",
    "sampler.slots",
    "sampler.scoring_workers",
    "sampler.http_port",
    "sampler.draft_",
    "sampler.scoring_idle_s",
    "sampler.mesh.",
    "learner.checkpoint",
    "learner.keep_best",
    "learner.mesh.",
    "learner.micro_batch_rows",
    "learner.optimizer_offload",
    "learner.remat",
    "transfer.",
    *(f"task.reward_args.{part}.{name}" for part in REMOTE for name in CHANGEABLE),  # of a source, too
)
_SOURCE = r"^task\.mixture\[\d+\]|^evaluator\.sets(\.[^.]+)?"


def new_name(name: str, now_s: float, suffix: str = "") -> str:
    """`NAME-YYYYmmdd-HHMMSS[suffix]` in local time."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}{suffix}"


class RunInUse(ConfigError):
    """Another process holds the run's lock."""


@contextlib.contextmanager
def new_run(path: str | Path, config: Config, argv: Sequence[str]) -> Iterator[Path]:
    """Create the run folder `path` (absolute inside the block) and hold its lock.

    ConfigError when there is a run already; then nothing is written.
    """
    path = checked(path)
    check_free(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("RUN", str(path), f"cannot be made ({error.strerror})", "Name another folder.") from error
    with locked(path):
        check_free(path)  # again: another process may have created it before we had the lock
        _make_logs(path)
        write(
            path,
            {
                "format": run_paths.FORMAT,
                "created": time.time(),
                "argv": list(argv),
                **description(),
                **_config_part(config),
                "devices": {},
            },
        )
        yield path


def create(path: Path, config: Config, argv: Sequence[str]) -> Path:
    """The new run folder `path` with its run.json, not locked; ConfigError when there is a run already. Absolute.

    Several roles may be started at once on one new folder: one creates it, the others find it.
    """
    give_up_s = time.monotonic() + CREATION_S
    while True:
        try:
            with new_run(path, config, argv) as made:
                return made
        except RunInUse:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.05)


def shared(folder: str | Path, config: Config, argv: Sequence[str]) -> Path:
    """The folder of a run that this process is a part of: made here, or made before with the same config. Absolute."""
    path = checked(folder)
    try:
        return create(path, config, argv)
    except ConfigError:
        if not RunPaths(path).run_file.exists():
            raise
    if configs.digest(load_config(path)) != configs.digest(config):
        raise ConfigError("--config", str(path), "the run in RUN has another config", "Leave --config out.")
    return path


@contextlib.contextmanager
def new_unique_run(parent: Path, name: str, config: Config, argv: Sequence[str], suffix: str = "") -> Iterator[Path]:
    """As `new_run`, in a folder of `parent` that is named by the second it was made in; never one that exists."""
    base = new_name(name, time.time(), suffix)
    if "/" in base:
        raise ConfigError("run.name", name, "names a folder, so it has no '/'", "Name a folder elsewhere as RUN.")
    checked(parent / base)
    for attempt in range(1, 1000):
        path = parent / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except OSError as error:
            if error.errno == errno.EEXIST and parent.is_dir():
                continue
            raise ConfigError(
                "RUN", str(path), f"cannot be made ({error.strerror})", "Name another folder as RUN."
            ) from error
        with new_run(path, config, argv) as made:
            yield made
        return
    raise ConfigError("RUN", str(parent / base), "no free name", "Name the folder as RUN.")


def create_unique(parent: Path, name: str, config: Config, argv: Sequence[str], suffix: str = "") -> Path:
    """A new run folder in `parent` (see `new_unique_run`), not locked."""
    with new_unique_run(parent, name, config, argv, suffix) as path:
        return path


def check_free(path: Path) -> None:
    """ConfigError when the folder holds a run, or parts of one."""
    paths = RunPaths(path)
    if os.path.lexists(paths.run_file):
        raise ConfigError(
            "RUN", str(path), "there is a run here already", "Add --resume to continue it, or name another folder."
        )
    for left in (paths.database, paths.checkpoints):
        if os.path.lexists(left) and not _is_empty_folder(left):
            lost = paths.run_file.name
            raise ConfigError(
                "RUN",
                str(path),
                f"holds {left.name} of a run that has lost its {lost}",
                f"Restore {lost} from a copy, or name another folder.",
            )


def _is_empty_folder(path: Path) -> bool:
    """True if it is an empty folder, such as a new disk that was mounted there to hold the checkpoints."""
    return path.is_dir() and set(os.listdir(path)) <= {"lost+found"}


def load(path: Path) -> dict[str, Any]:
    """The content of run.json in the folder; ConfigError when it is missing or not JaxRoll's."""
    file = RunPaths(Path(path)).run_file
    try:
        values = json.loads(file_bytes(file).decode())
        values = run_paths.run_file(values, file) if isinstance(values, dict) else values
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError("RUN", str(path), "no run here (no run.json)", "`jaxroll list` shows the runs.") from None
    except OSError as error:
        raise ConfigError(
            "RUN", str(file), f"unreadable: {error.strerror}", "Check the path and its permissions."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("RUN", str(file), f"unreadable: {error}", "Restore the file from a copy.") from error
    if not isinstance(values, dict) or "config" not in values:
        raise ConfigError("RUN", str(file), "holds no config", "Restore the file from a copy.")
    for key, (kinds, default) in _FIELDS.items():
        value = values.setdefault(key, default)
        if (
            not isinstance(value, kinds)
            or isinstance(value, bool)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            raise ConfigError(
                "RUN",
                str(file),
                f"{key} is {json.dumps(value)[:60]}, which JaxRoll does not write",
                "Restore the file from a copy.",
            )
    return values


_FIELDS: dict[str, tuple[type | tuple[type, ...], Any]] = {
    "config": (dict, {}),
    "created": ((int, float), 0.0),
    "digest": (str, ""),
    "devices": (dict, {}),
}


def file_bytes(file: Path) -> bytes:
    """The bytes; ValueError for a path that is not a file (a FIFO would block) or too large."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a file")
    if found.st_size > RUN_FILE_BYTES:
        raise ValueError(f"larger than {RUN_FILE_BYTES // 2**20} MiB")
    return file.read_bytes()


def load_config(path: Path) -> Config:
    """The config of the run."""
    return configs.parse(load(path)["config"])


def resume(path: Path, overrides: Sequence[str], check: Callable[[Config], object]) -> Config:
    """The config to continue the run with; overrides may change what does not change the experiment.

    It is kept in run.json once `check` has let it pass. The caller holds the run's lock.
    """
    values = load(path)
    wanted = configs.override(copy.deepcopy(values["config"]), overrides)
    for text in overrides:
        key, _, given = text.removeprefix("--").removeprefix("config.").partition("=")
        changed: Iterable[tuple[str, Any]] = ((key, given),)
        source = next((one for one in ("task.mixture", "evaluator.sets") if f"{key}.".startswith(f"{one}.")), "")
        if source:
            section, field = source.split(".")
            after = wanted[section][field]
            changed = differences(values["config"].get(section, {}).get(field, type(after)()), after, source)
        for name, value in changed:
            if not re.sub(_SOURCE, "task", name).startswith(RESUMABLE):
                remedy = f"Start a new run. On --resume may change: {', '.join(RESUMABLE)}."
                if source:
                    remedy = "Give it as the run's run.json has it; only address and budget of judges may change."
                raise ConfigError(name, value, "cannot change in the middle of a run", remedy)
    config = configs.parse(wanted)
    check(config)
    _make_logs(path)
    if configs.digest(config) != values.get("digest"):
        write(path, values | _config_part(config))
    return config


def note_devices(path: Path, role: str, row: dict[str, Any]) -> None:
    """Write into run.json what devices a role found."""
    values = load(path)
    kept = ("host", "platform", "devices", "mesh", "attention")
    values.setdefault("devices", {})[role] = {key: row[key] for key in kept if key in row}
    write(path, values)


def write(path: Path, values: dict[str, Any]) -> None:
    """Replace run.json; ConfigError if it would be too large to be read again."""
    text = json.dumps(values, indent=1, sort_keys=True) + "\n"
    if len(text) > RUN_FILE_BYTES:
        reason = f"its run.json would be larger than {RUN_FILE_BYTES // 2**20} MiB"
        raise ConfigError(
            "RUN", str(path), reason, "Shorten the system prompts, the few-shot messages or the settings of sources."
        )
    replace(RunPaths(path).run_file, text)


def replace(file: Path, text: str) -> None:
    """Write `text` to a file of a run folder, durably and at once; ConfigError where that is impossible."""
    try:
        disk.replace_text(file, text, synced=True)
    except OSError as error:
        raise _unwritable(file.parent, error) from error


def _make_logs(path: Path) -> None:
    logs = RunPaths(path).logs
    try:
        logs.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(logs, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        "RUN",
        str(path),
        f"cannot be written ({error.strerror})",
        "Make the folder writable and look for free space, or name another one.",
    )


def description() -> dict[str, Any]:
    """Commit, versions, interpreter and machine."""
    return {
        "jaxroll": jaxroll.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "versions": versions(PACKAGES),
        "system": platform.platform(),
        "cores": os.cpu_count(),
    }


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
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _config_part(config: Config) -> dict[str, Any]:
    return {"config": configs.to_dict(config), "digest": configs.digest(config)}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the run: RunInUse for every other process that wants to. The lock ends with the process.

    A supervisor holds it, and a store that was started alone.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(disk.locked(RunPaths(path).lock))
        except BlockingIOError:
            raise RunInUse("RUN", str(path), "another process is running this run", "Stop it first.") from None
        except OSError as error:
            raise _unwritable(path, error) from error
        yield


def link(path: Path, name: str) -> Path:
    """The symlink `name` next to the run, (re)pointed at it; a real file or folder of that name stays as it is."""
    target = path.parent / name
    if target.exists() and not target.is_symlink():
        print(f"{target} is not a link and stays as it is; the run is {path}", file=sys.stderr)
        return path
    try:
        with disk.replaced(target) as draft:
            draft.unlink(missing_ok=True)
            draft.symlink_to(path.name)
    except OSError as error:
        raise ConfigError(
            name, str(target), f"this link cannot be made ({error.strerror})", "Make the folder writable."
        ) from error
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
    for folder in _folders(parent):
        try:
            if folder.is_symlink() or not os.path.lexists(RunPaths(folder).run_file):
                continue
            values = load(folder)
            config = configs.parse(values["config"])
            rows = metrics.read(RunPaths(folder).metrics)
        except (ConfigError, OSError) as error:
            print(f"{folder}: {error}", file=sys.stderr)
            continue
        steps = _numbers(rows, "step", "step")
        scores = _numbers(rows, "eval", "accuracy")
        found.append(
            RunSummary(
                folder,
                values["created"],
                int(max(steps, default=0)),
                config.schedule.steps,
                scores[-1] if scores else None,
            )
        )
    return sorted(found, key=lambda run: run.created_s)


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(parent.iterdir()) if parent.is_dir() else []
    except OSError as error:
        raise ConfigError(
            "FOLDER", str(parent), f"cannot be read ({error.strerror})", "Check its permissions."
        ) from error


def _numbers(rows: Sequence[dict[str, Any]], kind: str, key: str) -> list[float]:
    """The numbers under `key` in the rows of this kind; a row may come from an unknown writer."""
    found = [row.get(key) for row in rows if row.get("kind") == kind]
    return [value for value in found if isinstance(value, (int, float)) and not isinstance(value, bool)]


# --- rules for the path, checked before anything is written there
#
# Orbax finds the parts of a checkpoint by a glob pattern that contains the whole path. TensorStore takes a backslash
# for a separator of folders, and takes every path for UTF-8. With such a character in the path a checkpoint is
# incomplete, or lies in another folder, and no error is raised. All other paths work
# (tests/control/test_run_folder_paths.py).

PATTERN_CHARACTERS = "*?[]\\"
NAME_BYTES = 255  # of one folder's name: the limit of every common file system
PATH_BYTES = 480  # SQLite opens no database whose path, links resolved, is longer than 512 with its suffixes


def checked(path: str | Path, key: str = "RUN") -> Path:
    """The absolute path of a run folder; ConfigError for one in which a run cannot work."""
    found = Path(os.path.abspath(path))
    reason, remedy = _problem(str(found))
    if reason:
        raise ConfigError(key, str(found), reason, remedy)
    return found


def _problem(path: str) -> tuple[str, str]:
    """Reason and remedy; both empty for a path that works."""
    for character in path:
        if character in PATTERN_CHARACTERS:
            return (
                f"{character!r} in the path of a run breaks its checkpoints: libraries read it as a pattern",
                f"Use a path without {' '.join(PATTERN_CHARACTERS)}.",
            )
        if character < " " or character == "\x7f":
            return f"the path of a run contains the control character {character!r}", "Use a path without it."
    if "gs:/" in f"{path}/":  # Orbax makes gs:// of it
        return (
            "a folder of the path ends with 'gs:', which the checkpoint library takes for a URL",
            "Rename that folder.",
        )
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "the path of a run is not valid UTF-8", "Rename the folder, or set a UTF-8 locale (LC_ALL=C.UTF-8)."
    if encoded != os.fsencode(path):
        return "the locale encodes this path other than as UTF-8", "Set a UTF-8 locale (LC_ALL=C.UTF-8)."
    longest = max(len(os.fsencode(name)) for name in path.split("/"))
    size_bytes = max(len(encoded), len(os.fsencode(os.path.realpath(path))))
    if longest > NAME_BYTES or size_bytes > PATH_BYTES:
        return (
            f"the path is too long (a name of {longest} bytes, {size_bytes} bytes in all)",
            f"Use names of at most {NAME_BYTES} bytes and a path of at most {PATH_BYTES}.",
        )
    return "", ""
