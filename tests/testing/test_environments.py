"""`check_environment` and `jaxroll env check`: what keeps the contract passes, what breaks it is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jaxroll.control import cli
from jaxroll.envs import executors
from jaxroll.errors import ConfigError
from jaxroll.records import Message, Task
from jaxroll.testing import environments
from jaxroll.testing.environments import check_environment
from tests.harness.envs import contract_breaking

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
NAME = "tests.harness.envs.contract_breaking:{}"
ROOT = Path(__file__).parents[2]
TASKS = [
    Task(i, (Message("user", f"question {i}"),), "x", json.dumps({"answer": "0", "scorer": "exact"}), i, f"{i:016x}")
    for i in range(2)
]


@pytest.mark.parametrize("name", ["kept", "kept_in_process", "continues"])
def test_an_environment_that_keeps_the_contract_has_no_violations(name: str) -> None:
    assert check_environment(NAME.format(name), tasks=TASKS, episodes=8) == []


@pytest.mark.parametrize(
    ("name", "what", "do"),
    [
        ("exits", "the environment's step raised SystemExit", "raise DataError"),
        pytest.param("raises", "ZeroDivisionError", "a wrong answer is a reward", marks=pytest.mark.soak),
        ("nan", "the reward is nan", "StepResult"),
        pytest.param("mute", "shows nothing to answer", "done=True", marks=pytest.mark.soak),
        pytest.param("surrogate", "lone surrogate", "StepResult", marks=pytest.mark.soak),
        pytest.param("huge", "2097152 characters", "StepResult", marks=pytest.mark.soak),
        ("hangs", "step took longer than 0.2 s", "step_limit_s"),
        pytest.param("scores_badly", "not a finite number", "fix the scorer", marks=pytest.mark.soak),
        pytest.param("misdeclared", "step_limit_s = 'long'", "table of attributes", marks=pytest.mark.soak),
        ("blocks", "it blocks the event loop for", "await instead"),
        ("stray_exit", "left the event loop", "raise DataError"),
        pytest.param("slow_close", "close() took 0.3 s", "return at once", marks=pytest.mark.soak),
        pytest.param(
            "close_raises", "close() raised OSError: cannot be closed", "always succeed", marks=pytest.mark.soak
        ),
        ("close_needs_reset", "close() before any reset raised AttributeError", "cancelled"),
        pytest.param("prompt_by_chance", "two instances show different prompts", "seed", marks=pytest.mark.soak),
        ("by_chance", "the same answers have other consequences", "seed"),
        ("forgets", "a restored instance answers the next step in another way", "random generators"),
        ("large_state", "StepResult.state has N bytes, at most N are kept", "name of a snapshot"),
        ("no_restore", "the environment has no method restore", "return state=None"),
        ("shared", "instances that play at the same time disturb one another", "in the instance"),
        pytest.param("deaf", "a step goes on after it was cancelled", "CancelledError", marks=pytest.mark.soak),
        pytest.param("leaks_threads", "threads leak", "close()", marks=pytest.mark.soak),
        ("leaks_descriptors", "file descriptors leak", "close()"),
        pytest.param("leaks_tasks", "tasks leak", "close()", marks=pytest.mark.soak),
        ("leaks_memory", "memory leaks", "keep nothing"),
    ],
)
def test_violations_of_the_contract_are_named(name: str, what: str, do: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "CANCEL_GRACE_S", 0.2)
    monkeypatch.setattr(environments, "AT_ONCE", 2)
    monkeypatch.setattr(environments, "SLOW_CLOSE_S", 0.2)
    monkeypatch.setattr(environments, "LEAK_BUDGET_S", 10.0)
    found = check_environment(NAME.format(name), tasks=TASKS, episodes=2)
    assert any(what in violation.what and do in violation.do for violation in found), found
    assert all(violation.where for violation in found)


@pytest.mark.parametrize(
    ("part", "most"),
    [
        ("constructions", 9),
        ("resets", 10),
        *(pytest.param("constructions", most, marks=pytest.mark.soak) for most in (0, 2, 3, 4, 5, 7, 8, 10, 20)),
        *(pytest.param("resets", most, marks=pytest.mark.soak) for most in (0, 2, 3, 4, 5, 6, 7, 9, 11, 20)),
    ],
)
def test_an_environment_that_fails_at_any_part_of_the_check_is_a_violation(
    part: str, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parts make 2, 3, 2, 2 and 1 instances; then the leaks are looked for."""
    monkeypatch.setitem(contract_breaking.LEFT, part, most)
    assert cli.main(["env", "check", NAME.format("wears_out"), "--episodes=2"]) == 1
    shown = capsys.readouterr()
    assert ("making the environment raised SystemExit: 3" if part == "constructions" else "worn out") in shown.out
    assert "Traceback" not in shown.err


def test_the_command_prints_violations_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["env", "check", NAME.format("nan"), "--episodes=2"]
    assert cli.main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["environment"] == NAME.format("nan") and found["episodes"] >= 2
    assert {"what", "where", "do", "times"} == set(found["violations"][0])
    assert cli.main(words) == 1
    assert "the reward is nan" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["agentic_frozen_lake", "two_tasks"])
def test_an_environment_of_a_config_plays_its_own_tasks(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "configs" / f"{name}.py"
    assert cli.main(["env", "check", "frozen_lake", f"--config={config}", "--episodes=4"]) == 0
    assert "no violations" in capsys.readouterr().out


@pytest.mark.parametrize(
    "source", ["raise RuntimeError('mine')", "import sys; sys.exit(0)", "import no_such_module", "nothing = 1", "x ="]
)
def test_a_name_that_cannot_be_loaded_ends_with_64(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unloadable_env.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("unloadable_env", None)
    assert cli.main(["env", "check", "unloadable_env:nothing"]) == 64
    assert "task.env = 'unloadable_env:nothing'" in capsys.readouterr().err


def test_a_missing_config_file_is_reported() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        check_environment(NAME.format("kept"), "nowhere.py")
