"""Every command with every class of bad input: a one-line error with file or key, and a documented exit code.

The damaged run is made by hand; no test here starts a process or JAX: commands whose work is done by child processes
are refused before they start one, or get a stand-in. A role reads its run as always and connects to the store; the
store serves and is stopped as soon as it does. test_run_lock has runs that are in use, test_first_mistakes other
mistakes, test_bad_files other files.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxroll.config import RoleArgs
from jaxroll.control import commands, program, train
from jaxroll.errors import EXIT_CONFIG, EXIT_FAILURE
from jaxroll.roles import actor, colocated, session, store
from jaxroll.store import client
from jaxroll.store.client import StoreClient
from jaxroll.store.log import database
from tests.harness.cluster import disks
from tests.harness.damages import DEEP, Damage, folder, loop, outcome, pipe, stop_the_store, too_large, writes
from tests.harness.run_folder import make_run

ROOT = Path(__file__).parents[2]
SMOKE = str(ROOT / "configs" / "smoke.py")

# Commands that read a run; RUN is its folder. `checkpoints` and `list` read less and may not notice the damage.
READERS: dict[str, list[str]] = {
    "report": ["report", "RUN"],
    "report --json": ["report", "RUN", "--json"],
    "inspect": ["inspect", "RUN"],
    "inspect --group": ["inspect", "RUN", "--group=0"],
    "replay": ["replay", "RUN"],
    "export": ["export", "RUN", "--jsonl=OUT"],
    "checkpoints": ["checkpoints", "RUN", "--verify"],
    "list": ["list", "RUN/.."],
    "config": ["config", "--run=RUN"],
    "resume": ["train", "--run=RUN", "--resume", "--config.schedule.nothing=1"],  # refused at the latest for this
    "new run": ["train", "--run=RUN", f"--config={SMOKE}", "--config.schedule.nothing=1"],
    "token": ["tls", "RUN", "--token-of=unknown"],
    "fork": ["train", "--run=RUN", "--resume", "--fork=0", "--config.schedule.nothing=1"],
    "generate": ["generate", "RUN", "hello"],
    "eval": ["eval", "RUN"],
    "serve": ["serve", "RUN"],
    "tinker-serve": ["tinker-serve", "RUN"],
    "sft": ["sft", "--run=RUN"],
    "compile": ["compile", "RUN", "--role=sampler"],
    "weights export": ["weights", "export", "RUN", "OUT"],
    "calibrate": ["sim", "calibrate", "RUN"],
    "profile": ["profile", "RUN", "--timeout=1"],
    "ui": ["ui", "RUN"],
    "learner": ["learner", "RUN", "--index=7"],  # refused at the latest for this
    "actor": ["actor", "RUN"],
    "store": ["store", "RUN"],
    "feeder": ["feeder", "RUN"],
    "sampler": ["sampler", "RUN"],
    "sampler --join": ["sampler", "--join=RUN"],
    "evaluator": ["evaluator", "RUN"],
    "colocated": ["colocated", "RUN"],
    "tls": ["tls", "RUN"],
    "sim": ["sim", "RUN", f"--config={SMOKE}", "--cluster=none.toml"],  # refused at the latest for this
    "launch": ["launch", "RUN", f"--config={SMOKE}", "--config.schedule.nothing=1"],
    "launch --dry-run": ["launch", "RUN", f"--config={SMOKE}", "--on=ssh", "--dry-run"],
}
# Commands that refuse the undamaged run too, for another reason.
WHOLE = {"resume", "fork", "new run", "token", "generate", "eval", "serve", "weights export", "calibrate"}
WHOLE |= {"learner", "profile", "sampler --join", "sim", "launch"}
# Keys of the section `placement` without which a run does not have the role.
PLACEMENT: dict[str, dict[str, object]] = {"actor": {"actors": 1}, "colocated": {"colocated": True}}


def without(name: str) -> Damage:
    """Remove the run's file `name`."""
    return lambda run: (run / name).unlink()


def config_with(**sections: object) -> Damage:
    """Replace sections of the config in run.json."""

    def damage(run: Path) -> None:
        values = json.loads((run / "run.json").read_bytes())
        (run / "run.json").write_text(json.dumps(values | {"config": values["config"] | sections}))

    return damage


def cut(run: Path) -> None:
    """Cut the log in half."""
    data = (run / "store.db").read_bytes()
    (run / "store.db").write_bytes(data[: len(data) // 2])


def other_tables(run: Path) -> None:
    """Replace the log by another program's database."""
    (run / "store.db").unlink()
    with sqlite3.connect(run / "store.db") as db:
        db.execute("CREATE TABLE songs (name TEXT)")
    db.close()


def newer(run: Path) -> None:
    """Give the log a later schema version."""
    with sqlite3.connect(run / "store.db") as db:
        db.execute("PRAGMA user_version = 999")
    db.close()


def rows_of_junk(run: Path) -> None:
    """Put malformed records into the log, and values of wrong types into its tables."""
    with sqlite3.connect(run / "store.db") as db:
        db.execute("UPDATE log SET body = x'ff00' WHERE position > 3")
        db.execute("UPDATE groups SET question_hash = x'00ff', state = 7 WHERE id = 0")
    db.close()


def no_run(run: Path) -> None:
    """Remove the run's folder."""
    shutil.rmtree(run)


def a_file(run: Path) -> None:
    """Replace the folder by a file."""
    shutil.rmtree(run)
    run.write_text("not a folder")


def emptied(run: Path) -> None:
    """Empty the folder."""
    shutil.rmtree(run)
    run.mkdir()


def checkpoint(**files: bytes) -> Damage:
    """Add a checkpoint whose writing was interrupted, or that was damaged: only these files, by name, are there."""

    def damage(run: Path) -> None:
        made = run / "checkpoints" / "0000.00000003"
        made.mkdir(parents=True)
        for name, data in files.items():
            (made / name).mkdir()
            (made / name / "metadata").write_bytes(data)

    return damage


def interrupted(run: Path) -> None:
    """Leave what a killed learner and a killed store leave."""
    (run / "checkpoints" / "0000.00000003.orbax-checkpoint-tmp-1" / "state").mkdir(parents=True)
    (run / "store.db-wal").write_bytes(bytes(range(256)) * 40)
    (run / "store.addr").write_text("127.0.0.1:1")
    (run / ".run.json.tmp").write_bytes(b"{")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "ste')


DAMAGES: dict[str, Damage] = {
    "missing": no_run, "a file": a_file, "empty": emptied,
    "no run.json": without("run.json"), "run.json empty": writes("run.json", b""),
    "run.json folder": folder("run.json"), "run.json loop": loop("run.json"),
    "run.json latin-1": writes("run.json", b'{"config": "\xe4"}'),
    "run.json binary": writes("run.json", bytes(range(256))),
    "run.json list": writes("run.json", b"[]"), "run.json null": writes("run.json", b'{"config": null}'),
    "run.json words": writes("run.json", b'{"config": "abc"}'), "run.json deep": writes("run.json", DEEP),
    "run.json digits": writes("run.json", b'{"config": ' + b"9" * 5000 + b"}"),
    "config env": config_with(task={"env": ["x"]}), "config list": config_with(schedule=[1]),
    "config word": config_with(schedule={"steps": "many", "alpha": None}),
    "config number": config_with(learner=3), "config mesh": config_with(sampler={"mesh": "big"}),
    "config foreign": config_with(hyperparameters={"lr": 1}), "config huge": config_with(schedule={"steps": 10**400}),
    "config nan": config_with(schedule={"alpha": float("nan")}),
    "metrics folder": folder("metrics.jsonl"), "metrics binary": writes("metrics.jsonl", bytes(range(256)) * 99),
    "metrics loop": loop("metrics.jsonl"),
    "no log": without("store.db"), "log empty": writes("store.db", b""), "log folder": folder("store.db"),
    "log words": writes("store.db", b"not a database at all" * 99), "log cut": cut, "log foreign": other_tables,
    "log newer": newer, "log junk": rows_of_junk, "log loop": loop("store.db"),
    "heldout words": writes("heldout.json", b"{"), "heldout number": writes("heldout.json", b"3"),
    "heldout object": writes("heldout.json", b'{"a": [1]}'), "heldout latin-1": writes("heldout.json", b'["\xe4"]'),
    "heldout folder": folder("heldout.json"), "heldout deep": writes("heldout.json", b"[" * 100_000),
    "alphabet words": writes("alphabet.json", b"{"),
    "alphabet folder": folder("alphabet.json"), "alphabet number": writes("alphabet.json", b"3"),
    "checkpoints file": writes("checkpoints", b"x"), "secret junk": writes("token", b"\xff"),
    "run.json huge": too_large("run.json"), "alphabet huge": too_large("alphabet.json"),
    "heldout huge": too_large("heldout.json"), "interrupted": interrupted,
    "checkpoint empty": checkpoint(), "checkpoint junk": checkpoint(about=b"\xff{", state=b"\xff"),
    "checkpoint cut": checkpoint(about=b'{"position": 3, "arrays": {"params[\'a\']": ["float32", 4]}}'),
    "run.json pipe": pipe("run.json"), "metrics pipe": pipe("metrics.jsonl"), "log pipe": pipe("store.db"),
}  # fmt: skip
# Damages of files that only roles read.
ROLE_DAMAGES: dict[str, Damage] = {
    "address folder": folder("store.addr"), "address loop": loop("store.addr"), "address pipe": pipe("store.addr"),
    "address empty": writes("store.addr", b""), "address binary": writes("store.addr", bytes(range(256))),
    "address words": writes("store.addr", b"no address"), "address port": writes("store.addr", b"a:99999999"),
    "address huge": too_large("store.addr"), "address dead": writes("store.addr", b"127.0.0.1:1"),
    "secret folder": folder("token"), "secret empty": writes("token", b""), "secret loop": loop("token"),
    "secret huge": too_large("token"), "tls file": writes("tls", b"x"), "tls folder": folder("tls"),
    "alphabet pipe": pipe("alphabet.json"),
}  # fmt: skip
# Taken for missing files, they would let the store admit every process, or send plain text.
MUST_REFUSE = {"secret folder", "secret loop", "secret empty", "secret huge", "secret junk", "tls file", "tls folder"}
ROLES = {"actor", "learner", "store", "feeder", "sampler", "sampler --join", "evaluator", "colocated", "tls", "token"}
CONNECTED = {"store", "sampler", "evaluator", "colocated", "actor"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("whole") / "run", steps=3, steps_wanted=9)


def connects(args: RoleArgs) -> int:
    """Connect to the run's store, as every role does first."""
    options: dict[str, Any] = {"config_digest": args.config_digest, "patience_s": 0.01, "run_dir": args.run_dir}
    address = args.store_address or args.paths.store_address
    asyncio.run(StoreClient.connect(address, role="sampler", name="sampler-0", **options))
    return 0


def stand_in(monkeypatch: pytest.MonkeyPatch, *, dashboard: bool = True) -> None:
    """Replace the work of commands: child processes, engines, and a store that would serve until it is stopped."""
    monkeypatch.setattr(commands, "run_foreground", lambda argv, env: 0)  # the child that would do the work
    monkeypatch.setattr(train, "run_tinker", lambda *_, **__: 0)
    if dashboard:
        monkeypatch.setattr("jaxroll.ui.server.main", lambda path, options: 0)
    monkeypatch.setattr(program, "place_alone", lambda *_: None)  # it sets variables of this process
    monkeypatch.setattr(store, "_watch", stop_the_store)
    monkeypatch.setattr(store.FeederProcess, "next", lambda *_: asyncio.sleep(60.0))
    monkeypatch.setattr(store, "feed", lambda args: store.PromptsHere(args) and 0)
    monkeypatch.setattr(session, "main", lambda spec, args: connects(args))
    monkeypatch.setattr(colocated, "main", connects)
    monkeypatch.setattr(actor, "main", connects)
    monkeypatch.setattr(client, "JOIN_S", 0.01)
    monkeypatch.setattr(train, "_say_what_it_waits_for", lambda error: None)


# The others are for `make soak`: test_inputs_of_commands has a cell of each class for them.
QUICK = {"report", "sampler"}


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.soak]) for name in READERS]
)
def test_readers_of_a_damaged_run(
    command: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stand_in(monkeypatch)
    wrong = []
    for name, damage in {"nothing": lambda run: None, **DAMAGES, **(ROLE_DAMAGES if command in ROLES else {})}.items():
        run = tmp_path / name.replace(" ", "-") / "run"
        shutil.copytree(whole, run)
        if command in PLACEMENT:
            placement = json.loads((run / "run.json").read_bytes())["config"]["placement"]
            config_with(placement=placement | PLACEMENT[command])(run)
        damage(run)
        words = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out.jsonl")) for word in READERS[command]]
        try:
            code, err = outcome(words, capsys)
        except Exception as error:  # noqa: BLE001  # all of them are listed
            wrong.append(f"{name}: raised {type(error).__name__}: {error}")
            continue
        if code not in (0, EXIT_FAILURE, EXIT_CONFIG):
            wrong.append(f"{name}: ended with {code}")
        if name == "nothing" and (code == EXIT_CONFIG) != (command in WHOLE):
            wrong.append(f"the undamaged run: ended with {code}: {err[:300]}")
        refused = code == EXIT_CONFIG or (code == EXIT_FAILURE and bool(err))
        if refused and (err.count("\n") != 1 or not err.startswith("error: ") or len(err) > 1000):
            wrong.append(f"{name}: wrote {err[:300]!r}")
        if command in CONNECTED and name in MUST_REFUSE and code != EXIT_CONFIG:
            wrong.append(f"{name}: was not refused ({code}: {err[:300]!r})")
    assert not wrong, "\n".join(wrong)


LONG = "x" * 300
LONG_FILES = [
    ["weights", "import", LONG, "OUT"], ["init", f"{LONG}.py", "--task=chain_sum"],
    ["init", "OUT", f"--task={LONG}.jsonl"], ["init", "OUT", f"--model=./{LONG}"],
    ["train", "RUN", f"--config={SMOKE}", f"--config.model.path={LONG}"],
    ["train", "RUN", f"--config={SMOKE}", "--config.task.source=jsonl", f"--config.task.path={LONG}"],
    ["train", "RUN", f"--config={LONG}.py"], ["place", f"--config={SMOKE}", f"--cluster={LONG}.toml"],
]  # fmt: skip


@pytest.mark.parametrize("words", [*READERS.values(), *LONG_FILES], ids=lambda words: " ".join(words)[:40])
def test_a_name_that_is_too_long_for_the_file_system_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stand_in(monkeypatch)
    run = "new" if words in LONG_FILES else LONG
    code, err = outcome([word.replace("RUN", run).replace("OUT", "out.py") for word in words], capsys)
    assert code in (EXIT_FAILURE, EXIT_CONFIG), err
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 2000, err


OTHER_USER = 65534
# Files that the user may not read, "" for the folder itself; with "-w" it may not be written.
FORBIDDEN = ("", "run.json", "store.db", "metrics.jsonl", "heldout.json", "alphabet.json", "checkpoints", "token", "-w")


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """Permissions count: root, which may read everything, acts as another user meanwhile."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(OTHER_USER)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def given_away(run: Path, forbidden: str) -> None:
    """Give the run to the other user, without the permission to read `forbidden`."""
    if forbidden not in ("", "-w") and not (run / forbidden).exists():
        (run / forbidden).mkdir()
    for path in (run, *run.rglob("*")) if os.geteuid() == 0 else ():
        os.chown(path, OTHER_USER, -1)
    (run if forbidden == "-w" else run / forbidden).chmod(0o500 if forbidden == "-w" else 0)


SAY_IT = {"report", "inspect", "export", "checkpoints", "list", "config", "resume", "fork", "generate"}


@pytest.mark.soak  # test_inputs_of_commands has a cell of it for each command
@pytest.mark.parametrize("command", READERS)
def test_readers_of_a_run_that_the_user_may_not_read(
    command: str, whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    wrong = []
    with tempfile.TemporaryDirectory() as made:  # the folders of pytest are those of the user who runs it
        home = Path(made)
        home.chmod(0o777)
        monkeypatch.chdir(home)
        for name in ("nothing", *FORBIDDEN):
            run = home / (name or "folder") / "run"
            shutil.copytree(whole, run)
            words = [word.replace("RUN", str(run)).replace("OUT", str(home / "out")) for word in READERS[command]]
            try:
                if name == "nothing":  # it loads the modules, which may be files of root
                    outcome(words, capsys)
                    continue
                given_away(run, name)
                with as_another_user():
                    code, err = outcome(words, capsys)
            except Exception as error:  # noqa: BLE001  # all of them are listed
                wrong.append(f"{name}: raised {type(error).__name__}: {error}")
                continue
            finally:
                run.chmod(0o700)
            if code not in (0, EXIT_FAILURE, EXIT_CONFIG):
                wrong.append(f"{name}: ended with {code}")
            refused = code == EXIT_CONFIG or (code == EXIT_FAILURE and bool(err))
            if refused and (err.count("\n") != 1 or not err.startswith("error: ")):
                wrong.append(f"{name}: wrote {err[:300]!r}")
            if name in ("", "run.json") and command in SAY_IT and "ermission" not in err:
                wrong.append(f"{name}: was not refused for that ({code}: {err[:300]!r})")
    assert not wrong, "\n".join(wrong)


def test_every_refusal_names_a_remedy() -> None:
    """ConfigError takes key, value, reason and remedy; a remedy that is a variable comes from the caller."""
    without = []
    for path in sorted((ROOT / "jaxroll").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "ConfigError(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ConfigError"):
                remedy = [*node.args[3:], *(word.value for word in node.keywords if word.arg == "remedy")]
                remedy += [argument for argument in node.args if isinstance(argument, ast.Starred)]
                if not remedy or ast.unparse(remedy[0]) == "''":
                    without.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert without == []


CONFIG_FILES: dict[str, bytes] = {
    "empty": b"", "syntax": b"def (", "nul": b"\0", "latin-1": b"x = '\xe4'", "raises": b"1 / 0", "exits": b"exit(0)",
    "interrupted": b"def get_config():\n    raise AssertionError", "nothing": b"def get_config(): pass",
    "no module": b"import no_such_module", "deep": b"x = " + b"(" * 1000, "endless": b"def f(): f()\nf()",
    "file": b"open('/no/such/file')", "many": b"raise ValueError('a\\nb')",
}  # fmt: skip


MORE_WORDS = {
    "launch": ["--target=gpu"], "compile": ["--role=sampler"], "generate": ["r", "hello"],
    "plan": ["--topology=v5e:8x8"], "sim": ["--cluster=none.toml"], "env": ["check", "single_turn"],
}  # fmt: skip
NAMING_CONFIGS = [
    "config",
    *(
        pytest.param(name, marks=pytest.mark.soak)
        for name in ("train", "demo", "store", "sft", "launch", "eval", "generate", "plan",
                     "learner", "sampler", "evaluator", "serve", "tinker-serve", "compile", "sim", "env")
    ),
]  # fmt: skip


@pytest.mark.parametrize("command", NAMING_CONFIGS)
def test_malformed_config_files(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = MORE_WORDS.get(command, [])
    files = {f"{name.replace(' ', '-')}.py": data for name, data in CONFIG_FILES.items()} | {
        "text.txt": b"learning_rate: 1"
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder.py").mkdir()
    for name in [*files, "folder.py", "missing.py", "", "\0", "x" * 5000]:
        words = [command, *more, f"--config={name}"] if command == "env" else [command, f"--config={name}", *more]
        code, err = outcome(words, capsys)
        assert code == EXIT_CONFIG and err.count("\n") == 1, (name, err)
        assert err.startswith(("error: --config", "error: RUN")), (name, err)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("learner.learning_rate=fast", "learner.learning_rate"), ("learner.learning_rate=nan", "learner.learning_rate"),
        ("learner.learning_rate=1e400", "learner.learning_rate"), ("schedule.steps=1.5", "schedule.steps"),
        ("schedule.steps=" + "9" * 5000, "schedule.steps"), ("schedule.steps=-1", "schedule.steps"),
        ("schedule=3", "schedule"), ("schedule.=3", "schedule"), ("=3", ""), ("a.b.c.d=1", "a"),
        ("run.seed=", "run.seed"),
        ("learner.mesh=2", "learner.mesh"), ("task.name=\ud800", "task"), ("run.name=../x", "run.name"),
        ("placement.platform=quantum", "placement.platform"), ("schedule.alpha=inf", "schedule.alpha"),
        ("sampler.prefill_buckets=[[]]", "sampler.prefill_buckets"), ("evaluator.every=yes", "evaluator.every"),
    ],
)  # fmt: skip
def test_overrides_of_wrong_type(
    override: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, err = outcome(["train", f"--config={SMOKE}", f"--config.{override}"], capsys)
    assert code == EXIT_CONFIG and err.startswith(f"error: {key}") and err.count("\n") == 1, err
    assert not (tmp_path / "runs").exists()


def test_exports_to_paths_that_cannot_be_written(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path, tmp_path / "no" / "file", tmp_path / "file" / "x", Path("/proc/version/x"), Path("/proc/x")):
        for option in ("--jsonl", "--parquet"):
            code, err = outcome(["export", str(whole), f"{option}={out}"], capsys)
            assert code == EXIT_CONFIG and err.startswith("error: FILE"), (option, out, err)
    code, err = outcome(["export", str(whole), "--jsonl=/dev/full"], capsys)
    assert code in (0, EXIT_CONFIG) and "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"] and (tmp_path / "file").read_text() == "kept"
    assert Path("/dev/full").is_char_device()


def test_a_full_disk_is_named_with_the_remedy(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SQLite needs room to read a log."""
    with disks.small_disk(tmp_path / "small", 8) as small:
        run = str(shutil.copytree(whole, small.path / "run", ignore=shutil.ignore_patterns("*-shm", "*-wal")))
        small.fill()
        out = f"--jsonl={tmp_path / 'out.jsonl'}"
        for words in (["report", run], ["inspect", run], ["replay", run], ["export", run, out]):
            code, err = outcome(words, capsys)
            assert code == EXIT_FAILURE and err.startswith("error: ") and err.count("\n") == 1, (words, err)
            assert re.search(rf"0 MB are free at {re.escape(str(small.path))}\S*: make room", err), (words, err)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_log_that_another_program_has_locked(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store never does this; a tool that edits databases may."""
    monkeypatch.setattr(database, "WAIT_S", 0.01)
    monkeypatch.setattr(database, "BUSY_S", 0.01)
    stand_in(monkeypatch)
    run = str(shutil.copytree(whole, tmp_path / "run"))
    with contextlib.closing(sqlite3.connect(f"{run}/store.db", isolation_level=None)) as editor:
        editor.execute("PRAGMA locking_mode = EXCLUSIVE")
        editor.execute("BEGIN EXCLUSIVE")
        for words in (["report", run], ["inspect", run], ["replay", run], ["export", run, f"--jsonl={run}/out.jsonl"],
                      ["store", run]):  # fmt: skip
            code, err = outcome(words, capsys)
            assert code == EXIT_FAILURE and err.startswith("error: ") and err.count("\n") == 1, (words, err)
            assert "store.db" in err and "locked" in err and "end that one, then start again" in err, (words, err)
