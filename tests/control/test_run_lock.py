"""The lock of a run's folder: of simultaneous runs, resumes and forks one proceeds, the others change nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.config import Config, RunConfig, TaskConfig
from jaxroll.control import child, cli, run_dir
from jaxroll.errors import EXIT_CONFIG, ConfigError
from jaxroll.rpc import tls
from jaxroll.run_paths import RunPaths
from jaxroll.store.log import database

ROOT = Path(__file__).parents[2]
SMOKE = str(ROOT / "configs" / "smoke.py")
NEW = ("train", f"--config={SMOKE}", "--run=r")
RESUME = ("train", "--run=r", "--resume")
WAIT_S = 120.0
# Commands that may own a run (in an existing run folder or a new one), and commands that may ask for it.
OWNERS = {
    "new": (False, NEW),
    "resume": (True, RESUME),
    "fork": (True, (*RESUME, "--fork=0")),
    "sft": (True, ("sft", "--run=r")),
    "store": (True, ("store", "--run=r")),
}
REFUSED = {
    "new": NEW,
    "new with another config": (*NEW, "--config.run.seed=5"),
    "resume": RESUME,
    "resume with an override": (*RESUME, "--config.schedule.steps=77"),
    "fork": (*RESUME, "--fork=0"),
    "fork with an override": (*RESUME, "--fork=0", "--config.supervisor.max_restarts=1"),
    "sft": ("sft", "--run=r"),
    "sft with a config": ("sft", "--run=r", f"--config={SMOKE}"),
    "store": ("store", "--run=r"),
    "role with another config": ("learner", "--run=r", f"--config={SMOKE}", "--config.run.seed=5"),
    "new log": (*RESUME, "--new-log"),
    "launch": ("launch", f"--config={SMOKE}", "--on=skypilot", "--run=r", "--accelerator=H100"),
    "launch over ssh": ("launch", f"--config={SMOKE}", "--on=ssh", "--run=r"),
    "tinker": ("tinker-serve", "r", "--port=0"),
}
SUPERVISED = {  # roles that this machine's supervisor has
    "learner": ("learner", "--run=r"),
    "learner with the config": ("learner", "--run=r", f"--config={SMOKE}"),
    "sampler": ("sampler", "r"),
    "evaluator": ("evaluator", "--run=r"),
}


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Modification time and bytes of every file, and the modification time of every folder."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an interpreter whose `-m jaxroll` is fake_jaxroll.py."""
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).parents[1] / "harness/programs/fake_jaxroll.py"}" "$@"\n'
    )
    script.chmod(0o755)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def start(here: Path, words: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start `jaxroll WORDS…` as a process with stand-ins for the roles."""
    argv = [
        sys.executable,
        str(Path(__file__).parents[1] / "harness/programs/run_command.py"),
        str(here.parent / "python"),
        *words,
    ]
    return subprocess.Popen(argv, cwd=here, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def owned(here: Path, exists: bool, words: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """The run `r`, owned by a process of this command that has finished its start."""
    run = here / "r"
    if exists:
        run_dir.create(run, configs.load(SMOKE), [])
        (run / ".warm-done").touch()
    run.mkdir(exist_ok=True)
    (run / "hold").touch()
    owner = start(here, words)
    try:
        until_s, before = time.monotonic() + WAIT_S, {}
        while time.monotonic() < until_s and owner.poll() is None:
            time.sleep(0.5)  # and on a busy machine longer, as the starts of the owner's roles take longer there
            subprocess.run([sys.executable, "-c", "import argparse, asyncio, json"], check=True)
            now = contents(run)
            if {"calls.jsonl", "store.addr"} & now.keys() and now == before:
                break
            before = now
        else:  # a command that finds no owner would train here
            pytest.fail(f"the owner did not start in {WAIT_S:.0f} s, or ended ({owner.poll()})")
        yield owner
    finally:
        (run / "hold").unlink(missing_ok=True)
        try:
            owner.communicate(timeout=WAIT_S)
        finally:
            owner.kill()
            owner.wait(timeout=10)


@pytest.mark.process
@pytest.mark.parametrize(
    "owner", [*("new", "fork", "store"), *(pytest.param(name, marks=pytest.mark.soak) for name in ("resume", "sft"))]
)
def test_every_other_command_is_refused_and_changes_nothing(
    here: Path, owner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with owned(here, *OWNERS[owner]) as process:
        before = contents(here)
        for name, words in (REFUSED | (SUPERVISED if owner in ("new", "resume", "fork") else {})).items():
            assert cli.main([*words]) == EXIT_CONFIG, name
            said = capsys.readouterr()
            assert "Traceback" not in said.err and "r'" in said.err, (name, said.err)
            assert contents(here) == before, name
    assert process.returncode == 0, "the owner was disturbed"


@pytest.mark.process
def test_of_simultaneous_resumes_and_forks_one_proceeds(here: Path) -> None:
    run_dir.create(here / "r", configs.load(SMOKE), [])
    for name in (".warm-done", "hold"):
        (here / "r" / name).touch()
    asked = [(*RESUME, f"--config.schedule.steps={100 + number}") for number in range(2)]
    asked += [(*RESUME, "--fork=0", f"--config.schedule.steps={102 + number}") for number in range(2)]
    processes = [start(here, words) for words in asked]
    try:
        until_s = time.monotonic() + WAIT_S
        while sum(process.poll() is None for process in processes) > 1 and time.monotonic() < until_s:
            time.sleep(0.05)
        (here / "r" / "hold").unlink()
        said = [process.communicate(timeout=WAIT_S)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=10)
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, EXIT_CONFIG, EXIT_CONFIG, EXIT_CONFIG], said
    winner = codes.index(0)
    assert run_dir.load_config(here / "r").schedule.steps == 100 + winner
    roles = [json.loads(line) for line in (here / "r" / "calls.jsonl").read_text().splitlines()]
    given = [json.loads(call["given"])["config"]["schedule"]["steps"] for call in roles]
    assert given and set(given) == {100 + winner}
    assert len([call for call in roles if call["words"][0] == "store"]) == 1


def test_of_simultaneous_new_runs_one_creates_the_folder(tmp_path: Path) -> None:
    barrier, done = threading.Barrier(6), threading.Barrier(6)

    def attempt(number: int, path: Path) -> int | None:
        config = dataclasses.replace(Config(), run=RunConfig(seed=number))
        barrier.wait(30)
        try:
            with run_dir.new_run(path, config, [str(number)]):
                done.wait(30)
                return number
        except ConfigError:
            done.wait(30)
            return None

    with ThreadPoolExecutor(6) as pool:
        for turn in range(10):
            path = tmp_path / f"{turn}" / "run"
            found = list(pool.map(attempt, range(6), [path] * 6))
            (winner,) = [number for number in found if number is not None]
            assert run_dir.load_config(path).run.seed == winner
            assert run_dir.load(path)["argv"] == [str(winner)]


def test_roles_that_start_at_once_on_a_new_folder_create_one_run(tmp_path: Path) -> None:
    barrier = threading.Barrier(6)

    def attempt(path: Path) -> bool:
        barrier.wait(30)
        try:
            run_dir.create(path, Config(), [])
        except ConfigError as error:
            assert "already" in str(error)
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        for turn in range(10):
            assert sum(pool.map(attempt, [tmp_path / f"{turn}"] * 6)) == 1


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize("use", ["run", "certificates", "store"])
def test_a_file_system_without_locks_is_named(here: Path, monkeypatch: pytest.MonkeyPatch, use: str, number: int):
    """NFS without its lock daemon, and Lustre without -o flock. No such file system can be mounted in a test."""
    path = run_dir.create(here / "r", Config(), [])

    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match=rf"RUN = '{path}.*no locks \({os.strerror(number)}\).*local disk"):
        match use:
            case "run":
                with run_dir.locked(path):
                    pass
            case "certificates":
                tls.make_certificates(path, [], 1)
            case _:
                database.locked(RunPaths(path).store_lock)


def test_launch_needs_no_lock_of_a_file_system_without_locks(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several machines share it; a run that another process holds is refused all the same."""
    path, entered = run_dir.create(here / "r", Config(), []), []
    with run_dir.locked(path), pytest.raises(run_dir.RunInUse), child.locked_if_possible(path):
        entered.append("held")

    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with child.locked_if_possible(path):
        entered.append("no locks")
    assert entered == ["no locks"]


def test_a_large_config_reaches_a_process(here: Path) -> None:
    """Linux starts no process with a variable of 128 KiB, and few-shot messages may have megabytes."""
    large = Config(task=TaskConfig(system_prompt="word " * 60_000))
    path = run_dir.create(here / "r", large, [])
    held = contextlib.ExitStack()
    environ = held.enter_context(child.config_environment(path, large))
    program = "import sys\nfrom jaxroll.control import child, run_dir\nrun_dir.load_config = None\n"
    program += "print(len(child.given_config(child.Path(sys.argv[1])).task.system_prompt))"
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    assert done.stdout == "300000\n", done.stderr
    with child.config_environment(path, Config(task=TaskConfig(system_prompt="other " * 60_000))):
        assert child.given_config(path, environ) == large, "another command on this run has another config"
    assert child.given_config(path, environ) == large, "the other command has removed its own file only"
    (file,) = set(path.glob(".config-*")) & {Path(json.loads(value)["file"]) for value in environ.values()}
    for damaged in ("{", "{}", "[]"):
        file.write_text(damaged)
        with pytest.raises(ConfigError, match=r"\.config-.*holds no config.*--resume"):
            child.given_config(path, environ)
    held.close()
    assert not [*path.glob(".config-*")], "a large file stays in the folder of the run"


def test_a_role_keeps_the_config_that_its_supervisor_started_with(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later changes of run.json have no effect on it."""
    path = run_dir.create(here / "r", Config(), [])
    with child.config_environment(path, Config()) as environ:
        pass
    run_dir.resume(path, ["--config.schedule.steps=7"], lambda config: None)
    assert child.given_config(path, environ) == Config()
    assert child.given_config(path, {}).schedule.steps == 7
    other = run_dir.create(here / "other", Config(run=RunConfig(seed=3)), [])
    assert child.given_config(other, environ).run.seed == 3, "it was handed over for another run"
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    options = cli.parser().parse_args(["learner", f"--run={path}"])
    options.overrides, options.words, options.extra = [], [], []
    steps = {}
    for is_child in (True, False):
        options.child = is_child
        from jaxroll.control import commands

        steps[is_child] = commands.role_args(options).config.schedule.steps
    assert steps == {True: Config().schedule.steps, False: 7}
