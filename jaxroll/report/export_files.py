"""The files of `jaxroll export`: Parquet (pyarrow, extra `data`) and JSON lines. Both take rows in portions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from jaxroll.errors import ConfigError

Row = dict[str, Any]
Write = Callable[[list[Row]], None]

# (name, Arrow type): the order of the columns.
COLUMNS = (
    ("group", "int64"), ("member", "int64"), ("attempt", "int64"), ("question_hash", "string"),
    ("prompt_index", "int64"), ("env", "string"), ("env_args", "string"), ("question", "string"),
    ("prompt_text", "string"), ("answer_text", "string"), ("tokens", "list<int32>"), ("loss_mask", "list<uint8>"),
    ("logprobs", "list<float>"), ("reward", "double"), ("reward_parts", "string"), ("finish", "string"),
    ("versions", "string"), ("sampled_tokens", "int64"), ("state", "string"), ("reason", "string"),
    ("claim_lineage", "int64"), ("claim_step", "int64"), ("age_max", "int64"), ("age_mean", "double"),
    ("holder", "string"), ("leased_unix_s", "double"), ("ended_unix_s", "double"),
)  # fmt: skip


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A draft beside `path` that takes its place when all went well; ConfigError where it cannot be made or written.

    A pipe or a device (/dev/stdout) is no file that could be replaced: it is its own draft, and its reader may leave.
    """
    if not path.parent.is_dir():
        raise ConfigError("FILE", str(path), "its folder does not exist", "Make it, or name another file.")
    if path.is_dir():
        raise ConfigError("FILE", str(path), "is a folder", "Name a file.")
    stream = is_stream(path)
    draft = path if stream else path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        if not stream:
            os.replace(draft, path)
    except BrokenPipeError:
        if not stream:
            raise
    except OSError as error:
        raise ConfigError("FILE", str(path), f"cannot be written ({error.strerror})", "Name another file.") from error
    finally:
        if not stream:
            draft.unlink(missing_ok=True)


def is_stream(path: Path) -> bool:
    """Whether `path` is there and not a regular file."""
    return path.exists() and not path.is_file()


@contextmanager
def jsonl(path: Path) -> Iterator[Write]:
    """Writes one JSON object a line."""
    with path.open("wb") as file:

        def write(rows: list[Row]) -> None:
            for row in rows:
                file.write(msgspec.json.encode({name: row[name] for name, _ in COLUMNS}) + b"\n")

        yield write


@contextmanager
def parquet(path: Path) -> Iterator[Write]:
    """Writes one row group a portion; ConfigError without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError("--parquet", path.name, "pyarrow is not installed",
                          "Install it (pip install 'jaxroll[data]'), or use --jsonl=FILE.") from error  # fmt: skip
    kinds = {"list<int32>": pa.list_(pa.int32()), "list<uint8>": pa.list_(pa.uint8()), "int64": pa.int64(),
             "list<float>": pa.list_(pa.float32()), "string": pa.string(), "double": pa.float64()}  # fmt: skip
    schema = pa.schema([(name, kinds[kind]) for name, kind in COLUMNS])
    with pq.ParquetWriter(path, schema) as writer:
        yield lambda rows: writer.write_table(pa.Table.from_pylist(rows, schema=schema))
