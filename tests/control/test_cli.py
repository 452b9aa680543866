"""The command line: the effects of commands and arguments."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.config import Config, RoleArgs
from jaxroll.control import child, cli, commands, run_dir, train
from jaxroll.lifeline import PARENT_ENV

ROOT = Path(__file__).parents[2]
SMOKE = str(ROOT / "configs" / "smoke.py")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_overrides_are_separated_from_options_in_both_spellings() -> None:
    words = ["train", "--config.a.b=1", "--run=x", "--config.c", "2", "--config=F"]
    assert cli.split_overrides(words) == (["a.b=1", "c=2"], ["train", "--run=x", "--config=F"])


def test_config_prints_the_resolved_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", f"--config={SMOKE}", "--config.run.seed=9"]) == 0
    printed = capsys.readouterr()
    loaded = configs.load(SMOKE, ["run.seed=9"])
    assert configs.parse(json.loads(printed.out)) == loaded
    assert printed.err.startswith("reward: 1 if the score") and printed.err.count("\n") == 1


STANDBY = "--config.store.standby=True"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["store", "r", STANDBY], "--peer: the config has store.standby=True"),
        (["store", "r", "--peer=127.0.0.1:7078"], "--peer = '127.0.0.1:7078': the config has store.standby=False"),
        (["store", "r", "--index=1"], "--index = 1: there is no such store"),
        (["store", "r", STANDBY, "--peer=127.0.0.1:7078", "--index=2"], "--index = 2: there is no such store"),
        (["train", STANDBY], "store.standby = True: no standby is started here"),
        (["launch", "--on=local", "--dry-run", STANDBY], "store.standby = True: no standby is started here"),
        (["launch", "--on=slurm", "--scratch=x", "--run=y", "--dry-run", STANDBY], "store.standby = True: no standby"),
        (["launch", "--target=gpu", "--dry-run", STANDBY], "--on = 'store-1=localhost': the standby is for the loss"),
    ],
)
def test_a_standby_is_started_by_hand_with_its_options(
    words: list[str], named: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, f"--config={SMOKE}"]) == 64
    assert capsys.readouterr().err.startswith(f"error: {named}")
    assert not (here / "runs").exists(), "a run was made before the refusal"


@pytest.mark.parametrize(("tokens", "lines"), [(0, 0), (1, 1), (16, 1), (17, 0)])
def test_config_and_train_say_where_samplers_wait_at_every_flush(
    tokens: int, lines: int, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "train", lambda *_, **__: 0)
    words = [f"--config={SMOKE}", "--config.sampler.decode_chunk=4", f"--config.sampler.flush_tokens={tokens}"]
    for command in ("config", "train"):
        assert cli.main([command, *words]) == 0
        said = [line for line in capsys.readouterr().err.splitlines() if "sampler.flush_tokens" in line]
        assert len(said) == lines and all("sampler.decode_chunk = 16" in line for line in said)


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
        (["train", "--resume"], 64, "RUN"),
        (["train", "nowhere", "--resume"], 64, "no run here"),
        (["train", "--fork=3", "--config=configs/smoke.py"], 64, "--resume"),
        (["learner"], 64, "RUN"),
        (["generate"], 64, "RUN"),
        (["generate", "nowhere", "x"], 64, "no run here"),
        (["learner", "--run=nowhere"], 64, "no run here"),
        (["report", "nowhere"], 64, "no run here"),
        (["train", "--steps=3"], 2, "unknown argument --steps=3"),
        (["learner", "--run=r", "--resume"], 2, "unknown argument --resume"),
        (["evaluator", "--run=r", "--index=1"], 2, "unknown argument --index=1"),
        (["sampler", f"--config={SMOKE}", "--run=r", "--index=-1"], 64, "--index"),
        (["actor", f"--config={SMOKE}", "--run=r"], 64, "placement.actors"),
        (["colocated", f"--config={SMOKE}", "--run=r"], 64, "placement.colocated"),
    ],
)
def test_bad_arguments_end_with_a_sentence_and_leave_no_files(
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
    monkeypatch.setitem(sys.modules, "jaxroll.report.page", types.ModuleType("jaxroll.report.page"))
    assert cli.main(["demo"]) == 64
    assert "checkout" in capsys.readouterr().err


def given_role(monkeypatch: pytest.MonkeyPatch, name: str) -> list[RoleArgs]:
    """Replace jaxroll.roles.NAME by a role that records its arguments."""
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
        monkeypatch.setenv(name, "x")  # restored after the test
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
        "store": {"--store", "--insecure", "--peer", "--index"},
        "sampler": {
            "--store",
            "--index",
            "--host",
            "--port",
            "--insecure",
            "--join",
            "--drain",
            "--process",
            "--coordinator",
        },
        "actor": {"--store", "--index", "--sampler", "--drain"},
        "learner": {"--store", "--host", "--insecure", "--fork", "--new-log", "--index", "--coordinator"},
        "evaluator": {"--store"},
        "colocated": {"--store", "--fork", "--new-log"},
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


def test_every_command_of_the_parser_has_a_function() -> None:
    (action,) = (a for a in cli.parser()._actions if a.dest == "command")
    assert set(action.choices) == set(commands.COMMANDS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--versoin"], "Did you mean `jaxroll --version`?"),
        (["weights", "improt"], "Did you mean import?"),
        (["compile", "--role=smpler"], "Did you mean sampler?"),
        (["launch", "--on=slrum"], "Did you mean 'slurm'?"),
        (["launch"], "no launcher is named. Launchers: local, ssh"),
        (["config", "--config=a.py", "--confg.learner.seed=1"], "is changed with --config.learner.seed=1."),
        (["inspect"], "Example: jaxroll inspect runs/demo"),
        (["inspect", "--group=x", "runs/demo"], "Example: jaxroll inspect runs/demo --group=7"),
        (["sim", "calibrat", "runs/demo"], "RUN = 'calibrat runs/demo': more than one."),
        (["replay", "runs/nothing"], "`jaxroll list` shows the runs"),
        (["train"], "--config: no experiment named"),
        (["--json", "inspect", "runs/demo"], "Options follow the command: jaxroll inspect … --json"),
        (["train", "runs/nothing", "--resume", "--fork"], "no run here"),
    ],
)
def test_a_mistake_is_answered_with_what_may_be_meant(
    words: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(words)
    except SystemExit as exited:
        code = exited.code
    assert code in (2, 64) and shown in capsys.readouterr().err


def test_help_and_roles_load_no_module_of_other_commands() -> None:
    script = (
        "import sys\n"
        "from jaxroll.control import cli\n"
        "cli.parser('store')\n"
        "assert 'jaxroll.config' not in sys.modules, 'options load the config'\n"
        "from jaxroll.control import commands\n"
        "heavy = ('jaxroll.sim', 'rich', *(f'jaxroll.control.{name}' for name in ('train', 'launchers', 'propose')),\n"
        "    'jaxroll.data.preparation', 'jaxroll.envs.registry', 'jaxroll.store.core.admission')\n"
        "assert not {*heavy} & {*sys.modules}, {*heavy} & {*sys.modules}\n"
        "from jaxroll import config\n"
        "config.parse({})\n"
        "assert 'ml_collections' not in sys.modules, 'roles get a mapping; only config files need ml_collections'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


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
def test_train_warms_up_once_runs_all_roles_and_resumes(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_COMPILERS", "3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert cli.main(["train", f"--config={SMOKE}", "--run=r"]) == 0
    first = calls(here / "r")
    compiled = [words for words in first if words[0] == "compile"]
    assert sorted(words[-1] for words in compiled) == ["--role=evaluator", "--role=learner", "--role=sampler"]
    first = [words for words in first if words not in compiled]
    assert [words[0] for words in first[:2]] == ["sft", "store"]
    assert sorted(words[0] for words in first) == ["evaluator", "learner", "sampler", "sft", "store"]
    assert all(f"--run={here / 'r'}" in words for words in first)
    assert "jaxroll report r" in capsys.readouterr().out
    assert cli.main(["train", f"--config={SMOKE}", "--run=r"]) == 64
    assert cli.main(["train", "--run=r", "--resume", "--config.schedule.steps=9"]) == 0
    later = calls(here / "r")[len(first) + len(compiled) :]
    assert sorted(words[0] for words in later) == ["evaluator", "learner", "sampler", "store"]
    assert [words for words in later if "--resume" in words] == [], "roles find their state on disk without --resume"
    assert run_dir.load_config(here / "r").schedule.steps == 9


@pytest.mark.process
@pytest.mark.usefixtures("pretended_python")
def test_the_demo_is_always_a_new_run_which_its_link_names(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxroll.report import page

    reported: list[Path] = []
    monkeypatch.setattr(page, "main", lambda path, as_json: reported.append(path))
    for seed in (1, 1, 2):
        assert cli.main(["demo", f"--config={SMOKE}", f"--seed={seed}"]) == 0
        assert (here / "runs" / "demo").resolve() == reported[-1].resolve(), "the link follows"
    made = [path for path in (here / "runs").iterdir() if not path.is_symlink()]
    assert len(made) == len(set(reported)) == 3, "a run was deleted or used again"
    assert [run_dir.load_config(path).run.seed for path in reported] == [1, 1, 2]


GENERATED = [
    # typed after `generate`, the prompts, the options that are not at their default
    ("r hello", ["hello"], {}),
    ("r one --temperature 0.5 two --top-k=3", ["one", "two"], {"temperature": 0.5, "top_k": 3}),
    ("--temperature=0.5 r one", ["one"], {"temperature": 0.5}),
    ("--run=r one two", ["one", "two"], {}),
    ("r --stop=a --stop=b --ignore-eos one", ["one"], {"stop": ["a", "b"], "ignore_eos": True}),
    ("r --max-tokens=5 -- -x --config.run.seed=1", ["-x", "--config.run.seed=1"], {"max_tokens": 5}),
    ("r '-5 plus 3'", ["-5 plus 3"], {}),
]


@pytest.mark.parametrize(("line", "prompts", "changed"), GENERATED, ids=[line for line, *_ in GENERATED])
def test_generate_passes_prompts_and_options_to_its_child(
    line: str, prompts: list[str], changed: dict[str, object], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[RoleArgs, argparse.Namespace]] = []
    module = types.ModuleType("jaxroll.tools.generate")
    module.generate = lambda args, options: seen.append((args, options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxroll.tools.generate", module)
    path = run_dir.create(here / "r", configs.load(SMOKE), [])
    (path / "warm").mkdir()

    def foreground(argv: list[str], env: dict[str, str]) -> int:
        monkeypatch.setattr(cli.lifeline, "bind_from_env", lambda: True)
        return cli.main(argv[3:])

    monkeypatch.setattr(commands, "run_foreground", foreground)
    assert cli.main(["generate", *shlex.split(line)]) == 0
    ((args, options),) = seen
    defaults = vars(cli.parser().parse_args(["generate"]))
    given = {name: value for name, value in vars(options).items() if defaults.get(name, value) != value}
    assert args.run_dir == path and options.prompts == prompts
    assert {name: value for name, value in given.items() if name not in ("run", "prompts")} == changed


@pytest.mark.process
@pytest.mark.usefixtures("pretended_python")
def test_generate_starts_a_child(here: Path) -> None:
    path = run_dir.create(here / "r", configs.load(SMOKE), [])
    (path / "warm").mkdir()
    assert cli.main(["generate", "r", "a prompt", "--top-k=3"]) == 0
    assert calls(path) == [["generate", f"--run={path}", "--top-k=3", "--", "a prompt"]]


@pytest.mark.process
@pytest.mark.usefixtures("pretended_python")
def test_eval_of_a_model_s_folder_takes_the_task_from_a_config(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ROOT / "tests" / "golden" / "qwen3" / "tied"
    assert cli.main(["eval", str(model)]) == 64
    assert f"jaxroll eval {model} --config=FILE" in capsys.readouterr().err
    words = ["--config.task.max_prompt_tokens=48", "--set=heldout", "--json"]
    assert cli.main(["eval", str(model), f"--config={SMOKE}", *words]) == 0
    (run,) = (here / "runs").iterdir()
    config = run_dir.load_config(run)
    assert (config.model.path, config.tokenizer.path, config.tokenizer.kind) == (str(model), str(model), "hf")
    assert calls(run) == [["eval", f"--run={run}", "--set=heldout", "--json"]]


SETS = """
from jaxroll.config import defaults


def get_config():
    config = defaults()
    config.evaluator.sets = {"hard": {"name": "gcd", "items": 2}, "file": {"source": "jsonl", "path": "rows.jsonl"}}
    return config
"""


def test_eval_of_a_run_takes_other_sets_from_a_config(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "sets.py").write_text(SETS)
    path = run_dir.create(here / "r", configs.load(SMOKE), [])
    words = ["eval", "r", "--config=sets.py", "--set=hard"]
    assert cli.main(["eval", "r", f"--config={SMOKE}"]) == 64 and "names no held-out sets" in capsys.readouterr().err
    assert cli.main([*words, "--config.evaluator.every=9", "--config.schedule.alpha=2"]) == 64
    assert "schedule.alpha = 'r': the run has its own" in capsys.readouterr().err
    best = ["learner.keep_best=accuracy", "learner.checkpoint_every=4", "evaluator.every=4"]
    run_dir.create(here / "best", configs.load(SMOKE, best), [])
    assert cli.main(["eval", "best", "--config=sets.py", "--config.evaluator.every=3"]) == 64
    assert "evaluator.every = 3: with learner.keep_best" in capsys.readouterr().err, "valid in the file, not in the run"
    assert cli.main(words) == 64 and "neither checkpoints nor a warm start" in capsys.readouterr().err
    (path / "warm").mkdir()
    assert cli.main(words) == 64 and "evaluator.sets.file.path = " in capsys.readouterr().err
    (here / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(commands, "run_foreground", lambda argv, env: calls.append((argv[3:], env)))
    assert cli.main(words) == 0
    ((argv, env),) = calls
    assert argv == ["eval", f"--run={path}", "--set=hard"]
    found, own = child.given_config(path, env), run_dir.load_config(path)
    assert set(found.evaluator.sets) == {"hard", "file"} and not own.evaluator.sets
    assert dataclasses.replace(found, evaluator=own.evaluator) == own


WITH_RUN = ["train", "sft", "config", "eval", "launch --target=gpu", *cli.ROLES]


@pytest.mark.parametrize("line", WITH_RUN)
@pytest.mark.parametrize("run", ["r", "--run=r", "--run r"])
def test_run_is_positional_and_has_an_alias(line: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    command = line.split()[0]
    monkeypatch.setitem(commands.COMMANDS, command, lambda options: seen.append(options.run))
    for words in (f"{line} {run}", f"{command} {run} {line.removeprefix(command)}"):
        assert cli.main(words.split()) == 0
    assert seen == ["r", "r"]


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


def test_the_suggested_command_works_where_the_shell_does_not_find_jaxroll(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxroll.control import train

    (here / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(here / "bin" / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert train.own_command() == "jaxroll", "the shell finds no command"
    (here / "bin" / "jaxroll").touch(mode=0o755)
    assert train.own_command() == "bin/jaxroll"
    monkeypatch.setenv("PATH", str(here / "bin"))
    assert train.own_command() == "jaxroll"
    assert train.closing_words(130, here / "r", 3.2).endswith("jaxroll train r --resume")
