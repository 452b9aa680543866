"""The supervisor with real processes that replace the roles."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxroll import metrics
from jaxroll.config import SupervisorConfig
from jaxroll.control.child import Child
from jaxroll.control.program import ProcessSpec
from jaxroll.control.supervisor import ProcessView, Supervisor
from jaxroll.errors import ConfigError, InfraError
from tests.harness.stand_in_run import NAMES, StandInRun, gone, until

pytestmark = pytest.mark.process


def test_a_run_ends_with_its_learner_then_its_evaluator_then_in_order(run: StandInRun) -> None:
    run.start()
    run.all_up()
    assert run.names("start")[0] == "store"  # the others wait for its address
    run.learner_done.touch()
    until(lambda: run.names("end") == ["learner"], "the learner's end")
    run.evaluator_done.touch()
    code, _ = run.finish()
    assert code == 0
    assert run.names("end") == ["learner", "evaluator"]
    terms = run.names("term")
    assert sorted(terms[:2]) == ["sampler-0", "sampler-1"] and terms[2:] == ["store"]
    assert "sampler-0 speaks" in (run.run_dir / "logs" / "sampler-0.log").read_text()
    assert metrics.read(run.run_dir / "metrics.jsonl") == []


def test_no_role_is_started_before_the_store_answers(run: StandInRun) -> None:
    hold = run.events.with_name("hold")
    (run.run_dir).mkdir()
    (run.run_dir / "store.addr").write_text("of an earlier process")
    run.start({"store": [f"--hold={hold}"]})
    until(lambda: run.names("start") == ["store"], "the store")
    assert [path.name for path in (run.run_dir / "logs").iterdir()] == ["store.log"]
    hold.touch()
    run.all_up()
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 130


def test_an_evaluation_that_never_ends_is_cut_off(run: StandInRun) -> None:
    run.start(final_eval_s=0.2)
    run.all_up()
    run.learner_done.touch()
    code, out = run.finish()
    assert code == 0 and "supervisor.final_eval_s" in out
    assert run.names("term")[0] == "evaluator"


@pytest.mark.parametrize("victim", ["learner", "sampler-1"])
def test_all_processes_of_a_learner_restart_when_one_dies(run: StandInRun, victim: str) -> None:
    run.start(gang=("learner", "sampler-1"))
    run.all_up()
    before = {name: run.pid(name) for name in NAMES}
    os.kill(before[victim], signal.SIGKILL)
    until(lambda: sorted(run.names("again")) == ["learner", "sampler-1"], "both again")
    assert all(gone(before[name]) for name in ("learner", "sampler-1"))
    run.learner_done.touch()
    run.evaluator_done.touch()
    assert run.finish()[0] == 0
    assert sorted(run.names("again")) == ["learner", "sampler-1"], "no other role, and only once"
    restarts = [row["process"] for row in metrics.read(run.run_dir / "metrics.jsonl") if row["kind"] == "restart"]
    assert restarts == [victim]


@pytest.mark.parametrize("trained", [True, False])
def test_an_evaluator_that_gives_up_ends_the_run_only_before_all_is_trained(tmp_path: Path, trained: bool) -> None:
    """Without processes: the learner serves the last weights no more, so an evaluator that dies cannot get them."""

    def start(spec: ProcessSpec, log: Path, environ: object) -> Any:
        starts.append(spec.name)
        one = SimpleNamespace(pid=1, cause="", code=None)
        if spec.name == "evaluator":
            one.code = 1
        if spec.name == "learner" and trained:
            one.code = 0
        one.poll, one.kill, one.terminate = lambda: one.code, lambda: None, lambda: setattr(one, "code", 0)
        return one

    starts, lines = list[str](), list[str]()
    view: Any = SimpleNamespace(rows=lambda _: None, tick=lambda _: None, say=lines.append)
    specs = [ProcessSpec(name, name, (name,)) for name in ("store", "learner", "evaluator")]
    limits = SupervisorConfig(max_restarts=2, backoff_s=0.01)
    code = Supervisor(specs, tmp_path, limits, view, leader="learner", start=start).run()
    assert code == (0 if trained else 1) and starts.count("evaluator") == 3
    assert any("All is trained" in line for line in lines) is trained


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
    lines, ticks = list[str](), list[int]()
    view: Any = SimpleNamespace(rows=lambda _: None, tick=tick, say=lines.append)
    specs = [ProcessSpec(name, name.partition("-")[0], (name,)) for name in NAMES[:4]]
    assert Supervisor(specs, tmp_path, SupervisorConfig(), view, start=start).run() == 0
    assert starts == [*NAMES[:4], "sampler-0"] and "sampler-0 starts again: the run needs it." in lines


@pytest.mark.parametrize(("ends", "code"), [(["store"], 0), (["store-1"], 0), (["store", "store-1"], 1)])
def test_the_run_goes_on_while_one_of_two_stores_can_be_started(tmp_path: Path, ends: list[str], code: int) -> None:
    """Without processes: the machines of `ends` are lost, and no process starts there."""
    alive: dict[str, Any] = {}

    def start(spec: ProcessSpec, log: Path, environ: object) -> Any:
        one = alive[spec.name] = SimpleNamespace(pid=1, cause="", code=255 if spec.name in ends else None)
        one.poll, one.kill, one.terminate = lambda: one.code, lambda: None, lambda: setattr(one, "code", 0)
        return one

    def tick(processes: Sequence[ProcessView]) -> None:
        if {each.name for each in processes if each.state == "done"} >= {*ends}:
            alive["learner"].code = 0

    lines = list[str]()
    view: Any = SimpleNamespace(rows=lambda _: None, tick=tick, say=lines.append)
    specs = [ProcessSpec(name, name.partition("-")[0], (name,)) for name in ("learner", "store", "store-1")]
    limits = SupervisorConfig(max_restarts=0)
    assert Supervisor(specs, tmp_path, limits, view, start=start).run() == code
    assert lines[0].startswith(f"{ends[0]} is not started again: {ends[0]} died 1 times")
    assert any(line.startswith("The run ends") for line in lines) == (code == 1)


def test_a_death_after_the_learner_has_finished_restarts_nothing(run: StandInRun) -> None:
    run.start(gang=("learner", "sampler-1"))
    run.all_up()
    learner, mate = run.pid("learner"), run.pid("sampler-1")
    run.learner_done.touch()
    until(lambda: gone(learner), "the learner to end")
    os.kill(mate, signal.SIGKILL)
    until(lambda: gone(mate), "its mate to end")
    run.evaluator_done.touch()
    assert run.finish()[0] == 0
    assert run.names("again") == []


def test_a_killed_role_is_started_again(run: StandInRun) -> None:
    run.start()
    run.all_up()
    killed = {}
    for name in ("sampler-1", "store", "learner", "evaluator"):
        killed[name] = run.pid(name)
        os.kill(killed[name], signal.SIGKILL)
        until(lambda name=name: name in run.names("again"), f"{name} again")
    run.learner_done.touch()
    run.evaluator_done.touch()
    code, out = run.finish()
    assert code == 0
    rows = metrics.read(run.run_dir / "metrics.jsonl")
    assert {row["process"]: (row["pid"], row["code"]) for row in rows} == {
        name: (pid, -9) for name, pid in killed.items()
    }
    assert all(row["kind"] == "restart" and row["role"] == "supervisor" for row in rows)
    assert "sampler-1 died by signal 9" in out


def test_a_role_that_keeps_dying_ends_the_run_with_its_last_output(run: StandInRun) -> None:
    run.start({"sampler-0": ["--crash=99"]}, max_restarts=2)
    code, out = run.finish()
    assert code == 1
    assert run.names("start", "again").count("sampler-0") == 3
    assert "sampler-0 died 3 times" in out and "it hurts" in out
    assert "store" in run.names("term")


def test_a_few_crashes_of_a_role_do_not_end_the_run(run: StandInRun) -> None:
    run.start({"learner": ["--crash=2"]}, max_restarts=2)
    until(lambda: run.names("start", "again").count("learner") == 3, "the learner's third process")
    run.learner_done.touch()
    run.evaluator_done.touch()
    assert run.finish()[0] == 0


def test_a_role_that_the_machine_does_not_start_now_is_tried_again(run: StandInRun) -> None:
    """Its log cannot be opened, as when no process, descriptor or disk space is left for a while."""
    log = run.run_dir / "logs" / "sampler-1.log"
    log.mkdir(parents=True)
    run.start(max_restarts=1000)
    until(lambda: set(run.names("start")) == set(NAMES) - {"sampler-1"}, "the others up")
    log.rmdir()
    run.all_up()
    run.learner_done.touch()
    run.evaluator_done.touch()
    code, out = run.finish()
    assert code == 0 and "sampler-1 cannot be started" in out and str(log) in out, out


def test_a_role_that_the_machine_never_starts_ends_the_run_with_the_cause(run: StandInRun) -> None:
    log = run.run_dir / "logs" / "sampler-1.log"
    log.mkdir(parents=True)
    run.start(max_restarts=2)
    code, out = run.finish()
    assert code == 1 and f"sampler-1 cannot be started (Is a directory: {log}), 3 times" in out, out
    assert "Traceback" not in out


def test_a_disk_that_takes_no_log_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role's own message about its disk would be in the log."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path / "logs" / "learner.log"))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    lines: list[str] = []
    view: Any = SimpleNamespace(rows=lambda _: None, tick=lambda _: None, say=lines.append)
    spec, config = ProcessSpec("learner", "learner", ("jaxroll",)), SupervisorConfig(max_restarts=1, backoff_s=0.05)
    assert Supervisor([spec], tmp_path, config, view).run() == 1
    (end,) = [text for text in lines if text.startswith("The run ends")]
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


def test_a_refused_config_is_never_tried_again(run: StandInRun) -> None:
    run.learner_done.touch()
    run.start({"learner": ["--code=64"]})
    code, out = run.finish()
    assert code == 64
    assert run.names("start", "again").count("learner") == 1
    assert "learner refused its configuration" in out and "learner speaks" in out


@pytest.mark.parametrize("code", [1, 64, 75])
def test_the_failure_of_an_optional_process_does_not_end_the_run(tmp_path: Path, code: int) -> None:
    lines: list[str] = []
    view: Any = SimpleNamespace(rows=lambda _: None, tick=lambda _: None, say=lines.append)
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
    assert lines == [], "it is noted in the metrics, not shown"
    notes = [row["text"] for row in metrics.read(tmp_path / "metrics.jsonl") if row["kind"] == "event"]
    assert len(notes) == 1 and notes[0].startswith("compile-sampler ended") and "compile-sampler.log" in notes[0]


def test_a_store_that_ends_before_the_learner_ends_the_run(run: StandInRun) -> None:
    run.start({"store": [f"--until={run.evaluator_done}"]})
    run.all_up()
    run.evaluator_done.touch()
    code, out = run.finish()
    assert code == 1 and "store ended before the learner" in out


def test_no_process_is_left_after_the_supervisor_is_killed(run: StandInRun) -> None:
    run.start({name: ["--stubborn", "--child"] for name in NAMES})
    run.all_up()
    pids = [run.pid(name) for name in NAMES]
    pids += [int(run.events.with_name(f"child-of-{name}").read_text()) for name in NAMES]
    assert not any(map(gone, pids))
    run.process.kill()
    until(lambda: all(map(gone, pids)), "all processes and their children gone", 20.0)


def test_the_children_of_a_killed_role_go_with_it(run: StandInRun) -> None:
    run.start({"sampler-0": ["--child=loose"]})
    run.all_up()
    child = int(run.events.with_name("child-of-sampler-0").read_text())
    os.kill(run.pid("sampler-0"), signal.SIGKILL)
    until(lambda: "sampler-0" in run.names("again"), "a restart")
    until(lambda: gone(child), "the end of the first process's worker", 20.0)
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 130
