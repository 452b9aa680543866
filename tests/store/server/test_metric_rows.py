"""Metric rows of callers: readers get no malformed ones, and a caller can only write rows about its own work."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxroll import lifeline
from jaxroll.errors import StoreRefusal
from jaxroll.metrics import KINDS, dumps
from jaxroll.report import record
from jaxroll.store import messages as msg
from jaxroll.store.log import schema

STEP = {
    "t": 1.0,
    "role": "learner",
    "kind": "step",
    "step": 1,
    "t0": 0.0,
    "t1": 1.0,
    "train_s": 1.0,
    "wait_s": 0.0,
    "publish_s": 0.0,
    "age_hist": {"0": 4},
}
STATS = {"t": 1.0, "role": "sampler-0", "kind": "stats", "tokens_per_s": 3.0}
EVENT = {"t": 1.0, "role": "evaluator", "kind": "event", "text": "hello"}


def rows_in(run_dir: Path) -> list[dict]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row.get("kind") != "store" and row.get("what") != "join"]


@pytest.mark.parametrize(
    ("role", "row"),
    [
        ("observer", STEP),
        ("observer", STEP | {"step": None}),
        ("observer", STEP | {"role": "evaluator"}),
        ("observer", STATS),
        ("observer", EVENT | {"role": "learner"}),
        ("sampler", STEP),
        ("sampler", EVENT | {"role": "learner"}),
        ("sampler", EVENT | {"role": "store"}),
        ("sampler", {"t": 1.0, "role": "sampler-0", "kind": "store"}),
        ("learner", STATS),
        ("learner", {"t": 1.0, "role": "learner", "kind": "restart", "process": "sampler-0"}),
    ],
)
def test_a_caller_writes_rows_of_its_own_kinds_and_role_only(
    tmp_path: Path, small: SimpleNamespace, run, role: str, row: dict
) -> None:
    config = small.configured()

    async def talk() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, role) as caller:
            with pytest.raises(StoreRefusal, match=f"right of {role} may not write"):
                await caller.report([{"kind": "mine"}, row])

    run(talk())
    assert rows_in(tmp_path) == []


@pytest.mark.parametrize(
    ("ended", "fact", "words"),
    [
        ("137", {"code": -9}, "was started for a process that ended with -9"),
        ("7", {"code": 7}, "was started for a process that ended with 7"),
        ("its container ended", {"cause": "its container ended"}, "started again (its container ended)"),
    ],
)
def test_roles_that_a_script_has_started_again_report_why(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch, ended: str, fact: dict, words: str
) -> None:
    config = small.configured()
    monkeypatch.setenv(lifeline.ENDED_ENV, ended)

    async def talk() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "learner") as learner:
            await learner.report(lifeline.restarts("learner"))

    run(talk())
    monkeypatch.delenv(lifeline.ENDED_ENV)
    assert lifeline.restarts("learner") == []
    rows = rows_in(tmp_path)
    of_all = {"kind": "restart"} | fact
    assert [{key: row[key] for key in row if key != "t"} for row in rows] == [
        of_all | {"role": role, "process": role} for role in ("store", "learner")
    ]
    assert [record.restart_words(row) for row in rows] == [words] * 2


def test_malformed_rows_are_left_out_and_noted_and_the_caller_goes_on(
    tmp_path: Path, small: SimpleNamespace, run
) -> None:
    config = small.configured()
    bad = [STEP | {"step": None}, STEP | {"step": 1e400}, STEP | {"age_hist": [1]}, {"kind": "step"}, {"kind": 7}]

    async def talk() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "learner") as learner:
            await learner.report([STEP, *bad, STEP | {"step": 2}])

    run(talk())
    assert [row["step"] for row in rows_in(tmp_path)] == [1, 2]
    with sqlite3.connect(tmp_path / "store.db") as db:
        noted = db.execute("SELECT outcome FROM audit WHERE what = 'refused'").fetchall()
    assert len(noted) == 1 and "'step' row lacks a field" in noted[0][0]


def test_reports_that_are_sent_again_are_not_written_again_in_any_order(
    tmp_path: Path, small: SimpleNamespace, run
) -> None:
    """A role has several reports on their way; behind a link that loses replies it sends all of them again."""
    config = small.configured()
    calls = [msg.ReportCall((dumps(STEP | {"step": step}).encode(),), f"request {step}") for step in (1, 2)]

    async def talk() -> None:
        async with small.serving(tmp_path, config):
            for _ in range(2):  # the second time after a reconnect
                async with small.connected(tmp_path, config, "learner") as learner:
                    for call in calls * 2:
                        await learner._call("Report", call, msg.Reported)

    run(talk())
    assert [row["step"] for row in rows_in(tmp_path)] == [1, 2]


def test_every_kind_that_readers_know_has_a_writer() -> None:
    assert set(KINDS) == schema.KNOWN


@pytest.mark.parametrize("line", [b"[1]", b"{", b"\xff", b'{"a":' * 100_000, b"null"])
def test_what_is_no_object_is_refused_with_its_place(line: bytes) -> None:
    with pytest.raises(StoreRefusal, match="row 1 of a report"):
        schema.rows_of([dumps(STEP).encode(), line], "learner")


def test_rows_are_appended_whole_even_after_a_torn_line(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()
    (tmp_path / "metrics.jsonl").write_text('{"kind": "torn')

    async def reports() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "learner") as learner:
            await learner.report([{"loss": np.float32(0.5), "bad": float("nan")}, {"kind": "x"}])
            await learner.report([])

    run(reports())
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == '{"kind": "torn'
    rows = [json.loads(line) for line in lines[1:]]
    assert [row for row in rows if row.get("kind") != "store" and row.get("what") != "join"] == [
        {"loss": 0.5, "bad": None},
        {"kind": "x"},
    ]


def test_a_restarted_store_knows_the_values_by_which_the_best_checkpoint_is_kept(
    tmp_path: Path, small: SimpleNamespace, run
) -> None:
    config = small.configured()
    config = replace(config, learner=replace(config.learner, keep_best="accuracy"))
    row = {"t": 1.0, "role": "evaluator", "kind": "eval", "n": 1, "correct": "1", "lineage": 0}

    async def talk(step: int, value: float) -> list:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "observer") as evaluator:
            await evaluator.report([row | {"step": step, "accuracy": value}, EVENT])
            return (await evaluator.status())["measured"]

    assert run(talk(20, 0.5)) == [[0, 20, 0.5]]
    assert run(talk(40, 0.25)) == [[0, 20, 0.5], [0, 40, 0.25]]
