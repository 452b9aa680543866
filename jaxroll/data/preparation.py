"""Preparation of a run from its task: checks before it starts, and worked conversations for the warm start.

The checks need neither grain nor JAX. The run itself makes the same checks later.
"""

from __future__ import annotations

import random

from jaxroll.config import Config
from jaxroll.config.derived import has_warm_start, sample_tokens
from jaxroll.data import tasks
from jaxroll.data.tasks import MAX_SKIPPED_IN_A_ROW, Candidates, Order, Part, SkippedItem, WorkedTask
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import Progress, Tokenizer
from jaxroll.records import Message, Task
from jaxroll.text import tokenizers

# --- checks: held-out items, training prompts, worked answers

_LENGTHS_SEEN = 256  # worked answers whose lengths are checked


def check(config: Config, report: Progress | None = None) -> Tokenizer:
    """Check that the task yields prompts and answers; return the run's tokenizer. ConfigError as in the run itself.

    `report` receives a line about the rows of a file.
    """
    candidates = Candidates(config)
    sets = tasks.evaluated(config, candidates)
    for part in candidates.parts:
        if report is not None and part.described:
            report(f"task: {part.described}")
    for name in config.evaluator.sets:
        if report is not None:
            report(f"evaluator.sets.{name}: {len(sets[name]):,} items")
    kept_aside = tasks.all_hashes(sets)
    _check_prompts(candidates, kept_aside)
    if has_warm_start(config):
        _check_worked(config, candidates, kept_aside)
    return candidates.tokenizer


def _check_prompts(candidates: Candidates, kept_aside: frozenset[str]) -> None:
    for number, part in enumerate(candidates.parts):
        key = f"task.mixture[{number}]" if part.label else "task"
        _check_part(candidates, part, key, kept_aside)


def _check_part(candidates: Candidates, part: Part, key: str, kept_aside: frozenset[str]) -> None:
    reason, tried = "its range is empty", _spread(part.ranges.train)
    for index in tried:
        found = candidates.trainable(index, kept_aside)
        if isinstance(found, WorkedTask):
            return
        reason = found.reason
    raise ConfigError(
        f"{key}.path" if part.config.path else f"{key}.name",
        part.config.path or part.config.name,
        f"gives no prompts: none of {len(tried)} items can be trained on, the last because {reason}",
        "Raise task.max_prompt_tokens, hold out fewer items, or use a task with more questions.",
    )


def _check_worked(config: Config, candidates: Candidates, kept_aside: frozenset[str]) -> None:
    """Refuse a source without worked answers: the warm start keeps the shares of a mixture, so it would wait for it."""
    for part in candidates.parts:
        reason, seen = "its range is empty", 0
        for index in _spread(part.ranges.sft):
            found = candidates.trainable(index, kept_aside, taught=True)
            if isinstance(found, SkippedItem):
                reason = found.reason
                continue
            _check_length(config, candidates.tokenizer, found)
            if (seen := seen + 1) == max(1, _LENGTHS_SEEN // len(candidates.parts)):
                break
        if not seen:
            of = f" of the source {part.label}" if part.label else ""
            raise no_example(config, f"no item{of} can serve the warm start, the last because {reason}")


def _check_length(config: Config, text: Tokenizer, found: WorkedTask) -> None:
    try:
        tokens = sum(
            len(run) for run, _ in tokenizers.runs(text, found.task.messages, found.worked, found.task.tools())
        )
    except DataError as error:
        raise ConfigError("tokenizer.kind", config.tokenizer.kind, str(error), "Set sft.steps=0.") from error
    if tokens > sample_tokens(config.learner):
        raise ConfigError(
            "learner.row_tokens",
            config.learner.row_tokens,
            f"the worked answer of item {found.task.index} has {tokens} tokens with its question",
            f"Set it to {tokens - config.learner.shared_prompt_tokens} or more, or sft.steps to 0.",
        )


def _spread(indices: range) -> list[int]:
    """A fixed random selection of `indices`, as many as the run would try before it gives up."""
    count = min(len(indices), MAX_SKIPPED_IN_A_ROW)
    return [indices[place] for place in random.Random(0).sample(range(len(indices)), count)]


# --- worked conversations for the warm start


def examples(config: Config, count: int) -> list[tuple[Task, tuple[Message, ...]]]:
    """`count` tasks, each with a worked conversation, in an order determined by `run.seed`.

    A conversation consists of the answers to learn and the environment's messages between them. Tasks come from the
    range of the warm start and never have a held-out question; questions may repeat. ConfigError when none can be used.
    """
    candidates = Candidates(config)
    kept_aside = tasks.all_hashes(tasks.evaluated(config, candidates))
    found: list[tuple[Task, tuple[Message, ...]]] = []
    skipped = 0
    order = Order(candidates, "sft", lambda index: candidates.trainable(index, kept_aside, taught=True))
    while len(found) < count:
        candidate = next(order)
        if not isinstance(candidate, SkippedItem):
            found.append((candidate.task, candidate.worked))
            skipped = 0
        elif (skipped := skipped + 1) == MAX_SKIPPED_IN_A_ROW:
            raise no_example(
                config, f"{skipped} items in a row cannot serve the warm start, the last because {candidate.reason}"
            )
    return found


def no_example(config: Config, reason: str) -> ConfigError:
    """The error for a task without worked answers for the warm start."""
    remedy = "Set sft.steps=0, or use tasks with worked answers."
    return ConfigError("sft.steps", config.sft.steps, reason, remedy)
