"""The endless, resumable stream of training prompts."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import Counter

from jaxroll.config import Config
from jaxroll.config.derived import has_warm_start, sample_tokens
from jaxroll.data import tasks
from jaxroll.data.tasks import MAX_SKIPPED_IN_A_ROW, Candidate, Candidates, Part, Skipped
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
        self._heldout = tasks.all_hashes(tasks.evaluated(config, self._candidates))
        self._fingerprint = _fingerprint(config, self._candidates)
        self._order = tasks.Order(self._candidates, "train", self._admit)
        self.skipped: Counter[str] = Counter()  # items since the beginning of the run, by kind; also truncated prompts
        self._beginning = self.state()

    def __iter__(self) -> PromptPipeline:
        return self

    def __next__(self) -> Task:
        """The next task. Raises ConfigError when thousands of items in a row cannot be trained on."""
        reason = ""
        for _ in range(MAX_SKIPPED_IN_A_ROW):
            found = next(self._order)
            if isinstance(found, Candidate):
                if found.truncated:
                    self.skipped["truncated"] += 1
                return found.task
            self.skipped[found.kind] += 1
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
        """The position of the stream and the counts of skipped items, as JSON."""
        state = {"format": _STATE_FORMAT, "fingerprint": self._fingerprint, "grain": self._order.get_state()}
        if skipped := +self.skipped:
            state["skipped"] = skipped
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
            skipped = Counter(found.get("skipped", {}))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is not the state of a prompt stream: {error!r}") from error
        if fingerprint != self._fingerprint:
            raise ConfigError(
                "task",
                self._candidates.identity,
                "the saved prompt stream was made from other settings",
                "Resume with the run's own config: task, run.seed and tokenizer decide the order.",
            )
        self._order.set_state(position)
        self.skipped = skipped

    def _admit(self, index: int) -> Candidate | Skipped:
        return self._candidates.trainable(index, self._heldout)


def _fingerprint(config: Config, candidates: Candidates) -> str:
    """A digest of all settings that determine the order of prompts."""
    task = config.task
    parts = (candidates.identity, candidates.run_seed)
    for part in candidates.parts:
        parts += (repr(part.ranges.train), repr(part.ranges.heldout), part.config.heldout_items)
    parts += (task.prompt_style, task.max_prompt_tokens)
    # Only if they are set, so that runs of earlier versions resume.
    parts += tuple(
        (name, value)
        for name, value in (
            ("system_prompt", task.system_prompt),
            ("few_shot", task.few_shot),
            ("tools", task.tools),
            ("template_args", config.tokenizer.template_args),
            ("long_prompts", task.long_prompts if task.long_prompts != "drop" else ""),
            ("columns", (task.prompt_column + task.answer_column) and (task.prompt_column, task.answer_column)),
            ("answer_after", task.answer_after),
            ("sets", config.evaluator.sets),
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
        if isinstance(found, Candidate):
            return
        reason = found.reason
    raise ConfigError(
        f"{key}.path" if part.config.path else f"{key}.name",
        part.config.path or part.config.name,
        f"gives no prompts: none of {len(tried)} items can be trained on, the last because {reason}",
        "Raise task.max_prompt_tokens, hold out fewer items, or use a task with more questions.",
    )


def _check_worked(config: Config, candidates: Candidates, kept_aside: frozenset[str]) -> None:
    reason, seen = "its range is empty", 0
    for index in itertools.chain.from_iterable(_spread(part.ranges.sft) for part in candidates.parts):
        found = candidates.trainable(index, kept_aside, taught=True)
        if isinstance(found, Skipped):
            reason = found.reason
            continue
        _check_length(config, candidates.tokenizer, found)
        if (seen := seen + 1) == _LENGTHS_SEEN:
            return
    if not seen:
        raise tasks.no_example(config, f"no item can serve the warm start, the last because {reason}")


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
