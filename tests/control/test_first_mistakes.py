"""Typical mistakes of a new user: each is answered at once with its remedy, and the remedy works.

The commands run in a folder that holds `configs/` and nothing else, or the things that `PREPARED` puts there. A
stand-in replaces the start of a run or of a child process: the tests check that the command gets that far.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import resource
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.control import cli, commands, program, run_dir, train
from jaxroll.envs import registry
from jaxroll.roles import actor, session, store
from jaxroll.store import client
from jaxroll.testing import environments
from tests.harness.damages import stop_the_store
from tests.harness.run_folder import make_run

ROOT = Path(__file__).parents[2]
MOST_S, MOST_WAITED_S = 2.0, 0.8
TASK = "task.name"
CLUSTER = "rpc_s = 1e-3\n[sampler]\nstep_overhead_s = 0.5\n"
ENVIRONMENT = """
from jaxroll.envs.calculator import Calculator
from jaxroll.envs.registry import register
register("Mistaken")(Calculator)
"""
HARDWARE = """
[[devices]]
name = "cpu"
count = 4
flops = 1e12
bytes_per_s = 1e11
[model]
parameters = 1e6
"""

# The command (after `jaxroll`), texts that the answer must contain, and a command that follows the remedy it names.
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
    ("train --config=configs", ("'configs': is a folder", "Python file"), "train --config=configs/smoke.py"),
    ("train --config=", ("--config = '': is empty", "Name one"), "train --config=configs/smoke.py"),
    ("train --config=configs/smoke.py --run=", ("--run = '': is empty", "leave it out"),
     "train --config=configs/smoke.py"),
    ("eval trained --config=", ("--config = '': is empty", "leave it out"), "eval trained"),
    ("env check mistaken_env:Mistaken --config=", ("--config = '': is empty", "leave it out"),
     "env check mistaken_env:Mistaken"),
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
     "train --config=configs/smoke.py --config.task.source=jsonl --config.task.path=rows.jsonl"),
    ("train --config=configs/smoke.py --config.model.path=no/model", ("model.path", "--config.model.path=FOLDER"),
     "train --config=configs/smoke.py --config.model.path=model --config.tokenizer.kind=hf"
     " --config.tokenizer.path=model --config.task.max_prompt_tokens=48 --config.sampler.prefill_buckets=48"),
    ("train --config=configs/smoke.py --config.placement.platform=gpu", ("placement.platform", "'cpu'"),
     "train --config=configs/smoke.py --config.placement.platform=cpu"),
    ("train --config=configs/smoke.py --config.placement.platform=tpu", ("placement.platform", "'auto'"),
     "train --config=configs/smoke.py --config.placement.platform=auto"),
    # a first config
    ("init mine --task=chain_sum", ("FILE", ".py"), "init mine.py --task=chain_sum"),
    ("init mine.py --hardware=gpu", ("--hardware", "gpu:8"), "init mine.py --hardware=gpu:8"),
    ("init mine.py --task=chain_sums", ("chain_sums",), "init mine.py --task=chain_sum"),
    ("init mine.py --model=models/none", ("models/none", "config.json", "the folder of"), "init mine.py --model=model"),
    # plans
    ("plan --config=configs/smoke.py", ("--topology: no hardware", "v5e:8x8"),
     "plan --config=configs/smoke.py --topology=v5e:8x8"),
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
    ("sim --config=configs/smoke.py", ("--cluster", "jaxroll sim calibrate RUN"), "sim calibrate long"),
    ("sim --config=configs/smoke.py --cluster=none.toml", ("none.toml", "TOML"),
     "sim --config=configs/smoke.py --cluster=cluster.toml --config.schedule.steps=2"),
    ("sim calibrte long", ("RUN = 'calibrte long'", "jaxroll sim calibrate RUN"), "sim calibrate long"),
    ("sim calibrate old", ("too few", "ten steps"), "sim calibrate long"),
    ("place --config=configs/smoke.py", ("--cluster=FILE", "docs/placement.md"),
     "place --config=configs/smoke.py --cluster=hardware.toml"),
    ("place --config=configs/smoke.py --cluster=none.toml", ("none.toml", "TOML"),
     "place --config=configs/smoke.py --cluster=hardware.toml"),
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
    ("inspect begun", ("store.db", "no such log", "train begun --resume"), "train begun --resume"),
    ("inspect old --group=999", ("--group", "999", "0 to "), "inspect old --group=0"),
    ("profile begun", ("begun", "its store does not answer", "train begun --resume"), "train begun --resume"),
    ("profile killed", ("killed", "its store does not answer", "train killed --resume"), "train killed --resume"),
    ("profile begun --steps=0", ("--steps=0", "profile --help"), "profile --help"),
    ("profile begun --timeout=nan", ("--timeout=nan", "profile --help"), "profile --help"),
    ("replay begun", ("store.db", "train begun --resume"), "train begun --resume"),
    ("export old", ("--parquet=FILE", "--jsonl=FILE"), "export old --jsonl=out.jsonl"),
    ("export old --parquet=out.parquet", ("pyarrow", "jaxroll[data]", "--jsonl"), "export old --jsonl=out.jsonl"),
    ("export old --jsonl=no/out.jsonl", ("no/out.jsonl", "folder"), "export old --jsonl=out.jsonl"),
    ("tls begun --token-of=sampler", ("has no token", "jaxroll tls RUN"), "tls begun"),
    ("tls begun --days=0", ("--days", "between 1 and 36500"), "tls begun --days=30"),
    # weights
    ("generate begun hello", ("begun", "train begun --resume"), "train begun --resume"),
    ("generate begun", ("PROMPT", "jaxroll generate begun PROMPT"), "generate trained hello"),
    ("generate", ("RUN", "jaxroll list"), "generate trained hello"),
    ("eval begun", ("begun", "train begun --resume"), "train begun --resume"),
    ("serve begun", ("begun", "train begun --resume"), "train begun --resume"),
    ("serve", ("RUN", "jaxroll list"), "serve trained"),
    ("tinker-serve", ("RUN", "jaxroll list"), "tinker-serve trained"),
    ("tinker-serve begun --session-timeout=5", ("--session-timeout", "Use 20"),
     "tinker-serve begun --session-timeout=20"),
    ("weights import configs out", ("configs", "config.json", "Hugging Face"), "weights import model out"),
    ("weights export begun out", ("begun", "checkpoints"), "train begun --resume"),
    ("weights", ("import|export",), "weights import --help"),
    # environments
    ("env check nothing:here", ("nothing:here", "its module cannot be imported", "in a folder from which"),
     "env check mistaken_env:Mistaken"),
    ("env check mistaken_env:Correct", ("mistaken_env", "Correct", "registered"), "env check mistaken_env:Mistaken"),
    ("env check", ("MODULE:NAME",), "env check --help"),
    # roles and machines
    ("sampler --config=configs/smoke.py --run=r --index=-1", ("--index", "Use 0"),
     "sampler --config=configs/smoke.py --run=r --index=0"),
    ("actor begun", ("placement.actors", "--config.placement.actors=N"),
     "actor --config=configs/smoke.py --run=r --config.placement.actors=1"),
    ("store begun --store=localhost", ("--store", "--store=127.0.0.1:7077"), "store begun --store=127.0.0.1:0"),
    ("sampler --join=nope", ("--join", "nope", "--join=127.0.0.1:7077"), "sampler --help"),
    ("launch --config=configs/smoke.py", ("--on: no launcher is named", "slurm"),
     "launch --config=configs/smoke.py --on=skypilot --dry-run"),
]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder: a run `old` that has begun to train, `begun` that has not, `killed` whose store is
    gone, `long` with twelve steps, `trained` with weights, a model, rows, a cluster and an environment."""
    made = tmp_path_factory.mktemp("prepared") / "home"
    made.mkdir()
    (made / "cluster.toml").write_text(CLUSTER)
    (made / "configs").symlink_to(ROOT / "configs")
    make_run(made / "old", steps=2, steps_wanted=9)
    words = [f"--config={ROOT / 'configs' / 'smoke.py'}", f"--cluster={made / 'cluster.toml'}"]
    assert cli.main(["sim", str(made / "long"), *words, "--config.schedule.steps=12"]) == 0
    run_dir.create(made / "begun", configs.load(ROOT / "configs" / "smoke.py"), [])
    values = run_dir.load(made / "begun")
    run_dir.write(made / "old", values)  # a config of this version
    shutil.copytree(made / "begun", made / "killed")
    (made / "killed" / "store.addr").write_text("127.0.0.1:1")
    shutil.copytree(made / "begun", made / "trained")
    (made / "trained" / "warm").mkdir()
    shutil.copytree(ROOT / "tests" / "golden" / "qwen3" / "tied", made / "model")
    rows = [{"question": f"{index}+1", "answer": str(index + 1)} for index in range(99)]
    (made / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (made / "hardware.toml").write_text(HARDWARE)
    (made / "mistaken_env.py").write_text(ENVIRONMENT)
    return made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared: Path) -> Path:
    """A copy of the user's folder, and stand-ins for what would start there."""
    home = tmp_path / "home"
    shutil.copytree(prepared, home, symlinks=True)
    monkeypatch.chdir(home)
    monkeypatch.setattr(train, "train", lambda *_, **__: 0)
    monkeypatch.setattr(train, "_serve_tinker", lambda *_: 0)
    monkeypatch.setattr(commands, "run_foreground", lambda *_: 0)
    monkeypatch.setattr(cli.lifeline, "bind_from_env", lambda: False)
    for one in (session, actor):
        monkeypatch.setattr(one, "main", lambda *_: 0)
    monkeypatch.setattr(program, "place_alone", lambda *_: None)  # it sets variables of this process
    monkeypatch.setattr(store, "_watch", stop_the_store)
    monkeypatch.setattr(store.FeederProcess, "next", lambda *_: asyncio.sleep(60.0))
    monkeypatch.setattr(environments, "report", checked)
    real = builtins.__import__

    def no_pyarrow(name: str, *args, **kwargs):
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pyarrow)
    return home


def checked(name: str, config: str | None, *, overrides: Sequence[str], episodes: int) -> environments.Report:
    """As `environments.report`, without the episodes, for which it starts a process."""
    registry.factory(name)
    environments.settings_for(name, config, overrides)
    return environments.CheckResult(name, episodes, ())


def typed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and the output of `jaxroll LINE`."""
    capsys.readouterr()
    try:
        code = cli.main(shlex.split(line))
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out + err


def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the code asks to sleep from now on."""
    slept: list[float] = []
    for module in (time, asyncio):

        def sleep(seconds: float, *more, real=module.sleep):
            slept.append(seconds)
            return real(seconds, *more)

        monkeypatch.setattr(module, "sleep", sleep)
    return slept


@pytest.mark.parametrize(("line", "words", "remedy"), MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_a_mistake_is_answered_with_its_remedy_which_works(
    line: str, words: tuple[str, ...], remedy: str, home: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    before = sorted(path.name for path in home.iterdir())
    with monkeypatch.context() as watched:
        slept = sleeps(watched)
        code, answer = typed(line, capsys)
    assert code in (1, 2, 64), answer
    assert sum(slept) < MOST_WAITED_S, "it computes for up to a second more"
    assert all(word in answer for word in words), answer
    assert "Traceback" not in answer and len(answer) < 2000
    assert sorted(path.name for path in home.iterdir()) == before, "a refused command leaves nothing behind"
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


def test_joining_a_run_whose_store_is_gone_says_so_before_it_waits(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may be starting, so it waits; but a user who mistook the address learns it at once."""
    monkeypatch.setattr(client, "JOIN_S", 0.2)
    code, answer = typed("sampler --join=killed", capsys)
    first, last = answer.splitlines()
    assert code == 1 and "127.0.0.1:1: no answer" in first and first.endswith("as the run may be starting …")
    assert last.startswith("error: ") and "check the address" in last


NOT_HERE = "export old --parquet=out.parquet"  # a mistake only where pyarrow is missing


@pytest.mark.process
@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_every_answer_is_quick(home: Path) -> None:
    """The mistakes of the table, each in a process of its own. The time by the clock is printed (docs/results)."""
    found = {line: quickest_s(line) for line, *_ in MISTAKES if line != NOT_HERE}
    used, waited = ({line: one[part] for line, one in found.items()} for part in (0, 1))
    for name, seconds in {"CPU": used, "by the clock": waited}.items():
        slowest = max(seconds, key=seconds.__getitem__)
        middle, most = statistics.median(seconds.values()), seconds[slowest]
        print(f"{len(seconds)} mistakes, seconds {name}: median {middle:.2f}, most {most:.2f} ({slowest})")
    assert not {line: one for line, one in found.items() if max(one) >= MOST_S}, "on an idle machine"


def quickest_s(line: str) -> tuple[float, float]:
    """CPU seconds of `jaxroll LINE`, child processes included, and seconds by the clock.

    The least of up to five runs, because a machine may be busy; no more runs follow one below two seconds.
    """
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "jaxroll", *shlex.split(line)]
    used, waited = [], []
    while len(used) < 5 and max(min(used, default=MOST_S), min(waited, default=MOST_S)) >= MOST_S:
        before, began_s = _used_s(), time.monotonic()
        done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=600, check=False)
        used.append(_used_s() - before)
        waited.append(time.monotonic() - began_s)
        assert done.returncode in (1, 2, 64) and b"Traceback" not in done.stderr, (line, done.stderr)
    return min(used), min(waited)


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


def test_a_store_that_cannot_listen_leaves_no_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next attempt with that name would find a run there."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        taken = f"127.0.0.1:{held.getsockname()[1]}"
        for address, why in (
            (taken, "another process has this port"),
            ("8.8.8.8:1", "plain text"),
            ("8.8.8.8:1 --insecure", "cannot listen there"),
            ("127.0.0.1:x", "not HOST:PORT"),
            ("127.0.0.1:0000080000", "not HOST:PORT"),
        ):
            words = ["store", "fresh", "--config=configs/smoke.py", *f"--store={address}".split()]
            assert cli.main(words) == 64
            shown = capsys.readouterr().err
            assert f"--store = '{address.split()[0]}'" in shown and why in shown
            assert not (home / "runs" / "fresh").exists() and not (home / "fresh").exists()


def test_a_folder_tls_in_the_working_folder_is_not_that_of_a_run(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It belongs to something else: a new run without a name has no certificates yet."""
    (home / "tls").mkdir()
    assert cli.main(["store", "--config=configs/smoke.py", "--store=8.8.8.8:1"]) == 64
    shown = capsys.readouterr().err
    assert "--store = '8.8.8.8:1'" in shown and "plain text" in shown


def test_every_command_has_a_mistake() -> None:
    typed_commands = {line.split()[0] for line, *_ in MISTAKES} | {"demo", "list", "config", "checkpoints", "doctor"}
    roles = {"learner", "evaluator", "colocated", "feeder", "sft"}  # as sampler, actor and eval
    assert commands.COMMANDS.keys() <= typed_commands | roles
