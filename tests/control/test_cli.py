"""The command line: what each command does with its words."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.config import Config, RoleArgs
from jaxroll.control import cli, commands, run_dir
from jaxroll.lifeline import PARENT_ENV

ROOT = Path(__file__).parents[2]
SMOKE = str(ROOT / "configs" / "smoke.py")
ACTOR = ["actor", f"--config={SMOKE}", "--run=r", "--config.placement.actors=1"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_overrides_are_told_from_options_in_both_spellings() -> None:
    words = ["train", "--config.a.b=1", "--run=x", "--config.c", "2", "--config=F"]
    assert cli.split_overrides(words) == (["a.b=1", "c=2"], ["train", "--run=x", "--config=F"])


def test_config_prints_the_resolved_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", f"--config={SMOKE}", "--config.run.seed=9"]) == 0
    printed = capsys.readouterr()
    loaded = configs.load(SMOKE, ["run.seed=9"])
    assert configs.parse(json.loads(printed.out)) == loaded
    assert configs.digest(loaded) in printed.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["config"], 64, "--config=FILE"),
        (["config", "--config=nowhere.py"], 64, "no such file"),
        (["train", f"--config={SMOKE}", "--config.learner.lr=1"], 64, "learner.learning_rate"),
        (["train", f"--config={SMOKE}", "--config.placement.platform=tpu"], 64, "no TPU chip"),
        (["train", f"--config={SMOKE}", "--config.tokenizer.kind=hf", "--config.tokenizer.path=nope"], 64, "nope"),
        (["train", f"--config={SMOKE}", "--config.sampler.mesh.tensor=3"], 64, "sampler.mesh.tensor"),
        (["demo", f"--config={SMOKE}", "--config.task.name=spell"], 64, "task.name"),
        (["demo", f"--config={SMOKE}", f"--seed={2**32}"], 64, "run.seed"),
        (["sampler", f"--config={SMOKE}", "--run=r", "--config.task.env=none"], 64, "task.env"),
        (["sft", f"--config={SMOKE}", "--config.learner.mesh.tensor=3"], 64, "learner.mesh.tensor"),
        (["launch", "--target=gpu", f"--config={SMOKE}", "--config.sampler.mesh.tensor=3"], 64, "sampler.mesh.tensor"),
        (["train", "--resume"], 64, "--run=DIR"),
        (["train", "--resume", "--run=nowhere"], 64, "no run here"),
        (["train", "--fork=3", "--config=configs/smoke.py"], 64, "--resume"),
        (["learner"], 64, "--run"),
        (["generate"], 64, "--run"),
        (["generate", "nowhere", "x"], 64, "no run here"),
        (["learner", "--run=nowhere"], 64, "no run here"),
        (["report", "nowhere"], 64, "no run here"),
        (["train", "--steps=3"], 2, "unknown argument --steps=3"),
        (["learner", "--run=r", "--resume"], 2, "unknown argument --resume"),
        (["evaluator", "--run=r", "--index=1"], 2, "unknown argument --index=1"),
        (["sampler", f"--config={SMOKE}", "--run=r", "--index=-1"], 64, "--index"),
        (["actor", f"--config={SMOKE}", "--run=r"], 64, "placement.actors"),
        (["colocated", f"--config={SMOKE}", "--run=r"], 64, "placement.colocated"),
        ([*ACTOR, "--sampler=h:1", "--sampler=h:2"], 64, "sampler.count=1"),
    ],
)
def test_bad_words_end_with_a_sentence_and_leave_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    assert cli.main(words) == code
    assert message in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_demo_outside_a_checkout_says_where_it_looked(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxroll.control import train

    monkeypatch.setattr(train.jaxroll, "__file__", str(here / "site-packages" / "jaxroll" / "__init__.py"))
    commands = types.ModuleType("jaxroll.report.commands")
    commands.report = types.ModuleType("jaxroll.report.commands.report")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxroll.report.commands", commands)
    monkeypatch.setitem(sys.modules, "jaxroll.report.commands.report", commands.report)
    assert cli.main(["demo"]) == 64
    assert "checkout" in capsys.readouterr().err


def given_role(monkeypatch: pytest.MonkeyPatch, name: str) -> list[RoleArgs]:
    """Put a role in place of jaxroll.roles.NAME that keeps what it is given."""
    seen: list[RoleArgs] = []
    module = types.ModuleType(name)
    module.main = seen.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return seen


def test_a_role_under_a_supervisor_reads_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = given_role(monkeypatch, "jaxroll.roles.sampler")
    path = run_dir.create(here / "run", Config(), [])
    monkeypatch.setattr(cli.lifeline, "bind_from_env", lambda: True)
    assert cli.main(["sampler", "--index=1", f"--run={path}"]) == 0
    assert seen == [RoleArgs(Config(), path, None, 1)]
    assert seen[0].config_digest == configs.digest(Config())


def test_a_role_alone_makes_its_run_folder_and_its_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "NPROC"):
        monkeypatch.setenv(name, "x")  # put back after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    seen = given_role(monkeypatch, "jaxroll.roles.learner")
    words = ["learner", f"--config={SMOKE}", "--config.learner.mesh.fsdp=4", "--store=h:1", "--run=r", "--host=me"]
    assert cli.main(words) == 0
    (args,) = seen
    assert (args.run_dir, args.store_address, args.host) == (here / "r", "h:1", "me")
    assert run_dir.load_config(here / "r") == args.config
    assert "device_count=4" in os.environ["XLA_FLAGS"] and os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert cli.main(words) == 0  # a second process of the same run joins it
    assert cli.main([*words, "--config.run.seed=1"]) == 64


def test_a_role_takes_the_options_that_it_reads_and_no_other() -> None:
    (action,) = (a for a in cli.parser()._actions if a.dest == "command")
    common, found = {"--help", "-h", "--config", "--run"}, {}
    for role in cli.ROLES:
        words = {word for a in action.choices[role]._actions for word in a.option_strings}  # type: ignore[index]
        found[role] = words - common
    assert found == {
        "store": {"--store", "--insecure"},
        "sampler": {"--store", "--index", "--host", "--port", "--insecure"},
        "actor": {"--store", "--index", "--sampler"},
        "learner": {"--store", "--host", "--insecure", "--fork", "--index", "--coordinator"},
        "evaluator": {"--store"},
        "colocated": {"--store", "--fork"},
        "feeder": set(),
    }


def test_errors_of_a_role_become_exit_codes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxroll.errors import Closed

    def main(args: RoleArgs) -> None:
        raise Closed("stalled for 600 s")

    module = types.ModuleType("jaxroll.roles.learner")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxroll.roles.learner", module)
    monkeypatch.setattr(cli.lifeline, "bind_from_env", lambda: True)
    path = run_dir.create(here / "run", Config(), [])
    assert cli.main(["learner", f"--run={path}"]) == 69
    assert "stalled for 600 s" in capsys.readouterr().err


def test_every_command_of_the_parser_is_carried_out_by_something() -> None:
    (action,) = (a for a in cli.parser()._actions if a.dest == "command")
    assert set(action.choices) == set(commands.COMMANDS)  # type: ignore[arg-type]


def test_the_name_of_the_parent_does_not_reach_grandchildren(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxroll import lifeline

    bound: list[int] = []
    monkeypatch.setattr(lifeline, "bind", bound.append)
    monkeypatch.setenv(PARENT_ENV, "123")
    assert lifeline.bind_from_env() and bound == [123] and PARENT_ENV not in os.environ
    assert not lifeline.bind_from_env()


def calls(path: Path) -> list[list[str]]:
    return [json.loads(line)["words"] for line in (path / "calls.jsonl").read_text().splitlines()]


@pytest.fixture
def pretended_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter whose `-m jaxroll` is fake_jaxroll.py."""
    script = tmp_path / "python"
    fake = Path(__file__).parents[1] / "harness/programs/fake_jaxroll.py"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.process
@pytest.mark.usefixtures("pretended_python")
def test_train_warms_up_once_runs_all_roles_and_resumes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", f"--config={SMOKE}", "--run=r"]) == 0
    first = calls(here / "r")
    assert [words[0] for words in first[:2]] == ["sft", "store"]
    assert sorted(words[0] for words in first) == ["evaluator", "learner", "sampler", "sft", "store"]
    assert all(f"--run={here / 'r'}" in words for words in first)
    assert "jaxroll report r" in capsys.readouterr().out
    assert cli.main(["train", f"--config={SMOKE}", "--run=r"]) == 64
    assert cli.main(["train", "--run=r", "--resume", "--config.schedule.steps=9"]) == 0
    later = calls(here / "r")[len(first) :]
    assert sorted(words[0] for words in later) == ["evaluator", "learner", "sampler", "store"]
    assert [words for words in later if "--resume" in words] == [], "a role looks at the disk by itself"
    assert run_dir.load_config(here / "r").schedule.steps == 9


@pytest.mark.process
@pytest.mark.usefixtures("pretended_python")
def test_the_demo_is_always_a_new_run_which_its_link_names(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxroll.report.commands import report

    reported: list[Path] = []
    monkeypatch.setattr(report, "main", lambda path, as_json: reported.append(path))
    for seed in (1, 1, 2):
        assert cli.main(["demo", f"--config={SMOKE}", f"--seed={seed}"]) == 0
        assert (here / "runs" / "demo").resolve() == reported[-1].resolve(), "the link follows"
    made = [path for path in (here / "runs").iterdir() if not path.is_symlink()]
    assert len(made) == len(set(reported)) == 3, "none is deleted, none is used again"
    assert [run_dir.load_config(path).run.seed for path in reported] == [1, 1, 2]


@pytest.mark.process
@pytest.mark.usefixtures("pretended_python")
@pytest.mark.parametrize("named", [["r"], ["--run=r"]], ids=str)
def test_generate_starts_a_child_and_passes_the_words_on_in_order(here: Path, named: list[str]) -> None:
    path = run_dir.create(here / "r", configs.load(SMOKE), [])
    (path / "warm").mkdir()
    more = ["--temperature", "0.5", "a prompt", "--top-k=3"]
    rest = more if "--run=r" in named else ["a prompt", "--top-p", "1"]
    assert cli.main(["generate", *named, *rest]) == 0
    assert calls(path) == [["generate", f"--run={path}", *rest]]


def test_the_child_of_generate_gets_the_words_in_order(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = given_role(monkeypatch, "jaxroll.tools.generate")
    monkeypatch.setattr(cli.lifeline, "bind_from_env", lambda: True)
    path = run_dir.create(here / "r", Config(), [])
    assert cli.main(["generate", f"--run={path}", "--temperature", "0.5", "a prompt"]) == 0
    assert seen == [RoleArgs(Config(), path, rest=("--temperature", "0.5", "a prompt"))]


def test_sft_marks_its_run_as_warm(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxroll.control import train

    given_role(monkeypatch, "jaxroll.tools.sft")
    monkeypatch.setattr(cli.lifeline, "bind_from_env", lambda: True)
    path = run_dir.create(here / "r", configs.load(SMOKE), [])
    assert train.needs_warm_start(configs.load(SMOKE), path)
    assert cli.main(["sft", f"--run={path}"]) == 0
    assert not train.needs_warm_start(configs.load(SMOKE), path)


@pytest.mark.process
@pytest.mark.usefixtures("pretended_python")
def test_train_ends_with_what_a_role_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir.create(here / "r", configs.load(SMOKE), [])
    (here / "r" / "refuse").touch()
    assert cli.main(["train", "--run=r", "--resume"]) == 64
    assert "refused its configuration" in capsys.readouterr().out


def test_what_to_type_next_works_where_the_shell_does_not_know_the_command(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxroll.control import train

    (here / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(here / "bin" / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert train.own_command() == "jaxroll", "it was not installed as a command"
    (here / "bin" / "jaxroll").touch(mode=0o755)
    assert train.own_command() == "bin/jaxroll"
    monkeypatch.setenv("PATH", str(here / "bin"))
    assert train.own_command() == "jaxroll"
    assert train.closing_words(130, here / "r", 3.2).endswith("jaxroll train --run=r --resume")
