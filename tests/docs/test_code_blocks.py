"""Every code block of README.md, CONTRIBUTING.md and docs/ is run or checked.

python  run: by the test that its page is listed with in RUN_BY, otherwise here, with `config` as the default config
sh      each line is parsed by its program: jaxroll, make, the launch scripts, python -m, sqlite3
sql     the queries of docs/store_schema.md run in tests/store/log/test_schema_page.py
text    output, compared with recorded values
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shlex
import sqlite3
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.control import cli
from jaxroll.report import formats, plots
from jaxroll.store.log import schema
from tests.docs.blocks import ROOT, Block, blocks, pages

# Python blocks that belong together, with the test in `TESTS` that runs all of a page.
RUN_BY = {
    "README.md": "test_the_readme_trains_your_own",
    "docs/add_an_environment.md": "test_the_game_of_the_page_is_played_as_it_is_taught",
    "docs/algorithms.md": "test_the_algorithm_of_the_page_works",
    "docs/serving.md": "test_the_client_of_the_page_is_answered",
    "docs/prompts.md": "test_the_rows_of_the_page_are_prompts",
    "docs/tinker.md": "test_the_client_of_the_page_trains",  # with the SDK, in tests/peers
}
TESTS = ("docs/test_documents.py", "peers/test_tinker.py")
TEXT = ("README.md", "docs/store_contract.md")
BLOCKS = [block for page in pages() for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python" and block.page not in RUN_BY]
LINES = [(block, line) for block in BLOCKS if block.language == "sh" for line in block.lines()]


def test_every_block_has_a_language_with_a_check() -> None:
    unchecked = [block.where for block in BLOCKS if block.language not in ("python", "sh", "sql", "text")]
    unchecked += [b.where for b in BLOCKS if b.language == "sql" and b.page != "docs/store_schema.md"]
    unchecked += [b.where for b in BLOCKS if b.language == "text" and b.page not in TEXT]
    assert unchecked == []
    tests = "".join((ROOT / "tests" / name).read_text() for name in TESTS)
    assert all(f"def {name}(" in tests for name in RUN_BY.values())


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.where)
def test_a_python_block_runs(block: Block) -> None:
    names = {"config": configs.defaults()}
    exec(block.text, names)
    config = names["get_config"]() if "get_config" in names else names["config"]
    assert configs.parse(config) is not None


@pytest.mark.parametrize(("block", "line"), LINES, ids=lambda value: getattr(value, "where", None) or str(value)[:60])
def test_a_line_of_shell_is_understood(block: Block, line: str) -> None:
    words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    match words:
        case ["jaxroll", *rest] | ["ray", "job", "submit", "--working-dir", ".", "--", "jaxroll", *rest]:
            _check_jaxroll(rest)
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case [("launch/tpu_vm.sh" | "launch/gpu.sh") as script, *rest]:
            _check_launch(script, rest)
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module) is not None
        case ["sqlite3", _, query]:
            database = sqlite3.connect(":memory:")
            database.executescript(schema.TABLES)
            assert database.execute(query).description
        case [".", ".venv/bin/activate"] | [".ci/run"]:
            assert words[-1].startswith(".venv") or (ROOT / words[-1]).exists()
        case _:
            pytest.fail(f"{block.where}: no check for this command: {line}")


def _check_jaxroll(words: list[str]) -> None:
    overrides, rest = cli.split_overrides(words)
    options, unknown = cli.parser().parse_known_args(rest)
    assert unknown == [] or options.command in cli.PASSED_ON
    config = configs.override(configs.to_dict(configs.parse(configs.defaults())), overrides)
    configs.parse(config)
    if getattr(options, "config", None) and options.config.startswith("configs/"):
        configs.load(ROOT / options.config, overrides)


def _check_launch(script: str, words: list[str]) -> None:
    """Run the command to which the script hands its words (tests/launch runs the scripts); it starts nothing."""
    assert "--dry-run" in words and (ROOT / script).is_file()
    with contextlib.chdir(ROOT):
        assert cli.main(["launch", f"--target={Path(script).stem}", *words]) == 0


def test_the_output_in_the_readme_is_that_of_the_recorded_run() -> None:
    """The block shows lines of the report on the run of the learning curve; `…` marks lines that are left out."""
    (output,) = (block for block in BLOCKS if block.language == "text" and block.page == "README.md")
    figures = json.loads((ROOT / "benchmarks" / "figures" / "learning_curve.json").read_text())["figures"]
    accuracy = [formats.percent(figures[name]) for name in ("accuracy_start", "accuracy_end")]
    assert [line.split(maxsplit=1 + line.startswith("held-out"))[-1] for line in output.lines() if line != "…"] == [
        " → ".join(accuracy),
        plots.gain_words(figures),
        f"{figures['steps']} of 100",
        f"largest age                       {figures['age_max']}        ≤ {figures['alpha']:g}",
    ]
