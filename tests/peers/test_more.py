"""Adapters of textarena, PettingZoo and TextWorld, and the trackers, against the real packages in .venv-more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.cluster import disks

pytestmark = [pytest.mark.soak, pytest.mark.process]
KEPT = {"same": True, "worked": True, "violations": []}


def test_textarena_keeps_the_contract_and_games_do_not_share_chance(peer) -> None:
    found = peer("more", "adapters.py", "textarena")
    assert found == {**KEPT, "isolated": True, "kept": True, "parts": found["parts"]}
    assert [found["parts"][f"turn.{turn}"] for turn in range(5)] == [1.0, -1.0, 1.0, -1.0, 1.0]


def test_pettingzoo_accepts_the_text_and_turns_earn_the_reward_of_their_player(peer) -> None:
    found = peer("more", "adapters.py", "pettingzoo")
    assert {name: found[name] for name in KEPT} == KEPT
    assert found["reward"] == 1.0 and found["parts"]["player.1"] == -1.0 and found["parts"]["misread"] == 2.0
    assert [found["parts"][f"turn.{turn}"] for turn in range(7)] == [1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0]
    turns = {"turn.0": 0.0, "turn.1": 0.0, "turn.2": -1.0, "turns": 3.0, "misread": 1.0}
    assert found["forfeit"] == {"player.0": -1.0, "player.1": 0.0, "reward": -1.0, **turns}
    assert found["numbers"] == " ".join("0" * 18)
    assert found["alone"] == KEPT


def test_textworld_keeps_the_contract_and_its_advice_wins(peer) -> None:
    found = peer("more", "adapters.py", "textworld")
    assert {name: found[name] for name in KEPT} == KEPT
    assert found["reward"] == 1.0 == found["parts"]["score"]
    short, long = found["lengths"]
    assert short < 0.7 * long
    assert found["numbered"] == KEPT and found["of_numbers"] == 1.0 == found["unknown"]
    assert all(number.isdigit() for number in found["numbers"]) and re.fullmatch(r"\d+ [a-z].*", found["listed"])


@pytest.mark.parametrize("kind", ["wandb", "mlflow", "trackio"])
def test_a_tracker_has_the_rows_of_the_run_and_of_its_continuation_in_one_run(kind: str, peer) -> None:
    found = peer("more", "adapters.py", kind)
    assert found["lost"] == 0 and found["messages"] == [] and found["leaked"] == []
    assert found["values"] == [[1, 1.0], [2, 0.5], [2, 0.5], [3, pytest.approx(1 / 3)]]


@pytest.mark.parametrize(("kind", "folder"), [("wandb", "wandb"), ("mlflow", "mlruns"), ("trackio", "trackio")])
def test_a_full_disk_costs_a_tracker_its_rows_alone(kind: str, folder: str, tmp_path: Path, peer) -> None:
    """The run neither waits nor fails, and with room the continuation goes on in the same run of the tracker."""
    with disks.small_disk(tmp_path / "run-1" / folder, 16):
        found = peer("more", "adapters.py", "full", kind, str(tmp_path))
    assert found["took_s"] < 1.0 and found["closed_s"] < 30.0
    assert found["steps"][-1] == 4 and found["lost"][1] == 0
    assert found["steps"] == sorted(set(found["steps"])), "how many of the others were written depends on the time"
    if kind == "mlflow":  # the others write in threads and processes of their own, and say on stderr what they lost
        assert found["lost"][0] > 0 and "No space left on device. Metrics are lost there" in found["messages"][0]
