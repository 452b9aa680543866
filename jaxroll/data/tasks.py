"""Tasks from the items of the config's source; held-out set, ranges and order of items, the stream of prompts."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from jaxroll.config import Config, TaskConfig, parsing
from jaxroll.config.parsing import HELDOUT, PLAY_KEYS, SOURCE_ITEMS, TaskPart, evaluation_set, task_parts
from jaxroll.config.rewards import without_changeable
from jaxroll.data.sources import open_source, with_opening
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import Source, Tokenizer
from jaxroll.records import Message, Task, question_hash
from jaxroll.text import tokenizers

if TYPE_CHECKING:  # grain imports JAX, which only the process that draws prompts needs
    import grain

MAX_SKIPPED_IN_A_ROW = 10_000


@dataclass(frozen=True)
class WorkedTask:
    """A task with its worked conversation (answers, and environment messages between them); empty if unknown."""

    task: Task
    worked: tuple[Message, ...]
    truncated: bool = False


@dataclass(frozen=True)
class SkippedItem:
    """An item that is not trained on, with the reason. `kind` is too_long, held_out, unanswered or failed."""

    reason: str
    kind: str = "failed"


class TooLong(DataError):
    """A prompt exceeds `task.max_prompt_tokens`."""


@dataclass(frozen=True)
class Part:
    """A source of the config with its ranges; indices are those of the run (see `SOURCE_ITEMS`)."""

    label: str
    weight: float
    config: TaskConfig
    source: Source
    ranges: Ranges
    first: int
    env: str
    opening: tuple[Message, ...]

    @property
    def described(self) -> str:
        """The rows of a file; empty for other sources."""
        layout = getattr(self.source, "layout", "")
        return f"{self.label}{': ' * bool(self.label)}{self.source.size:,} rows, layout {layout}" if layout else ""


class Candidates:
    """Items of the config's sources by index, as tasks; with the sources' ranges and the run's tokenizer."""

    def __init__(self, config: Config, tokenizer: Tokenizer | None = None, parts: Sequence[TaskPart] = ()) -> None:
        self._config, self.run_seed = config.task, config.run.seed
        numbered = enumerate(parts or task_parts(config.task))
        self.parts = tuple(_opened(config, part, number * SOURCE_ITEMS) for number, part in numbered)
        alphabets = (part.source.alphabet() for part in self.parts)
        self.tokenizer = tokenizer or tokenizers.build(config.tokenizer, with_opening(alphabets, config.task))

    @property
    def ranges(self) -> Ranges:
        """The ranges of the only source."""
        (part,) = self.parts
        return part.ranges

    @property
    def identity(self) -> str:
        """The identity of the source, or those of a mixture with labels and weights."""
        if not self._config.mixture:
            return self.parts[0].source.identity
        return "mixture/" + "/".join(f"{part.label}*{part.weight:g}={part.source.identity}" for part in self.parts)

    def at(self, index: int) -> WorkedTask:
        """Item `index` as a task. DataError when the source cannot make it, TooLong when its prompt is too long."""
        part = self.parts[index // SOURCE_ITEMS if self._config.mixture else 0]
        item = part.source.item(index - part.first)
        text = item.compact if part.config.prompt_style == "compact" else item.question
        args = {**({"tools": part.config.tools} if part.config.tools else {}), **item.env_args}
        if part.label:
            args["source"] = part.label
        full = _conversation(part, item.messages or (Message("user", text),))
        messages = self._fitting(full, args.get("tools", ()), index, part)
        task = Task(
            index=index,
            messages=messages,
            env=part.env,
            env_args=msgspec.json.encode(args).decode(),
            seed=index,
            # Of the compact form in lower case, so that the same question has the same hash in every prompt form.
            question_hash=question_hash(item.compact.lower()),
        )
        answer = () if item.answer is None else (Message("assistant", item.answer),)
        return WorkedTask(task, item.worked or answer, truncated=messages != full)

    def _fitting(self, messages: tuple[Message, ...], tools: Any, index: int, part: Part) -> tuple[Message, ...]:
        """`messages` within `task.max_prompt_tokens`, by the policy `task.long_prompts`; TooLong if that drops them."""
        policy, limit = part.config.long_prompts, part.config.max_prompt_tokens
        tokens = len(self.tokenizer.render(messages, tools=tools))
        shown, over = messages, tokens - limit
        if over > 0 and policy != "drop":
            last = messages[-1]
            ids = self.tokenizer.encode(last.content)
            kept = len(ids)
            # The rendered text may have other tokens at the cut than the message alone, so cut until it fits.
            while over > 0 and (kept := kept - over) > 0:
                text = self.tokenizer.decode(ids[-kept:] if policy == "truncate_left" else ids[:kept])
                shown = (*messages[:-1], Message(last.role, text.strip("\N{REPLACEMENT CHARACTER}")))
                over = len(self.tokenizer.render(shown, tools=tools)) - limit
        if over > 0:
            raise TooLong(f"item {index} has {tokens} prompt tokens, task.max_prompt_tokens is {limit}")
        return shown

    def trainable(self, index: int, kept_aside: frozenset[str], *, taught: bool = False) -> WorkedTask | SkippedItem:
        """Item `index`; Skipped if it cannot be made, its question is in `kept_aside`, or (`taught`) has no answer."""
        try:
            candidate = self.at(index)
        except DataError as error:
            return SkippedItem(str(error), "too_long" if isinstance(error, TooLong) else "failed")
        if taught and not candidate.worked:
            return SkippedItem(f"item {index} has no answer", "unanswered")
        if candidate.task.question_hash in kept_aside:
            return SkippedItem(f"item {index} is held out", "held_out")
        return candidate


def _conversation(part: Part, prompt: tuple[Message, ...]) -> tuple[Message, ...]:
    """The prompt after the messages of the config, whose system prompt replaces that of the row."""
    system = tuple(itertools.takewhile(lambda message: message.role == "system", prompt))
    return (() if part.config.system_prompt else system) + part.opening + prompt[len(system) :]


@contextlib.contextmanager
def _errors_about(section: str) -> Iterator[None]:
    """Report errors about keys of `task` as errors about the same keys of a source or set in `section`."""
    try:
        yield
    except ConfigError as error:
        task, _, key = error.key.partition(".")
        if task != "task" or section == task:
            raise
        raise ConfigError(f"{section}.{key}", error.value, error.reason, error.remedy) from error


def _opened(config: Config, part: TaskPart, first: int) -> Part:
    with _errors_about(part.key):
        source = open_source(part.task)
    own = of(dataclasses.replace(config, task=part.task), source.size)
    ranges = Ranges(*(range(r.start + first, r.stop + first, r.step) for r in (own.train, own.heldout, own.sft)))
    return Part(
        part.label, part.weight, part.task, source, ranges, first, part.env, parsing.opening_messages(part.task)
    )


# --- held-out tasks

_TRIES_PER_ITEM = 50  # indices tried per held-out item; a task that needs more has too few distinct questions


def tasks(config: Config, candidates: Candidates | None = None) -> tuple[Task, ...]:
    """`task.heldout_items` tasks with distinct questions, the same for every run seed; those of each source in order.

    ConfigError when the held-out range has too few distinct questions.
    """
    candidates = candidates or Candidates(config)
    found: dict[str, Task] = {}
    for part in candidates.parts:
        _hold_out(candidates, part, found)
    return tuple(found.values())


def _hold_out(candidates: Candidates, part: Part, found: dict[str, Task]) -> None:
    """Add `heldout_items` questions of the source to `found` (by hash), none of which is there already."""
    wanted, before, last_skip = part.config.heldout_items, len(found), ""
    for index in part.ranges.heldout[: wanted * _TRIES_PER_ITEM]:
        if len(found) - before == wanted:
            break
        try:
            task = candidates.at(index).task
        except DataError as error:
            last_skip = f" Last skipped: {error}."
            continue
        found.setdefault(task.question_hash, task)
    if len(found) - before < wanted:
        raise ConfigError(
            "task.heldout_items",
            wanted,
            f"only {len(found) - before} distinct questions were found" + (f" in {part.label}" if part.label else ""),
            f"Use fewer, or a task with more questions.{last_skip}",
        )


def evaluated(config: Config, candidates: Candidates | None = None) -> dict[str, tuple[Task, ...]]:
    """The tasks of all held-out sets by name: `task.heldout_items` as "heldout", then those of `evaluator.sets`.

    None of their questions is trained on. ConfigError when a set has no usable item.
    """
    candidates = candidates or Candidates(config)
    found = {HELDOUT: tasks(config, candidates)}
    for name in config.evaluator.sets:
        found[name] = _set_tasks(config, name, candidates.tokenizer)
    return found


def _set_tasks(config: Config, name: str, tokenizer: Tokenizer) -> tuple[Task, ...]:
    described, items = evaluation_set(config, name)
    task = described.task
    with _errors_about(described.key):
        one = dataclasses.replace(described, key="task")
        candidates = Candidates(dataclasses.replace(config, task=task), tokenizer, [one])
    part, found, last_skip = candidates.parts[0], list[Task](), ""
    size = part.source.size
    wanted = items or (task.heldout_items if size is None else size)
    for index in part.ranges.heldout[: wanted * _TRIES_PER_ITEM] if size is None else range(size):
        if len(found) == wanted:
            break
        try:
            found.append(candidates.at(index).task)
        except DataError as error:
            last_skip = f" Last skipped: {error}."
    if not found or (items and len(found) < items):
        raise ConfigError(
            f"evaluator.sets.{name}.items",
            items,
            f"only {len(found)} items can be used",
            f"Use fewer, or raise task.max_prompt_tokens.{last_skip}",
        )
    return tuple(found)


def all_hashes(sets: Mapping[str, Sequence[Task]]) -> frozenset[str]:
    """The question hashes of all sets."""
    return hashes(itertools.chain.from_iterable(sets.values()))


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


class Order:
    """An endless order of items for `purpose` ("train" or "sft"), each passed through `admit`; its state is JSON.

    In a mixture the next item comes from the source with the smallest (n + 1)/w: n is the number of its items that were
    admitted so far and w its weight. So shares are exact also for sources with many skipped items.
    """

    def __init__(self, candidates: Candidates, purpose: str, admit: Callable[[int], WorkedTask | SkippedItem]) -> None:
        self._parts, self._admit = candidates.parts, admit
        self._single, self._orders = None, []
        run_seed = candidates.run_seed
        if not candidates.parts[0].label:
            order = shuffled(getattr(candidates.ranges, purpose), run_seed, purpose)
            self._single = iter(in_this_thread(order.map(admit)))
        else:
            self._orders = [
                shuffled(getattr(part.ranges, purpose), run_seed, f"{purpose}/{part.label}") for part in self._parts
            ]
        self._drawn, self._admitted = [0] * len(self._orders), [0] * len(self._orders)

    def __next__(self) -> WorkedTask | SkippedItem:
        if self._single is not None:
            return next(self._single)
        number = min(range(len(self._parts)), key=lambda each: (self._admitted[each] + 1) / self._parts[each].weight)
        index = self._orders[number][self._drawn[number]]
        assert index is not None  # the order is endless
        self._drawn[number] += 1
        found = self._admit(index)
        self._admitted[number] += not isinstance(found, SkippedItem)
        return found

    def get_state(self) -> Any:
        """The position, for `set_state`."""
        if self._single is not None:
            return self._single.get_state()
        return {"drawn": [*self._drawn], "admitted": [*self._admitted]}

    def set_state(self, state: Any) -> None:
        """Continue after the item at which `state` was taken. ValueError for a state of another number of sources."""
        if self._single is not None:
            return self._single.set_state(state)
        drawn, admitted = state["drawn"], state["admitted"]
        if not len(drawn) == len(admitted) == len(self._orders):
            raise ValueError(f"{len(drawn)} sources, the config has {len(self._orders)}")
        self._drawn, self._admitted = [*drawn], [*admitted]


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
        raise ConfigError("task.train_start", task.train_start, f"there are {size} rows", "Use a smaller one.")
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


# --- the stream of training prompts

_STATE_FORMAT = 1


class PromptPipeline:
    """Endless iterator of training tasks in an order determined by `run.seed`; it never yields held-out questions.

    `restore()` with the `state()` of another pipeline of the same config continues with the next item. Not thread-safe.
    """

    def __init__(self, config: Config) -> None:
        self._candidates = Candidates(config)
        self._heldout = all_hashes(evaluated(config, self._candidates))
        self._fingerprint = _fingerprint(config, self._candidates)
        self._order = Order(self._candidates, "train", self._admit)
        self.skipped: Counter[str] = Counter()  # items since the beginning of the run, by kind; also truncated prompts
        self._beginning = self.state()

    def __iter__(self) -> PromptPipeline:
        return self

    def __next__(self) -> Task:
        """The next task. Raises ConfigError when thousands of items in a row cannot be trained on."""
        reason = ""
        for _ in range(MAX_SKIPPED_IN_A_ROW):
            found = next(self._order)
            if isinstance(found, WorkedTask):
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

    def _admit(self, index: int) -> WorkedTask | SkippedItem:
        return self._candidates.trainable(index, self._heldout)


def _fingerprint(config: Config, candidates: Candidates) -> str:
    """A digest of all settings that determine the order of prompts."""
    task = config.task
    parts = (candidates.identity, candidates.run_seed)
    for part in candidates.parts:
        parts += (repr(part.ranges.train), repr(part.ranges.heldout), part.config.heldout_items)
    parts += task.prompt_style, task.max_prompt_tokens
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
            ("sets", {name: without_changeable(entry) for name, entry in config.evaluator.sets.items()}),
            ("own", [without_changeable(entry) for entry in task.mixture if any(key in entry for key in PLAY_KEYS)]),
        )
        if value
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
