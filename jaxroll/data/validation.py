"""Whether a config's task gives what its run will ask for: held-out items, training prompts, worked answers.

Looked at before a run starts, without grain and JAX. The run itself refuses the same things when it meets them.
"""

from __future__ import annotations

import random

from jaxroll.config import Config
from jaxroll.config.rules import sample_tokens
from jaxroll.data import tasks
from jaxroll.data.tasks import MAX_SKIPPED_IN_A_ROW, Candidate, Candidates, Skipped
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import Tokenizer
from jaxroll.text import tokenizers

_LENGTHS_SEEN = 256  # worked answers whose lengths are looked at


def check(config: Config) -> Tokenizer:
    """The run's tokenizer, or the ConfigError with which a role would end that asks for prompts or answers."""
    candidates = Candidates(config)
    kept_aside = tasks.hashes(tasks.tasks(config, candidates))
    _check_prompts(config, candidates, kept_aside)
    if config.sft.steps:
        _check_worked(config, candidates, kept_aside)
    return candidates.tokenizer


def _check_prompts(config: Config, candidates: Candidates, kept_aside: frozenset[str]) -> None:
    reason, tried = "its range is empty", _spread(candidates.ranges.train)
    for index in tried:
        found = candidates.trainable(index, kept_aside)
        if isinstance(found, Candidate):
            return
        reason = found.reason
    raise ConfigError(
        "task.path" if config.task.path else "task.name",
        config.task.path or config.task.name,
        f"gives no prompts: none of {len(tried)} items can be trained on, the last because {reason}",
        "Raise task.max_prompt_tokens, hold out fewer items, or use a task with more questions.",
    )


def _check_worked(config: Config, candidates: Candidates, kept_aside: frozenset[str]) -> None:
    reason, seen = "its range is empty", 0
    for index in _spread(candidates.ranges.sft):
        found = candidates.trainable(index, kept_aside, taught=True)
        if isinstance(found, Skipped):
            reason = found.reason
            continue
        _check_length(config, candidates.tokenizer, found)
        if (seen := seen + 1) == _LENGTHS_SEEN:
            return
    if not seen:
        raise ConfigError(
            "sft.steps",
            config.sft.steps,
            f"no item can serve the warm start, the last because {reason}",
            "Set sft.steps=0, or use a task with worked answers.",
        )


def _check_length(config: Config, text: Tokenizer, found: Candidate) -> None:
    try:
        tokens = sum(len(run) for run, _ in tokenizers.runs(text, found.task.messages, found.worked))
    except DataError as error:
        raise ConfigError("tokenizer.kind", config.tokenizer.kind, str(error), "Set sft.steps=0.") from error
    if tokens > sample_tokens(config.learner):
        raise ConfigError(
            "learner.row_tokens",
            config.learner.row_tokens,
            f"the worked answer of item {found.task.index} has {tokens} tokens with its question",
            f"Set it to {tokens - config.learner.prompt_tokens} or more, or sft.steps to 0.",
        )


def _spread(indices: range) -> list[int]:
    """Different places of `indices`, always the same ones: as many as the run would try before it gives up."""
    count = min(len(indices), MAX_SKIPPED_IN_A_ROW)
    return [indices[place] for place in random.Random(0).sample(range(len(indices)), count)]
