"""The tokenizer that a config names, and a character tokenizer built from a task's alphabet.

In both kinds, `decode` drops the end-of-sequence token and shows all other tokens. If a model samples padding or
another special token within an answer, the text shows it, so that the answer is scored as wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxroll import disk
from jaxroll.config import TokenizerConfig
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import Tokenizer
from jaxroll.records import Message
from jaxroll.run_paths import RunPaths
from jaxroll.text.hf import HFTokenizer

__all__ = ["CharTokenizer", "HFTokenizer", "build", "note", "of_run"]

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_VOCAB_MULTIPLE = 8  # so that the embedding can be sharded over small meshes


class CharTokenizer:
    """Tokenizer with one token per character of `alphabet`, after pad 0, bos 1, eos 2 and turn 3 (assistant's turn).

    `vocab_size` is rounded up to a multiple of 8; unused ids decode to the replacement character.
    """

    pad_id = 0
    bos_id = 1
    eos_id = 2
    turn_id = 3
    _first_char_id = 4

    def __init__(self, alphabet: str) -> None:
        if not alphabet:
            raise ConfigError("tokenizer.kind", "char", "the alphabet is empty", "Give the characters it must encode.")
        if UNKNOWN in alphabet:
            raise ConfigError(
                "tokenizer.kind",
                "char",
                f"{UNKNOWN!r} is reserved for ids without a character",
                "Leave it out of the alphabet.",
            )
        self.alphabet = "".join(sorted(set(alphabet)))
        self._id_of = {char: self._first_char_id + i for i, char in enumerate(self.alphabet)}
        used = self._first_char_id + len(self.alphabet)
        self.vocab_size = -(-used // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        # One entry per id; eos decodes to "", every other special or unused id to the replacement character.
        self._text_of = [UNKNOWN] * self.vocab_size
        self._text_of[self.eos_id] = ""
        self._text_of[self._first_char_id : used] = self.alphabet

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens. DataError for a character outside the alphabet."""
        try:
            return [self._id_of[char] for char in text]
        except KeyError as error:
            raise DataError(
                f"{text[:80]!r} holds {error.args[0]!r}, which is not in the alphabet {self.alphabet!r}; "
                "use a prompt form whose characters the task declares, or tokenizer.kind='hf'"
            ) from error

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` without eos; any other id without a character becomes the replacement character."""
        size = self.vocab_size
        return "".join([self._text_of[i] if 0 <= i < size else UNKNOWN for i in ids])

    def render(
        self, messages: tuple[Message, ...], *, first: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Ids of `messages`, ending at the start of the assistant's turn. ConfigError for `tools`.

        A conversation begins with bos, which also separates two consecutive messages that are not the assistant's.
        `turn` begins the assistant's message and eos ends it: bos question turn answer eos question turn.
        """
        if tools:
            raise ConfigError("tokenizer.kind", "char", "it has no chat template that shows tools", "Set it to 'hf'.")
        ids = [self.bos_id] if first else []
        unanswered = False
        for message in messages:
            if message.role == "assistant":
                ids += [self.turn_id, *self.encode(message.content), self.eos_id]
            else:
                ids += [self.bos_id] if unanswered else []
                ids += self.encode(message.content)
            unanswered = message.role != "assistant"
        ids.append(self.turn_id)
        return ids


def note(run_dir: Path, tokenizer: Tokenizer) -> None:
    """Write the alphabet of a `char` tokenizer, which the config does not contain, into the run's folder."""
    if isinstance(tokenizer, CharTokenizer):
        disk.replace_text(RunPaths(run_dir).alphabet, json.dumps(tokenizer.alphabet) + "\n")


def of_run(run_dir: Path, cfg: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer of a run, without its task; None when its folder has no alphabet (yet)."""
    if cfg.kind != "char":
        return build(cfg, "")
    path = RunPaths(run_dir).alphabet
    try:
        alphabet = disk.read_json(path)
    except FileNotFoundError:
        return None
    except DataError as error:
        raise ConfigError("RUN", str(run_dir), str(error), "Restore the file from a copy.") from error
    if not isinstance(alphabet, str):
        raise ConfigError("RUN", str(run_dir), f"{path.name} is not a string", "Restore the file from a copy.")
    return CharTokenizer(alphabet)


def build(cfg: TokenizerConfig, alphabet: str) -> Tokenizer:
    """The tokenizer that `cfg` names; only kind 'char' uses `alphabet` (all characters that the task can produce)."""
    if cfg.kind == "char":
        return CharTokenizer(alphabet)
    if cfg.kind == "hf":
        return HFTokenizer(cfg.path, cfg.template_args)
    raise ConfigError("tokenizer.kind", cfg.kind, "there is no such kind", "Use 'char' or 'hf'.")


# --- conversations as tokens, as an episode with the same messages would contain them


def runs(
    text: Tokenizer, first: tuple[Message, ...], worked: tuple[Message, ...], tools: Sequence[Mapping[str, Any]] = ()
) -> list[tuple[list[int], bool]]:
    """The token runs of a conversation in order, each with True if it is the assistant's.

    The conversation begins with `first`, and the model is shown `tools`; `worked` are the assistant's answers (each
    followed by eos) and the messages between them.
    """
    found: list[tuple[list[int], bool]] = []
    shown, opening = list(first), True
    for message in worked:
        if message.role != "assistant":
            shown.append(message)
            continue
        found.append((text.render(tuple(shown), first=opening, tools=tools), False))
        found.append(([*text.encode(message.content), text.eos_id], True))
        shown, opening = [], False
    return found
