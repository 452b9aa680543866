"""Tests, files, links, commands and config keys that README.md and docs/ name exist, and their code works."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import difflib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll.algorithms import registry as algorithms
from jaxroll.algorithms.advantages import Tokens
from jaxroll.config import TaskConfig
from jaxroll.config.derived import ESTIMATORS, PRESETS
from jaxroll.control import commands, preflight
from jaxroll.data import preparation
from jaxroll.envs import registry
from jaxroll.envs.executors import EnvironmentCalls, Executors
from jaxroll.protocols import StepResult
from jaxroll.records import Message, Task
from jaxroll.report import record, summary
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.run_paths import RunPaths
from jaxroll.store.core.state import State, counts
from tests.docs.blocks import blocks
from tests.harness import http_engine
from tests.test_floors import ROOMS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALGORITHMS = ROOT / "docs" / "algorithms.md"
ENVIRONMENT = ROOT / "docs" / "add_an_environment.md"
PROMPTS = ROOT / "docs" / "prompts.md"
DESIGN, CONTRACT = ROOT / "docs" / "design.md", ROOT / "docs" / "store_contract.md"
USES = {"no": "none", "no devices": "no backend", "yes": "any"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_link_targets_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)|(?:src|srcset)=\"([^\":]+)\"", page.read_text())
    missing = [target for pair in targets for target in pair if target and not (page.parent / target).exists()]
    assert missing == []


@pages
def test_links_to_sections_lead_to_a_heading(page: Path) -> None:
    lost = []
    for target, section in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        text = (page.parent / target if target else page).read_text()
        if section not in {_slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}:
            lost.append(f"{target}#{section}")
    assert lost == []


def _slug(heading: str) -> str:
    """The name of a heading in links, on GitHub as on the site."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:tests|configs|launch|jaxroll|docs|colabs)/[\w./-]+)", page.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pages
def test_tests_that_are_named_exist(page: Path) -> None:
    lost = [(file, test) for file, test in _tests_in(page.read_text()) if test not in _functions(ROOT / file)]
    moved = [f"{file}::{test} is now perhaps {_likely_name(file, test)}" for file, test in lost]
    assert moved == [], f"tests were renamed or moved: write their new names into {page.relative_to(ROOT)}"


@pages
def test_commands_that_are_named_exist(page: Path) -> None:
    lines = re.findall(r"(?:^|`)jaxroll ([a-z][a-z-]*)\b", page.read_text(), re.MULTILINE)
    assert set(lines) <= set(commands.COMMANDS), sorted(set(lines) - set(commands.COMMANDS))


def test_the_page_of_commands_has_every_command() -> None:
    words = re.findall(r"`(?:jaxroll )?([a-z][a-z-]*)\b", (ROOT / "docs" / "commands.md").read_text())
    assert set(commands.COMMANDS) <= set(words)


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`(?:[A-Z]+=\S+ )?make ([a-z]+)", page.read_text())}
    assert named and named <= targets


@pages
def test_config_keys_that_are_named_exist(page: Path) -> None:
    """Write in backticks `section.key`, as in `schedule.alpha`; `section.*` and `section.key=value` count too."""
    known = _keys(configs.to_dict(configs.parse(configs.defaults())))
    sections = {key.partition(".")[0] for key in known}
    text = page.read_text().partition("\n## Renamed keys\n")[0]  # generated, and tested with the table in the code
    named = re.findall(r"`([a-z]+)\.(\w[\w.]*)(?:=[^`]*)?`", text)
    unknown = {f"{section}.{key}" for section, key in named if section in sections} - known
    unknown -= {name for name in unknown if name.rpartition(".")[2] in ("db", "addr", "json", "py", "lock")}
    assert unknown == set(), f"{page.name} names config keys that do not exist"


def _keys(tree: dict[str, Any], prefix: str = "") -> set[str]:
    """The dotted names of all keys in `tree`, inner ones included."""
    keys = set()
    for name, value in tree.items():
        keys |= {prefix + name} | (_keys(value, f"{prefix}{name}.") if isinstance(value, dict) else set())
    return keys


# --- README, guarantees, glossary


def test_the_readme_is_short_and_shows_a_curve_early() -> None:
    text = README.read_text()
    assert len(text.split()) <= 900
    assert "learning_curve.svg" in "\n".join(text.splitlines()[:40])


def test_every_guarantee_names_its_test_or_command() -> None:
    rows = [line for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| property")]
    assert len(rows) > 70
    assert [row for row in rows if not re.search(r"`(tests/|make |jaxroll )[^|]*\|$", row)] == []


def _is_soak(test: str) -> bool:
    """True if every case of `test` is marked `soak`, by a decorator or for the whole file."""
    path, _, name = test.partition("::")
    for node in ast.parse((ROOT / path).read_text()).body:
        marks: list[ast.expr] = []
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks = node.value.elts if isinstance(node.value, ast.List) else [node.value]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            marks = node.decorator_list
        if any(ast.unparse(mark) == "pytest.mark.soak" for mark in marks):
            return True
    return False


@pytest.mark.parametrize("page", ["guarantees", "faults"])
def test_a_test_that_make_test_leaves_out_is_marked(page: str) -> None:
    for row in (ROOT / "docs" / f"{page}.md").read_text().splitlines():
        left_out = [test for test in re.findall(r"`(tests/[\w/]+\.py::\w+)`", row) if _is_soak(test)]
        assert not left_out or "soak" in row, f"{page}.md does not say that {left_out} run with make soak only"


def test_terms_of_the_glossary_are_those_of_the_code() -> None:
    """Each name in the last column is an identifier or a config key in jaxroll/, each term of one word occurs there."""
    code = "\n".join(path.read_text() for path in sorted((ROOT / "jaxroll").rglob("*.py")))
    keys = _keys(configs.to_dict(configs.parse(configs.defaults())))
    rows = [row.split(" | ") for row in (ROOT / "docs" / "glossary.md").read_text().splitlines() if " | `" in row]
    assert 15 < len(rows) < 40
    for term, _, names in rows:
        word = term.removeprefix("| ")
        missing = [] if re.search(rf"\b{re.escape(word)}s?\b", code, re.IGNORECASE) else [word]
        for name in re.findall(r"`([\w.]+)`", names):
            missing += [] if name in keys or re.search(rf"\b{re.escape(name)}\b", code) else [name]
        assert missing == [], f"the glossary's row {word!r} has terms that the code does not use"


def test_the_floors_of_the_design_are_those_in_force() -> None:
    section = DESIGN.read_text().partition("## Packages and floors")[2].partition("\n## ")[0]
    told = {}
    for floor, names, jax_use in re.findall(r"^\| (\d) \| (`.*?) \|.*\| ([\w ]+) \|$", section, re.MULTILINE):
        told |= {name: (int(floor), USES[jax_use]) for name in re.findall(r"`(\w+)`", names)}
    rooms = {name: (room.floor, room.jax) for name, room in ROOMS.items() if (ROOT / "jaxroll" / name).is_dir()}
    modules = {name: (room.floor, room.jax) for name, room in ROOMS.items() if (ROOT / f"jaxroll/{name}.py").exists()}
    assert told == rooms | {name: use for name, use in modules.items() if name != "__main__"}


def test_the_states_of_the_contract_are_those_of_the_store() -> None:
    (diagram,) = blocks(CONTRACT, "text")
    assert set(re.findall(r"[A-Z]{4,}", diagram.text)) == set(counts(State()))


# --- pages with code and tables of names


def test_every_figure_of_the_report_is_defined(tmp_path: Path) -> None:
    config = configs.to_dict(configs.parse(configs.defaults()))
    (tmp_path / "run.json").write_text(json.dumps({"config": config}))
    figures = summary.summary(record.load(tmp_path))
    text = (ROOT / "docs" / "metrics.md").read_text().partition("## Figures of the report")[2]
    defined = {
        name for line in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
    }
    assert defined == set(figures)


def test_the_readme_trains_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config with environment and algorithm passes the preflight; reward and loss are those of the text."""
    environment, algorithm, config_file = _python(README)
    for name, text in (("shorter", environment), ("plain", algorithm), ("mine", config_file)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    config = configs.load(tmp_path / "mine.py", [])
    preflight.check(config)
    task = Task(0, (Message("user", "sun"),), config.task.env, "{}", 0, "h")
    env, calls = Executors(ScoringPool(1), config).create(task.env), EnvironmentCalls()

    async def play(answer: str) -> StepResult:
        assert await calls.reset(env, task) == task.messages
        return await calls.step(env, answer)

    assert [asyncio.run(play(answer)).reward for answer in ("nus", "too long")] == [1.0, 0.0]
    one = jnp.ones((1, 1), jnp.float32)
    given = Tokens(-one, -one, -2 * one, 0 * one, 0.5 * one, one > 0, one.astype(int))
    objective = algorithms.build(config.learner).objective
    grad = jax.grad(lambda x: objective(given._replace(logprob=x)).loss.sum())(-one)
    np.testing.assert_allclose(-grad, np.exp(1.0) * 0.5 * one, rtol=1e-5)


def test_the_rows_of_the_page_are_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of the page run one after the other; they assert what the text states."""
    pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for text in _python(PROMPTS):
        exec(text, names)
        if "get_config" in names:
            names["config"] = names.pop("get_config")()
            configs.parse(names["config"])
    configs.parse(names["config"])


@pytest.mark.process
def test_the_environment_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, config_file, check, _, _ = _python(ENVIRONMENT)
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
    """The teacher wins, its replies are those of the environment, and the whole config passes the preflight."""
    _, _, _, module, config_file = _python(ENVIRONMENT)
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

    for task, said in preparation.examples(config, 50):
        answers = [message.content for message in said if message.role == "assistant"]
        heard, result = asyncio.run(play(task, answers))
        assert (result.done, result.reward, result.reward_parts) == (True, 1.0, {"guesses": float(len(answers))})
        assert heard == [message.content for message in said if message.role == "user"]
        env = registry.create(task.env, ScoringPool(1), config.task)
        env.reset(task, 0)
        getattr(env, "restore")(b"6")  # noqa: B009 - optional in the protocol
        assert env.step(answers[-1]).reward_parts == {"guesses": 7.0}
        heard, result = asyncio.run(play(task, ["1x", "²", ""]))
        assert heard == ["?"] * 3 and not result.done


def test_the_algorithm_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is accepted, its loss and its credit assignment are the formulas of the page."""
    module, config_file = _python(ALGORITHMS)
    (tmp_path / "asymmetric.py").write_text(module)
    (tmp_path / "asymmetric_config.py").write_text(config_file)
    monkeypatch.syspath_prepend(tmp_path)
    config = configs.load(tmp_path / "asymmetric_config.py", [])
    made = algorithms.build(config.learner)
    one = jnp.ones((1, 1), jnp.float32)
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


def test_the_client_of_the_page_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(ROOT / "docs" / "serving.md", "python")
    monkeypatch.chdir(tmp_path)
    run = RunPaths(tmp_path / "runs" / "demo")
    run.folder.mkdir(parents=True)
    run.http_token.write_text(http_engine.TOKEN + "\n")

    async def answer() -> None:
        async with http_engine.served(http_engine.Engine("hi")) as (url, _):
            run.http_address("sampler-0").write_text(url + "\n")
            names: dict[str, Any] = {"print": lambda *words: printed.append(words)}
            await asyncio.to_thread(exec, block.text, names)
            names["client"].close()

    printed: list[tuple] = []
    asyncio.run(asyncio.wait_for(answer(), 60))
    text, of = http_engine.TEXT, lambda version: [{"version": version, "count": 1}]
    first, second = text.encode("hi")
    assert printed == [("h", [first], of("0.1")), ("i", [second], of("0.2")), (None, [text.eos_id], of("0.2"))]


def test_every_algorithm_and_every_key_of_it_has_its_place_in_the_page() -> None:
    fields = [field.name for field in dataclasses.fields(configs.LearnerConfig)]
    keys = fields[fields.index("algorithm") : fields.index("kl_estimator") + 1]
    assert _first_words(ALGORITHMS, "Available algorithms") == set(PRESETS)
    assert _first_words(ALGORITHMS, "Advantages") == {*ESTIMATORS, "best_worst"}
    assert _first_words(ALGORITHMS, "Keys") == set(keys)


def _first_words(page: Path, section: str) -> set[str]:
    """The words in inline code in the first column of a section's table, without its head."""
    text = page.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    words = {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}
    return words - {"learner"}


def _python(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return [block.text for block in blocks(page, "python")]


def _tests_in(text: str) -> list[tuple[str, str]]:
    """Files and functions of the tests that a page names as `tests/FILE.py::FUNCTION`."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)", text)


def _functions(path: Path) -> set[str]:
    """Names of the functions in a file; empty where there is no file."""
    if not path.exists():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if _is_function(node)}


def _likely_name(file: str, test: str) -> str:
    """The test that `file::test` may have become: the same name in another file, else the most similar name."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if test in _functions(path):
            return f"{path.relative_to(ROOT)}::{test}"
    similar = difflib.get_close_matches(test, sorted(_functions(ROOT / file)), n=1, cutoff=0.4)
    return f"{file}::{similar[0]}" if similar else "gone"


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
