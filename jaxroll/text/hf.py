"""A tokenizer read from a local Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxroll.errors import ConfigError
from jaxroll.records import Message
from jaxroll.text import chat


class HFTokenizer:
    """The tokenizer of `folder`, with its chat template when it has one. Nothing is downloaded.

    `eos_id` comes from tokenizer_config.json (eos_token), else from generation_config.json; `pad_id` from pad_token,
    else it is `eos_id` (masks are data, so no mask depends on it).
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not str(folder):
            raise ConfigError(
                "tokenizer.path",
                "",
                "tokenizer.kind='hf' needs a folder",
                "Set it to a local folder that holds tokenizer.json.",
            )
        self._tokenizer = _load(self.folder / "tokenizer.json")
        self._settings = _read_json(self.folder / "tokenizer_config.json")
        # Not the number of entries: ids may have holes, and an embedding table is indexed by the largest.
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.eos_id = self._eos_id()
        pad_id = self._token_id(self._settings.get("pad_token"))
        self.pad_id = self.eos_id if pad_id is None else pad_id
        self._eos_token: str = self._tokenizer.id_to_token(self.eos_id)
        self._format = self._chat_format()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; nothing is added at either end."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` without eos; other special tokens are shown as they are written."""
        return self._tokenizer.decode([i for i in ids if i != self.eos_id], skip_special_tokens=False)

    def render(self, messages: tuple[Message, ...], *, first: bool = True) -> list[int]:
        """Ids of `messages` in the model's chat format, ending where the assistant is to speak."""
        if first:
            return self.encode(self._format(messages))
        return self.encode(chat.continuation(self._format, messages, self._eos_token))

    def _eos_id(self) -> int:
        named = self._token_id(self._settings.get("eos_token"))
        if named is not None:
            return named
        generation = _read_json(self.folder / "generation_config.json").get("eos_token_id")
        first = generation[0] if isinstance(generation, list) and generation else generation
        if isinstance(first, int) and 0 <= first < self.vocab_size:
            return first
        raise ConfigError(
            "tokenizer.path",
            str(self.folder),
            "it does not say which token ends a sequence",
            "Name it as eos_token in tokenizer_config.json.",
        )

    def _token_id(self, token: Any) -> int | None:
        """The id of a token as tokenizer_config.json writes it: a string, or an object with its content."""
        text = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(text) if isinstance(text, str) else None

    def _chat_format(self) -> chat.ChatFormat:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            source: Any = path.read_text(encoding="utf-8")
        else:
            path, source = self.folder / "tokenizer_config.json", self._settings.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
        if not source:
            return chat.plain_format
        if not isinstance(source, str):
            raise ConfigError("tokenizer.path", str(path), "its chat_template is not text", "Write it as one string.")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: self._token_text(name) for name in names if self._token_text(name)}
        return chat.jinja_format(source, special, str(path))

    def _token_text(self, name: str) -> str:
        token = self._settings.get(name)
        return (token.get("content") if isinstance(token, dict) else token) or ""


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(
            "tokenizer.path",
            str(path.parent),
            "there is no tokenizer.json in it",
            "Point it to a local folder of a Hugging Face model.",
        )
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            "tokenizer.kind", "hf", "the package tokenizers is not installed", "pip install tokenizers."
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception for every malformed file
        raise ConfigError(
            "tokenizer.path", str(path), f"it cannot be read: {error}", "Copy the file again from the model."
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("tokenizer.path", str(path), f"it is not JSON: {error}", "Copy it again.") from error
    if not isinstance(found, dict):
        raise ConfigError("tokenizer.path", str(path), "it is not a JSON object", "Copy it again.")
    return found
