"""Runs that an earlier version recorded: every command reads them, and old names are gone from what it shows.

`tests/golden/run_format_1.tar.xz` was recorded at commit 46eae24 with

    jaxroll train --config=configs/smoke.py --run=runs/before --config.schedule.steps=40 \
      --config.schedule.flip=reprefill --config.schedule.redundant_members=1

stopped after step 8. Its logs, events of TensorBoard, warm start and older checkpoints were removed, and the paths in
run.json and in the checkpoint were replaced (the checksums of the checkpoint are those of the new content).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxroll import config as configs
from jaxroll import metrics, run_paths
from jaxroll.config import Config
from jaxroll.config.parsing import UNGRADED_ENVS, leaves
from jaxroll.control import cli, run_dir
from jaxroll.errors import ConfigError
from tests.harness.run_folder import run_of_format_1

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.py"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The folder of the recorded run."""
    return run_of_format_1(tmp_path / "before")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON that a command prints; it must succeed."""
    assert cli.main(list(words)) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_every_renamed_key_is_a_key_under_its_new_name_only() -> None:
    keys = set(leaves(Config))
    assert set(run_paths.RENAMED.values()) <= keys
    assert keys.isdisjoint(run_paths.RENAMED), "a retired name has a new meaning"


@pytest.mark.parametrize("old", run_paths.RENAMED)
def test_an_old_key_is_refused_with_its_new_name(old: str, tmp_path: Path) -> None:
    new = re.escape(run_paths.RENAMED[old])
    with pytest.raises(ConfigError, match=rf"{re.escape(old)} = .*new name.*{new}"):
        configs.load(SMOKE, [f"--config.{old}=1"])
    file = tmp_path / "x.py"
    file.write_text(
        f"from jaxroll.config import defaults\ndef get_config():\n c = defaults()\n c.{old} = 1\n return c\n"
    )
    with pytest.raises(ConfigError, match=rf"{re.escape(old)} = .*new name.*{new}"):
        configs.load(file)


def test_the_config_keeps_its_values_under_the_new_names(older: Path) -> None:
    written = json.loads((older / "run.json").read_text())
    config = run_dir.load_config(older)
    assert config.schedule.weight_swap == written["config"]["schedule"]["flip"] == "reprefill"
    assert written["config"] == json.loads((older / "run.json").read_text())["config"], "reading changed the file"
    found = configs.to_dict(config)
    for old, new in run_paths.RENAMED.items():
        (section, key), (_, after) = old.split("."), new.split(".")
        assert found[section][after] == written["config"][section][key]
    run_dir.write(older, run_dir.load(older))
    again = json.loads((older / "run.json").read_text())
    assert again["format"] == run_paths.FORMAT and run_dir.load_config(older) == config


@pytest.mark.parametrize("env", UNGRADED_ENVS)
def test_a_reward_that_a_game_never_read_is_left_out(env: str, tmp_path: Path) -> None:
    """A config could set the reward and the extraction of answers for a game, which has a reward of its own."""
    path = run_dir.create(tmp_path / "game", configs.load(SMOKE, ["task.source=game", f"task.env={env}"]), [])
    values = json.loads((path / "run.json").read_text())
    task = values["config"]["task"]
    task |= {"reward": "exact + 0.1*format", "extract": "boxed", "reward_args": {"format": {"style": "think"}}}
    run_dir.write(path, values)
    with pytest.raises(ConfigError, match="has a reward of its own"):
        configs.parse(values["config"])
    found = run_dir.resume(path, ["--config.schedule.steps=50"], lambda config: None)
    assert (found.task.reward, found.task.extract, found.task.reward_args) == ("auto", "none", {})
    assert found.task.env == env and run_dir.load_config(path) == found
    task["env"] = "single_turn"
    run_dir.write(path, values)
    assert run_dir.load_config(path).task.reward == "exact + 0.1*format"


def test_a_plan_for_several_samplers_is_left_out_where_there_is_one(tmp_path: Path) -> None:
    words = ["sampler.count=2", "placement.colocated=True", "sampler.flush_tokens=64"]
    words += ["schedule.weight_swap=trajectory", "schedule.repack_s=5"]
    path = run_dir.create(tmp_path / "run", configs.load(SMOKE, words), [])
    assert run_dir.load_config(path).schedule.repack_s == 5.0
    values = json.loads((path / "run.json").read_text())
    values["config"]["sampler"]["count"] = 1
    run_dir.write(path, values)
    assert run_dir.load_config(path).schedule.repack_s == 0.0


def test_a_folder_of_a_newer_version_is_refused(older: Path) -> None:
    values = json.loads((older / "run.json").read_text())
    (older / "run.json").write_text(json.dumps(values | {"format": run_paths.FORMAT + 1}))
    with pytest.raises(ConfigError, match=r"its format is 3.*Use the version of JaxRoll"):
        run_dir.load(older)
    assert cli.main(["report", str(older)]) == 64


def test_rows_have_the_new_names(older: Path) -> None:
    raw = [json.loads(line) for line in (older / "metrics.jsonl").read_text().splitlines()]
    rows = metrics.read(older / "metrics.jsonl")
    assert len(rows) == len(raw)
    for kind, fields in run_paths.ROW_FIELDS.items():
        before = [row for row in raw if row["kind"] == kind]
        after = [row for row in rows if row["kind"] == kind]
        for old, new in fields.items():
            assert [row[old] for row in before if old in row] == [row[new] for row in after if new in row]
            assert not any(old in row for row in after)
    swaps = [row for row in rows if row["kind"] == "span" and row["what"] == "weight_swap"]
    assert len(swaps) == sum(row.get("what") == "flip" for row in raw) > 0


def test_an_old_row_of_each_kind_is_migrated() -> None:
    for kind, fields in run_paths.ROW_FIELDS.items():
        for old, new in fields.items():
            assert run_paths.row({"kind": kind, old: 3}) == {"kind": kind, new: 3}
    serving = {"kind": "stats", "open": 2, "served": 5}
    assert run_paths.row(serving) == {"kind": "stats", "requests_in_flight": 2, "requests_served": 5}
    other = {"kind": "eval", "open": 2}
    assert run_paths.row(other) is other


def test_every_command_reads_the_run(older: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = printed(capsys, "report", str(older), "--json")
    assert (figures["steps"], figures["steps_wanted"], figures["alpha"]) == (8, 40, 1.0)
    assert figures["conservation_residual"] == figures["groups_trained_twice"] == figures["restarts"] == 0
    inspected = printed(capsys, "inspect", str(older), "--json")
    assert (inspected["groups_in_flight"], inspected["in_flight_window"]) == (8, 8)
    replayed = printed(capsys, "replay", str(older), "--json")
    assert (replayed["records"], replayed["whole"], replayed["violations"]) == (325, True, [])
    assert printed(capsys, "checkpoints", str(older), "--verify", "--json")["checkpoints"][0]["step"] == 8
    assert cli.main(["list", str(tmp_path)]) == 0
    assert re.search(r"before +8/40 steps", capsys.readouterr().out)
    table = tmp_path / "rows.jsonl"
    assert cli.main(["export", str(older), f"--jsonl={table}"]) == 0
    assert len(table.read_text().splitlines()) == 40 * 4
    assert cli.main(["report", str(older)]) == 0
    page = (older / "report.html").read_text()
    assert "swaps weights" in page and "flips" not in page
