"""One supervised process: own session, output in a log file, ended as a whole group; and its restart policy.

`run_foreground` runs a child without a supervisor, in this process's terminal. The config that a supervisor hands to
its processes is here, too.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from jaxroll import config as configs
from jaxroll import disk
from jaxroll.config import Config, SupervisorConfig
from jaxroll.config.derived import LEADERS
from jaxroll.control import run_dir
from jaxroll.control.program import ProcessSpec, child_env
from jaxroll.errors import EXIT_CLOSED, EXIT_CONFIG, EXIT_WORN, ConfigError, DataError, InfraError, described
from jaxroll.lifeline import PARENT_ENV
from jaxroll.run_paths import RunPaths

_MARK = "=== started "
_FINAL = frozenset({errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR})  # of the program: waiting will not help
# Python, C++, XLA and the system, each in its own words.
_NO_MEMORY = re.compile(r"MemoryError|bad_alloc|out of memory|cannot allocate memory|failed to allocate", re.IGNORECASE)
_ERROR, _IN_GROUP = re.compile(r"(Fatal Python )?error: "), re.compile(r"^\s*\| ")  # the latter: of an exception group
_ABORTED = "a library aborted it, as gRPC does without a message when it is out of memory; see its log"
_CAUSE_LINES, _CAUSE_CHARS = 200, 200  # of the end of a log that is searched for the cause; of a cause
KILLED_S = 10.0
_LOCK_BYTES = 1 << 16  # of a lock file, which names the roles of a run
LINE_CHARS = 1000  # of a line of a log, where its end is shown


class Process(Protocol):
    """A started process as the supervisor sees it. `cause` explains an end that the process did not choose, else ''."""

    pid: int | None
    cause: str

    def poll(self) -> int | None:
        """See `Child.poll`."""
        ...

    def terminate(self) -> None:
        """See `Child.terminate`."""
        ...

    def kill(self) -> None:
        """See `Child.kill`."""
        ...


class Child:
    """A started process. It gets its supervisor's pid, to die with it (see `jaxroll.lifeline`).

    ConfigError when there is no such program; InfraError when the machine refuses now (no descriptor, process, memory
    or room for the log is left), which may pass.
    """

    def __init__(self, spec: ProcessSpec, log: Path, environ: Mapping[str, str]) -> None:
        argv = list(spec.argv)
        env = child_env(environ, {**spec.env, PARENT_ENV: str(os.getpid())})
        try:
            with log.open("ab", buffering=0) as file:
                with contextlib.suppress(OSError):  # no room for the mark: no reason not to start
                    words = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(argv)}"
                    file.write(f"{_MARK}{words}\n".encode(errors="replace"))
                self._process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True
                )
        except OSError as error:
            why = f"cannot be started ({error.strerror}: {error.filename or argv[0]})"
            if error.errno in _FINAL and error.filename == argv[0]:
                raise ConfigError(spec.name, argv[0], why, "See the log.") from error
            raise InfraError(f"{spec.name} {why}") from error
        self.spec, self.log = spec, log
        self.pid: int | None = self._process.pid
        self.cause = ""

    def poll(self) -> int | None:
        """The exit code once it has ended (its stray children are killed with it), else None."""
        code = self._process.poll()
        if code is not None:
            self._signal_group(signal.SIGKILL)
        if code and not self.cause:
            self.cause = out_of_memory(tail(self.log, _CAUSE_LINES)) or (_ABORTED if code == -signal.SIGABRT else "")
        return code

    def terminate(self) -> None:
        """Ask the process to finish its work and end. It stops its own workers."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill it and its workers, and wait until the process has ended, or `KILLED_S` are over.

        On a busy machine, or one that waits for a disk, a killed process can take longer to end.
        """
        self._signal_group(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=KILLED_S)

    def _signal_group(self, signum: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, signum)
        except (ProcessLookupError, PermissionError):
            return  # no process of the group is left


def out_of_memory(text: str) -> str:
    """The last line of a log by which a process had no free memory, with that reason; '' if there is none."""
    lines = [line.strip() for line in text.splitlines() if _NO_MEMORY.search(line)]
    return f"out of memory: {lines[-1][:_CAUSE_CHARS]}" if lines else ""


def last_error(log: Path) -> str:
    """The last `error: …` line, or last line of a traceback, since the process was last started; '' without any."""
    found, in_traceback = "", False
    for line in _last_lines(log):
        content = _IN_GROUP.sub("", line, count=1)
        if "Traceback (most recent call last):" in content:
            in_traceback = True
        elif _ERROR.match(line) or (in_traceback and content[:1].strip()):
            found, in_traceback = content, False
    return _shown(found[:_CAUSE_CHARS])[:_CAUSE_CHARS]


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of the log since the process was last started, control characters written out."""
    return "\n".join(_shown(line) for line in _last_lines(log)[-lines:])


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    after = text.rpartition(_MARK)[2].partition("\n")[2] if _MARK in text else text
    return after.splitlines()


def _shown(line: str) -> str:
    line = line if len(line) <= LINE_CHARS else f"… {line[-LINE_CHARS:]}"
    return "".join(char if char.isprintable() or char == "\t" else repr(char)[1:-1] for char in line)


# --- restart policy: decisions when a process ends. Pure
#
# A process that dies is started again after a back-off that doubles; earlier deaths do not count after a long run. Exit
# code 0 means "my work is done", `errors.EXIT_CONFIG` means "starting me again will not help", `errors.EXIT_CLOSED`
# that the store closed the run, `errors.EXIT_WORN` "start me again, as often as I ask".

FORGIVEN_AFTER_S = 300.0


@dataclass(frozen=True)
class RestartHistory:
    """History of a process: deaths that still count, and all restarts."""

    deaths: int = 0
    restarts: int = 0


@dataclass(frozen=True)
class Done:
    """The process ended in order."""


@dataclass(frozen=True)
class Restart:
    """Start it again after `delay_s`."""

    delay_s: float
    history: RestartHistory


@dataclass(frozen=True)
class GiveUp:
    """End the run, because of `reason`."""

    reason: str


Verdict = Done | Restart | GiveUp


def after_exit(name: str, code: int, uptime_s: float, history: RestartHistory, limits: SupervisorConfig) -> Verdict:
    """The reaction to process `name`, which ended with `code` (negative: killed by that signal) after `uptime_s`."""
    if code == 0:
        return Done()
    if code == EXIT_CONFIG:
        return GiveUp(f"{name} refused its configuration")
    if code == EXIT_CLOSED:
        return GiveUp("the store closed the run") if name in LEADERS else Done()
    if code == EXIT_WORN:
        return Restart(limits.backoff_s, replace(history, restarts=history.restarts + 1))
    history = replace(history, deaths=1 if uptime_s >= FORGIVEN_AFTER_S else history.deaths + 1)
    if history.deaths > limits.max_restarts:
        return GiveUp(
            f"{name} died {history.deaths} times, the last time {exit_text(code)} (supervisor.max_restarts = "
            f"{limits.max_restarts})"
        )
    delay_s = min(limits.backoff_s * 2 ** (history.deaths - 1), limits.backoff_max_s)
    return Restart(delay_s, replace(history, restarts=history.restarts + 1))


def exit_text(code: int) -> str:
    """The exit code as text for a person."""
    if code == EXIT_WORN:
        return f"with exit code {code}, because too many of its threads hang in environments"
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


# --- the config of the run, which a supervisor hands to its processes

CONFIG_VARIABLE = "JAXROLL_RUN_CONFIG"
VARIABLE_BYTES = 100_000  # Linux starts no process with a variable of 128 KiB or more (MAX_ARG_STRLEN)


@contextlib.contextmanager
def config_environment(path: Path, config: Config) -> Iterator[dict[str, str]]:
    """The variable by which a supervisor hands `config` of the run `path` to the processes it starts.

    It contains the config, or names a file of the run folder with it if a variable cannot hold that much. The file is
    that of this process and is removed at the end.
    """
    text, file = json.dumps({"run": str(path), "config": configs.to_dict(config)}), None
    if len(text) > VARIABLE_BYTES:
        file = RunPaths(path).handed_config(f"{configs.digest(config)}-{os.getpid()}")
        run_dir.replace(file, text)
        text = json.dumps({"run": str(path), "file": str(file)})
    try:
        yield {CONFIG_VARIABLE: text}
    finally:
        if file is not None:
            file.unlink(missing_ok=True)


def given_config(path: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """The config of the run `path` as the supervisor handed it over; else as run.json says."""
    given = json.loads(environ.get(CONFIG_VARIABLE) or "{}")
    if given.get("run") != str(path):
        return run_dir.load_config(path)
    if file := given.get("file"):
        try:
            given = {"config": json.loads(run_dir.file_bytes(Path(file)))["config"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"it holds no config: {described(error)}"
            raise ConfigError("RUN", file, reason, "Continue the run: `train --resume`.") from error
    return configs.parse(given["config"])


def run_foreground(argv: list[str], env: dict[str, str]) -> int:
    """Run a child that has this process's terminal and return its exit code.

    Interrupts reach it through the terminal; SIGTERM is passed on.
    """
    child = subprocess.Popen(argv, env=child_env(os.environ, {**env, PARENT_ENV: str(os.getpid())}))
    handlers = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: lambda *_: child.terminate()}
    previous = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        code = child.wait()
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    return code if code >= 0 else 128 - code


def check_served(options: argparse.Namespace) -> None:
    """ConfigError for a port or a `--token-file` that a server cannot use: its child tries both after loading JAX."""
    if hasattr(options, "port"):
        from jaxroll.rpc import http

        http.listen(options.host, options.port, insecure=options.insecure).close()
        if getattr(options, "token_file", None):
            http.token(None, Path(options.token_file))


def note_roles(path: Path, names: Iterable[str]) -> None:
    """Write this supervisor's process id and the roles that it starts here into the run's lock file, which it holds."""
    with contextlib.suppress(OSError):
        RunPaths(path).lock.write_text(" ".join([str(os.getpid()), *names]), encoding="utf-8")


def check_not_supervised(path: Path, command: str, index: int) -> None:
    """RunInUse if a supervisor of this machine starts this role of the run: a second one would replace it.

    Roles on several machines are started one by one, or by a supervisor that notes none.
    """
    if (supervisor := disk.lock_holder(RunPaths(path).lock)) is None:
        return
    with contextlib.suppress(OSError, DataError, ValueError):
        pid, *names = disk.read_text(RunPaths(path).lock, _LOCK_BYTES).split()
        found = {command, f"{command}-{index}"}.intersection(names)
        if pid == str(supervisor) and found:
            reason = f"the supervisor with process id {pid} has a {found.pop()}"
            raise run_dir.RunInUse("RUN", str(path), reason, "Stop that run first.")


@contextlib.contextmanager
def locked_if_possible(path: Path) -> Iterator[None]:
    """Hold the run as `run_dir.locked`; RunInUse as there.

    The block runs without the lock if it cannot be taken for another reason: a file system that several machines share
    may have no locks, and if it is full or read-only, the block's own writes say so.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(run_dir.locked(path))
        except run_dir.RunInUse:
            raise
        except ConfigError as error:
            if not isinstance(error.__cause__, OSError):
                raise
        yield
