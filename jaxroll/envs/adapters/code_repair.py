"""Repair of a file: the model edits lines of a program until its tests pass. They run in the sandbox of the rewards.

An answer `3: return a + b` replaces line 3, which keeps its indentation. After each edit all tests run, and the failing
ones are shown. A task brings its file and tests, or the source below makes small programs with one wrong operator.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from jaxroll.config import TaskConfig
from jaxroll.config.derived import is_compact
from jaxroll.data.sources import PRINTABLE
from jaxroll.envs.registry import (
    QUEUE_ALLOWANCE_S,
    identity,
    refuse_unknown,
    register,
    settings_given,
    settings_of,
    share,
)
from jaxroll.errors import DataError
from jaxroll.protocols import StepResult
from jaxroll.records import Item, Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool

UNREAD = "?"
RULES = (
    "The tests of this file fail. Replace one line with an answer of the form NUMBER: NEW TEXT, until they pass. "
    "The line keeps its indentation. After each edit you see the tests that fail.\n"
)
MAX_FILE_CHARS = 100_000
_EDIT = re.compile(r"\s*(\d{1,6})\s*:[ \t]*([^\n]*)")


@register("code_repair")
class CodeRepair:
    """Environment with reward 1 once all tests of the edited file pass; at most `task.args.max_turns` edits."""

    runs_programs = True  # in the sandbox

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self._pool = pool
        args = settings_given(config)
        share(args, "noise")
        self.max_turns: int = settings_of(Settings, args).max_turns
        self.step_limit_s = pool.time_limit_s + QUEUE_ALLOWANCE_S
        self._lines: list[str] = []
        self._tests: tuple[str, ...] = ()
        self._edits = self._misread = 0

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's messages; `seed` has no effect."""
        args = task.args()
        self._lines, self._tests = str(args["file"]).split("\n"), tuple(args["tests"])
        self._edits = self._misread = 0
        return task.messages

    async def step(self, answer: str) -> StepResult:
        """The failing tests after one edit, or the end of the episode with its reward."""
        if not self._tests:
            raise DataError("step() before reset(): there is no file to edit")
        self._edits += 1
        edited = with_edit(self._lines, answer)
        self._misread += edited is None
        if edited is not None:
            self._lines = edited
        program = "\n".join(self._lines)
        failing = await self._failing(program) if edited is not None else self._tests
        if failing and self._edits < self.max_turns:
            return StepResult(done=False, messages=(Message("tool", shown(failing) if edited else UNREAD),))
        passed = 1 - len(failing) / len(self._tests)
        parts = {"passed": passed, "edits": float(self._edits), "misread": float(self._misread)}
        return StepResult(done=True, reward=float(not failing), reward_parts=parts)

    async def _failing(self, program: str) -> tuple[str, ...]:
        """The tests that fail for `program`."""
        each = [json.dumps({"scorer": "code", "tests": [test]}) for test in self._tests]
        passed = await asyncio.gather(*(self._pool.score(args, program) for args in each))
        return tuple(test for test, score in zip(self._tests, passed, strict=True) if score != 1.0)

    async def close(self) -> None:
        """Forget the file."""
        self._lines, self._tests = [], ()


def with_edit(lines: Sequence[str], answer: str) -> list[str] | None:
    """`lines` after the edit in `answer`; None if it is no edit of one of them, or makes the file too long."""
    found = _EDIT.match(answer)
    if found is None or not 1 <= int(found.group(1)) <= len(lines):
        return None
    place = int(found.group(1)) - 1
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    edited = [*lines[:place], indent + found.group(2).strip(), *lines[place + 1 :]]
    return edited if sum(map(len, edited)) <= MAX_FILE_CHARS else None


def shown(failing: Sequence[str]) -> str:
    """Failing tests as text, one per line."""
    return "\n".join(failing)


# --- small programs with one wrong operator


@dataclass(frozen=True)
class Settings:
    """Settings of `task.args`: lines of the function's body, tests of a file, edits of an episode."""

    lines: int = 2
    tests: int = 2
    max_turns: int = 4

    def __post_init__(self) -> None:
        if not (1 <= self.lines <= 8 and 1 <= self.tests <= 8 and 1 <= self.max_turns <= 64):
            raise ValueError("lines and tests are 1 to 8, max_turns is 1 to 64")


Step = tuple[str, str, str]  # a = a <operator> <operand>, or b = …


@dataclass(frozen=True)
class Broken:
    """A file of `steps` in which step `place` has another operator than `right`, which makes all its tests pass."""

    steps: tuple[Step, ...]
    place: int
    right: str
    cases: tuple[tuple[int, int, int], ...]  # a, b and the expected result of each test

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of the file."""
        return ("def f(a,b):", *(f" {_line(step)}" for step in self.steps), " return a+b")

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests, which fail."""
        return tuple(f"assert f({a},{b})=={value}" for a, b, value in self.cases)

    @property
    def text(self) -> str:
        """The file with line numbers, then the tests."""
        numbered = [f"{number}:{line}" for number, line in enumerate(self.lines, 1)]
        return "\n".join([*numbered, *self.tests])

    def failing(self, steps: Sequence[Step]) -> tuple[str, ...]:
        """The tests that fail for other steps."""
        pairs = zip(self.tests, self.cases, strict=True)
        return tuple(test for test, (a, b, value) in pairs if _value(steps, a, b) != value)


_OPERATORS = "+-*"
_TRIES = 1000


def broken(seed: int, settings: Settings) -> Broken:
    """File `seed`: `def f(a, b)` assigns in each line, and one line has a wrong operator that a test shows."""
    random = Random(f"repair {seed}")
    for _ in range(_TRIES):
        steps = [(random.choice("ab"), random.choice(_OPERATORS), random.choice("ab23")) for _ in range(settings.lines)]
        place = random.randrange(settings.lines)
        left, operator, right = steps[place]
        wrong = list(steps)
        wrong[place] = (left, random.choice(_OPERATORS.replace(operator, "")), right)
        inputs = [(random.randint(2, 5), random.randint(2, 5)) for _ in range(settings.tests)]
        cases = tuple((*pair, _value(steps, *pair)) for pair in inputs)
        made = Broken(tuple(wrong), place, operator, cases)
        if len(made.failing(wrong)) == len(cases):
            return made
    raise DataError(f"seed {seed} gives no file whose tests show the mistake")


def _line(step: Step) -> str:
    target, operator, operand = step
    return f"{target}={target}{operator}{operand}"


def _value(steps: Sequence[Step], a: int, b: int) -> int:
    """The result of the function of `steps`, computed without running it."""
    names = {"a": a, "b": b}
    for target, operator, operand in steps:
        x, y = names[target], names[operand] if operand in names else int(operand)
        names[target] = x + y if operator == "+" else x - y if operator == "-" else x * y
    return names["a"] + names["b"]


class CodeRepairSource:
    """Small files with a wrong operator, by seed.

    `task.args`: the settings, and `noise`, the share of the teacher's edits that choose a line and an operator at
    random.
    """

    size = None

    def __init__(self, cfg: TaskConfig) -> None:
        args = settings_given(cfg)
        refuse_unknown(args, ("lines", "tests", "max_turns", "noise"))
        self._noise = share(args, "noise")
        self._settings: Settings = settings_of(Settings, args)
        self._as_compact = is_compact(cfg)
        self.identity = identity("code_repair", cfg)

    def item(self, index: int) -> Item:
        """File `index`."""
        made = broken(index, self._settings)
        args = {"file": "\n".join(made.lines), "tests": [*made.tests]}
        return Item(RULES + made.text, made.text, None, args, self._worked(made, index))

    def _worked(self, made: Broken, index: int) -> tuple[Message, ...]:
        """Edits until the tests pass, with the failing tests after each: right ones, or with `noise` random ones."""
        random, steps, messages = Random(f"teacher {index}"), list(made.steps), list[Message]()
        for edit in range(self._settings.max_turns):
            place, operator = made.place, made.right
            if random.random() < self._noise:
                place, operator = random.randrange(len(steps)), random.choice(_OPERATORS)
            steps[place] = (steps[place][0], operator, steps[place][2])
            messages.append(Message("assistant", f"{place + 2}:{_line(steps[place])}"))  # line 1 is the def
            failing = made.failing(steps)
            if not failing or edit == self._settings.max_turns - 1:
                break
            messages.append(Message("tool", shown(failing)))
        return tuple(messages)

    def alphabet(self) -> str:
        """The characters of files, tests and edits; printable ASCII for full prompts."""
        return "".join(sorted(set("def f(a,b):\n=+-*return assert0123456789?"))) if self._as_compact else PRINTABLE
