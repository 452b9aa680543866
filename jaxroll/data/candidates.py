"""One item of the config's source as a task: prompt text, identity, and whether the prompt fits."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from jaxroll.config import Config
from jaxroll.data import ranges
from jaxroll.data.sources import open_source
from jaxroll.errors import DataError
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
        self.ranges = ranges.of(config, self._source.size)
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
