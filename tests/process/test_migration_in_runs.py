"""Answers that other samplers continue, in whole runs: `kill -9` and SIGTERM of samplers at random instants."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll import sharding, wire
from jaxroll.config import MeshConfig
from jaxroll.engine.requests import Request
from jaxroll.errors import EXIT_INTERRUPTED
from jaxroll.models import params
from jaxroll.protocols import GenerationKey
from jaxroll.records import Finished, Member, Partial
from jaxroll.roles import build
from jaxroll.rollout.episode import sampling_params
from jaxroll.store.flushes import HOLD_S
from tests.harness import naive_engine
from tests.harness.train_process import ROOT, SMALL, START_S, Train, assert_sound, last_step
from tests.harness.xla import ROLE_FLAGS

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


# --- Spot machines: no sampler of the run's own, and ten that join, leave and die

FLEET, SPOT_FLUSH = 2, 16
SPOT = (
    *SMALL, "--config.sampler.mesh.tensor=1", "--config.learner.mesh.fsdp=1", "--config.sampling.max_tokens=96",
    "--config.learner.row_tokens=256", "--config.store.lease_s=15", "--config.store.rpc_deadline_s=5",
    f"--config.sampler.flush_tokens={SPOT_FLUSH}", "--config.schedule.in_flight_window=full",
    "--config.learner.learning_rate=1e-30",
)  # fmt: skip  # no parameter changes: an answer of any version is that of the undisturbed run


@dataclass
class Part:
    """Tokens [start, end) of a member, sampled by the process `pid` from `t` on. `sent` were on their way to the store,
    and `known` there. `late`: the store did not answer a flush for so long that the engine waited no more."""

    pid: int
    t: float
    start: int
    end: int
    sent: int
    known: int
    done: bool = False
    late: bool = False


def parts_of(journals: Path) -> dict[Key, list[Part]]:
    """The parts of each member, in the order of their start (tests/harness/hooks)."""
    found: dict[Key, list[Part]] = defaultdict(list)
    for file in journals.glob("*.jsonl"):
        pid, running = int(file.name.partition("-")[0]), dict[Key, Part]()
        asked_s = dict[Key, float]()  # of flushes without an answer
        for row in map(json.loads, file.read_text().splitlines()):
            if "start" in row:
                key, tokens = tuple(row["start"]), row["tokens"]
                running[key] = Part(pid, row["t"], tokens, tokens, tokens, tokens)
                found[key].append(running[key])
            elif "end" in row:
                running.pop(key := tuple(row["end"])).done = True
                asked_s.pop(key, None)
            elif "sent" in row:
                if part := running.get(key := tuple(row["sent"])):
                    part.sent = row["tokens"]
                    asked_s.setdefault(key, row["t"])
            elif "known" in row:
                asked_s.pop(key := tuple(row["known"]), None)
                if part := running.get(key):
                    part.known = row["tokens"]
            else:
                late = any(row["t"] - t >= HOLD_S for t in asked_s.values())
                for group, member, tokens in row["tokens"]:
                    part = running[group, member]
                    part.end, part.late = tokens, part.late or late
    return {key: sorted(parts, key=lambda part: part.t) for key, parts in found.items()}


def joined(train: Train, journals: Path) -> subprocess.Popen[str]:
    """A sampler that joins the run, and keeps a journal of its tokens."""
    path = f"{ROOT / 'tests/harness/hooks'}{os.pathsep}{os.environ.get('PYTHONPATH', ROOT)}"
    env = {"JAXROLL_CACHE": str(ROOT / ".cache" / "jax"), **os.environ, "XLA_FLAGS": ROLE_FLAGS}
    env |= {"PYTHONPATH": path, "TOKEN_JOURNAL": str(journals)}
    with (train.run_dir / "logs" / f"joined-{random.getrandbits(32):08x}.log").open("w") as out:
        words = [sys.executable, "-m", "jaxroll", "sampler", f"--join={train.run_dir}"]
        return subprocess.Popen(words, text=True, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def test_ten_samplers_join_leave_and_die_and_each_move_costs_a_prefill_and_what_was_not_flushed(tmp_path: Path) -> None:
    chance, journals, seen = random.Random(11), tmp_path / "journals", list[dict[Key, list[Partial]]]()
    journals.mkdir()
    fleet: list[subprocess.Popen[str]] = []
    ends: dict[int, int] = {}
    stored: dict[Key, tuple[str, np.ndarray, np.ndarray]] = {}

    def works(pid: int) -> bool:
        return any('"known"' in file.read_text() for file in journals.glob(f"{pid}-*.jsonl"))

    with contextlib.ExitStack() as stack:
        train = stack.enter_context(
            Train(tmp_path / "spot", *SPOT, "--config.sampler.count=0", "--config.schedule.steps=5000")
        )
        train.until(lambda _: (train.run_dir / "store.addr").exists(), "the store")
        for end in range(10):
            while len(fleet) < FLEET:
                fleet.append(joined(train, journals))
                stack.callback(fleet[-1].wait)
                stack.callback(fleet[-1].kill)
            ending = fleet.pop(chance.randrange(FLEET))
            if end % 5:  # the others end while they start
                train.until(lambda _, pid=ending.pid: works(pid), "work of the sampler that ends next")
                train.until(lambda _: bool(flushed(train.run_dir)), "flushed tokens")
            threading.Event().wait(chance.uniform(0.0, 0.5))
            ends[ending.pid] = signum = signal.SIGTERM if end % 2 else signal.SIGKILL
            ending.send_signal(signum)
            seen.append(flushed(train.run_dir))
            ending.wait(timeout=START_S)
            stored |= answers(train)
        fleet.append(joined(train, journals))
        stack.callback(fleet[-1].wait)
        stack.callback(fleet[-1].kill)
        train.until_step(last_step(train.rows) + 4, 600)
        stored |= answers(train)
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        steps = last_step(train.rows)
        assert_sound(train, steps=steps, alpha=1)
        stored |= answers(train)
        assert len(ends) == 10 and check_prefixes(seen, stored)
    lost, figures = lost_tokens(parts_of(journals), stored, ends)
    print(f"{steps} steps, {figures}; lost by kills: {lost[signal.SIGKILL]}, by notices: {lost[signal.SIGTERM]}")
    assert figures["continued"] > 5 and figures["members"] >= 16 * steps
    with Train(tmp_path / "calm", *SPOT, f"--config.schedule.steps={steps}") as train:
        assert train.finish(900) == 0, train.logs()
        undisturbed = answers(train)
    common = stored.keys() & undisturbed.keys()
    assert len(common) >= 16 * steps - 16
    assert all(stored[key][0] == undisturbed[key][0] for key in common), "other questions"
    different = [key for key in common if stored[key][1].tolist() != undisturbed[key][1].tolist()]
    print(f"{len(common)} members as in the undisturbed run but for {len(different)} near-ties: {different}")
    for key in different:
        ours, theirs = stored[key][1], undisturbed[key][1]
        first = next(at for at, (a, b) in enumerate(itertools.zip_longest(ours, theirs)) if a != b)
        assert margin(train, key, first) < naive_engine.NEAR_TIE, (key, first, ours, theirs)


def margin(train: Train, key: Key, position: int) -> float:
    """The margin of the token at `position` of an answer, with the run's initial parameters."""
    config = configs.parse(json.loads((train.run_dir / "run.json").read_text())["config"])
    members = [wire.decode(body, Member) for (body,) in train.query("SELECT body FROM payloads")]
    (outcome,) = [one.outcome for one in members if (one.group, one.member) == key]
    assert isinstance(outcome, Finished)
    prompt, tokenizer = np.concatenate([part.tokens for part in outcome.segments[:-1]]), build.tokenizer(config)
    spec = build.model_spec(config, tokenizer)
    made = params.init(spec, params.key(config), sharding.build(MeshConfig()), sharding.LEARNER)
    request = Request(0, prompt, GenerationKey(*key), sampling_params(config, tokenizer))
    return float(naive_engine.trace(spec, made, request, config.run.seed).margins[position])


def lost_tokens(
    parts: dict[Key, list[Part]], stored: dict[Key, tuple[str, np.ndarray, np.ndarray]], ends: dict[int, int]
) -> tuple[dict[int, list[int]], Counter[str]]:
    """The tokens that were sampled again, by signal, after checks of each stored member; and counts of all of them."""
    lost, found = {signal.SIGKILL: list[int](), signal.SIGTERM: list[int]()}, Counter[str]()
    for key in stored:
        played, tokens = parts[key], len(stored[key][1])
        assert played[-1].end == tokens and played[-1].done, (key, played)
        found.update(
            members=1, tokens=tokens, prefills=len(played), sampled=sum(part.end - part.start for part in played)
        )
        for before, after in itertools.pairwise(played):
            assert before.pid in ends, f"{key} was sampled again, and process {before.pid} had not ended"
            assert before.known <= after.start <= before.end, f"{key}: the store lost flushed tokens: {played}"
            assert before.late or before.end - after.start <= SPOT_FLUSH, (
                f"{key}: more than one flush is lost: {played}"
            )
            lost[ends[before.pid]].append(before.end - after.start)
            found.update(moves=1, continued=after.start > 0, late=before.late, in_flight=before.sent > after.start)
    assert found["late"] < found["moves"], "the store was late for all of them, so that none shows the bound"
    assert found["prefills"] == found["members"] + found["moves"]
    assert found["sampled"] == found["tokens"] + sum(map(sum, lost.values()))
    return lost, found
