"""`jaxroll init`: every combination of answers gives a config that `jaxroll config` accepts, or no file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.config.derived import device_processes
from jaxroll.control import cli, preflight, propose
from jaxroll.errors import ConfigError

QWEN = Path(__file__).parents[1] / "golden" / "qwen3" / "tied"
MOE = QWEN.with_name("moe")
ROWS = "".join(f'{{"question": "{n}+1?", "answer": "{n + 1}"}}\n' for n in range(200))
MODELS = ("tiny", str(QWEN), str(MOE))
TASKS = ("spell_backward", "chain_sum", "rows.jsonl")
ANSWERS = ("", *propose.FORMATS)
HARDWARE = ("cpu", "gpu:1", "gpu:2", "gpu:3", "gpu:8", "tpu:1", "tpu:4", "tpu:8")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    return tmp_path


def fault(home: Path, model: str, task: str, answers: str, hardware: str) -> str:
    """The fault of the written config, checked as `jaxroll config` does and on its devices; '' if it has none."""
    propose.write(propose.InitAnswers(model, task, answers, hardware), file := home / "c.py")
    config = configs.load(file, [])
    preflight.check(config)
    file.unlink()
    platform, devices = propose._hardware(hardware)
    if platform != "cpu" and sum(device_processes(config).values()) > devices:
        return f"more devices than {hardware}"
    if config.task.extract != (answers or ("none" if model == "tiny" else "boxed")):
        return f"extract = {config.task.extract}"
    return "a trial file is left" if list(home.glob(".c*")) else ""


@pytest.mark.parametrize("model", MODELS[::2], ids=["tiny", "moe"])
def test_every_answer_gives_a_config_that_is_accepted(home: Path, model: str) -> None:
    for number, hardware in enumerate(HARDWARE):
        assert not fault(home, model, TASKS[number % len(TASKS)], ANSWERS[number % len(ANSWERS)], hardware)


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS, ids=["tiny", "qwen3", "moe"])
def test_so_does_every_combination_of_answers(home: Path, model: str) -> None:
    for task, answers, hardware in itertools.product(TASKS, ANSWERS, HARDWARE):
        assert not fault(home, model, task, answers, hardware)


def test_flags_write_a_commented_config_that_runs_from_its_folder(home: Path) -> None:
    (home / "configs").mkdir()
    argv = ["init", "configs/mine.py", f"--model={QWEN}", "--task=rows.jsonl", "--hardware=gpu:8", "--answers=boxed"]
    assert cli.main(argv) == 0
    source = (home / "configs" / "mine.py").read_text()
    assert '"../rows.jsonl"' in source and source.count("# ") >= 4
    config = configs.load(home / "configs" / "mine.py", [])
    assert (config.task.source, config.task.extract, config.sft.steps) == ("jsonl", "boxed", 0)
    assert Path(config.task.path).samefile(home / "rows.jsonl")
    assert cli.main(argv) == 64, "a file that exists is not replaced"
    assert (home / "configs" / "mine.py").read_text() == source


def test_questions_are_asked_for_what_no_flag_says(home: Path) -> None:
    asked: list[str] = []

    def ask(question: str) -> str:
        asked.append(question)
        return "gpu:2" if "Hardware" in question else ""

    options = cli.parser().parse_args(["init", "a.py", "--model=tiny", "--task=chain_sum"])
    propose.run_init(options, ask)
    assert [question.partition(":")[0] for question in asked] == ["Form of answers", "Hardware"]
    assert "gpu:2" in (home / "a.py").read_text()


def test_an_input_that_ends_and_a_folder_that_is_missing_are_named(home: Path) -> None:
    def ended(question: str) -> str:
        raise EOFError

    with pytest.raises(ConfigError, match=r"--model.*ended before an answer"):
        propose.run_init(cli.parser().parse_args(["init", "a.py"]), ended)
    with pytest.raises(ConfigError, match=r"no/a.py.*cannot be written"):
        propose.run_init(cli.parser().parse_args(["init", "no/a.py"]))


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--model=nowhere", "config.json"), ("--task=spel_backward", "spell_backward"), ("--task=rows.csv", "rows.csv"),
        ("--task=no.jsonl", "no.jsonl"), ("--answers=box", "boxed"), ("--hardware=gpu", "gpu:8"),
        ("--hardware=tpu:0", "tpu:0"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_refused_and_writes_nothing(
    home: Path, capsys: pytest.CaptureFixture[str], flag: str, named: str
) -> None:
    assert cli.main(["init", "a.py", flag]) == 64
    assert named in capsys.readouterr().err and [file.name for file in home.iterdir()] == ["rows.jsonl"]
