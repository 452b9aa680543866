"""Answers that other samplers continue, in whole runs: `kill -9` and SIGTERM of samplers at random instants."""

from __future__ import annotations

import random
import signal
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxroll import wire
from jaxroll.records import Finished, Member, Partial
from tests.harness.train_process import SMALL, Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(2400)]
STEPS, FLUSH, ENDS = 8, 4, 3
WORDS = (
    *SMALL, f"--config.schedule.steps={STEPS}", "--config.sampler.count=2", "--config.sampler.mesh.tensor=1",
    "--config.learner.mesh.fsdp=1", "--config.sampling.max_tokens=96", "--config.learner.row_tokens=256",
    "--config.supervisor.backoff_s=0.1",
    "--config.store.lease_s=8", "--config.store.rpc_deadline_s=3",
    "--config.schedule.in_flight_window=full",
)  # fmt: skip
Key = tuple[int, int]


def answers(train: Train) -> dict[Key, tuple[str, np.ndarray, np.ndarray]]:
    """Question, tokens and log-probs of the stored answers, by group and member."""
    sql = "SELECT question_hash, body FROM payloads JOIN groups ON id = group_id"
    found = {}
    for question, body in train.query(sql):
        member = wire.decode(body, Member)
        if isinstance(member.outcome, Finished):
            answer = member.outcome.segments[-1]
            found[member.group, member.member] = (question, answer.tokens, answer.logprobs)
    return found


def flushed(run_dir: Path) -> dict[Key, list[Partial]]:
    """The flushed pieces of the unfinished members at this moment."""
    found: dict[Key, list[Partial]] = defaultdict(list)
    with sqlite3.connect(f"file:{run_dir / 'store.db'}?mode=ro", uri=True) as db:
        for (body,) in db.execute("SELECT body FROM partials ORDER BY group_id, member, start"):
            piece = wire.decode(body, Partial)
            found[piece.group, piece.member].append(piece)
    return found


def samplers(train: Train) -> list:
    return [process for process in train.children() if "sampler" in process.cmdline()]


def test_killed_and_preempted_samplers_lose_no_flushed_token(tmp_path: Path) -> None:
    chance, seen = random.Random(7), list[dict[Key, list[Partial]]]()
    with Train(tmp_path / "storm", *WORDS, f"--config.sampler.flush_tokens={FLUSH}") as train:
        for end in range(ENDS):
            train.until_step(last_step(train.rows) + 1, 400)
            train.until(lambda _: bool(flushed(train.run_dir)), "flushed tokens", 400)
            threading.Event().wait(chance.uniform(0.0, 0.1))
            chance.choice(samplers(train)).send_signal(signal.SIGTERM if end % 2 else signal.SIGKILL)
            seen.append(flushed(train.run_dir))
        assert train.finish(900) == 0, train.logs()
        assert_sound(train, steps=STEPS, alpha=1)
        stored, resumed = answers(train), resumed_members(train)
    assert resumed, "no answer was continued"
    kept = check_prefixes(seen, stored)
    assert kept, "no flushed member was stored"
    print(f"{len(resumed)} members continued after {sum(resumed)} tokens; {kept} flushed prefixes are kept")


def resumed_members(train: Train) -> list[int]:
    """Tokens after which members were continued."""
    from jaxroll.store.core import events as ev

    leases = [wire.decode(body, ev.Event) for (body,) in train.query("SELECT body FROM log WHERE kind = 'leased'")]
    return [tokens for lease in leases for _, tokens in lease.resumed]


def check_prefixes(
    seen: Sequence[dict[Key, list[Partial]]], stored: dict[Key, tuple[str, np.ndarray, np.ndarray]]
) -> int:
    """Check that stored answers begin with the flushed tokens and their log-probs; the number of checked members."""
    kept = 0
    for moment in seen:
        for key, pieces in moment.items():
            if key not in stored:
                continue
            _, tokens, logprobs = stored[key]
            count = sum(len(piece.tokens) for piece in pieces)
            assert tokens[:count].tolist() == np.concatenate([piece.tokens for piece in pieces]).tolist(), key
            assert logprobs[:count].tolist() == np.concatenate([piece.logprobs for piece in pieces]).tolist(), key
            kept += 1
    return kept
