"""Paths of run folders: a run works in a path, or the path is refused by name before anything is written."""

from __future__ import annotations

import os
import string
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxroll.config import Config
from jaxroll.control import cli, run_dir
from jaxroll.errors import EXIT_CONFIG, ConfigError
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.state import TrainState
from jaxroll.metrics import TensorBoardTracker
from jaxroll.records import Version
from jaxroll.report import archive
from jaxroll.sim import costs
from jaxroll.store.log import database
from tests.harness.run_folder import LogMaker

ROOT = Path(__file__).parents[2]
SMOKE = f"--config={ROOT / 'configs' / 'smoke.py'}"
REFUSED = [
    "sweep[lr=1e-4]",
    "a[b",
    "a]b",
    "a*b",
    "a**b",
    "a?b",
    "a\\b",
    "a\\",
    "a\nb",
    "a\tb",
    "a\x01b",
    "a\x7fb",
    "gs:",
    "logs:/a",
    "\udcff",
    "x" * 256,
    "ü" * 128,
    "/".join(["x" * 100] * 5),
]
PRINTABLE = [character for character in string.printable if character.isprintable() and character not in "/*?[]\\"]
WORKS = [
    *("a" + "b".join(PRINTABLE[start : start + 12]) + "c" for start in range(0, len(PRINTABLE), 12)),
    " ", "-dash", "--run=x", "a%20c", "%", "#", "file:a", "{a,b}", "~", "~root", "$HOME", "...",
    "gs:a", "s3:", "a.orbax-checkpoint-tmp", "ocdbt.process_0", "ü日本🙂", "e\u0301", "a\u2028b", "x" * 255,
]  # fmt: skip


@pytest.mark.parametrize("name", WORKS, ids=ascii)
def test_a_run_works_in_every_other_folder(tmp_path: Path, name: str) -> None:
    parent = tmp_path / "parent"
    path = run_dir.create(parent / name, Config(), [])
    assert path == parent / name and run_dir.load_config(path) == Config()
    LogMaker().write(path)
    with database.transaction(path) as log:
        assert log.execute("SELECT COUNT(*) FROM lineages").fetchone()[0] >= 1
    members = {"kind": "members", "rows": [[0, 0, 1.0, 2.0, 5]]}
    assert costs.workload(path, [members]).answer_tokens.mean == 5.0
    state = TrainState({"embed": jnp.arange(6.0)}, (), jnp.int32(4))
    checkpoints = Checkpoints(path / "checkpoints", 2)
    checkpoints.save(Version(0, 4), 5, state)
    assert checkpoints.wait() == [Version(0, 4)]
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    restored, _ = checkpoints.restore(Version(0, 4), abstract, durable=True)
    assert restored.params["embed"].tolist() == [0, 1, 2, 3, 4, 5]
    checkpoints.close()
    assert [row["problem"] for row in archive.checkpoint_facts(path, verify=True)["checkpoints"]] == [""]
    events = TensorBoardTracker(path / "tb")
    events.log({"kind": "step", "step": 1, "loss": 0.5})
    events.close()
    assert {file.relative_to(tmp_path).parts[0] for file in tmp_path.rglob("*")} == {"parent"}
    assert [one.name for one in parent.iterdir()] == [name.partition("/")[0]], "a file was made outside of the run"


def test_the_longest_path_that_is_taken_works(tmp_path: Path) -> None:
    room = run_dir.PATH_BYTES - len(os.fsencode(tmp_path / "parent")) - 1
    name = "/".join(["y" * 99] * (room // 100) + ["z" * (room % 100)]).rstrip("/")
    test_a_run_works_in_every_other_folder(tmp_path, name)
    with pytest.raises(ConfigError, match="too long"):
        run_dir.checked(tmp_path / "parent" / f"{name}zz")
    (tmp_path / "short").symlink_to(tmp_path / "parent" / name)
    with pytest.raises(ConfigError, match="too long"):
        run_dir.checked(tmp_path / "short" / "zz")


@pytest.mark.parametrize("name", REFUSED, ids=lambda name: ascii(name[:20]))
def test_a_path_that_breaks_a_run_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", SMOKE, f"--run=new/{name}"]) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert "RUN" in said and "path" in said and any(word in said for word in ("Use ", "UTF-8", "Rename")), said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        *([role, SMOKE] for role in ("store", "learner", "sampler", "evaluator", "sft", "generate", "eval")),
        ["train", "--resume"],
        ["store"],
        ["sft"],
        ["generate"],
        ["launch", "--target=gpu", SMOKE],
        ["tls"],
    ],
    ids=" ".join,
)
def test_every_command_that_makes_or_runs_a_run_refuses_such_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words, "sweep[lr=1e-4]" if words == ["tls"] else "--run=sweep[lr=1e-4]"]) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert "'['" in said and "Use a path without" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["demo"], ["train"], ["learner"]])
def test_a_folder_that_jaxroll_names_is_checked_with_the_folder_it_lies_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (tmp_path / "lr=[1]").mkdir()
    monkeypatch.chdir(tmp_path / "lr=[1]")
    assert cli.main([*words, SMOKE]) == EXIT_CONFIG
    assert "'['" in capsys.readouterr().err and list(Path().iterdir()) == []


def test_a_run_is_named_by_one_folder(tmp_path: Path) -> None:
    for name in ("../x", "a/b"):
        with pytest.raises(ConfigError, match=r"run\.name"):
            run_dir.create_unique(tmp_path / "runs", name, Config(), [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_where_the_locale_is_not_utf8_only_ascii_is_taken(tmp_path: Path) -> None:
    """Python would create the folder in the locale's encoding, and TensorStore another one in UTF-8."""
    code = (
        "import os, sys\nfrom jaxroll.control import run_dir\nfrom jaxroll.errors import ConfigError\n"
        "os.fsencode = lambda path: str(path).encode('latin-1', 'surrogateescape')\n"
        "run_dir.checked('/plain')\n"
        "try:\n    run_dir.checked('/\\u00fc')\nexcept ConfigError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    assert "UTF-8 locale" in done.stdout


def test_the_checked_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_dir.checked("a/../b") == tmp_path / "b"
