"""Whole GRPO runs compared with google-tunix's: the same model, task and shapes on the same two cores.

    python -m benchmarks.grpo [--quick] [--case=NAME ...] [--rounds=N] [--tried=ARM:N ...] [--resume]

Our arm is an asynchronous `jaxroll train` as a user starts it. The peer is google-tunix's GRPO learner with its own
sampler, or in `agentic` its agentic learner. Both start with the same weights (a Qwen3 of 0.62 million parameters,
float32, whose answers all have the same length and random letters), use the same questions, 8 per step with 8 answers
each, and give the same reward, which differs between the members of a group. First both learners compute one batch:
their losses and gradients must agree, otherwise there is no race. Then each arm tries its settings (threads, devices,
steps ahead), and runs alternate, each in a new process; only steps after the first few count.

    equal           a prompt of 16 tokens, an answer of 32
    reward_latency  the same, and a judgement takes 0.2 s: per batch in the peer, per answer in ours
    agentic         two answers of 16 tokens, after each the environment takes 0.05 s

The last line is one JSON object with one entry per case.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from benchmarks.grpo.our_arm import overrides, trained
from benchmarks.grpo.start import prepare
from benchmarks.grpo.work import GROUP, GROUPS, Work
from benchmarks.learner.__main__ import disagreement
from benchmarks.lib.child import Child, python_of
from benchmarks.lib.report import Runs, arguments, finish, ratio, say, spread

PEER = "tunix"
# Of the loss; of the largest gradient of a parameter. That of the last norm all but cancels in this model.
EQUAL = {"apart": 1e-4, "gradients_apart": 1e-3}
ROUNDS = 5
Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A task, the target ratio, the steps of a run of each arm, and the settings that each arm tries."""

    name: str
    aim: float
    work: Work
    steps: dict[str, int]
    tries: dict[str, Sequence[Options]]


_OURS = [{"schedule.alpha": 2.0}, {"schedule.alpha": 1.0}, {"schedule.alpha": 2.0, "learner.mesh.data": 2}]
# An episode that waits for its judgement needs no slot, so as many episodes as possible are in progress.
_WAITING = [
    {"schedule.alpha": alpha, "sampler.concurrent_episodes": int(alpha + 1) * GROUPS * GROUP}
    for alpha in (2.0, 3.0, 4.0)
]
_LEARNER = [{"apart": apart, "threads": threads} for apart, threads in ((False, 2), (True, 2), (False, 1))]
# Version 0.1.7 cannot run `apart` and `ahead` together: it takes a lock on the thread of its event loop, so that an
# episode that begins while new weights wait for the running episodes keeps these from ending: a deadlock.
_AGENTIC = [
    {"apart": apart, "threads": threads, "ahead": ahead, "at_once": at_once}
    for apart, threads, ahead, at_once in ((False, 2, 1, 16), (False, 2, 1, 64), (True, 2, 0, 64), (False, 1, 1, 16))
]
_CHAIN, _SLOW = Work(links=31, choices=8), Work(31, 8, latency_s=0.2)
_TURNS = Work(15, 16, turns=2, latency_s=0.05)
CASES = [
    Case("equal", 1.2, _CHAIN, {"ours": 80, PEER: 60}, {"ours": _OURS, PEER: _LEARNER}),
    Case("reward_latency", 2.5, _SLOW, {"ours": 80, PEER: 40}, {"ours": _WAITING, PEER: _LEARNER}),
    Case("agentic", 4.0, _TURNS, {"ours": 80, PEER: 14}, {"ours": _OURS, PEER: _AGENTIC}),
]


def small(case: Case) -> Case:
    """A small version of the case for --quick: short answers, few steps, the first setting of each arm."""
    tries = {arm: options[:1] for arm, options in case.tries.items()}
    return Case(case.name, case.aim, case.work.small(), {"ours": 12, PEER: 8}, tries)


def peer(case: Case, folder: Path, options: Options) -> Child:
    """The peer's process."""
    words = str(folder), json.dumps(asdict(case.work)), json.dumps(options)
    return Child("benchmarks.grpo.tunix_arm", PEER, options["threads"], *words, devices=2 if options["apart"] else 1)


def run(case: Case, folder: Path, arm: str, options: Options) -> dict[str, Any]:
    """One run of one arm: samples_per_s, tokens_a_sample, and its time by activity."""
    if arm == "ours":
        return trained(case.work, folder, case.steps[arm], options)
    with closing(peer(case, folder, options)) as child:
        return child.ask(f"run {case.steps[arm]}")


def agreement(case: Case, folder: Path) -> dict[str, float]:
    """Both losses of one batch, their difference relative to ours, and the same for the gradients."""
    options = {arm: tries[0] for arm, tries in case.tries.items()}
    words = overrides(case.work, folder, case.steps["ours"], options["ours"])
    with closing(Child("benchmarks.grpo.loss", "ours", 1, str(folder), json.dumps(words))) as child:
        ours = child.ask("loss")["loss"]
    with closing(peer(case, folder, options[PEER])) as child:
        theirs = child.ask("loss")["loss"]
    gradients = [dict(np.load(folder / f"{arm}.npz")) for arm in ("ours", "peer")]
    finite = all(np.isfinite(leaf).all() for of_arm in gradients for leaf in of_arm.values())
    return {
        "ours": ours,
        "peer": theirs,
        "apart": abs(ours - theirs) / abs(ours),
        "gradients_apart": disagreement(*gradients) if finite else float("nan"),
    }


def best(case: Case, folder: Path, arm: str, given: dict[str, int], runs: Runs) -> Options:
    """The fastest setting of `arm` in one run each, or the one whose number was `given`.

    A setting under which the arm fails or hangs has no rate; RuntimeError if no setting works.
    """
    tries = case.tries[arm]
    if arm in given or len(tries) == 1:
        return tries[given.get(arm, 0)]
    rates = []

    def trial(options: Options) -> dict[str, Any]:
        try:
            return run(case, folder, arm, options)
        except RuntimeError as error:
            return {"samples_per_s": 0.0, "failed": str(error)[-500:]}

    for number, options in enumerate(tries):
        name = f"{case.name} {arm}, trial of {json.dumps(options)}"
        rates.append(runs.run(name, number, lambda o=options: trial(o))["samples_per_s"])
    if not any(rates):
        raise RuntimeError(f"{case.name}: {arm} fails under every setting")
    return tries[int(np.argmax(rates))]


def race(case: Case, folder: Path, given: dict[str, int], runs: Runs, rounds: int) -> dict[str, Any]:
    """Agreement, then samples per second of both arms and their ratio; without agreement no race."""
    losses = runs.run(f"{case.name} losses", 0, lambda: agreement(case, folder))
    result: dict[str, Any] = {"aim": case.aim, "losses": losses}
    if not all(losses[key] <= most for key, most in EQUAL.items()):
        return result | {"met": False, "why": "the arms' losses differ: no race"}
    chosen = {arm: best(case, folder, arm, given, runs) for arm in ("ours", PEER)}
    named = {f"{case.name} {arm}": lambda arm=arm: run(case, folder, arm, chosen[arm]) for arm in chosen}
    found = runs.alternate(named, rounds)
    return result | compared({arm: found[f"{case.name} {arm}"] for arm in chosen}, case.aim) | {"settings": chosen}


def compared(of: dict[str, list[dict[str, Any]]], aim: float) -> dict[str, Any]:
    """Both rates, their ratio with its interval, the tokens per sample, and our time by activity."""
    rates = {arm: [one["samples_per_s"] for one in of[arm]] for arm in of}
    spreads, value = {arm: spread(rates[arm]) for arm in of}, ratio(rates["ours"], rates[PEER])
    mean = lambda key: float(np.mean([one[key] for one in of["ours"]]))  # noqa: E731
    return {
        "ours": spreads["ours"]["median"],
        "peer": spreads[PEER]["median"],
        "ratio": value["value"],
        "low": value["low"],
        "high": value["high"],
        "runs": len(rates["ours"]),
        "against": PEER,
        "met": value["value"] >= aim,
        "samples_per_s": spreads,
        "tokens_a_sample": {arm: float(np.mean([one["tokens_a_sample"] for one in of[arm]])) for arm in of},
        **{key: mean(key) for key in ("train_s", "wait_s", "decode_s", "age_mean", "computed_share")},
    }


def main() -> int:
    """Measure; return 1 if arms do not agree."""
    names = [case.name for case in CASES]
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--case", action="append", choices=names, help="this one; again for more (default: all)")
    parser.add_argument("--tried", action="append", default=[], help="ours:0, tunix:1: take this setting, try none")
    options, started = parser.parse_args(), time.monotonic()
    given = {arm: int(number) for arm, _, number in (word.partition(":") for word in options.tried)}
    cases = [small(case) if options.quick else case for case in CASES if case.name in (options.case or names)]
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    result: dict[str, Any] = {}
    for case in cases:
        if not python_of(PEER).exists():
            say(f"{case.name} is skipped: no .venv-{PEER} (make venv-{PEER})")
            result[case.name] = {"skipped": f"no .venv-{PEER}"}
            continue
        runs = Runs("grpo_vs_peer", asdict(case) | {"given": given}, options.runs_file, options.resume)
        with tempfile.TemporaryDirectory(prefix="grpo-") as name:
            prepare(Path(name), case.work)
            result[case.name] = race(case, Path(name), given, runs, rounds)
        say(json.dumps(result[case.name]))
    command = " ".join(["python", *sys.orig_argv[1:]])
    finish(result | {"class": "R"}, command=command, started=started)
    return int(any("why" in case for case in result.values() if isinstance(case, dict)))


if __name__ == "__main__":
    sys.exit(main())
