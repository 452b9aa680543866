"""Tasks from the items of the config's source; held-out set, ranges and order of items."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from jaxroll.config import Config
from jaxroll.config.prompt_rules import opening_messages
from jaxroll.data.sources import open_source, with_opening
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import Message, Task, question_hash
from jaxroll.text import tokenizers

if TYPE_CHECKING:  # grain imports JAX, which only the process that draws prompts needs
    import grain


MAX_SKIPPED_IN_A_ROW = 10_000


@dataclass(frozen=True)
class Candidate:
    """A task with its worked conversation (answers, and environment messages between them); empty if unknown."""

    task: Task
    worked: tuple[Message, ...]


@dataclass(frozen=True)
class Skipped:
    """An item that is not trained on, with the reason."""

    reason: str


class Candidates:
    """Items of the config's source by index, as tasks; with the source's ranges and the run's tokenizer."""

    def __init__(self, config: Config) -> None:
        self._config = config.task
        self._source = open_source(config.task)
        self.ranges = of(config, self._source.size)
        self.tokenizer = tokenizers.build(config.tokenizer, with_opening(self._source.alphabet(), config.task))
        self._opening = opening_messages(config.task)
        self.identity = self._source.identity
        layout = getattr(self._source, "layout", "")
        self.described = f"{self._source.size:,} rows, layout {layout}" if layout else ""

    def at(self, index: int) -> Candidate:
        """Item `index` as a task. DataError when the source cannot make it or its prompt is too long."""
        item = self._source.item(index)
        text = item.compact if self._config.prompt_style == "compact" else item.question
        messages = self._conversation(item.messages or (Message("user", text),))
        args = {**({"tools": self._config.tools} if self._config.tools else {}), **item.env_args}
        tools = args.get("tools", ())
        tokens = len(self.tokenizer.render(messages, tools=tools))
        if tokens > self._config.max_prompt_tokens:
            limit = self._config.max_prompt_tokens
            raise DataError(f"item {index} has {tokens} prompt tokens, task.max_prompt_tokens is {limit}")
        task = Task(
            index=index,
            messages=messages,
            env=self._config.env,
            env_args=msgspec.json.encode(args).decode(),
            seed=index,
            # Of the compact form in lower case, so that the same question has the same hash in every prompt form.
            question_hash=question_hash(item.compact.lower()),
        )
        answer = () if item.answer is None else (Message("assistant", item.answer),)
        return Candidate(task, item.worked or answer)

    def _conversation(self, prompt: tuple[Message, ...]) -> tuple[Message, ...]:
        """The prompt after the messages of the config, whose system prompt replaces that of the row."""
        system = tuple(itertools.takewhile(lambda message: message.role == "system", prompt))
        if self._config.system_prompt:
            return self._opening + prompt[len(system) :]
        return system + self._opening + prompt[len(system) :]

    def trainable(self, index: int, kept_aside: frozenset[str], *, taught: bool = False) -> Candidate | Skipped:
        """Item `index`; Skipped if it cannot be made, its question is in `kept_aside`, or (`taught`) has no answer."""
        try:
            candidate = self.at(index)
        except DataError as error:
            return Skipped(str(error))
        if taught and not candidate.worked:
            return Skipped(f"item {index} has no answer")
        if candidate.task.question_hash in kept_aside:
            return Skipped(f"item {index} is held out")
        return candidate


# --- held-out tasks

_TRIES_PER_ITEM = 50  # indices tried per held-out item; a task that needs more has too few distinct questions


def tasks(config: Config, candidates: Candidates | None = None) -> tuple[Task, ...]:
    """`task.heldout_items` tasks with distinct questions, the same for every run seed.

    ConfigError when the held-out range has too few distinct questions.
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
    """The held-out question hashes that also occur in `question_hashes`; a sound run has none."""
    return hashes(heldout).intersection(question_hashes)


# --- order of items


def shuffled(indices: range, run_seed: int, purpose: str) -> grain.MapDataset[int]:
    """`indices` in an endless order determined by `run_seed` and `purpose`; every epoch is a new permutation.

    The permutation is computed index by index, so a range of ten million items needs no setup time.
    """
    import grain

    digest = hashlib.blake2b(f"{run_seed}/{purpose}".encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little") >> 1
    return grain.MapDataset.range(len(indices)).shuffle(seed=seed).repeat(None).map(indices.__getitem__)


def in_this_thread(dataset: grain.MapDataset) -> grain.IterDataset:
    """`dataset` as an iterator that computes items on request, in the caller's thread."""
    # Making an item takes microseconds, so read-ahead threads would cost more than they save; and the iterator's state
    # between two items must not be ahead of them.
    import grain

    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=1))


# --- training, warm-start and held-out ranges of a source

# Length of the last range of an endless source; each other range ends at the start of the next one.
_ENDLESS_SPAN = 10_000_000


@dataclass(frozen=True)
class Ranges:
    """Item indices of the three ranges. Held-out questions are excluded from the other two ranges by their hash."""

    train: range
    heldout: range
    sft: range


def of(config: Config, size: int | None) -> Ranges:
    """The ranges of a source of `size` items (None: endless). ConfigError when they do not fit the source.

    An endless source is divided at the three starts of the config. In a file too short for `task.heldout_start`, items
    are held out from the end backwards; if the file ends before `sft.start`, the warm start uses the training rows.
    """
    if size is None:
        return _endless(config)
    task = config.task
    if task.train_start >= size:
        raise ConfigError("task.train_start", task.train_start, f"{task.path} has {size} rows", "Use a smaller one.")
    if task.heldout_start >= size:
        train = range(task.train_start, size)
        return Ranges(train, train[::-1], range(config.sft.start, size) or train)
    if task.heldout_start <= task.train_start:
        raise ConfigError(
            "task.heldout_start",
            task.heldout_start,
            "in a file, training rows come before it",
            f"Use more than task.train_start = {task.train_start}.",
        )
    train = range(task.train_start, task.heldout_start)
    return Ranges(train, range(task.heldout_start, size), range(config.sft.start, size) or train)


def _endless(config: Config) -> Ranges:
    starts = {
        "task.train_start": config.task.train_start,
        "task.heldout_start": config.task.heldout_start,
        "sft.start": config.sft.start,
    }
    if len(set(starts.values())) < len(starts):
        raise ConfigError(
            "task.heldout_start",
            config.task.heldout_start,
            f"two ranges start at one item: {starts}",
            "Give each a start of its own, far from the others.",
        )
    ordered = sorted(starts.values())
    stop_of = dict(zip(ordered, [*ordered[1:], ordered[-1] + _ENDLESS_SPAN], strict=True))
    train, heldout, sft = (range(start, stop_of[start]) for start in starts.values())
    return Ranges(train, heldout, sft)


# --- worked conversations for the warm start


def examples(config: Config, count: int) -> list[tuple[Task, tuple[Message, ...]]]:
    """`count` tasks, each with a worked conversation, in an order determined by `run.seed`.

    A conversation consists of the answers to learn and the environment's messages between them. Tasks come from the
    range of the warm start and never have a held-out question; questions may repeat. ConfigError when none can be used.
    """
    candidates = Candidates(config)
    kept_aside = hashes(tasks(config, candidates))
    found: list[tuple[Task, tuple[Message, ...]]] = []
    skipped = 0
    indices = iter(in_this_thread(shuffled(candidates.ranges.sft, config.run.seed, "sft")))
    while len(found) < count:
        candidate = candidates.trainable(next(indices), kept_aside, taught=True)
        if not isinstance(candidate, Skipped):
            found.append((candidate.task, candidate.worked))
            skipped = 0
        elif (skipped := skipped + 1) == MAX_SKIPPED_IN_A_ROW:
            raise ConfigError(
                "sft.steps",
                config.sft.steps,
                f"{skipped} items in a row cannot serve the warm start, the last because {candidate.reason}",
                "Set sft.steps=0, or use a task with worked answers.",
            )
    return found
