"""What is asynchrony worth? The same work at α = 0 and at α = 1, 2, 4, on the same two cores, in whole runs.

    python benchmarks/sync_vs_async.py [--quick] [--workload=NAME ...] [--alpha=A ...] [--seeds=N] [--resume]

Every run is `jaxroll train` as a user starts it, at most a minute of training, from a warm start that depends on the
seed alone; each is appended to a file as it ends, and --resume goes on. The synchronous arm has both cores for
whichever role is at work (`placement.cpu_threads=2`), or one, whichever was faster; both arms hold the same number of
environments, which never wait for one another inside a step.

    rlvr_long_tail   strings to copy, their lengths log-normal (σ = 1), at most eight medians
    constant         strings of one length: nothing to gain but overlap, and proposition 2 says how much
    agentic_latency  a judge that takes N(μ, σ) seconds, cut at 0; σ = 0, μ/2, μ
    no_training      nobody is paid, so no gradient is computed: nothing to gain at all

Samples a second are those of the steps after the first four. The ceiling of a workload is what the stages measured
alone and beside each other allow; see `ceiling`. The last line is one JSON object:
{WORKLOAD: {α: {"ratio", "low", "high", …}}}.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from _report import ROOT, Runs, arguments, finish, ratio, say

ALPHAS = (1.0, 2.0, 4.0)
SEEDS = 5
SETTLING = 4  # steps that are not counted: the pipeline fills, and whatever is first is slow
DEADLINE_S = 300.0
GROUPS, GROUP_SIZE, ENVIRONMENTS = 8, 8, 64
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Workload:
    """What a run trains on. `latency_s` is mean and deviation of the judge's time."""

    name: str
    steps: int
    median: int  # characters of a question
    sigma: float = 0.0
    most: int = 0
    latency_s: tuple[float, float] = (0.0, 0.0)
    env: str = "single_turn"
    evaluations: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def questions(self, path: Path, count: int = 6000) -> None:
        """Random strings to copy, one a line; a later line has never the text of an earlier one."""
        chance, seen = np.random.default_rng(11), set()
        longest = self.most or self.median
        with path.open("w") as file:
            while len(seen) < count:
                length = int(np.clip(np.rint(self.median * np.exp(self.sigma * chance.standard_normal())), 3, longest))
                text = "".join(chance.choice(list("abcdefgh"), length))
                if text not in seen:
                    seen.add(text)
                    file.write(json.dumps({"question": text, "answer": text}) + "\n")

    def overrides(self, folder: Path, alpha: float, seed: int, threads: int) -> dict[str, Any]:
        """The config of a run, over the defaults."""
        longest, every = self.most or self.median, self.steps // self.evaluations if self.evaluations else 0
        return {
            "run.seed": seed, "placement.platform": "cpu", "placement.cpu_threads": threads,
            "task.source": "jsonl", "task.path": str(folder / f"{self.name}.jsonl"), "task.env": self.env,
            "task.max_prompt_tokens": longest + 8, "task.heldout_start": 5000, "task.heldout_items": 256,
            "sft.start": 4000, "sft.steps": 120, "schedule.alpha": alpha, "schedule.steps": self.steps,
            "schedule.groups_per_step": GROUPS, "schedule.group_size": GROUP_SIZE, "schedule.window": "full",
            "sampling.max_tokens": longest + 2, "sampler.slots": ENVIRONMENTS, "sampler.episodes": ENVIRONMENTS,
            "sampler.prefill_rows": 8, "sampler.prefill_buckets": f"({longest + 8},)", "sampler.decode_chunk": 8,
            "learner.row_tokens": 2 * longest + 16, "learner.micro_rows": 8, "learner.learning_rate": 1e-4,
            "learner.checkpoint_every": self.steps, "evaluator.every": every,
            **self.settings,
        }  # fmt: skip


WORKLOADS = [
    Workload("rlvr_long_tail", 60, 8, sigma=1.0, most=64, evaluations=4),
    Workload("constant", 60, 16),
    *(Workload(f"agentic_latency_{name}", 20, 8, latency_s=(1.0, deviation), env="_race_envs:waiting")
      for name, deviation in (("0", 0.0), ("half", 0.5), ("one", 1.0))),
    Workload("no_training", 60, 16, env="_race_envs:pays_nobody"),
]  # fmt: skip


def trained(workload: Workload, folder: Path, alpha: float, seed: int, threads: int) -> dict[str, Any]:
    """One run: its rate, the seconds of its stages, its accuracies."""
    words = [f"--config.{key}={value}" for key, value in workload.overrides(folder, alpha, seed, threads).items()]
    with tempfile.TemporaryDirectory(prefix="race-", dir=folder) as name:
        run_dir = Path(name) / "run"
        environment = os.environ | {
            "JAXROLL_RACE_LATENCY": json.dumps(workload.latency_s), "PYTHONPATH": f"{ROOT}{os.pathsep}{_HERE}",
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "benchmarks" / "jax-race"), "JAX_PLATFORMS": "cpu",
        }  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "jaxroll",
            "train",
            f"--config={ROOT}/configs/rlvr_tiny.py",
            f"--run={run_dir}",
        ]
        done = subprocess.run(
            [*command, *words], env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        if done.returncode != 0:
            said = done.stdout[-2000:] + done.stderr[-2000:]
            raise RuntimeError(f"{workload.name} at α = {alpha:g} ended with {done.returncode}:\n{said}")
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return measured(rows)


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
        "samples_per_s": samples / seconds, "steps": len(counted), "seconds": seconds,
        "wait_s": statistics.mean(row["wait_s"] for row in counted),
        "train_s": statistics.mean(row["train_s"] + row["publish_s"] for row in counted),
        "decode_s": sum(row["t1"] - row["t0"] for row in during) / len(counted),
        "age_mean": statistics.mean(row["age_mean"] or 0.0 for row in counted),
        "age_max": max(row["age_max"] for row in steps),
        "accuracy": [accuracy for _, accuracy, _ in evals], "accuracy_t": [t - steps[0]["t0"] for _, _, t in evals],
    }  # fmt: skip


def ceiling(sync: list[dict[str, Any]], ahead: list[dict[str, Any]]) -> float:
    """The most that overlap alone can give: a synchronous step over the longer of the two stages beside the other.

    Alone a step takes generation and training after one another. Beside each other both are slower (they share memory
    and cores), and a step takes the longer one: ROLL Flash's proposition 2 with the stage times as they are.
    """
    mean = lambda runs, key: statistics.mean(run[key] for run in runs)  # noqa: E731
    return (mean(sync, "wait_s") + mean(sync, "train_s")) / max(mean(ahead, "decode_s"), mean(ahead, "train_s"))


def compared(sync: list[dict[str, Any]], ahead: list[dict[str, Any]]) -> dict[str, Any]:
    """The ratio of rates, paired by seed, and what belongs to it."""
    found = ratio([run["samples_per_s"] for run in ahead], [run["samples_per_s"] for run in sync])
    result = {
        "ratio": found["value"], "low": found["low"], "high": found["high"], "runs": len(sync),
        "samples_per_s": statistics.median(run["samples_per_s"] for run in ahead),
        "sync_samples_per_s": statistics.median(run["samples_per_s"] for run in sync),
        "ceiling": ceiling(sync, ahead), "age_mean": statistics.mean(run["age_mean"] for run in ahead),
        "age_max": max(run["age_max"] for run in ahead),
        **{f"{key}": [statistics.mean(run[key] for run in runs) for runs in (sync, ahead)]
           for key in ("wait_s", "train_s", "decode_s")},
    }  # fmt: skip
    return result | (_learned(sync, ahead) if sync[0]["accuracy"] else {})


def _learned(sync: list[dict[str, Any]], ahead: list[dict[str, Any]]) -> dict[str, Any]:
    """Final accuracies' difference with its 95 % interval (Student, over seeds); the time to the lower of both ends."""
    apart = np.array([b["accuracy"][-1] - a["accuracy"][-1] for a, b in zip(sync, ahead, strict=True)])
    half = _STUDENT.get(len(apart), 1.96) * apart.std(ddof=1) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
    reached = []
    for a, b in zip(sync, ahead, strict=True):
        target = min(a["accuracy"][-1], b["accuracy"][-1])
        reached.append([_reached(run, target) for run in (a, b)])
    return {
        "accuracy": [float(np.mean([run["accuracy"][-1] for run in runs])) for runs in (sync, ahead)],
        "accuracy_start": float(np.mean([run["accuracy"][0] for run in sync])),
        "accuracy_apart": float(apart.mean()), "accuracy_apart_half_width": float(half),
        "time_to_accuracy": ratio([a for a, _ in reached], [b for _, b in reached]),
    }  # fmt: skip


_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}  # 97.5 % points, n − 1 degrees of freedom


def _reached(run: dict[str, Any], target: float) -> float:
    return next(t for accuracy, t in zip(run["accuracy"], run["accuracy_t"], strict=True) if accuracy >= target) + 1e-3


def best_threads(workload: Workload, folder: Path, runs: Runs) -> int:
    """One thread a role or two, whichever makes the synchronous arm faster."""
    tried = {}
    for threads in range(1, min(2, os.cpu_count() or 1) + 1):
        arm = f"{workload.name} α=0, trial with {threads} threads"
        tried[threads] = runs.run(arm, 0, lambda t=threads: trained(workload, folder, 0.0, 100, t))
    return max(tried, key=lambda threads: tried[threads]["samples_per_s"])


def raced(workload: Workload, folder: Path, runs: Runs, alphas: list[float], seeds: int) -> dict[str, Any]:
    """A workload's table: by α."""
    workload.questions(folder / f"{workload.name}.jsonl")
    threads = best_threads(workload, folder, runs)
    made: dict[float, list[dict[str, Any]]] = {alpha: [] for alpha in (0.0, *alphas)}
    for seed in range(seeds):
        for alpha in list(made)[:: 1 if seed % 2 == 0 else -1]:
            count = threads if alpha == 0 else 1
            arm = f"{workload.name} α={alpha:g}"
            made[alpha].append(runs.run(arm, seed, lambda a=alpha, s=seed, c=count: trained(workload, folder, a, s, c)))
    return {"sync_threads": threads, **{f"{alpha:g}": compared(made[0.0], made[alpha]) for alpha in alphas}}


def main() -> int:
    """Measure."""
    names = [workload.name for workload in WORKLOADS]
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--workload", action="append", choices=names, help="this one; again for more (default: all)")
    parser.add_argument("--alpha", action="append", type=float, help=f"again for more (default: {ALPHAS})")
    parser.add_argument("--seeds", type=int, default=0, help=f"runs of each (default: {SEEDS})")
    chosen, started = parser.parse_args(), time.monotonic()
    seeds = chosen.seeds or chosen.rounds or (1 if chosen.quick else SEEDS)
    alphas = chosen.alpha or ([1.0] if chosen.quick else list(ALPHAS))
    wanted = chosen.workload or (["constant"] if chosen.quick else names)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="race-") as name:
        for workload in (workload for workload in WORKLOADS if workload.name in wanted):
            if chosen.quick:
                workload = replace(workload, steps=8, evaluations=0)
            runs = Runs("sync_vs_async", asdict(workload), chosen.runs_file, chosen.resume)
            result[workload.name] = raced(workload, Path(name), runs, alphas, seeds)
            say(json.dumps(result[workload.name]))
    command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    finish(result | {"class": "R"}, command=command, started=started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
