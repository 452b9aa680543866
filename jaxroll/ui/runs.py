"""The runs in a folder: their list and files, their metric rows, which a thread follows, the control of live ones."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxroll import disk, metrics
from jaxroll.errors import ConfigError, DataError, InfraError, JaxRollError
from jaxroll.report import record, trajectory
from jaxroll.run_paths import RunPaths
from jaxroll.store.client import StoreClient
from jaxroll.store.log import database
from jaxroll.ui import rollouts
from jaxroll.ui.series import RunMetrics

# --- Control of a live run: pause, resume and checkpoint are calls to its store, stop is a signal to its supervisor
#
# An RPC to the store checks the run's token, records the caller and answers at once; a file in the run's folder would
# not. A run whose store does not answer grants no leases anyway.

PATIENCE_S, CALL_S = 3.0, 5.0
DONE = {
    "pause": "Paused: no leases are granted. Running rollouts finish, and the learner trains complete groups.",
    "resume": "Resumed.",
    "checkpoint": "The learner writes a checkpoint after the next step that it claims.",
    "stop": "The supervisor stops the roles, the learner after its step and a checkpoint.",
}


async def control(path: Path, action: str) -> str:
    """Do `action` (a key of `DONE`) with the run and return what follows.

    ConfigError for an unknown action, InfraError if the store or the supervisor cannot be reached from this machine.
    """
    if action not in DONE:
        raise ConfigError("action", action[:40], "there is no such action", f"Use one of {', '.join(DONE)}.")
    if action == "stop":
        _stop(path)
    else:
        await _call(path, action)
    return DONE[action]


async def _call(path: Path, action: str) -> None:
    address = RunPaths(path).store_address
    if not address.is_file():
        raise InfraError(f"{address} is not there: the run has no store yet")
    client = await StoreClient.connect(address, role="supervisor", name="ui", patience_s=PATIENCE_S, call_s=CALL_S)
    try:
        await client.control(action)  # type: ignore[arg-type]  # `DONE` has the actions
    finally:
        await client.aclose()


def _stop(path: Path) -> None:
    """Send SIGTERM to the process that holds the run's lock, and never to a later process with the same pid."""
    pid = record.supervisor_pid(path)
    if pid is None:
        raise InfraError(f"{path.name}: no supervisor on this machine runs it; stop its roles where they run")
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise InfraError(f"{path.name}: its supervisor has just ended") from None
    try:
        if record.supervisor_pid(path) != pid:
            raise InfraError(f"{path.name}: its supervisor has just ended")
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError:
        raise InfraError(f"{path.name}: its supervisor (pid {pid}) belongs to another user") from None
    finally:
        os.close(process)


# --- The runs in a folder

Facts = dict[str, Any]
LIVE_S = 20.0  # a run on another machine is live while its rows are newer
EVERY_S, USED_S = 0.5, 600.0  # between two looks at a file; after this time without a request it is no longer followed
TAIL_BYTES = 256 << 10
MAX_RUNS = 1000
SWITCH_S = 1e-3  # a thread that reads rows gives way to requests after this time


@dataclass
class Followed:
    """A run whose rows are read; `asked_s` is the time of the last request, `ready` is set at the end of the file."""

    metrics: RunMetrics
    asked_s: float
    ready: threading.Event


class Runs:
    """The runs in `folder`, or the one run whose folder it is. A thread reads the metric rows of requested runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._followed: dict[str, Followed] = {}
        self._tails: dict[str, tuple[tuple[float, int], Facts]] = {}
        self._decoders: dict[str, tuple[trajectory.Decoder | None, str]] = {}
        self._lock, self._wake, self._ended = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._follow, daemon=True, name="metric rows")

    def start(self) -> None:
        """Start the thread."""
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def paths(self) -> dict[str, Path]:
        """The folders of the runs by name; links are left out."""
        if RunPaths(self.folder).run_file.is_file():
            return {self.folder.name: self.folder}
        found = {}
        for path in sorted(self.folder.iterdir()):
            with suppress(OSError):
                if RunPaths(path).run_file.is_file() and not path.is_symlink() and len(found) < MAX_RUNS:
                    found[path.name] = path
        return found

    def path(self, name: str) -> Path:
        """The folder of the run `name`; ConfigError if there is none."""
        if (found := self.paths().get(name)) is None:
            raise ConfigError("run", name, "there is no such run", "The list of runs has those in the folder.")
        return found

    # --- the list

    def listed(self) -> list[Facts]:
        """One entry per run, the newest first; a damaged one has an `error`."""
        found = []
        for name, path in self.paths().items():
            try:
                found.append(self._entry(name, path))
            except (JaxRollError, OSError) as error:
                found.append({"name": name, "error": str(error), "created": 0.0})
        return sorted(found, key=lambda entry: -entry["created"])

    def _entry(self, name: str, path: Path) -> Facts:
        about = record.about(path)
        return {
            "name": name,
            "created": float(about.get("created") or 0.0),
            "simulated": bool(about.get("simulated")),
            "steps": about["config"]["schedule"]["steps"],
            **self._tail(name, path),
            **self.state(path),
        }

    def state(self, path: Path) -> Facts:
        """Steps that are trained, and `state`: finished, live or stopped."""
        with self.reading(path) as db:
            found = {"closed": "", "trained": 0} if db is None else rollouts.summary(db)
        with suppress(OSError):
            age_s = time.time() - RunPaths(path).metrics.stat().st_mtime
            if found["closed"]:
                return found | {"state": "finished" if found["closed"] == "finished" else "stopped"}
            if record.is_open(path) or age_s < LIVE_S:
                return found | {"state": "live"}
        return found | {"state": "stopped"}

    def _tail(self, name: str, path: Path) -> Facts:
        """Reward, accuracy and step of the newest rows at the end of the file."""
        file = RunPaths(path).metrics
        try:
            status = file.stat()
            stamp = (status.st_mtime, status.st_size)
            if (kept := self._tails.get(name)) and kept[0] == stamp:
                return kept[1]
            with disk.opened(file) as opened:
                opened.seek(max(0, status.st_size - TAIL_BYTES))
                lines = opened.read(TAIL_BYTES).split(b"\n")
        except (OSError, DataError):
            return {"reward": None, "accuracy": None}
        found: Facts = {"reward": None, "accuracy": None}
        for line in lines:
            if b'"step"' in line or b'"eval"' in line:
                row = metrics.loads(line) or {}
                if row.get("kind") == "step":
                    found["reward"] = row.get("reward_mean")
                elif row.get("kind") == "eval":
                    found["accuracy"] = row.get("accuracy")
        self._tails[name] = (stamp, found)
        return found

    # --- one run

    def about(self, name: str) -> Facts:
        """run.json of the run."""
        return record.about(self.path(name))

    @contextmanager
    def reading(self, path: Path) -> Iterator[Any]:
        """A read transaction on the run's log; None before there is one. DataError if it is damaged."""
        with database.damage_named(path, "`jaxroll replay` says what is wrong with it"):
            if not database.is_there(path):
                yield None
                return
            with database.transaction(path) as db:
                yield db

    def decoder(self, name: str) -> tuple[trajectory.Decoder | None, str]:
        """The function from the run's token ids to text, or None and the reason."""
        if (kept := self._decoders.get(name)) is None or kept[0] is None:
            kept = self._decoders[name] = trajectory.decoder(self.path(name), self.about(name)["config"])
        return kept

    def followed(self, name: str, wait_s: float = 0.0) -> tuple[RunMetrics, bool]:
        """The run's rows as far as they are read, and whether that is the whole file; waits at most `wait_s` for it."""
        path = self.path(name)
        with self._lock:
            found = self._followed.get(name)
            if found is None:
                found = self._followed[name] = Followed(RunMetrics(path), time.monotonic(), threading.Event())
            found.asked_s = time.monotonic()
        if not found.ready.is_set():
            self._wake.set()
            found.ready.wait(wait_s)
        return found.metrics, found.ready.is_set()

    def with_content(self, name: str, look: Callable[[Any], Any], wait_s: float = 0.1) -> tuple[Any, bool]:
        """The value of `look` at the run's rows, and whether all are read."""
        followed, ready = self.followed(name, wait_s)
        with followed.lock:
            return look(followed.content), ready

    def _follow(self) -> None:
        while not self._ended:
            self._wake.clear()
            with self._lock:
                for name in [n for n, one in self._followed.items() if time.monotonic() - one.asked_s > USED_S]:
                    del self._followed[name]
                followed = list(self._followed.values())
            more = False
            for one in followed:
                try:
                    new = one.metrics.read()
                except OSError:
                    new = False
                if new:
                    more = True
                else:
                    one.ready.set()
            if not more:
                self._wake.wait(EVERY_S)


def encoded(value: Any) -> bytes:
    """JSON; numbers that are not finite are null."""
    return msgspec.json.encode(value)
