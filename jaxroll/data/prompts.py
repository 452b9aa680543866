"""The endless, resumable stream of training prompts."""

from __future__ import annotations

import hashlib
import json

from jaxroll.config import Config
from jaxroll.data import splits, tasks
from jaxroll.data.tasks import MAX_SKIPPED_IN_A_ROW, Candidates, Skipped
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import Tokenizer
from jaxroll.records import Task

_STATE_FORMAT = 1


class PromptPipeline:
    """Training tasks without end, in the order that `run.seed` decides; held-out questions never come.

    An iterator with a state: `state()` after an item, given to `restore()` of another pipeline with the same config,
    continues with the item after it. Not thread-safe.
    """

    def __init__(self, config: Config) -> None:
        self._candidates = Candidates(config)
        self._heldout = tasks.hashes(tasks.tasks(config, self._candidates))
        train = self._candidates.ranges.train
        self._fingerprint = _fingerprint(config, self._candidates)
        self._iterator = iter(splits.in_this_thread(splits.shuffled(train, config.run.seed, "train").map(self._admit)))

        self._beginning = self.state()

    def __iter__(self) -> PromptPipeline:
        return self

    def __next__(self) -> Task:
        """The next task. Raises ConfigError when thousands of items in a row cannot be trained on."""
        for _ in range(MAX_SKIPPED_IN_A_ROW):
            found = next(self._iterator)
            if isinstance(found, Task):
                return found
        raise ConfigError(
            "task",
            self._candidates.identity,
            f"{MAX_SKIPPED_IN_A_ROW} items in a row cannot be trained on, the last because {found.reason}",
            "Hold out fewer items, raise task.max_prompt_tokens, or use a task with more questions.",
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        return self._candidates.tokenizer

    def state(self) -> bytes:
        """Where the stream stands, as JSON."""
        state = {"format": _STATE_FORMAT, "fingerprint": self._fingerprint, "grain": self._iterator.get_state()}
        return json.dumps(state, separators=(",", ":")).encode()

    def restore(self, state: bytes | None) -> None:
        """Continues after the item that `state` was taken at (None: from the beginning).

        Refuses the state of another task, seed or range.
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
    """Identifies everything that decides the sequence."""
    ranges, task = candidates.ranges, config.task
    parts = (candidates.identity, config.run.seed, repr(ranges.train), repr(ranges.heldout), task.heldout_items)
    return hashlib.blake2b(repr((*parts, task.prompt, task.max_prompt_tokens)).encode(), digest_size=8).hexdigest()
