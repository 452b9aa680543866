"""For .venv-more: the adapters of packages outside of the test environment, and the trackers, against the packages."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.control import run_dir
from jaxroll.data.tasks import Candidates
from jaxroll.envs import registry
from jaxroll.report import trackers
from jaxroll.testing.environments import check_environment

ROOT = Path(__file__).resolve().parents[3]
SECRET = "0" * 8 + "5ec2e7" * 4 + "0" * 8  # 40 characters, as a key of wandb has


def loaded(name: str, **args: Any) -> Config:
    config = configs.load(ROOT / "configs" / f"{name}.py")
    task = dataclasses.replace(config.task, heldout_items=2, args={**config.task.args, **args})
    return dataclasses.replace(config, task=task)


def played(config: Config, task: Any, answers: list[str]) -> list[Any]:
    """The results of an episode in which the model gives `answers`."""
    env: Any = registry.factory(config.task.env)(None, config.task)  # type: ignore[arg-type]
    found = [env.reset(task, task.seed)]
    for answer in answers:
        found.append(env.step(answer))
        if found[-1].done:
            break
    env.close()
    return found


def contract(name: str, **args: Any) -> dict[str, Any]:
    """Two plays of each of four seeds, worked play in the environment, and the violations of the contract."""
    config = loaded(name, **args)
    candidates = Candidates(config)
    same = worked = True
    for index in range(4):
        candidate = candidates.at(index)
        same &= candidates.at(index) == candidate
        answers = [message.content for message in candidate.worked if message.role == "assistant"] or ["0", "x"]
        first, second = played(config, candidate.task, answers), played(config, candidate.task, answers)
        same &= first == second
        shown = [message for result in first[1:] for message in result.messages]
        views = [message for message in candidate.worked if message.role != "assistant"]
        worked &= shown[: len(views)] == views
    found = check_environment(config.task.env, config, episodes=12)
    return {"same": bool(same), "worked": bool(worked), "violations": [each.what for each in found]}


def textarena() -> dict[str, Any]:
    """Also: a game is the same alone and among calls of another one, and the global random is left as it was."""
    from jaxroll.envs.adapters.text_games import TextArenaGame
    from jaxroll.envs.adapters.text_games import TextArenaSettings as Settings

    def game(between: bool) -> list[str]:
        one, other = (TextArenaGame(Settings(id="2048-v0")) for _ in range(2))
        views = [one.start(5)]
        other.start(6)
        for move in ("[Up]", "[Left]") * 6:
            if between:
                other.play("[Down]")
                other.play("[Right]")
            views.append(one.play(move).text)
        return views

    random.seed(1)
    expected = random.random()
    random.seed(1)
    isolated = game(False) == game(True)
    kept = random.random() == expected
    players = TextArenaGame(Settings(id="TicTacToe-v0", players=2))
    players.start(0)
    *_, last = [players.play(f"[{cell}]") for cell in "03142"]
    return {**contract("textarena_frozen_lake"), "isolated": isolated, "kept": kept, "parts": dict(last.parts)}


def pettingzoo() -> dict[str, Any]:
    """Also: PettingZoo's own test of the wrapper, the parts of a game with answers that name no move and of one that
    such an answer ends, and the contract of the game against an opponent that moves at random."""
    from pettingzoo.classic import tictactoe_v3
    from pettingzoo.test import api_test

    from jaxroll.envs.adapters.gymnasium_env import AECSettings, numbers, text_aec

    api_test(text_aec(AECSettings()), num_cycles=300, verbose_progress=False)
    own = tictactoe_v3.env()
    own.reset(seed=0)
    config, forfeits = (loaded("pettingzoo_tictactoe", forfeit=forfeit) for forfeit in (False, True))
    task = Candidates(config).at(0).task
    *_, last = played(config, task, ["0", "hm", "0", "3", "1", "4", "2"])
    *_, lost = played(forfeits, task, ["0", "1", "hm"])
    sys.path.append(str(ROOT))
    return {
        **contract("pettingzoo_tictactoe"),
        "alone": contract("pettingzoo_tictactoe", env="benchmarks.lib.opponents:tictactoe", max_turns=6),
        "parts": last.reward_parts,
        "reward": last.reward,
        "forfeit": {**lost.reward_parts, "reward": lost.reward},
        "numbers": numbers(own, "player_1"),
    }


def textworld(folder: str) -> dict[str, Any]:
    """Also: the game's own advice wins."""
    config = loaded("textworld_home", folder=folder, noise=0.0)
    candidate = Candidates(config).at(0)
    short = Candidates(loaded("textworld_home", folder=folder, theme="basic")).at(0)
    *_, last = played(config, candidate.task, [m.content for m in candidate.worked if m.role == "assistant"])
    lengths = [len(one.task.messages[0].content) for one in (short, candidate)]
    listed = loaded("textworld_home", folder=folder, theme="basic", noise=0.0, numbered=True)
    game = Candidates(listed).at(0)
    answers = [message.content for message in game.worked if message.role == "assistant"]
    return {
        **contract("textworld_home", folder=folder),
        "numbered": contract("textworld_home", folder=folder, theme="basic", numbered=True),
        "numbers": answers,
        "listed": game.task.messages[0].content.splitlines()[-1],
        "of_numbers": played(listed, game.task, answers)[-1].reward,
        "unknown": played(listed, game.task, ["99", *answers])[-1].reward,
        "reward": last.reward,
        "parts": last.reward_parts,
        "lengths": lengths,
    }


def started(kind: str, run: Path) -> Config:
    """The config of a new run with the tracker `kind`."""
    os.environ["WANDB_MODE"] = "offline"
    config = configs.parse({**configs.to_dict(Config()), "run": {"trackers": [kind], "metric_names": "verl"}})
    with run_dir.new_run(run, config, ["train"]):
        pass
    return config


def logged(tracker: trackers.Background, run: Path, step: int, **more: float) -> float:
    """Log the row of a step, as a run does; the seconds that the tracker took."""
    row = {"role": "learner", "kind": "step", "step": step, "t": 1e9 + step, "loss": 1 / step, **more}
    began_s = time.monotonic()
    tracker.log(row)
    took_s = time.monotonic() - began_s
    with (run / "metrics.jsonl").open("a") as file:
        print(json.dumps(row), file=file)
    return took_s


def tracked(kind: str, folder: str) -> dict[str, Any]:
    """Rows of a run, and of its continuation with more steps, in the tracker `kind`; the values that its own package
    reads back as those of one run, and whether files of the tracker hold the credentials."""
    os.environ |= dict.fromkeys(("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN"), SECRET)
    run, messages, lost = Path(folder) / "run-1", list[str](), 0
    config = started(kind, run)
    for steps in (range(1, 3), range(2, 4)):  # the second step is trained again
        longer = dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, steps=100 + steps[0]))
        (tracker,) = trackers.opened(longer, run, messages.append)
        for step in steps:
            logged(tracker, run, step, age_mean=0.5)
            tracker.log({"role": "learner", "kind": "span", "t": 1e9, "t0": 1.0, "t1": 2.0})
        tracker.close()
        lost += tracker.lost
    leaked = [str(path) for path in run.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    return {"lost": lost, "messages": messages, "values": READERS[kind](run), "leaked": leaked}


def on_a_full_disk(kind: str, folder: str) -> dict[str, Any]:
    """The tracker `kind`, whose folder in the run is a disk that is full from the second row of three on, and with room
    a continuation with a fourth row: rows that are lost, messages, the steps that the package reads back, and the most
    seconds that a row and an end took."""
    run, messages = Path(folder) / "run-1", list[str]()
    filler = run / FOLDERS[kind] / ".filler"
    config = started(kind, run)
    took_s, closed_s, lost = list[float](), list[float](), list[int]()
    for steps in ((1, 2, 3), (4,)):
        (tracker,) = trackers.opened(config, run, messages.append)
        for step in steps:
            if step == 2:
                with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(256))
            took_s.append(logged(tracker, run, step, **({"grad_norm": 1.0} if step > 1 else {})))
            time.sleep(3.0)  # the packages write in threads and processes of their own
        began_s = time.monotonic()
        tracker.close()
        closed_s.append(time.monotonic() - began_s)
        lost.append(tracker.lost)
        filler.unlink(missing_ok=True)
    steps = [round(1 / loss) for _, loss in READERS[kind](run)]
    return {"lost": lost, "messages": messages, "steps": steps, "took_s": max(took_s), "closed_s": max(closed_s)}


def _mlflow(run: Path) -> list[Any]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=(run / "mlruns").resolve().as_uri())
    (experiment,) = [each for each in client.search_experiments() if each.name == "jaxroll"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "actor/pg_loss")
    return [[point.step, point.value] for point in sorted(history, key=lambda point: point.step)]


def _trackio(run: Path) -> list[Any]:
    import sqlite3

    with contextlib.closing(sqlite3.connect(run / "trackio" / "jaxroll.db")) as db:
        found = list(db.execute("SELECT DISTINCT run_name, metrics, step FROM metrics ORDER BY step"))
    assert len({name for name, _, _ in found}) == 1 and len({step for _, _, step in found}) == len(found)
    rows = [json.loads(text) for _, text, _ in found]
    return [[row["learner/step/step"], row["actor/pg_loss"]] for row in rows]


def _log_records(log: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, after a header of 7 bytes; wandb has no public reader."""
    at, whole, block, header = 7, b"", 32768, 7
    while at + header <= len(log):
        if (left := block - at % block) < header:
            at += left
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        whole += log[at + header : at + header + size]
        at += header + size
        if kind in (1, 4):  # a full record, or the last part of one
            yield whole
            whole = b""


def _wandb(run: Path) -> list[Any]:
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    found, numbers, ids = list[Any](), list[int](), set[str]()
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in _log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            try:
                record.ParseFromString(data)
            except DecodeError:  # a full disk cut the file here
                break
            ids |= {record.run.run_id} - {""}
            items = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            if "actor/pg_loss" in items:
                found.append([items["learner/step/step"], items["actor/pg_loss"]])
                numbers.append(record.history.step.num)
    assert len(ids) == 1 and numbers == sorted(set(numbers)), (ids, numbers)
    return found


FOLDERS = {"mlflow": "mlruns", "trackio": "trackio", "wandb": "wandb"}
READERS = {"mlflow": _mlflow, "trackio": _trackio, "wandb": _wandb}


def main() -> None:
    what = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        if what == "full":
            found = on_a_full_disk(*sys.argv[2:])
        elif what in READERS:
            found = tracked(what, folder)
        else:
            found = {"textarena": textarena, "pettingzoo": pettingzoo, "textworld": lambda: textworld(folder)}[what]()
    print(json.dumps(found))


if __name__ == "__main__":  # scoring workers and environment processes import this module
    main()
