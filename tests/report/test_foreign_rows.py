"""Metrics rows from untrusted processes: every reader of a run skips malformed rows and works with the others.

Rows are drawn from the schema (`jaxroll.metrics.KINDS`), with extreme values preferred among the allowed ones, and from
lines that are not rows.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from msgspec import inspect
from rich.console import Console

from jaxroll import metrics
from jaxroll.control import cli
from jaxroll.control.live import PlainView, TableView
from jaxroll.control.supervisor import ProcessView
from tests.harness.resource_bounds import bounded
from tests.harness.run_folder import STARTED, make_run

TIMES = [0.0, STARTED, STARTED + 40.0, STARTED + 1e6, 1e11]
NUMBERS = [0.0, -0.0, 1.0, 0.5, -3.0, 1e-300, 1e15, 1e100, -1e100, 5e-324]
COUNTS = [0, 1, 2, 7, 60, 2**53]
TEXTS = ["", "decode", "sampler-0", "0.1", "\ud800", "\x1b[2J\u202e<b>", "9" * 40, "end", "0"]
ROLES = ["learner", "sampler-0", "sampler-1", "evaluator", "sft", "metrics"]
NO_ROWS = [
    b"",
    b"{",
    b"[1]",
    b"\xff",
    b"null",
    b'{"kind":"step","step":null}',
    b'{"kind":"step"}',
    b'{"t":NaN}',
    b"[" * 5000,
    b'{"kind":"eval","step":"1"}',
    b'{"t":' + b"9" * 5000 + b"}",
]


def values(kind: Any, name: str = "") -> st.SearchStrategy:
    """Values of a type in msgspec's description."""
    match kind:
        case inspect.FloatType(ge=0, le=le) if le == 1e11:
            return st.sampled_from(TIMES)
        case inspect.FloatType(ge=0):
            return st.sampled_from([0.0, 0.5, 1.0])
        case inspect.FloatType():
            return st.sampled_from(NUMBERS)
        case inspect.IntType():
            return st.sampled_from(COUNTS if kind.ge == 0 else [-(10**400), -1, *COUNTS])
        case inspect.StrType(pattern=pattern) if pattern is not None:
            return st.sampled_from(ROLES) if name == "role" else st.from_regex(pattern, fullmatch=True)
        case inspect.StrType():
            return st.sampled_from(TEXTS)
        case inspect.NoneType():
            return st.none()
        case inspect.UnionType(types=types):
            return st.one_of(*(values(one) for one in types))
        case inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=3)
        case inspect.TupleType(item_types=items):
            return st.tuples(*(values(one) for one in items)).map(list)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case inspect.StructType(fields=fields):
            needed = {one.encode_name: values(one.type, one.name) for one in fields if one.required}
            free = {one.encode_name: values(one.type, one.name) for one in fields if not one.required}
            return st.fixed_dictionaries(needed, optional=free)
        case inspect.AnyType():
            return st.sampled_from([None, 3, "x", [], {"prompt": "\ud800", "text": 3}, {"prompt": []}])
    raise NotImplementedError(kind)


def of_kind(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    return values(inspect.type_info(metrics.KINDS[kind])).map(lambda row: row | {"kind": kind})


ROWS = st.one_of(*map(of_kind, metrics.KINDS))
LINES = st.lists(st.one_of(ROWS.map(lambda row: json.dumps(row).encode()), st.sampled_from(NO_ROWS)), max_size=12)

SOURCE = {
    "kind": "step",
    "role": "learner",
    "step": 7,
    "t": 1.79e9,
    "t0": 1.79e9,
    "t1": 1.79e9,
    "train_s": 1,
    "wait_s": 1,
}
SOURCE |= {"publish_s": 1, "age_hist": {"0": 1}, "sources": {"a": {"tokens": 0.0}}}  # without samples


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """The folder of a run and the bytes of its own rows."""
    path = make_run(tmp_path_factory.mktemp("runs") / "run", steps=6, steps_wanted=6)
    return path, (path / "metrics.jsonl").read_bytes()


# No shrinking: an example takes a fifth of a second, and a dozen lines are few enough to read.
@settings(
    suppress_health_check=[HealthCheck.too_slow],
    deadline=None,
    max_examples=25,
    phases=[Phase.explicit, Phase.generate],
)
@given(lines=LINES, alone=st.booleans())
@example(lines=[json.dumps(SOURCE).encode()], alone=False)
def test_every_reader_works_with_rows_of_strangers(made: tuple[Path, bytes], lines: list[bytes], alone: bool) -> None:
    path, own = made
    (path / "metrics.jsonl").write_bytes((b"" if alone else own) + b"\n".join(lines))
    processes = [ProcessView("learner", "running", 1.0)]
    with bounded(None):
        for words in (["report", str(path)], ["report", str(path), "--json"], ["list", str(path.parent)]):
            assert cli.main(words) == 0
        rows = metrics.RowReader(path / "metrics.jsonl").rows(closed=True)
        plain = PlainView(path, 6, out=io.StringIO())
        table = TableView(path, 6, console=Console(file=io.StringIO(), force_terminal=True, width=100))
        for view in (plain, table):
            view.rows(rows)
            view.tick(processes)
            view.close()


@given(row=ROWS)
def test_the_drawn_rows_are_valid(row: dict[str, Any]) -> None:
    """Otherwise the test above would only show that readers skip them."""
    assert metrics.checked_row(row) is row


def test_a_run_with_malformed_rows_is_listed_or_named_as_unreadable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a", steps=2)
    make_run(tmp_path / "b", steps=2)
    (tmp_path / "b" / "metrics.jsonl").unlink()
    (tmp_path / "b" / "metrics.jsonl").mkdir()
    assert cli.main(["list", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "/a " in out and "/b" not in out and "/b/metrics.jsonl" in err
    assert "metrics.jsonl" in err
