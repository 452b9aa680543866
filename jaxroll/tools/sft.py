"""`jaxroll sft`: warm start by supervised training on a task's worked answers, with the learner's programs.

Cross-entropy is −A · log π with A = 1, so packing, accumulation and the optimizer are those of the RL learner; only the
objective and the schedule differ. The trained tokens are all answers of a conversation with their end-of-sequence
tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import sharding as layouts
from jaxroll.algorithms import losses as importance
from jaxroll.algorithms.registry import Algorithm
from jaxroll.config import Config, RoleArgs
from jaxroll.config.derived import answer_tokens, model_folder, sample_tokens, tokenizer_folder
from jaxroll.data import preparation, sources
from jaxroll.errors import ConfigError
from jaxroll.learner import minibatch, packing, step_metrics, weights
from jaxroll.learner import state as states
from jaxroll.learner.minibatch import Sample
from jaxroll.learner.state import Params
from jaxroll.learner.step import Recipe, hidden_states, packed_attention
from jaxroll.learner.trainer import TrainingPrograms
from jaxroll.metrics import JsonlTracker
from jaxroll.models import families, transformer
from jaxroll.models import params as model_params
from jaxroll.protocols import Progress, Tokenizer
from jaxroll.records import Message, Task
from jaxroll.text import tokenizers

REPORT_EVERY_S = 5.0
CHECK_EVERY = 5  # steps between two estimates with `sft.enough_exact`
CHECK_EXAMPLES = 256  # questions held out for the estimate at the end: at most this many, and at most a tenth
MAX_GRAD_NORM = 1.0
SUPERVISED = Algorithm(importance.likelihood(), multiple_of_advantage=True)
PADDING = 0.15  # fraction of padded tokens that costs less time than compiling another program


@dataclass(frozen=True)
class WarmStartPlan:
    """The data of a warm start: the packed micro-batches of every step, and examples that it never trains on.

    `too_long` is the share of its examples with an answer that `sampling.max_tokens` does not allow in a rollout.
    """

    batches: list[list[packing.MicroBatch]]
    check: list[Sample]
    too_long: float


def train(config: Config, out_dir: Path, progress: Progress) -> dict[str, Any]:
    """Train `sft.steps` steps from a fresh init (or `model.path`), write the folder `out_dir`, and return metrics.

    With `sft.enough_exact` below 1 it ends as soon as `exact_match` reaches that, looked at every `CHECK_EVERY` steps.
    The result depends only on the config. `exact_match` is teacher-forced: the share of unseen worked answers of which
    every token is the likeliest one given the tokens before it, so that greedy decoding would give the same answer. It
    is None for a task too small to hold out questions.
    """
    if config.sft.steps < 1:
        raise ConfigError("sft.steps", config.sft.steps, "a warm start takes at least one step", "Use 300.")
    started = time.monotonic()
    text = tokenizers.build(config.tokenizer, sources.alphabet(config.task))
    spec = model_params.spec(config.model, text.vocab_size)
    mesh = layouts.build(config.learner.mesh)
    layout = layouts.Layout(mesh, layouts.LEARNER)
    buckets = packing.learner_buckets(config.learner)
    progress(f"warm start: {config.sft.steps} steps of {config.sft.batch} worked answers, {spec.name}")
    plan = prepared(config, text, buckets)
    if plan.too_long:
        limit = f"the {answer_tokens(config)} tokens of sampling.max_tokens"
        progress(f"warning: {plan.too_long:.0%} of the worked answers are longer than {limit}, where rollouts end")
    programs = TrainingPrograms(_recipe(config, spec, layout))
    progress(f"attention: packed {programs.recipe.attention}")
    if model_folder(config):
        params = states.placed(model_params.weights(config.model, spec), spec, layout)
    else:
        params = model_params.init(spec, model_params.key(config), mesh, layouts.LEARNER)
    state = states.fresh(params, spec, layout, programs.recipe.optimizer.transform)
    used = {batch.rows for batches in plan.batches for batch in batches}
    programs.compile([rows for rows in buckets if rows in used], progress)
    compiled = time.monotonic()
    exact_share = estimator(programs, plan.check, buckets)
    state, losses = _run(programs, state, plan.batches, progress, exact_share, config.sft.enough_exact)
    seconds = time.monotonic() - compiled
    exact = exact_share(state.params)
    weights.save(out_dir, state.params, spec, described(config))
    trained = plan.batches[: len(losses)]
    tokens = sum(int((batch.streams["segment_ids"] > 0).sum()) for batches in trained for batch in batches)
    row = {
        "steps": len(losses),
        "loss_first": losses[0],
        "loss": float(np.mean(losses[-10:])),
        "exact_match": exact,
        "tokens_per_s": tokens / seconds,
        "train_s": seconds,
        "seconds": time.monotonic() - started,
        "padding_waste": packing.padding_waste([batch for batches in trained for batch in batches]),
        "parameters": families.parameter_count(spec),
    }
    estimate = "" if exact is None else f", {100 * exact:.0f} % of unseen answers exact (teacher-forced)"
    change = f"loss {losses[0]:.3f} to {row['loss']:.3f}"
    progress(f"warm start done after {len(losses)} steps in {row['seconds']:.1f} s: {change}{estimate}")
    return row


def prepared(config: Config, text: Tokenizer, buckets: Sequence[int]) -> WarmStartPlan:
    """The plan, on the host: `sft.steps` batches of `sft.batch` examples in the data's order."""
    size, steps = config.sft.batch, config.sft.steps
    examples = preparation.examples(config, steps * size + CHECK_EXAMPLES)
    questions = list(dict.fromkeys(task.question_hash for task, _ in examples))
    kept_out = set(questions[: min(CHECK_EXAMPLES, len(questions) // 10)])
    check = {
        task.question_hash: example(text, task, worked) for task, worked in examples if task.question_hash in kept_out
    }
    taught = itertools.cycle(pair for pair in examples if pair[0].question_hash not in kept_out)
    tokens, batches, too_long = sample_tokens(config.learner), [], 0
    for step in range(steps):
        taken = [example(text, task, worked) for task, worked in itertools.islice(taught, size)]
        too_long += sum(longest_answer(sample.mask) > answer_tokens(config) for sample in taken)
        batch = minibatch.weighted(taken, "token_mean", SUPERVISED)
        if step == 0:
            buckets = _fewest(buckets, batch, tokens)
        batches.append(packing.pack(batch, tokens, buckets))
    return WarmStartPlan(batches, list(check.values()), too_long / (steps * size))


def longest_answer(mask: np.ndarray) -> int:
    """The most tokens in a row that are trained on (bool [T]): one answer with its end."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def example(text: Tokenizer, task: Task, worked: tuple[Message, ...]) -> Sample:
    """The sample of a worked conversation: every prompt as the sampler would render it, then the answer and eos."""
    return supervised(tokenizers.runs(text, task.messages, worked, task.tools()))


def described(config: Config) -> dict[str, Any]:
    """The arguments that build the run's tokenizer again without the task."""
    folder = tokenizer_folder(config)
    return tokenizers.arguments(config.tokenizer, "" if folder else sources.alphabet(config.task))


def _fewest(buckets: Sequence[int], batch: Sequence[Sample], row_tokens: int) -> Sequence[int]:
    """The fewest row buckets that keep the padding of `batch` small, because each bucket must be compiled."""
    for count in range(1, len(buckets)):
        if packing.padding_waste(packing.pack(batch, row_tokens, buckets[:count])) <= PADDING:
            return buckets[:count]
    return buckets


def _recipe(config: Config, spec: families.ModelSpec, layout: layouts.Layout) -> Recipe:
    # No decay: a model that has settled in a sharp minimum forgets more in the first RL steps than it learns.
    schedule = states.learning_rate(config.sft.learning_rate, min(20, max(config.sft.steps // 10, 1)), 0)
    return Recipe(
        spec=spec,
        layout=layout,
        token_loss=SUPERVISED.objective,
        optimizer=states.adamw(schedule, config.learner.weight_decay, MAX_GRAD_NORM),
        temperature=1.0,
        row_tokens=sample_tokens(config.learner),
        attention=packed_attention(config, spec, layout),
    )


def _run(
    programs: TrainingPrograms,
    state: states.TrainState,
    batches: list[list[packing.MicroBatch]],
    progress: Progress,
    exact_share: Callable[[Params], float | None],
    enough: float,
) -> tuple[states.TrainState, list[float]]:
    """The state after the last step, and the loss of each. It ends early once `exact_share` is `enough` (below 1)."""
    losses, accumulator, report_due = [], programs.zeros(), _every(REPORT_EVERY_S)
    for number, step in enumerate(batches, start=1):
        for batch in step:
            accumulator = programs.accumulate(state.params, accumulator, programs.placed(batch.streams))
        state, accumulator, report = programs.apply(state, accumulator)
        losses.append(step_metrics.metrics(jax.device_get(report["statistics"]))["loss"])
        if next(report_due) or number == len(batches):
            progress(f"warm start step {number}/{len(batches)}, loss {losses[-1]:.3f}")
        if enough < 1 and number % CHECK_EVERY == 0 and (exact_share(state.params) or 0.0) >= enough:
            break
    return state, losses


def _every(seconds: float) -> Iterator[bool]:
    """Yield True when `seconds` have passed since the last True, otherwise False."""
    last = time.monotonic()
    while True:
        due = time.monotonic() - last >= seconds
        if due:
            last = time.monotonic()
        yield due


def main(args: RoleArgs) -> int:
    """Write the warm start to RUN/warm and its metrics to RUN/metrics.jsonl; return 0."""
    tracker = JsonlTracker(args.paths.metrics)

    def progress(text: str) -> None:
        print(f"sft: {text}", flush=True)
        tracker.log({"t": time.time(), "role": "sft", "kind": "event", "text": text})

    try:
        row = train(args.config, args.paths.warm_start, progress)
        tracker.log({"t": time.time(), "role": "sft", "kind": "warm", "step": row["steps"], **row})
    finally:
        tracker.close()
    return 0


# --- greedy accuracy on worked answers, from one forward pass


def estimator(
    programs: TrainingPrograms, check: Sequence[Sample], buckets: Sequence[int]
) -> Callable[[Params], float | None]:
    """A function of the parameters: the share of `check` whose trained tokens are all the likeliest ones.

    Each token is judged given the true tokens before it. Greedy decoding gives the same prefix as long as every token
    is the likeliest, so this is the share of exact greedy answers (up to ties and rounding). None if `check` is empty.
    """
    recipe = programs.recipe
    guess = jax.jit(lambda params, streams: _likeliest(recipe, params, streams))
    batches = packing.pack(check, recipe.row_tokens, buckets[:1]) if check else []

    def exact_share(params: Params) -> float | None:
        right = 0
        for batch in batches:
            hits = np.asarray(guess(params, programs.placed(batch.streams))) | ~batch.streams["mask"]
            right += sum(bool(hits[p.row, p.start : p.start + p.length].all()) for p in batch.placements)
        return right / len(check) if check else None

    return exact_share


def _likeliest(recipe: Recipe, params: Params, streams: Mapping[str, jax.Array]) -> jax.Array:
    """bool [R, T]: True where the token is the argmax of the distribution that predicts it."""
    hidden = hidden_states(recipe, params, streams)
    logits = transformer.logits(recipe.spec, params, jnp.roll(hidden, 1, axis=1))
    return logits.argmax(-1) == streams["tokens"]


def supervised(runs: Sequence[tuple[Sequence[int], bool]]) -> Sample:
    """A sample made of concatenated (tokens, trained) runs, with advantage 1 on the trained ones."""
    mask = np.concatenate([np.full(len(run), trained, bool) for run, trained in runs])
    return Sample(
        tokens=np.concatenate([np.asarray(run, np.int32) for run, _ in runs]),
        mask=mask,
        behaviour=np.zeros(len(mask), np.float32),
        ages=np.zeros(len(mask), np.int32),
        sampled_tokens=int(mask.sum()),
        fresh=False,
        reward=0.0,
        advantage=1.0,
    )
