"""Warm start: supervised training on a task's worked answers, with the learner's own programs.

Cross-entropy is −A · log π with A = 1, so packing, accumulation and the optimizer are those of the reinforcement
learner; only the objective and the schedule differ. Trained tokens are the answers and their ends of sequence, also of
a conversation of several turns.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.algorithms import losses as importance
from jaxroll.algorithms.registry import Algorithm
from jaxroll.config import Config, RoleArgs
from jaxroll.config.rules import sample_tokens
from jaxroll.data import sources, tasks
from jaxroll.errors import ConfigError
from jaxroll.learner import minibatch, packing, samples, step_metrics, trainer, weights
from jaxroll.learner import state as optimizer
from jaxroll.learner import state as states
from jaxroll.learner.samples import Sample
from jaxroll.learner.state import Params
from jaxroll.learner.step import Programs, Recipe, hidden_states
from jaxroll.metrics import JsonlTracker
from jaxroll.models import families, pretrained, transformer
from jaxroll.models import params as model_params
from jaxroll.protocols import Progress, Tokenizer
from jaxroll.records import Message, Task
from jaxroll.sharding import layout as meshes
from jaxroll.sharding import layout as rules
from jaxroll.text import tokenizers

SAY_EVERY_S = 5.0
CHECK_EXAMPLES = 256  # at most, and at most a tenth: questions kept out of training for the estimate at the end
MAX_GRAD_NORM = 1.0
SUPERVISED = Algorithm(importance.likelihood(), multiple_of_advantage=True)
PADDING = 0.15  # share of padded cells that is cheaper than compiling another program


@dataclass(frozen=True)
class WarmStartPlan:
    """Everything a warm start does: the packed micro-batches of every step, and examples it never trains on."""

    batches: list[list[packing.MicroBatch]]
    check: list[samples.Sample]


def train(config: Config, out_dir: Path, progress: Progress) -> dict[str, Any]:
    """Train `sft.steps` steps from a fresh init (or model.path), write folder `out_dir`; what came of it, as metrics.

    A function of the config alone. `exact_match` is teacher-forced: the share of unseen worked answers of which every
    token is the likeliest one given the tokens before it, which is what greedy decoding would have answered. It is None
    for a task too small to keep questions out of training.
    """
    if config.sft.steps < 1:
        raise ConfigError("sft.steps", config.sft.steps, "a warm start takes at least one step", "Use 300.")
    started = time.monotonic()
    text = tokenizers.build(config.tokenizer, sources.alphabet(config.task))
    spec = pretrained.spec(config.model, text.vocab_size)
    mesh = meshes.build(config.learner.mesh)
    layout = rules.Layout(mesh, rules.LEARNER)
    buckets = packing.row_buckets(config.learner.micro_batch_rows, mesh.shape["data"] * mesh.shape["fsdp"])
    progress(f"warm start: {config.sft.steps} steps of {config.sft.batch} worked answers, {spec.name}")
    course = prepared(config, text, buckets)
    programs = Programs(_recipe(config, spec, layout))
    progress(f"attention: packed {programs.recipe.attention}")
    if config.model.path:
        params = states.placed(pretrained.weights(config.model, spec), spec, layout)
    else:
        params = model_params.init(spec, jax.random.key(config.run.seed), mesh, rules.LEARNER)
    state = states.fresh(params, spec, layout, programs.recipe.optimizer.transform)
    used = {batch.rows for batches in course.batches for batch in batches}
    programs.compile([rows for rows in buckets if rows in used], progress)
    compiled = time.monotonic()
    state, losses = _run(programs, state, course.batches, progress)
    seconds = time.monotonic() - compiled
    exact = exact_share(programs, state.params, course.check, buckets)
    weights.save(out_dir, state.params, spec, described(config))
    tokens = sum(int((batch.streams["segment_ids"] > 0).sum()) for batches in course.batches for batch in batches)
    row = {
        "steps": config.sft.steps,
        "loss_first": losses[0],
        "loss": float(np.mean(losses[-10:])),
        "exact_match": exact,
        "tokens_per_s": tokens / seconds,
        "train_s": seconds,
        "seconds": time.monotonic() - started,
        "padding_waste": packing.padding_waste([batch for batches in course.batches for batch in batches]),
        "parameters": families.parameter_count(spec),
    }
    estimate = "" if exact is None else f", {100 * exact:.0f} % of unseen answers exact (teacher-forced)"
    progress(f"warm start done in {row['seconds']:.1f} s: loss {losses[0]:.3f} to {row['loss']:.3f}{estimate}")
    return row


def prepared(config: Config, text: Tokenizer, buckets: Sequence[int]) -> WarmStartPlan:
    """The whole course, on the host: `sft.steps` batches of `sft.batch` examples in the data's order."""
    size, steps = config.sft.batch, config.sft.steps
    examples = tasks.examples(config, steps * size + CHECK_EXAMPLES)
    questions = list(dict.fromkeys(task.question_hash for task, _ in examples))
    kept_out = set(questions[: min(CHECK_EXAMPLES, len(questions) // 10)])
    check = {task.question_hash: example(text, task, said) for task, said in examples if task.question_hash in kept_out}
    taught = itertools.cycle(pair for pair in examples if pair[0].question_hash not in kept_out)
    tokens, batches = sample_tokens(config.learner), []
    for step in range(steps):
        taken = [example(text, task, said) for task, said in itertools.islice(taught, size)]
        batch = minibatch.weighted(taken, "token_mean", SUPERVISED)
        if step == 0:
            buckets = _fewest(buckets, batch, tokens)
        batches.append(packing.pack(batch, tokens, buckets))
    return WarmStartPlan(batches, list(check.values()))


def example(text: Tokenizer, task: Task, said: tuple[Message, ...]) -> samples.Sample:
    """The sample of one worked conversation: every prompt as the sampler would see it, then the answer and eos."""
    return samples.supervised(tokenizers.runs(text, task.messages, said))


def described(config: Config) -> dict[str, Any]:
    """The tokenizer of the run as data: enough to build it again without the task."""
    cfg = config.tokenizer
    return {"kind": cfg.kind, "path": cfg.path, "alphabet": sources.alphabet(config.task) if cfg.kind == "char" else ""}


def _fewest(buckets: Sequence[int], batch: Sequence[samples.Sample], row_tokens: int) -> Sequence[int]:
    """As few of the row buckets as keep the padding small: batches are alike, and each bucket is compiled."""
    for count in range(1, len(buckets)):
        if packing.padding_waste(packing.pack(batch, row_tokens, buckets[:count])) <= PADDING:
            return buckets[:count]
    return buckets


def _recipe(config: Config, spec: families.ModelSpec, layout: rules.Layout) -> Recipe:
    # The rate does not decay: what settled in a sharp minimum forgets more in the first RL steps than it learns.
    schedule = optimizer.learning_rate(config.sft.learning_rate, min(20, max(config.sft.steps // 10, 1)), 0)
    return Recipe(
        spec=spec,
        layout=layout,
        token_loss=SUPERVISED.objective,
        optimizer=optimizer.adamw(schedule, config.learner.weight_decay, MAX_GRAD_NORM),
        temperature=1.0,
        row_tokens=sample_tokens(config.learner),
        attention=trainer.attention(config, spec, layout),
    )


def _run(
    programs: Programs, state: states.TrainState, batches: list[list[packing.MicroBatch]], progress: Progress
) -> tuple[states.TrainState, list[float]]:
    """The state after all steps, and the loss of each."""
    losses, accumulator, say = [], programs.zeros(), _every(SAY_EVERY_S)
    for number, step in enumerate(batches, start=1):
        for batch in step:
            accumulator = programs.accumulate(state.params, accumulator, programs.placed(batch.streams))
        state, accumulator, report = programs.apply(state, accumulator)
        losses.append(step_metrics.metrics(jax.device_get(report["statistics"]))["loss"])
        if next(say) or number == len(batches):
            progress(f"warm start step {number}/{len(batches)}, loss {losses[-1]:.3f}")
    return state, losses


def _every(seconds: float) -> Iterator[bool]:
    """True when `seconds` have passed since it last was."""
    last = time.monotonic()
    while True:
        due = time.monotonic() - last >= seconds
        if due:
            last = time.monotonic()
        yield due


def main(args: RoleArgs) -> int:
    """`jaxroll sft`: write RUN/warm and say how it went in RUN/metrics.jsonl; 0."""
    tracker = JsonlTracker(args.run_dir / "metrics.jsonl")

    def say(text: str) -> None:
        print(f"sft: {text}", flush=True)
        tracker.log({"t": time.time(), "role": "sft", "kind": "event", "text": text})

    try:
        row = train(args.config, args.run_dir / "warm", say)
        tracker.log({"t": time.time(), "role": "sft", "kind": "warm", "step": row["steps"], **row})
    finally:
        tracker.close()
    return 0


# --- greedy accuracy on worked answers, from one forward pass


def exact_share(programs: Programs, params: Params, check: Sequence[Sample], buckets: Sequence[int]) -> float | None:
    """The share of `check` of which every trained token is the likeliest one after the true tokens before it.

    As long as every token was the likeliest, greedy decoding has produced the same prefix: the share is that of exact
    greedy answers (up to ties and rounding). None when there is nothing to check.
    """
    if not check:
        return None
    recipe = programs.recipe
    guess = jax.jit(lambda params, streams: _likeliest(recipe, params, streams))
    right = 0
    for batch in packing.pack(check, recipe.row_tokens, buckets[:1]):
        hits = np.asarray(guess(params, programs.placed(batch.streams))) | ~batch.streams["mask"]
        right += sum(bool(hits[p.row, p.start : p.start + p.length].all()) for p in batch.placements)
    return right / len(check)


def _likeliest(recipe: Recipe, params: Params, streams: Mapping[str, jax.Array]) -> jax.Array:
    """bool [R, T]: where the token is the argmax of the distribution that predicts it."""
    hidden = hidden_states(recipe, params, streams)
    logits = transformer.logits(recipe.spec, params, jnp.roll(hidden, 1, axis=1))
    return logits.argmax(-1) == streams["tokens"]
