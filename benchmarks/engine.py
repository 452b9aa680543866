"""How fast is the engine beside google-tunix's sampler and Hugging Face `generate`, and does it ever stand still?

    python benchmarks/engine.py [--quick] [--case=NAME ...] [--threads=ARM:N ...] [--rounds=N] [--resume]

Races: the same random Qwen3 of 0.67 million parameters, the same prompts and lengths, a long-lived process per arm.
Greedy tokens must be equal on 99 % of the prompts, else there is no race. Then runs alternate, sampled at temperature
1, compiled beforehand, each arm with the number of threads that suits it best; only tokens up to a request's own length
count. Then our engine alone: inter-token latency while long prompts come and go (`storm`), and at a weight swap
(`swap`).
The last line is one JSON object with a case each.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from _children import Child, python_of
from _engine_cases import Case, measured_alone, prepare, racer
from _engine_latency import Scale
from _report import Runs, arguments, finish, ratio, say, spread

EQUAL = 0.99
ROUNDS = 7
CASES = [
    Case("tunix_equal", "tunix", 1.2, 64, 1, 16, 32, repeats=8,
         options={"prefill_rows": 64, "decode_chunk": 32, "page_tokens": 8}),
    Case("tunix_lognormal", "tunix", 2.5, 384, 1, 16, 16, sigma=1.0, most=256,
         options={"prefill_rows": 16, "decode_chunk": 16, "page_tokens": 16}),
    Case("tunix_shared_prefix", "tunix", 3.0, 8, 8, 128, 32, repeats=4,
         options={"prefill_rows": 8, "decode_chunk": 32, "page_tokens": 32}),
    Case("transformers_equal", "torch", 3.0, 64, 1, 16, 32, repeats=8,
         options={"prefill_rows": 64, "decode_chunk": 32, "page_tokens": 8}),
]  # fmt: skip
SMALL = Scale(watched=2, tokens=48, guests=2, guest_prompt=80, guest_tokens=2, chunk=4, prefill_tokens=16)


def small(case: Case) -> Case:
    """The same in small, for --quick."""
    options = case.options | {"prefill_rows": 4, "decode_chunk": 4}
    groups = max(1, 16 // case.group_size) if case.sigma else max(1, 8 // case.group_size)
    return replace(case, groups=groups, batch=8, median=4, most=16 if case.sigma else 0, repeats=1, options=options)


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of prompts that both continue with the same tokens."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


class Race:
    """One case's arms; their processes start when a run is wanted that is not in the file yet."""

    def __init__(self, case: Case, folder: Path, runs: Runs, threads: dict[str, int]) -> None:
        self.case, self._folder, self._runs, self._threads = case, folder, runs, threads
        self._arms: dict[tuple[str, int], Child] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _arm(self, name: str, threads: int) -> Child:
        if (name, threads) not in self._arms:
            arm = racer(name, self._folder, self.case, threads)
            self._stack.callback(arm.close)
            self._arms[name, threads] = arm
        return self._arms[name, threads]

    def result(self, rounds: int) -> dict[str, Any]:
        """Agreement, then tokens a second of both and their ratio; without agreement no race."""
        arms = ("ours", self.case.peer)
        best = {arm: self._best(arm) for arm in arms}
        equal = self._equal(best)
        result: dict[str, Any] = {"aim": self.case.aim, "greedy_equal": equal, "threads": best}
        if equal < EQUAL:
            return result | {"met": False, "why": "the arms' greedy tokens differ: no race"}
        raced = {arm: lambda arm=arm: self._run(arm, best[arm]) for arm in arms}
        runs = self._runs.alternate({f"{self.case.name} {arm}": run for arm, run in raced.items()}, rounds)
        rates = {arm: [run["tokens_per_s"] for run in runs[f"{self.case.name} {arm}"]] for arm in arms}
        found = ratio(rates["ours"], rates[self.case.peer])
        busy = {arm: [1 / run["cpu_s"] for run in runs[f"{self.case.name} {arm}"]] for arm in arms}
        last = runs[f"{self.case.name} ours"][-1]
        return result | {
            "ratio": found, "ratio_per_cpu_second": ratio(busy["ours"], busy[self.case.peer]),
            "met": found["value"] >= self.case.aim, "peer": self.case.peer,
            "tokens_per_s": {arm: spread(values) for arm, values in rates.items()},
            "useful_tokens": self.case.work().useful, "options": self.case.engine_options(),
            **{key: last[key] for key in ("steps", "dispatches", "prefills", "host_share")},
        }  # fmt: skip

    def _run(self, arm: str, threads: int) -> dict[str, Any]:
        ran = self._arm(arm, threads).ask("run")
        return {"tokens_per_s": self.case.work().useful / ran["seconds"], "threads": threads, **ran}

    def _best(self, arm: str) -> int:
        """The number of threads, of one for each core, with which three runs of `arm` were fastest."""
        if arm in self._threads:
            return self._threads[arm]
        tried = {}
        for threads in range(1, min(2, os.cpu_count() or 1) + 1):
            runs = [self._trial(arm, threads, number) for number in range(3)]
            tried[threads] = statistics.median(run["tokens_per_s"] for run in runs)
        return max(tried, key=lambda threads: tried[threads])

    def _trial(self, arm: str, threads: int, number: int) -> dict[str, Any]:
        name = f"{self.case.name} {arm}, trial with {threads} threads"
        return self._runs.run(name, number, lambda: self._run(arm, threads))

    def _equal(self, best: dict[str, int]) -> float:
        def compare() -> dict[str, Any]:
            ours, theirs = (self._arm(arm, threads).ask("greedy")["tokens"] for arm, threads in best.items())
            return {"equal": agreement(ours, theirs)}

        return self._runs.run(f"{self.case.name} greedy", 0, compare)["equal"]


def main() -> int:
    """Measure; 1 when arms do not agree."""
    names = [*(case.name for case in CASES), "storm", "swap"]
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--case", action="append", choices=names, help="this one; again for more (default: all)")
    parser.add_argument("--threads", action="append", default=[], help="ours:1, tunix:2, torch:1: do not try both")
    chosen, started = parser.parse_args(), time.monotonic()
    wanted = chosen.case or names
    threads = {arm: int(count) for arm, _, count in (word.partition(":") for word in chosen.threads)}
    threads = ({"ours": 1, "tunix": 1, "torch": 1} if chosen.quick else {}) | threads
    cases = [small(case) if chosen.quick else case for case in CASES if case.name in wanted]
    latency = SMALL if chosen.quick else Scale()
    rounds = chosen.rounds or (2 if chosen.quick else ROUNDS)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="engine-") as name:
        folder = Path(name)
        prepare(folder, cases)
        for case in cases:
            if not python_of(case.peer).exists():
                say(f"{case.name} is skipped: no .venv-{case.peer} (make venv-{case.peer})")
                result[case.name] = {"skipped": f"no .venv-{case.peer}"}
                continue
            runs = Runs("engine", case.settings() | {"threads": threads}, chosen.runs_file, chosen.resume)
            with Race(case, folder, runs, threads) as race:
                result[case.name] = race.result(rounds)
        if {"storm", "swap"} & set(wanted):
            runs = Runs("engine", asdict(latency), chosen.runs_file, chosen.resume)
            result |= measured_alone(runs, latency, folder, rounds, wanted)
    result["class"] = "R"
    command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    finish(result, command=command, started=started)
    return int(any(case.get("greedy_equal", 1.0) < EQUAL for case in result.values() if isinstance(case, dict)))


if __name__ == "__main__":
    sys.exit(main())
