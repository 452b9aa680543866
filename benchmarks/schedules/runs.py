"""Whole runs of `jaxroll train` for benchmarks/schedules: their workloads and their measurements."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.lib.report import ROOT, ratio
from benchmarks.schedules.envs import HELD_OUT, VARIABLE, Race
from jaxroll.report.summary import waste

SETTLING = 4  # steps that do not count: the pipeline fills, and first calls are slow
DEADLINE_S = 300.0
GROUPS, GROUP_SIZE, ENVIRONMENTS = 8, 8, 64
WARM = 4000, HELD_OUT  # questions of the warm start; earlier ones are trained on, later ones held out


@dataclass(frozen=True)
class Workload:
    """A run's workload: strings to copy, judged as `race` says."""

    name: str
    steps: int
    median: int  # characters per question
    sigma: float = 0.0
    most: int = 0
    env: str = "single_turn"
    race: Race = field(default_factory=Race)
    evaluations: int = 0
    target: float = 0.0  # the held-out accuracy whose time is measured
    capitals: float = 0.0  # share of the warm start's answers in capitals, which get no reward
    settings: dict[str, Any] = field(default_factory=dict)
    choices: tuple[dict[str, Any], ...] = ({},)  # settings of which each arm uses the fastest

    def questions(self, path: Path, count: int = 6000) -> None:
        """Write random strings to copy, one per line, all different."""
        chance, seen = np.random.default_rng(11), set()
        longest = self.most or self.median
        with path.open("w") as file:
            while len(seen) < count:
                length = int(np.clip(np.rint(self.median * np.exp(self.sigma * chance.standard_normal())), 3, longest))
                text = "".join(chance.choice(list("abcdefgh"), length))
                if text not in seen:
                    misled = WARM[0] <= len(seen) < WARM[1] and len(seen) % 100 < 100 * self.capitals
                    seen.add(text)
                    file.write(json.dumps({"question": text, "answer": text.upper() if misled else text}) + "\n")

    def overrides(self, folder: Path, alpha: float, seed: int, threads: int) -> dict[str, Any]:
        """The config of a run, over the defaults."""
        longest, every = self.most or self.median, self.steps // self.evaluations if self.evaluations else 0
        return {
            "run.seed": seed,
            "placement.platform": "cpu",
            "placement.cpu_threads": threads,
            "task.source": "jsonl",
            "task.path": str(folder / f"{self.name}.jsonl"),
            "task.env": self.env,
            "task.max_prompt_tokens": longest + 8,
            "task.heldout_start": WARM[1],
            "task.heldout_items": 256,
            "sft.start": WARM[0],
            "sft.steps": 120,
            "schedule.alpha": alpha,
            "schedule.steps": self.steps,
            "schedule.groups_per_step": GROUPS,
            "schedule.group_size": GROUP_SIZE,
            "schedule.in_flight_window": "full",
            "sampling.max_tokens": longest + 2,
            "sampler.slots": ENVIRONMENTS,
            "sampler.concurrent_episodes": ENVIRONMENTS,
            "sampler.prefill_rows": 8,
            "sampler.prefill_buckets": f"({longest + 8},)",
            "sampler.decode_chunk": 8,
            # A row has an answer and the last token of its prompt; four rows share the rest of the prompt.
            "learner.row_tokens": longest + 3,
            "learner.shared_prompt_tokens": longest + 8,
            "learner.shared_prompt_rows": 4,
            "learner.micro_batch_rows": 16,
            "learner.learning_rate": 1e-4,
            "learner.checkpoint_every": self.steps,
            "evaluator.every": every,
            **self.settings,
        }


def trained(
    workload: Workload, folder: Path, alpha: float, seed: int, threads: int, deadline_s: float = DEADLINE_S
) -> dict[str, Any]:
    """One run: its rate, the seconds of its stages, its accuracies. Runs of a seed start from the same warm start.

    TimeoutExpired after `deadline_s` (each, also of the warm start), RuntimeError when a run ends with an error.
    """
    overrides = workload.overrides(folder, alpha, seed, threads)
    # The roles of a run that is killed at its deadline may still write.
    with tempfile.TemporaryDirectory(prefix="race-", dir=folder, ignore_cleanup_errors=True) as name:
        run_dir, journal = Path(name) / "run", Path(name) / "journal"
        journal.touch()
        race = replace(workload.race, journal=str(journal), questions=str(folder / f"{workload.name}.jsonl"))
        race = {VARIABLE: json.dumps(asdict(race))}
        if overrides["sft.steps"]:
            warm = folder / f"{workload.name}-{seed}"
            if not (warm / "warm").is_dir():
                _jaxroll("sft", warm, overrides, race, deadline_s)
            overrides |= {"model.path": str(warm / "warm"), "sft.steps": 0}
        cpu = _jaxroll("train", run_dir, overrides, race, deadline_s)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        lost = losses(run_dir / "store.db", journal.read_text().splitlines())
        found = measured(rows)
        used = cpu.between(found["from_t"], found["from_t"] + found["seconds"])
        restarts = scoring_restarts(rows)
        return found | {"cpu_s": used, "lost": lost, "scoring_restarts": restarts} | reported(run_dir)


def scoring_restarts(rows: list[dict[str, Any]]) -> int:
    """The number of restarted scoring workers, from the last statistics of each role."""
    return sum({row["role"]: row.get("scoring_restarts", 0) for row in rows if row["kind"] == "stats"}.values())


def reported(run_dir: Path) -> dict[str, Any]:
    """From `jaxroll inspect`: `backoff`, the resting ones and those on trial, and `scoring_slow` by role."""
    line = [sys.executable, "-m", "jaxroll", "inspect", str(run_dir), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    found = json.loads(done.stdout)
    return {"backoff": found["backoff"], "scoring_slow": found.get("scoring_slow", {})}


class Cpu:
    """CPU seconds of each role of a run, with its child processes, by time."""

    _EVERY_S = 0.25

    def __init__(self) -> None:
        self._by_time: list[tuple[float, dict[str, float]]] = []

    def watch(self, process: subprocess.Popen, deadline_s: float) -> None:
        """Note the CPU times until `process` ends. TimeoutExpired after `deadline_s`, when it is killed."""
        until_s = time.monotonic() + deadline_s
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._by_time.append((time.time(), _cpu_of(psutil.Process(process.pid))))
            if time.monotonic() > until_s:
                process.kill()
                process.wait()
                raise subprocess.TimeoutExpired(process.args, deadline_s)
            time.sleep(self._EVERY_S)

    def between(self, start_t: float, end_t: float) -> dict[str, float]:
        """The CPU seconds of each role from `start_t` to `end_t` (Unix time)."""
        at = lambda t: next((found for then, found in reversed(self._by_time) if then <= t), {})  # noqa: E731
        first, last = at(start_t), at(end_t)
        return {role: round(total - first.get(role, 0.0), 2) for role, total in sorted(last.items())}


def _cpu_of(supervisor: psutil.Process) -> dict[str, float]:
    """CPU seconds so far of the supervisor and of each role, whose name is its words up to the run's folder."""
    found = {"supervisor": sum(supervisor.cpu_times()[:2])}
    for role in supervisor.children():
        with contextlib.suppress(psutil.Error):
            if "jaxroll" not in (line := role.cmdline()):  # it has just been started
                continue
            name = line[line.index("jaxroll") + 1]
            name += next((f"-{word.partition('=')[2]}" for word in line if word.startswith("--index=")), "")
            found[name] = sum(sum(one.cpu_times()[:2]) for one in (role, *role.children(recursive=True)))
    return found


def _jaxroll(
    command: str, run_dir: Path, overrides: dict[str, Any], variables: dict[str, str], deadline_s: float
) -> Cpu:
    """Run `jaxroll train` or `sft` as a user does; the CPU times of its roles."""
    environment = (
        os.environ
        | variables
        | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "benchmarks" / "jax-race"),
        }
    )
    words = [f"--config.{key}={value}" for key, value in overrides.items()]
    line = [
        sys.executable,
        "-m",
        "jaxroll",
        command,
        f"--config={ROOT}/configs/rlvr_tiny.py",
        f"--run={run_dir}",
        *words,
    ]
    cpu = Cpu()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(line, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)
        cpu.watch(process, deadline_s)
        if process.returncode != 0:
            output.seek(0)
            said = output.read()[-4000:]
            raise RuntimeError(f"jaxroll {command} in {run_dir} ended with {process.returncode}:\n{said}")
    return cpu


def measured(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a run from its rows; a step ends when its version is published."""
    steps = sorted((row for row in rows if row["kind"] == "step"), key=lambda row: row["step"])
    ends = [row["t1"] + row["publish_s"] for row in steps]
    counted = steps[SETTLING:]
    seconds, samples = ends[-1] - ends[SETTLING - 1], sum(row["samples"] for row in counted)
    evals = sorted((row["step"], row["accuracy"], row["t"]) for row in rows if row["kind"] == "eval")
    spans = [row for row in rows if row["kind"] == "span" and row["what"] == "decode" and row["role"] != "evaluator"]
    during = [row for row in spans if row["t0"] >= ends[SETTLING - 1]]
    return {
        "samples_per_s": samples / seconds,
        "steps": len(counted),
        "seconds": seconds,
        "from_t": ends[SETTLING - 1],
        "settling_s": ends[SETTLING - 1] - min(row["t0"] for row in spans),
        "step_s": [round(b - a, 4) for a, b in zip(ends[SETTLING - 1 :], ends[SETTLING:], strict=False)],
        "wait_s": statistics.mean(row["wait_s"] for row in counted),
        "train_s": statistics.mean(row["train_s"] for row in counted),
        "decode_s": sum(row["t1"] - row["t0"] for row in during) / len(counted),
        "decode_tokens_per_s": sum(row["tokens"] for row in during) / sum(row["t1"] - row["t0"] for row in during),
        "age_mean": statistics.mean(row["age_mean"] or 0.0 for row in counted),
        "age_max": max(row["age_max"] for row in steps),
        "window": next(row["in_flight_window"] for row in reversed(rows) if row["kind"] == "store"),
        **untrained(rows, steps),
        "accuracy": [accuracy for _, accuracy, _ in evals],
        "accuracy_t": [t - steps[0]["t0"] for _, _, t in evals],
    }


def untrained(rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> dict[str, float | None]:
    """The shares of sampled members and tokens that were not trained, and their `length_bias`.

    They are members of groups that ended untrained, and aborted members with their tokens so far.
    """
    figures, last = waste(rows, steps), next(row for row in reversed(rows) if row["kind"] == "store")
    (trained, _), (lost, _) = last["lengths"]["trained"], last["lengths"]["lost"]
    let_go, had = figures["aborted_members"], figures["aborted_tokens"]
    return {
        "length_bias": figures["length_bias"],
        "waste_members": (lost + let_go) / (trained + lost + let_go),
        "waste_tokens": (sum(last["tokens_expired"].values()) + had) / (last["tokens_put"] + had),
    }


def losses(log: Path, stopped: list[str]) -> dict[str, int]:
    """The numbers of environments that `stopped` (their questions), of members by other ends than done, of DEAD groups,
    and of stopped environments without a record in the log.

    Each stopped one must be a failure of its question, or a member of it with another logged end than done. One that is
    still leased is neither (`under_way`): the run ended before.
    """
    db = sqlite3.connect(f"{log.absolute().as_uri()}?mode=ro", uri=True)
    try:
        states = Counter(dict(db.execute("SELECT state, COUNT(*) FROM members GROUP BY state").fetchall()))
        ended = (
            "SELECT group_id FROM failures UNION ALL SELECT group_id FROM members "
            "WHERE state NOT IN ('done', 'failed', 'leased')"
        )
        leased = "SELECT group_id FROM members WHERE state = 'leased'"
        known, under_way = (
            Counter(
                json.loads(messages)[-1]["content"]
                for (messages,) in db.execute(f"SELECT t.messages FROM ({which}) e JOIN tasks t USING (group_id)")
            )
            for which in (ended, leased)
        )
        failures = db.execute("SELECT COUNT(*) FROM failures").fetchone()[0]
        dead = db.execute("SELECT COUNT(*) FROM groups WHERE state = 'DEAD'").fetchone()[0]
    finally:
        db.close()
    left = Counter(stopped) - known
    unknown = left - under_way
    return {
        "stopped": len(stopped),
        "failures": failures,
        "unknown": sum(unknown.values()),
        "under_way": sum((left - unknown).values()),
        "dead_groups": dead,
        **states,
    }


def learned(sync: list[dict[str, Any]], ahead: list[dict[str, Any]], target: float) -> dict[str, Any]:
    """Difference of final accuracies with its 95 % interval (Student, over seeds); time to the target, for the seeds
    that begin below it and in which both arms reach it."""
    apart = np.array([b["accuracy"][-1] - a["accuracy"][-1] for a, b in zip(sync, ahead, strict=True)])
    half = _STUDENT.get(len(apart), 1.96) * apart.std(ddof=1) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
    below = [(a, b) for a, b in zip(sync, ahead, strict=True) if max(a["accuracy"][0], b["accuracy"][0]) < target]
    pairs = [(_reached(a, target), _reached(b, target)) for a, b in below]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    return {
        "target": target,
        "begun_below": len(below),
        "reached": [sum(one is not None for one in arm) for arm in zip(*pairs, strict=True)] or [0, 0],
        "time_to_target_s": [float(np.median(arm)) for arm in zip(*both, strict=True)],
        "accuracy": [float(np.mean([run["accuracy"][-1] for run in runs])) for runs in (sync, ahead)],
        "accuracy_start": float(np.mean([run["accuracy"][0] for run in sync])),
        "accuracy_apart": float(apart.mean()),
        "accuracy_apart_half_width": float(half),
        "time_to_target": ratio([a for a, _ in both], [b for _, b in both]) if both else None,
    }


_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}  # 97.5 % points, n − 1 degrees of freedom


def _reached(run: dict[str, Any], target: float) -> float | None:
    """Seconds of training until an evaluation reached the target; None if none did."""
    return next((t for accuracy, t in zip(run["accuracy"], run["accuracy_t"], strict=True) if accuracy >= target), None)
