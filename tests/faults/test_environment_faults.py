"""Faults 14 and 15: prompts that raise, environments that fail, reward code that misbehaves."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import socket
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jaxroll import wire
from jaxroll.errors import DataError
from jaxroll.records import Failed, Finished
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.rpc.protocol import Envelope
from jaxroll.store import messages as msg
from jaxroll.store.core.admission import BACKOFF_FIRST_S
from tests.harness.cluster.real_roles import World
from tests.harness.cluster.rpc_tap import Call, Forward
from tests.harness.envs import faulty as envs

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
LIMIT_S, DEADLINE_S = 3.0, 60.0  # for an item; for workers that start on a loaded machine
DATA_RETRIES, INFRA_RETRIES = 2, 5
COMPLAINTS = {"poisoned": "is poisoned", "flaky": "the machinery is gone", "allocate": "MemoryError"}
EXACT = '{"scorer": "exact", "answer": "ok"}'


# --- 14, on real roles


@pytest.mark.soak
def test_14_and_15_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note) -> None:
    """A fifth of the questions always raise, a fifth misuse the scoring process, the rest fail half of the time."""
    misused = tmp_path / "misused"
    misused.mkdir()
    (misused / "precious").write_text("precious")
    monkeypatch.setenv(envs.MISDEED_VARIABLE, str(misused))
    changes = {
        "task__env": "tests.harness.envs.faulty:misfortune",
        "learner__micro_batch_rows": 2,
        "store__data_retries": DATA_RETRIES,
        "store__infra_retries": INFRA_RETRIES,
    }
    with World(tmp_path / "run", **changes, schedule__alpha=1, schedule__steps=4) as run:
        salts = salts_of_leases(run)
        run.learner()
        run.sampler()
        assert run.ended("learner") == 0, run.logs()
        assert run.ended("sampler-0") == 0, run.logs()
        fates = {gid: envs.fate(index) for gid, index in run.query("SELECT id, prompt_index FROM groups")}
        assert_dead_letters(run, fates)
        assert_backed_off(run)
        assert_keys_fold_data_failures_only(run, salts)
        assert_no_reward_was_made_up(run, fates)
        assert sorted(os.listdir(misused)) == ["precious"] and (misused / "precious").read_text() == "precious"
        failures = run.query("SELECT COUNT(*) FROM failures")[0][0]
        note(run.judge("14 prompts that raise, 15 in a run", failures))


def assert_dead_letters(run: World, fates: dict[int, str]) -> None:
    """Every DEAD group has a record of its last failure; exactly the questions that can never work end DEAD."""
    ended = {gid: (state, reason) for gid, state, reason in run.query("SELECT id, state, reason FROM groups")}
    dead = {gid: reason for gid, (state, reason) in ended.items() if state == "DEAD"}
    trained = {gid for (gid,) in run.query("SELECT group_id FROM claim_groups")}
    hopeless = {gid for gid, fate in fates.items() if fate != "flaky"}
    assert not trained & hopeless and {fates[gid] for gid in dead} > {"poisoned"}
    for gid, reason in dead.items():
        kind, budget = ("INFRA", INFRA_RETRIES) if fates[gid] == "flaky" else ("DATA", DATA_RETRIES)
        assert f"{budget + 1} {kind} failures" in reason, reason
        errors = run.query("SELECT kind, error FROM failures WHERE group_id = ?", gid)
        assert any(kind == k and error and error in reason for k, error in errors), (reason, errors)
        assert COMPLAINTS.get(fates[gid], "PermissionError") in reason, reason


def assert_backed_off(run: World) -> None:
    """A member backs off after an INFRA failure, twice as long after each; after a DATA failure it does not."""
    times = defaultdict(list)
    for group, member, unix_s in run.query(
        "SELECT group_id, member, unix_s FROM failures WHERE kind = 'INFRA' ORDER BY unix_s"
    ):
        times[group, member].append(unix_s)
    rests = [(number, b - a) for at in times.values() for number, (a, b) in enumerate(itertools.pairwise(at))]
    assert len(rests) > 5, "too few members failed twice to judge"
    assert all(rest_s >= BACKOFF_FIRST_S * 2**number for number, rest_s in rests), rests


def salts_of_leases(run: World) -> dict[tuple[int, int, int], int]:
    """A dict that grows by the key salt of every (group, member, attempt) that is leased."""
    salts: dict[tuple[int, int, int], int] = {}

    async def lease(call: Call, forward: Forward) -> bytes:
        answer = await forward(call.body)
        envelope = wire.decode(answer, Envelope)
        if envelope.refusal is None:
            for grant in wire.decode(envelope.body, msg.LeaseReply).grants:
                salts.update({(grant.group, member, attempt): grant.key_salt for member, attempt in grant.members})
        return answer

    run.tap.on("sampler-0", "Lease", lease)
    return salts


def assert_keys_fold_data_failures_only(run: World, salts: dict[tuple[int, int, int], int]) -> None:
    """An INFRA failure keeps the random key; a DATA failure, which would repeat itself, changes it."""
    kinds = {tuple(key): kind for *key, kind in run.query("SELECT group_id, member, attempt, kind FROM failures")}
    retried = [key for key in salts if key[2] > 1]
    assert retried
    for group, member, attempt in retried:
        data = sum(kinds.get((group, member, before)) == "DATA" for before in range(1, attempt))
        assert salts[group, member, attempt] == data, (group, member, attempt)


def assert_no_reward_was_made_up(run: World, fates: dict[int, str]) -> None:
    """A failed member has no reward; a reward of 0 comes from the environment or from a truncated answer."""
    outcomes = [(row["key"], row["outcome"]) for row in run.tap.journal if row["kind"] == "put"]
    finished = [(key, outcome) for key, outcome in outcomes if isinstance(outcome, Finished)]
    assert any(isinstance(outcome, Failed) for _, outcome in outcomes)
    assert {fates[key[0]] for key, _ in finished} == {"flaky"}
    for _, outcome in finished:
        truncated = outcome.reward_parts["truncated"] == 1.0
        assert outcome.reward == (0.0 if truncated else outcome.reward_parts["raw_score"])
    assert {outcome.reward for _, outcome in finished} == {0.0, 1.0}


# --- 15, on the scoring pool


@pytest.fixture
def pool() -> Iterator[ScoringPool]:
    pool = ScoringPool(1, time_limit_s=LIMIT_S, libraries=(), modules=("tests.harness.envs.faulty",))
    pool.start()
    asyncio.run(asyncio.wait_for(pool.score(EXACT, "ok"), DEADLINE_S))
    if pool.restrictions is None or pool.restrictions.missing:
        pytest.skip(f"this machine lacks restrictions: {pool.restrictions}")
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("what", "complaint", "replaced"),
    [
        ("loop", f"longer than {LIMIT_S:g} s", True),
        ("sleep", f"longer than {LIMIT_S:g} s", True),
        ("allocate", "MemoryError", True),
        ("thread", "", True),  # it has its score, and its thread ends
        ("fork", "PermissionError", False),
        ("run", "PermissionError", False),
        ("connect", "PermissionError", False),
        ("listen", "PermissionError", False),
        ("truncate", "PermissionError", False),
        ("remove", "PermissionError", False),
        ("mkdir", "PermissionError", False),
        ("kill", "PermissionError", False),
    ],
)
def test_15_reward_code_that_misbehaves_costs_its_own_item(
    pool: ScoringPool, tmp_path: Path, what: str, complaint: str, replaced: bool
) -> None:
    (tmp_path / "precious").write_text("precious")
    before = psutil.Process(pool.pids[0])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        bad = envs.misdeed(what, str(tmp_path), listening.getsockname()[1])
        outcome = asyncio.run(asyncio.wait_for(amid_others(pool, bad), DEADLINE_S))
        assert not select.select([listening], [], [], 0)[0], "somebody called"
    if complaint:
        assert isinstance(outcome, DataError) and complaint in str(outcome)
    else:
        assert outcome == 1.0
    assert (before.pid not in pool.pids) == replaced
    assert os.listdir(tmp_path) == ["precious"] and (tmp_path / "precious").read_text() == "precious"
    children = psutil.Process().children(recursive=True)
    assert sorted(child.pid for child in children if child.is_running()) == sorted(pool.pids), "something was left"


async def amid_others(pool: ScoringPool, bad: str) -> float | BaseException:
    """Score the bad item between good ones, all of which must get their scores; return its score or error."""
    jobs = [pool.score(EXACT, "ok") for _ in range(10)] + [pool.score(bad, "ok")]
    jobs += [pool.score(EXACT, "no") for _ in range(10)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert results[:10] == [1.0] * 10 and results[11:] == [0.0] * 10
    return results[10]
