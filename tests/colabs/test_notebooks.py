"""Every notebook in colabs/ runs from its first cell to its last, and is committed without outputs."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient

from jaxroll import config as configs
from jaxroll.config.rules import Inventory, check_inventory
from jaxroll.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))
LIMIT_S = 360.0
FEWER = {'"sft.steps=140"': '"sft.steps=20"', '"schedule.steps=12"': '"schedule.steps=6"', "else 6": "else 3"}
"""Lengths in the notebook's cells, and those of the test: compilation and starts are the same."""
# A slash that begins an absolute path, not one inside a word, a relative path, an address or a closing tag.
ABSOLUTE_PATH = re.compile(r"(?<![\w./:<>~*-])/[A-Za-z_][\w.-]*/|\b[A-Za-z]:\\\\|\bfile://")


def test_the_notebooks_are_those_in_the_repository() -> None:
    assert [path.name for path in NOTEBOOKS] == ["jaxroll_demo.ipynb"]


@pytest.mark.process
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))  # no kernels and settings of the user
    work = tmp_path / "work"
    work.mkdir()
    notebook = nbformat.read(path, as_version=4)
    for many, few in FEWER.items():
        (cell,) = (cell for cell in notebook.cells if many in cell.source)
        cell.source = cell.source.replace(many, few)
    client = NotebookClient(
        notebook, timeout=LIMIT_S, startup_timeout=120, kernel_name="python3", resources={"metadata": {"path": work}}
    )
    began = time.monotonic()
    asyncio.run(asyncio.wait_for(client.async_execute(), LIMIT_S))
    print(f"{path.name} took {time.monotonic() - began:.0f} s")

    wrong = [output for cell in notebook.cells for output in cell.get("outputs", ()) if output.output_type == "error"]
    assert wrong == []
    pages = [html for cell in notebook.cells for html in _html(cell)]
    assert any("iframe" in page for page in pages), "the notebook does not show the report"
    (report,) = (work / "runs").glob("*/report.html")
    assert _scale_free(json.loads((report.parent / "run.json").read_text())["config"]) == _scale_free(
        configs.to_dict(configs.load(ROOT / "configs" / "demo.py"))
    ), "the small version differs from the demo in more than its size"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[] for _ in code], "strip the outputs"
    assert {cell.execution_count for cell in code} == {None}, "strip the outputs"
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}, "metadata of an editor"
    assert notebook.metadata.kernelspec.name == "python3"
    paths = [line for cell in notebook.cells for line in cell.source.splitlines() if ABSOLUTE_PATH.search(line)]
    assert paths == []


@pytest.mark.parametrize(
    "line", ['open("/home/me/x")', "cd /content/jaxroll", "--run=/tmp/x", r"C:\\Users", "file://x/y"]
)
def test_absolute_paths_are_found(line: str) -> None:
    assert ABSOLUTE_PATH.search(line)


@pytest.mark.parametrize(
    "line", ["runs/demo", "git+https://HOST/OWNER/REPOSITORY", "<b>x</b>", "a / b / c", "docs/metrics.md", "../x/y"]
)
def test_other_slashes_are_not_absolute_paths(line: str) -> None:
    assert not ABSOLUTE_PATH.search(line)


def _scale_free(config: dict) -> dict:
    """The keys of a config in which the notebook's small version must equal the demo."""
    roles = {role: config[role]["mesh"] for role in ("learner", "sampler", "evaluator")}
    return roles | {"alpha": config["schedule"]["alpha"], "task": config["task"]["name"], "channel": config["transfer"]}


def _html(cell: nbformat.NotebookNode) -> list[str]:
    return [output["data"]["text/html"] for output in cell.get("outputs", ()) if "text/html" in output.get("data", {})]


def test_without_an_installation_or_an_address_the_notebook_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # the cell sets it
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: commands.append([str(word) for word in command]))
    cell = next(cell for cell in nbformat.read(NOTEBOOKS[0], as_version=4).cells if cell.id == "install")
    shell = InteractiveShell()

    shell.user_ns["REPOSITORY"] = ""
    result = shell.run_cell(cell.source)
    shown = capsys.readouterr().out.strip()
    assert not result.success and not commands, "the cells after it must not run"
    assert shown.startswith("JaxRoll is not installed") and "REPOSITORY" in shown and len(shown.splitlines()) == 1

    shell.user_ns["REPOSITORY"] = "https://HOST/OWNER/jaxroll"
    assert shell.run_cell(cell.source).success
    assert [command[:2] for command in commands] == [["git", "clone"], [sys.executable, "-m"]]
    commands.clear()
    shell.user_ns["REPOSITORY"] = ""
    (tmp_path / "jaxroll_checkout").mkdir()
    assert shell.run_cell(cell.source).success
    assert commands[0][-1] == "jaxroll_checkout[envs]", "an uploaded checkout is installed"


@pytest.mark.parametrize("full", [False, True])
def test_the_notebook_fits_one_chip_or_gpu_with_that_accelerator(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = next(
        cell.source for cell in nbformat.read(NOTEBOOKS[0], as_version=4).cells if "ONE_DEVICE = " in cell.source
    )
    one = {"tpu": Inventory("tpu", chips=1), "gpu": Inventory("gpu", gpus=1, gpu_memory_mb=16_000)}
    for accelerator, inventory in one.items():
        names = {"Path": Path, "FULL": full, "ACCELERATOR": accelerator}
        exec(code, names)
        assert names["config"].placement.platform == accelerator
        check_inventory(names["config"], inventory)
    names = {"Path": Path, "FULL": full, "ACCELERATOR": "cpu"}
    exec(code, names)
    with pytest.raises(ConfigError, match="a chip holds one process"):
        check_inventory(names["config"], one["tpu"])
