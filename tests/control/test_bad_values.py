"""Option values that make no sense: refused with the option, before anything is read, made or changed."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from jaxroll.control import cli, commands
from jaxroll.errors import EXIT_CONFIG
from jaxroll.rpc import http
from tests.harness.run_folder import make_run

ROOT = Path(__file__).parents[2]
SMOKE = f"--config={ROOT / 'configs' / 'smoke.py'}"
HUGE = "9" * 26
MODEL = str(ROOT / "tests" / "golden" / "qwen3" / "tied")


def refusal(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """The one line that refuses these words."""
    assert cli.main(words) == EXIT_CONFIG
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1, text
    return text


@pytest.mark.parametrize(
    "line",
    [
        "ui runs --port=99999999", "ui runs --port=-1", "env serve m:C --port=65536", "launch --port=99999999",
        "launch --devices-per-host=-1", "launch --gpu-memory-mb=-1", f"inspect RUN --group={HUGE}",
        "inspect RUN --group=-1", "generate RUN hi --samples=-1", "generate RUN hi --top-p=7",
        "generate RUN hi --top-p=0", "generate RUN hi --max-tokens=-3", f"generate RUN hi --max-tokens={HUGE}",
        f"generate RUN hi --slots={HUGE}", "generate RUN hi --temperature=nan", "generate RUN hi --min-p=-0.1",
        "generate RUN hi --repetition-penalty=0", "eval RUN --temperature=nan", "eval RUN --temperature=inf",
        "eval RUN --k=0", "eval RUN --samples=0", f"serve RUN --context={HUGE}", "serve RUN --queue=-1",
        f"place --simulate={HUGE}",
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused_with_the_range(capsys: pytest.CaptureFixture[str], line: str) -> None:
    text = refusal(capsys, line.split())
    option = line.split()[-1].partition("=")[0]
    assert f"error: {option} = " in text and "is out of range" in text and "Give a number from" in text


@pytest.mark.parametrize(
    "words",
    [
        ["tls", "RUN", "--token-of="], ["tls", "RUN", "--host="], ["train", SMOKE, "--host="],
        ["init", "a.py", "--task="], ["init", "a.py", "--model="], ["init", "a.py", "--hardware="],
        ["export", "RUN", "--jsonl="], ["ui", "runs", "--token-file="], ["launch", "--run="], ["eval", "RUN", "--set="],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)  # fmt: skip
def test_an_empty_value_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """As `--token-of=$NAME` without the variable, which would make new certificates."""
    monkeypatch.chdir(tmp_path)
    text = refusal(capsys, words)
    assert f"error: {words[-1].rstrip('=')} = " in text and "is empty" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["eval", MODEL, SMOKE, "--config.task.max_prompt_tokens=48", "--set=nothing"], "--set = 'nothing'"),
        (["eval", "RUN", "--set=nothing"], "--set = 'nothing'"),
        (["serve", "RUN", "--context=8"], "an answer needs one more. Give a larger number"),
        (["weights", "import", MODEL, "FULL"], "OUT = "),
        (["weights", "export", "RUN", "FULL"], "OUT = "),
    ],
    ids=["eval --config", "eval", "serve", "import", "export"],
)
def test_a_mistake_is_refused_before_a_process_that_loads_jax_starts(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    reason: str,
) -> None:
    """Such a process needs five seconds to find out; and nothing is written."""
    monkeypatch.setattr(commands, "run_foreground", lambda *_: pytest.fail("a process was started"))
    make_run(tmp_path / "RUN", steps=2)
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "mine").touch()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert reason in refusal(capsys, words)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("option", ["jsonl", "parquet", "perfetto"])
@pytest.mark.parametrize("name", ["store.db", "store.db-wal", "metrics.jsonl", "run.json", "heldout.json", "logs/a"])
def test_an_export_does_not_replace_files_of_its_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, name: str
) -> None:
    run = make_run(tmp_path / "run", steps=2)
    (run / "logs").mkdir(exist_ok=True)
    (tmp_path / "link").symlink_to(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    text = refusal(capsys, ["export", str(run), f"--{option}={tmp_path / 'link' / name}"])
    assert f"error: --{option} = " in text and "belongs to the run" in text
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with sqlite3.connect(run / "store.db") as db:
        assert db.execute("SELECT COUNT(*) FROM groups").fetchone()[0] > 0


def test_an_export_next_to_the_files_of_its_run_is_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    for _ in range(2):
        assert cli.main(["export", str(run), f"--jsonl={run / 'trajectories.jsonl'}"]) == 0


def test_a_token_file_that_holds_something_else_stays_as_it_is(tmp_path: Path) -> None:
    """A device would be replaced by a file, a large file become a token, and a text readable for its owner only."""
    text, large, pipe, folder = (tmp_path / name for name in ("text", "large", "pipe", "folder"))
    text.write_text("two words\n")
    large.write_bytes(b"x" * 1_000_000)
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (text, large):
        path.chmod(0o644)
    odd = "not a regular file"
    for path, reason in ((text, "holds no token"), (large, "at most 4,096"), (pipe, odd), (folder, odd)):
        mode = path.stat().st_mode
        with pytest.raises(Exception, match=reason):
            http.token(None, path)
        assert path.stat().st_mode == mode
    made = http.token(None, tmp_path / "new" / "token")
    assert http.token(None, tmp_path / "new" / "token") == made
    with pytest.raises(Exception, match="cannot be written"):
        http.token(None, text / "below" / "token")


CONFIGS = {
    "base": "class Odd(BaseException):\n    pass\n\n\nraise Odd('no')\n",
    "mute": "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\n\n\nraise Mute\n",
    "exits": "import sys\n\nsys.exit(3)\n",
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_or_environment_may_raise_anything(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    name = f"raises_{kind}"
    (tmp_path / f"{name}.py").write_text(CONFIGS[kind])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "--config = " in refusal(capsys, ["config", f"--config={tmp_path / name}.py"])
    assert name in refusal(capsys, ["env", "check", f"{name}:X", SMOKE])


def test_a_removed_working_folder_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in (["report", "run"], ["config", SMOKE], ["doctor"], ["ui"]):
        assert "working folder" in refusal(capsys, words)
    monkeypatch.setattr(cli.lifeline, "bind_from_env", lambda: True)  # a role that its supervisor starts again
    assert cli.main(["sampler", str(tmp_path / "nothing")]) == EXIT_CONFIG
    assert "working folder" not in capsys.readouterr().err


def test_a_folder_of_runs_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "nothing"):
        assert "is not a folder" in refusal(capsys, ["list", str(tmp_path / name)])


def test_a_token_that_cannot_be_sent_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", steps=2)
    monkeypatch.setenv("JAXROLL_TOKEN", "geheim\udcff")
    text = refusal(capsys, ["sampler", str(run), "--store=127.0.0.1:1"])
    assert "JAXROLL_TOKEN" in text and "geheim" not in text


def test_a_lack_of_memory_is_one_line_where_the_user_chose_the_sizes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner's has other remedies, and its log needs the traceback."""

    def too_large(options: object) -> int:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")

    for name in ("serve", "learner"):
        monkeypatch.setitem(commands.COMMANDS, name, too_large)
    assert cli.main(["serve", "runs/a"]) == 1
    assert "fewer slots or tokens" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        cli.main(["learner", "runs/a"])


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files. "),
        (OSError(errno.ENFILE, "Too many in system", "rows.jsonl"), "'rows.jsonl': Too many in system. "),
    ],
)
def test_a_lack_of_descriptors_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: OSError, named: str
) -> None:
    def fails(options: object) -> int:
        raise error

    monkeypatch.setitem(commands.COMMANDS, "store", fails)
    assert cli.main(["store", "runs/a"]) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"error: {named}Raise the limit of open files (`ulimit -n`)") and text.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "key"), [(["env", "check", ""], "MODULE:NAME"), (["weights", "import", "", "out"], "SOURCE")]
)
def test_an_empty_argument_is_named_as_the_help_names_it(
    capsys: pytest.CaptureFixture[str], words: list[str], key: str
) -> None:
    assert f"error: {key} = " in refusal(capsys, words)
