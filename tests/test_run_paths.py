"""Names of the files in a run's folder: written in `jaxroll/run_paths.py` only, and documented."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from jaxroll import run_paths
from jaxroll.run_paths import RunPaths

PACKAGE = Path(run_paths.__file__).parent
DOCS = PACKAGE.parent / "docs" / "run_folder.md"


def names() -> dict[str, str]:
    """Property of RunPaths by the name in the folder."""
    properties = [name for name, value in inspect.getmembers(RunPaths) if isinstance(value, property)]
    return {getattr(RunPaths(Path("run")), name).name: name for name in properties}


def literals(source: str) -> Iterator[str]:
    """String literals that name a file of the run: `folder / "warm"`, or a whole literal such as "run.json"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            yield node.right.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield node.value


def test_files_of_a_run_are_its_own_also_behind_links_and_links_in_a_loop_are_no_error(tmp_path: Path) -> None:
    run, link = RunPaths(tmp_path / "run"), tmp_path / "link"
    run.folder.mkdir()
    run.metrics.symlink_to(run.metrics.name)
    link.symlink_to(run.folder)
    assert run.owns(run.metrics) and run.owns(link / run.database.name)
    assert not run.owns(tmp_path / "table.parquet")


def test_every_name_is_written_in_one_file() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {name!r} is RunPaths.{names()[name]}"
        for path in PACKAGE.rglob("*.py")
        for name in literals(path.read_text(encoding="utf-8"))
        if name in names() and path.name != "run_paths.py"
    }
    assert not found, "\n".join(sorted(found))


def test_both_forms_of_a_literal_are_found() -> None:
    assert set(literals('path = run_dir / "warm"\nNAME, kind = "run.json", "checkpoints"\n')) == {"warm", "run.json"}


def test_the_page_of_the_run_folder_names_every_file() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert not [name for name in names() if f"`{name}" not in text]
