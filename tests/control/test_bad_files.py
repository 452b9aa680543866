"""Every command that reads a file which is not a run's, with every class of bad content in it.

The command ends with a one-line error that names what it refuses; it never raises, waits or reads a file without end.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from jaxroll.control import cli, commands, preflight, train
from jaxroll.errors import EXIT_CONFIG
from jaxroll.rpc.tls import TLS_VARIABLE
from jaxroll.sim import simulate
from jaxroll.ui import runs
from tests.control import test_bad_input
from tests.harness.damages import DEEP, Damage, folder, loop, outcome, pipe, too_large, writes
from tests.harness.resource_bounds import bounded
from tests.harness.run_folder import make_run

ROOT = Path(__file__).parents[2]
SMOKE = f"--config={ROOT / 'configs' / 'smoke.py'}"
CLUSTER = b"""
plan = "plan.json"
[[devices]]
name = "card"
count = 8
"""
ROW = b'{"question": "2+2", "answer": "4"}\n'


def cut(name: str) -> Damage:
    """Remove the second half of the file `name`."""

    def damage(home: Path) -> None:
        path = home / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return damage


def damages(name: str) -> dict[str, Damage]:
    """Every class of bad content of the file `name`; it may be valid in those of `ACCEPTABLE`."""
    return {
        "missing": lambda home: (home / name).unlink(), "folder": folder(name), "loop": loop(name), "pipe": pipe(name),
        "empty": writes(name, b""), "binary": writes(name, bytes(range(256)) * 99), "nul": writes(name, b"\0"),
        "latin-1": writes(name, b'{"question": "\xe4", "answer": "\xe4"}\n'), "words": writes(name, b"no such thing"),
        "list": writes(name, b"[]"), "number": writes(name, b"3"), "null": writes(name, b"null"),
        "deep": writes(name, DEEP), "digits": writes(name, b'{"question": ' + b"9" * 5000 + b"}"),
        "toml digits": writes(name, b"rpc_s = " + b"9" * 5000), "toml deep": writes(name, b"a = " + b"[" * 100_000),
        "cut": cut(name), "huge": too_large(name),
        "foreign": writes(name, b"SQLite format 3\0" + bytes(4096)),
    }  # fmt: skip


# The words of a command, the file that is damaged, and the damages that leave a file which the command may accept.
READERS: dict[str, tuple[list[str], str, set[str]]] = {
    "sim": (["sim", SMOKE, "--cluster=cluster.toml"], "cluster.toml", {"empty", "cut"}),
    "place": (["place", SMOKE, "--cluster=cluster.toml"], "cluster.toml", set()),
    "place, its plan": (["place", SMOKE, "--cluster=cluster.toml"], "plan.json", set()),
    "train, its data": (
        ["train", "r", SMOKE, "--config.task.source=jsonl", "--config.task.path={HOME}/rows.jsonl"], "rows.jsonl", set()
    ),
    "init --task": (["init", "mine.py", "--task=rows.jsonl"], "rows.jsonl", set()),
    "init --model": (["init", "mine.py", "--model=model"], "model/config.json", set()),
    "init --model, its tokenizer": (["init", "mine.py", "--model=model"], "model/tokenizer.json", set()),
    "weights import": (["weights", "import", "model", "out"], "model/config.json", set()),
    "weights import, its index": (
        ["weights", "import", "model", "out"], "model/model.safetensors.index.json", set()
    ),
    "weights import, its weights": (
        ["weights", "import", "model", "out"], "model/model-00002-of-00004.safetensors", set()
    ),
    "serve": (["serve", "model"], "model/config.json", set()),
    "serve, its tokenizer": (["serve", "model"], "model/tokenizer.json", set()),
    "tinker-serve": (["tinker-serve", "model"], "model/config.json", set()),
    "eval": (["eval", "model", SMOKE], "model/config.json", set()),
    "env check": (["env", "check", "own_env:Env"], "own_env.py", set()),
    "env serve": (["env", "serve", "own_env:Env"], "own_env.py", set()),
    "doctor": (["doctor"], "tls/ca.pem", set(damages(""))),
}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with every file that the commands read, each of them valid or refused for another reason."""
    home = tmp_path / "base"
    shutil.copytree(ROOT / "tests" / "golden" / "qwen3" / "tied", home / "model")
    (home / "cluster.toml").write_bytes(CLUSTER)
    (home / "plan.json").write_text(json.dumps({"speed": {}}))
    (home / "rows.jsonl").write_bytes(ROW)
    (home / "own_env.py").write_text("Env = None\n")
    (home / "tls").mkdir()
    (home / "tls" / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    return home


QUICK = {"place, its plan"}  # test_inputs_of_commands has a cell of each class for the others


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.soak]) for name in READERS]
)
def test_readers_of_a_damaged_file(
    command: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, file, acceptable = READERS[command]
    monkeypatch.setattr(cli.lifeline, "bind_from_env", lambda: words[0] == "weights")  # its child does the work
    monkeypatch.setattr(commands, "run_foreground", lambda *_: 0)
    monkeypatch.setattr(train, "run_tinker", lambda *_, **__: 0)
    monkeypatch.setattr(train, "train", lambda *_, **__: 0)
    monkeypatch.setattr(simulate, "simulate", lambda *_, **__: {})
    monkeypatch.setattr("jaxroll.report.formats.figures_of_run", lambda found: [])
    monkeypatch.setattr(preflight, "device_lines", list)  # it asks a child
    wrong = []
    for name, damage in damages(file).items():
        home = tmp_path / name.replace(" ", "-")
        shutil.copytree(base, home)
        damage(home)
        monkeypatch.chdir(home)
        monkeypatch.setenv(TLS_VARIABLE, str(home / "tls") if command == "doctor" else "")
        sys.modules.pop("own_env", None)
        before = sorted(home.rglob("*"))
        try:
            code, err = outcome([word.replace("{HOME}", str(home)) for word in words], capsys)
        except Exception as error:  # noqa: BLE001  # all of them are listed
            wrong.append(f"{name}: raised {type(error).__name__}: {error}")
            continue
        refused = code == EXIT_CONFIG and err.count("\n") == 1 and err.startswith("error: ") and len(err) < 1500
        if not refused and not (name in acceptable and code == 0):
            wrong.append(f"{name}: ended with {code} and wrote {err[:300]!r}")
        if refused and sorted(home.rglob("*")) != before:
            wrong.append(f"{name}: left {set(home.rglob('*')) - set(before)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("text", [b"a." * 300_000 + b"a = 1", b"[" + b"a . " * 200_000 + b"a]"], ids=["key", "table"])
@pytest.mark.parametrize("command", ["sim", "place"])
def test_a_key_of_many_parts_takes_no_time(
    command: str, text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parser needs 1 s for 8,000 parts, and four times that for twice as many."""
    (tmp_path / "cluster.toml").write_bytes(text)
    with bounded(None, 60.0):
        code, err = outcome([command, SMOKE, f"--cluster={tmp_path / 'cluster.toml'}"], capsys)
    assert code == EXIT_CONFIG and "a key has 64 parts or more" in err and err.count("\n") == 1, err


def test_every_command_is_in_a_table() -> None:
    named = {param if isinstance(param, str) else str(param.values[0]) for param in test_bad_input.NAMING_CONFIGS}
    typed = {words[0] for words, *_ in READERS.values()} | {words[0] for words in test_bad_input.READERS.values()}
    assert typed | named == set(commands.COMMANDS)


def test_the_list_of_the_dashboard_waits_for_no_pipe(tmp_path: Path) -> None:
    for name, file in (("rows", "metrics.jsonl"), ("about", "run.json"), ("whole", "")):
        make_run(tmp_path / name, steps=2, steps_wanted=9)
        if file:
            pipe(file)(tmp_path / name)
    with bounded(None, 20.0):
        listed = {entry["name"]: entry for entry in runs.Runs(tmp_path).listed()}
    assert listed.keys() == {"rows", "whole"}, "a folder without the file run.json is no run"
    assert listed["rows"]["reward"] is None and listed["whole"]["reward"] is not None
