"""Scores of a reward model in a Hugging Face folder, by JAX on the host; `jaxroll.rewards.remote` starts it.

    python -m jaxroll.tools.classifier SETTINGS

SETTINGS is the JSON of `jaxroll.rewards.remote.ProcessSettings`. Standard input has a JSON object per line, `id` and
`messages`; standard output has one per line too, `id` and `score` or `error`, after a first line `{"id": -1}`. The
process ends with its input.

The score is that of transformers' `*ForSequenceClassification` with one label: the head's product with the hidden state
of the last token that is not padding. The conversation is rendered by the folder's chat template without a generation
prompt and tokenized without further special tokens, as TRL does.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxroll import lifeline
from jaxroll.errors import DataError
from jaxroll.models import folders, transformer
from jaxroll.models import params as model_params
from jaxroll.models.params import module
from jaxroll.records import Message
from jaxroll.rewards.remote import READY, ProcessSettings, ScoringQuestion, Verdict
from jaxroll.text.tokenizers import HFTokenizer

LEAST_TOKENS = 64  # rows are padded to this length, or to one that doubles it


class RewardModel:
    """The model of a folder. One program is compiled per length; a batch has at most `batch_tokens` tokens."""

    def __init__(self, settings: ProcessSettings) -> None:
        folder = Path(settings.path)
        self._spec = folders.classifier(folder, settings.dtype)
        self._text, self._settings = HFTokenizer(folder), settings
        self._pad_id = folders.read_json(folder, folders.CONFIG_FILE).get("pad_token_id")
        values = model_params.leaves(folder, self._spec)
        self._params = {name: jnp.asarray(values[name], settings.dtype) for name in values}
        self._scores = jax.jit(partial(_scores, self._spec))

    def tokens(self, messages: Iterable[Message]) -> np.ndarray:
        """int32 [T]: the last `max_tokens` tokens of a conversation. DataError if the template refuses it."""
        ids = self._text.conversation(tuple(messages))[-self._settings.max_tokens :]
        if not ids or max(ids) >= self._spec.vocab_size:
            raise DataError("the conversation is empty, or has tokens that the model does not know")
        return np.array(ids, np.int32)

    def scores(self, conversations: Sequence[np.ndarray]) -> list[float]:
        """The score of each conversation; similar lengths share a batch."""
        found = [0.0] * len(conversations)
        by_length: dict[int, list[int]] = {}
        for number, ids in enumerate(conversations):
            by_length.setdefault(self._padded(len(ids)), []).append(number)
        for length, numbers in by_length.items():
            rows = max(1, self._settings.batch_tokens // length)
            for first in range(0, len(numbers), rows):
                batch = numbers[first : first + rows]
                for number, score in zip(
                    batch, self._batch([conversations[n] for n in batch], rows, length), strict=False
                ):
                    found[number] = float(score)
        return found

    def _padded(self, tokens: int) -> int:
        length = LEAST_TOKENS
        while length < tokens:
            length *= 2
        return length

    def _batch(self, conversations: Sequence[np.ndarray], rows: int, length: int) -> np.ndarray:
        tokens, segments = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
        last = np.zeros(rows, np.int32)
        for row, ids in enumerate(conversations):
            tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
            shown = np.flatnonzero(ids != self._pad_id) if self._pad_id is not None else np.arange(len(ids))
            last[row] = shown[-1] if len(shown) else 0
        return np.asarray(self._scores(self._params, tokens, segments, last))


def _scores(spec: Any, params: Any, tokens: jax.Array, segments: jax.Array, last: jax.Array) -> jax.Array:
    """float32 [B]: the value of the hidden state at `last` of each row."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = transformer.forward(spec, params, tokens, positions, segments)
    return module(spec, params).values(hidden[jnp.arange(tokens.shape[0]), last])


def main(settings: ProcessSettings, source: IO[bytes], sink: IO[bytes]) -> None:
    """Answer the questions in `source` until it ends; all that wait are answered in one go."""
    model, waiting = RewardModel(settings), queue.SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(source, waiting), daemon=True).start()
    _write(sink, [Verdict(READY)])
    while True:
        lines = [waiting.get()]
        while not waiting.empty():
            lines.append(waiting.get())
        _write(sink, _answers(model, [msgspec.json.decode(line, type=ScoringQuestion) for line in lines]))


def _answers(model: RewardModel, questions: Sequence[ScoringQuestion]) -> list[Verdict]:
    failed, asked = [], []
    for question in questions:
        try:
            asked.append((question.id, model.tokens(question.messages)))
        except DataError as error:
            failed.append(Verdict(question.id, error=str(error)))
    scores = model.scores([ids for _, ids in asked])
    return [*failed, *(Verdict(number, score) for (number, _), score in zip(asked, scores, strict=True))]


def _read(source: IO[bytes], waiting: queue.SimpleQueue[bytes]) -> None:
    for line in source:
        waiting.put(line)
    os._exit(0)  # at once: the main thread may be in a computation


def _write(sink: IO[bytes], verdicts: Iterable[Verdict]) -> None:
    sink.write(b"".join(msgspec.json.encode(verdict) + b"\n" for verdict in verdicts))
    sink.flush()


if __name__ == "__main__":
    lifeline.bind_from_env()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    main(msgspec.json.decode(sys.argv[1], type=ProcessSettings), sys.stdin.buffer, answers)
