"""Scorer `code`: runs the answer as a program in the sandbox and compares what it prints or returns with the tests.

The comparison happens here, in the scoring worker. The program gets the inputs and never the expected outputs, so it
cannot claim success: it can only print or return data. Tests in the form of Python code run here, with the program's
functions as proxies whose results are plain data; an object of the program that is not plain data stays in its process.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import msgspec

from jaxroll.errors import DataError
from jaxroll.rewards.programs import Outcome, Programs, Run
from jaxroll.rewards.proxies import Exchange, call_line, decoded, named, same

TIME_LIMIT_S = 5.0
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_LANGUAGES = ("", "python", "py", "python3")
_FIRST_TESTS = 1  # run alone, because most wrong programs fail at once; each later batch has four times as many


class RowTests(NamedTuple):
    """The tests of a row; exactly one of `stdin`, `cases` and `code` is not empty.

    `stdin` are pairs of input and expected output, `cases` arguments and accepted results of `function`. `code` is
    test code, run after `setup`; if it defines `check`, that is called with the program's function.
    """

    stdin: tuple[tuple[str, str], ...] = ()
    function: str = ""
    cases: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...] = ()
    code: tuple[str, ...] = ()
    setup: str = ""


def program_of(answer: str) -> str:
    """The last fenced block of Python in `answer`; the whole answer if it has no fence."""
    blocks = [body for language, body in _FENCE.findall(answer) if language.lower() in _LANGUAGES]
    return blocks[-1] if blocks else answer


# --- layouts of tests in rows


def tests_of(row: Mapping[str, Any]) -> RowTests:
    """The tests of a row, in the first layout that fits. DataError if it has none.

    - `tests` (else `answer`): a list of `{"input": …, "output": …}` (stdin), of `{"args": […], "expected": …}`, of
      pairs, or of assert statements; a mapping `{"inputs": […], "outputs": […], "fn_name": …}`; test code; or JSON text
      of one of these. `entry_point` (or `fn_name`) names the function, `setup` is code that runs before the tests.
    - `test_list` with `test_setup_code`: assert statements. `test` with `entry_point`: code with `check(candidate)`.
    """
    function = str(row.get("entry_point") or row.get("fn_name") or "")
    setup = str(row.get("setup") or row.get("test_setup_code") or "")
    for name in ("tests", "test_list", "test", "answer"):
        found = row.get(name)
        if isinstance(found, str) and found.lstrip()[:1] in ("[", "{"):
            with contextlib.suppress(ValueError):
                found = json.loads(found)
        if found:
            return _tests(found, function, setup)
    raise DataError("the row has no tests for the reward `code`; it needs a column `tests` (see docs/rewards.md)")


def _tests(found: Any, function: str, setup: str) -> RowTests:
    if isinstance(found, str):
        return RowTests(code=(found,), function=function, setup=setup)
    if isinstance(found, Mapping):
        function = str(found.get("fn_name") or found.get("entry_point") or function)
        pairs = list(zip(found.get("inputs", ()), found.get("outputs", ()), strict=False))
        if not pairs or len(found.get("inputs", ())) != len(found.get("outputs", ())):
            raise DataError("tests need `inputs` and `outputs` of the same length")
        if function:
            # Expected results of this layout may be wrapped in a list, as in APPS.
            return RowTests(function=function, cases=tuple((_arguments(i), _either(o)) for i, o in pairs))
        return RowTests(stdin=tuple((_text(i), _text(o)) for i, o in pairs))
    if not isinstance(found, Sequence):
        raise DataError(f"tests are {type(found).__name__}, not a list, a mapping or text")
    if all(isinstance(each, str) for each in found):
        return RowTests(code=tuple(found), function=function, setup=setup)
    if all(isinstance(each, Mapping) and "output" in each for each in found):
        return RowTests(stdin=tuple((_text(each.get("input", "")), _text(each["output"])) for each in found))
    if function and all(isinstance(each, Mapping) and "expected" in each for each in found):
        return RowTests(
            function=function, cases=tuple((_arguments(e.get("args", ())), (e["expected"],)) for e in found)
        )
    if all(isinstance(each, Sequence) and len(each) == 2 for each in found):
        if function:
            return RowTests(function=function, cases=tuple((_arguments(i), (o,)) for i, o in found))
        return RowTests(stdin=tuple((_text(i), _text(o)) for i, o in found))
    raise DataError("the tests have no known layout (see docs/rewards.md); cases of a function need `entry_point`")


def _arguments(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _either(value: Any) -> tuple[Any, ...]:
    return (value, value[0]) if isinstance(value, list) and value else (value,)


def _text(value: Any) -> str:
    """Text of stdin or stdout; lists are lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


# --- scores


class CodeScorer:
    """The scorer `code` of a worker. `run_ahead` runs the programs of several answers together."""

    def __init__(self, programs: Programs, on_wait: Callable[[], object]) -> None:
        self._programs, self._on_wait = programs, on_wait
        self._known: dict[tuple[bytes, str], float | Exception] = {}

    def run_ahead(self, pairs: Iterable[tuple[Mapping[str, Any], str]]) -> None:
        """Compute the scores of (args, answer) for the calls of `score` that follow; forget earlier ones."""
        self._known.clear()
        submissions: dict[tuple[bytes, str], Submission] = {}
        for args, answer in pairs:
            key = _key(args, answer)
            try:
                submissions.setdefault(key, submission(args, answer))
            except Exception as error:  # noqa: BLE001 - the item has no score; the others have
                self._known[key] = error
        found = scores(tuple(submissions.values()), self._programs, self._on_wait) if submissions else []
        self._known.update(zip(submissions, found, strict=True))

    def score(self, args: Mapping[str, Any], answer: str) -> float:
        """1 if the program in `answer` passes the tests of the row, else 0; with `partial` the share that passes.

        DataError for a row without tests or with tests that do not run.
        """
        key = _key(args, answer)
        if key not in self._known:
            self.run_ahead([(args, answer)])
        found = self._known[key]
        if isinstance(found, Exception):
            raise found
        return found


def _key(args: Mapping[str, Any], answer: str) -> tuple[bytes, str]:
    return msgspec.json.encode(args), answer


def submission(args: Mapping[str, Any], answer: str) -> Submission:
    """The submission of `answer` under a task's `env_args`. DataError for a row without tests."""
    limit_s = float(args.get("time_limit_s") or TIME_LIMIT_S)
    row = {**args, **(args.get("row") or {})}
    return Submission(program_of(answer), tests_of(row), limit_s, bool(args.get("partial")))


class Submission(NamedTuple):
    """A program with its tests. With `partial`, the score is the share of tests that pass; else all must pass."""

    program: str
    tests: RowTests
    time_limit_s: float = TIME_LIMIT_S
    partial: bool = False


def scores(
    submissions: Sequence[Submission], programs: Programs, on_wait: Callable[[], object]
) -> list[float | Exception]:
    """The score of each submission, or the DataError of its tests; their programs run together, in batches.

    `time_limit_s` holds for a run on one stdin, or for all calls of a program's functions together.
    """
    found: list[float | Exception] = [0.0] * len(submissions)
    steps = {index: _steps(each) for index, each in enumerate(submissions) if not each.tests.code}
    wanted: dict[int, list[Run]] = {}
    outcomes: dict[int, list[Outcome] | None] = dict.fromkeys(steps)
    while outcomes:
        for index, received in outcomes.items():
            try:
                wanted[index] = next(steps[index]) if received is None else steps[index].send(received)
            except StopIteration as end:
                found[index] = end.value
            except DataError as error:
                found[index] = error
        ran = iter(programs.run([run for runs in wanted.values() for run in runs], on_wait))
        outcomes = {index: [next(ran) for _ in runs] for index, runs in wanted.items()}
        wanted = {}
    for index, each in enumerate(submissions):
        if each.tests.code:
            try:
                found[index] = _score_of_code(each, programs, on_wait)
            except DataError as error:
                found[index] = error
    return found


def _steps(each: Submission) -> Generator[list[Run], list[Outcome], float]:
    """Yield batches of runs, receive their outcomes, return the score."""
    tests = each.tests
    if tests.cases:
        lines = b"".join(call_line(-1, tests.function, arguments, {}) for arguments, _ in tests.cases)
        (outcome,) = yield [Run(each.program, lines, calls=True, time_limit_s=each.time_limit_s)]
        return _share(_passed_cases(outcome, tests), each.partial)
    passed: list[bool] = []
    size = _FIRST_TESTS
    while len(passed) < len(tests.stdin) and (each.partial or all(passed)):
        part = tests.stdin[len(passed) : len(passed) + size]
        runs = [Run(each.program, given.encode(), time_limit_s=each.time_limit_s) for given, _ in part]
        outcomes = yield runs
        passed += [not o.failure and same_output(o.output, right) for o, (_, right) in zip(outcomes, part, strict=True)]
        size *= 4
    return _share(passed, each.partial)


def _share(passed: Sequence[bool], partial: bool) -> float:
    return sum(passed) / len(passed) if partial else float(all(passed))


def same_output(printed: bytes, expected: str) -> bool:
    """True if both texts have the same lines, apart from spaces at the end of a line and empty lines at the end."""
    return _lines(printed.decode("utf-8", "replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _passed_cases(outcome: Outcome, tests: RowTests) -> list[bool]:
    # Results of calls before a crash or the time limit count; a program that stops early lacks the later ones.
    lines = outcome.output.split(b"\n")[:-1][: len(tests.cases)]
    passed = [_passes(line, rights) for line, (_, rights) in zip(lines, tests.cases, strict=False)]
    return passed + [False] * (len(tests.cases) - len(passed))


def _passes(line: bytes, rights: tuple[Any, ...]) -> bool:
    try:
        result = decoded(line)
    except Exception:  # noqa: BLE001 - the call raised, or its result cannot be read
        return False
    return any(same(result, right) for right in rights)


# --- test code


def _score_of_code(each: Submission, programs: Programs, on_wait: Callable[[], object]) -> float:
    """Run the test code here, with proxies in place of the program's names. DataError if the tests do not compile."""
    tests = each.tests
    try:
        trees = [ast.parse(text) for text in (tests.setup, *tests.code)]
    except SyntaxError as error:
        raise DataError(f"the tests are not Python code: {error}") from error
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)} | {tests.function}
    passed: list[bool] = []
    with programs.open(Run(each.program, calls=True, time_limit_s=each.time_limit_s), on_wait) as exchange:
        names = _names_of(exchange, used - set(dir(builtins)))
        names["__name__"] = "tests"
        try:
            exec(compile(trees[0], "<setup>", "exec"), names)
        except Exception as error:
            raise DataError(f"the setup of the tests raised {type(error).__name__}: {error}") from error
        for tree in trees[1:]:
            passed.append(_holds(tree, names, tests.function))
            if not passed[-1] and not each.partial:
                break
    return _share(passed, each.partial)


def _names_of(exchange: Exchange, wanted: set[str]) -> dict[str, Any]:
    """The program's values of those names that it defines; the tests may define the others."""
    found: dict[str, Any] = {}
    for name in sorted(wanted):
        with contextlib.suppress(Exception):
            found[name] = named(exchange, name)
    return found


def _holds(tree: ast.Module, names: dict[str, Any], function: str) -> bool:
    try:
        exec(compile(tree, "<tests>", "exec"), names)
        check = names.get("check")
        if function and isinstance(check, FunctionType):
            check(names[function])  # KeyError if the program does not define it
    except (DataError, MemoryError):
        raise
    except Exception:  # noqa: BLE001 - a test fails by raising anything
        return False
    return True
