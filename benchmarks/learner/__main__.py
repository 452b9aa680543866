"""Optimizer steps compared with google-tunix's GRPO and PyTorch with transformers, and with the hardware's limit.

    python -m benchmarks.learner [--quick] [--case=NAME ...] [--threads=ARM:N ...] [--rounds=N] [--resume]

The same Qwen3 of 0.62 million parameters, the same answered prompts, a long-lived process per arm. First both arms'
gradients of the first step are compared, name by name; without equality there is no race. Then runs of several steps
alternate, compiled beforehand, each arm with its fastest number of threads. Only tokens that are not padding count. Our
step starts with the claim (advantages, packing), the peers' with finished padded arrays. In `tunix_shared` our step
computes the prompt of a group once (`learner.shared_prompt_tokens`); gradient and counted tokens are the same. On a
GPU, `gpu_0p6b` and `gpu_1p7b` give the share of its peak rate that a step of Qwen3's shapes uses at 4,096 tokens per
row. `compile` compares the CPU seconds until the first step is done, with layers in a loop and no compilation cache,
of 36 layers and of 4. The last line is one JSON object with one entry per case.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from benchmarks.engine.cases import prepare
from benchmarks.engine.our_arm import SPEC
from benchmarks.learner.work import GROUP, Batch
from benchmarks.lib.arms import Arms, best_threads, raced
from benchmarks.lib.child import Child, python_of
from benchmarks.lib.report import Runs, arguments, finish, ratio, say, spread
from jaxroll.control import program
from jaxroll.models import params
from jaxroll.models.families import parameter_count

EQUAL = 1e-4  # bound, relative to the largest gradient of a parameter
ROUNDS = 7


@dataclass(frozen=True)
class Case:
    """A batch, the peer of the race, the target ratio, and our learner's options."""

    name: str
    peer: str
    aim: float
    sequences: int
    prompt_tokens: int
    median: int  # tokens per answer
    sigma: float = 0.0  # standard deviation of their logarithm; 0: all equal
    most: int = 0
    steps: int = 8  # per run
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
    Case("tunix_equal", "tunix", 1.1, 64, 16, 32, options={"row_tokens": 48, "micro_batch_rows": 64}),
    Case("tunix_shared", "tunix", 1.5, 64, 16, 32,
         options={"shared_prompt_tokens": 15, "shared_prompt_rows": GROUP, "row_tokens": 33, "micro_batch_rows": 64}),
    Case("tunix_lognormal", "tunix", 2.0, 64, 16, 32, sigma=1.0, most=512,
         options={"row_tokens": 528, "micro_batch_rows": 4}),
    Case("torch_equal", "torch", 1.0, 64, 16, 32, options={"row_tokens": 48, "micro_batch_rows": 64}),
]  # fmt: skip


@dataclass(frozen=True)
class Large:
    """A model's shape on this machine's devices, without a peer: the figure is the share of their peak rate."""

    name: str
    size: str
    aim: float | None
    dtype: str = "bfloat16"
    rows: int = 16
    tokens: int = 4096
    steps: int = 10
    platform: str = "cuda"


LARGE = [Large("gpu_0p6b", "qwen3_0p6b", 0.45), Large("gpu_1p7b", "qwen3_1p7b", 0.45)]
SMALL = [Large("large_quick", "nano", None, "float32", GROUP, 64, 2, "cpu")]  # for --quick, to show that it runs


def large(case: Large, runs: Runs) -> dict[str, Any]:
    """Seconds of a step, the model's FLOPs per second and device, and their share of the maker's figure (MFU).

    Operations that `remat` computes twice count once.
    """
    if case.platform == "cuda" and not program.visible_gpus():
        say(f"{case.name} is skipped: no GPU is here")
        return {"skipped": "no GPU"}

    def run() -> dict[str, Any]:
        words = case.size, case.dtype, str(case.rows), str(case.tokens)
        with closing(
            Child("benchmarks.learner.gpu_arm", "ours", os.cpu_count() or 1, *words, platform=case.platform)
        ) as child:
            return child.ask(str(case.steps)) | child.started

    found = runs.run(case.name, 0, run)
    mfu = spread(found["mfu"]) if found["mfu"] else None
    met = None if case.aim is None or mfu is None else mfu["median"] >= case.aim
    return {
        "aim": case.aim,
        "met": met,
        "mfu": mfu,
        "ours": found["tokens"] / float(np.median(found["seconds"])),
        "flops_per_s": spread(found["flops_per_s"]),
        "runs": case.steps,
        **{key: found[key] for key in ("device", "devices", "attention", "loss")},
    }


# Case to what is trained: all parameters, adapters, or all parameters and those of a critic.
COMPILE = {"compile": "all", "compile_adapters": "adapters", "compile_critic": "critic"}
COMPILE_ROUNDS, COMPILE_AIM = 3, 2.0


def compilation(trained: str, layers: tuple[int, int], runs: Runs, rounds: int) -> dict[str, Any]:
    """CPU seconds of the start and first step of models with few and many layers (`learner.scan_layers`); the ratio."""

    def run(count: int) -> dict[str, Any]:
        with closing(Child("benchmarks.learner.compile_arm", "ours", 1, str(count), trained)) as child:
            return child.started

    found = runs.alternate({f"{count} layers": partial(run, count) for count in layers}, rounds)
    few, many = ([one["cpu_s"] for one in of] for of in found.values())
    apart = ratio(many, few)
    parts = {
        arm: {name: float(np.median([one["parts"][name] for one in of])) for name in of[0]["parts"]}
        for arm, of in found.items()
    }
    return {
        "aim": COMPILE_AIM,
        "met": apart["value"] <= COMPILE_AIM,
        "ratio": apart,
        "parts_cpu_s": parts,
        "cpu_s": {arm: spread([one["cpu_s"] for one in of]) for arm, of in found.items()},
        "wall_s": {arm: spread([one["wall_s"] for one in of]) for arm, of in found.items()},
    }


def small(case: Case) -> Case:
    """A small version of the case, for --quick."""
    most = 32 if case.sigma else 0
    rows = {"row_tokens": 48, "micro_batch_rows": 4} if case.sigma else {"row_tokens": 12, "micro_batch_rows": 16}
    if "shared_prompt_tokens" in case.options:
        rows = {"shared_prompt_tokens": 7, "row_tokens": 5, "micro_batch_rows": 16}
    return replace(case, sequences=16, prompt_tokens=8, median=4, most=most, steps=2, options=case.options | rows)


def flops(batch: Batch, shared: int = 0) -> float:
    """FLOPs of one step, forwards and backwards, without recomputation: 6 per parameter and token, and attention's.

    `shared` tokens of every prompt are computed once for its answers.
    """
    own = (batch.prompts.shape[1] - shared + batch.lengths).astype(np.float64)
    prompts = np.full(len(own) // GROUP if shared else 0, shared, np.float64)
    # Two products per pair: all previous tokens, and half of the pairs among each other.
    pairs = (own**2 + 2 * shared * own).sum() + (prompts**2).sum()
    return 6 * (parameter_count(SPEC) * (own.sum() + prompts.sum()) + SPEC.layers * SPEC.heads * SPEC.head_dim * pairs)


def disagreement(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The largest difference of a parameter's gradients over their largest value, for the worst parameter."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"gradients of other parameters: {sorted(ours.keys() ^ theirs.keys())}")
    return max(float(np.abs(ours[name] - theirs[name]).max() / np.abs(ours[name]).max()) for name in ours)


def racer(arm: str, threads: int, folder: Path, case: Case) -> Child:
    """The process of an arm, which writes its gradients and answers with the times of steps.

    Ours has a mesh of `threads` devices, one thread each.
    """
    words = str(folder), case.name, arm
    if arm == "ours":
        return Child("benchmarks.learner.our_arm", arm, 1, *words, json.dumps(case.options), devices=threads)
    return Child(f"benchmarks.learner.{arm}_arm", arm, threads, *words)


def race(case: Case, arms: Arms, folder: Path, runs: Runs, threads: dict[str, int], rounds: int) -> dict[str, Any]:
    """Agreement, then tokens per second of both arms and their ratio; without agreement no race."""
    batch = case.batch()

    def run(arm: str, count: int) -> dict[str, Any]:
        ran = arms.get(arm, count).ask(str(case.steps))
        return {"tokens_per_s": batch.tokens / ran["seconds"], "threads": count, **ran}

    def compare() -> dict[str, Any]:
        for arm, count in best.items():
            arms.get(arm, count)
        ours, theirs = (dict(np.load(folder / f"{case.name}.{arm}.npz")) for arm in best)
        return {"apart": disagreement(ours, imported(theirs) if case.peer == "torch" else theirs)}

    best = {arm: best_threads(case.name, arm, threads, runs, run) for arm in ("ours", case.peer)}
    apart = runs.run(f"{case.name} gradients", 0, compare)["apart"]
    result: dict[str, Any] = {"aim": case.aim, "gradients_apart": apart, "threads": best}
    if not apart <= EQUAL:
        return result | {"met": False, "why": "the arms' gradients differ: no race"}
    found, of = raced(case.name, best, runs, run, rounds)
    computed = flops(batch, case.options.get("shared_prompt_tokens", 0))
    limit = runs.run(f"{case.name} matmul, {best['ours']} threads", 0, lambda: _matmul(best["ours"]))["flops_per_s"]
    return (
        result
        | found
        | {
            "met": found["ratio"] >= case.aim,
            "tokens": batch.tokens,
            "flops": computed,
            "losses": {arm: [of[arm][0]["first_loss"], of[arm][0]["loss"]] for arm in best},
            "options": case.options,
            "of_matmul": spread([computed / one["seconds"] / limit for one in of["ours"]]),
            "matmul_gflops_per_s": limit / 1e9,
        }
    )


def imported(theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients of transformers' parameters under our names."""
    return params.imported(SPEC, theirs.__getitem__)


def _matmul(threads: int) -> dict[str, float]:
    arm = Child("benchmarks.learner.matmul", "ours", threads)
    try:
        return arm.ask("run")
    finally:
        arm.close()


def main() -> int:
    """Measure; return 1 if arms do not agree."""
    names = [*(case.name for case in (*CASES, *LARGE)), *COMPILE]
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
            with Arms(partial(racer, folder=folder, case=case)) as arms:
                rounds = chosen.rounds or (2 if chosen.quick else ROUNDS)
                result[case.name] = race(case, arms, folder, runs, threads, rounds)
    for case in SMALL if chosen.quick else LARGE:
        if chosen.quick or case.name in (chosen.case or names):
            runs = Runs("learner", asdict(case), chosen.runs_file, chosen.resume)
            result[case.name] = large(case, runs)
    for name, trained in COMPILE.items():
        if name in (chosen.case or names):
            layers = (1, 2) if chosen.quick else (4, 36)
            runs = Runs("learner", {name: layers}, chosen.runs_file, chosen.resume)
            rounds = chosen.rounds or (1 if chosen.quick else COMPILE_ROUNDS)
            result[name] = compilation(trained, layers, runs, rounds)
    result["class"] = "R"
    command = " ".join(["python", *sys.orig_argv[1:]])
    finish(result, command=command, started=started)
    return int(any(case.get("gradients_apart", 0.0) > EQUAL for case in result.values() if isinstance(case, dict)))


if __name__ == "__main__":
    sys.exit(main())
