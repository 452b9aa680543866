"""JSONL and Parquet files made to break a reader: refused in one line with file and row, within bounds."""

from __future__ import annotations

import datetime
import decimal
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxroll import disk
from jaxroll.config import TaskConfig
from jaxroll.data import files, sources
from jaxroll.errors import ConfigError
from tests.harness.resource_bounds import bounded, check_refusal

GOOD = b'{"question": "2+2", "answer": "4"}\n'
NESTED = b"[" * 100_000 + b"]" * 100_000

ROWS = {
    "empty": b"",
    "blank lines only": b"\n\r\n  \n",
    "a BOM of UTF-16": '{"question": "a", "answer": "b"}'.encode("utf-16"),
    "NUL bytes": b"\0" * 100,
    "a NUL in a row": b'{"question": "a\0", "answer": "b"}',
    "not UTF-8": b'{"question": "\xff\xfe", "answer": "b"}',
    "half a surrogate pair": b'{"question": "\\ud800", "answer": "b"}',
    "cut off": GOOD + GOOD[:-5],
    "two rows in a line": GOOD.strip() + GOOD,
    "a JSON list of rows": b'[{"question": "a", "answer": "b"}]',
    "nested": NESTED,
    "nested in a field that is not read": b'{"question": "a", "answer": "b", "note": ' + NESTED + b"}",
    "nested in the question": b'{"question": ' + NESTED + b', "answer": "b"}',
    "nested objects": b'{"question": ' + b'{"a":' * 100_000,
    "question as a number": b'{"question": 1, "answer": "b"}',
    "answer as a list": b'{"question": "a", "answer": ["b"]}',
    "answer as a boolean": b'{"question": "a", "answer": true}',
    "answer of 10**5 digits": b'{"question": "a", "answer": ' + b"9" * 10**5 + b"}",
    "answer 1e400": b'{"question": "a", "answer": 1e400}',
    "answer NaN": b'{"question": "a", "answer": NaN}',
    "another type in the last row": GOOD * 1000 + b'{"question": ["a"], "answer": "b"}',
    "no answer": b'{"question": "a"}',
    "no question": b'{"answer": "b"}',
    "a number a line": b"1\n2\n",
    "Python's literals": b"{'question': 'a', 'answer': 'b'}",
    "control characters of a terminal": b'{"question": "a", "answer": "b", "\x1b[2J": 1}',
}


def jsonl(path: Path) -> TaskConfig:
    return TaskConfig(source="jsonl", path=str(path))


@pytest.mark.parametrize("content", ROWS.values(), ids=ROWS)
def test_hostile_rows_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with bounded(), pytest.raises(ConfigError) as refused:
        sources.open_source(jsonl(path))
    check_refusal(refused.value, "task.path", path)


@pytest.mark.parametrize(
    ("content", "items"),
    [
        (GOOD.replace(b"\n", b"\r\n") * 2, 2),
        (b'{"question": "a", "question": "c", "answer": "b"}', 1),
        (b'{"question": "a\\u0000", "answer": "\\u001b[2J"}', 1),
        (b'{"question": "a", "answer": 18446744073709551615}', 1),
        (b'{"question": "a", "answer": "b", "n": ' + b"9" * 4000 + b"}", 1),
    ],
)
def test_odd_rows_are_rows(tmp_path: Path, content: bytes, items: int) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert sources.open_source(jsonl(tmp_path / "rows.jsonl")).size == items


def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b'{"question": "')
    os.truncate(path, 1 << 36)  # sparse: 64 GiB of NUL
    with bounded(8 * files.ROW_BYTES), pytest.raises(ConfigError) as refused:
        sources.open_source(jsonl(path))
    check_refusal(refused.value, "task.path", f"{path}:2", "longer than")


def test_many_rows_cost_little_memory_each(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD * 30_000)
    with bounded(4 << 20):
        assert sources.open_source(jsonl(path)).size == 30_000


def _long_name(path: Path) -> Path:
    return path / ("a" * 5000)


def _no_such_user(path: Path) -> str:
    return "~no-such-user-here/rows"


def _fifo(path: Path) -> Path:
    os.mkfifo(path / "rows")
    return path / "rows"


def _loop(path: Path) -> Path:
    (path / "rows").symlink_to(path / "rows")
    return path / "rows"


OPENED: list[Callable[[Path], Any]] = [
    _long_name,
    _no_such_user,
    _fifo,
    _loop,
    lambda path: path,
    lambda path: "/dev/zero",
    lambda path: "",
    lambda path: f"{path}/a\0b",
    lambda path: f"{path}/\udcff",
    lambda path: path / "none",
]


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
@pytest.mark.parametrize("make", OPENED)
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, source: Any, make: Callable[[Path], Any]) -> None:
    if source == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    with bounded(), pytest.raises(ConfigError) as refused:
        sources.open_source(TaskConfig(source=source, path=str(make(tmp_path))))
    check_refusal(refused.value, "task.path")


# --- Parquet


@pytest.fixture
def arrow() -> Any:
    pytest.importorskip("pyarrow.parquet", reason="pyarrow is an optional extra")
    import pyarrow

    return pyarrow


def parquet(path: Path) -> TaskConfig:
    return TaskConfig(source="parquet", path=str(path))


def check_parquet_refused(path: Path, *words: str) -> None:
    with bounded(256 << 20), pytest.raises(ConfigError) as refused:
        sources.open_source(parquet(path))
    check_refusal(refused.value, "task.path", path, *words)


ODD: dict[str, Callable[[Any], Any]] = {
    "no column": lambda pa: pa.table({"text": ["a"]}),
    "no answers": lambda pa: pa.table({"question": ["a"]}),
    "no rows": lambda pa: pa.table({"question": pa.array([], pa.string()), "answer": pa.array([], pa.string())}),
    "null answers": lambda pa: pa.table({"question": ["a"], "answer": pa.nulls(1)}),
    "two columns of a name": lambda pa: pa.Table.from_arrays(
        [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], ["question", "question", "answer"]
    ),
    "lists": lambda pa: pa.table({"question": [["a"]], "answer": ["b"]}),
    "structs": lambda pa: pa.table({"question": ["a"], "answer": [{"b": 1}]}),
    "maps": lambda pa: pa.table(
        {"question": ["a"], "answer": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))}
    ),
    "bytes": lambda pa: pa.table({"question": [b"a"], "answer": ["b"]}),
    "booleans": lambda pa: pa.table({"question": ["a"], "answer": [True]}),
    "dates": lambda pa: pa.table({"question": ["a"], "answer": [datetime.date(2025, 1, 1)]}),
    "timestamps": lambda pa: pa.table({"question": ["a"], "answer": pa.array([2**52], pa.timestamp("ms"))}),
    "timestamps in ns": lambda pa: pa.table({"question": ["a"], "answer": pa.array([1], pa.timestamp("ns"))}),
    "a time zone that there is not": lambda pa: pa.table(
        {"question": ["a"], "answer": pa.array([1], pa.timestamp("s", tz="Nowhere/None"))}
    ),
    "durations": lambda pa: pa.table({"question": ["a"], "answer": pa.array([2**62], pa.duration("s"))}),
    "text that is not UTF-8": lambda pa: pa.table(
        {"question": pa.Array.from_buffers(pa.string(), 1, [None, pa.array([0, 1], pa.int32()).buffers()[1],
                                                            pa.py_buffer(b"\xff")]), "answer": ["b"]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_columns_of_other_types_are_refused(tmp_path: Path, arrow: Any, make: Callable[[Any], Any]) -> None:
    arrow.parquet.write_table(make(arrow), tmp_path / "rows.parquet")
    check_parquet_refused(tmp_path / "rows.parquet")


SAME: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dictionaries": (lambda pa: pa.array(["4"]).dictionary_encode(), "4"),
    "large strings": (lambda pa: pa.array(["4"], pa.large_string()), "4"),
    "string views": (lambda pa: pa.array(["4"], pa.string_view()), "4"),
    "bytes": (lambda pa: pa.array([4], pa.int8()), "4"),
    "unsigned": (lambda pa: pa.array([2**64 - 1], pa.uint64()), str(2**64 - 1)),
    "halves": (lambda pa: pa.array([4.5], pa.float16()), "4.5"),
    "decimals": (lambda pa: pa.array([decimal.Decimal("4.50")], pa.decimal128(10, 2)), "4.50"),
}


@pytest.mark.parametrize(("make", "answer"), SAME.values(), ids=SAME)
def test_answers_of_other_types_are_text(tmp_path: Path, arrow: Any, make: Callable[[Any], Any], answer: str) -> None:
    arrow.parquet.write_table(arrow.table({"question": ["2+2"], "answer": make(arrow)}), tmp_path / "rows.parquet")
    assert sources.open_source(parquet(tmp_path / "rows.parquet")).item(0).answer == answer


def test_the_name_of_a_folder_is_not_read_as_a_column(tmp_path: Path, arrow: Any) -> None:
    """Datasets in folders named key=value have the key as a column; a file has its own columns only."""
    folder = tmp_path / "answer=7"
    folder.mkdir()
    arrow.parquet.write_table(arrow.table({"question": ["2+2"], "answer": ["4"]}), folder / "rows%20[a].parquet")
    assert sources.open_source(parquet(folder / "rows%20[a].parquet")).item(0).answer == "4"
    arrow.parquet.write_table(arrow.table({"question": ["2+2"]}), folder / "without.parquet")
    check_parquet_refused(folder / "without.parquet", "answer")


@pytest.mark.parametrize("codec", ["zstd", "none"])
def test_a_file_that_expands_to_gigabytes_is_refused(tmp_path: Path, arrow: Any, codec: str) -> None:
    """One long text, as a dictionary of one entry that 100,000 rows name: 20 KB of file, 2 GB of memory."""
    text = arrow.DictionaryArray.from_arrays(arrow.array([0] * 100_000, arrow.int32()), arrow.array(["a" * 20_000]))
    arrow.parquet.write_table(
        arrow.table({"question": text, "answer": text}), tmp_path / "rows.parquet", compression=codec
    )
    before = arrow.total_allocated_bytes()
    check_parquet_refused(tmp_path / "rows.parquet", "JSONL")
    assert arrow.total_allocated_bytes() - before < 256 << 20


def test_one_page_that_expands_to_much_is_not_decompressed(tmp_path: Path, arrow: Any) -> None:
    arrow.parquet.write_table(
        arrow.table({"question": ["a" * (80 << 20)], "answer": ["b"]}), tmp_path / "rows.parquet", compression="zstd"
    )
    check_parquet_refused(tmp_path / "rows.parquet", "JSONL")


def test_a_page_whose_header_lies_about_its_size_is_refused_before_it_takes_memory(tmp_path: Path, arrow: Any) -> None:
    """The footer has the true size; the header of the page promises 2 GB, which a reader allocates first."""
    path = tmp_path / "rows.parquet"
    table = arrow.table({"question": ["2+2"], "answer": ["4" * 400]})
    arrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    group, content = arrow.parquet.ParquetFile(path).metadata.row_group(0), path.read_bytes()
    with path.open("rb") as file:
        chunk = group.column(1)
        (page,) = disk.parquet_page_sizes(file, chunk.data_page_offset, chunk.total_compressed_size)
        assert 400 < page < 420
    first = chunk.data_page_offset + 3
    assert content[first - 3 : first] == b"\x15\x00\x15", "the kind of the page, then its size, which has two bytes"
    assert content[first + 2] == 0x15 and 6 < content[first + 3] < 128, "its compressed size, which has one byte"
    lies = bytes([254, 255, 255, 255, 15, 0x15, content[first + 3] - 6])  # 2**31 - 1; three bytes fewer in the file
    path.write_bytes(content[:first] + lies + content[first + 4 :])
    before = arrow.default_memory_pool().max_memory()
    check_parquet_refused(path, "JSONL")
    assert arrow.default_memory_pool().max_memory() <= max(before, 256 << 20)


# --- Datasets that Hugging Face saved


def saved(folder: Path, table: Any, codec: str | None = None) -> TaskConfig:
    """Save `table` as one batch, with this compression."""
    from pyarrow import ipc

    folder.mkdir()
    (folder / "state.json").write_text('{"_data_files": [{"filename": "rows.arrow"}]}')
    options = ipc.IpcWriteOptions(compression=codec, unify_dictionaries=False)
    with ipc.new_stream(str(folder / "rows.arrow"), table.schema, options=options) as writer:
        for batch in table.to_batches():
            writer.write_batch(batch)
    return TaskConfig(source="hf_dataset", path=str(folder))


def check_saved_refused(folder: Path, arrow: Any, table: Any, *words: str, codec: str | None = None) -> None:
    config = saved(folder, table, codec)
    assert (folder / "rows.arrow").stat().st_size < 2 << 20
    before = arrow.default_memory_pool().max_memory()
    with bounded(256 << 20), pytest.raises(ConfigError) as refused:
        sources.open_source(config)
    check_refusal(refused.value, "task.path", folder, *words)
    assert arrow.default_memory_pool().max_memory() <= max(before, 256 << 20)


def viewed(pa: Any, text: Any) -> list[Any]:
    """The buffers of an array of views: validity, views of 16 bytes, text."""
    return text.cast(pa.string_view()).buffers()


SHARED: dict[str, Callable[[Any, Any, int], Any]] = {
    "dictionary": lambda pa, text, rows: pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), text),
    "dictionary of lists": lambda pa, text, rows: pa.DictionaryArray.from_arrays(
        pa.array([0] * rows, pa.int32()), pa.ListArray.from_arrays([0, 1], text)
    ),
    "lists of a dictionary": lambda pa, text, rows: pa.ListArray.from_arrays(
        [0, *[rows] * rows], pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), text)
    ),
    "structs of a dictionary": lambda pa, text, rows: pa.StructArray.from_arrays(
        [pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), text)], ["a"]
    ),
    "views": lambda pa, text, rows: pa.Array.from_buffers(
        pa.string_view(), rows, [None, pa.py_buffer(bytes(viewed(pa, text)[1])[:16] * rows), viewed(pa, text)[2]]
    ),
    "maps of a dictionary": lambda pa, text, rows: pa.MapArray.from_arrays(
        list(range(rows + 1)),
        pa.array(["a"] * rows),
        pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), text),
    ),
    "run lengths": lambda pa, text, rows: pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), text),
    "views of lists": lambda pa, text, rows: pa.ListViewArray.from_arrays(
        pa.array([0] * rows, pa.int32()), pa.array([1] * rows, pa.int32()), text
    ),
}


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_a_long_value_that_many_rows_share_is_not_copied(
    tmp_path: Path, arrow: Any, make: Callable[[Any, Any, int], Any]
) -> None:
    rows = 3000
    shared = make(arrow, arrow.array(["a" * 500_000]), rows)
    table = arrow.table({"question": ["2+2"] * rows, "answer": ["4"] * rows, "note": shared})
    check_saved_refused(tmp_path / "rows", arrow, table)


def test_columns_that_no_row_reads_may_have_any_common_type(tmp_path: Path, arrow: Any) -> None:
    rows = 3000
    columns = {
        "question": ["2+2"] * rows,
        "answer": ["4"] * rows,
        "numbers": arrow.DictionaryArray.from_arrays(
            arrow.array([7] * rows, arrow.int32()), arrow.array(range(200_000))
        ),
        "label": arrow.array([b"a"] * rows).dictionary_encode(),
        "score": arrow.array([1.5, None] * (rows // 2)).dictionary_encode(),
        "list": arrow.array([["a", "b"], None] * (rows // 2), arrow.large_list(arrow.string())),
        "pair": arrow.array([[1, 2]] * rows, arrow.list_(arrow.int64(), 2)),
        "map": arrow.array([[("a", 1)]] * rows, arrow.map_(arrow.string(), arrow.int64())),
        "struct": arrow.array([{"a": [{"b": "c"}]}] * rows),
        "view": arrow.array(["a", "a" * 40] * (rows // 2), arrow.string_view()),
        "null": arrow.nulls(rows),
    }
    source = sources.open_source(saved(tmp_path / "rows", arrow.table(columns)))
    assert (source.size, source.item(rows - 1).answer) == (rows, "4")


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("share", [False, True], ids=["batch", "dictionary"])
def test_compressed_batches_are_not_expanded(tmp_path: Path, arrow: Any, codec: str, share: bool) -> None:
    text = arrow.array(["a" * (80 << 20)])
    text = text.dictionary_encode() if share else text
    check_saved_refused(
        tmp_path / "rows",
        arrow,
        arrow.table({"question": ["2+2"], "answer": text}),
        "its batches are compressed",
        codec=codec,
    )


def test_damage_anywhere_is_an_error_in_one_line_or_other_rows(tmp_path: Path, arrow: Any) -> None:
    """300 files with some bytes changed, cut or put in, mostly in the footer."""
    whole = tmp_path / "whole.parquet"
    arrow.parquet.write_table(arrow.table({"question": ["2+2", "3+3"] * 50, "answer": ["4", "6"] * 50}), whole)
    good, chance, refused = whole.read_bytes(), random.Random(0), 0
    path = tmp_path / "rows.parquet"
    with bounded(None, 120.0):
        for _ in range(300):
            content = bytearray(good)
            for _ in range(chance.randint(1, 4)):
                at = int(len(content) * (1 - chance.random() ** 3))
                at = min(max(at, 0), len(content) - 1)
                content[at : at + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
            path.write_bytes(content)
            try:
                sources.open_source(parquet(path))
            except ConfigError as error:
                refused += 1
                check_refusal(error, "task.path")
    assert refused > 100
