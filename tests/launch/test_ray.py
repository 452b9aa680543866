"""The driver of `jaxroll launch --on=ray` without a cluster: a stand-in for the module `ray`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxroll import metrics
from jaxroll.clock import ManualClock
from jaxroll.config import SupervisorConfig
from jaxroll.control import cli, on_ray
from jaxroll.control.program import ProcessSpec
from jaxroll.control.supervisor import Supervisor
from jaxroll.report import inspect

LAUNCH = ["launch", "--on=ray", "--config=configs/rlvr_tiny.py", "--insecure"]


class Lost(Exception):
    """Ray's error about an actor that is gone."""


class Unavailable(Lost):
    """Ray's error about an actor of which it does not know more."""


class Ray:
    """Futures are lists: empty while they wait, else with a result or an error."""

    exceptions = SimpleNamespace(RayError=Lost, ActorUnavailableError=Unavailable)

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def wait(self, futures: list[list], timeout: float) -> tuple[list, list]:
        return [one for one in futures if one], [one for one in futures if not one]

    def get(self, future: list) -> Any:
        if isinstance(future[0], Exception):
            raise future[0]
        return future[0]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(on_ray, "_ray", lambda: made)
    return made


def child(tmp_path: Path, place: list, end: list, clock: ManualClock | None = None) -> on_ray.ActorChild:
    actor = SimpleNamespace(place=SimpleNamespace(remote=lambda: place))
    return on_ray.ActorChild(actor, end, tmp_path / "log", "{'GPU': 4.0}", clock)


def test_a_process_ends_with_its_code_and_its_last_lines(tmp_path: Path, ray: Ray) -> None:
    one = child(tmp_path, ["10.0.0.1"], end := [])
    assert one.poll() is None and ray.killed == []
    end.append((-9, "last words\n"))
    assert (one.poll(), one.poll(), one.cause) == (-9, -9, "")
    assert "last words" in (tmp_path / "log").read_text() and len(ray.killed) == 1, "its actor is not left behind"


def test_a_lost_node_is_a_death_with_its_cause(tmp_path: Path, ray: Ray) -> None:
    one = child(tmp_path, ["10.0.0.1, node abc"], [Lost("socket closed")])
    assert one.poll() == 1 and one.cause == "Ray lost it on 10.0.0.1, node abc: Lost"
    assert child(tmp_path, [Lost("no")], []).poll() == 1


def test_a_process_counts_as_lost_only_when_ray_knows(tmp_path: Path, ray: Ray) -> None:
    place: list = ["10.0.0.1"]
    one, alive = (child(tmp_path, place, [Unavailable("socket closed")]) for _ in range(2))
    assert [one.poll(), alive.poll()] == [None, None]
    place[0] = Unavailable("still")
    assert one.poll() is None
    place[0] = Lost("its node has died")
    assert one.poll() == 1 and one.cause == "Ray lost it on 10.0.0.1: Lost"
    place[0] = "10.0.0.1"
    assert alive.poll() == 1 and "its end was not reported" in alive.cause and len(ray.killed) == 2


def test_a_process_that_finds_no_node_is_given_up_after_a_while(tmp_path: Path, ray: Ray) -> None:
    clock = ManualClock()
    waiting, placed = child(tmp_path, [], [], clock), child(tmp_path, ["10.0.0.1"], [], clock)
    assert (waiting.poll(), placed.poll()) == (None, None)
    clock.advance(on_ray.PLACED_S + 1)
    assert placed.poll() is None
    assert waiting.poll() == 1 and "had {'GPU': 4.0} free for 600 s" in waiting.cause


def test_the_cause_of_a_restart_is_in_inspect(tmp_path: Path, ray: Ray) -> None:
    lives = [[Lost("gone")], [(0, "")]]

    def start(spec: ProcessSpec, log: Path, environ: Any) -> on_ray.ActorChild:
        return child(tmp_path, ["10.0.0.1, node abc"], lives.pop(0))

    config = SupervisorConfig(backoff_s=0.01)
    silent: Any = SimpleNamespace(rows=print, tick=lambda _: None, say=print)
    specs = [ProcessSpec("learner", "learner", ())]
    assert Supervisor(specs, tmp_path, config, silent, start=start).run() == 0
    rows = metrics.read(tmp_path / "metrics.jsonl")
    (restart,) = inspect._joins_and_leaves(rows, rows[0]["t"])
    assert restart["name"] == "learner"
    assert restart["what"] == "ended with 1, started again (Ray lost it on 10.0.0.1, node abc: Lost)"


def test_without_ray_the_command_names_the_extra(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    words = [f"--run={tmp_path / 'run'}", f"--scratch={tmp_path / 'scratch'}"]
    assert cli.main([*LAUNCH, *words]) == 64
    assert "pip install 'jaxroll[ray]'" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_ray_client_cannot_hold_the_store(capsys: pytest.CaptureFixture[str], tmp_path: Path, ray: Ray) -> None:
    words = [f"--run={tmp_path / 'run'}", f"--scratch={tmp_path / 'scratch'}", "--address=ray://head:10001"]
    assert cli.main([*LAUNCH, *words]) == 64
    assert "ray job submit" in capsys.readouterr().err
