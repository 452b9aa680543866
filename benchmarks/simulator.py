"""Predictions of real runs by `jaxroll sim`, each from a cluster that was calibrated on a different run.

    python -m benchmarks.simulator [--quick] [--case=NAME ...] [--keep=FOLDER]

Each case has two runs of real processes: one to calibrate on, with another seed and another schedule where the table
says so, and the one that is predicted. All runs have the real store, engine, trainer and weight transfer.

    long_tail   strings to copy whose lengths are log-normal (σ = 1); a decode step takes 250 ms, a prefill 0.4 s and a
                training step 2 s at least (benchmarks/lib/paced.py), so that other load of the machine does not
                change the timing. Calibrated on the synchronous schedule, predicted at α = 2
    agentic     a judge that takes N(1 s, 1 s), cut at 0; nothing is paced. Calibrated at α = 1, predicted at α = 2
    kills       two samplers, a judge that takes N(1 s, 0.5 s), and kill -9 of samplers at planned times; nothing is
                paced. Calibrated on a run with other kills, which also gives the time of a restart
    demo        configs/demo.py without evaluations: bound by computation, so that other load of the machine changes
                both runs. It shows what the calibration cannot know, and is not part of the error figures

A prediction is the mean of five simulations whose drawn lengths and times differ; `low` and `high` are their range.
Errors are relative for times and rates, and in steps for the mean age. `error_median` and `error_max` are over times
and rates of the first three cases, `age_error_max` over their ages; `misses` lists what is beyond 15 % or 0.15 steps.
`engine_over_pace` has for both runs the engine's busy time over that of its pace: 1 if the pace was kept.
`null` are ratios of simulations that must be 1: a cluster calibrated on a simulated run over the original one, an
asynchronous schedule over the synchronous one where neither training nor a tail takes time, and two samplers over one
where one has slots for all. Class R for runs, S for simulations.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lib import paced
from benchmarks.lib.paced import Pace
from benchmarks.lib.report import ROOT, arguments, finish, say
from benchmarks.schedules.envs import VARIABLE, Race
from benchmarks.schedules.runs import Workload
from jaxroll import config as configs
from jaxroll import metrics
from jaxroll.config import Config
from jaxroll.control import run_dir as run_dirs
from jaxroll.report import record
from jaxroll.sim import costs, simulate
from jaxroll.sim.costs import Cluster, Law, LearnerCosts, RoleFailure, SamplerCosts

DEADLINE_S = 1200.0
SIMULATIONS = 5
WITHIN, WITHIN_STEPS = 0.15, 0.15
QUANTITIES = ("step_s", "tokens_per_s")
SHOWN = ("learner_busy", "learner_wait", "sampler_busy")
LOTTERY = "benchmarks.schedules.envs:lottery"


@dataclass(frozen=True)
class Kill:
    """`kill -9` of the sampler `index`, `at_s` after all samplers have compiled."""

    index: int
    at_s: float


@dataclass(frozen=True)
class Run:
    """A real run: seed, age bound and kills."""

    seed: int
    alpha: float
    kills: tuple[Kill, ...] = ()


@dataclass(frozen=True)
class Case:
    """A workload, the run to calibrate on, and the run to predict."""

    name: str
    calibration: Run
    predicted: Run
    workload: Workload | None = None  # None: the demo
    pace: Pace | None = None
    counts: bool = True  # in the figures of the errors


def _workload(name: str, steps: int, race: Race, **more: Any) -> Workload:
    settings = {"learner.learning_rate": 1e-6, "sft.steps": 40} | more.pop("settings", {})
    return Workload(name, steps, 8, env=LOTTERY, race=race, settings=settings, **more)


_TWO = {
    "sampler.count": 2,
    "sampler.slots": 32,
    "sampler.concurrent_episodes": 32,
    "store.rpc_deadline_s": 4.0,
    "store.lease_s": 6.0,
}
CASES = (
    Case("long_tail", Run(1, 0.0), Run(0, 2.0),
         _workload("long_tail", 20, Race(), sigma=1.0, most=64, settings={"sft.steps": 120}), Pace(0.25, 0.4, 2.0)),
    Case("agentic", Run(1, 1.0), Run(0, 2.0), _workload("agentic", 40, Race((1.0, 1.0)))),
    Case("kills", Run(1, 1.0, (Kill(0, 12.0),)), Run(0, 1.0, (Kill(1, 10.0), Kill(0, 35.0))),
         _workload("kills", 40, Race((1.0, 0.5)), settings=_TWO)),
    Case("demo", Run(0, 1.0), Run(1, 1.0), counts=False),
)  # fmt: skip


# --- Real runs


@dataclass(frozen=True)
class Recorded:
    """A recorded run: its folder, the seconds of a restart (0 without kills) and the load while it ran."""

    run_dir: Path
    restart_s: float
    loads: tuple[float, ...] = field(default=())

    @property
    def config(self) -> Config:
        """Its config."""
        return configs.parse(record.load(self.run_dir).config)

    @property
    def figures(self) -> simulate.Figures:
        """Its measured figures."""
        return simulate.figures(list(record.load(self.run_dir).rows), self.config)


def recorded(case: Case, run: Run, folder: Path, steps: int) -> Recorded:
    """Train, or take the run that is in the folder already."""
    run_dir = folder / f"{case.name}-{run.seed}-{run.alpha:g}"
    facts = run_dir.with_suffix(".json")
    if not facts.is_file():
        started = time.monotonic()
        words, variables = _settings(case, run, folder, steps)
        kills = _Kills(
            run, run_dir, 1 if case.workload is None else int(case.workload.settings.get("sampler.count", 1))
        )
        loads = _started("train", run_dir, case, words, variables, kills)
        facts.write_text(json.dumps({"restart_s": kills.restart_s(), "loads": loads}))
        say(f"{run_dir.name}: {time.monotonic() - started:.0f} s, load {min(loads):.1f} to {max(loads):.1f}")
    found = json.loads(facts.read_text())
    return Recorded(run_dir, found["restart_s"], tuple(found["loads"]))


def _settings(case: Case, run: Run, folder: Path, steps: int) -> tuple[list[str], dict[str, str]]:
    """Options of `jaxroll train` and variables of its environment; makes the warm start."""
    if case.workload is None:
        values = {"run.seed": run.seed, "evaluator.every": 0}
        return [f"--config={ROOT}/configs/demo.py", *(f"--config.{k}={v}" for k, v in values.items())], {}
    workload = case.workload
    if not (questions := folder / f"{workload.name}.jsonl").is_file():
        workload.questions(questions)
    race = dataclasses.replace(workload.race, questions=str(questions))
    variables = {VARIABLE: json.dumps(asdict(race))}
    if case.pace is not None:
        variables[paced.VARIABLE] = json.dumps(asdict(case.pace))
    values = workload.overrides(folder, run.alpha, 0, 1)
    warm = folder / f"{workload.name}-warm"

    def words(changed: dict[str, Any]) -> list[str]:
        options = (f"--config.{key}={value}" for key, value in (values | changed).items())
        return [f"--config={ROOT}/configs/rlvr_tiny.py", *options]

    if not (warm / "warm").is_dir():
        _started("sft", warm, case, words({}), variables)
    changed = {"model.path": str(warm / "warm"), "sft.steps": 0, "run.seed": run.seed, "schedule.steps": steps}
    return words(changed | {"learner.checkpoint_every": steps}), variables


class _Kills:
    """Kills samplers at their times, and measures their restarts. Uses the metrics of the run only."""

    def __init__(self, run: Run, run_dir: Path, samplers: int) -> None:
        self._left, self._samplers = sorted(run.kills, key=lambda kill: kill.at_s), samplers
        self._rows, self._follower = list[dict](), metrics.RowReader(run_dir / "metrics.jsonl", at_end=False)
        self._done: list[tuple[str, float]] = []

    def look(self, process: subprocess.Popen) -> None:
        """Kill the samplers whose time has come."""
        self._rows += self._follower.rows()
        ready = self._compiled()
        if len({role for role, _ in ready}) < self._samplers or not self._left:
            return
        start_t = max(min(t for role, t in ready if role == name) for name in {role for role, _ in ready})
        while self._left and time.time() >= start_t + self._left[0].at_s:
            index = self._left.pop(0).index
            for child in psutil.Process(process.pid).children(recursive=True):
                line = child.cmdline()
                if "sampler" in line and f"--index={index}" in line:
                    os.kill(child.pid, signal.SIGKILL)
                    self._done.append((f"sampler-{index}", time.time()))

    def _compiled(self) -> list[tuple[str, float]]:
        return [
            (row["role"], row["t"])
            for row in self._rows
            if row.get("what") == "compiling the engine"
            and row.get("state") == "end"
            and row["role"].startswith("sampler")
        ]

    def restart_s(self) -> float:
        """The mean seconds from a kill until the new process has compiled; 0 without one."""
        self._rows += self._follower.rows()
        times = [
            min((t for role, t in self._compiled() if role == name and t > at_t), default=at_t) - at_t
            for name, at_t in self._done
        ]
        return sum(times) / len(times) if times else 0.0


def _started(
    command: str,
    run_dir: Path,
    case: Case,
    words: Sequence[str],
    variables: dict[str, str],
    kills: _Kills | None = None,
) -> list[float]:
    """Run `jaxroll COMMAND` to its end; the load meanwhile. RuntimeError with its output if it fails."""
    module = paced.MODULE if case.pace is not None and command == "train" else "jaxroll"
    environment = os.environ | variables | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-m", module, command, f"--run={run_dir}", *words]
    loads, until_s, pause = [os.getloadavg()[0]], time.monotonic() + DEADLINE_S, threading.Event()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(line, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        while process.poll() is None:
            if time.monotonic() > until_s:
                process.terminate()
                process.wait(timeout=60)
                raise subprocess.TimeoutExpired(line, DEADLINE_S)
            if kills is not None:
                kills.look(process)
            loads.append(os.getloadavg()[0])
            pause.wait(0.25)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(line)} ended with {process.returncode}:\n{output.read()[-4000:]}")
    return loads


# --- Predictions


def predicted(case: Case, calibration: Recorded, config: Config) -> list[simulate.Figures]:
    """The figures of simulations of the predicted run, from the records of the other one."""
    failures = tuple(
        RoleFailure(kill.at_s, f"sampler-{kill.index}", calibration.restart_s) for kill in case.predicted.kills
    )
    cluster = dataclasses.replace(costs.calibrated(calibration.run_dir), failures=failures)
    seeds = (dataclasses.replace(config, run=dataclasses.replace(config.run, seed=n)) for n in range(SIMULATIONS))
    return [simulate.simulate(one, cluster, Path(), keep=False) for one in seeds]


def over_pace(run_dir: Path, pace: Pace) -> float:
    """The engine's busy time over that of its pace."""
    last = [row for row in record.load(run_dir).rows if row.get("kind") == "stats" and "decode_steps" in row][-1]
    return last["step_s"] / (last["decode_steps"] * pace.decode_step_s + last["prefills"] * pace.prefill_s)


def compared(case: Case, folder: Path, steps: int) -> dict[str, Any]:
    """The rows of a case: the predicted and the measured value of each quantity, and the error."""
    calibration, actual = (recorded(case, run, folder, steps) for run in (case.calibration, case.predicted))
    found, real = predicted(case, calibration, actual.config), actual.figures
    rows: dict[str, Any] = {}
    for name in (*QUANTITIES, "age_mean", *SHOWN):
        values = [one[name] for one in found]
        mean = statistics.fmean(values)
        error = mean / real[name] - 1 if name in QUANTITIES else mean - real[name]
        rows[name] = {
            "predicted": mean,
            "low": min(values),
            "high": max(values),
            "measured": real[name],
            "error": error,
        }
    runs = (calibration, actual)
    if case.pace is not None:
        rows["engine_over_pace"] = [over_pace(run.run_dir, case.pace) for run in runs]
    return rows | {"loads": [(min(run.loads), max(run.loads)) for run in runs], "steps": real["steps"],
                   "age_max": [max(one["age_max"] for one in found), real["age_max"]],
                   "restart_s": calibration.restart_s}  # fmt: skip


# --- Null workloads


def nulls() -> dict[str, float]:
    """Ratios of step times that must be 1."""
    even = Cluster(
        source="null",
        sampler=SamplerCosts(step_overhead_s=0.1),
        rpc_s=0.0,
        workload=costs.Workload(answer_tokens=Law(mean=10)),
    )
    base = costs.checked(configs.parse({
        "schedule": {"steps": 100, "groups_per_step": 4, "group_size": 2, "alpha": 1.0},
        "sampler": {"slots": 8, "decode_chunk": 1, "prefill_rows": 8}, "sampling": {"max_tokens": 16},
        "task": {"max_prompt_tokens": 32},
    }))  # fmt: skip

    def step_s(cluster: Cluster, **changes: Any) -> float:
        overrides = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
        config = configs.parse(configs.override(configs.to_dict(base), overrides))
        return simulate.simulate(config, cluster, Path(), keep=False)["step_s"]

    tail = dataclasses.replace(
        even,
        learner=LearnerCosts(step_overhead_s=0.5),
        workload=costs.Workload(answer_tokens=Law("normal", 8, 1, 1), env_s=Law("normal", 0.2, 0.05)),
    )
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        run_dirs.create(run, base, [])
        original = simulate.simulate(base, tail, run)["step_s"]
        again = step_s(costs.calibrated(run))
    return {
        "calibrated_on_itself": again / original,
        "bounded_over_sync": step_s(even, schedule__alpha=2.0) / step_s(even, schedule__alpha=0.0),
        "two_samplers_over_one": step_s(even, schedule__alpha=0.0, sampler__count=2)
        / step_s(even, schedule__alpha=0.0),
    }


def summary(table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Median and largest errors of the cases that count, and the misses of all."""
    counted = [table[case.name] for case in CASES if case.counts and case.name in table]
    errors = sorted(abs(rows[name]["error"]) for rows in counted for name in QUANTITIES)
    ages = [abs(rows["age_mean"]["error"]) for rows in counted]
    limits = dict.fromkeys(QUANTITIES, WITHIN) | {"age_mean": WITHIN_STEPS}
    misses = [
        f"{case} {name} {rows[name]['error']:+.3f}"
        for case, rows in table.items()
        for name, limit in limits.items()
        if abs(rows[name]["error"]) > limit
    ]
    middle = len(errors) // 2
    median = (errors[middle] + errors[-middle - 1]) / 2 if errors else None
    return {
        "error_median": median,
        "error_max": max(errors, default=None),
        "age_error_max": max(ages, default=None),
        "misses": misses,
    }


def main() -> int:
    """Measure."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="one case; repeatable")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the runs, and from which they are taken again")
    chosen, started = parser.parse_args(), time.monotonic()
    wanted = chosen.case or [case.name for case in CASES]
    table: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="simulator-") as temporary:
        folder = (chosen.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        for case in (case for case in CASES if case.name in wanted):
            steps = 12 if chosen.quick or case.workload is None else case.workload.steps
            table[case.name] = compared(case, folder, steps)
            say(json.dumps({case.name: table[case.name]}))
    finish(
        summary(table) | {"null": nulls(), "rows": table, "class": {"measured": "R", "predicted": "S"}},
        command=" ".join(["python", *sys.orig_argv[1:]]),
        started=started,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
