"""Fault 20: a run continues while hostile processes connect, send false data, and break the protocol.

tests/store/server/test_under_attack.py attacks a store alone and checks its memory and its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxroll.config import digest
from jaxroll.rpc import protocol
from tests.harness.cluster.cluster import LIMIT_S, ROOT, Cluster
from tests.harness.cluster.criteria import Row, judge

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
SHAPE = ("schedule.groups_per_step=3", "schedule.group_size=4", "schedule.alpha=1", "schedule.steps=100000")
ATTACKS: dict[str, dict[str, Any]] = {
    "silent": {"connections": 2_500},
    "two_gb": {"connections": 8},
    "wrong_role": {"connections": 2, "in_flight": 8},
    "liars": {"connections": 2, "in_flight": 4},
    "paths": {"connections": 1, "in_flight": 4},
}


@pytest.mark.soak
def test_20_a_run_goes_on_among_hostile_clients(tmp_path: Path, note: Callable[[Row], None]) -> None:
    """Each attack lasts until the run has made three steps under it; no honest client is refused or late."""
    with Cluster(tmp_path / "run", *SHAPE) as run:
        run.learner()
        for i in range(2):
            run.sampler(f"sampler-{i}", seed=i)
        run.until_acked(1)
        for kind, orders in ATTACKS.items():
            with attacking(run, kind, orders) as attacker:
                at = run.acked()
                run.until_acked(at + 3)
                assert attacker.poll() is None, f"the attack {kind} gave up"
                result = stopped(attacker)
            assert result["missed"] == [], f"{kind} did not exercise all its requests: {result['counted']}"
            assert result["strange"] == {}, f"{kind} got unexpected answers"
            if kind == "silent":
                assert result["counted"]["opened"] >= 2_500, result
        at = run.acked()
        run.until_acked(at + 2)
        refused = run.query("SELECT COUNT(*) FROM audit WHERE what = 'refused'")
        assert refused > [(0,)], "no client was refused: there was no attack"
        here = {path.name for path in run.run_dir.rglob("*")}
        assert not {name for name in here if "mallory" in name or ".." in name}, here
        note(judge(run, "20 hostile clients", len(ATTACKS), went_on_from=0))


@contextlib.contextmanager
def attacking(run: Cluster, kind: str, orders: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process that has started to attack the run's store."""
    secret = protocol.load_secret(run.run_dir)
    assert secret is not None
    knows = {
        "run_id": run.query("SELECT value FROM meta WHERE key = 'run_id'")[0][0],
        "config_digest": digest(run.config),
        "address": (run.run_dir / "store.addr").read_text().strip(),
        "token": protocol.bearer(secret, "sampler"),
        "parent": os.getpid(),
    }
    command = [sys.executable, "-m", "benchmarks.faults.attacks", kind, json.dumps(knows | orders)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)


def stopped(attacker: subprocess.Popen[str]) -> dict[str, Any]:
    """End the attacker by closing its standard input; return its counts."""
    out, _ = attacker.communicate("", timeout=LIMIT_S)
    return json.loads(out.splitlines()[-1])
