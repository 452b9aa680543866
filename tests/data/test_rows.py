"""Layouts of prompt rows, in all kinds of files."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxroll.config import Config, TaskConfig, TokenizerConfig
from jaxroll.data import files, preparation, sources
from jaxroll.data.tasks import Candidates
from jaxroll.errors import ConfigError
from jaxroll.records import Item, Message
from tests.harness.resource_bounds import bounded, check_refusal

pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
import pyarrow
import pyarrow.ipc
import pyarrow.parquet

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [SYSTEM, USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": "train"},
}
SKYRL = {
    "data_source": "a",
    "prompt": [USER],
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "4"},
}
TRL = {"prompt": [USER], "solution": "4", "level": 2}
GSM8K = {"question": "2+2", "answer": "2 and 2 are <<2+2=4>>4.\n#### 4"}


def jsonl(path: Path, found: list[dict[str, Any]], **keys: Any) -> TaskConfig:
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return TaskConfig(source="jsonl", path=str(path), **keys)


def parquet(path: Path, found: list[dict[str, Any]], **keys: Any) -> TaskConfig:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), path)
    return TaskConfig(source="parquet", path=str(path), **keys)


def saved(folder: Path, found: list[dict[str, Any]], **keys: Any) -> TaskConfig:
    """A folder as `Dataset.save_to_disk(folder, num_shards=2)` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{shard:05}-of-00002.arrow" for shard in range(2)]
    table = pyarrow.Table.from_pylist(found)
    half = len(found) // 2
    for name, part in zip(names, (table.slice(0, half), table.slice(half)), strict=True):
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    return TaskConfig(source="hf_dataset", path=str(folder), **keys)


WRITERS = [jsonl, parquet, saved]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("row", "layout"),
    [
        (VERL, "verl (prompt: prompt, answer: reward_model.ground_truth)"),
        (SKYRL, "verl (prompt: prompt, answer: reward_spec.ground_truth)"),
        (TRL, "trl (prompt: prompt, answer: solution)"),
        ({"prompt": "2+2", "ground_truth": 4}, "trl (prompt: prompt, answer: ground_truth)"),
        ({"question": "2+2", "answer": "4"}, "columns (prompt: question, answer: answer)"),
        ({"problem": "2+2", "answer": 4, "level": None}, "columns (prompt: problem, answer: answer)"),
    ],
    ids=["verl", "skyrl", "trl", "trl text", "columns", "problem"],
)
def test_a_known_layout_is_detected(tmp_path: Path, write: Any, row: dict[str, Any], layout: str) -> None:
    source = sources.open_source(write(tmp_path / "rows", [row] * 3))
    item = source.item(2)
    assert (source.size, source.layout) == (3, layout)  # type: ignore[attr-defined]
    assert (item.question, item.answer) == ("2+2", "4")
    assert item.messages[-1] == Message("user", "2+2")
    assert item.env_args == {"scorer": "exact", "answer": "4", "row": row} | (
        {"source": row["data_source"]} if "data_source" in row else {}
    )
    assert set(source.alphabet()) == set("".join(message.content for message in item.messages) + "4")


@pytest.mark.parametrize("write", WRITERS)
def test_named_columns_may_be_nested(tmp_path: Path, write: Any) -> None:
    row = {"q": {"text": "2+2"}, "meta": {"final": 4}, "answer": "the sum is 4", "question": "?"}
    source = sources.open_source(
        write(tmp_path / "rows", [row] * 2, prompt_column="q.text", answer_column="meta.final")
    )
    assert (source.item(1).question, source.item(1).answer) == ("2+2", "4")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "a", "label": 1}, ("no prompt", "label, text", "task.prompt_column")),
        ({"question": "a", "label": 1}, ("no answer", "label, question", "task.answer_column")),
        ({"question": "a", "prompt": "b", "answer": "c"}, ("question, prompt", "task.prompt_column")),
        ({"problem": "a", "solution": "b", "answer": "c"}, ("answer, solution", "task.answer_column")),
        ({"prompt": "a", "reward_model": {"style": "rule"}}, ("no answer", "reward_model.ground_truth")),
        ({"prompt": [{"role": "user"}], "answer": "a"}, ("content",)),
        ({"prompt": [{"role": "bot", "content": "a"}], "answer": "a"}, ("role",)),
        ({"prompt": [USER, {"role": "assistant", "content": "a"}], "answer": "a"}, ("last message", "assistant")),
        ({"prompt": [{**USER, "tool_calls": [1]}], "answer": "a"}, ("tool_calls",)),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "a"}, ("text",)),
        ({"question": "a", "answer": "b", "tools": "["}, ("tools", "JSON")),
        ({"question": "a", "answer": "b", "tools": [1]}, ("tools", "schemas")),
        ({f"{i}\x1b[2J" * 40: 1 for i in range(99)}, ("79 more",)),
    ],
)
def test_an_unknown_or_ambiguous_layout_lists_the_columns(tmp_path: Path, row: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        sources.open_source(jsonl(tmp_path / "rows", [row]))
    check_refusal(refused.value, "task.path", f"{tmp_path}/rows.jsonl:1", *words)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("so\n#### 72", "72"), ("#### 1 #### 1,234 ", "1234"), ("####-1,000.5", "-1000.5"), ("#### a, b", "a, b")],
)
def test_the_final_answer_follows_the_marker(text: str, answer: str) -> None:
    assert files.final_answer(text, "####") == answer


def test_a_marker_that_a_row_lacks_is_an_error(tmp_path: Path) -> None:
    assert sources.open_source(jsonl(tmp_path / "a", [GSM8K], answer_after="####")).item(0).answer == "4"
    with pytest.raises(ConfigError, match=r"rows.*:2.*answer_after = '####'"):
        sources.open_source(jsonl(tmp_path / "rows", [GSM8K, {"question": "1", "answer": "1"}], answer_after="####"))


def test_rows_without_answers_are_for_judges(tmp_path: Path) -> None:
    item = sources.open_source(jsonl(tmp_path / "a", [{"prompt": "a", "n": 1}], answer_column="none")).item(0)
    assert (item.answer, item.env_args["answer"], item.env_args["row"]) == (None, "", {"prompt": "a", "n": 1})


def test_parts_of_text_are_one_message(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "2"}, {"type": "text", "text": "+2"}]
    item = sources.open_source(jsonl(tmp_path / "a", [TRL | {"prompt": [{"role": "user", "content": parts}]}])).item(0)
    assert item.question == "2+2"


def test_a_structured_ground_truth_is_json(tmp_path: Path) -> None:
    row = VERL | {"reward_model": {"ground_truth": {"target": 4, "numbers": [2, 2]}}}
    item = sources.open_source(jsonl(tmp_path / "a", [row])).item(0)
    assert json.loads(item.answer or "") == {"target": 4, "numbers": [2, 2]}


def test_columns_of_all_types_reach_the_reward_as_json(tmp_path: Path) -> None:
    row = {
        "question": "a",
        "answer": "b",
        "when": datetime.date(2026, 1, 2),
        "price": decimal.Decimal("1.50"),
        "blob": b"\0",
        "ids": [1, None],
    }
    item = sources.open_source(parquet(tmp_path / "a", [row])).item(0)
    plain = {"question": "a", "answer": "b", "when": "2026-01-02", "price": "1.50", "blob": "AA==", "ids": [1, None]}
    assert item.env_args["row"] == plain


@pytest.mark.parametrize("write", WRITERS)
def test_a_row_that_is_too_large_is_refused(tmp_path: Path, write: Any) -> None:
    row = {"question": "a", "answer": "b", "note": "x" * files.ROW_BYTES}
    cfg = write(tmp_path / "rows", [{"question": "a", "answer": "b", "note": ""}, row])
    with bounded(16 * files.ROW_BYTES), pytest.raises(ConfigError) as refused:
        sources.open_source(cfg)
    check_refusal(refused.value, "task.path", "rows", f"{files.ROW_BYTES:,}")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("{}", "_data_files"),
        ('{"_data_files": [{"filename": "../rows.arrow"}]}', "rows.arrow"),
        ('{"_data_files": [{"filename": "none.arrow"}]}', "none.arrow"),
        ('{"_data_files": []}', "no rows"),
        ("[" * 10_000, "deep"),
    ],
)
def test_a_saved_dataset_with_a_wrong_state_is_refused(tmp_path: Path, state: str, words: str) -> None:
    cfg = saved(tmp_path / "rows", [VERL] * 2)
    shutil.copy(tmp_path / "rows" / "data-00000-of-00002.arrow", tmp_path / "rows.arrow")
    (tmp_path / "rows" / "state.json").write_text(state)
    with pytest.raises(ConfigError) as refused:
        sources.open_source(cfg)
    check_refusal(refused.value, "task.path", tmp_path / "rows", words)


def test_the_splits_of_a_saved_dataset_are_listed(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path / split, [VERL] * 2)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match="splits test, train"):
        sources.open_source(TaskConfig(source="hf_dataset", path=str(tmp_path)))


def test_damaged_arrow_files_are_refused_or_read(tmp_path: Path) -> None:
    """Each byte of the file changed once: an error of one line, or rows."""
    cfg = saved(tmp_path / "rows", [{"question": "2+2", "answer": "4"}] * 4)
    path = tmp_path / "rows" / "data-00000-of-00002.arrow"
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            sources.open_source(cfg)
        except ConfigError as error:
            check_refusal(error, "task.path")


# --- rows as tasks


def candidates(task: TaskConfig, **keys: Any) -> Candidates:
    task = dataclasses.replace(task, max_prompt_tokens=200, heldout_items=1, **keys)
    return Candidates(dataclasses.replace(Config(), task=task))


def test_the_system_prompt_of_the_config_replaces_that_of_the_row(tmp_path: Path) -> None:
    cfg = jsonl(tmp_path / "rows", [VERL] * 2)
    shots = [["1+1", "2"]]
    shown = [m.content for m in candidates(cfg, few_shot=shots).at(0).task.messages]
    assert shown == ["Be brief.", "1+1", "2", "2+2"]
    shown = [m.content for m in candidates(cfg, few_shot=shots, system_prompt="Think.").at(0).task.messages]
    assert shown == ["Think.", "1+1", "2", "2+2"]


def test_the_same_question_in_another_layout_has_the_same_hash(tmp_path: Path) -> None:
    found = {
        candidates(jsonl(tmp_path / name, [row] * 2)).at(0).task.question_hash
        for name, row in {"a": VERL, "b": TRL, "c": {"question": "2+2", "answer": "4"}}.items()
    }
    assert len(found) == 1


def test_tools_of_a_row_need_a_chat_template(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "strict": None}}]
    for value in (tools, json.dumps(tools)):
        item = sources.open_source(jsonl(tmp_path / "rows", [TRL | {"tools": value}])).item(0)
        assert item.env_args["tools"] == [{"type": "function", "function": {"name": "add"}}] or value != tools
    with pytest.raises(ConfigError, match=r"tokenizer\.kind.*tools"):
        candidates(jsonl(tmp_path / "rows", [TRL | {"tools": tools}] * 2)).at(0)


def test_the_check_before_a_run_reports_rows_and_layout(tmp_path: Path) -> None:
    found = [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(20)]
    task = dataclasses.replace(jsonl(tmp_path / "rows", found), heldout_items=4)
    lines: list[str] = []
    config = dataclasses.replace(Config(), task=task, tokenizer=TokenizerConfig())
    preparation.check(config, lines.append)
    assert lines == ["task: 20 rows, layout columns (prompt: question, answer: answer)"]
    assert isinstance(sources.open_source(task).item(0), Item)
