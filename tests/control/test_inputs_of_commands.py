"""Every command × every class of bad input: one line with the file or the key, the reason and a remedy; no traceback.

`LINES` lists the inputs of each command, `INPUTS` one damage for each class of bad input. A command without a line, a
class without a damage or a reason, and an outcome that is neither a refusal nor in `TAKEN` fail. The commands run in
this process, with stand-ins for what they would start; test_bad_input and test_bad_files have many more damages.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet

from jaxroll.control import cli, commands, preflight, train
from jaxroll.envs import registry
from jaxroll.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_INTERRUPTED
from jaxroll.roles import learner
from jaxroll.rpc import protocol
from jaxroll.run_paths import RunPaths
from jaxroll.sim import simulate
from jaxroll.store.log import database
from jaxroll.testing import environments, openenv_server
from jaxroll.ui import server as ui_server
from tests.control import test_bad_files, test_bad_input, test_first_mistakes
from tests.harness.damages import Damage, folder, outcome, too_large, writes
from tests.harness.run_folder import make_run

ROOT = Path(__file__).parents[2]
CLASSES = ("missing", "unreadable", "wrong type", "corrupt", "foreign", "too large", "in use", "interrupted")
NOT_LOCKED = "it is read as a whole, and no program locks it"
PORT = "a port is no file: it is free or in use"
OTHERS = b"name: another program\nversion: 3\n"


# --- inputs: what a command reads or writes, with one damage for each class of bad input


@dataclass(frozen=True)
class Input:
    """The file of an input, relative to the user's folder; by class a damage, or the reason why there is none."""

    file: str
    classes: dict[str, Damage | str]


def gone(name: str) -> Damage:
    """Remove the file or folder."""

    def damage(home: Path) -> None:
        path = home / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def forbidden(name: str) -> Damage:
    """Take the permissions of the file or folder."""
    return lambda home: (home / name).chmod(0)


def checkpoints_of_another_user(home: Path) -> None:
    """A checkpoint in a folder without permissions."""
    test_bad_input.checkpoint()(home / "run")
    forbidden("run/checkpoints")(home)


def held(name: str) -> Callable[[Path], contextlib.AbstractContextManager[object]]:
    """Hold the lock of the run, as the supervisor that trains it does."""

    @contextlib.contextmanager
    def damage(home: Path) -> Iterator[None]:
        with RunPaths(home / name).lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    return damage


@contextlib.contextmanager
def log_in_use(home: Path) -> Iterator[None]:
    """Lock the log, as an editor of databases may."""
    with contextlib.closing(sqlite3.connect(home / "run" / "store.db", isolation_level=None)) as editor:
        editor.execute("PRAGMA locking_mode = EXCLUSIVE")
        editor.execute("BEGIN EXCLUSIVE")
        yield


@contextlib.contextmanager
def port_in_use(home: Path) -> Iterator[None]:
    """Listen on the port that the words of the command name."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        (home / "port").write_text(str(server.getsockname()[1]))
        yield


def of_file(name: str, corrupt: Damage, *, large: Damage | str = "", foreign: bytes = OTHERS) -> Input:
    """A file that is read whole."""
    return Input(name, {
        "missing": gone(name), "unreadable": forbidden(name), "wrong type": folder(name), "corrupt": corrupt,
        "foreign": writes(name, foreign), "too large": large or too_large(name), "in use": NOT_LOCKED,
        "interrupted": test_bad_files.cut(name),
    })  # fmt: skip


def in_run(damage: Damage) -> Damage:
    """The damage of a run's folder, for the user's folder."""
    return lambda home: damage(home / "run")


def others_folder(home: Path) -> None:
    """A folder with another program's file."""
    (home / "out").mkdir()
    (home / "out" / "kept").write_text("kept")


BINARY = bytes(range(256)) * 9
INPUTS: dict[str, Input] = {
    "config": of_file("config.py", writes("config.py", BINARY)),
    "run": Input(
        "run",
        {
            "missing": gone("run"),
            "unreadable": forbidden("run/run.json"),
            "wrong type": in_run(test_bad_input.a_file),
            "corrupt": writes("run/run.json", BINARY),
            "foreign": writes("run/run.json", b'{"name": "another program"}'),
            "too large": too_large("run/run.json"),
            "in use": held("run"),
            "interrupted": writes("run/run.json", b""),
        },
    ),
    "log": Input(
        "run/store.db",
        {
            "missing": gone("run/store.db"),
            "unreadable": forbidden("run/store.db"),
            "wrong type": folder("run/store.db"),
            "corrupt": in_run(test_bad_input.cut),
            "foreign": in_run(test_bad_input.other_tables),
            "too large": "a log has no bound: it grows with the run, and is not read into memory",
            "in use": log_in_use,
            "interrupted": in_run(test_bad_input.interrupted),
        },
    ),
    "checkpoint": Input(
        "run/checkpoints",
        {
            "missing": "a run that has none has not trained yet",
            "unreadable": checkpoints_of_another_user,
            "wrong type": writes("run/checkpoints", b"x"),
            "corrupt": in_run(test_bad_input.checkpoint(about=b"\xff{", state=b"\xff")),
            "foreign": in_run(test_bad_input.checkpoint(others=b"1")),
            "too large": "a checkpoint has no bound",
            "in use": "a checkpoint is renamed into place and never changed",
            "interrupted": in_run(test_bad_input.interrupted),
        },
    ),
    "trained": Input(
        "run/warm",
        dict.fromkeys(CLASSES, "the child reads it: tests/tools/test_trained_inputs") | {"missing": gone("run/warm")},
    ),
    "address": Input(
        "run/store.addr",
        {
            "missing": "the store may start later: a role waits for the file",
            "unreadable": forbidden("run/store.addr"),
            "wrong type": folder("run/store.addr"),
            "corrupt": writes("run/store.addr", BINARY),
            "foreign": writes("run/store.addr", b"http://example.org/"),
            "too large": too_large("run/store.addr"),
            "in use": NOT_LOCKED,
            "interrupted": writes("run/store.addr", b"127.0.0.1:"),
        },
    ),
    "secret": Input(
        "run/token",
        {
            "missing": "without the file a run has no token",
            "unreadable": forbidden("run/token"),
            "wrong type": folder("run/token"),
            "corrupt": writes("run/token", b"\xff\xfe"),
            "foreign": writes("run/token", b"-----BEGIN CERTIFICATE-----\n"),
            "too large": too_large("run/token"),
            "in use": NOT_LOCKED,
            "interrupted": writes("run/token", b""),
        },
    ),
    "client token": Input(
        "own.token",
        {
            "missing": "it is made",
            "unreadable": forbidden("own.token"),
            "wrong type": folder("own.token"),
            "corrupt": writes("own.token", b"\xff\xfe"),
            "foreign": writes("own.token", OTHERS),
            "too large": too_large("own.token"),
            "in use": NOT_LOCKED,
            "interrupted": "an empty file gets a new token",
        },
    ),
    "cluster": of_file("cluster.toml", writes("cluster.toml", BINARY), foreign=b"[package]\nname = 'x'\n"),
    "hardware": of_file("hardware.toml", writes("hardware.toml", BINARY), foreign=b"[package]\nname = 'x'\n"),
    "rows": of_file("rows.jsonl", writes("rows.jsonl", BINARY)),
    "columns": of_file("rows.parquet", writes("rows.parquet", BINARY), large="its row groups are read one by one"),
    "model": of_file("model/config.json", writes("model/config.json", BINARY), foreign=b'{"name": "x"}'),
    "weights": of_file(
        "model/model-00002-of-00004.safetensors",
        writes("model/model-00002-of-00004.safetensors", BINARY),
        large="weights have no bound, and are mapped, not read",
    ),
    "environment": of_file(
        "own_env.py",
        writes("own_env.py", BINARY),
        foreign=b"<html></html>\n",
        large="Python reads a module of any size",
    ),
    "port": Input("port", dict.fromkeys(CLASSES, PORT) | {"in use": port_in_use}),
    "output": Input(
        "out",
        {
            "missing": "it is made",
            "unreadable": "as root everything can be written; test_bad_input has the cells",
            "wrong type": writes("out", b"kept"),
            "corrupt": "nothing is read",
            "foreign": others_folder,
            "too large": "nothing is read",
            "in use": "nothing is read",
            "interrupted": "nothing is read",
        },
    ),
}


# --- commands


@dataclass(frozen=True)
class Line:
    """Words after `jaxroll`, the inputs that they read, and the code of the command with undamaged inputs."""

    words: str
    inputs: tuple[str, ...]
    code: int = 0
    sections: dict[str, dict[str, object]] = field(default_factory=dict)  # of the run's config


ROLE = ("run", "address", "secret")
# Lines by command; a command that reads nothing has none, and a reason.
LINES: dict[str, tuple[Line, ...] | str] = {
    "demo": (Line("demo --config=config.py", ("config",)),),
    "train": (
        Line(
            "train new --config=config.py --config.task.source=jsonl --config.task.path=rows.jsonl", ("config", "rows")
        ),
        Line("train new --config=config.py --config.task.source=parquet --config.task.path=rows.parquet", ("columns",)),
        Line(
            "train new --config=config.py --config.model.path=model --config.sft.steps=0"
            " --config.task.max_prompt_tokens=48 --config.sampler.prefill_buckets=48 --config.learner.row_tokens=64",
            ("model", "weights"),
        ),
        Line("train run --resume", ("run",)),
        Line("train run --resume --fork=0", ("run",)),
    ),
    "sft": (Line("sft new --config=config.py", ("config",)), Line("sft run", ("run",))),
    "sim": (
        Line("sim new --config=config.py --cluster=cluster.toml", ("config", "cluster")),
        Line("sim calibrate run", ("run", "log"), 64),
    ),
    "plan": (Line("plan --config=config.py --topology=v5e:8x8", ("config",)),),
    "place": (Line("place --config=config.py --cluster=hardware.toml", ("config", "hardware")),),
    "init": (
        Line("init mine.py --model=model", ("model",)),
        Line("init mine.py --task=rows.jsonl", ("rows",), 64),
        Line("init out --task=chain_sum", ("output",), 64),
    ),
    "config": (Line("config --config=config.py", ("config",)), Line("config run", ("run",))),
    "list": (Line("list .", ("run",)),),
    "ui": (
        Line("ui run --port=PORT", ("run", "port")),
        Line("ui run --port=0 --token-file=own.token", ("client token",)),
    ),
    "report": (Line("report run", ("run", "log")),),
    "inspect": (Line("inspect run", ("run", "log")), Line("inspect run --group=0", ("run", "log"))),
    "checkpoints": (Line("checkpoints run --verify", ("run", "checkpoint")),),
    "profile": (Line("profile run --timeout=0.05", ROLE, 64),),
    "export": (Line("export run --jsonl=rows.out", ("run", "log")), Line("export run --jsonl=out", ("output",))),
    "replay": (Line("replay run", ("log",), 1),),
    "generate": (
        Line("generate run hello", ("run", "trained")),
        Line("generate --config=config.py hello", ("config",), 64),
    ),
    "eval": (
        Line("eval run", ("run", "trained")),
        Line(
            "eval model --config=config.py --config.task.max_prompt_tokens=48 --config.sampler.prefill_buckets=48",
            ("config", "model"),
        ),
    ),
    "serve": (
        Line("serve run --port=PORT", ("run", "trained", "port")),
        Line("serve model", ("model",)),
        Line("serve run --token-file=own.token", ("client token",)),
    ),
    "tinker-serve": (
        Line("tinker-serve run --port=PORT", ("run", "port")),
        Line("tinker-serve model", ("model",)),
        Line("tinker-serve run --port=0 --token-file=own.token", ("client token",)),
    ),
    "weights": (
        Line("weights export run out", ("trained",)),
        Line("weights export run out ", ("run",), 64),
        Line("weights import model out", ("model", "weights", "output")),
    ),
    "store": (
        Line("store run --store=127.0.0.1:PORT", ("run", "log", "secret", "port")),
        Line("store new --config=config.py", ("config",)),
    ),
    "learner": (Line("learner run", ROLE, 1), Line("learner new --config=config.py", ("config",), 1)),
    "sampler": (
        Line("sampler run", ROLE, 1),
        Line("sampler new --config=config.py", ("config",), 1),
        Line("sampler --join=run", ("address", "secret"), 1),
    ),
    "actor": (
        Line("actor run", ROLE, 1, {"placement": {"actors": 1}}),
        Line("actor new --config=config.py --config.placement.actors=1", ("config",), 1),
    ),
    "evaluator": (Line("evaluator run", ROLE, 1), Line("evaluator new --config=config.py", ("config",), 1)),
    "colocated": (
        Line("colocated run", ROLE, 1, {"placement": {"colocated": True}}),
        Line("colocated new --config=config.py --config.placement.colocated=true", ("config",), 1),
    ),
    "feeder": (Line("feeder run", ("run",)), Line("feeder new --config=config.py", ("config",))),
    "doctor": "it refuses nothing: its report names certificates with damage (test_doctor)",
    "compile": (
        Line("compile run --role=sampler", ("run",)),
        Line("compile new --config=config.py --role=sampler", ("config",)),
    ),
    "env": (
        Line("env check own_env:Env --config=config.py", ("environment", "config")),
        Line("env serve own_env:Env --port=PORT", ("environment", "port")),
        Line("env serve own_env:Env --port=0 --token-file=own.token", ("client token",)),
    ),
    "tls": (Line("tls run --token-of=sampler", ("secret",)), Line("tls out", ("output",))),
    "launch": (Line("launch --config=config.py --on=ssh --dry-run", ("config",)),),
}


# Lines that do here what their child process does.
OF_CHILDREN = {"weights export run out ", "weights import model out"}


# --- cells

WHOLE = "SQLite drops what a killed store did not commit, so the log is whole"
READ = "a run may be read, and compiled for, while another process trains it"
JOINED = "a role may join a run whose store another process has; test_run_lock has roles that a supervisor has"

# Cells in which the command goes on, and why that is right: beginning of the line, input, classes, reason.
TAKEN: list[tuple[str, str, tuple[str, ...], str]] = [
    *(
        (words, "run", ("in use",), READ)
        for words in (
            "config run",
            "list",
            "ui",
            "report",
            "inspect",
            "checkpoints",
            "export",
            "generate",
            "eval",
            "serve",
            "compile",
            "sim calibrate",
            "weights export run out ",
            "feeder run",
            "profile",
        )
    ),
    *(
        (words, "run", ("in use",), JOINED)
        for words in ("learner run", "sampler run", "actor run", "evaluator run", "colocated run")
    ),
    ("list", "run", tuple(set(CLASSES) - {"in use"}), "the other runs are listed; stderr names this one"),
    (
        "ui",
        "run",
        ("unreadable", "corrupt", "foreign", "too large", "interrupted"),
        "the page shows the error: tests/ui/test_server",
    ),
    ("report", "log", ("missing",), "a run that begins has no log yet"),
    ("sim calibrate", "log", ("missing",), "a run that begins has no log yet, and too few steps"),
    ("store run", "log", ("missing",), "the store makes it"),
    ("checkpoints", "checkpoint", ("corrupt",), "stdout names it: it is one of several"),
    ("checkpoints", "checkpoint", ("foreign", "interrupted"), "a folder without a state is no checkpoint"),
    *(
        (words, "log", ("interrupted",), WHOLE)
        for words in (
            "report",
            "inspect",
            "export",
            "sim calibrate",
            "replay",
            "store run",
        )
    ),
    *(
        (words, "secret", ("foreign",), "any text may be a secret")
        for words in (
            "store run",
            "learner run",
            "sampler run",
            "sampler --join",
            "actor",
            "evaluator",
            "colocated",
            "tls",
            "profile",
        )
    ),
    ("export run --jsonl=out", "output", ("wrong type",), "it replaces a file, as `>` does"),
    ("tls out", "output", ("foreign",), "certificates may be made before the run, in its folder"),
]
# A sentence that says what to do.
REMEDY = re.compile(
    r"[.:;] (Give|Name|Set|Check|Restore|restore|Remove|Choose|Stop|Make|Write|Move|Add|Use|Start|Train|Install|Known|"
    r"Save|Copy|Another program|name the folder)\b|docs/\w+\.md|`jaxroll|jaxroll train"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder: a run with a warm start and a token, a config, and the other files that commands read."""
    home = tmp_path_factory.mktemp("inputs") / "home"
    make_run(home / "run", steps=12, steps_wanted=20)
    (home / "run" / "warm").mkdir()
    (home / "run" / "store.addr").write_text("127.0.0.1:1")
    protocol.create(home / "run")
    (home / "own.token").write_text("a" * 64)
    shutil.copy(ROOT / "configs" / "smoke.py", home / "config.py")
    shutil.copytree(ROOT / "tests" / "golden" / "qwen3" / "tied", home / "model")
    (home / "cluster.toml").write_text("# small\n" + test_first_mistakes.CLUSTER)
    (home / "hardware.toml").write_text(test_first_mistakes.HARDWARE)
    (home / "rows.jsonl").write_text("".join(f'{{"question": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(99)))
    table = pyarrow.table({"question": [f"{i}+1" for i in range(99)], "answer": [f"{i + 1}" for i in range(99)]})
    parquet.write_table(table, home / "rows.parquet")
    (home / "own_env.py").write_text(test_first_mistakes.ENVIRONMENT.replace("Mistaken", "Env"))
    return home


RUN_TINKER = train.run_tinker


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what the commands start: child processes, engines, and servers that would serve until a signal."""

    async def served(*given: object, **_: object) -> None:
        """In place of a server that has its port."""
        for one in given:
            if isinstance(one, socket.socket):
                one.close()

    test_bad_input.stand_in(monkeypatch, dashboard=False)
    monkeypatch.setattr(ui_server, "_serve", served)
    monkeypatch.setattr(openenv_server.http, "serve", served)
    monkeypatch.setattr(train, "train", lambda *_, **__: 0)
    monkeypatch.setattr(train, "run_tinker", RUN_TINKER)  # the whole of it
    monkeypatch.setattr(train, "Supervisor", lambda *_, **__: SimpleNamespace(run=lambda: 0))
    monkeypatch.setattr(learner, "run_learner", lambda args, stop: test_bad_input.connects(args))
    monkeypatch.setattr(preflight, "device_lines", list)  # it asks a child
    monkeypatch.setattr(simulate, "simulate", lambda *_, **__: {})
    monkeypatch.setattr("jaxroll.report.formats.figures_of_run", lambda found: [])
    monkeypatch.setattr(environments, "report", test_first_mistakes.checked)
    monkeypatch.setattr(database, "WAIT_S", 0.01)
    monkeypatch.setattr(database, "BUSY_S", 0.01)


def copied(base: Path, home: Path, line: Line) -> None:
    """Make the user's folder `home` as in `base`, with the config sections that the line needs."""
    shutil.copytree(base, home)
    if line.sections:
        placement = json.loads((home / "run" / "run.json").read_bytes())["config"]["placement"]
        sections = {"placement": placement | line.sections["placement"]}
        test_bad_input.config_with(**sections)(home / "run")


def cells(line: Line) -> Iterator[tuple[str, str, Damage]]:
    """Every input of the line with each class that has a damage."""
    for name in line.inputs:
        for kind, damage in INPUTS[name].classes.items():
            if not isinstance(damage, str):
                yield name, kind, damage


def answered(
    line: Line, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """The exit code and stderr of the line in the folder `home`."""
    sys.modules.pop("own_env", None)
    for name in [name for name, made in registry._FACTORIES.items() if made.__module__ == "own_env"]:
        del registry._FACTORIES[name]  # and no other one, whose module is loaded once
    child = line.words in OF_CHILDREN
    monkeypatch.setattr(cli.lifeline, "bind_from_env", lambda: child)
    monkeypatch.setenv("XDG_STATE_HOME", str(home))  # the tokens of servers
    port = (home / "port").read_text() if (home / "port").exists() else "0"
    return outcome(line.words.replace("PORT", port).split(), capsys)


@contextlib.contextmanager
def damaged(home: Path, kind: str, damage: Damage) -> Iterator[None]:
    """Damage the user's folder; the user may not read the file, or a program holds it, until the block ends."""
    with contextlib.ExitStack() as stack:
        if isinstance(held := damage(home), contextlib.AbstractContextManager):
            stack.enter_context(held)
        if kind == "unreadable":
            for path in (home, *home.rglob("*")) if os.geteuid() == 0 else ():
                os.chown(path, test_bad_input.OTHER_USER, -1)
            stack.enter_context(test_bad_input.as_another_user())
        yield


def names(err: str, file: str) -> bool:
    """True if the error names the user's `file`: its whole name, its path below the run, its module, or the key RUN."""
    path = Path(file)
    shown = "own_env:" if path.stem == "own_env" else re.escape(path.name if path.suffix else file.removeprefix("run/"))
    return err.startswith("error: RUN = ") or bool(re.search(rf"[/'\"` ]{shown}(?:[/'\"`:,;. ]|Env|$)", err))


def objections(line: Line, name: str, kind: str, code: int, err: str, undamaged: str) -> Iterator[str]:
    """Sentences that say what is wrong with the outcome of a cell."""
    if any(line.words.startswith(words) and name == one and kind in kinds for words, one, kinds, _ in TAKEN):
        if code not in (0, line.code) and not (code == EXIT_FAILURE and not err):
            yield f"ended with {code}, which TAKEN denies"
        return
    if code not in (EXIT_FAILURE, EXIT_CONFIG):
        yield f"ended with {code}"
        return
    if err.count("\n") != 1 or not err.startswith("error: ") or len(err) > 1500:
        yield "is not one line of an error"
    if not names(err, INPUTS[name].file):
        yield f"does not name {INPUTS[name].file}"
    if not REMEDY.search(err):
        yield "names no remedy"
    if line.code and err == undamaged:
        yield "names another reason, as without the damage"


def parameters(quick: set[str]) -> list[object]:
    """The commands that have lines; all but those of `quick` are for `make soak`."""
    names = [name for name, listed in LINES.items() if not isinstance(listed, str)]
    return [name if name in quick else pytest.param(name, marks=pytest.mark.soak) for name in names]


@pytest.mark.parametrize("command", parameters(set(LINES) - {"profile", "eval"}))
def test_a_command_with_bad_input(
    command: str, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stand_ins: None
) -> None:
    wrong = []
    with tempfile.TemporaryDirectory() as made:  # the folders of pytest are those of the user who runs it
        home = Path(made) / "home"
        home.parent.chmod(0o777)
        for line in LINES[command]:
            assert isinstance(line, Line)
            copied(base, home, line)
            monkeypatch.chdir(home)
            code, undamaged = answered(line, home, capsys, monkeypatch)
            assert code == line.code and "Traceback" not in undamaged, (line.words, code, undamaged)
            for name, kind, damage in cells(line):
                shutil.rmtree(home)
                copied(base, home, line)
                monkeypatch.chdir(home)
                with damaged(home, kind, damage):
                    try:
                        code, err = answered(line, home, capsys, monkeypatch)
                    except Exception as error:  # noqa: BLE001  # all of them are listed
                        wrong.append(f"{line.words} | {name} | {kind}: raised {type(error).__name__}: {error}")
                        continue
                found = [*objections(line, name, kind, code, err, undamaged)]
                if (code and (home / "new").exists()) or (home / "runs").exists():
                    found.append("left a folder")
                wrong += [f"{line.words} | {name} | {kind}: {text}: {err[:400]!r}" for text in found]
            shutil.rmtree(home)
        monkeypatch.undo()
    assert not wrong, "\n".join(wrong)


def test_every_command_has_a_cell_or_a_reason_for_every_class() -> None:
    assert LINES.keys() == commands.COMMANDS.keys(), "a command needs its lines, or the reason why it reads nothing"
    for name, one in INPUTS.items():
        assert tuple(one.classes) == CLASSES or set(one.classes) == set(CLASSES), name
        assert all(reason for reason in one.classes.values()), name
    used = {name for listed in LINES.values() if not isinstance(listed, str) for line in listed for name in line.inputs}
    assert used == INPUTS.keys()
    every = {(line.words, name, kind) for listed in LINES.values() if not isinstance(listed, str) for line in listed
             for name, kind, _ in cells(line)}  # fmt: skip
    for words, name, kinds, reason in TAKEN:
        assert reason
        for kind in kinds:
            assert any(cell[0].startswith(words) and cell[1:] == (name, kind) for cell in every), (words, name, kind)


# --- commands that are interrupted

INSTANTS = 6
PACKAGE = str(ROOT / "jaxroll")
# Roles and servers install handlers of SIGINT that stop them in order.
OWN_HANDLERS = {"store", "learner", "sampler", "actor", "evaluator", "colocated", "ui", "env", "tinker-serve", "feeder"}


class InterruptAt:
    """Raise SIGINT in this thread at call number `call` of JaxRoll's functions; `calls` counts them."""

    def __init__(self, call: int) -> None:
        self.call, self.calls = call, 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls += 1
            if self.calls == self.call:
                signal.raise_signal(signal.SIGINT)


def watched(line: Line, call: int, home: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, int]:
    """The exit code and stderr of the line, interrupted at that call, and the number of calls."""
    watch = InterruptAt(call)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
    sys.setprofile(watch)
    try:
        code, err = answered(line, home, capsys, monkeypatch)
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)
    return code, err, watch.calls


@pytest.mark.parametrize("command", parameters({"export", "sim", "tls"}))
def test_a_command_that_is_interrupted(
    command: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, stand_ins: None,
) -> None:  # fmt: skip
    """It ends with 130 and no traceback, and leaves no draft of a file and no run that cannot be read."""
    wrong, home = [], tmp_path / "home"
    for line in LINES[command]:
        assert isinstance(line, Line)

        def interrupted(call: int, line: Line = line) -> tuple[int, str, int]:
            shutil.rmtree(home, ignore_errors=True)
            copied(base, home, line)
            monkeypatch.chdir(home)
            return watched(line, call, home, capsys, monkeypatch)

        interrupted(-1)  # the modules are loaded once
        _, _, calls = interrupted(-1)
        for part in range(1, INSTANTS + 1):
            call = max(1, calls * part // (INSTANTS + 1))
            try:
                code, err, _ = interrupted(call)
            except BaseException as error:  # noqa: BLE001  # all of them are listed
                wrong.append(f"{line.words} at call {call} of {calls}: raised {type(error).__name__}: {error}")
                continue
            ends = {EXIT_INTERRUPTED} | ({0, line.code} if command in OWN_HANDLERS else set())
            if code not in ends or "Traceback" in err:
                wrong.append(f"{line.words} at call {call} of {calls}: ended with {code}: {err[:300]!r}")
            left = [str(path.relative_to(home)) for path in home.rglob(f".*.{os.getpid()}")]
            if left:
                wrong.append(f"{line.words} at call {call} of {calls}: left {left}")
    assert not wrong, "\n".join(wrong)
