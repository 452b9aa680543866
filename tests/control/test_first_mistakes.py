"""Typical mistakes of a new user: each is answered at once with its remedy, and the remedy works.

The commands run in a folder that holds `configs/` and nothing else, or the things that `PREPARED` puts there. A
stand-in replaces the start of a run or of a child process: the tests check that the command gets that far.
"""

from __future__ import annotations

import builtins
import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.control import cli, commands, run_dir, train
from tests.harness.run_folder import make_run

ROOT = Path(__file__).parents[2]
CPU_S = 2.0
TASK = "task.name"

# The command (after `jaxroll`), texts that the answer must contain, and the remedy that it names ("" if this is not a
# command); `{port}` is a port that another process uses.
MISTAKES: list[tuple[str, tuple[str, ...], str]] = [
    # the command line
    ("trian --config=configs/smoke.py", ("trian", "jaxroll train"), "train --config=configs/smoke.py"),
    ("repot old", ("repot", "jaxroll report"), "report old"),
    ("resume old", ("resume", "jaxroll --help"), "--help"),
    ("train configs/smoke.py", ("--config=configs/smoke.py",), "train --config=configs/smoke.py"),
    ("train --config=configs/smoke.py --run.seed=3", ("--config.run.seed=3",),
     "train --config=configs/smoke.py --config.run.seed=3"),
    ("train --confg=configs/smoke.py", ("--confg", "--config=configs/smoke.py"), "train --config=configs/smoke.py"),
    ("train --config=configs/smoke.py --fast", ("--fast", "train --help"), "train --help"),
    ("train --config=configs/smoke.py --insecure", ("--insecure", "Leave it out", "--host=NAME"),
     "train --config=configs/smoke.py"),
    ("eval begun --answers=3", ("--answers", "eval --help"), "eval --help"),
    ("compile begun --role=store", ("--role", "sampler"), "compile --help"),
    ("train old --run=begun --resume", ("old", "--run=begun"), "train old --resume"),
    ("report", ("RUN",), "report old"),
    ("train", ("--config", "configs/demo.py"), "train --config=configs/demo.py"),
    # configs
    ("train --config=smoke.py", ("smoke.py", "no such file", "configs/"), "train --config=configs/smoke.py"),
    ("train --config=configs/smoke.py --config.learner.lr=1e-4", ("learner.lr", "learner.learning_rate"),
     "train --config=configs/smoke.py --config.learner.learning_rate=1e-4"),
    ("train --config=configs/smoke.py --config.lerner.learning_rate=1e-4", ("lerner", "learner"),
     "train --config=configs/smoke.py --config.learner.learning_rate=1e-4"),
    ("train --config=configs/smoke.py --config.sampler.prefill_buckets=64,32", ("sampler.prefill_buckets = [64, 32]",),
     "train --config=configs/smoke.py --config.sampler.prefill_buckets=32,64"),
    ("train --config=configs/smoke.py --config.schedule.steps=many", ("schedule.steps", "whole number"),
     "train --config=configs/smoke.py --config.schedule.steps=20"),
    ("train --config=configs/smoke.py --config.task.name=spel", (TASK, "spell_backward"),
     "train --config=configs/smoke.py --config.task.name=spell_backward"),
    ("train --config=configs/smoke.py --config.task.source=jsonl --config.task.path=none.jsonl", ("task", "none.jsonl"),
     ""),
    ("train --config=configs/smoke.py --config.model.path=no/model", ("model.path", "no/model"), ""),
    ("train --config=configs/smoke.py --config.placement.platform=gpu", ("placement.platform", "'cpu'"),
     "train --config=configs/smoke.py --config.placement.platform=cpu"),
    ("train --config=configs/smoke.py --config.placement.platform=tpu", ("placement.platform", "'auto'"),
     "train --config=configs/smoke.py --config.placement.platform=auto"),
    # a first config
    ("init mine --task=chain_sum", ("FILE", ".py"), "init mine.py --task=chain_sum"),
    ("init mine.py --hardware=gpu", ("--hardware", "gpu:8"), "init mine.py --hardware=gpu:8"),
    ("init mine.py --task=chain_sums", ("chain_sums",), "init mine.py --task=chain_sum"),
    ("init mine.py --model=models/none", ("models/none", "config.json"), ""),
    # plans
    ("plan --config=configs/smoke.py", ("--topology", "v5e:8x8"), "plan --config=configs/smoke.py --topology=v5e:8x8"),
    ("plan --config=configs/smoke.py --topology=v5e:3x3", ("--topology", "v5e:8x8"),
     "plan --config=configs/smoke.py --topology=v5e:8x8"),
    ("plan --topology=v5e:8x8", ("--config", "configs/demo.py"), "plan --config=configs/demo.py --topology=v5e:8x8"),
    ("plan --config=configs/smoke.py --topology=v5e:2x2 --config.learner.mesh.fsdp=8",
     ("learner.", "a larger topology"),
     "plan --config=configs/smoke.py --topology=v5e:4x4 --config.learner.mesh.fsdp=8"),
    ("plan --config=configs/rlvr_qwen3_8b.py --topology=v5e:2x4", ("learner.mesh", "16"),
     "plan --config=configs/rlvr_qwen3_8b.py --topology=v5e:4x4"),
    ("plan --config=configs/rlvr_qwen3_8b.py --topology=v5e:8x8 --config.sampler.mesh.tensor=24",
     ("sampler.mesh.tensor", "24", "16]"),
     "plan --config=configs/rlvr_qwen3_8b.py --topology=v5e:8x8 --config.sampler.mesh.tensor=16"),
    # simulations
    ("sim --config=configs/smoke.py", ("--cluster", "jaxroll sim calibrate RUN"), ""),
    ("sim --config=configs/smoke.py --cluster=none.toml", ("none.toml", "TOML"), ""),
    ("sim calibrate old", ("too few",), ""),
    ("place --config=configs/smoke.py", ("--cluster", "docs/placement.md"), ""),
    ("place --config=configs/smoke.py --cluster=none.toml", ("none.toml", "TOML"), ""),
    # runs
    ("train old --config=configs/smoke.py", ("RUN", "old", "--resume"), "train old --resume"),
    ("train old", ("RUN", "old", "--resume"), "train old --resume"),
    ("train --resume", ("RUN", "jaxroll list"), "list"),
    ("train nothing --resume", ("nothing", "jaxroll list"), "list ."),
    ("train --resume old --config=configs/smoke.py", ("--config", "Leave --config out"), "train --resume old"),
    ("train old --resume --config.learner.learning_rate=1", ("learner.learning_rate", "new run"),
     "train old --resume --config.schedule.steps=99"),
    ("train --fork=1 --config=configs/smoke.py", ("--fork", "Add RUN and --resume"), "train old --resume --fork=1"),
    ("report .", ("no run here", "jaxroll list"), "list ."),
    ("report nothing", ("nothing", "jaxroll list"), "list ."),
    ("ui nothing", ("RUNS", "nothing", "jaxroll list"), "list ."),
    ("inspect begun", ("store.db", "no such log"), ""),
    ("inspect old --group=999", ("--group", "999", "0 to "), "inspect old --group=0"),
    ("replay begun", ("store.db",), ""),
    ("export old", ("--parquet=FILE", "--jsonl=FILE"), "export old --jsonl=out.jsonl"),
    ("export old --parquet=out.parquet", ("pyarrow", "jaxroll[data]", "--jsonl"), "export old --jsonl=out.jsonl"),
    ("export old --jsonl=no/out.jsonl", ("no/out.jsonl", "folder"), "export old --jsonl=out.jsonl"),
    ("tls begun --token-of=sampler", ("has no token", "jaxroll tls RUN"), "tls begun"),
    # weights
    ("generate begun hello", ("begun", "train begun --resume"), "train begun --resume"),
    ("generate begun", ("PROMPT",), ""),
    ("generate", ("RUN",), ""),
    ("eval begun", ("begun", "train begun --resume"), "train begun --resume"),
    ("serve begun", ("begun", "train begun --resume"), "train begun --resume"),
    ("serve", ("RUN",), ""),
    ("tinker-serve", ("RUN",), ""),
    ("tinker-serve begun --session-timeout=5", ("--session-timeout", "Use 20"), ""),
    ("weights import configs out", ("configs", "config.json", "Hugging Face"), ""),
    ("weights export begun out", ("begun", "checkpoints"), "train begun --resume"),
    ("weights", ("import|export",), "weights import --help"),
    # environments
    ("env check nothing:here", ("nothing:here", "its module cannot be imported"), ""),
    ("env check", ("MODULE:NAME",), "env check --help"),
    # roles and machines
    ("sampler --config=configs/smoke.py --run=r --index=-1", ("--index", "0"), ""),
    ("actor begun", ("placement.actors",), ""),
    ("store begun --store=localhost", ("--store", "HOST:PORT"), ""),
    ("launch --config=configs/smoke.py", ("--on", "slurm"), "launch --config=configs/smoke.py --on=skypilot --dry-run"),
]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, with a run `old` that has begun to train and a run `begun` that has not."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    make_run(tmp_path / "old", steps=2, steps_wanted=9)
    run_dir.create(tmp_path / "begun", configs.load(ROOT / "configs" / "smoke.py"), [])
    values = run_dir.load(tmp_path / "begun")
    run_dir.write(tmp_path / "old", values)  # a config of this version
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train", lambda *_, **__: 0)
    monkeypatch.setattr(commands, "run_foreground", lambda *_: 0)
    monkeypatch.setattr(cli.lifeline, "bind_from_env", lambda: False)
    real = builtins.__import__

    def no_pyarrow(name: str, *args, **kwargs):
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pyarrow)
    return tmp_path


def typed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and the output of `jaxroll LINE`."""
    capsys.readouterr()
    try:
        code = cli.main(shlex.split(line))
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out + err


@pytest.mark.parametrize(("line", "words", "remedy"), MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_a_mistake_is_answered_with_its_remedy_which_works(
    line: str, words: tuple[str, ...], remedy: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in home.iterdir())
    code, answer = typed(line, capsys)
    assert code in (1, 2, 64), answer
    assert all(word in answer for word in words), answer
    assert "Traceback" not in answer and len(answer) < 2000
    assert sorted(path.name for path in home.iterdir()) == before, "a refused command leaves nothing behind"
    if remedy:
        code, answer = typed(remedy, capsys)
        assert code == 0, answer


def test_the_demo_outside_a_checkout(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from jaxroll.control import train

    (home / "configs").unlink()
    monkeypatch.setattr(train.jaxroll, "__file__", str(home / "site-packages" / "jaxroll" / "__init__.py"))
    code, answer = typed("demo", capsys)
    assert code == 64 and "checkout" in answer and "--config=FILE" in answer
    shutil.copy(ROOT / "configs" / "smoke.py", home)
    assert typed("demo --config=smoke.py", capsys)[0] == 0


def test_an_absent_device_is_reported_before_a_library_is_loaded(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading one takes a second or more."""
    monkeypatch.setattr(commands.preflight, "check", lambda *_: pytest.fail("checked what needs the library"))
    assert typed("train --config=configs/smoke.py --config.placement.platform=tpu", capsys)[0] == 64


def test_a_run_that_is_read_while_it_begins(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("report begun", "report begun --json", "checkpoints begun", "list .", "config begun"):
        code, answer = typed(line, capsys)
        assert code == 0 and "Traceback" not in answer, answer


NOT_HERE = "export old --parquet=out.parquet"  # a mistake only where pyarrow is missing


@pytest.mark.process
@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_every_answer_is_quick(home: Path) -> None:
    """The mistakes of the table, each in a process of its own."""
    used = {line: quickest_s(line) for line, *_ in MISTAKES if line != NOT_HERE}
    print(sorted(used.values()))
    assert not {line: used_s for line, used_s in used.items() if used_s >= CPU_S}


def quickest_s(line: str) -> float:
    """CPU seconds of `jaxroll LINE`, child processes included: the least of several, because a machine may be busy."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "jaxroll", *shlex.split(line)]
    used = []
    while len(used) < 5 and min(used, default=CPU_S) >= CPU_S:
        before = _used_s()
        done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=600, check=False)
        used.append(_used_s() - before)
        assert done.returncode in (1, 2, 64) and b"Traceback" not in done.stderr, (line, done.stderr)
    return min(used)


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.process
def test_a_port_that_another_process_has(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        argv = [sys.executable, "-m", "jaxroll", "store", "begun", f"--store=127.0.0.1:{port}"]
        done = subprocess.run(
            argv,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=60,
            check=False,
        )
    assert done.returncode == 64 and f"127.0.0.1:{port}" in done.stderr and "another process" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_has_a_mistake() -> None:
    typed_commands = {line.split()[0] for line, *_ in MISTAKES} | {"demo", "list", "config", "checkpoints", "doctor"}
    roles = {"learner", "evaluator", "colocated", "feeder", "sft"}  # as sampler, actor and eval
    assert commands.COMMANDS.keys() <= typed_commands | roles
