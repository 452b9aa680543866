"""Engine throughput compared with google-tunix's sampler and Hugging Face `generate`, and its latency under load.

    python -m benchmarks.engine [--quick] [--case=NAME ...] [--threads=ARM:N ...] [--rounds=N] [--resume]

Races: the same random Qwen3 of 0.62 million parameters, the same prompts and lengths, a long-lived process per arm.
Greedy tokens must be equal on 99 % of the prompts, otherwise there is no race. Then runs alternate, sampled at
temperature 1 and compiled beforehand, each arm with its fastest number of threads (ours with a mesh of as many devices
of one thread each, slots spread over them). Only tokens up to a request's own length count. Then our engine alone:
inter-token latency while long prompts come and go (`storm`), and at a weight swap (`swap`), and speculative decoding
compared with one token at a time (`speculation`).
The last line is one JSON object with one entry per case.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.engine.cases import Case, measured_alone, prepare, racer, speculation
from benchmarks.engine.latency import Scale
from benchmarks.engine.speculation import Speculation
from benchmarks.lib.arms import Arms, best_threads, raced
from benchmarks.lib.child import python_of
from benchmarks.lib.report import Runs, arguments, finish, say

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
SMALL = Scale(watched=2, tokens=48, extra=2, extra_prompt=80, extra_tokens=2, chunk=4, prefill_tokens=16)
LITTLE = Speculation(slots=4, requests=4, prompt=16, tokens=64, chunk=4)


def small(case: Case) -> Case:
    """A small version of the case, for --quick."""
    options = case.options | {"prefill_rows": 4, "decode_chunk": 4}
    groups = max(1, 16 // case.group_size) if case.sigma else max(1, 8 // case.group_size)
    return replace(case, groups=groups, batch=8, median=4, most=16 if case.sigma else 0, repeats=1, options=options)


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of prompts that both continue with the same tokens."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def race(case: Case, arms: Arms, runs: Runs, threads: dict[str, int], rounds: int) -> dict[str, Any]:
    """Agreement, then tokens per second of both arms and their ratio; without agreement no race."""

    def run(arm: str, count: int) -> dict[str, Any]:
        ran = arms.get(arm, count).ask("run")
        return {"tokens_per_s": case.work().useful / ran["seconds"], "threads": count, **ran}

    def compare() -> dict[str, Any]:
        ours, theirs = (arms.get(arm, count).ask("greedy")["tokens"] for arm, count in best.items())
        return {"equal": agreement(ours, theirs)}

    best = {arm: best_threads(case.name, arm, threads, runs, run) for arm in ("ours", case.peer)}
    equal = runs.run(f"{case.name} greedy", 0, compare)["equal"]
    result: dict[str, Any] = {"aim": case.aim, "greedy_equal": equal, "threads": best}
    if equal < EQUAL:
        return result | {"met": False, "why": "the arms' greedy tokens differ: no race"}
    found, of = raced(case.name, best, runs, run, rounds)
    return (
        result
        | found
        | {
            "met": found["ratio"] >= case.aim,
            "useful_tokens": case.work().useful,
            "options": case.engine_options(),
            **{key: of["ours"][-1][key] for key in ("steps", "dispatches", "prefills", "host_share")},
        }
    )


def main() -> int:
    """Measure; return 1 if arms do not agree."""
    names = [*(case.name for case in CASES), "storm", "swap", "speculation"]
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
            with Arms(partial(racer, folder=folder, case=case)) as arms:
                result[case.name] = race(case, arms, runs, threads, rounds)
        if {"storm", "swap"} & set(wanted):
            runs = Runs("engine", asdict(latency), chosen.runs_file, chosen.resume)
            result |= measured_alone(runs, latency, folder, rounds, wanted)
        if "speculation" in wanted:
            drafts = LITTLE if chosen.quick else Speculation()
            runs = Runs("engine", asdict(drafts), chosen.runs_file, chosen.resume)
            result["speculation"] = speculation(runs, drafts, folder, rounds)
    result["class"] = "R"
    command = " ".join(["python", *sys.orig_argv[1:]])
    finish(result, command=command, started=started)
    return int(any(case.get("greedy_equal", 1.0) < EQUAL for case in result.values() if isinstance(case, dict)))


if __name__ == "__main__":
    sys.exit(main())
