"""Reactors compared with processes and Ray: one Q-learner on every arm, its gradients, and the ratios of rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import reactor as bench
from benchmarks.reactor import Blackjack, Case, Learner

ROOT = Path(__file__).resolve().parents[2]
SMALL = Case("small", 3, 40, partial(Blackjack, 12), partial(Learner, 24, 48), 1)


def in_turn(case: Case) -> str:
    """The network after all rounds without any runtime: the workers answer one after the other."""
    hub, workers = case.hub(), [case.worker(index) for index in range(case.workers)]
    for _ in range(case.rounds):
        hub.take([worker.answer(hub.message()) for worker in workers])
    assert isinstance(hub, Learner)
    return hub.digest()


@pytest.mark.parametrize("threads", [1, 3])
def test_reactors_train_the_network_of_a_plain_loop(threads: int) -> None:
    expected = in_turn(SMALL)
    assert bench.measured("reactor", replace(SMALL, threads=threads), judged_steps=10)["network"] == expected
    assert in_turn(replace(SMALL, rounds=SMALL.rounds - 1)) != expected, "each round changes it"


def test_gradients_equal_differences() -> None:
    learner = Learner(16)
    rows = np.concatenate([Blackjack(16, index).answer(None) for index in range(2)])
    weights = tuple(array.astype(float) for array in learner.weights)
    learner._target = tuple(0.5 * array for array in weights)

    def loss(changed: bench.Weights) -> float:
        action, reward, ended = rows[:, 3].astype(int), rows[:, 4], rows[:, 5]
        after = bench.values(learner._target, rows[:, 6:]).max(axis=1)
        found = bench.values(changed, rows[:, :3])[np.arange(len(rows)), action]
        return float(np.mean((found - reward - 0.99 * (1 - ended) * after) ** 2))

    learner.weights = weights
    for number, gradient in enumerate(learner._gradients(rows)):
        for place in np.ndindex(gradient.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [array.copy() for array in weights]
                moved[number][place] += step
                ends.append(loss(tuple(moved)))
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(gradient[place], rel=1e-3, abs=1e-6)


def test_rounds_are_compared_with_those_of_reactors() -> None:
    def run(time_ms: float, network: str = "a") -> dict[str, object]:
        return {"round_ms": time_ms, "network": network, "reward": -0.1}

    ours, theirs = [run(1.0), run(2.0)], [run(3.0), run(6.0)]
    found = bench.compared({"reactor": ours, "processes": theirs})
    assert found["over_reactor"]["processes"]["value"] == pytest.approx(3.0) and found["equal"]
    assert not bench.compared({"reactor": ours, "processes": [run(3.0), run(6.0, "b")]})["equal"]
    sizes = [{"overhead_ms": {"reactor": {"median": 2.0}, "ray": {"median": value}}} for value in (4.0, 5.0, 12.0)]
    assert bench.growth({str(index): found for index, found in enumerate(sizes)}) == {"reactor": 1.0, "ray": 3.0}


@pytest.mark.soak
def test_the_network_learns_blackjack() -> None:
    """Fifty rounds earn much more than random actions; the first network always takes a card and earns -1."""
    case = replace(SMALL, workers=4, rounds=50, worker=partial(Blackjack, 100), hub=partial(Learner, 500, 2000))
    found = bench.measured("reactor", case, judged_steps=20_000)["reward"]
    assert Blackjack(20_000, 1_000).reward(None) < -0.3 and found > -0.25


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(600)
def test_all_arms_end_with_the_same_network(tmp_path: Path) -> None:
    """The small version on threads, processes and Ray."""
    command = [sys.executable, "-m", "benchmarks.reactor", "--quick", f"--runs-file={tmp_path / 'runs.jsonl'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert [len(result[part]) for part in bench.PARTS] == [2, 2, 1, 1]
    for part in bench.PARTS:
        for found in result[part].values():
            assert set(found["over_reactor"]) == {"processes", "ray"}
    assert result["q_learning"]["batch 16"]["equal"]
    assert result["growth"].keys() == result["versions"].keys() - {"numpy", "gymnasium"} | {"reactor", "processes"}
