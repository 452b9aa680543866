"""The cost of quantized keys, values and weights (`sampler.kv_dtype`, `sampler.weight_dtype`) on a trained model.

    python -m benchmarks.engine.quantised [--quick] [--case=cost|curves] [--steps=N] [--resume]

`cost`: an engine in each mode answers questions at temperature 1; the model itself computes the log-probs of the same
tokens by whole rows. Their difference is the cost; without quantization it is that of rounding. `curves`: synchronous
training in each mode with the default correction; the same engine without quantization judges all modes. Both have
three seeds and begin at one warm start on worked answers. The last line is one JSON object.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "1")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.algorithms import __main__ as staleness
from benchmarks.algorithms import fixed_staleness
from benchmarks.lib import report
from jaxroll.models import transformer
from jaxroll.models.families import ModelSpec

MODES: Mapping[str, dict[str, str]] = {
    "none": {},
    "both int8": {"kv_dtype": "int8", "weight_dtype": "int8"},
    "both fp8": {"kv_dtype": "fp8", "weight_dtype": "fp8"},
    "KV int8": {"kv_dtype": "int8"},
    "KV fp8": {"kv_dtype": "fp8"},
    "weights int8": {"weight_dtype": "int8"},
    "weights fp8": {"weight_dtype": "fp8"},
}
SEEDS, QUESTIONS, SIZE = (0, 1, 2), 64, 4
CURVES = ("none", "both int8", "both fp8")


@partial(jax.jit, static_argnums=0)
def own(spec: ModelSpec, params: Any, texts: jax.Array) -> jax.Array:
    """The model's log-prob of every token but the first of each row, given those before it."""
    where = jnp.broadcast_to(jnp.arange(texts.shape[1]), texts.shape)
    hidden = transformer.forward(spec, params, texts, where, jnp.ones_like(texts))
    every = jax.nn.log_softmax(transformer.logits(spec, params, hidden))[:, :-1]
    return jnp.take_along_axis(every, texts[:, 1:, None], axis=2)[..., 0]


def cost(bench: fixed_staleness.Bench, seed: int) -> dict[str, Any]:
    """Log-probs of the engine's policy and of the model for tokens that the engine sampled."""
    spec, params = bench.spec, bench.placed(bench.warm)
    questions = list(islice(bench.questions(seed), QUESTIONS))
    answers = bench.answered(params, questions, SIZE, 1.0, seed)
    longest = bench.config.task.max_prompt_tokens + bench.config.sampling.max_tokens
    texts, sampled, stored = np.zeros((QUESTIONS * SIZE, longest), np.int32), [], []
    for number, (question, results) in enumerate(zip(questions, answers, strict=True)):
        prompt = bench.text.render(question.task.messages)
        for member, result in enumerate(results):
            row, drawn = number * SIZE + member, result.completion.tokens
            texts[row, : len(prompt) + len(drawn)] = [*prompt, *drawn]
            sampled += [(row, len(prompt) + at) for at in range(len(drawn))]
            stored += result.completion.logprobs.tolist()

    rows, places = np.array(sampled).T
    behaviour = np.array(stored)
    delta = np.asarray(own(spec, params, texts))[rows, places - 1] - behaviour
    return {
        "tokens": len(delta),
        "mean": float(np.abs(delta).mean()),
        "p99": float(np.quantile(np.abs(delta), 0.99)),
        "max": float(np.abs(delta).max()),
        "kl_bits": float((np.expm1(delta) - delta).mean() / np.log(2)),  # k3: KL(sampler‖model) of a token
        "entropy_bits": float(-behaviour.mean() / np.log(2)),
        "ess": float(np.exp(delta).sum() ** 2 / np.square(np.exp(delta)).sum() / len(delta)),
    }


def costs(bench: fixed_staleness.Bench, runs: report.Runs) -> dict[str, Any]:
    """By mode: each figure of `cost` as median and range over seeds."""
    found: dict[str, Any] = {}
    for mode, options in MODES.items():
        bench.engine = bench.engine_of(**options)
        made = [runs.run(f"cost, {mode}", seed, partial(cost, bench, seed)) for seed in SEEDS]
        found[mode] = {key: report.spread([one[key] for one in made]) for key in made[0]}
        report.say(f"{mode}: {found[mode]}")
    return found


def curves(bench: fixed_staleness.Bench, steps: int, runs: report.Runs) -> dict[str, Any]:
    """By mode: held-out accuracy before and after, and the metrics of the last half of the steps, of every seed."""
    found: dict[str, Any] = {}
    for mode in CURVES:
        bench.engine, made = bench.engine_of(**MODES[mode]), []
        for seed in SEEDS:
            run = partial(fixed_staleness.run, bench, bench.config.learner, 0, seed, steps)
            made.append(runs.run(f"curve, {mode}", seed, run))
        gains = [one["after"] - one["before"] for one in made]
        found[mode] = {"gain": report.spread(gains), "gain_95": staleness.interval(gains), "runs": made}
        report.say(f"{mode}: {gains}")
    return found


def main() -> None:
    """Make the runs that are not in the file yet, and print the figures of all."""
    parser = report.arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--case", action="append", default=[], choices=["cost", "curves"], help="may repeat")
    text = "steps of each curve; with N the held-out questions are the 512 of a whole benchmark with --quick, too"
    parser.add_argument("--steps", type=int, default=0, metavar="N", help=text)
    options, started = parser.parse_args(), time.monotonic()
    config, steps = staleness.settings(options.quick), staleness.QUICK_STEPS if options.quick else staleness.STEPS
    if options.steps:
        steps, schedule = options.steps, replace(config.schedule, steps=options.steps)
        config = replace(config, schedule=schedule, task=replace(config.task, heldout_items=staleness.HELDOUT))
    about = {"model": config.model.size, "quick": options.quick, "steps": steps, "task": config.task.name}
    runs = report.Runs("quantised", about, options.runs_file, options.resume)
    warm = runs.path.with_name(f"{runs.path.stem}-warm-{config.model.size}-{config.sft.steps}")
    cases = options.case or ["cost", "curves"]
    bench = fixed_staleness.Bench(config, warm, report.say)
    result = dict(about)
    if "cost" in cases:
        result["cost"] = costs(bench, runs)
    if "curves" in cases:
        result["curves"] = curves(bench, steps, runs)
    report.finish(result, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)


if __name__ == "__main__":
    main()
