"""`jaxroll export RUN --parquet=FILE | --jsonl=FILE`: the trajectories that are in the log, one row per member.

What can be exported is what is kept: all that no durable checkpoint covers yet, and of what is done with (trained and
durable, expired, dead) the newest `store.keep_trajectories_mb`. Rows are streamed; memory holds one row group.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from jaxroll import wire
from jaxroll.errors import ConfigError
from jaxroll.records import Finished, Member, ages
from jaxroll.report import export_files
from jaxroll.report.export_files import Row, Write
from jaxroll.report.trajectory import Decoder, decoder
from jaxroll.store.log import reading

ROW_GROUP_BYTES = 8 * 2**20
_TOKEN_BYTES = 16  # a token with mask, log-prob and text, roughly


def main(run_dir: Path, config: dict[str, Any], *, parquet: str | None, jsonl: str | None) -> int:
    """Write the files asked for and say how much; 0. ConfigError when pyarrow is missing or a file cannot be made."""
    if not parquet and not jsonl:
        raise ConfigError("--parquet", None, "no file named", "Add --parquet=FILE or --jsonl=FILE.")
    decode, why = decoder(run_dir, config)
    for path, opened in ((parquet, export_files.parquet), (jsonl, export_files.jsonl)):
        if path:
            count = None  # where the reader of a pipe left
            with export_files.replaced(Path(path)) as draft, opened(draft) as write:
                count = _write(run_dir, decode, write)
            if count is not None:
                print(f"{count} trajectories: {path}", file=sys.stderr if export_files.is_stream(Path(path)) else None)
    if why:
        print(why, file=sys.stderr)
    return 0


def _write(run_dir: Path, decode: Decoder | None, write: Write) -> int:
    """How many rows were written, in portions of bounded size."""
    count, portion, size = 0, [], 0
    damage = reading.damage_named(run_dir, "`jaxroll replay` says what is wrong with it")
    with damage, reading.transaction(run_dir) as db:
        for row in rows(db, decode):
            portion.append(row)
            size += _TOKEN_BYTES * len(row["tokens"]) + 1000
            count += 1
            if size >= ROW_GROUP_BYTES:
                write(portion)
                portion, size = [], 0
        write(portion)
    return count


def rows(db: sqlite3.Connection, decode: Decoder | None) -> Iterator[Row]:
    """One row for each finished member whose bytes are kept, by group and member."""
    cursor = db.execute(_SELECT)
    names = [column[0] for column in cursor.description]
    for found in cursor:
        yield _row(dict(zip(names, found, strict=True)), decode)


_SELECT = (
    "SELECT p.group_id, p.member, p.body, g.question_hash, g.prompt_index, g.state, g.reason,"
    " t.env, t.env_args, t.messages, c.lineage AS claim_lineage, c.step AS claim_step,"
    " m.attempt, m.holder, m.leased_unix_s, m.ended_unix_s"
    " FROM payloads p JOIN groups g ON g.id = p.group_id LEFT JOIN tasks t ON t.group_id = p.group_id"
    " LEFT JOIN members m ON m.group_id = p.group_id AND m.member = p.member"
    " LEFT JOIN claim_groups c ON c.group_id = p.group_id ORDER BY p.group_id, p.member"
)


def _row(found: Row, decode: Decoder | None) -> Row:
    outcome = wire.decode(found.pop("body"), Member).outcome
    assert isinstance(outcome, Finished)  # failures have no payload
    messages = msgspec.json.decode(found.pop("messages") or "[]")
    step = found["claim_step"]
    age = ages(outcome.versions, step) if step is not None else None
    prompt, answer = _texts(outcome, decode)
    return found | {
        "group": found.pop("group_id"),
        "question": messages[-1]["content"] if messages else None,
        "prompt_text": prompt,
        "answer_text": answer,
        "tokens": [token for s in outcome.segments for token in s.tokens.tolist()],
        "loss_mask": [mask for s in outcome.segments for mask in s.loss_mask.tolist()],
        "logprobs": [value for s in outcome.segments for value in s.logprobs.tolist()],
        "reward": outcome.reward,
        "reward_parts": json.dumps(outcome.reward_parts),
        "finish": outcome.finish,
        "versions": json.dumps([[str(run.version), run.count] for run in outcome.versions]),
        "sampled_tokens": sum(run.count for run in outcome.versions),
        "age_max": int(age.max()) if age is not None and age.size else None,
        "age_mean": float(age.mean()) if age is not None and age.size else None,
    }


def _texts(outcome: Finished, decode: Decoder | None) -> tuple[str | None, str | None]:
    """What was shown first, and everything after it (with later turns, both speak in it)."""
    if decode is None or not outcome.segments:
        return None, None
    first, *rest = outcome.segments
    return decode(first.tokens.tolist()), "".join(decode(segment.tokens.tolist()) for segment in rest)
