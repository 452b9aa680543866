"""`jaxroll inspect` shows a live run, a finished run, and one group in full."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jaxroll.clock import ManualClock
from jaxroll.control import cli
from jaxroll.records import Version, VersionRef
from jaxroll.report import inspect, trajectory
from jaxroll.report.formats import Section, plain, safe, show
from jaxroll.report.record import store_pid
from jaxroll.store.core import events as ev
from jaxroll.store.log import database
from jaxroll.store.log.commit_log import Log
from jaxroll.store.server.keeper import Keeper
from tests.harness.run_folder import LogMaker, write_run_file
from tests.harness.store.recorded_log import (
    ALPHABET,
    SETTINGS,
    eventful_history,
    fail,
    lease,
    publish,
    put,
    recorded_run,
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An eventful run, closed; token 4 + i is letter i."""
    path = tmp_path_factory.mktemp("inspected")
    write_run_file(path)
    (path / "alphabet.json").write_text(json.dumps(ALPHABET))
    asyncio.run(recorded_run(path))
    return path


def facts(run_dir: Path, group: int | None = None) -> dict:
    words = ["inspect", str(run_dir), "--json"] + ([] if group is None else [f"--group={group}"])
    with pytest.MonkeyPatch.context() as patch:
        out = io.StringIO()
        patch.setattr("sys.stdout", out)
        assert cli.main(words) == 0
    return json.loads(out.getvalue())


def test_facts_about_a_whole_run(run_dir: Path) -> None:
    found = facts(run_dir)
    assert {row["state"]: row["groups"] for row in found["groups"]} == {
        "LEASED": 2,
        "CLAIMED": 2,
        "ACKED": 2,
        "DURABLE": 2,
        "EXPIRED": 1,
        "DEAD": 2,
    }
    assert [(row["group"], row["member"], row["holder"]) for row in found["leases"]] == [
        (9, 1, "S"),
        (10, 0, "S"),
        (10, 1, "S"),
    ]
    assert all(0 <= row["for_s"] < 600 for row in found["leases"])
    assert [(row["group"], row["done"], row["question"]) for row in found["head"]] == [
        (9, 1, "spell f"),
        (10, 0, "spell j"),
    ]
    assert {(row["state"], row["reason"]) for row in found["ended"]} == {
        ("DEAD", "member 1: 1 DATA failures: scorer raised"),
        ("EXPIRED", "lineage"),
    }
    assert found["failures"]["by_kind"] == {"DATA": 2}
    assert [(row["cause"], row["kind"], row["failures"], row["groups"]) for row in found["failures"]["causes"]] == [
        ("scorer raised", "DATA", 2, 2)
    ]
    assert (found["published"], found["lineage"], found["acked"], found["durable"]) == ("1.2", 1, 2, 1)
    assert [row["fork_step"] for row in found["lineages"]] == [0, 1]
    assert found["conservation_residual"] == 0 and found["closed"] == "enough" and found["store_pid"] is None
    assert found["questions"][0]["mean_reward"] == 0.5
    assert [(row["lineage"], row["step"], row["state"]) for row in found["claims"]] == [
        (1, 2, "in training"),
        (0, 1, "trained"),
        (0, 0, "durable"),
    ]


def test_one_group_in_full(run_dir: Path) -> None:
    found = facts(run_dir, 3)
    assert found["group"]["state"] == "ACKED" and found["claim"]["step"] == 1
    assert found["task"]["messages"] == [{"role": "user", "content": "spell d"}]
    first = found["members"][0]
    assert [(s["source"], s["text"]) for s in first["segments"]] == [("shown", "�d�"), ("model", "dddd")]
    assert first["segments"][1]["logprobs"] == [-1.0, -0.666667, -0.333333, 0.0]
    assert first["reward_parts"] == {"exact": 1.0, "format": 0.5} and first["age"] == 0
    assert first["versions"] == [{"version": "0.1", "tokens": 4}]
    kinds = [event["kind"] for event in found["events"]]
    assert kinds == ["issued", "leased", "put", "put", "claimed", "acked", "began", "acked"]
    assert found["events"][1]["what"] == "S leased member 0 (attempt 1), 1 (attempt 1)"


def test_people_see_questions_and_lists_but_no_hash_and_no_python_value(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sqlite3.connect(run_dir / "store.db") as db:
        groups, hashes = zip(*db.execute("SELECT id, question_hash FROM groups"), strict=True)
    shown = []
    for words in ([], *([f"--group={group}"] for group in groups)):
        assert cli.main(["inspect", str(run_dir), *words]) == 0
        shown.append(capsys.readouterr().out)
    for text in shown:
        found = set(re.findall(r"\w+", text)) & set(hashes)
        assert not found and not re.search(r"members? [\[(]", text), found
    found = facts(run_dir)["questions"]
    assert any(row["question"] for row in found) and all(row["question"][:60] in shown[0] for row in found)


def test_groups_that_died_were_shrunk_or_are_not_there(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = facts(run_dir, 4)
    assert dead["group"]["state"] == "DEAD" and dead["failures"][0]["error"] == "scorer raised"
    assert [e["kind"] for e in dead["events"]][-2:] == ["member_failed", "died"]
    assert cli.main(["inspect", str(run_dir), "--group=99"]) == 64
    assert "Use one of 0 to 10." in capsys.readouterr().err


def test_prompts_that_the_curriculum_skipped_are_among_the_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run_file(tmp_path)
    log = LogMaker()
    log.add(ev.Skipped(4, b"c", 3), ev.Skipped(6, b"d"))
    log.write(tmp_path)
    assert facts(tmp_path)["curriculum_skipped"] == 3
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert re.search(r"SKIPPED +3 .*curriculum did not admit", capsys.readouterr().out)


def test_steps_that_a_fork_gave_up_are_marked(tmp_path: Path) -> None:
    """The group's history ends there: later steps with the same number belong to other groups."""
    write_run_file(tmp_path)

    async def forked() -> None:
        clock = ManualClock()
        kept = Keeper(SETTINGS, Log(tmp_path), clock)
        for _ in eventful_history(kept, clock):
            await kept.log.committed()
        version = kept.decide(ev.Begin("M", Version(1, 2), "again"))
        assert version == Version(2, 2)
        kept.decide(ev.Publish("M", VersionRef(version, "tcp", "here", "d")))
        for key in lease(kept, 6, version, "z"):
            put(kept, key, version)
        kept.decide(ev.ClaimStep("M", 2, 2))
        kept.decide(ev.Ack("M", version))
        await kept.log.close()

    asyncio.run(forked())
    claims = facts(tmp_path)["claims"]
    assert [(row["lineage"], row["step"], row["state"]) for row in claims][:2] == [
        (2, 2, "trained"),
        (1, 2, "given up by lineage 2"),
    ]
    story = facts(tmp_path, 7)
    assert story["group"]["state"] == "EXPIRED"
    assert [event["kind"] for event in story["events"]][-2:] == ["claimed", "expired"]


def test_plain_lines_in_a_pipe_and_tables_on_a_terminal(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "== open leases" in lines
    holder = next(line.split() for line in lines[lines.index("== open leases") :] if line.startswith("S "))
    assert holder[:2] == ["S", "3"] and holder[-3:] == ["9.1,", "10.0,", "10.1"]
    assert any(line.startswith("DEAD") and line.endswith("member 1: 1 DATA failures: scorer raised") for line in lines)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    config = json.loads((run_dir / "run.json").read_text())["config"]
    inspect.main(run_dir, config, group=3, as_json=False, console=console)
    assert "dddd" in out.getvalue() and "\x1b[" in out.getvalue() and "spell d" in out.getvalue()


def test_a_live_run_is_read_without_touching_it(tmp_path: Path) -> None:
    """It is read without the lock while a writer has a transaction open; the lock shows that the store is live."""

    async def live() -> tuple[dict, dict]:
        kept = Keeper(SETTINGS, Log(tmp_path), ManualClock())
        version = kept.decide(ev.Begin("L", None))
        publish(kept, version)
        keys = lease(kept, 4, version, "a", name="sampler-7")
        put(kept, keys[0], version)
        fail(kept, keys[1])
        await kept.log.committed()
        writer = kept.log._connection
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE groups SET state = 'EXPIRED'")
        try:
            with database.transaction(tmp_path) as db:
                found = inspect.facts(tmp_path, db)
                group = trajectory.facts(db, 1, None)
        finally:
            writer.execute("ROLLBACK")
        put(kept, keys[2], version)
        await kept.log.committed()
        await kept.log.close()
        return found, group

    found, group = asyncio.run(live())
    assert found["store_pid"] == os.getpid() and store_pid(tmp_path) is None
    assert found["waits"] == {"sampler-7": "group 1 misses members 0, 1"}
    assert {row["holder"] for row in found["leases"]} == {"sampler-7"} and len(found["leases"]) == 2
    assert [member["state"] for member in group["members"]] == ["leased", "leased"]


def test_a_group_without_its_payloads_names_the_key(tmp_path: Path) -> None:
    asyncio.run(recorded_run(tmp_path, compact_every=3, keep_bytes=0, history_bytes=0))
    with database.transaction(tmp_path) as db:
        found = trajectory.facts(db, 0, None)
    assert found["group"]["state"] == "DURABLE" and found["task"] is None and found["events"] == []
    assert all("keep_trajectories_mb" in member["gone"] and member["tokens"] == 4 for member in found["members"])


def test_without_the_alphabet_tokens_are_shown(run_dir: Path, tmp_path: Path) -> None:
    config = json.loads((run_dir / "run.json").read_text())["config"]
    decode, why = trajectory.decoder(tmp_path, config)
    assert decode is None and "alphabet.json is not there" in why
    with database.transaction(run_dir) as db:
        segments = trajectory.facts(db, 3, None)["members"][0]["segments"]
    assert segments[1]["tokens"] == [7, 7, 7, 7] and "text" not in segments[1]


def test_control_characters_in_model_output_are_escaped() -> None:
    hostile = "\x1b]0;gone\x07\u202eback\r\x9b31m"
    assert safe(hostile) == r"\x1b]0;gone\x07\u202eback\r\x9b31m"
    assert plain(Section("t", ("a", "b"), [("1", "x\ny")]))[2] == r"1  x\ny"
    out = io.StringIO()
    show([Section("t", (), [("model", hostile)], hostile)], Console(file=out, force_terminal=True, width=80))
    assert "gone\x07" not in out.getvalue() and "\r" not in out.getvalue()


def test_no_log_and_a_broken_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run_file(tmp_path)
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "The store makes it when the run starts: jaxroll train" in capsys.readouterr().err
    (tmp_path / "store.db").write_bytes(b"noise " * 2000)
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "store.db" in capsys.readouterr().err
    (tmp_path / "store.db").unlink()
    with sqlite3.connect(tmp_path / "store.db") as db:
        db.execute("PRAGMA user_version = 77")
    db.close()
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "A newer JaxRoll wrote it" in capsys.readouterr().err


def test_resting_and_failing_holders_are_shown(tmp_path: Path) -> None:
    async def broken() -> None:
        kept = Keeper(replace(SETTINGS, infra_retries=100), Log(tmp_path), ManualClock())
        version = kept.decide(ev.Begin("L", None))
        publish(kept, version)
        for key in lease(kept, 4, version, "a", name="actor-3"):
            kept.decide(ev.PutMember(*key, "f", 10, failure=("INFRA", "its scorer is gone")))
        await kept.log.close()

    asyncio.run(broken())
    with database.transaction(tmp_path) as db:
        found = inspect.facts(tmp_path, db)
    assert found["backoff"]["actor-3"]["error"] == "its scorer is gone"
    assert found["unreliable"]["actor-3"] == pytest.approx(0.185, abs=0.01)
    out = io.StringIO()
    write_run_file(tmp_path)
    counts = [("actor-3", 1), ("actor-4", 0), ("actor-3", 2), ("sampler-0", None), ("actor-3", 1)]  # a new process
    rows = [{"kind": "stats", "t": 1.0, "role": role, "scoring_slow": slow} for role, slow in counts]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    inspect.main(tmp_path, {}, group=None, as_json=False, console=Console(file=out, width=200))
    (line,) = [line for line in out.getvalue().splitlines() if "actor-3" in line and "18%" in line]
    assert "its scorer is gone" in line
    (line,) = [line for line in out.getvalue().splitlines() if "scoring worker of" in line]
    assert " ".join(line.split()) == "3 a scoring worker of actor-3 became slow"


MB = 2**20
MEMORY: dict[str, tuple[Callable[[int], int], bool]] = {  # bytes of a role by the second of its life
    "a leak": (lambda s: (1000 + s) * MB, True),
    "a leak with peaks": (lambda s: (1000 + s + 900 * (s % 7 == 0)) * MB, True),
    "an engine that grows as it starts": (lambda s: min(2000, 1000 + 20 * s) * MB, False),
    "one step in the middle": (lambda s: (1000 + 900 * (s > 400)) * MB, False),
    "a little": (lambda s: 1000 * MB + s * MB // 8, False),
    "a short leak": (lambda s: (1000 + 4 * min(s, 300)) * MB, False),
}


@pytest.mark.parametrize(("held", "grows"), MEMORY.values(), ids=MEMORY)
@pytest.mark.parametrize("lives", [1, 2])
def test_a_role_whose_memory_grows_is_named(
    tmp_path: Path, held: Callable[[int], int], grows: bool, lives: int
) -> None:
    write_run_file(tmp_path)
    asyncio.run(recorded_run(tmp_path))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for second in range(800 * lives):
            row = {"t": 1e9 + second, "role": "sampler-0", "kind": "stats", "episodes": second % 800}
            file.write(json.dumps(row | {"resident_bytes": held(second % 800)}) + "\n")
    named = facts(tmp_path)["env_faults"]
    complaint = "sampler-0 holds more and more memory while environments run in it"
    assert (complaint in named) == grows, named
    assert not grows or named[complaint] == lives * 1
