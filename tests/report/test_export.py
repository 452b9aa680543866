"""`jaxroll export` writes the kept trajectories, row by row, equal to those that were put."""

from __future__ import annotations

import asyncio
import builtins
import json
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from jaxroll import wire
from jaxroll.control import cli
from jaxroll.protocols import Supports
from jaxroll.records import Member, Version
from jaxroll.report import archive, trajectory
from jaxroll.store.log import database
from tests.harness.run_folder import write_run_file
from tests.harness.store.recorded_log import ALPHABET, finished, long_run, recorded_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    write_run_file(path)
    (path / "alphabet.json").write_text(json.dumps(ALPHABET))
    asyncio.run(recorded_run(path))
    return path


def exported(run_dir: Path, *words: str) -> int:
    return cli.main(["export", str(run_dir), *words])


def test_both_files_hold_what_was_put(run_dir: Path, tmp_path: Path) -> None:
    parquet, lines = tmp_path / "t.parquet", tmp_path / "t.jsonl"
    assert exported(run_dir, f"--parquet={parquet}", f"--jsonl={lines}") == 0
    table = pq.read_table(parquet)
    rows = table.to_pylist()
    assert [json.loads(line) for line in lines.read_text().splitlines()] == rows
    assert table.column_names == [name for name, _ in archive.COLUMNS]
    assert sorted((row["group"], row["member"]) for row in rows) == [(row["group"], row["member"]) for row in rows]
    assert len(rows) == 17
    first = next(row for row in rows if (row["group"], row["member"]) == (3, 1))
    wanted = finished((3, 1, 1), Version(0, 1)).outcome
    assert first["tokens"] == np.concatenate([s.tokens for s in wanted.segments]).tolist()  # type: ignore[union-attr]
    assert first["loss_mask"] == [0, 0, 0, 1, 1, 1, 1]
    np.testing.assert_array_equal(
        np.float32(first["logprobs"]),
        np.concatenate([s.logprobs for s in wanted.segments]),  # type: ignore[union-attr]
    )
    assert json.loads(first["reward_parts"]) == {"exact": 1.0, "format": 0.5}
    told = {
        "question": "spell d",
        "answer_text": "dddd",
        "state": "ACKED",
        "claim_step": 1,
        "age_max": 0,
        "finish": "stop",
        "holder": "S",
        "sampled_tokens": 4,
        "versions": '[["0.1", 4]]',
    }
    assert {name: first[name] for name in told} == told
    dead = next(row for row in rows if row["state"] == "DEAD")
    assert dead["claim_step"] is None and dead["age_max"] is None and "DATA" in dead["reason"]


def test_memory_holds_one_row_group(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "ROW_GROUP_BYTES", 4000)
    assert exported(run_dir, f"--parquet={tmp_path / 't.parquet'}") == 0
    file = pq.ParquetFile(tmp_path / "t.parquet")
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    assert sum(sizes) == 17 and max(sizes) <= 4


def test_kept_trajectories_are_exported_and_dropped_ones_are_not(tmp_path: Path) -> None:
    write_run_file(tmp_path)
    asyncio.run(long_run(tmp_path, 8, keep_bytes=3_000, durable_every=2))
    with database.transaction(tmp_path) as db:
        (there,) = db.execute("SELECT COUNT(*) FROM payloads").fetchone()
        (put,) = db.execute("SELECT COUNT(*) FROM members WHERE state = 'done'").fetchone()
        rows = list(archive.rows(db, None))
    assert 0 < len(rows) == there < put
    assert {row["state"] for row in rows} >= {"DURABLE"}
    assert all(row["question"].startswith("spell") for row in rows), "tasks are kept as long as the payloads"


def test_without_pyarrow_the_error_names_the_package_to_install(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    assert exported(run_dir, f"--parquet={tmp_path / 't.parquet'}") == 64
    assert "jaxroll[data]" in capsys.readouterr().err
    assert exported(run_dir, f"--jsonl={tmp_path / 't.jsonl'}") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_broken_log_leaves_no_half_file(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "ROW_GROUP_BYTES", 1)
    copy = shutil.copytree(run_dir, tmp_path / "run")
    with sqlite3.connect(copy / "store.db") as db:
        db.execute("UPDATE payloads SET body = x'c1' WHERE group_id = 6 AND member = 0")
    db.close()
    out = tmp_path / "out"
    out.mkdir()
    assert exported(copy, f"--jsonl={out / 't.jsonl'}") == 1
    assert "`jaxroll replay` says what is wrong" in capsys.readouterr().err
    assert list(out.iterdir()) == []


def test_wrong_arguments_are_refused_and_leave_no_file(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(run_dir) == 64
    assert "--jsonl=FILE" in capsys.readouterr().err
    assert exported(run_dir, f"--jsonl={tmp_path / 'no' / 'such' / 'folder.jsonl'}") == 64
    assert "its folder does not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_supports_of_truncated_sampling_are_in_both_views(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "run")
    with sqlite3.connect(copy / "store.db") as db:
        ((body,),) = db.execute("SELECT body FROM payloads WHERE group_id = 3 AND member = 1")
        member = wire.decode(body, Member)
        shown, sampled = member.outcome.segments  # type: ignore[union-attr]
        own = int(sampled.tokens[0])
        assert set(sampled.tokens.tolist()) == {own}
        ids = np.array([own, 9, own, 8, own, 2], np.int32)
        kept = Supports(np.array([2, 0, 1, 3]), ids).encoded(sampled.tokens)
        segments = (shown, structs.replace(sampled, support=kept))
        outcome = structs.replace(member.outcome, segments=segments)
        changed = wire.encode(structs.replace(member, outcome=outcome))
        db.execute("UPDATE payloads SET body = ? WHERE group_id = 3 AND member = 1", (changed,))
    db.close()
    of_tokens = [sorted([own, 9]), [], [own], sorted([own, 8, 2])]
    parquet = tmp_path / "t.parquet"
    assert exported(copy, f"--parquet={parquet}") == 0
    rows = {(row["group"], row["member"]): row["supports"] for row in pq.read_table(parquet).to_pylist()}
    assert rows.pop((3, 1)) == [[], [], [], *of_tokens], "one list for each token"
    assert set(map(str, rows.values())) == {"None"}
    with database.transaction(copy) as db:
        first, second = trajectory.facts(db, 3, None)["members"]
    assert [segment.get("supports") for segment in second["segments"]] == [None, of_tokens]
    assert not any("supports" in segment for segment in first["segments"])
    (text,) = [value for name, value in trajectory._shown_member(second).rows if name == "supports"]
    assert text == "of 3 tokens, 1 to 3 ids, mean 2"


def test_the_timeline_has_every_activity_and_overlapping_members_on_threads_of_their_own(
    run_dir: Path, tmp_path: Path
) -> None:
    from jaxroll.report import activity, archive

    rows = [
        {"t": 12.0, "role": "sampler-0", "kind": "members",
         "rows": [[0, 0, 10.0, 11.0, 5], [0, 1, 10.5, 12.0, 7], [1, 0, 11.0, 11.5, 3]]},
        {"t": 12.5, "role": "sampler-0", "kind": "stats", "tokens_per_s": 40.0},
        {"t": 13.0, "role": "supervisor", "kind": "restart", "process": "sampler-0"},
    ]  # fmt: skip
    lanes = [activity.Lane("learner", {"train": [(9.0, 10.25)], "wait": []})]
    found = archive.events(rows, lanes)
    slices = {e["name"]: (e["ts"], e["dur"], e["tid"]) for e in found if e["ph"] == "X"}
    assert slices == {
        "train": (0, 1_250_000, 1),
        "0.0": (1_000_000, 1_000_000, 100),
        "0.1": (1_500_000, 1_500_000, 101),
        "1.0": (2_000_000, 500_000, 100),
    }
    assert [(e["ph"], e["ts"]) for e in found if e["ph"] in "iC"] == [("C", 3_500_000), ("i", 4_000_000)]
    assert {e["args"]["name"] for e in found if e["name"] == "process_name"} == {"learner", "sampler-0", "supervisor"}
    assert archive.events([], []) == []

    file = tmp_path / "timeline.json"
    assert exported(run_dir, f"--perfetto={file}") == 0
    assert isinstance(json.loads(file.read_text())["traceEvents"], list)
