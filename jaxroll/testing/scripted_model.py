"""A model that answers by a script, and a tokenizer for tasks that bring none."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from jaxroll.errors import DataError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, Tokenizer
from jaxroll.records import Message, Task, Version, VersionRun

VERSION = Version(0, 0)
# What models answer that have not learned the task yet. The check plays each as the answer to every turn.
ODD_ANSWERS = ("", " ", "0", "-1", "a", "é", "²", "no\nsuch\tanswer", "{}[]()<>\\'\"", "x" * 200)


class ByteTokenizer:
    """One token for each byte of UTF-8, after pad 0, bos 1, eos 2 and turn 3."""

    pad_id, bos_id, eos_id, turn_id, vocab_size = 0, 1, 2, 3, 260

    def encode(self, text: str) -> list[int]:
        """The ids of the bytes of `text`."""
        return [byte + 4 for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; special tokens vanish."""
        return bytes(i - 4 for i in ids if i >= 4).decode(errors="replace")

    def render(self, messages: tuple[Message, ...], *, first: bool = True) -> list[int]:
        """Ids of `messages`, each after bos, ending where the assistant is to speak."""
        ids = [i for message in messages for i in (self.bos_id, *self.encode(message.content))]
        return [*ids, self.turn_id]


class ScriptedModel:
    """An `LLMProxy` that gives the answers of a script in turn, the last one again and again."""

    def __init__(self, answers: Sequence[list[int]], eos_id: int) -> None:
        self._answers, self._eos_id, self._turn = answers, eos_id, 0

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        """The next answer, with its end."""
        answer = self._answers[min(self._turn, len(self._answers) - 1)]
        self._turn += 1
        tokens = np.asarray([*answer, self._eos_id], np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), (VersionRun(VERSION, len(tokens)),), "stop")


def scripts(task: Task, taught: Sequence[Message], tokenizer: Tokenizer, max_tokens: int) -> list[list[list[int]]]:
    """The answers of each episode of `task`, as ids: the teacher's, odd ones, and some at random.

    Without those that the tokenizer cannot encode, or that leave no room for the end among `max_tokens`.
    """
    said = [message.content for message in taught if message.role == "assistant"]
    texts = [said] if said else []
    texts += [[odd] for odd in ODD_ANSWERS]
    random_one = random.Random(task.index)
    known = [answer for answer in (*said, *ODD_ANSWERS) if answer]
    texts += [[random_one.choice(known) for _ in range(4)] for _ in range(2)]
    found = (_encoded(answers, tokenizer, max_tokens) for answers in texts)
    return [script for script in found if script]


def _encoded(answers: Sequence[str], tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    found = []
    for answer in answers:
        try:
            ids = [i for i in tokenizer.encode(answer) if i != tokenizer.eos_id]
        except DataError:
            continue
        if len(ids) < max_tokens:
            found.append(ids)
    return found
