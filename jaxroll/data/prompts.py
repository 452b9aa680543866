"""The endless, resumable stream of training prompts."""

from __future__ import annotations

import hashlib
import json
import random

from jaxroll.config import Config
from jaxroll.config.derived import sample_tokens
from jaxroll.data import tasks
from jaxroll.data.tasks import MAX_SKIPPED_IN_A_ROW, Candidate, Candidates, Skipped
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import Progress, Tokenizer
from jaxroll.records import Task
from jaxroll.text import tokenizers

_STATE_FORMAT = 1


class PromptPipeline:
    """Endless iterator of training tasks in an order determined by `run.seed`; it never yields held-out questions.

    `restore()` with the `state()` of another pipeline of the same config continues with the next item. Not thread-safe.
    """

    def __init__(self, config: Config) -> None:
        self._candidates = Candidates(config)
        self._heldout = tasks.hashes(tasks.tasks(config, self._candidates))
        train = self._candidates.ranges.train
        self._fingerprint = _fingerprint(config, self._candidates)
        self._iterator = iter(tasks.in_this_thread(tasks.shuffled(train, config.run.seed, "train").map(self._admit)))

        self._beginning = self.state()

    def __iter__(self) -> PromptPipeline:
        return self

    def __next__(self) -> Task:
        """The next task. Raises ConfigError when thousands of items in a row cannot be trained on."""
        reason = ""
        for _ in range(MAX_SKIPPED_IN_A_ROW):
            found = next(self._iterator)
            if isinstance(found, Task):
                return found
            reason = found.reason
        raise ConfigError(
            "task",
            self._candidates.identity,
            f"{MAX_SKIPPED_IN_A_ROW} items in a row cannot be trained on, the last because {reason}",
            "Hold out fewer items, raise task.max_prompt_tokens, or use a task with more questions.",
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        return self._candidates.tokenizer

    def state(self) -> bytes:
        """The position of the stream, as JSON."""
        state = {"format": _STATE_FORMAT, "fingerprint": self._fingerprint, "grain": self._iterator.get_state()}
        return json.dumps(state, separators=(",", ":")).encode()

    def restore(self, state: bytes | None) -> None:
        """Continue after the item at which `state` was taken (None: from the beginning).

        ConfigError for the state of another task, seed or range; DataError for malformed data.
        """
        try:
            found = json.loads(self._beginning if state is None else state)
            if found["format"] != _STATE_FORMAT:
                raise ValueError(f"format {found['format']}, this version reads {_STATE_FORMAT}")
            fingerprint, position = found["fingerprint"], found["grain"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is not the state of a prompt stream: {error!r}") from error
        if fingerprint != self._fingerprint:
            raise ConfigError(
                "task",
                self._candidates.identity,
                "the saved prompt stream was made from other settings",
                "Resume with the run's own config: task, run.seed and tokenizer decide the order.",
            )
        self._iterator.set_state(position)

    def _admit(self, index: int) -> Task | Skipped:
        found = self._candidates.trainable(index, self._heldout)
        return found if isinstance(found, Skipped) else found.task


def _fingerprint(config: Config, candidates: Candidates) -> str:
    """A digest of all settings that determine the order of prompts."""
    ranges, task = candidates.ranges, config.task
    parts = (candidates.identity, config.run.seed, repr(ranges.train), repr(ranges.heldout), task.heldout_items)
    parts += (task.prompt_style, task.max_prompt_tokens)
    # Only if they are set, so that runs of earlier versions resume.
    parts += tuple(
        (name, value)
        for name, value in (
            ("system_prompt", task.system_prompt),
            ("few_shot", task.few_shot),
            ("tools", task.tools),
            ("template_args", config.tokenizer.template_args),
            ("columns", (task.prompt_column + task.answer_column) and (task.prompt_column, task.answer_column)),
            ("answer_after", task.answer_after),
        )
        if value
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


# --- Checks of a config's task before a run starts: held-out items, training prompts, worked answers
#
# They need neither grain nor JAX. The run itself makes the same checks later.

_LENGTHS_SEEN = 256  # worked answers whose lengths are checked


def check(config: Config, report: Progress | None = None) -> Tokenizer:
    """Check that the task yields prompts and answers; return the run's tokenizer. ConfigError as in the run itself.

    `report` receives a line about the rows of a file.
    """
    candidates = Candidates(config)
    if report is not None and candidates.described:
        report(f"task: {candidates.described}")
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
