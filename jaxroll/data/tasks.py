"""Tasks from the config's source: prompt text, identity, whether the prompt fits; and the held-out set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from jaxroll.config import Config
from jaxroll.data import splits
from jaxroll.data.sources import open_source
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import Message, Task, question_hash
from jaxroll.text import tokenizers

MAX_SKIPPED_IN_A_ROW = 10_000


@dataclass(frozen=True)
class Candidate:
    """A task, and what a teacher says to it: answers and, between them, its environment replies. Empty: unknown."""

    task: Task
    worked: tuple[Message, ...]


@dataclass(frozen=True)
class Skipped:
    """An item that is not trained on, and why."""

    reason: str


class Candidates:
    """Items of the config's source by index, as tasks; knows the source's ranges and the run's tokenizer."""

    def __init__(self, config: Config) -> None:
        self._config = config.task
        self._source = open_source(config.task)
        self.ranges = splits.of(config, self._source.size)
        self.tokenizer = tokenizers.build(config.tokenizer, self._source.alphabet())
        self.identity = self._source.identity

    def at(self, index: int) -> Candidate:
        """Item `index`. Raises DataError where the source cannot make it or its prompt is too long."""
        item = self._source.item(index)
        text = item.compact if self._config.prompt == "compact" else item.question
        messages = (Message("user", text),)
        tokens = len(self.tokenizer.render(messages))
        if tokens > self._config.max_prompt_tokens:
            limit = self._config.max_prompt_tokens
            raise DataError(f"item {index} has {tokens} prompt tokens, task.max_prompt_tokens is {limit}")
        task = Task(
            index=index,
            messages=messages,
            env=self._config.env,
            env_args=msgspec.json.encode(item.env_args).decode(),
            seed=index,
            # Over the compact form in lower case: a question is the same however it is dressed.
            question_hash=question_hash(item.compact.lower()),
        )
        answer = () if item.answer is None else (Message("assistant", item.answer),)
        return Candidate(task, item.worked or answer)

    def trainable(self, index: int, kept_aside: frozenset[str], *, taught: bool = False) -> Candidate | Skipped:
        """Item `index`, unless it cannot be made, asks a question of `kept_aside`, or has no answer to be `taught`."""
        try:
            candidate = self.at(index)
        except DataError as error:
            return Skipped(str(error))
        if taught and not candidate.worked:
            return Skipped(f"item {index} has no answer")
        if candidate.task.question_hash in kept_aside:
            return Skipped(f"item {index} is held out")
        return candidate


# --- held-out tasks, and the check that none was trained on

_TRIES_PER_ITEM = 50  # a task with fewer distinct questions than this finds is too small to hold anything out


def tasks(config: Config, candidates: Candidates | None = None) -> tuple[Task, ...]:
    """`task.heldout_items` tasks with distinct questions, the same for every run seed.

    Raises ConfigError when the held-out range has too few distinct questions.
    """
    wanted = config.task.heldout_items
    candidates = candidates or Candidates(config)
    span = candidates.ranges.heldout
    found: dict[str, Task] = {}
    last_skip = ""
    for index in span[: wanted * _TRIES_PER_ITEM]:
        if len(found) == wanted:
            break
        try:
            task = candidates.at(index).task
        except DataError as error:
            last_skip = f" Last skipped: {error}."
            continue
        found.setdefault(task.question_hash, task)
    if len(found) < wanted:
        raise ConfigError(
            "task.heldout_items",
            wanted,
            f"only {len(found)} distinct questions were found",
            f"Use fewer, or a task with more questions.{last_skip}",
        )
    return tuple(found.values())


def hashes(heldout: Iterable[Task]) -> frozenset[str]:
    """The question hashes of held-out tasks."""
    return frozenset(task.question_hash for task in heldout)


def overlap(heldout: Iterable[Task], question_hashes: Iterable[str]) -> frozenset[str]:
    """The held-out question hashes that also stand in `question_hashes`: 0 of them is what a report should say."""
    return hashes(heldout).intersection(question_hashes)


def check_disjoint(heldout: Sequence[Task], trained_on: Iterable[Task], what: str = "training") -> None:
    """Raises DataError when a task of `trained_on` asks a held-out question, or a held-out question comes twice."""
    if len(hashes(heldout)) < len(heldout):
        raise DataError(f"the held-out set asks {len(heldout) - len(hashes(heldout))} questions twice")
    common = overlap(heldout, (task.question_hash for task in trained_on))
    if common:
        raise DataError(f"{len(common)} held-out questions occur in {what}, as {sorted(common)[0]}")
