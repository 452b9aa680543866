"""Learning at fixed staleness (α = 0, 2 and 8), per algorithm: three seeds each, from one warm start.

Staleness is exact (see benchmarks/algorithms/fixed_staleness.py): after the first α steps every token is α steps old.
Held-out accuracy is greedy. The control "grpo" is the clip without a correction, which a run refuses at α > 0.
"decoupled" is the default of a run.

python -m benchmarks.algorithms [--quick] [--resume] [--only NAME ...]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "1")

import numpy as np

from benchmarks.lib import report

NAME = "algorithms"
ALPHAS, SEEDS, STEPS = (0, 2, 8), (0, 1, 2), 60
HELDOUT = 512  # questions
QUICK_ALPHAS, QUICK_STEPS = (2,), 3
OFFLINE = {"reference": "init"}
PAIRS = {"shared_prompt_tokens": 0, "shared_prompt_rows": 1, "row_tokens": 64}  # each answer has its prompt
FULL: Mapping[str, dict[str, Any]] = {
    "grpo": {"correction": "none"},
    "decoupled": {},
    "tis": {"algorithm": "tis"},
    "cispo": {"algorithm": "cispo"},
    "topr": {"algorithm": "topr"},
    "gspo": {"algorithm": "gspo"},
    "rloo": {"algorithm": "rloo"},
    "dpo": {"algorithm": "dpo", **OFFLINE, **PAIRS},
    # With one optimizer step per claim these equal `decoupled` and `tis` above.
    "decoupled, two minibatches": {"minibatches": 2},
    "tis, two minibatches": {"algorithm": "tis", "minibatches": 2},
}
ONCE: Mapping[str, dict[str, Any]] = {
    "dapo": {"algorithm": "dapo"},
    "ppo": {"algorithm": "ppo", "critic": "init"},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "decoupled, masked": {"correction_mode": "mask"},
    "icepop": {"algorithm": "icepop"},
    "tis, sequence": {"algorithm": "tis", "ratio_level": "sequence"},
    "reinforce_pp": {"algorithm": "reinforce_pp"},
    "topr, losses half": {"algorithm": "topr", "negative_weight": 0.5},
    "raft_pp": {"algorithm": "raft_pp"},
    "raft": {"algorithm": "raft"},
    "gigpo": {"algorithm": "gigpo"},
    "decoupled, KL in the loss": {"kl_coef": 0.01, **OFFLINE},
    "decoupled, KL in the reward": {"kl_coef": 0.01, "kl_in": "reward", **OFFLINE},
}
"""At α = 1, one seed."""  # their interval is over questions


def settings(quick: bool) -> Any:
    """The config of all runs; its α sizes the age buckets, and the loop sets the staleness of each run."""
    from jaxroll import config as configs

    values = configs.defaults().to_dict()
    values["schedule"] |= {"alpha": float(max(ALPHAS)), "steps": STEPS, "groups_per_step": 24, "group_size": 8}
    values["task"] |= {"heldout_items": HELDOUT}
    values["sft"] |= {"steps": 140}
    values["learner"] |= {"micro_batch_rows": 32, "row_tokens": 28, "shared_prompt_tokens": 32, "shared_prompt_rows": 4}
    if quick:
        values["model"] |= {"size": "nano"}
        values["schedule"] |= {"steps": QUICK_STEPS, "groups_per_step": 8, "group_size": 8}
        values["task"] |= {"heldout_items": 32, "args": {"min_word_len": 3, "max_word_len": 4}}
        values["sft"] |= {"steps": 150, "batch": 32}
        values["learner"] |= {"micro_batch_rows": 4}
    return configs.parse(values)


def plan(quick: bool, only: Sequence[str]) -> list[tuple[str, dict[str, Any], int, int]]:
    """(name, learner keys, α, seed) of every run, seed by seed, so that an interrupted benchmark has whole seeds."""
    seeds, alphas = ((0,), QUICK_ALPHAS) if quick else (SEEDS, ALPHAS)
    runs = [(name, keys, alpha, seed) for seed in seeds for alpha in alphas for name, keys in FULL.items()]
    runs += [(name, keys, 1, 0) for name, keys in ONCE.items()]
    if quick and not only:
        only = ("gspo", "dpo")
    return [one for one in runs if not only or one[0] in only]


def summary(results: Mapping[tuple[str, int], list[dict[str, Any]]]) -> dict[str, Any]:
    """By algorithm and α: gain in held-out accuracy (mean and range over seeds), and the metrics by age."""
    found: dict[str, Any] = {}
    for (name, alpha), runs in results.items():
        gains = [one["after"] - one["before"] for one in runs]
        found.setdefault(name, {})[str(alpha)] = {
            "before": float(np.mean([one["before"] for one in runs])),
            "after": report.spread([one["after"] for one in runs]),
            "after_95": interval([one["after"] for one in runs]) or of_questions(runs[0]["after"], HELDOUT),
            "gain": float(np.mean(gains)),
            "gain_95": interval(gains),
            **{key: _mean(runs, key) for key in ("ess", "clip_share", "kl_behaviour", "ratio_max", "reward_last")},
            "by_age": _by_age([one["by_age"] for one in runs]),
        }
    return found


def draw(path: Path, found: Mapping[str, Any]) -> None:
    """Draw the output of `summary`: gain with its interval over seeds, effective samples, clipped share, mismatch.

    After the first α steps every token is α steps old, so that a color means an age.
    """
    from benchmarks.lib import figures

    kinds = {f"{alpha}": f"α = {alpha}" for alpha in sorted({int(alpha) for by in found.values() for alpha in by})}

    def rows(value: Callable[[Mapping[str, Any]], figures.Value | None]) -> dict[str, dict[str, figures.Value]]:
        values = {name: {kinds[alpha]: value(of) for alpha, of in by.items()} for name, by in found.items()}
        return {name: {kind: one for kind, one in row.items() if one} for name, row in values.items()}

    def points(of: Mapping[str, Any]) -> figures.Value:
        ends = of["gain_95"] or (None, None)
        values: list[Any] = [None if one is None else 100 * one for one in (of["gain"], *ends)]
        return figures.Value(*values)

    panels = [figures.Panel("held-out accuracy gained, points (95 % over seeds)", rows(points), at=0.0)]
    for key, words in (
        ("ess", "effective samples, share"),
        ("clip_share", "clipped share"),
        ("kl_behaviour", "KL(behaviour‖learner)"),
    ):
        value = lambda of, key=key: None if of[key] is None else figures.Value(of[key])  # noqa: E731
        panels.append(figures.Panel(words, rows(value)))
    figures.write(path, panels, list(kinds.values()))


def interval(values: Sequence[float]) -> list[float] | None:
    """95 % interval of the mean by Student's t; None for a single value."""
    if len(values) < 2:
        return None
    quantile = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}[len(values)]
    half = quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return [float(np.mean(values)) - half, float(np.mean(values)) + half]


def of_questions(share: float, questions: int) -> list[float]:
    """Wilson's 95 % interval of a share of so many questions; it covers one run, not the variance over seeds."""
    z, n = 1.96, questions
    middle, half = share + z * z / (2 * n), z * (share * (1 - share) / n + (z / (2 * n)) ** 2) ** 0.5
    return [(middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)]


def _by_age(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """The mean over runs of each figure by age."""
    ages = sorted({age for one in runs for age in one}, key=int)
    keys = {key: None for one in runs for of_age in one.values() for key in of_age}
    return {age: {key: _mean([one[age] for one in runs if age in one], key) for key in keys} for age in ages}


def _mean(runs: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [one[key] for one in runs if one.get(key) is not None]
    return float(np.mean(values)) if values else None


def measured(bench: Any, keys: dict[str, Any], alpha: int, seed: int, steps: int) -> Callable[[], dict[str, Any]]:
    """A function that runs the benchmark's run and returns its figures."""

    def measure() -> dict[str, Any]:
        from benchmarks.algorithms import fixed_staleness

        learner = replace(bench.config.learner, **keys)
        bench.trainer(learner)  # compiled before the clock starts
        started = time.monotonic()
        result = fixed_staleness.run(bench, learner, alpha, seed, steps)
        return result | {"seconds": time.monotonic() - started}

    return measure


def main() -> None:
    """Make the runs that are not in the file yet, and print the summary of all runs."""
    parser = report.arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], choices=[*FULL, *ONCE], help="one algorithm; may repeat")
    options, started = parser.parse_args(), time.monotonic()
    from benchmarks.algorithms import fixed_staleness

    config, steps = settings(options.quick), QUICK_STEPS if options.quick else STEPS
    about = {
        "steps": steps,
        "quick": options.quick,
        "groups": config.schedule.groups_per_step,
        "size": config.schedule.group_size,
        "model": config.model.size,
        "task": config.task.name,
    }
    runs = report.Runs(NAME, about, options.runs_file, options.resume)
    warm = runs.path.with_name(f"{runs.path.stem}-warm-{config.model.size}-{config.sft.steps}")
    bench = fixed_staleness.Bench(config, warm, report.say)
    results: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for name, keys, alpha, seed in plan(options.quick, options.only):
        made = runs.run(f"{name} at {alpha}", seed, measured(bench, keys, alpha, seed, steps))
        results.setdefault((name, alpha), []).append(made)
    longest = max(one["seconds"] for made in results.values() for one in made)
    found = summary(results)
    draw(runs.path.with_suffix(".svg"), found)
    result = about | {"algorithms": found, "longest_run_s": longest, "parameters": "one warm start"}
    report.finish(result, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)


if __name__ == "__main__":
    main()
