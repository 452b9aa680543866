"""A run whose roles are stand-ins (`programs/dummy_role.py`), under a real supervisor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PROGRAMS = Path(__file__).parent / "programs"
NAMES = ("store", "learner", "sampler-0", "sampler-1", "evaluator")
PATIENCE_S = 40.0
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class StandInRun:
    """A run folder with stand-ins for the roles and a supervisor in its own process."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.events = folder / "run", folder / "events"
        self.learner_done, self.evaluator_done = folder / "learner-done", folder / "evaluator-done"
        self.process: subprocess.Popen[str]

    def start(
        self,
        words: dict[str, list[str]] | None = None,
        gang: tuple[str, ...] = (),
        terminal: int | None = None,
        term: str | None = "xterm",
        **config: float,
    ) -> None:
        """Start the supervisor; on its own `terminal` if one is given."""
        words = words or {}
        common = {
            "store": [f"--ready={self.run_dir / 'store.addr'}"],
            "learner": [f"--until={self.learner_done}"],
            "evaluator": [f"--until={self.evaluator_done}"],
        }
        specs = []
        for name in NAMES:
            argv = [sys.executable, str(PROGRAMS / "dummy_role.py"), str(self.events), name]
            specs.append(
                {
                    "name": name,
                    "argv": [*argv, *common.get(name, []), *words.get(name, [])],
                    "after": [] if name == "store" else ["store"],
                    "gang": "all" if name in gang else "",
                    "ready_file": str(self.run_dir / "store.addr") if name == "store" else None,
                }
            )
        settings = {"backoff_s": 0.05, "backoff_max_s": 0.2, "stop_s": 15.0, "final_eval_s": 30.0, **config}
        file = self.events.with_name("specs.json")
        file.write_text(json.dumps({"specs": specs, "config": settings}))
        on_terminal = [] if terminal is None else [sys.executable, "-c", TAKE_TERMINAL]
        env = {**os.environ, "TERM": term or ""}
        if term is None:
            del env["TERM"]
        self.process = subprocess.Popen(
            [*on_terminal, sys.executable, str(PROGRAMS / "supervise.py"), str(self.run_dir), str(file)],
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            text=True,
            start_new_session=True,
            env=env,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.STDOUT,
        )

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.events.read_text().splitlines()] if self.events.exists() else []

    def names(self, *what: str) -> list[str]:
        return [name for kind, name, _ in self.lines() if kind in what]

    def pid(self, name: str) -> int:
        return [int(pid) for kind, who, pid in self.lines() if who == name and kind in ("start", "again")][-1]

    def all_up(self) -> None:
        until(lambda: set(self.names("start", "again")) == set(NAMES), "all roles up")

    def finish(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out


def until(true: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, f"waited {patience_s} s for: {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
