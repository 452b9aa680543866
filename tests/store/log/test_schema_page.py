"""docs/store_schema.md is complete: it lists every table and column, and each of its queries runs on a real log."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path

import pytest

from jaxroll.store.log import schema
from tests.harness.store.recorded_log import recorded_run

PAGE = (Path(__file__).parents[3] / "docs" / "store_schema.md").read_text()
QUERIES = re.findall(r"^```sql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> sqlite3.Connection:
    run_dir = tmp_path_factory.mktemp("run")
    asyncio.run(recorded_run(run_dir))
    return sqlite3.connect(f"{(run_dir / 'store.db').absolute().as_uri()}?mode=ro", uri=True)


def test_the_page_has_ten_queries() -> None:
    assert len(QUERIES) == 10


# The answers for an eventful run; a query whose answer must be empty is marked as such on the page.
@pytest.mark.parametrize("query", QUERIES, ids=lambda query: re.sub(r"\W+", " ", query)[:40].strip())
def test_a_query_of_the_page_answers(db: sqlite3.Connection, query: str) -> None:
    rows = db.execute(query).fetchall()
    assert bool(rows) is ("HAVING COUNT(*) > 1" not in query)


def test_what_the_queries_say_of_a_known_run(db: sqlite3.Connection) -> None:
    by_state = dict(db.execute(QUERIES[0]))
    assert by_state == {"ACKED": 2, "CLAIMED": 2, "DEAD": 2, "EXPIRED": 1, "LEASED": 2, "TRIMMED": 2}
    steps = {(step, lineage): rest for step, lineage, *rest in db.execute(QUERIES[5])}
    assert set(steps) == {(0, 0), (1, 0), (2, 1)}
    assert steps[0, 0][:4] == [2, 0.5, 16, 0] and steps[1, 0][:4] == [2, 0.75, 16, 1]
    assert [kind for _, _, kind in db.execute(QUERIES[9])] == ["issued", "leased", "put", "put"]


def test_the_page_has_every_table_and_column_and_nothing_else() -> None:
    empty = sqlite3.connect(":memory:")
    empty.executescript(schema.TABLES)
    names = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
    told = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^### |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert set(told) == {name for (name,) in empty.execute(names)}
    for table, text in told.items():
        columns = {row[1] for row in empty.execute(f"PRAGMA table_info({table})")}
        first_cells = " ".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)) or text
        assert set(re.findall(r"`(\w+)`", first_cells)) >= columns, table
        if "|" in text:
            assert set(re.findall(r"`(\w+)`", first_cells)) == columns, table


def test_the_page_names_the_version() -> None:
    assert f"is the schema's version, {schema.SCHEMA_VERSION}." in PAGE
