"""Programs of models in the sandbox: scores per second, and attempts to be paid or to escape.

A scoring pool of two workers judges one-line programs, all different, by one test each: programs that read stdin, the
same in a form that may not share a process (see `jaxroll.rewards.plain`), the same with an import, and functions that
are called with a case. Aim: at least 2,000 scores per second on two cores for one-line programs. Then every reward hack
and every escape of `benchmarks.lib.hacks` is run: none may be paid, none may have an effect, and the pool must still
score. `cpu_ms_per_score` counts all processes and depends less on other work on the machine than the rate does.

    python -m benchmarks.sandbox [--quick] [--scores=8000] [--rounds=3]
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.lib import hacks
from benchmarks.lib.report import Runs, arguments, finish, say, spread
from jaxroll.rewards.programs import Run, SandboxedPrograms
from jaxroll.rewards.scoring_pool import ScoringPool

WORKERS = 2
AIM_PER_S = 2000.0
STDIN = json.dumps({"scorer": "code", "tests": [{"input": "41\n", "output": "42"}]})
CASE = json.dumps({"scorer": "code", "tests": [{"args": [41], "expected": 42}], "entry_point": "f"})
PROGRAMS = {
    "one_line": (STDIN, "print(int(input()) + 1)  # {}"),
    "own_process": (STDIN, "print(type(1)(input()) + 1)  # {}"),
    "with_import": (STDIN, "import math; print(math.ceil(float(input())) + 1)  # {}"),
    "function": (CASE, "f = lambda x: x + 1  # {}"),
}


def cpu_s() -> float:
    """Processor time of this process and all its descendants, including those that have ended."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def scored(pool: ScoringPool, arm: str, scores: int) -> dict[str, float]:
    """The rate of one run; AssertionError if a right program is not paid."""
    args, program = PROGRAMS[arm]

    async def run() -> list[float]:
        return await asyncio.gather(*(pool.score(args, program.format(number)) for number in range(scores)))

    asyncio.run(run_warm_up(pool, args))
    began, used = time.perf_counter(), cpu_s()
    found = asyncio.run(run())
    wall_s, used = time.perf_counter() - began, cpu_s() - used
    assert set(found) == {1.0}, "a right program was not paid"
    return {"scores_per_s": scores / wall_s, "cpu_ms_per_score": 1000 * used / scores}


async def run_warm_up(pool: ScoringPool, args: str) -> None:
    """Wait until every worker and its fork servers have started."""
    await asyncio.gather(
        *(pool.score(args, f"import math\nprint(42)\ndef f(x): return {number}") for number in range(64))
    )
    await asyncio.gather(*(pool.score(args, f"print({number})") for number in range(64)))


def hacks_paid(pool: ScoringPool) -> list[str]:
    """The names of the hacks that are paid."""
    printing = json.dumps({"scorer": "code", "tests": list(hacks.STDIN_TESTS), "time_limit_s": 2.0})
    called = json.dumps({"scorer": "code", "tests": list(hacks.ASSERTS), "time_limit_s": 2.0})
    attempts = [(name, printing, program) for name, program in hacks.PRINTING.items()]
    attempts += [(name, called, program) for name, program in hacks.CALLED.items()]

    async def run() -> list[float | BaseException]:
        return await asyncio.gather(
            *(pool.score(args, program) for _, args, program in attempts), return_exceptions=True
        )

    found = asyncio.run(run())
    return [name for (name, *_), paid in zip(attempts, found, strict=True) if paid != 0.0]


def escapes() -> list[str]:
    """The names of the escapes that had an effect or read what they must not."""
    found: list[str] = []
    programs = SandboxedPrograms()
    try:
        with tempfile.TemporaryDirectory() as folder, hacks.targets(Path(folder)) as targets:
            for name, escape in hacks.ESCAPES.items():
                (outcome,) = programs.run([Run(targets.filled(escape.program), time_limit_s=5.0)])
                seen = any(mark.encode() in outcome.output for mark in hacks.MARKS)
                found += [name] if seen or escape.has_effect(targets) else []
    finally:
        programs.close()
    return found


def main() -> None:
    """Alternate the arms, try the hacks and escapes, and print the results."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--scores", type=int, default=8000, help="per run; a tenth of it with --quick")
    options = parser.parse_args()
    started = time.monotonic()
    scores = options.scores // (10 if options.quick else 1)
    settings = {"workers": WORKERS, "scores": scores}
    runs = Runs("sandbox", settings, options.runs_file, options.resume)
    rounds = options.rounds or (1 if options.quick else 3)
    pool = ScoringPool(WORKERS, libraries=(), programs=True)
    pool.start()
    try:
        arms = {arm: lambda arm=arm: scored(pool, arm, scores) for arm in PROGRAMS}
        found = runs.alternate(arms, rounds)
        paid, restarts = hacks_paid(pool), pool.restarts
        scored(pool, "one_line", 100)
    finally:
        pool.close()
    escaped = escapes()
    rates = {
        arm: {key: spread([run[key] for run in found[arm]]) for key in ("scores_per_s", "cpu_ms_per_score")}
        for arm in PROGRAMS
    }
    rate = rates["one_line"]["scores_per_s"]["median"]
    say(f"{rate:.0f} scores/s for one-line programs (aim {AIM_PER_S:.0f}); paid {paid}, escaped {escaped}")
    finish(
        {
            **settings,
            "rounds": rounds,
            "scores_per_s": rate,
            "aim_scores_per_s": AIM_PER_S,
            "arms": rates,
            "hacks": len(hacks.PRINTING) + len(hacks.CALLED),
            "hacks_paid": len(paid),
            "paid": paid,
            "restarts": restarts,
            "escape_attempts": len(hacks.ESCAPES),
            "escapes": len(escaped),
            "escaped": escaped,
        },
        command="python -m benchmarks.sandbox",
        started=started,
    )


if __name__ == "__main__":
    main()
