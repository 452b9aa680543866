"""JSONL and Parquet files as sources, and files that are not right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxroll.config import TaskConfig
from jaxroll.data import sources
from jaxroll.errors import ConfigError, DataError

ROWS = [
    {"question": "2+2", "answer": "4"},
    {"prompt": "café?", "answer": "yes", "note": "for the reward"},
    {"question": "3*3", "answer": 9},
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> TaskConfig:
    # A blank line in between, and no newline at the end.
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return TaskConfig(source="jsonl", path=str(path))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> TaskConfig:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an optional extra")
    import pyarrow

    columns = ("question", "prompt", "answer", "note")
    table = {name: [str(row[name]) if name in row else None for row in rows] for name in columns}
    parquet.write_table(pyarrow.table(table), path)
    return TaskConfig(source="parquet", path=str(path))


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_rows_are_items_judged_by_exact_match(tmp_path: Path, write: Any) -> None:
    source = sources.open_source(write(tmp_path / "rows", ROWS))
    assert source.size == 3
    assert [source.item(i).question for i in range(3)] == ["2+2", "café?", "3*3"]
    assert [source.item(i).answer for i in range(3)] == ["4", "yes", "9"]
    args = source.item(2).env_args
    assert (args["scorer"], args["answer"], args["row"]["question"]) == ("exact", "9", "3*3")
    assert source.item(1).env_args["row"]["note"] == "for the reward"
    assert source.item(1).compact == "café?"
    assert source.alphabet() == "".join(sorted(set("2+2café?3*34yes9")))
    with pytest.raises(DataError, match="3 rows"):
        source.item(3)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_another_content_is_another_identity(tmp_path: Path, write: Any) -> None:
    one = sources.open_source(write(tmp_path / "a", ROWS)).identity
    assert sources.open_source(write(tmp_path / "b", ROWS)).identity == one
    assert sources.open_source(write(tmp_path / "c", ROWS[:2])).identity != one


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_row_without_an_answer_is_found_at_once(tmp_path: Path, write: Any) -> None:
    with pytest.raises(ConfigError, match="no answer"):
        sources.open_source(write(tmp_path / "rows", [*ROWS, {"question": "1+1"}]))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", ":2"),
        ("[1]", "object"),
        ('{"question": 3, "answer": "4"}', "question"),
        ('{"answer": "4"}', "question"),
        ('{"question": "", "answer": "4"}', "question"),
        ('{"question": "a", "answer": [1]}', "answer"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=reason):
        sources.open_source(TaskConfig(source="jsonl", path=str(path)))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="no rows"):
        sources.open_source(TaskConfig(source="jsonl", path=str(empty)))
    for source in ("jsonl", "parquet"):
        with pytest.raises(ConfigError, match="no such file"):
            sources.open_source(TaskConfig(source=source, path=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="Parquet"):
        sources.open_source(TaskConfig(source="parquet", path=str(empty)))


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"jaxroll\[data\]"):
        sources.open_source(TaskConfig(source="parquet", path=str(tmp_path / "rows")))


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.source"):
        sources.open_source(TaskConfig(source="csv"))  # type: ignore[arg-type]
