"""Sources of rows in local files: JSONL, Parquet, datasets that Hugging Face saved to disk; layouts of their columns.

All rows are read once when a source is opened, so that a malformed row is found before training. The columns become
items as in `jaxroll.data.files`.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from jaxroll import disk
from jaxroll.config import TaskConfig
from jaxroll.config.parsing import ROLES
from jaxroll.errors import ConfigError, DataError, one_line
from jaxroll.records import Item, Message

# --- Layouts of prompt rows: columns of a dataset to items. docs/prompts.md shows an example of each
#
#     columns   question, prompt or problem; answer
#     trl       prompt (text or chat messages); solution or ground_truth
#     verl      prompt (text or chat messages); reward_model.ground_truth (SkyRL: also reward_spec); data_source
#
# `task.prompt_column` and `task.answer_column` name any other columns; a dotted path leads into a nested one. A column
# without a value in a row does not count as one of its columns.

ROW_BYTES = 1 << 20  # limit of one row as JSON, because each task carries its row through the store
NO_ANSWER = "none"  # value of task.answer_column for rows that only a reward model or a judge can score
_PROMPTS, _ANSWERS = ("question", "prompt", "problem"), ("answer", "solution", "ground_truth")
_REWARDS = ("reward_model", "reward_spec")
_COLUMNS_SHOWN, _COLUMN_CHARS = 20, 40


@dataclass(frozen=True)
class Columns:
    """The columns of prompt and answer; `answer` is a path into nested columns, empty if there is no answer."""

    name: str
    prompt: tuple[str, ...]
    answer: tuple[str, ...]

    def __str__(self) -> str:
        answer = ".".join(self.answer) or "none"
        return f"{self.name} (prompt: {'.'.join(self.prompt)}, answer: {answer})"


class UnknownLayout(Exception):
    """The columns have no known layout, or more than one."""


@functools.lru_cache(maxsize=1024)
def layout_of(columns: frozenset[str], prompt_column: str, answer_column: str) -> Columns:
    """The layout of a row with these columns; UnknownLayout if none or several fit."""
    shown = f"; its columns are {described(columns)}"
    prompt = prompt_column or _only(_PROMPTS, columns, "prompt", "task.prompt_column", shown)
    reward = [name for name in _REWARDS if name in columns]
    if answer_column == NO_ANSWER:
        answer = ""
    elif answer_column:
        answer = answer_column
    elif reward:
        answer = f"{reward[0]}.ground_truth"
    else:
        answer = _only(_ANSWERS, columns, "answer", "task.answer_column", shown)
    for column in filter(None, (prompt, answer)):
        if column.partition(".")[0] not in columns:
            raise UnknownLayout(f"the row has no {'answer' if column == answer else 'prompt'} {column!r}{shown}")
    name = (
        "verl" if reward and not answer_column else "columns" if prompt == "question" or answer == "answer" else "trl"
    )
    return Columns(name, tuple(prompt.split(".")), tuple(answer.split(".")) if answer else ())


def _only(names: tuple[str, ...], columns: frozenset[str], what: str, key: str, shown: str) -> str:
    found = [name for name in names if name in columns]
    if len(found) > 1:
        raise UnknownLayout(f"the row has several columns for the {what} ({', '.join(found)}): set {key}{shown}")
    if not found:
        raise UnknownLayout(f"the row has no {what} ({', '.join(names)}): set {key}{shown}")
    return found[0]


def described(columns: Iterable[str]) -> str:
    """The names of columns in one bounded line."""
    names = sorted(one_line(name, _COLUMN_CHARS) for name in columns)
    rest = f" and {len(names) - _COLUMNS_SHOWN} more" if len(names) > _COLUMNS_SHOWN else ""
    return f"{', '.join(names[:_COLUMNS_SHOWN]) or 'none'}{rest}"


def bad_row(where: str, reason: str) -> ConfigError:
    """The refusal of a row."""
    return ConfigError("task.path", where, reason, "docs/prompts.md shows the layouts of rows.")


def item(row: dict[str, Any], where: str, cfg: TaskConfig, plain: Mapping[str, Any] | None = None) -> Item:
    """The row as an item; ConfigError with `where` if it has no known layout or a value of a wrong type.

    `plain` is the row in JSON's own types, for the reward and the environment (default: the row itself).
    """
    columns = frozenset(name for name, value in row.items() if value is not None)
    try:
        layout = layout_of(columns, cfg.prompt_column, cfg.answer_column)
        messages = _messages(_at(row, layout.prompt))
        answer = _answer(row, layout, cfg.answer_after)
    except UnknownLayout as error:
        raise bad_row(where, str(error)) from None
    text = _text(messages)
    args = {"scorer": "exact", "answer": answer or "", "row": row if plain is None else plain}
    if tools := _tools(row.get("tools"), where):
        args["tools"] = tools
    if layout.name == "verl" and isinstance(source := row.get("data_source"), str):
        args["source"] = source
    return Item(text, text, answer, args, messages=messages)


def layout(row: Mapping[str, Any], cfg: TaskConfig) -> Columns:
    """The layout of a row that `item` accepts."""
    columns = frozenset(name for name, value in row.items() if value is not None)
    return layout_of(columns, cfg.prompt_column, cfg.answer_column)


def _at(row: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


def _messages(prompt: Any) -> tuple[Message, ...]:
    """The prompt as chat messages; text is a message of the user."""
    if isinstance(prompt, str) and prompt:
        return (Message("user", prompt),)
    if not isinstance(prompt, list) or not prompt:
        raise UnknownLayout("the prompt (question) is neither text nor a list of chat messages")
    found = tuple(_message(entry) for entry in prompt)
    if found[-1].role not in ("user", "tool"):
        raise UnknownLayout(f"the last message of the prompt has the role {found[-1].role}; the model answers a user")
    return found


def _message(entry: Any) -> Message:
    if not isinstance(entry, Mapping):
        raise UnknownLayout("a message of the prompt is not an object with role and content")
    extra = [name for name, value in entry.items() if name not in ("role", "content") and value]
    if extra:
        raise UnknownLayout(f"a message of the prompt has {described(extra)}, which JaxRoll cannot show")
    role, content = entry.get("role"), entry.get("content")
    if isinstance(content, list):  # parts, as in OpenAI's API
        texts = [part["text"] for part in content if _is_text(part)]
        content = "".join(texts) if len(texts) == len(content) else None
    if role not in ROLES or not isinstance(content, str):
        raise UnknownLayout(f"a message of the prompt needs a role ({', '.join(ROLES)}) and content as text")
    return Message(role, content)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _text(messages: tuple[Message, ...]) -> str:
    """The question without system messages, which identifies it."""
    shown = [message for message in messages if message.role != "system"]
    return shown[0].content if len(shown) == 1 else "\n".join(f"{each.role}: {each.content}" for each in shown)


def _answer(row: Mapping[str, Any], layout: Columns, after: str) -> str | None:
    if not layout.answer:
        return None
    value = _at(row, layout.answer)
    if value is None:
        raise UnknownLayout(f"the row has no answer in {'.'.join(layout.answer)}; its columns are {described(row)}")
    if layout.name == "verl" and isinstance(value, (dict, list)):
        return msgspec.json.encode(value).decode()
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise UnknownLayout(f"the answer is a {type(value).__name__}, not text or a number")
    return final_answer(str(value), after) if after else str(value)


def final_answer(text: str, after: str) -> str:
    """The text after the last `after`, without white space around it and without commas in a number.

    GSM8K's answers end with `#### 1,234`: with `after="####"` that is 1234. UnknownLayout if `after` does not occur.
    """
    _, marker, final = text.rpartition(after)
    if not marker:
        raise UnknownLayout(f"the answer does not contain task.answer_after = {after!r}")
    final = final.strip()
    bare = final.replace(",", "")
    return bare if bare.lstrip("-").replace(".", "", 1).isdecimal() else final


def _tools(value: Any, where: str) -> list[dict[str, Any]]:
    """The tool schemas of a row: a list, or a list as JSON text. Keys that Arrow filled with None are left out."""
    if isinstance(value, str) and value:
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_row(where, f"its column tools is not JSON: {error}") from error
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise bad_row(where, "its column tools is not a list of JSON schemas")
    return [_without_none(tool) for tool in value]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


# --- Sources of rows in local files

# A Parquet file is loaded into memory, and a small file can decompress to gigabytes.
EXPANSION, SMALL_BYTES, MEMORY_BYTES = 500, 64 << 20, 8 << 30
_BATCH_ROWS = 4096
_INSTALL_PYARROW = "pip install 'jaxroll[data]' (pyarrow), or convert the file to JSONL."


class _Survey:
    """The characters, layouts and digest of the rows of a source, and their size as text."""

    def __init__(self, cfg: TaskConfig) -> None:
        self._cfg = cfg
        self._characters, self._layouts, self.text = set[str](), set[str](), 0
        self.digest = hashlib.blake2b(digest_size=16)

    def add(self, row: dict[str, Any], item: Item) -> None:
        """Count one row."""
        shown = (*(message.content for message in item.messages), item.answer or "")
        self._characters.update(*shown)
        self.text += sum(map(len, shown))
        self._layouts.add(str(layout(row, self._cfg)))

    @property
    def alphabet(self) -> str:
        """The characters of all prompts and answers, sorted."""
        return "".join(sorted(self._characters))

    @property
    def layout(self) -> str:
        """The layouts that occur."""
        return "; ".join(sorted(self._layouts))


class JsonlSource:
    """Source of the lines of a JSONL file; each is an object. Blank lines are skipped. Rows stay on disk."""

    def __init__(self, cfg: TaskConfig) -> None:
        self._path, self._cfg = Path(cfg.path), cfg
        offsets, survey = array("q"), _Survey(cfg)
        with _existing(cfg.path) as file:
            position = number = 0
            while line := file.readline(ROW_BYTES + 1):
                number += 1
                if len(line) > ROW_BYTES:
                    raise bad_row(f"{self._path}:{number}", f"the line is longer than {ROW_BYTES:,} bytes")
                if line.strip():
                    row = _parsed(line, where := f"{self._path}:{number}")
                    survey.add(row, item(row, where, cfg))
                    offsets.extend((position, len(line)))
                survey.digest.update(line)
                position += len(line)
            self._fd = os.dup(file.fileno())  # keeps this file open, even if its name is reused for another one
        self._offsets = np.array(offsets, np.int64).reshape(-1, 2)
        self._alphabet, self.layout = survey.alphabet, survey.layout
        self.size = _some_rows(len(self._offsets), self._path)
        self.identity = f"jsonl/{survey.digest.hexdigest()}"

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", None)) is not None:
            os.close(fd)

    def item(self, index: int) -> Item:
        """Row `index`, read from the file; DataError beyond its end."""
        _check_index(index, self.size, self._path)
        offset, size = (int(n) for n in self._offsets[index])
        where = f"{self._path} row {index}"
        return item(_parsed(os.pread(self._fd, size, offset), where), where, self._cfg)

    def alphabet(self) -> str:
        """The characters that occur in the file's prompts and answers."""
        return self._alphabet


class TableSource(abc.ABC):
    """Source of the rows of a table: `ParquetSource` and `DatasetSource` read it."""

    def __init__(self, cfg: TaskConfig, kind: str) -> None:
        self._path, self._cfg, self._kind = Path(cfg.path), cfg, kind
        try:
            import pyarrow
        except ImportError as error:
            raise ConfigError("task.source", kind, "pyarrow is not installed", _INSTALL_PYARROW) from error
        survey, batches, count = _Survey(cfg), [], 0
        with self._reading():
            for batch, limit in self._batches():
                if sum(map(disk.arrow_bytes, batch.columns)) > limit:
                    raise self._too_much(limit)
                for offset, row in enumerate(batch.to_pylist()):
                    item = _table_item(row, f"{self._path} row {count + offset}", cfg)
                    survey.add(row, item)
                    if survey.text > limit:
                        raise self._too_much(limit)
                    # Rows with question and answer keep the digest of earlier versions.
                    whole = () if layout(row, cfg).name == "columns" else (item.env_args["row"],)
                    survey.digest.update(msgspec.msgpack.encode((item.question, item.answer, *whole)))
                count += len(batch)
                batches.append(batch)
        self.size = _some_rows(count, self._path)
        with self._reading():
            self._table = pyarrow.Table.from_batches(batches)
        self._alphabet, self.layout = survey.alphabet, survey.layout
        self.identity = f"{kind}/{survey.digest.hexdigest()}"

    def item(self, index: int) -> Item:
        """Row `index`; DataError beyond the end."""
        _check_index(index, self.size, self._path)
        row = {name: self._table.column(name)[index].as_py() for name in self._table.column_names}
        return _table_item(row, f"{self._path} row {index}", self._cfg)

    def alphabet(self) -> str:
        """The characters that occur in the prompts and answers."""
        return self._alphabet

    @abc.abstractmethod
    def _batches(self) -> Iterator[tuple[Any, int]]:
        """Batches of rows, each with the limit of the memory of all rows in bytes."""

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, LookupError, DataError) as error:
            # Text that is not UTF-8, times outside of Python's range, unknown time zones.
            raise self._refused(str(error)) from error

    def _refused(self, reason: str, remedy: str = "Write it again with pyarrow.") -> ConfigError:
        name = {"parquet": "Parquet", "hf_dataset": "a saved dataset"}[self._kind]
        return ConfigError("task.path", str(self._path), f"it cannot be read as {name}: {reason}", remedy)

    def _too_much(self, limit: int) -> ConfigError:
        reason = f"it expands to more than {limit:,} bytes in memory"
        return self._refused(reason, "Convert it to JSONL, whose rows stay on disk.")

    def _check_columns(self, names: list[str]) -> None:
        if len(set(names)) < len(names):
            raise self._refused(f"it has several columns of one name ({described(names)})")


class ParquetSource(TableSource):
    """Source of the rows of a Parquet file, held in memory."""

    def __init__(self, cfg: TaskConfig) -> None:
        super().__init__(cfg, "parquet")

    def _batches(self) -> Iterator[tuple[Any, int]]:
        import pyarrow.parquet

        with _existing(self._cfg.path) as file:
            parquet = pyarrow.parquet.ParquetFile(file)
            self._check_columns(parquet.schema_arrow.names)
            limit = _limit(os.fstat(file.fileno()).st_size)
            groups = (parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups))
            chunks = [group.column(number) for group in groups for number in range(parquet.metadata.num_columns)]
            sizes = [max(each.total_uncompressed_size, disk.parquet_chunk_bytes(file, each, limit)) for each in chunks]
            if sum(sizes) > limit:
                raise self._too_much(limit)
            # A value may be as long as its column chunk, and all rows of a batch may refer to the longest value.
            count, held = min(_BATCH_ROWS, max(1, limit // max(sizes, default=1))), 0
            for batch in parquet.iter_batches(count):
                held += batch.nbytes
                if held > limit:
                    raise self._too_much(limit)
                yield batch, limit


class DatasetSource(TableSource):
    """Source of the rows of a folder that `Dataset.save_to_disk` of Hugging Face `datasets` wrote.

    It has state.json with the names of its Arrow files, which are mapped into memory. The folder of a `DatasetDict` has
    one such folder for each split.
    """

    def __init__(self, cfg: TaskConfig) -> None:
        super().__init__(cfg, "hf_dataset")

    def _batches(self) -> Iterator[tuple[Any, int]]:
        import pyarrow
        import pyarrow.ipc

        for path in self._files():
            with disk.opened(path) as file:
                limit = _limit(os.fstat(file.fileno()).st_size)
            for message in pyarrow.ipc.MessageReader.open_stream(pyarrow.memory_map(str(path))):
                if disk.arrow_is_compressed(message.metadata.to_pybytes()):  # it would expand before it can be checked
                    raise self._refused("its batches are compressed", "Save it without compression, or as Parquet.")
            held, reader = 0, pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
            self._check_columns(reader.schema.names)
            for batch in reader:
                batch.validate(full=True)  # offsets in the file could point outside of it
                held += batch.nbytes
                if held > limit:
                    raise self._too_much(limit)
                for first in range(0, len(batch), _BATCH_ROWS):
                    yield batch.slice(first, _BATCH_ROWS), limit

    def _files(self) -> list[Path]:
        folder = self._path.expanduser()
        if not folder.is_dir():
            raise ConfigError(
                "task.path",
                str(self._path),
                "there is no such folder",
                "Set task.path to the folder that save_to_disk wrote.",
            )
        if (folder / "dataset_dict.json").exists():
            splits = sorted(each.name for each in folder.iterdir() if (each / "state.json").exists())
            raise ConfigError(
                "task.path",
                str(self._path),
                f"it has the splits {described(splits)}",
                "Add the name of one to the path.",
            )
        try:
            names = [entry["filename"] for entry in disk.read_json(folder / "state.json")["_data_files"]]
        except (DataError, LookupError, TypeError, OSError) as error:
            raise self._refused(f"state.json does not list its files: {error!r}", "Save it again.") from error
        if odd := [name for name in names if not isinstance(name, str) or name != os.path.basename(name)]:
            raise self._refused(f"state.json lists {odd[0]!r}, which is not a file of the folder", "Save it again.")
        return [folder / name for name in names]


def _limit(file_bytes: int) -> int:
    """The limit of the rows of a file in memory, and of their text in characters."""
    return min(MEMORY_BYTES, max(SMALL_BYTES, EXPANSION * file_bytes))


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


def _some_rows(count: int, path: Path) -> int:
    if count == 0:
        raise ConfigError("task.path", str(path), "it holds no rows", "Each row needs a question and an answer.")
    return count


def _check_index(index: int, size: int, path: Path) -> None:
    if not 0 <= index < size:
        raise DataError(f"{path} has {size} rows, so there is no row {index}")


_ROWS = msgspec.json.Decoder(dict[str, Any])


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        return _ROWS.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is one
        raise bad_row(where, str(error)) from error
    except RecursionError as error:
        raise bad_row(where, "the row nests too deep") from error


def _table_item(row: dict[str, Any], where: str, cfg: TaskConfig) -> Item:
    """The item of a row of a table, whose values may be dates, decimals or bytes."""
    encoded = msgspec.json.encode(row)  # decimals as text, bytes in base64, dates and times in ISO 8601
    if len(encoded) > ROW_BYTES:
        raise bad_row(where, f"the row has {len(encoded):,} bytes as JSON; at most {ROW_BYTES:,} are allowed")
    return item(row, where, cfg, msgspec.json.decode(encoded))
