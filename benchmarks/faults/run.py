"""A run under attack: start, resume, processes, progress, end.

The seed chooses the variant of the run. Each bit of it that is set adds one of `VARIANTS`:

    1   tls       mutual TLS, with certificates in the run's folder
    2   actors    two actors play the environments, and the samplers serve them
    4   links     each role reaches the store, the learner's weights (tcp) and the samplers through a proxy of its own
    8   warm      a warm start before the first step, during which the learner is killed
    16  disks     checkpoints, logs and TensorBoard events are on small disks of their own
    32  foreign   a folder with unusual characters in its name, and at each start another locale
    64  files     weights go through a folder on a small disk, and the compile cache, empty at first, is on another one;
                  not together with `links`, whose weights go through connections
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.tcp_proxy import Proxy
from benchmarks.lib.report import ROOT, say
from jaxroll import metrics

HERE = Path(__file__).resolve().parent
LEASE_S = 6.0
ENDLESS = 100_000
OVERRIDES = {
    "sft.steps": 0, "schedule.steps": ENDLESS, "schedule.groups_per_step": 4, "schedule.group_size": 4,
    "schedule.alpha": 1, "task.env": "benchmarks.faults.envs:chaos", "sampler.count": 2, "evaluator.every": 25,
    "learner.checkpoint_every": 10, "store.lease_s": LEASE_S, "store.rpc_deadline_s": 4, "store.history_mb": 8,
    "store.keep_trajectories_mb": 8, "store.retention_mb": 64, "supervisor.max_restarts": 10_000,
    "supervisor.backoff_s": 0.2, "supervisor.backoff_max_s": 2.0, "supervisor.stop_s": 30.0,
}  # fmt: skip
VARIANTS = ("tls", "actors", "links", "warm", "disks", "foreign", "files")
# Further keys of a variant.
CHANGES = {
    "tls": {"store.mutual_tls": True},
    "actors": {"placement.actors": 2},
    "links": {"transfer.channel": "tcp", "transfer.deadline_s": 5, "evaluator.every": 5},
    "warm": {"sft.steps": 40},
}
SAMPLERS, ACTORS = ("sampler-0", "sampler-1"), ("actor-0", "actor-1")
FOLDER, FOREIGN_FOLDER = "run", "a run's folder - %20 #1 {x} $HOME"
LOCALES = (
    {"LC_ALL": "C", "PYTHONUTF8": "0"},
    {"LC_ALL": "POSIX", "PYTHONIOENCODING": "latin-1"},
    {"LC_ALL": "no_such_locale", "TZ": "Asia/Kathmandu"},
    {"LANG": "", "LC_ALL": "", "PYTHONIOENCODING": "ascii"},
)
# The modules of processes that roles start.
MODULES = {"scoring": "jaxroll.rewards.processes", "env": "jaxroll.envs.processes"}
LEAVES_S = 180.0  # time for a supervisor to end after a signal
INSTANT_S = 15.0  # time for which a fault waits for the instant that it needs
POLL_S = 0.002
Row = dict[str, Any]


class Skipped(Exception):
    """The fault did not take place; the message is the reason."""


class Unseen(Exception):
    """The fault may not have taken place, or not as its name says; the message is what is known of it."""


class Wrong(Exception):
    """The run's reaction is a violation, which the message names."""


def variant_of(seed: int) -> tuple[str, ...]:
    """The parts of the seed's variant."""
    found = tuple(name for bit, name in enumerate(VARIANTS) if seed >> bit & 1)
    return tuple(name for name in found if name != "files" or "links" not in found)


class Run:
    """One run, with its clock, journal and orders in `folder`. `close` ends all its processes."""

    def __init__(
        self, folder: Path, run_dir: Path, seed: int, no_namespace: str = "", variant: Sequence[str] = ()
    ) -> None:
        self.folder, self.run_dir, self.seed, self.no_namespace = folder, run_dir, seed, no_namespace
        self.variant = frozenset(variant)
        self.players = ACTORS if "actors" in self.variant else SAMPLERS  # roles that play the environments
        self.roles = ("store", "learner", "evaluator", *SAMPLERS, *(ACTORS if "actors" in self.variant else ()))
        self.journal, self.orders, self.clock = folder / "journal", folder / "orders", folder / "clock"
        self.weights, self.cache = run_dir.parent / "weights", run_dir.parent / "cache"  # of the variant `files`
        self.memory = folder / "memory"  # a file with a role's name: it uses up its memory
        for path in (self.journal, self.orders, self.memory):
            path.mkdir(parents=True, exist_ok=True)
        self.set_clock(0.0)
        self.lock = threading.RLock()  # held during an intended restart of the supervisor
        self.closed = threading.Event()  # set by `close`: a fault of another thread starts nothing after it
        self.lives = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.reader: subprocess.Popen[bytes] | None = None
        self.links: dict[tuple[str, str], Proxy] = {}
        if "links" in self.variant:
            self._open_links(folder / "links")
        self._follower = metrics.RowReader(run_dir / "metrics.jsonl")
        self.rows: list[Row] = []
        self.step, self.moved_s = 0, time.monotonic()

    # --- the supervisor

    def start(self, *words: str) -> None:
        """Start or resume the run with the additional arguments `words`. Once the run is closed, do nothing."""
        with self.lock:
            if not self.closed.is_set():
                self._start(words)

    def _start(self, words: Sequence[str]) -> None:
        fresh = not (self.run_dir / "run.json").exists()
        changes: Row = {**OVERRIDES, "run.seed": self.seed}
        for name in self.variant:
            changes |= CHANGES.get(name, {})
        if "files" in self.variant:
            changes |= {"transfer.channel": "tensorstore", "transfer.path": str(self.weights)}
        if "tls" in self.variant and fresh:
            from jaxroll.rpc import tls  # gRPC belongs into the namespaces of `machine.enter`

            tls.make_certificates(self.run_dir, [], 1)
        how = [f"--config={ROOT / 'configs' / 'smoke.py'}", *(f"--config.{k}={v}" for k, v in changes.items())]
        self.lives += 1
        with self.output("out").open("wb") as out, self.output("err").open("wb") as err:
            # The reader of the output is a process, so that it can end before the run.
            self.reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=out, start_new_session=True)
            assert self.reader.stdin is not None
            command = [sys.executable, "-m", "jaxroll", "train", f"--run={self.run_dir}"]
            self.process = subprocess.Popen(
                [*command, *(how if fresh else ["--resume"]), *words],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                stdout=self.reader.stdin,
                stderr=err,
                start_new_session=True,
                env=self.environment(),
            )
            self.reader.stdin.close()
        self.moved_s = time.monotonic()

    def environment(self) -> dict[str, str]:
        """The environment of the run's processes."""
        path = os.pathsep.join([str(HERE / "hooks"), str(ROOT)])
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(ROOT / ".cache" / "jax")
        cache = str(self.cache) if "files" in self.variant else cache
        return {
            **os.environ,
            "PYTHONPATH": path,
            "JAXROLL_CACHE": cache,
            "XLA_FLAGS": "",
            "JAX_PLATFORMS": "cpu",
            "CHAOS_CLOCK": str(self.clock),
            "CHAOS_JOURNAL": str(self.journal),
            "CHAOS_ORDERS": str(self.orders),
            "CHAOS_MEMORY": str(self.memory),
            "CHAOS_LINKS": str(self.folder / "links") if self.links else "",
            "MALLOC_ARENA_MAX": "1",
            **(LOCALES[self.lives % len(LOCALES)] if "foreign" in self.variant else {}),
        }

    def _open_links(self, folder: Path) -> None:
        """Open a proxy for each role and peer that it calls. The role finds its address in the file ROLE.PEER.addr."""
        folder.mkdir()
        callers = [name for name in self.roles if name != "store"]
        links = [(name, "store") for name in callers] + [(name, "learner") for name in (*SAMPLERS, "evaluator")]
        if "actors" in self.variant:
            links += [(actor, sampler) for actor in ACTORS for sampler in SAMPLERS]
        for role, peer in links:
            # the publication holds the address of the weights, which the role notes (hooks/sitecustomize.py)
            file = folder / f"{role}.learner.target" if peer == "learner" else self.run_dir / f"{peer}.addr"
            self.links[role, peer] = Proxy(lambda file=file: file.read_text().strip() if file.exists() else "")
            (folder / f"{role}.{peer}.addr").write_text(self.links[role, peer].address + "\n")

    def output(self, name: str) -> Path:
        """The file with the present supervisor's stdout (`out`) or stderr (`err`)."""
        return self.folder / f"supervisor-{self.lives:03d}.{name}"

    @property
    def alive(self) -> bool:
        """True if the supervisor runs."""
        return self.process is not None and self.process.poll() is None

    def signal(self, signum: int) -> int | None:
        """Send the supervisor a signal and wait for its end; return the exit code, or None if it had to be killed."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signum)
        try:
            return self.process.wait(LEAVES_S)
        except subprocess.TimeoutExpired:
            self.show_stacks()
            self.kill_all()
            return None

    def kill_all(self) -> None:
        """End every process of the run at once."""
        processes = self.processes()
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=30)

    def close(self) -> None:
        """End all remaining processes. A fault that is just restarting the supervisor ends without a new one."""
        self.closed.set()
        self.kill_all()  # a fault may hold the lock while it waits for the supervisor's end
        with self.lock:
            self.kill_all()
        if self.reader is not None:
            self.reader.kill()
            self.reader.wait(30)
        for proxy in self.links.values():
            proxy.close()

    # --- its processes

    def processes(self) -> list[psutil.Process]:
        """All descendants of the supervisor."""
        if self.process is None:
            return []
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def find(self, target: str) -> psutil.Process | None:
        """A process of the run: supervisor, store, sampler-0, actor-0, learner, evaluator, feeder, scoring or env."""
        if target == "supervisor":
            return psutil.Process(self.process.pid) if self.process is not None and self.alive else None
        role, _, index = target.partition("-")
        module = MODULES.get(role)
        for process in self.processes():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if module is not None and words[1:4] == ["-P", "-m", module]:
                return process
            if words[1:4] == ["-m", "jaxroll", role] and (not index or f"--index={index}" in words):
                return process
        return None

    def wait_for(self, target: str, limit_s: float = 30.0) -> psutil.Process | None:
        """Wait for the process up to `limit_s`; return it, or None."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self.alive:
            found = self.find(target)
            if found is not None:
                return found
            time.sleep(0.05)
        return None

    # --- its progress

    def look(self) -> list[Row]:
        """Read the rows since the last call; note the newest step and its time."""
        try:
            new = self._follower.rows()
        except OSError:
            return []
        self.rows += new
        newest = max((row["step"] for row in new if row.get("kind") == "step" and row.get("step")), default=0)
        if newest > self.step:
            self.step, self.moved_s = newest, time.monotonic()
        return new

    def until(self, seen: Callable[[], bool], limit_s: float) -> bool:
        """Wait up to `limit_s` until `seen()` is true, reading the run's rows meanwhile; return True if it is."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self.look()
            if seen():
                return True
            time.sleep(0.1)
        return False

    def show_stacks(self) -> None:
        """Let every role write its threads' stacks to its log."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[1:3] == ["-m", "jaxroll"] and process.cmdline()[3] != "feeder":
                    process.send_signal(signal.SIGCONT)
                    process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)

    def last_words(self, lines: int = 6) -> str:
        """The end of the present supervisor's output."""
        text = "".join(self.output(name).read_text(errors="replace") for name in ("out", "err"))
        return "\n".join(text.splitlines()[-lines:])

    # --- changes by faults

    def set_clock(self, offset_s: float) -> None:
        """Shift the wall clock of all processes."""
        with open(self.clock, "r+b" if self.clock.exists() else "w+b") as file:
            file.write(struct.pack("d", offset_s))

    def clock_offset(self) -> float:
        """The shift of the wall clock in seconds."""
        return struct.unpack("d", self.clock.read_bytes())[0]

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `jaxroll` on the run, without hooks."""
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        argv = [sys.executable, "-m", "jaxroll", *words]
        return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env, timeout=600, check=False)

    def asked(self, *words: str) -> tuple[Any, str]:
        """The JSON that a command prints, and its error ('': none)."""
        done = self.command(*words)
        try:
            found = json.loads(done.stdout)
        except ValueError:
            return None, f"`jaxroll {words[0]}` ended with {done.returncode}: {(done.stderr or done.stdout)[-500:]}"
        return found, "" if done.returncode == 0 else f"`jaxroll {words[0]}` ended with {done.returncode}"


def there(run: Run, target: str) -> psutil.Process:
    """The target's process."""
    found = run.wait_for(target)
    if found is None:
        raise Skipped(f"no {target}")
    return found


@contextlib.contextmanager
def gone_is_fine(target: str) -> Iterator[None]:
    """Turn the early end of the target into Skipped."""
    try:
        yield
    except psutil.NoSuchProcess:
        raise Skipped(f"{target} ended by itself before the fault") from None


def until(seen: Callable[[], Any], limit_s: float) -> bool:
    """Wait up to `limit_s` until `seen()` is true; return True if it is."""
    deadline, pause = time.monotonic() + limit_s, threading.Event()
    while time.monotonic() < deadline:
        if seen():
            return True
        pause.wait(POLL_S)
    return False


def needs_namespace(run: Run) -> None:
    """Skip the fault if this process has no separate namespaces."""
    if run.no_namespace:
        raise Skipped(run.no_namespace)


def tell(began_s: float, texts: Sequence[str]) -> None:
    """Print one line of progress."""
    say(f"{time.monotonic() - began_s:7.1f} s  " + "  ".join(texts))
