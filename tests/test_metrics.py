"""Rows of metrics: written whole, and read while they grow, also after a writer was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll import metrics

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(max_size=4).filter(lambda name: name not in ("t", "kind", "role"))  # which have a form of their own
ROWS = st.lists(st.dictionaries(NAMES, VALUES, max_size=4), max_size=6)

# One row of each kind with what it must have, and fields of that kind with values that it must not have.
GOOD: dict[str, dict[str, Any]] = {
    "step": {"step": 3, "t0": 1.0, "t1": 2.0, "train_s": 1.0, "wait_s": 0.0, "publish_s": 0.1, "age_hist": {"0": 9}},
    "eval": {"step": 3, "n": 2, "correct": "1-0", "accuracy": None},
    "stats": {}, "span": {"what": "decode", "t0": 1.0, "t1": 2.0}, "members": {"rows": [[1, 0, 1.0, 2.0, 9]]},
    "store": {}, "compile": {"what": "the step", "state": "end"}, "devices": {}, "warm": {},
    "restart": {"process": "sampler-0"}, "event": {"text": ""},
    "profile": {"request": "r", "state": "ended", "steps": 3},
}  # fmt: skip
HUGE = 10**400
BAD: dict[str, dict[str, list[Any]]] = {
    "step": {
        "step": [None, "3", -1, 1.5, True, HUGE],
        "t0": [None, "now", -1.0, 1e300, HUGE],
        "train_s": [None, [1.0]],
        "age_hist": [None, [], {"old": 1}, {"0": None}],
        "groups": [3, [[1]], [None]],
        "lineage": ["0"],
        "by_age": [[], {"0": 1.0}, {"0": {"ess": "x"}}],
        "reward_mean": ["x", {}, float("inf"), HUGE],
    },
    "eval": {"accuracy": [-0.1, 1.1, "all"], "correct": [None, "10x", [1, 0]], "n": [None], "examples": ["x", 3]},
    "stats": {"tokens_per_s": ["fast"], "members_aborted": [-1, 0.5], "version": [{"step": 1}]},
    "span": {"what": [None, 3, []], "t1": [None], "version": [[1]]},
    "members": {"rows": [None, [1], [[1, 0, 1.0]], [[[1], 0, 1.0, 2.0, 9]]]},
    "store": {
        "waits": ["x", {"learner": None}],
        "lengths": [{}, {"trained": [1], "lost": [0, 0]}],
        "in_flight_window": ["x"],
    },
    "compile": {"seconds": ["x"], "what": [None]},
    "devices": {"mesh": [3], "attention": ["xla"]},
    "restart": {"process": [None, []]},
    "event": {"text": [None, 3]},
    "profile": {"request": [None, 3], "steps": [-1, 0.5], "seconds": ["long"], "reason": [3]},
}


@given(ROWS)
def test_a_written_file_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[dict]) -> None:
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    tracker = metrics.JsonlTracker(path)
    tracker.log_all(rows)
    tracker.close()
    assert metrics.read(path) == rows


@given(ROWS, st.lists(st.integers(1, 40), max_size=30))
def test_follower_sees_every_row_once_for_any_split_of_writes(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    data = "".join(metrics.dumps(row) + "\n" for row in rows).encode()
    follower, seen = metrics.RowReader(path), []
    seen += follower.rows()  # no file yet
    while data:
        size = cuts.pop() if cuts else len(data)
        with path.open("ab") as file:
            file.write(data[:size])
        data = data[size:]
        seen += follower.rows()
    assert seen == rows and follower.skipped == 0


@pytest.mark.parametrize("kind", metrics.KINDS)
def test_rows_with_fields_of_another_form_are_refused(kind: str) -> None:
    row = {"t": 1.0, "role": "learner", "kind": kind, **GOOD[kind]}
    assert metrics.checked_row(row) is row
    assert metrics.checked_row(row | {"further": [{"x": HUGE}]}) is not None
    wrong = BAD.get(kind, {}) | {"t": [None, "now", -1.0, HUGE], "role": [None, 3, "", "a/b", "x" * 100]}
    for name, values in wrong.items():
        for value in values:
            assert metrics.checked_row(row | {name: value}) is None, (name, value)
    for name in ("t", "role", *GOOD[kind]):
        assert metrics.checked_row({key: row[key] for key in row if key != name}) is None, name


@pytest.mark.parametrize("row", [None, 3, "x", [], [{"t": 1.0}], {"t": "now"}, {"kind": []}, {"kind": 3}, {"role": {}}])
def test_a_malformed_row_is_refused(row: object) -> None:
    assert metrics.checked_row(row) is None


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"9" * 10_000 + b"}", b'{"a": "\xff"}']
)
def test_lines_that_the_json_reader_cannot_take_are_skipped(line: bytes) -> None:
    assert metrics.loads(line) is None


def test_numbers_json_has_no_word_for_become_null_and_numpy_becomes_plain() -> None:
    row = {"loss": float("nan"), "best": np.float32("inf"), "n": np.int64(3), "hist": np.arange(2), "b": np.bool_(True)}
    assert json.loads(metrics.dumps(row)) == {"loss": None, "best": None, "n": 3, "hist": [0, 1], "b": True}


def test_next_writer_starts_on_a_fresh_line_after_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2, "b')
    tracker = metrics.JsonlTracker(path)
    tracker.log({"a": 3})
    tracker.close()
    follower = metrics.RowReader(path)
    assert follower.rows() == [{"a": 1}, {"a": 3}]
    assert follower.skipped == 1


def test_reader_skips_invalid_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'[1]\n\n\xff\xfe\n{"a": 1}\nnull\n{"a": 2}')
    assert metrics.read(path) == [{"a": 1}, {"a": 2}]  # a closed file's last line may lack its newline
    assert metrics.RowReader(path).rows() == [{"a": 1}]  # a growing file's may not


def test_follower_starts_again_when_the_file_shrinks_or_is_replaced(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    path.write_text('{"a": 1}\n{"a": 2}\n{"to')
    follower = metrics.RowReader(path)
    assert len(follower.rows()) == 2
    path.write_text('{"a": 3}\n')
    assert follower.rows() == [{"a": 3}]
    other.write_text('{"a": 4}\n{"a": 5}\n')
    other.replace(path)
    assert follower.rows() == [{"a": 4}, {"a": 5}]


def test_follower_at_the_end_sees_only_what_comes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n')
    follower = metrics.RowReader(path, at_end=True)
    assert follower.rows() == []
    with path.open("a") as file:
        file.write('{"a": 2}\n')
    assert follower.rows() == [{"a": 2}]


@pytest.mark.process
def test_writers_in_several_processes_never_split_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from jaxroll.metrics import JsonlTracker; t = JsonlTracker(sys.argv[1])\n"
        "for i in range(200): t.log({'who': sys.argv[2], 'i': i, 'text': 'x' * (i * 37 % 5000)})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), who]) for who in "abc"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    follower = metrics.RowReader(path)
    rows = follower.rows()
    assert follower.skipped == 0
    for who in "abc":
        assert [row["i"] for row in rows if row["who"] == who] == list(range(200))


def test_tensorboard_events_hold_the_scalars_of_known_kinds(tmp_path: Path) -> None:
    tracker = metrics.TensorBoardTracker(tmp_path / "tb")
    tracker.log(
        {
            "role": "learner",
            "kind": "step",
            "step": 7,
            "t": 12.0,
            "loss": 0.5,
            "note": "x",
            "ok": True,
            "by_age": {"2": {"ess": 0.25, "reward": None}},
            "age_hist": {"2": 9},
        }
    )
    tracker.log({"role": "sampler-0", "kind": "stats", "t": 13.0, "tokens_per_s": 100})
    tracker.log({"role": "sampler-0", "kind": "span", "t0": 1.0, "t1": 2.0, "tokens": 5})
    tracker.close()
    (file,) = (tmp_path / "tb").iterdir()
    assert _scalars(file) == {
        ("learner/step/loss", 7): 0.5,
        ("learner/step/by_age/2/ess", 7): 0.25,
        ("sampler-0/stats/tokens_per_s", 1): 100.0,
    }


def _scalars(file: Path) -> dict[tuple[str, int], float]:
    """The scalars of an event file, read by tensorboardX's own record format and protocol buffers."""
    import struct

    from tensorboardX.proto.event_pb2 import Event

    found, data = {}, file.read_bytes()
    while data:
        (size,) = struct.unpack_from("<Q", data)
        event = Event.FromString(data[12 : 12 + size])
        data = data[12 + size + 4 :]
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return found


@pytest.mark.parametrize("accuracy", [0.5, None])
def test_an_evaluation_by_set_and_source_is_a_valid_row(accuracy: float | None) -> None:
    figures = {"a": {"accuracy": accuracy, "n": 4}}
    row = {"t": 1.0, "role": "evaluator", "kind": "eval", "step": 0, "n": 1, "correct": "1", "accuracy": 1.0}
    assert metrics.checked_row(row | {"sets": figures, "sources": figures}) is not None
    assert metrics.checked_row(row | {"sets": {"a": {"accuracy": 2.0, "n": 4}}}) is None
