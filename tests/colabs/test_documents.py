"""What README.md and docs/ say exists, exists: tests, files, links, commands, and the code in them works."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll.algorithms import registry as algorithms
from jaxroll.algorithms.tokens import Tokens
from jaxroll.config import TaskConfig
from jaxroll.config.presets import ESTIMATORS, PRESETS
from jaxroll.control import cli, commands, preflight
from jaxroll.data import tasks
from jaxroll.envs import registry
from jaxroll.envs.executors.choice import Executors
from jaxroll.protocols import StepResult
from jaxroll.records import Message, Task
from jaxroll.report.figures import record, summary
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.rollout.env_calls import EnvironmentCalls

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
ALGORITHMS = ROOT / "docs" / "algorithms.md"
ENVIRONMENT = ROOT / "docs" / "add_an_environment.md"

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)|(?:src|srcset)=\"([^\":]+)\"", page.read_text())
    missing = [target for pair in targets for target in pair if target and not (page.parent / target).exists()]
    assert missing == []


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:tests|configs|launch|jaxroll|docs|colabs)/[\w./-]+)", page.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists() and name != "docs/_build"] == []


@pages
def test_tests_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)", page.read_text())
    for file, test in named:
        functions = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if _is_function(node)}
        assert test in functions, f"{page.name} names {file}::{test}"


def test_the_readme_proves_its_features() -> None:
    features = (ROOT / "README.md").read_text().partition("what proves it")[2].partition("\n## ")[0]
    rows = [line for line in features.splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    unproven = [row for row in rows[1:] if "tests/" not in row and "`make " not in row and "`jaxroll " not in row]
    assert unproven == []


@pages
def test_commands_that_are_named_exist(page: Path) -> None:
    lines = re.findall(r"(?:^|`)jaxroll ([a-z]+)\b", page.read_text(), re.MULTILINE)
    assert set(lines) <= set(commands.COMMANDS), sorted(set(lines) - set(commands.COMMANDS))


def test_command_lines_in_blocks_are_understood() -> None:
    for page in PAGES:
        for line in _blocks(page, ""):
            for words in (text.split() for text in line.splitlines() if text.startswith("jaxroll ")):
                overrides, rest = cli.split_overrides(words[1:])
                _, unknown = cli.parser().parse_known_args(rest)
                assert unknown == [], f"{page.name}: {' '.join(words)}"
                configs.parse(configs.override(configs.to_dict(configs.parse(configs.defaults())), overrides))


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`(?:[A-Z]+=\S+ )?make ([a-z]+)", page.read_text())}
    assert named and named <= targets


def test_every_figure_of_the_report_is_defined(tmp_path: Path) -> None:
    config = configs.to_dict(configs.parse(configs.defaults()))
    (tmp_path / "run.json").write_text(json.dumps({"config": config}))
    figures = summary.summary(record.load(tmp_path))
    text = (ROOT / "docs" / "metrics.md").read_text().partition("## Figures of the report")[2]
    defined = {
        name for line in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
    }
    assert defined == set(figures)


@pytest.mark.process
def test_the_environment_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, config_file, check, *_ = _blocks(ENVIRONMENT, "python")
    (tmp_path / "near_miss.py").write_text(module)
    (tmp_path / "near_miss_config.py").write_text(config_file)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    name = configs.load(tmp_path / "near_miss_config.py", []).task.env
    task = Task(0, (Message("user", "sun"),), name, '{"entry": {"answer": "nuS"}}', 0, "h")

    async def play(answers: list[str]) -> list[tuple[float, dict[str, float]]]:
        pool = ScoringPool(1, libraries=(), modules=registry.scorer_modules(name))
        pool.start()
        try:
            results = []
            for answer in answers:
                env = registry.create(name, pool, TaskConfig())
                assert await env.reset(task, 0) == task.messages
                result = await env.step(answer)
                assert result.done
                results.append((result.reward, result.reward_parts))
                await env.close()
            return results
        finally:
            pool.close()

    names: dict[str, Any] = {}
    exec(check, names)
    names["test_near_miss_keeps_the_contract"]()
    found = asyncio.run(play(["nus", "nun", "", "nusnus"]))
    assert found == [(1.0, {"exact": 1.0}), (2 / 3, {"exact": 0.0}), (0.0, {"exact": 0.0}), (0.5, {"exact": 0.0})]


def test_the_game_of_the_page_is_played_as_it_is_taught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the teacher says wins, its replies are the environment's, and the whole config passes the preflight."""
    *_, module, config_file = _blocks(ENVIRONMENT, "python")
    (tmp_path / "higher.py").write_text(module)
    (tmp_path / "higher_config.py").write_text(config_file)
    monkeypatch.syspath_prepend(tmp_path)
    config = configs.load(tmp_path / "higher_config.py", [])
    preflight.check(config)
    places = Executors(ScoringPool(1), config)

    async def play(task: Task, answers: list[str]) -> tuple[list[str], StepResult]:
        env, asking, heard = places.create(task.env), EnvironmentCalls(), []
        assert await asking.reset(env, task) == task.messages
        for answer in answers:
            result = await asking.step(env, answer)
            heard += [message.content for message in result.messages]
        return heard, result

    for task, said in tasks.examples(config, 50):
        answers = [message.content for message in said if message.role == "assistant"]
        heard, result = asyncio.run(play(task, answers))
        assert (result.done, result.reward, result.reward_parts) == (True, 1.0, {"guesses": float(len(answers))})
        assert heard == [message.content for message in said if message.role == "user"]
        heard, result = asyncio.run(play(task, ["1x", "²", ""]))
        assert heard == ["?"] * 3 and not result.done


def test_the_algorithm_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is accepted, its loss is the formula of the page, and its credit is what the page says."""
    module, config_file = _blocks(ALGORITHMS, "python")
    (tmp_path / "asymmetric.py").write_text(module)
    (tmp_path / "asymmetric_config.py").write_text(config_file)
    monkeypatch.syspath_prepend(tmp_path)
    config = configs.load(tmp_path / "asymmetric_config.py", [])
    made = algorithms.build(config.learner)
    one = np.ones((1, 1), np.float32)
    for reward, beh, want in ((1.0, -3.0, 2.0 * 0.75), (0.0, -3.0, -1.0 * 0.25), (0.0, -1.5, -np.exp(-0.5) * 0.25)):
        advantage = reward - 0.25
        logprob = -2.0 * one
        given = Tokens(logprob, logprob, beh * one, 0 * one, advantage * one, one > 0, one.astype(int))
        grad = jax.grad(lambda x, given=given: made.objective(given._replace(logprob=x)).loss.sum())(logprob)
        np.testing.assert_allclose(-grad, want * one, rtol=1e-5)
    assert made.credit is not None

    class Earned(NamedTuple):
        reward: float
        mask: np.ndarray = one[0] > 0
        turns: tuple = ()

    assert made.credit([[Earned(1.0), *[Earned(0.0)] * 3], [Earned(1.0)]]) == [[0.75, -0.25, -0.25, -0.25], [0.0]]


def test_every_algorithm_and_every_key_of_it_has_its_place_in_the_page() -> None:
    fields = [field.name for field in dataclasses.fields(configs.LearnerConfig)]
    keys = fields[fields.index("algorithm") : fields.index("kl_estimator") + 1]
    assert _first_words(ALGORITHMS, "What there is") == set(PRESETS)
    assert _first_words(ALGORITHMS, "Advantages") == {*ESTIMATORS, "best_worst"}
    assert _first_words(ALGORITHMS, "Keys") == set(keys)


def _first_words(page: Path, section: str) -> set[str]:
    """The words in code of the first column of a section's table, without its head."""
    text = page.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    words = {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}
    return words - {"learner"}


def _blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of the page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
