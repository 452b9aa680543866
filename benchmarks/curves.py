"""Learning curves of the environments: one run per environment and seed, with the configs of the repository.

    python -m benchmarks.curves [--quick] [--only=NAME,...] [--seeds=0,1] [--limit=SECONDS] [--draw]

A curve has POINTS points of training reward, each the mean over the rollouts of consecutive steps, and the held-out
evaluations of the run. Some tasks are smaller than their config: TASKS has the changes. A task whose environment of
packages is missing (`make venv-more`) is skipped. A run that is not done after `--limit` seconds is stopped, and its
curve ends there. The last line is one JSON object with an entry per
task; `--draw` writes the curves into benchmarks/figures/environment_curves.json, where those of other tasks stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import draw
from benchmarks.lib.child import python_of
from benchmarks.lib.report import ROOT, Runs, arguments, commit, finish, say
from jaxroll import metrics
from jaxroll.report import summary

POINTS = 12
LIMIT_S = 1500.0
STOP_S = 60.0
DATA = draw.DATA / "environment_curves.json"


@dataclass(frozen=True)
class Task:
    """A config of configs/ with `changes`, so that a tiny model learns it in minutes.

    `peer` names the environment of packages that it runs in; with `served`, a server of OpenEnv plays that environment,
    with `served_changes` of its own.
    """

    config: str
    peer: str = "ours"
    changes: tuple[str, ...] = ()
    served: str = ""
    served_changes: tuple[str, ...] = ()
    judged: str = ""


# Greedy play hardly shows a policy that is right more often than before, so the held-out answers are drawn.
SAMPLED = ("evaluator.samples=4", "evaluator.temperature=1.0")
RANDOM = "task.args.noise=1.0"  # the warm start shows random play only, so that skill is learned by RL
AGAINST_RANDOM = {"args": {"env": "benchmarks.lib.opponents:tictactoe", "max_turns": 6}, "items": 128, "samples": 4}
TASKS = {
    "calculator": Task("agentic_calculator"),
    "frozen_lake": Task("agentic_frozen_lake"),
    "gymnasium": Task("gymnasium_blackjack", changes=("task.args.goal=0.0",)),  # reward 1 if the game is not lost
    "shop": Task(
        "shop",
        changes=(
            *SAMPLED,
            RANDOM,
            "task.args.items=2",
            "task.args.max_turns=6",
            "sft.steps=60",
            "learner.learning_rate=1e-4",
            "schedule.steps=200",
            "evaluator.every=50",
        ),
    ),
    "sokoban": Task(
        "sokoban",
        changes=(
            "task.args.columns=3",
            "task.args.pulls=1",
            "task.args.max_turns=5",
            "task.args.noise=0.3",
            "sft.steps=120",
            "schedule.steps=60",
            "schedule.groups_per_step=12",
            *SAMPLED,
        ),
    ),
    "tool_calls": Task(  # the right one of two tools, about one item
        "tool_calls",
        changes=(
            *SAMPLED,
            "task.args.noise=0.8",
            "task.args.max_turns=2",
            "task.args.problems=benchmarks.lib.opponents:one_item",
        ),
    ),
    "code_repair": Task(  # with the default learning rate, its reward fell to 0
        "code_repair",
        changes=(
            *SAMPLED,
            "task.args.lines=1",
            "task.args.max_turns=2",
            "sft.steps=150",
            "learner.learning_rate=1e-4",
        ),
    ),
    "agent": Task("agent_calculator", changes=("schedule.steps=24", "evaluator.every=12", "task.heldout_items=64")),
    "openenv": Task(
        "openenv_frozen_lake",
        changes=("task.args.max_turns=6", "schedule.steps=60", "evaluator.every=20", "task.heldout_items=32"),
        served="frozen_lake",
        served_changes=("task.args.size=3", "task.args.max_turns=6"),
    ),
    "verifiers": Task(
        "verifiers_reversal", changes=("schedule.steps=24", "evaluator.every=12", "task.heldout_items=64")
    ),
    "pettingzoo": Task(  # a game is right if it is won
        "pettingzoo_tictactoe",
        "more",
        changes=(
            "task.args.env=benchmarks.lib.opponents:tictactoe",
            "task.args.max_turns=6",
            "task.args.forfeit=false",
            "schedule.steps=96",
            "evaluator.every=32",
            *SAMPLED,
        ),
    ),
    "self_play": Task(  # one policy plays both players, and is measured as the first one against random moves
        "pettingzoo_tictactoe",
        "more",
        changes=(
            f"evaluator.sets={json.dumps({'random': AGAINST_RANDOM})}",
            "task.heldout_items=16",
            "schedule.steps=160",
            "evaluator.every=40",
            *SAMPLED,
        ),
        judged="random",
    ),
    "textarena": Task(  # take the largest of five numbers that are shown one after the other
        "textarena_frozen_lake",
        "more",
        changes=(
            "task.args.id=Secretary-v0",
            f"task.args.moves={json.dumps(['[accept]', '[continue]'])}",
            "task.args.max_turns=5",
            "task.max_prompt_tokens=384",
            "task.max_episode_tokens=640",
            "task.heldout_items=128",
            "sampler.prefill_buckets=(384,)",
            "sampling.max_tokens=14",
            "learner.row_tokens=640",
            "sft.steps=30",
            "schedule.steps=80",
            "evaluator.every=20",
            *SAMPLED,
        ),
    ),
    "textworld": Task(  # one command in one room, chosen by its number
        "textworld_home",
        "more",
        changes=(
            'task.args={"rooms":1,"objects":1,"quest_length":1,"theme":"basic","numbered":true,"max_turns":1,"noise":1.0,"games":600}',
            "task.max_prompt_tokens=384",
            "task.max_episode_tokens=400",
            "task.heldout_items=64",
            "sampler.prefill_buckets=(384,)",
            "sampling.max_tokens=4",
            "sampler.slots=64",
            "sampler.concurrent_episodes=64",
            "learner.row_tokens=400",
            "learner.micro_batch_rows=8",
            "sft.steps=60",
            "sft.batch=24",
            "schedule.steps=80",
            "schedule.groups_per_step=8",
            "evaluator.every=20",
            *SAMPLED,
        ),
    ),
}


def points(steps: list[dict[str, Any]], count: int = POINTS) -> list[dict[str, Any]]:
    """`count` means of the training reward over consecutive steps, each at its last step; fewer if steps are fewer."""
    parts = np.array_split(np.arange(len(steps)), min(count, len(steps))) if steps else []
    return [
        {"step": steps[part[-1]]["step"], "reward_mean": float(np.mean([steps[i]["reward_mean"] for i in part]))}
        for part in parts
    ]


def curve(run: Path, judged: str = "") -> dict[str, Any]:
    """The curve of a run, and the gain of its accuracy, held-out or of the set `judged`, with its 95 % interval."""
    rows = metrics.read(run / "metrics.jsonl")
    steps, evals = summary.trained_steps(rows), summary.evaluations(rows)
    evals = [{**row, **row["sets"][judged]} for row in evals] if judged else evals
    held = summary.accuracy(evals)
    return {
        "steps": points(steps),
        "evals": [{key: row[key] for key in draw.EVAL_KEYS} for row in evals],
        "trained": len(steps),
        **{key: held[key] for key in ("accuracy_start", "accuracy_end", "accuracy_gain_low", "accuracy_gain_high")},
    }


@contextlib.contextmanager
def server(task: Task, folder: Path) -> Iterator[list[str]]:
    """The changes that name the server of the task's environment, while that runs; none if it needs no server."""
    if not task.served:
        yield []
        return
    token = folder / "token"
    config = f"--config=configs/agentic_{task.served}.py"
    words = [sys.executable, "-m", "jaxroll", "env", "serve", task.served, config, f"--token-file={token}", "--port=0"]
    words += [f"--config.{change}" for change in task.served_changes]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next(word for word in process.stdout.readline().split() if word.startswith("http:")).rstrip(",")
            yield [f"task.args.url={url.replace('//', f'//user:{token.read_text().strip()}@')}"]
        finally:
            process.terminate()


def trained(task: Task, seed: int, limit_s: float, quick: bool) -> dict[str, Any]:
    """The curve of one run of `task`."""
    with tempfile.TemporaryDirectory() as name, server(task, Path(name)) as changes:
        folder = Path(name)
        changes += [*task.changes, f"run.seed={seed}"]
        changes += ["schedule.steps=2", "sft.steps=2", "task.heldout_items=8"] if quick else []
        words = [str(python_of(task.peer)), "-m", "jaxroll", "train", str(folder / "run")]
        words += [f"--config=configs/{task.config}.py", *(f"--config.{change}" for change in changes)]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        log = folder / "log"
        with log.open("w") as out, subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT) as process:
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                try:
                    code = process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    code = process.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if code:
            end = f"{' '.join(words)} ended with {code}:\n{log.read_text()[-3000:]}"
            if not (folder / "run" / "metrics.jsonl").exists():
                raise RuntimeError(end)
            print(end, file=sys.stderr, flush=True)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        load = round(os.getloadavg()[0], 1)
        return curve(folder / "run", task.judged) | {
            "config": task.config, "changes": [*task.changes], "seed": seed, "exit": code, "commit": commit(),
            "load": load, "seconds": time.monotonic() - began, "cpu_s": cpu_s,
        }  # fmt: skip


def main() -> None:
    """Run the chosen tasks and print their curves."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default=",".join(TASKS), help="names of tasks, separated by commas")
    parser.add_argument("--seeds", default="0", help="seeds of the runs, separated by commas")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of one run")
    parser.add_argument("--draw", action="store_true", help="write the curves into the figure of the documentation")
    options = parser.parse_args()
    names, seeds, started = options.only.split(","), [int(seed) for seed in options.seeds.split(",")], time.monotonic()
    if unknown := sorted({*names} - {*TASKS}):
        parser.error(f"unknown tasks {unknown}; known are {', '.join(TASKS)}")
    names = names[:1] if options.quick else names
    runs = Runs("curves", {"quick": options.quick, "limit": options.limit}, options.runs_file, options.resume)
    found: dict[str, Any] = {}
    for name in names:
        if not python_of(TASKS[name].peer).exists():
            say(f"{name} is skipped: make venv-{TASKS[name].peer}")
            found[name] = {"skipped": TASKS[name].peer}
            continue
        run = partial(trained, TASKS[name], limit_s=options.limit, quick=options.quick)
        found[name] = [runs.run(name, seed, partial(run, seed)) for seed in seeds]
    if options.draw:
        drawn = {name: [one for one in of if one["steps"]] for name, of in found.items() if isinstance(of, list)}
        record({name: of for name, of in drawn.items() if of})  # without a run that was stopped before its first step
    finish(found, command=f"python -m benchmarks.curves --only={options.only} --seeds={options.seeds}", started=started)


def record(found: dict[str, list[dict[str, Any]]]) -> None:
    """Write the curves of `found` into DATA instead of those of the same tasks and seeds, and draw them."""
    held = json.loads(DATA.read_text()) if DATA.exists() else {"drawn": "learning_curves", "class": "R", "curves": {}}
    held["command"] = ["python -m benchmarks.curves --only=NAME --seeds=SEED"]
    for name, several in found.items():
        of_task = {str(one["seed"]): one for one in held["curves"].get(name, [])}
        of_task |= {str(one["seed"]): _short(one) for one in several}
        held["curves"][name] = [of_task[seed] for seed in sorted(of_task)]
    held["curves"] = {name: held["curves"][name] for name in TASKS if name in held["curves"]}
    held["commits"] = {name: sorted({one["commit"] for one in of}) for name, of in held["curves"].items()}
    draw.write_json(DATA, held)
    draw.draw(held, draw.FIGURES / f"{DATA.stem}.svg")


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
