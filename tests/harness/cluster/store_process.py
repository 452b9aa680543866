"""A store process with scripted prompts: `python store_process.py RUN_DIR PARENT_PID`.

Everything but the prompts is the real role; they come without JAX and without end: question i shows a word made from i.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from jaxroll import lifeline
from jaxroll.control import run_dir
from jaxroll.records import Message, Task, question_hash
from jaxroll.store.server.server import serve

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def task(index: int, env: str) -> Task:
    """Question `index`: a word of five letters that is different for every index."""
    word = "".join(LETTERS[index // 26**place % 26] for place in range(5))
    return Task(index, (Message("user", word),), env, "{}", index, question_hash(f"{word} {index}"))


class Feed:
    """The questions 0, 1, 2, … of environment `env`."""

    def __init__(self, env: str) -> None:
        self._env, self._at = env, 0

    def restore(self, state: bytes | None) -> None:
        self._at = int(state) if state else 0

    async def next(self, count: int) -> list[tuple[Task, bytes]]:
        first, self._at = self._at, self._at + count
        return [(task(i, self._env), str(i + 1).encode()) for i in range(first, self._at)]


def main() -> None:
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    lifeline.bind(parent)
    config = run_dir.load_config(folder)
    feed = Feed(config.task.env)
    asyncio.run(serve(config, folder, feed, host="127.0.0.1", port=0, ready=lambda address: None))


if __name__ == "__main__":
    main()
