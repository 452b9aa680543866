"""The supervisor with real processes that replace the roles."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from jaxroll import metrics
from jaxroll.config import SupervisorConfig
from jaxroll.control.child import Child
from jaxroll.control.program import ProcessSpec
from jaxroll.control.supervisor import ProcessView, Supervisor
from jaxroll.errors import ConfigError, InfraError

pytestmark = pytest.mark.process

PROGRAMS = Path(__file__).parents[1] / "harness/programs"
NAMES = ("store", "learner", "sampler-0", "sampler-1", "evaluator")
PATIENCE_S = 40.0
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Stage:
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


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate(timeout=10)


def test_a_run_ends_with_its_learner_then_its_evaluator_then_in_order(stage: Stage) -> None:
    stage.start()
    stage.all_up()
    assert stage.names("start")[0] == "store"  # the others wait for its address
    stage.learner_done.touch()
    until(lambda: stage.names("end") == ["learner"], "the learner's end")
    stage.evaluator_done.touch()
    code, _ = stage.finish()
    assert code == 0
    assert stage.names("end") == ["learner", "evaluator"]
    terms = stage.names("term")
    assert sorted(terms[:2]) == ["sampler-0", "sampler-1"] and terms[2:] == ["store"]
    assert "sampler-0 speaks" in (stage.run_dir / "logs" / "sampler-0.log").read_text()
    assert metrics.read(stage.run_dir / "metrics.jsonl") == []


def test_no_role_is_started_before_the_store_answers(stage: Stage) -> None:
    hold = stage.events.with_name("hold")
    (stage.run_dir).mkdir()
    (stage.run_dir / "store.addr").write_text("of an earlier process")
    stage.start({"store": [f"--hold={hold}"]})
    until(lambda: stage.names("start") == ["store"], "the store")
    assert [path.name for path in (stage.run_dir / "logs").iterdir()] == ["store.log"]
    hold.touch()
    stage.all_up()
    stage.process.send_signal(signal.SIGINT)
    assert stage.finish()[0] == 130


def test_an_evaluation_that_never_ends_is_cut_off(stage: Stage) -> None:
    stage.start(final_eval_s=0.2)
    stage.all_up()
    stage.learner_done.touch()
    code, out = stage.finish()
    assert code == 0 and "supervisor.final_eval_s" in out
    assert stage.names("term")[0] == "evaluator"


@pytest.mark.parametrize("victim", ["learner", "sampler-1"])
def test_all_processes_of_a_learner_restart_when_one_dies(stage: Stage, victim: str) -> None:
    stage.start(gang=("learner", "sampler-1"))
    stage.all_up()
    before = {name: stage.pid(name) for name in NAMES}
    os.kill(before[victim], signal.SIGKILL)
    until(lambda: sorted(stage.names("again")) == ["learner", "sampler-1"], "both again")
    assert all(gone(before[name]) for name in ("learner", "sampler-1"))
    stage.learner_done.touch()
    stage.evaluator_done.touch()
    assert stage.finish()[0] == 0
    assert sorted(stage.names("again")) == ["learner", "sampler-1"], "no other role, and only once"
    restarts = [row["process"] for row in metrics.read(stage.run_dir / "metrics.jsonl") if row["kind"] == "restart"]
    assert restarts == [victim]


def test_a_sampler_that_left_starts_again_when_a_plan_asks_for_one(tmp_path: Path) -> None:
    """Without processes: both samplers leave, a plan asks for one, and the learner ends when that has started."""
    alive: dict[str, Any] = {}
    starts: list[str] = []

    def start(spec: ProcessSpec, log: Path, environ: object) -> Any:
        starts.append(spec.name)
        one = SimpleNamespace(pid=1, cause="", code=None)
        one.poll, one.kill, one.terminate = lambda: one.code, lambda: None, lambda: setattr(one, "code", 0)
        alive[spec.name] = one
        return one

    def tick(processes: Sequence[ProcessView]) -> None:
        states = {each.name: each.state for each in processes}
        ticks.append(0)
        if len(ticks) > 100:  # it did not start: end the run with an error
            alive["store"].code = 0
        if starts[4:]:
            alive["learner"].code = 0
        elif states["sampler-0"] == states["sampler-1"] == "done" and not asked:
            asked.append(metrics.JsonlTracker(tmp_path / "metrics.jsonl"))
            asked[0].log({"t": 0.0, "kind": "event", "role": "store", "what": "plan", "more": 1, "text": "x"})
        elif len(starts) == 4:
            alive["sampler-0"].code = alive["sampler-1"].code = 0

    asked: list[metrics.JsonlTracker] = []
    said, ticks = list[str](), list[int]()
    view: Any = SimpleNamespace(rows=lambda _: None, tick=tick, say=said.append)
    specs = [ProcessSpec(name, name.partition("-")[0], (name,)) for name in NAMES[:4]]
    assert Supervisor(specs, tmp_path, SupervisorConfig(), view, start=start).run() == 0
    assert starts == [*NAMES[:4], "sampler-0"] and "sampler-0 starts again: the run needs it." in said


def test_a_death_after_the_learner_has_finished_restarts_nothing(stage: Stage) -> None:
    stage.start(gang=("learner", "sampler-1"))
    stage.all_up()
    learner, mate = stage.pid("learner"), stage.pid("sampler-1")
    stage.learner_done.touch()
    until(lambda: gone(learner), "the learner to end")
    os.kill(mate, signal.SIGKILL)
    until(lambda: gone(mate), "its mate to end")
    stage.evaluator_done.touch()
    assert stage.finish()[0] == 0
    assert stage.names("again") == []


def test_a_killed_role_is_started_again(stage: Stage) -> None:
    stage.start()
    stage.all_up()
    killed = {}
    for name in ("sampler-1", "store", "learner", "evaluator"):
        killed[name] = stage.pid(name)
        os.kill(killed[name], signal.SIGKILL)
        until(lambda name=name: name in stage.names("again"), f"{name} again")
    stage.learner_done.touch()
    stage.evaluator_done.touch()
    code, out = stage.finish()
    assert code == 0
    rows = metrics.read(stage.run_dir / "metrics.jsonl")
    assert {row["process"]: (row["pid"], row["code"]) for row in rows} == {
        name: (pid, -9) for name, pid in killed.items()
    }
    assert all(row["kind"] == "restart" and row["role"] == "supervisor" for row in rows)
    assert "sampler-1 died by signal 9" in out


def test_a_role_that_keeps_dying_ends_the_run_with_its_last_output(stage: Stage) -> None:
    stage.start({"sampler-0": ["--crash=99"]}, max_restarts=2)
    code, out = stage.finish()
    assert code == 1
    assert stage.names("start", "again").count("sampler-0") == 3
    assert "sampler-0 died 3 times" in out and "it hurts" in out
    assert "store" in stage.names("term")


def test_a_few_crashes_of_a_role_do_not_end_the_run(stage: Stage) -> None:
    stage.start({"learner": ["--crash=2"]}, max_restarts=2)
    until(lambda: stage.names("start", "again").count("learner") == 3, "the learner's third process")
    stage.learner_done.touch()
    stage.evaluator_done.touch()
    assert stage.finish()[0] == 0


def test_a_role_that_the_machine_does_not_start_now_is_tried_again(stage: Stage) -> None:
    """Its log cannot be opened, as when no process, descriptor or disk space is left for a while."""
    log = stage.run_dir / "logs" / "sampler-1.log"
    log.mkdir(parents=True)
    stage.start(max_restarts=1000)
    until(lambda: set(stage.names("start")) == set(NAMES) - {"sampler-1"}, "the others up")
    log.rmdir()
    stage.all_up()
    stage.learner_done.touch()
    stage.evaluator_done.touch()
    code, out = stage.finish()
    assert code == 0 and "sampler-1 cannot be started" in out and str(log) in out, out


def test_a_role_that_the_machine_never_starts_ends_the_run_with_the_cause(stage: Stage) -> None:
    log = stage.run_dir / "logs" / "sampler-1.log"
    log.mkdir(parents=True)
    stage.start(max_restarts=2)
    code, out = stage.finish()
    assert code == 1 and f"sampler-1 cannot be started (Is a directory: {log}), 3 times" in out, out
    assert "Traceback" not in out


def test_a_disk_that_takes_no_log_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role's own message about its disk would be in the log."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path / "logs" / "learner.log"))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    told: list[str] = []
    view: Any = SimpleNamespace(rows=lambda _: None, tick=lambda _: None, say=told.append)
    spec, config = ProcessSpec("learner", "learner", ("jaxroll",)), SupervisorConfig(max_restarts=1, backoff_s=0.05)
    assert Supervisor([spec], tmp_path, config, view).run() == 1
    (end,) = [text for text in told if text.startswith("The run ends")]
    assert f"MB are free at {tmp_path / 'logs'}" in end and "remount that disk" in end, end


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), InfraError),
        (OSError(errno.EMFILE, "Too many open files"), InfraError),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "jaxroll"), ConfigError),
        (PermissionError(errno.EACCES, "Permission denied", "jaxroll"), ConfigError),
    ],
)
def test_a_start_refused_for_now_is_no_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, kind: type[Exception]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(kind, match=rf"sampler.*{error.strerror}"):
        Child(ProcessSpec("sampler", "sampler", ("jaxroll",)), tmp_path / "log", {})


@pytest.mark.process
def test_a_killed_process_that_ends_late_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it ended the supervisor with a traceback, and the processes after it were not killed."""
    child = Child(ProcessSpec("learner", "learner", (sys.executable, "-c", "input()")), tmp_path / "log", {})

    def late(timeout: float) -> int:
        raise subprocess.TimeoutExpired("learner", timeout)

    with monkeypatch.context() as patch:
        patch.setattr(child._process, "wait", late)
        child.kill()
    assert child._process.wait(30) == -signal.SIGKILL


def test_a_refused_config_is_never_tried_again(stage: Stage) -> None:
    stage.learner_done.touch()
    stage.start({"learner": ["--code=64"]})
    code, out = stage.finish()
    assert code == 64
    assert stage.names("start", "again").count("learner") == 1
    assert "learner refused its configuration" in out and "learner speaks" in out


@pytest.mark.parametrize("code", [1, 64, 75])
def test_the_failure_of_an_optional_process_does_not_end_the_run(tmp_path: Path, code: int) -> None:
    said: list[str] = []
    view: Any = SimpleNamespace(rows=lambda _: None, tick=lambda _: None, say=said.append)
    wait = (  # until the supervisor has noted the failure
        "import pathlib, sys, time\nend = time.monotonic() + 60\nfile = pathlib.Path(sys.argv[1])\n"
        "while 'compile-sampler' not in (file.read_text() if file.exists() else ''):\n"
        "    time.sleep(0.02)\n    assert time.monotonic() < end"
    )
    specs = [
        ProcessSpec("sft", "sft", (sys.executable, "-c", wait, str(tmp_path / "metrics.jsonl"))),
        ProcessSpec("compile-sampler", "compile", (sys.executable, "-c", f"raise SystemExit({code})"), optional=True),
    ]
    assert Supervisor(specs, tmp_path, SupervisorConfig(max_restarts=0), view, leader="sft").run() == 0
    assert said == [], "it is noted in the metrics, not shown"
    notes = [row["text"] for row in metrics.read(tmp_path / "metrics.jsonl") if row["kind"] == "event"]
    assert len(notes) == 1 and notes[0].startswith("compile-sampler ended") and "compile-sampler.log" in notes[0]


def test_a_store_that_ends_before_the_learner_ends_the_run(stage: Stage) -> None:
    stage.start({"store": [f"--until={stage.evaluator_done}"]})
    stage.all_up()
    stage.evaluator_done.touch()
    code, out = stage.finish()
    assert code == 1 and "store ended before the learner" in out


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda signum: signum.name)
def test_an_interrupt_stops_in_order(stage: Stage, signum: signal.Signals) -> None:
    stage.start()
    stage.all_up()
    stage.process.send_signal(signum)
    code, out = stage.finish()
    assert code == 130 and "Stopping in order: learner, evaluator, 2 samplers, store. Interrupt again to kill." in out
    terms = stage.names("term")
    assert terms[:2] == ["learner", "evaluator"] and sorted(terms[2:4]) == ["sampler-0", "sampler-1"]
    assert terms[4:] == ["store"]
    assert "again" not in [kind for kind, *_ in stage.lines()]


def test_a_role_that_will_not_leave_is_killed(stage: Stage) -> None:
    stage.start({"sampler-0": ["--stubborn"]}, stop_s=5.0)
    stage.all_up()
    stubborn = stage.pid("sampler-0")
    stage.process.send_signal(signal.SIGINT)
    code, out = stage.finish()
    assert code == 130 and "sampler-0 did not leave within 5 s" in out
    assert gone(stubborn) and stage.names("term")[-1] == "store"


RINGING = """
import signal, time
from jaxroll.control.supervisor import WakeSignal
bell, rung, until_s = WakeSignal(), [], time.monotonic() + 2
signal.signal(signal.SIGALRM, lambda *_: (rung.append(1), bell.ring()))
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
while time.monotonic() < until_s:
    bell.wait(1e-5)
signal.setitimer(signal.ITIMER_REAL, 0)
print(len(rung))
"""


def test_an_interrupt_at_any_moment_does_not_wait_for_itself() -> None:
    done = subprocess.run([sys.executable, "-c", RINGING], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 100, "hardly interrupted at all"


def test_a_second_interrupt_kills(stage: Stage) -> None:
    stage.start({name: ["--stubborn"] for name in NAMES}, stop_s=60.0)
    stage.all_up()
    stage.process.send_signal(signal.SIGINT)
    until(lambda: "learner" in stage.names("term"), "the effect of the first interrupt")
    stage.process.send_signal(signal.SIGINT)
    assert stage.finish()[0] == 130
    assert all(gone(stage.pid(name)) for name in NAMES)


def test_a_hang_up_never_kills(stage: Stage) -> None:
    """A shell that ends sends SIGHUP twice, and a service manager SIGTERM in addition."""
    stage.start({"learner": ["--linger=2"]}, stop_s=60.0)
    stage.all_up()
    for signum in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        stage.process.send_signal(signum)
        time.sleep(0.2)
    code, out = stage.finish()
    assert code == 130 and "killed" not in out
    assert "end learner" in stage.events.read_text(), "it had no time to end"
    assert stage.names("term")[-1] == "store"


def test_under_nohup_a_hang_up_is_ignored(stage: Stage) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does for its child
    try:
        stage.start()
    finally:
        signal.signal(signal.SIGHUP, previous)
    stage.all_up()
    stage.process.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert stage.process.poll() is None and stage.names("term") == []
    stage.process.send_signal(signal.SIGTERM)
    assert stage.finish()[0] == 130


def test_a_run_whose_terminal_is_closed_ends_in_order(stage: Stage) -> None:
    terminal, end = os.openpty()
    stage.start({"learner": ["--linger=2"]}, stop_s=60.0, terminal=end)
    os.close(end)
    stage.all_up()
    os.close(terminal)  # the kernel signals the session's leader and refuses further writes
    code = stage.process.wait(timeout=PATIENCE_S)
    assert code == 130
    assert "end learner" in stage.events.read_text(), "it had no time to end"
    assert stage.names("term")[:2] == ["learner", "evaluator"] and stage.names("term")[-1] == "store"


SIZES = ((50, 200), (24, 80), (5, 10), (1, 1), (0, 0), (1, 200), (50, 1), (65535, 65535), (24, 80))  # rows, columns


class Screen:
    """The reading end of a terminal, which records the output."""

    def __init__(self) -> None:
        self.master, self.end = os.openpty()
        self.shown = b""
        self._thread = threading.Thread(target=self._read, daemon=True)

    def read(self) -> None:
        """Start to read in a thread."""
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the last process on it has ended
            while data := os.read(self.master, 2**16):
                self.shown += data
        os.close(self.master)

    def resize(self, rows: int, columns: int) -> None:
        """Change the size; the kernel sends SIGWINCH to the processes in the foreground."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def train_step(stage: Stage, step: int) -> None:
    """Append a metrics row as the learner does."""
    tracker = metrics.JsonlTracker(stage.run_dir / "metrics.jsonl")
    now = time.time()
    tracker.log(
        {
            "t": now,
            "role": "learner",
            "kind": "step",
            "step": step,
            "t0": now,
            "t1": now,
            "train_s": 0.1,
            "wait_s": 0.1,
            "publish_s": 0.1,
            "age_hist": {"0": 1},
            "reward_mean": step / 1000,
        }
    )
    tracker.close()


def end_all(stage: Stage) -> int:
    """Let all roles end; return the run's exit code."""
    stage.learner_done.touch()
    stage.evaluator_done.touch()
    return stage.process.wait(timeout=PATIENCE_S)


def test_the_table_follows_a_terminal_whose_size_changes(stage: Stage) -> None:
    screen = Screen()
    stage.start(terminal=screen.end)
    os.close(screen.end)
    screen.read()
    stage.all_up()
    for step in range(1, 4):
        train_step(stage, step)
        for size in SIZES:
            screen.resize(*size)
            time.sleep(0.0 if step == 1 else 0.3)  # at first faster than it is drawn
    until(lambda: b"0.003" in screen.shown, "the third step on the screen")
    assert end_all(stage) == 0
    assert b"Traceback" not in screen.shown
    assert [row for row in metrics.read(stage.run_dir / "metrics.jsonl") if row["kind"] == "event"] == []


def test_a_run_ends_though_its_terminal_is_stopped(stage: Stage) -> None:
    screen = Screen()
    stage.start(terminal=screen.end)
    stage.all_up()
    os.write(screen.master, b"\x13")  # Ctrl-S
    for step in range(1, 40):
        train_step(stage, step)
    assert end_all(stage) == 0
    os.close(screen.end)
    os.close(screen.master)


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_terminal_that_cannot_move_its_cursor_is_shown_lines(stage: Stage, term: str | None) -> None:
    screen = Screen()
    stage.start(terminal=screen.end, term=term)
    os.close(screen.end)
    screen.read()
    stage.all_up()
    train_step(stage, 1)
    until(lambda: b"step 1/5  reward 0.001" in screen.shown, "the step on the screen")
    assert end_all(stage) == 0
    assert b"\x1b" not in screen.shown


def test_no_process_is_left_after_the_supervisor_is_killed(stage: Stage) -> None:
    stage.start({name: ["--stubborn", "--child"] for name in NAMES})
    stage.all_up()
    pids = [stage.pid(name) for name in NAMES]
    pids += [int(stage.events.with_name(f"child-of-{name}").read_text()) for name in NAMES]
    assert not any(map(gone, pids))
    stage.process.kill()
    until(lambda: all(map(gone, pids)), "all processes and their children gone", 20.0)


def test_the_children_of_a_killed_role_go_with_it(stage: Stage) -> None:
    stage.start({"sampler-0": ["--child=loose"]})
    stage.all_up()
    child = int(stage.events.with_name("child-of-sampler-0").read_text())
    os.kill(stage.pid("sampler-0"), signal.SIGKILL)
    until(lambda: "sampler-0" in stage.names("again"), "a restart")
    until(lambda: gone(child), "the end of the first process's worker", 20.0)
    stage.process.send_signal(signal.SIGINT)
    assert stage.finish()[0] == 130
