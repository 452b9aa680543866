"""How fast is an optimizer step beside google-tunix's GRPO and PyTorch with transformers, and how near to the limit?

    python benchmarks/learner.py [--quick] [--case=NAME ...] [--threads=ARM:N ...] [--rounds=N] [--resume]

The same Qwen3 of 0.62 million parameters, the same answered prompts, a long-lived process per arm. First both arms'
gradients of the first step are compared, name by name; without equality there is no race. Then runs of several steps
alternate, compiled beforehand, each arm with the number of threads that suits it best. Only tokens that are not padding
count. Ours begins with the claim (advantages, packing), the peers' with padded arrays that are ready. The last line is
one JSON object with a case each.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import json

import numpy as np
from _children import Child, python_of
from _engine_cases import prepare
from _engine_ours import SPEC
from _learner_work import GROUP, Batch
from _report import Runs, arguments, finish, ratio, say, spread

from jaxroll.models import huggingface
from jaxroll.models.families import parameter_count

EQUAL = 1e-4  # of the largest gradient of a parameter
ROUNDS = 7


@dataclass(frozen=True)
class Case:
    """A batch, the peer it is raced against, the ratio that is aimed at, and our learner's options for it."""

    name: str
    peer: str
    aim: float
    sequences: int
    prompt_tokens: int
    median: int  # tokens of an answer
    sigma: float = 0.0  # of their logarithm; 0: all the same
    most: int = 0
    steps: int = 8  # of one run
    options: dict[str, Any] = field(default_factory=dict)

    def batch(self) -> Batch:
        """Random tokens without 0, random rewards without ties; lengths log-normal, cut at `most`."""
        rng, longest = np.random.default_rng(1), self.most or self.median
        lengths = np.rint(self.median * np.exp(self.sigma * rng.standard_normal(self.sequences)))
        lengths = np.clip(lengths, 1, longest).astype(np.int32)
        prompts = rng.integers(1, SPEC.vocab_size, (self.sequences // GROUP, self.prompt_tokens)).astype(np.int32)
        answers = rng.integers(1, SPEC.vocab_size, (self.sequences, int(lengths.max()))).astype(np.int32)
        answers[np.arange(answers.shape[1]) >= lengths[:, None]] = 0
        return Batch(prompts.repeat(GROUP, axis=0), answers, lengths, rng.random(self.sequences).astype(np.float32))


CASES = [
    Case("tunix_equal", "tunix", 1.1, 64, 16, 32, options={"row_tokens": 48, "micro_rows": 64}),
    Case("tunix_lognormal", "tunix", 2.0, 64, 16, 32, sigma=1.0, most=512,
         options={"row_tokens": 528, "micro_rows": 4}),
    Case("torch_equal", "torch", 1.0, 64, 16, 32, options={"row_tokens": 48, "micro_rows": 64}),
]  # fmt: skip


def small(case: Case) -> Case:
    """The same in small, for --quick."""
    most = 32 if case.sigma else 0
    rows = {"row_tokens": 48, "micro_rows": 4} if case.sigma else {"row_tokens": 12, "micro_rows": 16}
    return replace(case, sequences=16, prompt_tokens=8, median=4, most=most, steps=2, options=case.options | rows)


def flops(batch: Batch) -> float:
    """Of one step, forwards and backwards, without what is made twice: 6 a parameter and token, and attention's."""
    lengths = (batch.prompts.shape[1] + batch.lengths).astype(np.float64)
    pairs = SPEC.layers * SPEC.heads * SPEC.head_dim * (lengths**2).sum()  # two products for half of all pairs
    return 6 * (parameter_count(SPEC) * lengths.sum() + pairs)


def disagreement(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The largest difference of a parameter's gradients over their largest value, of all parameters the worst."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"gradients of other parameters: {sorted(ours.keys() ^ theirs.keys())}")
    return max(float(np.abs(ours[name] - theirs[name]).max() / np.abs(ours[name]).max()) for name in ours)


class Race:
    """One case's arms; their processes start when a run is wanted that is not in the file yet."""

    def __init__(self, case: Case, folder: Path, runs: Runs, threads: dict[str, int]) -> None:
        self.case, self._folder, self._runs, self._threads = case, folder, runs, threads
        self._arms: dict[tuple[str, int], Child] = {}
        self._stack, self._batch = ExitStack(), case.batch()

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _arm(self, name: str, threads: int) -> Child:
        if (name, threads) not in self._arms:
            extra = [json.dumps(self.case.options)] if name == "ours" else []
            arm = Child(f"_learner_{name}.py", name, threads, str(self._folder), self.case.name, name, *extra)
            self._stack.callback(arm.close)
            self._arms[name, threads] = arm
        return self._arms[name, threads]

    def result(self, rounds: int) -> dict[str, Any]:
        """Agreement, then tokens a second of both and their ratio; without agreement no race."""
        arms = ("ours", self.case.peer)
        best = {arm: self._best(arm) for arm in arms}
        apart = self._runs.run(f"{self.case.name} gradients", 0, lambda: {"apart": self._apart()})["apart"]
        result: dict[str, Any] = {"aim": self.case.aim, "gradients_apart": apart, "threads": best}
        if not apart <= EQUAL:
            return result | {"met": False, "why": "the arms' gradients differ: no race"}
        raced = {arm: lambda arm=arm: self._run(arm, best[arm]) for arm in arms}
        runs = self._runs.alternate({f"{self.case.name} {arm}": run for arm, run in raced.items()}, rounds)
        of = {arm: runs[f"{self.case.name} {arm}"] for arm in arms}
        rates = {arm: [run["tokens_per_s"] for run in of[arm]] for arm in arms}
        busy = {arm: [1 / run["cpu_s"] for run in of[arm]] for arm in arms}
        found = ratio(rates["ours"], rates[self.case.peer])
        return result | {
            "ratio": found, "ratio_per_cpu_second": ratio(busy["ours"], busy[self.case.peer]),
            "met": found["value"] >= self.case.aim, "peer": self.case.peer,
            "tokens_per_s": {arm: spread(values) for arm, values in rates.items()},
            "losses": {arm: [of[arm][0]["first_loss"], of[arm][0]["loss"]] for arm in arms},
            "tokens": self._batch.tokens, "flops": flops(self._batch), "options": self.case.options,
            "of_matmul": self._of_matmul([run["seconds"] for run in of["ours"]], best["ours"]),
        }  # fmt: skip

    def _of_matmul(self, seconds: list[float], threads: int) -> dict[str, float]:
        """The share of the rate of one large matrix product, with as many threads, measured beside the race."""
        limit = self._runs.run(f"{self.case.name} matmul, {threads} threads", 0, lambda: _matmul(threads))
        rate = limit["flops_per_s"]
        return spread([flops(self._batch) / s / rate for s in seconds]) | {"limit_gflops": rate / 1e9}

    def _apart(self) -> float:
        arms = ("ours", self.case.peer)
        ours, theirs = (dict(np.load(self._folder / f"{self.case.name}.{arm}.npz")) for arm in arms)
        return disagreement(ours, huggingface.imported(SPEC, theirs.__getitem__) if arms[1] == "torch" else theirs)

    def _run(self, arm: str, threads: int) -> dict[str, Any]:
        ran = self._arm(arm, threads).ask(str(self.case.steps))
        return {"tokens_per_s": self._batch.tokens / ran["seconds"], "threads": threads, **ran}

    def _best(self, arm: str) -> int:
        """The number of threads, of one for each core, with which three runs of `arm` were fastest."""
        tried = {}
        counts = range(1, min(2, os.cpu_count() or 1) + 1)
        for threads in [self._threads[arm]] if arm in self._threads else counts:
            name = f"{self.case.name} {arm}, trial with {threads} threads"
            runs = [self._runs.run(name, n, lambda t=threads: self._run(arm, t)) for n in range(3)]
            tried[threads] = statistics.median(run["tokens_per_s"] for run in runs)
        return max(tried, key=lambda threads: tried[threads])


def _matmul(threads: int) -> dict[str, float]:
    arm = Child("_matmul.py", "ours", threads)
    try:
        return arm.ask("run")
    finally:
        arm.close()


def main() -> int:
    """Measure; 1 when arms do not agree."""
    names = [case.name for case in CASES]
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--case", action="append", choices=names, help="this one; again for more (default: all)")
    parser.add_argument("--threads", action="append", default=[], help="ours:1, tunix:2, torch:1: do not try both")
    chosen, started = parser.parse_args(), time.monotonic()
    threads = {arm: int(count) for arm, _, count in (word.partition(":") for word in chosen.threads)}
    threads = ({"ours": 1, "tunix": 1, "torch": 1} if chosen.quick else {}) | threads
    cases = [small(case) if chosen.quick else case for case in CASES if case.name in (chosen.case or names)]
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="learner-") as name:
        folder = Path(name)
        prepare(folder, [])
        for case in cases:
            if not python_of(case.peer).exists():
                say(f"{case.name} is skipped: no .venv-{case.peer} (make venv-{case.peer})")
                result[case.name] = {"skipped": f"no .venv-{case.peer}"}
                continue
            case.batch().save(folder / f"{case.name}.npz")
            runs = Runs("learner", asdict(case) | {"threads": threads}, chosen.runs_file, chosen.resume)
            with Race(case, folder, runs, threads) as race:
                result[case.name] = race.result(chosen.rounds or (2 if chosen.quick else ROUNDS))
    result["class"] = "R"
    command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    finish(result, command=command, started=started)
    return int(any(case.get("gradients_apart", 0.0) > EQUAL for case in result.values() if isinstance(case, dict)))


if __name__ == "__main__":
    sys.exit(main())
