"""`benchmarks/faults/chaos.py`: its verdict finds planted violations, its plan is fair, a short attack succeeds."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from jaxroll import wire
from jaxroll.config import TaskConfig
from jaxroll.errors import ConfigError
from jaxroll.records import Message, Task
from jaxroll.rpc import tls
from jaxroll.store.core import events as ev
from jaxroll.store.log import schema

ROOT = Path(__file__).resolve().parents[2]
HOOKS = ROOT / "benchmarks" / "faults" / "hooks"
SOUND = {
    "steps": 40, "steps_wanted": 40, "conservation": 0, "unexplained": [], "lost": [], "trained_twice": [],
    "claims_changed": [], "steps_changed": [], "age_max": 1, "alpha": 0.5, "replay_clean": True,
    "prompts_out_of_order": None, "errors": [], "promises": [],
}  # fmt: skip
PLANTED = {
    "steps": 39, "conservation": 1, "unexplained": [7], "lost": ["member (1, 0, 1)"], "trained_twice": [3],
    "claims_changed": [2], "steps_changed": [2], "age_max": 2, "replay_clean": False,
    "prompts_out_of_order": "prompt 3 is item 9, not 4", "errors": ["`jaxroll report` ended with 1"],
    "promises": ["compiles after warm-up: 2 (0)"],
}  # fmt: skip


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of the benchmarks."""

    def imported(name: str) -> ModuleType:
        return importlib.import_module(name)

    return imported


@pytest.mark.process
def test_every_third_question_is_judged_in_a_process_of_its_own() -> None:
    envs = importlib.import_module("benchmarks.faults.envs")
    task = Task(3, (Message("user", "letters"),), "chaos", "{}", 0, "h")

    async def shown() -> tuple[Message, ...]:
        env = envs.Chaos(None, TaskConfig())
        try:
            found = await env.reset(task, 0)
            await env.close()
        finally:
            for processes in envs._processes.values():
                await processes.close()
        assert len(envs._processes) == 1, "no process was started"
        return found

    assert asyncio.run(shown()) == task.messages


def test_a_sound_run_passes(load) -> None:
    assert load("benchmarks.faults.verdict").violations(SOUND) == []


@pytest.mark.parametrize("key", PLANTED)
def test_each_planted_violation_is_found_and_no_other(load, key: str) -> None:
    assert len(load("benchmarks.faults.verdict").violations(SOUND | {key: PLANTED[key]})) == 1


def database() -> sqlite3.Connection:
    """Group 0 is claimed with member 0, 1 and 3 ended with theirs, 2 was trained with its."""
    db = sqlite3.connect(":memory:")
    db.executescript(schema.TABLES)
    groups = "INSERT INTO groups (id, question_hash, prompt_index, state, reason, size, reissues, issued_unix_s)"
    db.execute(f"{groups} VALUES (0, 'a', 5, 'CLAIMED', '', 2, 0, 0.0)")
    db.execute(f"{groups} VALUES (1, 'b', 6, 'EXPIRED', 'stale', 2, 0, 0.0)")
    db.execute(f"{groups} VALUES (2, 'c', 7, 'TRIMMED', '', 2, 0, 0.0)")
    db.execute(f"{groups} VALUES (3, 'd', 8, 'DEAD', 'member 1: 3 DATA failures: no', 2, 0, 0.0)")
    for group in (0, 1, 2, 3):
        member = "INSERT INTO members (group_id, member, state, attempt, digest) VALUES (?, 0, 'finished', 1, ?)"
        db.execute(member, (group, wire.digest(b"body")))
    db.execute("INSERT INTO payloads VALUES (0, 0, ?)", (b"body",))
    db.execute("INSERT INTO lineages VALUES (0, NULL, 0, 0.0), (1, 0, 10, 0.0)")
    claims = "INSERT INTO claims (lineage, step, shuffle_seed, groups, durable_lineage, unix_s)"
    db.execute(f"{claims} VALUES (0, 0, 0, 1, 0, 0.0)")
    db.execute("INSERT INTO claim_groups VALUES (0, 0, 0, 2)")
    for event in (ev.Expired(1, "stale"), ev.Died(3, "member 1: 3 DATA failures: no")):
        kind = type(event).__struct_config__.tag
        log = "INSERT INTO log (unix_s, kind, body, group_id) VALUES (0.0, ?, ?, ?)"
        db.execute(log, (kind, wire.encode(event), event.group))
    return db


def put(group: int, body: bytes = b"body", answer: str = "OK") -> dict[str, Any]:
    return {"kind": "put", "key": [group, 0, 1], "finished": True, "answer": answer, "digest": wire.digest(body)}


def claim(group: int, body: bytes = b"body", masked: bytes = b"") -> dict[str, Any]:
    members = [[0, 1, wire.digest(masked or body), wire.digest(body)]]
    return {"kind": "claim", "step": 0, "groups": [[group, members]]}


def test_acknowledged_puts_are_counted_by_outcome(load) -> None:
    outcomes = load("benchmarks.faults.verdict").put_outcomes
    journal = [put(0), put(1), put(2), put(2), claim(2, masked=b"masked"), put(3), put(9, answer="SURPLUS")]
    found = {"kept": 1, "ended EXPIRED: stale": 1, "ended DEAD": 1, "trained": 1}
    assert outcomes(database(), journal) == (found, []), "a member put twice counts once, a refused one not at all"


@pytest.mark.parametrize(
    ("changes", "journal", "found"),
    [
        ((), [put(9)], "not in the table (no such group)"),
        ((), [put(0, b"other")], "not in the table (CLAIMED)"),
        (("UPDATE payloads SET body = x'00'",), [put(0)], "its bytes are missing"),
        (("UPDATE groups SET reason = ''",), [put(1)], "EXPIRED for the reason ''"),
        (("DELETE FROM log",), [put(1)], "EXPIRED for the reason 'stale', in the log ''"),
        (("UPDATE groups SET reason = 'lineage' WHERE id = 1",), [put(1)], "'lineage', in the log 'stale'"),
        (("UPDATE groups SET state = 'EXPIRED', reason = 'stale' WHERE id = 2",), [put(2)], "in the log ''"),
        ((), [put(2)], "the learner did not receive it for a durable step"),
        ((), [put(2), claim(2, b"boby")], "did not receive it"),
        (("UPDATE claims SET durable_lineage = NULL",), [put(2), claim(2)], "did not receive it"),
        (("DELETE FROM log WHERE group_id = 3",), [put(3)], "DEAD for the reason"),
    ],
)
def test_each_way_to_lose_an_acknowledged_put_is_found(load, changes, journal, found: str) -> None:
    db = database()
    for sql in changes:
        db.execute(sql)
    (lost,) = load("benchmarks.faults.verdict").lost_puts(db, journal)
    assert lost.startswith("member (") and found in lost


def test_a_pruned_log_leaves_the_cause_to_the_table(load) -> None:
    db = database()
    db.execute("UPDATE log SET position = position + 90")
    db.execute("DELETE FROM log WHERE group_id = 1")
    assert load("benchmarks.faults.verdict").put_outcomes(db, [put(1)]) == ({"ended EXPIRED: stale": 1}, [])


def test_durable_checkpoints_are_ancestors_of_the_last_weights(load) -> None:
    lost = load("benchmarks.faults.verdict").lost_checkpoints
    durable = [{"kind": "durable", "version": version} for version in ([0, 10], [1, 10], [1, 30])]
    assert lost(database(), durable) == []
    assert lost(database(), [*durable, {"kind": "durable", "version": [0, 11]}]) == ["version 0.11"]


def test_conservation_counts_groups_that_are_gone(load) -> None:
    db = database()
    assert load("benchmarks.faults.verdict").conservation(db) == 0
    db.execute("DELETE FROM groups WHERE id = 0")
    assert load("benchmarks.faults.verdict").conservation(db) == 1


def test_claims_and_steps_are_compared_over_their_lives(load) -> None:
    verdict = load("benchmarks.faults.verdict")
    claim = {"kind": "claim", "step": 0, "groups": [[0, [[0, 1, "x"]]], [1, [[0, 1, "y"]]]]}
    assert verdict.trained_twice([claim, claim]) == [] and verdict.changed_claims([claim, claim]) == []
    again = {"kind": "claim", "step": 1, "groups": [[1, [[0, 1, "y"]]]]}
    assert verdict.trained_twice([claim, again]) == [1]
    assert verdict.changed_claims([claim, claim | {"groups": [[0, [[0, 2, "x"]]], [1, [[0, 1, "y"]]]]}]) == [0]
    step = {"kind": "step", "step": 1, "loss": 0.5}
    assert verdict.changed_steps([step, step]) == []
    assert verdict.changed_steps([step, step | {"loss": 0.5000001}]) == [1]
    assert verdict.first_difference([1, 2], [1, 2]) is None
    assert verdict.first_difference([1, 3], [1, 2]) == "prompt 1 is item 3, not 2"


def test_the_plan_is_fair_random_and_the_seeds(load) -> None:
    chaos = load("benchmarks.faults.chaos")
    names = list(chaos.FAULTS)
    first = list(itertools.islice(chaos.plan(7, 20.0, names), 200))
    assert first == list(itertools.islice(chaos.plan(7, 20.0, names), 200))
    assert first != list(itertools.islice(chaos.plan(8, 20.0, names), 200))
    assert all(20.0 * window <= at < 20.0 * (window + 1) for window, (at, _) in enumerate(first))
    counts = Counter(name for _, chosen in first for name in chosen)
    assert set(counts) == set(names) and max(counts.values()) - min(counts.values()) <= 1
    pairs = [chosen for _, chosen in first if len(chosen) == 2]
    assert 20 < len(pairs) < 80
    assert not [pair for pair in pairs if all(chaos.FAULTS[name].alone for name in pair)]
    assert {chosen for _, chosen in itertools.islice(chaos.plan(0, 1.0, ["sigint"]), 9)} == {("sigint",)}


@pytest.mark.parametrize("target", ["scoring", "env"])
def test_the_processes_that_roles_start_are_found_by_their_module(load, target: str) -> None:
    """Renamed modules were no longer found, and no scoring or environment process was killed."""
    module = load("benchmarks.faults.run").MODULES[target]
    text = Path(str(importlib.import_module(module).__file__)).read_text()
    assert re.search(rf'"-P",\s*"-m",\s*"{module}"', text) and 'if __name__ == "__main__"' in text


def test_a_fault_that_is_always_skipped_is_a_violation(load) -> None:
    tally = load("benchmarks.faults.chaos").Tally()
    for name, times, injected in (("kill_env", 3, 0), ("kill_store", 2, 0), ("sigint", 5, 1), ("disk_full", 4, 0)):
        for _ in range(times + injected):
            tally.note(name)
        for _ in range(times):
            tally.skip(name, "not root" if name == "disk_full" else f"no {name}")
    assert tally.absent("not root") == ["kill_env: skipped 3 times and never injected: no kill_env"]
    assert tally.suspects() == ["sigint"], "a skipped fault explains an end of the run"


def test_an_unseen_fault_does_not_cover_its_kind(load) -> None:
    tally = load("benchmarks.faults.chaos").Tally()
    for _ in range(4):
        tally.note("kill_env")
    for _ in range(3):
        tally.skip("kill_env", "no env")
    tally.miss("kill_env")
    assert (tally.faults.total(), tally.unseen) == (0, {"kill_env": 1})
    assert tally.absent(None) == ["kill_env: skipped 3 times and never injected: no env"]
    assert tally.suspects() == ["kill_env"], "it may take place later"


def never_seen(run):
    return contextlib.nullcontext(lambda: False)


def seen_at_once(run):
    return contextlib.nullcontext(lambda: True)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("name", ["env_raises", "kill_checkpoint"])
def test_a_fault_that_was_not_seen_is_not_counted_as_injected(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seen: bool
) -> None:
    """Orders that no episode had taken, and kills at any instant, counted as faults of their kind."""
    chaos, faults = load("benchmarks.faults.chaos"), load("benchmarks.faults.chaos_faults")
    monkeypatch.setattr(faults, "INSTANT_S", 0.05)
    if name == "kill_checkpoint":
        fault = faults.KillAt("learner", "a checkpoint's write", seen_at_once if seen else never_seen)
        monkeypatch.setitem(faults.FAULTS, name, fault)
    elif seen:  # an episode takes each order at once
        monkeypatch.setattr(faults, "until", lambda done, _: [one.unlink() for one in tmp_path.iterdir()] and done())
    killed: list[str] = []
    process = SimpleNamespace(pid=1, kill=lambda: killed.append("learner"))
    run = SimpleNamespace(orders=tmp_path, step=3, wait_for=lambda target: process)
    attack = chaos.Attack(run, seed=0)
    attack._inject(name, random.Random(0))
    assert (+attack.tally.faults, attack.tally.unseen) == (({name: 1}, {}) if seen else ({}, {name: 1}))
    assert not attack.tally.wrong and len(killed) == (name == "kill_checkpoint")


LOG = """=== started
ERROR:asyncio:Exception in callback
Traceback (most recent call last):
  File "x.py", line 1, in x
MemoryError
Traceback (most recent call last):
  File "x.py", line 1, in x
grpc.aio._call.AioRpcError: <AioRpcError of RPC that terminated with:
\tdetails = "Tls handshake failed"
>

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "x.py", line 1, in x
    x()
    ^^^
jaxroll.errors.InfraError: no answer
  + Exception Group Traceback (most recent call last):
  |   File "x.py", line 1, in x
  | ExceptionGroup: unhandled errors (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "x.py", line 1, in x
    | OSError: [Errno 28] No space left on device
    +------------------------------------
Traceback (most recent call last):
  File "x.py", line 1, in x
ValueError: the environment raises now and then
error: Traceback of no error
"""


@pytest.mark.parametrize(
    ("faults", "left"),
    [
        (["no_memory", "tls_expired", "disk_full"], []),
        (["little_memory", "disk_full"], ["jaxroll.errors.InfraError: no answer"]),
        (["tls_wrong", "kill_store"], ["MemoryError", "OSError: [Errno 28] No space left on device"]),
    ],
)
def test_tracebacks_that_no_fault_explains_are_reported(load, tmp_path: Path, faults: list[str], left) -> None:
    verdict = load("benchmarks.faults.verdict")
    (tmp_path / "store.log").write_text("store: serving\n")
    (tmp_path / "actor-0.log").write_text(LOG)
    (tmp_path / "learner.log").write_text(LOG + LOG)
    found = verdict.tracebacks(tmp_path, faults)
    assert found == (
        {
            "actor-0": {"number": len(left), "first": left},
            "learner": {"number": 2 * len(left), "first": left},
        }
        if left
        else {}
    )


@pytest.mark.parametrize("fault", ["stop_scoring", "slow_scoring"])
def test_a_process_that_its_parent_ends_while_it_is_stopped_was_stopped(load, monkeypatch, fault: str) -> None:
    """A scoring process has less time than a stop takes. Three such stops were counted as skipped."""
    faults = load("benchmarks.faults.chaos_faults")
    monkeypatch.setattr(faults, "LEASE_S", 1.0)
    child = subprocess.Popen(["sleep", "600"])

    def end_when_stopped() -> None:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        child.kill()
        child.wait()

    parent = threading.Thread(target=end_when_stopped, daemon=True)
    parent.start()
    run = SimpleNamespace(wait_for=lambda target: psutil.Process(child.pid))
    try:
        assert "scoring" in faults.FAULTS[fault](run, random.Random(0))
        assert child.returncode == -signal.SIGKILL
    finally:
        child.kill()
        parent.join(10.0)
    run = SimpleNamespace(wait_for=lambda target: None)
    with pytest.raises(faults.Skipped, match="no scoring"):
        faults.FAULTS[fault](run, random.Random(0))


def test_unknown_faults_are_refused(load) -> None:
    with pytest.raises(SystemExit, match="no such fault: kill_stor"):
        load("benchmarks.faults.chaos").chosen_names("kill_stor", "")
    assert load("benchmarks.faults.chaos").chosen_names("sigint,sigterm", "sigterm") == ["sigint"]


def test_a_closed_run_is_not_resumed_by_a_fault_of_another_thread(load, tmp_path: Path) -> None:
    """An interrupt closes the run while a fault, in its thread, is about to resume it."""
    run = load("benchmarks.faults.run").Run(tmp_path, tmp_path / "run", seed=0)
    run.close()
    run.start()
    try:
        assert (run.process, run.lives) == (None, 0)
    finally:
        run.kill_all()


def test_the_seed_chooses_the_variant_and_the_variant_the_faults(load) -> None:
    chaos = load("benchmarks.faults.chaos")
    assert [chaos.variant_of(seed) for seed in (0, 1, 6, 24)] == [(), ("tls",), ("actors", "links"), ("warm", "disks")]
    assert {part for seed in range(128) for part in chaos.variant_of(seed)} == {*chaos.VARIANTS}
    assert (chaos.variant_of(64), chaos.variant_of(68)) == (("files",), ("links",))
    plain = chaos.chosen_names("", "", ())
    assert not [name for name in plain if "actor" in name or name.startswith(("cut_", "tls_")) or "warm" in name]
    assert set(chaos.chosen_names("", "", ("tls",))) - {*plain} == {
        "tls_rotated",
        "tls_new_ca",
        "tls_expired",
        "tls_wrong",
    }
    assert {*chaos.chosen_names("", "", chaos.VARIANTS)} == {*chaos.FAULTS}
    with pytest.raises(SystemExit, match="no such part of a variant: tsl"):
        chaos.parts("tsl")
    with pytest.raises(SystemExit, match="exclude each other"):
        chaos.parts("files,links")
    assert set(chaos.chosen_names("", "", ("files",))) - {*plain} == {"weights_full", "cache_full"}


@pytest.mark.process
def test_the_clock_of_a_run_jumps_and_no_other(tmp_path: Path) -> None:
    import struct

    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("d", 0.0))
    code = "import time; print(time.time(), flush=True); input(); print(time.time(), time.time_ns())"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(HOOKS), "CHAOS_CLOCK": str(clock)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        before = float(child.stdout.readline())
        with clock.open("r+b") as file:
            file.write(struct.pack("d", -86400.0))
        after, after_ns = map(float, child.communicate("\n", timeout=60)[0].split())
    assert abs(before - time.time()) < 60
    assert -86460 < after - before < -86340 and abs(after_ns / 1e9 - after) < 1


@pytest.mark.parametrize(("step", "goes_on"), [(0, True), (5, False)])
def test_the_first_step_may_take_longer_than_later_ones(load, step: int, goes_on: bool) -> None:
    """On a busy machine the roles compile for minutes before it."""
    chaos = load("benchmarks.faults.chaos")
    moved_s = time.monotonic() - chaos.STALL_S - 1.0
    run = SimpleNamespace(look=list, lock=threading.RLock(), alive=True, step=step, moved_s=moved_s, show_stacks=list)
    attack = chaos.Attack(run, seed=0)
    assert attack.look() == goes_on and bool(attack.tally.wrong) != goes_on


@pytest.mark.parametrize(
    ("code", "words", "before", "violations"),
    [(130, "", "clock_back", 0), (64, "supervisor: gave up: learner refused", "tls_expired", 0),
     (64, "supervisor: gave up: learner refused", "clock_back", 1), (64, "", "tls_expired", 1),
     (1, "Fatal Python error: init_import_site: Failed to import the site module", "", 0), (1, "Error", "", 1),
     (1, "Fatal Python error: init_import_site: it was not the first process", "clock_back", 1),
     (-signal.SIGINT, "", "", 0), (-signal.SIGINT, "", "clock_back", 1)],
)  # fmt: skip
def test_a_signal_to_a_run_that_is_ending_is_judged_by_the_faults_before_it(
    load, tmp_path: Path, code: int, words: str, before: str, violations: int
) -> None:
    """SIGINT came while the supervisor gave up for expired certificates, and before Python ran a line of JaxRoll.

    Without a fault before it (""), no role has started.
    """
    chaos, process = load("benchmarks.faults.chaos"), SimpleNamespace(returncode=None)
    run = SimpleNamespace(
        look=list, lock=threading.RLock(), alive=True, step=5, moved_s=time.monotonic(), process=process,
        last_words=lambda lines=6: words, output=lambda name: tmp_path / "err", processes=lambda: before and [1],
        run_dir=tmp_path,
    )  # fmt: skip
    (tmp_path / "err").write_text(words)

    def ended(signum: int) -> int:
        run.alive, process.returncode = False, code
        return code

    def start() -> None:
        run.alive = True

    run.signal, run.start = ended, start
    attack = chaos.Attack(run, seed=0)
    attack.tally.note(before or "clock_back")
    attack.strike(["sigint"])
    assert attack.look() and run.alive and len(attack.tally.wrong) == violations, attack.tally.wrong


MACHINE = """
import errno, json, os, pathlib, socket, subprocess, sys, time
import psutil
from benchmarks.faults import machine

folder = pathlib.Path(sys.argv[1])
machine.SIZE_MB = 16
refused, seen = machine.enter(folder), {}
if refused:
    print(json.dumps({"refused": refused}))
    sys.exit()

def refusal(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)

def connect():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=0.5).close()

def write(size):
    (folder / "file").write_bytes(bytes(size))

import threading, types
now_s = 0.0
machine.time = types.SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep)
filling = threading.Thread(target=machine.fill, args=(folder, 1.0))
filling.start()
while filling.is_alive() and os.statvfs(folder).f_bavail:
    time.sleep(0.01)
seen["full"] = refusal(lambda: write(1 << 20))
now_s = 1.0
filling.join()
machine.time = time
seen["freed"] = refusal(lambda: write(1 << 20))
with machine.read_only(folder):
    seen["read_only"] = refusal(lambda: write(1))
seen["writable"] = refusal(lambda: write(1))
with machine.network_cut():
    seen["cut"] = refusal(connect) is not None
seen["healed"] = refusal(connect)
with machine.limited(psutil.Process(), psutil.RLIMIT_NOFILE, psutil.Process().num_fds()):
    seen["descriptors"] = refusal(lambda: os.pipe())
seen["unlimited"] = refusal(lambda: [os.close(fd) for fd in os.pipe()])
print(json.dumps(seen))
"""


@pytest.mark.process
@pytest.mark.timeout(120)
def test_the_machine_inside_the_machine_has_faults_that_nothing_else_sees(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MACHINE, str(tmp_path / "disk")],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    if "refused" in seen:
        pytest.skip(seen["refused"])
    assert seen == {
        "full": "ENOSPC",
        "freed": None,
        "read_only": "EROFS",
        "writable": None,
        "cut": True,
        "healed": None,
        "descriptors": "EMFILE",
        "unlimited": None,
    }
    assert not list((tmp_path / "disk").iterdir()), "what was written is outside the test's process"


ROLE = """
import time
while True:
    bytearray(1 << 16)
    time.sleep(0.01)
"""


@pytest.mark.process
def test_the_role_whose_memory_is_used_up_ends_and_is_named(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package in place of the roles has the hooks of a run under attack; an absent role is skipped."""
    faults = load("benchmarks.faults.chaos_machine")
    memory = tmp_path / "memory"
    (tmp_path / "jaxroll").mkdir()
    (tmp_path / "jaxroll" / "__main__.py").write_text(ROLE)
    memory.mkdir()
    run = SimpleNamespace(memory=memory, roles=("store", "learner"))
    environment = {"PYTHONPATH": str(HOOKS), "CHAOS_MEMORY": str(memory), "MALLOC_ARENA_MAX": "1"}
    role = subprocess.Popen(
        [sys.executable, "-m", "jaxroll", "learner"],
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    threading.Thread(target=role.wait).start()  # a run's supervisor waits for its roles, too
    try:
        monkeypatch.setattr(faults, "INSTANT_S", 1.0)
        with pytest.raises(faults.Skipped, match="no store"):
            faults.NoMemory()(run, SimpleNamespace(choice=lambda roles: "store"))
        monkeypatch.setattr(faults, "INSTANT_S", 30.0)
        (memory / f"learner.{role.pid}").write_text("of a time before, which the process survived")
        found = faults.NoMemory()(run, SimpleNamespace(choice=lambda roles: "learner"))
    finally:
        role.kill()
    assert found == f"learner (pid {role.pid}) had no free memory and ended"
    assert (memory / f"learner.{role.pid}").read_text() == "used up"


ENDED = """
import sys
from pathlib import Path
from benchmarks.faults import chaos, machine

folder = Path(sys.argv[1])
refused = machine.enter(folder / "disk")
(folder / "disk").mkdir(parents=True, exist_ok=True)
(folder / "disk" / "file").write_text("of the run")
chaos.keep_or_remove(folder, folder / "disk", keep=sys.argv[2] == "keep", mounted=not refused)
"""


@pytest.mark.process
@pytest.mark.parametrize("keep", [True, False])
def test_the_folder_is_kept_or_gone(tmp_path: Path, keep: bool) -> None:
    folder = tmp_path / "attack"
    done = subprocess.run(
        [sys.executable, "-c", ENDED, str(folder), "keep" if keep else "remove"],
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert folder.exists() == keep
    assert [path.read_text() for path in folder.rglob("file")] == ["of the run"] * keep


@pytest.mark.process
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_short_attack_ends_well(tmp_path: Path) -> None:
    words = ["--quick", "--seed=1", "--variant=", f"--folder={tmp_path / 'attack'}"]
    faults = "kill_sampler,kill_learner,kill_store,kill_scoring,clock_back,sigterm"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults.chaos", *words, f"--only={faults}"],
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"unseen", "tracebacks"} <= set(result)
    assert result["faults"] >= 3 and set(result["by_kind"]) <= set(faults.split(","))
    # A sampler that is killed between the answer to a put and its journal leaves the members of that put out.
    assert result["steps"] >= 11 and result["acknowledged_puts"] >= 0.9 * result["steps"] * 16
    assert (result["lost"], result["trained_twice"], result["conservation"]) == (0, 0, 0)
    assert result["replay_clean"] and result["prompts_in_order"] and result["age_max"] <= result["alpha"]
    assert not (tmp_path / "attack").exists(), "its files stay behind"


def half_replaced(certified: SimpleNamespace, folder: Path) -> str:
    """The refusal of a new certificate with the old key."""
    shutil.copytree(certified.server.folder, folder)
    shutil.copy(certified.root / "other" / "tls" / "cert.pem", folder)
    with pytest.raises(ConfigError) as refused:
        tls.Material(folder).server_context(mutual=False)
    return str(refused.value)


@pytest.mark.parametrize("torn", [False, True])
def test_half_replaced_certificates_explain_no_end_of_a_run(
    load, tmp_path: Path, certified: SimpleNamespace, torn: bool
) -> None:
    words, wrong = (half_replaced(certified, tmp_path / "tls"), 1) if torn else ("expired", 0)
    (tmp_path / "err").touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "sampler-0.log").write_text(words)  # the supervisor's output may be gone
    chaos = load("benchmarks.faults.chaos")
    tally = chaos.Tally()
    tally.note("tls_expired")
    run = SimpleNamespace(
        process=SimpleNamespace(returncode=64),
        last_words=str,
        output=tmp_path.joinpath,
        step=1,
        start=list,
        run_dir=tmp_path,
    )
    chaos.Attack._ended(SimpleNamespace(run=run, tally=tally, step_at_end=0, tell=print))
    assert len(tally.ends) == 1 and len(tally.wrong) == wrong
