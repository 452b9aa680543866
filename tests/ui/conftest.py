"""A folder with two runs, one of which holds hostile texts wherever a model or an environment can put them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from jaxroll import metrics, wire
from jaxroll.records import Finished, Member, Message, Segment, Task, Version, VersionRun
from jaxroll.rpc import http
from jaxroll.store.core import events as ev
from jaxroll.store.log import commit_log
from jaxroll.ui import server
from jaxroll.ui.runs import Runs
from tests.harness.run_folder import STARTED, LogMaker, make_run, write_rows, write_run_file

HOSTILE = "</script><img src=x onerror=\"document.title='attacked'\">'\u202e&amp;"
HOSTILE_NAME = "b<img src=x onerror=alert(1)>"
ALPHABET = " 0123456789abcdefghijklmnopqrstuvwxyz"
SAMPLED = [9, 8, 7, 6]


@contextmanager
def serving(folder: Path) -> Iterator[tuple[server.Dashboard, str]]:
    """A dashboard of the runs in `folder` with the token `ttt…`, on a thread, and its address."""
    made, listening = server.Dashboard(Runs(folder), "t" * 64), http.listen("127.0.0.1", 0)
    made.runs.start()
    loop = asyncio.new_event_loop()
    served = loop.create_task(http.serve(made.app, listening))
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([served])))
    thread.start()
    try:
        yield made, http.address("127.0.0.1", listening)
    finally:
        loop.call_soon_threadsafe(served.cancel)
        thread.join()
        made.runs.close()
        loop.close()


def finished(group: int, member: int, reward: float) -> Member:
    """A member of one shown and one sampled segment; the last sampled token is masked as stale."""
    shown = Segment(np.array([4, 5], np.int32), np.zeros(2, np.uint8), np.zeros(2, np.float32))
    mask, logprobs = np.array([1, 1, 1, 0], np.uint8), np.array([-0.5, -1.0, -2.0, -4.0], np.float32)
    sampled = Segment(np.array(SAMPLED, np.int32), mask, logprobs, np.ones(4, np.uint8))
    versions = (VersionRun(Version(0, 3), 3), VersionRun(Version(0, 4), 1))
    return Member(group, member, 1, Finished((shown, sampled), "stop", reward, {HOSTILE: reward}, versions, HOSTILE))


def make_hostile_run(path: Path) -> Path:
    """A run with two groups: one with tokens, one that expired, whose every text is hostile."""
    write_run_file(path, tokenizer__kind="char")
    (path / "alphabet.json").write_text(f'"{ALPHABET}"')
    log = LogMaker()
    log.add(ev.Began(Version(0, 0), "L"))
    for group in range(2):
        task = Task(group, (Message("user", f"question {group} {HOSTILE}"),), HOSTILE, "{}", 0, f"h{group}")
        log.add(ev.Issued(group, task, 4, cursor=b"c"), t=STARTED)
        log.add(ev.Leased(group, tuple((m, 1) for m in range(4)), "sampler-0", "s", "r", 30.0), t=STARTED)
        for member in range(3):
            runs = (VersionRun(Version(0, 3), 3), VersionRun(Version(0, 4), 1))
            log.add(ev.Put(group, member, 1, f"d{group}.{member}", 100, runs, reward=float(member == 0)), t=STARTED + 1)
            log.statements.append(
                commit_log.payload(group, member, wire.encode(finished(group, member, float(member == 0))))
            )
    failed = ev.MemberFailed(0, 3, 1, "d", "DATA", f"scorer raised {HOSTILE}", 0.0)
    log.add(failed, ev.Expired(1, f"filtered:{HOSTILE}"), t=STARTED + 2)
    log.write(path)
    write_rows(
        path,
        [
            {"t": STARTED + 3, "role": "learner", "kind": "event", "text": HOSTILE},
            {"t": STARTED + 3, "role": "store", "kind": "store", "waits": {}},
            {"t": STARTED + 4, "role": "store", "kind": "store", "waits": {"samplers": HOSTILE}},
            {"t": STARTED + 5, "role": "supervisor", "kind": "restart", "process": HOSTILE, "pid": 1, "code": -9},
            {
                "t": STARTED + 5,
                "role": "evaluator",
                "kind": "eval",
                "step": 0,
                "n": 1,
                "correct": "0",
                "accuracy": 0.0,
                "examples": [{"prompt": HOSTILE, "answer": HOSTILE, "text": HOSTILE, "ok": False}],
            },
            {"t": STARTED + 5, "role": "sampler-0", "kind": "stats", HOSTILE: 1.0, "version": "0.3"},
        ],
    )
    return path


@pytest.fixture(scope="session")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs `a` and `HOSTILE_NAME`, and of a damaged one."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "a", steps=30, steps_wanted=40)
    make_hostile_run(folder / HOSTILE_NAME)
    (folder / "damaged").mkdir()
    (folder / "damaged" / "run.json").write_text("{")
    (folder / "no run").mkdir()
    (folder / "link").symlink_to(folder / "a")
    return folder


@pytest.fixture(scope="session")
def rows(runs_dir: Path) -> list[metrics.Row]:
    """The metric rows of the run `a`."""
    return metrics.read(runs_dir / "a" / "metrics.jsonl")
