"""Every notebook in colabs/ runs from its first cell to its last, and is committed without outputs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
import time
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient

import jaxroll
from jaxroll import config as configs
from jaxroll.config.rules import Inventory, check_inventory
from jaxroll.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))
DEMO = ROOT / "colabs" / "jaxroll_demo.ipynb"
URL = "https://github.com/someone/jaxroll"
QUICK = ("losses_and_corrections", "engine_step_by_step")  # no processes of a run
LIMIT_S = 900.0  # alone on two cores each takes less than 300
# A slash that begins an absolute path, not one inside a word, a relative path, an address or a closing tag.
ABSOLUTE_PATH = re.compile(r"(?<![\w./:<>~*-])/[A-Za-z_][\w.-]*/|\b[A-Za-z]:\\\\|\bfile://")

_spec = importlib.util.spec_from_file_location("notebooks", ROOT / ".ci" / "notebooks.py")
assert _spec is not None and _spec.loader is not None
addresses = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(addresses)

every = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_the_page_lists_the_notebooks_in_the_repository() -> None:
    page = (ROOT / "docs" / "notebooks.md").read_text()
    assert sorted(re.findall(r"\(\.\./colabs/([\w.]+)\)", page)) == [path.name for path in NOTEBOOKS]
    assert len(NOTEBOOKS) == 6


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the kernel, which gets no settings of the user."""
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    made = tmp_path / "work"
    made.mkdir()
    return made


def executed(path: Path, work: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of all its cells, run in the folder `work`; none of them is an error."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=LIMIT_S, startup_timeout=120, kernel_name="python3", resources={"metadata": {"path": work}}
    )
    began = time.monotonic()
    asyncio.run(asyncio.wait_for(client.async_execute(), LIMIT_S))
    print(f"{path.name} took {time.monotonic() - began:.0f} s")
    wrong = [output for cell in notebook.cells for output in cell.get("outputs", ()) if output.output_type == "error"]
    assert wrong == []
    return notebook


@pytest.mark.process
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_notebook_runs_to_its_end(name: str, work: Path) -> None:
    executed(ROOT / "colabs" / f"{name}.ipynb", work)


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(LIMIT_S + 60)
@every
def test_a_notebook_runs_to_its_end(path: Path, work: Path) -> None:
    notebook = executed(path, work)
    if path != DEMO:
        return
    pages = [html for cell in notebook.cells for html in _html(cell)]
    assert any("iframe" in page for page in pages), "the notebook does not show the report"
    (report,) = (work / "runs").glob("*/report.html")
    assert _scale_free(json.loads((report.parent / "run.json").read_text())["config"]) == _scale_free(
        configs.to_dict(configs.load(ROOT / "configs" / "demo.py"))
    ), "the small version differs from the demo in more than its size"


@every
def test_a_notebook_has_the_address_of_the_project_and_the_common_installation(path: Path) -> None:
    assert path.read_text() == addresses.written(path.name, jaxroll.PROJECT_URL), "run python .ci/notebooks.py"
    cells = {cell.id: cell.source for cell in nbformat.reads(addresses.written(path.name, URL), as_version=4).cells}
    link = f"https://colab.research.google.com/github/someone/jaxroll/blob/main/colabs/{path.name}"
    assert f"[Open in Colab]({link})" in cells["title"] and f'REPOSITORY = "{URL}"' in cells["settings"]
    elsewhere = addresses.written(path.name, "https://HOST/someone/jaxroll")
    assert "Open in Colab" not in elsewhere and "https://HOST/someone/jaxroll" in elsewhere


@every
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
    cell = next(cell for cell in nbformat.read(DEMO, as_version=4).cells if cell.id == "install")
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
    assert commands[0][-1] == "jaxroll_checkout[envs,hf]", "an uploaded checkout is installed"


@pytest.mark.parametrize("full", [False, True])
def test_the_notebook_fits_one_chip_or_gpu_with_that_accelerator(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = next(cell.source for cell in nbformat.read(DEMO, as_version=4).cells if "ONE_DEVICE = " in cell.source)
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
