"""Local JSONL and Parquet files as sources: a question (or prompt) and an answer a row, judged by exact match."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxroll.config import TaskConfig
from jaxroll.data.sources import Item
from jaxroll.errors import ConfigError, DataError

_INSTALL_PYARROW = "pip install 'jaxroll[data]' (pyarrow), or convert the file to JSONL."


class _Row(msgspec.Struct):
    question: str | None = None
    prompt: str | None = None
    answer: str | int | float | None = None


_ROWS = msgspec.json.Decoder(_Row)


class JsonlSource:
    """The lines of a JSONL file: objects with `question` (or `prompt`) and `answer`. Blank lines are not rows.

    Every line is read once when the file is opened, so a malformed one is found before anything is trained on it; the
    rows themselves stay on disk.
    """

    def __init__(self, cfg: TaskConfig) -> None:
        self._path = _existing(cfg.path)
        offsets, characters, content = [], set[str](), hashlib.blake2b(digest_size=16)
        with self._path.open("rb") as file:
            position = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    item = _item(_parsed(line, where := f"{self._path}:{number}"), where)
                    characters.update(item.question, item.answer or "")
                    offsets.append((position, len(line)))
                content.update(line)
                position += len(line)
        self._offsets = np.array(offsets, np.int64).reshape(-1, 2)
        self._alphabet = "".join(sorted(characters))
        self.size = _some_rows(len(offsets), self._path)
        self.identity = f"jsonl/{content.hexdigest()}"
        self._fd = os.open(self._path, os.O_RDONLY)

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", None)) is not None:
            os.close(fd)

    def item(self, index: int) -> Item:
        """Row `index`, read from the file; raises DataError beyond its end."""
        if not 0 <= index < self.size:
            raise DataError(f"{self._path} has {self.size} rows, row {index} was asked for")
        offset, size = (int(n) for n in self._offsets[index])
        where = f"{self._path} row {index}"
        return _item(_parsed(os.pread(self._fd, size, offset), where), where)

    def alphabet(self) -> str:
        """The characters that occur in the file's questions and answers."""
        return self._alphabet


class ParquetSource:
    """The rows of a Parquet file with the columns `question` (or `prompt`) and `answer`, held in memory."""

    def __init__(self, cfg: TaskConfig) -> None:
        self._path = _existing(cfg.path)
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError("task.source", "parquet", "pyarrow is not installed", _INSTALL_PYARROW) from error
        try:
            columns = [c for c in pyarrow.parquet.read_schema(self._path).names if c in _Row.__struct_fields__]
            table = pyarrow.parquet.read_table(self._path, columns=columns)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(
                "task.path", str(self._path), f"it cannot be read as Parquet: {error}", "Write it again with pyarrow."
            ) from error
        self._table = table
        self.size = _some_rows(table.num_rows, self._path)
        characters, content = set[str](), hashlib.blake2b(digest_size=16)
        for item in self._items():
            characters.update(item.question, item.answer or "")
            content.update(msgspec.msgpack.encode((item.question, item.answer)))
        self._alphabet = "".join(sorted(characters))
        self.identity = f"parquet/{content.hexdigest()}"

    def _items(self) -> Iterator[Item]:
        first = 0
        for batch in self._table.to_batches(max_chunksize=4096):
            for offset, row in enumerate(batch.to_pylist()):
                where = f"{self._path} row {first + offset}"
                yield _item(_converted(row, where), where)
            first += batch.num_rows

    def item(self, index: int) -> Item:
        """Row `index`."""
        if not 0 <= index < self.size:
            raise DataError(f"{self._path} has {self.size} rows, row {index} was asked for")
        row = {name: self._table.column(name)[index].as_py() for name in self._table.column_names}
        where = f"{self._path} row {index}"
        return _item(_converted(row, where), where)

    def alphabet(self) -> str:
        """The characters that occur in the file's questions and answers."""
        return self._alphabet


def _existing(path: str) -> Path:
    found = Path(path).expanduser()
    if not path or not found.is_file():
        raise ConfigError("task.path", path, "there is no such file", "Set task.path to the file with the rows.")
    return found


def _some_rows(count: int, path: Path) -> int:
    if count == 0:
        raise ConfigError("task.path", str(path), "it holds no rows", "Each row needs a question and an answer.")
    return count


def _parsed(line: bytes, where: str) -> _Row:
    try:
        return _ROWS.decode(line)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise _bad_row(where, str(error)) from error


def _converted(row: dict[str, Any], where: str) -> _Row:
    try:
        return msgspec.convert(row, _Row)
    except msgspec.ValidationError as error:
        raise _bad_row(where, str(error)) from error


def _bad_row(where: str, reason: str) -> ConfigError:
    return ConfigError("task.path", where, reason, 'A row is {"question": "2+2", "answer": "4"}.')


def _item(row: _Row, where: str) -> Item:
    """The row as an item. The answer is what the model must write, letter by letter."""
    question = row.question if row.question is not None else row.prompt
    if not question or row.answer is None:
        raise _bad_row(where, f"the row has no {'answer' if question else 'question (or prompt)'}")
    answer = str(row.answer)
    return Item(question, question, answer, {"scorer": "exact", "answer": answer})
