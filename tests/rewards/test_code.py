"""The scorer `code`: layouts of tests, right programs, and a table of reward hacks that all pay nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.lib import hacks
from jaxroll.errors import DataError
from jaxroll.rewards import code
from jaxroll.rewards import programs as module
from jaxroll.rewards.code import CodeScorer, RowTests, program_of, submission
from jaxroll.rewards.programs import Run, SandboxedPrograms, ServerLost
from jaxroll.rewards.scoring_pool import ScoringPool

FENCED = "I add them.\n```python\nprint(1)\n```\nNo, so:\n```python\nprint(2)\n```\n"


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        (FENCED, "print(2)\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx", "x"),
        ("```sh\nls\n```\n", "```sh\nls\n```\n"),
    ],
)
def test_the_program_is_the_last_block_of_python(answer: str, program: str) -> None:
    assert program_of(answer) == program


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        ({"tests": [{"input": "1", "output": "2"}]}, RowTests(stdin=(("1", "2"),))),
        ({"tests": [["1", "2"]]}, RowTests(stdin=(("1", "2"),))),
        ({"answer": '{"inputs": ["1"], "outputs": ["2"]}'}, RowTests(stdin=(("1", "2"),))),
        (
            {"answer": '{"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "f"}'},
            RowTests(function="f", cases=(((1, 2), ([3], 3)),)),
        ),
        ({"tests": [{"args": [1], "expected": 2}], "entry_point": "f"}, RowTests(function="f", cases=(((1,), (2,)),))),
        ({"test_list": ["assert f(1)"], "test_setup_code": "x = 1"}, RowTests(code=("assert f(1)",), setup="x = 1")),
        ({"test": "def check(c): ...", "entry_point": "f"}, RowTests(code=("def check(c): ...",), function="f")),
    ],
)
def test_known_layouts_of_tests(row: Mapping[str, Any], tests: RowTests) -> None:
    assert code.tests_of(row) == tests


@pytest.mark.parametrize(
    "row", [{}, {"tests": []}, {"tests": [{"args": [1], "expected": 2}]}, {"tests": {"inputs": ["1"], "outputs": []}}]
)
def test_a_row_without_readable_tests_is_a_data_error(row: Mapping[str, Any]) -> None:
    with pytest.raises(DataError, match="tests"):
        code.tests_of(row)


def test_outputs_are_compared_line_by_line_without_trailing_space() -> None:
    assert code.same_output(b"1 \n2\n\n", "1\n2")
    assert not code.same_output(b"1\n\n2", "1\n2") and not code.same_output(b" 1", "1")


def test_plain_data_is_compared_strictly() -> None:
    equal = [((1, 2), [1, 2]), ({"a": (1,)}, {"a": [1]}), (0.1 + 0.2, 0.3), (2.0, 2), ({1: 2}, {"1": 2})]
    different = [(True, 1), (True, 1.0), ("1", 1), ([1], 1), (float("nan"), float("nan")), ([1], [1, 2]), (None, 0)]
    assert all(code.same(result, right) for result, right in equal)
    assert not any(code.same(result, right) for result, right in different)


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b'{"t":1}', b'{"x":"y"}', b'{"unknown":1}', b'{"s":[[1]]}', b'{"t":' * 5000, b'{"e":"Mine: x"}'],
)
def test_a_reply_that_cannot_be_read_is_an_error_of_the_program(line: bytes) -> None:
    with pytest.raises(code.ProgramError):
        code.decoded(line)


def test_a_built_in_exception_keeps_its_type_and_others_do_not_end_the_tests() -> None:
    with pytest.raises(ZeroDivisionError, match="by zero"):
        code.decoded(b'{"e":"ZeroDivisionError: by zero"}')
    for name in ("SystemExit", "KeyboardInterrupt", "print", "UnicodeDecodeError"):
        with pytest.raises(code.ProgramError):
            code.decoded(json.dumps({"e": f"{name}: x"}).encode())


# --- programs


@pytest.fixture
def programs() -> Iterator[SandboxedPrograms]:
    found = SandboxedPrograms()
    yield found
    found.close()


def scored(programs: SandboxedPrograms, row: Mapping[str, Any], *answers: str) -> list[float]:
    found = code.scores([submission(row, answer) for answer in answers], programs, lambda: None)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found  # pyright: ignore[reportReturnType]


SUM = {"tests": [{"input": f"{n} {n}\n", "output": f"{2 * n}\n"} for n in range(7)]}
SOLUTION = """
from collections import Counter, deque
import dataclasses
class Solution:
    total = 5
    def add(self, a, b): return a + b
    def me(self): return self
@dataclasses.dataclass
class Point: x: int = 0
def add(a, b): return a + b
def pair(a): return (a, {a: {1, 2}})
def numbers(n): yield from range(n)
def count(text): return Counter(text)
def fails(): raise KeyError("x")
def moved(point, by): return Point(point.x + by)
"""
CALLS = [
    "assert add(1, 2) == 3 and add([1], [2]) == [1, 2] and add(float('inf'), 1) == float('inf')",
    "assert pair('a') == ('a', {'a': {1, 2}}) and add(2**70, 1) == 2**70 + 1 and add(b'a', b'') == b'a'",
    "s = Solution()\nassert s.add(a=1, b=2) == 3 and s.total == 5 and s.me().total == 5 and s != Solution()",
    "assert add('\\n\\x00\\\\', '\"é\U0001f600') == '\\n\\x00\\\\\"é\U0001f600'",
    "assert list(numbers(3)) == [0, 1, 2] and count('aab') == {'a': 2, 'b': 1}",
    "try:\n  fails()\nexcept KeyError: pass\nelse: assert False",
    "assert moved(Point(1), 2).x == 3 and str(Point(4)) == 'Point(x=4)'",
]


@pytest.mark.process
def test_right_programs_are_paid_and_wrong_ones_are_not(programs: SandboxedPrograms) -> None:
    right, wrong, partly = "print(sum(map(int, input().split())))", "print(1)", "print(2)"
    imports = "import sys, heapq, numpy\nprint(int(numpy.array(sys.stdin.read().split(), int).sum()))"
    threads = "import threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()"
    at_exit = "import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))"
    ends = right + "\nraise SystemExit"
    fails = right + "\nraise SystemExit(1)"
    answers = [right, f"```python\n{right}\n```", imports, threads, at_exit, ends]
    assert scored(programs, SUM, *answers, wrong, partly, fails, "") == [1.0] * len(answers) + [0.0] * 4
    assert scored(programs, {**SUM, "partial": True}, right, partly) == [1.0, pytest.approx(1 / 7)]
    cases = {"tests": {"inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]], "fn_name": "add"}}
    assert scored(programs, cases, SOLUTION, "def add(a, b): return 3", "add = 3", "raise ValueError") == [1, 0, 0, 0]
    assert scored(programs, {"tests": CALLS}, SOLUTION, SOLUTION.replace("a + b", "a - b")) == [1.0, 0.0]
    check = {
        "test": "def check(candidate):\n  assert [candidate(i, 1) for i in range(9)] == [*range(1, 10)]",
        "entry_point": "add",
    }
    assert scored(programs, check, SOLUTION, "def add(a, b): return a", "def check(c): pass") == [1.0, 0.0, 0.0]


@pytest.mark.process
def test_every_hack_of_the_table_is_paid_nothing_and_the_server_survives(programs: SandboxedPrograms) -> None:
    printing = {"tests": list(hacks.STDIN_TESTS), "time_limit_s": 1.0}
    called = {"tests": list(hacks.ASSERTS), "time_limit_s": 1.0}
    pid = programs.pid
    paid = dict(zip(hacks.PRINTING, scored(programs, printing, *hacks.PRINTING.values()), strict=True))
    paid |= dict(zip(hacks.CALLED, scored(programs, called, *hacks.CALLED.values()), strict=True))
    assert {name: score for name, score in paid.items() if score} == {}
    honest = f"def solve(n): return f'{hacks.SECRET} {{n}}'\n"
    assert scored(programs, printing, honest + "print(solve(int(input())))") == [1.0]
    assert scored(programs, called, honest) == [1.0]
    assert (programs.pid, programs.alive) == (pid, True)


@pytest.mark.process
def test_no_program_escapes(programs: SandboxedPrograms, tmp_path: Path) -> None:
    with hacks.targets(tmp_path) as targets:
        for name, escape in hacks.ESCAPES.items():
            (outcome,) = programs.run([Run(targets.filled(escape.program), time_limit_s=5.0)])
            assert not any(mark.encode() in outcome.output for mark in hacks.MARKS), (name, outcome)
            assert not escape.has_effect(targets), name


@pytest.mark.process
def test_tests_that_are_code_run_for_any_number_of_answers(programs: SandboxedPrograms) -> None:
    """The status of each program is taken: about 280 fill a socket, and the server would wait for room forever."""
    scorer = CodeScorer(programs, lambda: None)
    row = {"tests": ["assert f(1) == 2"], "time_limit_s": 1.0}
    found = [scorer.score(row, f"def f(x): return x + {number % 2}") for number in range(600)]
    assert found == [0.0, 1.0] * 300


@pytest.mark.process
def test_a_server_that_stops_answering_is_lost_and_no_test_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ALLOWANCE_S", 0.5)
    programs = SandboxedPrograms()
    scorer = CodeScorer(programs, lambda: None)
    try:
        assert scorer.score({"tests": ["assert f(1) == 2"]}, "def f(x): return 2") == 1.0
        servers = [psutil.Process(programs.pid), *psutil.Process(programs.pid).children(recursive=True)]
        for server in servers:
            server.suspend()
        with pytest.raises(ServerLost):
            scorer.score({"tests": ["assert f(1) == 2"], "time_limit_s": 0.5}, "def f(x): return 1 + 1")
        for server in servers:
            with contextlib.suppress(psutil.NoSuchProcess):  # the first one ends the others
                server.resume()
    finally:
        programs.close()


NEIGHBOURS = """
import os
for fd in range(3, 1024):
    try: os.fstat(fd); print("open", fd)
    except OSError: pass
"""


@pytest.mark.process
def test_a_program_has_no_descriptor_of_its_neighbours(programs: SandboxedPrograms) -> None:
    outcomes = programs.run([Run(NEIGHBOURS)] * 70)
    assert {(outcome.output, outcome.failure) for outcome in outcomes} == {(b"", "")}


@pytest.mark.process
def test_a_worker_with_many_descriptors_passes_none_to_programs() -> None:
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
    programs = SandboxedPrograms()
    try:
        outcomes = programs.run([Run(NEIGHBOURS)] * 3)
        assert {(outcome.output, outcome.failure) for outcome in outcomes} == {(b"", "")}
    finally:
        programs.close()
        for each in held:
            os.close(each)


@pytest.mark.process
def test_a_pool_runs_programs_whose_time_limit_is_longer_than_its_own() -> None:
    pool = ScoringPool(1, time_limit_s=1.0, libraries=(), programs=True)
    pool.start()
    args = json.dumps({"scorer": "code", **SUM, "time_limit_s": 2.5})
    right = "print(sum(map(int, input().split())))"

    async def scores() -> list[float | BaseException]:
        answers = [right, "while True: pass", f"{right}#", "import time; time.sleep(9)"]
        jobs = [pool.score(args, answer) for answer in answers]
        return await asyncio.gather(*jobs, pool.score('{"scorer": "code"}', right), return_exceptions=True)

    try:
        *found, error = asyncio.run(asyncio.wait_for(scores(), 60.0))
        assert (found, pool.restarts) == ([1.0, 0.0, 1.0, 0.0], 0)
        assert isinstance(error, DataError) and "column `tests`" in str(error)
    finally:
        pool.close()
