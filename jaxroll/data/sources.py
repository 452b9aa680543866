"""Sources of items: local JSONL and Parquet files, games, reasoning-gym; selected by the config."""

from __future__ import annotations

import hashlib
import importlib
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from jaxroll import disk
from jaxroll.config import TaskConfig
from jaxroll.config.parsing import nearest
from jaxroll.config.prompt_rules import opening_messages
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import Source
from jaxroll.records import Item


def open_source(cfg: TaskConfig) -> Source:
    """The source that `cfg` names; ConfigError when it is missing or refused."""
    opener = _OPENERS.get(cfg.source)
    if opener is None:
        raise ConfigError("task.source", cfg.source, "there is no such source", f"Use one of {sorted(_OPENERS)}.")
    return opener(cfg)


def alphabet(cfg: TaskConfig) -> str:
    """All characters of the task's prompts and answers, sorted, for a character tokenizer."""
    return with_opening(open_source(cfg).alphabet(), cfg)


def with_opening(characters: str, cfg: TaskConfig) -> str:
    """`characters` and those of the messages that the config places before every question, sorted."""
    opening = opening_messages(cfg)
    return "".join(sorted(set(characters).union(*(message.content for message in opening)))) if opening else characters


# --- Local JSONL and Parquet files as sources: each row has a question (or prompt) and an answer, scored by exact match

LINE_BYTES = 16 << 20  # limit of one row of JSONL
# A Parquet file is loaded into memory, and a small file can decompress to gigabytes.
EXPANSION, SMALL_BYTES, MEMORY_BYTES = 500, 64 << 20, 8 << 30
_BATCH_ROWS = 4096
_INSTALL_PYARROW = "pip install 'jaxroll[data]' (pyarrow), or convert the file to JSONL."


class _Row(msgspec.Struct):
    question: str | None = None
    prompt: str | None = None
    answer: str | int | float | None = None


_ROWS = msgspec.json.Decoder(_Row)


class JsonlSource:
    """Source of the lines of a JSONL file: objects with `question` (or `prompt`) and `answer`. Blank lines are skipped.

    Every line is parsed once when the file is opened, so a malformed line is found before training; rows stay on disk.
    """

    def __init__(self, cfg: TaskConfig) -> None:
        self._path = Path(cfg.path)
        offsets, characters, content = array("q"), set[str](), hashlib.blake2b(digest_size=16)
        with _existing(cfg.path) as file:
            position = number = 0
            while line := file.readline(LINE_BYTES + 1):
                number += 1
                if len(line) > LINE_BYTES:
                    raise _bad_row(f"{self._path}:{number}", f"the line is longer than {LINE_BYTES:,} bytes")
                if line.strip():
                    item = _item(_parsed(line, where := f"{self._path}:{number}"), where)
                    characters.update(item.question, item.answer or "")
                    offsets.extend((position, len(line)))
                content.update(line)
                position += len(line)
            self._fd = os.dup(file.fileno())  # keeps this file open, even if its name is reused for another one
        self._offsets = np.array(offsets, np.int64).reshape(-1, 2)
        self._alphabet = "".join(sorted(characters))
        self.size = _some_rows(len(self._offsets), self._path)
        self.identity = f"jsonl/{content.hexdigest()}"

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", None)) is not None:
            os.close(fd)

    def item(self, index: int) -> Item:
        """Row `index`, read from the file; DataError beyond its end."""
        if not 0 <= index < self.size:
            raise DataError(f"{self._path} has {self.size} rows, so there is no row {index}")
        offset, size = (int(n) for n in self._offsets[index])
        where = f"{self._path} row {index}"
        return _item(_parsed(os.pread(self._fd, size, offset), where), where)

    def alphabet(self) -> str:
        """The characters that occur in the file's questions and answers."""
        return self._alphabet


class ParquetSource:
    """Source of the rows of a Parquet file with columns `question` (or `prompt`) and `answer`, held in memory."""

    def __init__(self, cfg: TaskConfig) -> None:
        self._path = Path(cfg.path)
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError("task.source", "parquet", "pyarrow is not installed", _INSTALL_PYARROW) from error
        characters, content, batches = set[str](), hashlib.blake2b(digest_size=16), []
        try:
            with _existing(cfg.path) as file:
                file_bytes, rows, text = os.fstat(file.fileno()).st_size, 0, 0
                for batch in _batches(pyarrow.parquet.ParquetFile(file), self._path, file_bytes):
                    for item in self._items(batch, rows):
                        text += len(item.question) + len(item.answer or "")
                        if text > _limit(file_bytes):
                            raise _too_much(self._path, file_bytes)
                        characters.update(item.question, item.answer or "")
                        content.update(msgspec.msgpack.encode((item.question, item.answer)))
                    rows += len(batch)
                    batches.append(batch)
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, LookupError) as error:
            # Text that is not UTF-8, times outside of Python's range, unknown time zones.
            raise _not_parquet(self._path, str(error)) from error
        self.size = _some_rows(rows, self._path)
        self._table = pyarrow.Table.from_batches(batches)
        self._alphabet = "".join(sorted(characters))
        self.identity = f"parquet/{content.hexdigest()}"

    def _items(self, batch: Any, first: int) -> Iterator[Item]:
        for offset, row in enumerate(batch.to_pylist()):
            where = f"{self._path} row {first + offset}"
            yield _item(_converted(row, where), where)

    def item(self, index: int) -> Item:
        """Row `index`; DataError beyond the end."""
        if not 0 <= index < self.size:
            raise DataError(f"{self._path} has {self.size} rows, so there is no row {index}")
        row = {name: self._table.column(name)[index].as_py() for name in self._table.column_names}
        where = f"{self._path} row {index}"
        return _item(_converted(row, where), where)

    def alphabet(self) -> str:
        """The characters that occur in the file's questions and answers."""
        return self._alphabet


def _batches(parquet: Any, path: Path, file_bytes: int) -> Iterator[Any]:
    """Batches of rows with the needed columns; ConfigError when they need too much memory."""
    columns = [name for name in parquet.schema_arrow.names if name in _Row.__struct_fields__]
    if len(set(columns)) < len(columns):
        raise _not_parquet(path, f"it has several columns of one name ({', '.join(sorted(columns))})")
    if not {"question", "prompt"} & set(columns) or "answer" not in columns:
        reason = f"it has no columns question (or prompt) and answer; it has {parquet.schema_arrow.names}"
        raise _not_parquet(path, reason)
    limit = _limit(file_bytes)
    groups = (parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups))
    chunks = [group.column(number) for group in groups for number in range(parquet.metadata.num_columns)]
    sizes = [max(0, chunk.total_uncompressed_size) for chunk in chunks if chunk.path_in_schema in columns]
    if sum(sizes) > limit:
        raise _too_much(path, file_bytes)
    # A value may be as long as its column chunk, and all rows of a batch may refer to the longest value.
    rows = min(_BATCH_ROWS, max(1, limit // max(sizes, default=1)))
    held = 0
    for batch in parquet.iter_batches(rows, columns=columns):
        held += batch.nbytes
        if held > limit:
            raise _too_much(path, file_bytes)
        yield batch


def _limit(file_bytes: int) -> int:
    """The limit of the rows of a file in memory, and of their text in characters."""
    return min(MEMORY_BYTES, max(SMALL_BYTES, EXPANSION * file_bytes))


def _too_much(path: Path, file_bytes: int) -> ConfigError:
    reason = f"its {file_bytes:,} bytes expand to more than {_limit(file_bytes):,} in memory"
    return _not_parquet(path, reason, "Convert it to JSONL, whose rows stay on disk.")


def _existing(path: str) -> BinaryIO:
    """The file, open for reading; ConfigError when it is missing, unreadable or not a regular file."""
    remedy = "Set task.path to the file with the rows."
    try:
        if not path:
            raise FileNotFoundError
        return disk.opened(Path(path).expanduser())
    except FileNotFoundError as error:
        raise ConfigError("task.path", path, "there is no such file", remedy) from error
    except RuntimeError as error:  # ~name of an unknown user
        raise ConfigError("task.path", path, str(error), remedy) from error
    except (OSError, DataError) as error:
        raise ConfigError("task.path", path, f"it cannot be read: {error}", remedy) from error


def _not_parquet(path: Path, reason: str, remedy: str = "Write it again with pyarrow.") -> ConfigError:
    return ConfigError("task.path", str(path), f"it cannot be read as Parquet: {reason}", remedy)


def _some_rows(count: int, path: Path) -> int:
    if count == 0:
        raise ConfigError("task.path", str(path), "it holds no rows", "Each row needs a question and an answer.")
    return count


def _parsed(line: bytes, where: str) -> _Row:
    try:
        return _ROWS.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is one
        raise _bad_row(where, str(error)) from error
    except RecursionError as error:
        raise _bad_row(where, "the row nests too deep") from error


def _converted(row: dict[str, Any], where: str) -> _Row:
    try:
        # As text, because msgspec would convert a Decimal to a float and lose digits.
        return msgspec.convert({k: str(v) if isinstance(v, Decimal) else v for k, v in row.items()}, _Row)
    except msgspec.ValidationError as error:
        raise _bad_row(where, str(error)) from error


def _bad_row(where: str, reason: str) -> ConfigError:
    return ConfigError("task.path", where, reason, 'A row is {"question": "2+2", "answer": "4"}.')


def _item(row: _Row, where: str) -> Item:
    """The row as an item, whose answer the model must give exactly."""
    question = row.question if row.question is not None else row.prompt
    if not question or row.answer is None:
        raise _bad_row(where, f"the row has no {'answer' if question else 'question (or prompt)'}")
    answer = str(row.answer)
    return Item(question, question, answer, {"scorer": "exact", "answer": answer})


# --- games

_BROKEN_MODULE = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    SyntaxError,
    TypeError,
    ValueError,
)

# Built-in games are loaded by name, like a user's games.
GAMES: Mapping[str, str] = {
    "frozen_lake": "jaxroll.envs.frozen_lake:FrozenLakeSource",
    "calculator": "jaxroll.envs.calculator:CalculatorSource",
}


def open_game(cfg: TaskConfig) -> Source:
    """The source that `task.name` names: one of `GAMES`, or `package.module:Class`, called with the TaskConfig.

    ConfigError for an unknown game, and for an environment of another game.
    """
    check_game(cfg)
    return _loaded(GAMES.get(cfg.name, cfg.name))(cfg)


def check_game(cfg: TaskConfig) -> None:
    """Raise ConfigError for an unknown game, or an environment of another game. Imports nothing."""
    if ":" in cfg.name:
        return
    if cfg.name not in GAMES:
        raise ConfigError("task.name", cfg.name, "there is no such game", nearest(cfg.name, tuple(GAMES)))
    if cfg.env != cfg.name and ":" not in cfg.env:
        raise ConfigError("task.env", cfg.env, f"it does not play {cfg.name}", f"Set task.env to {cfg.name!r}.")


def _loaded(name: str) -> Callable[[TaskConfig], Source]:
    module, _, attribute = name.rpartition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except _BROKEN_MODULE as e:
        reason = f"it cannot be imported: {type(e).__name__}: {e}"
        remedy = "Install or fix it, or start the run in a folder from which it can be imported."
        raise ConfigError("task.name", name, reason, remedy) from e


# --- sources by the name in `task.source`


def _open_reasoning_gym(cfg: TaskConfig) -> Source:
    from jaxroll.data.gym import GymSource  # imports reasoning-gym, which other sources do not need

    return GymSource(cfg)


_OPENERS: dict[str, Callable[[TaskConfig], Source]] = {
    "reasoning_gym": _open_reasoning_gym,
    "jsonl": JsonlSource,
    "parquet": ParquetSource,
    "game": open_game,
}
