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
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import msgspec

from jaxroll.errors import DataError
from jaxroll.rewards.programs import Outcome, Run, SandboxedPrograms

# --- Proxies of a program's functions and objects, and the plain data that crosses between the two processes
#
# Results are decoded from JSON into plain data of exact built-in types, so that no method of the program runs here.

Exchange = Callable[[bytes], bytes]  # one line of a call -> one line of its result

_NAMESPACE = -1  # in place of an object's number: the names of the program
_MAX_ITEMS = 1_000_000  # of an iterator of the program


class ProgramError(Exception):
    """An exception of the program that is not a built-in one, or a result that cannot be read."""


class RemoteObject(msgspec.Struct, frozen=True):
    """An object that stays in the program's process, by its number there."""

    number: int


def decoded(line: bytes) -> Any:
    """The result in a line of the program (see `fork_server._encoded`).

    Raises the exception that it reports: a built-in one under its own type, otherwise ProgramError.
    """
    try:
        data = msgspec.json.decode(line)
        raised = data["e"] if isinstance(data, dict) and "e" in data else None
        value = None if raised is not None else _value(data)
    except (msgspec.DecodeError, RecursionError, ValueError, TypeError, LookupError) as error:
        raise ProgramError(f"the result cannot be read: {error}") from error
    if raised is not None:
        raise _exception(raised)
    return value


def _value(data: Any) -> Any:
    if isinstance(data, list):
        return [_value(each) for each in data]
    if not isinstance(data, dict):
        return data
    ((kind, body),) = data.items()
    return _KINDS[kind](body)


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "i": int,
    "x": float,
    "b": bytes.fromhex,
    "t": lambda body: tuple(map(_value, body)),
    "s": lambda body: {_value(each) for each in body},
    "f": lambda body: frozenset(map(_value, body)),
    "d": lambda body: dict(map(_value, body)),
    "r": lambda body: RemoteObject(int(body)),
}


def _exception(text: str) -> Exception:
    name, _, message = str(text).partition(": ")
    kind = getattr(builtins, name, None)
    known = isinstance(kind, type) and issubclass(kind, Exception)
    try:
        return kind(message) if known else ProgramError(text)  # pyright: ignore[reportOptionalCall]
    except TypeError:  # UnicodeError needs more arguments
        return ProgramError(text)


def call_line(target: int, name: str, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any]) -> bytes:
    """The line that calls `name` of object `target` (-1: of the program), or with args = None reads it.

    DataError for arguments that are not plain data.
    """
    given = "None" if args is None else _literal(tuple(args))
    return f"({target},{name!r},{given},{_literal(dict(kwargs))})\n".encode()


def _literal(value: Any) -> str:
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes, complex):
        return repr(value)
    if kind is Proxy:
        return f"R({value._number})"
    if kind is dict:
        return "{" + ",".join(f"{_literal(key)}:{_literal(each)}" for key, each in value.items()) + "}"
    if kind in (list, tuple, set, frozenset):
        inside = "".join(f"{_literal(each)}," for each in value)
        return {list: f"[{inside}]", tuple: f"({inside})"}.get(kind, f"{kind.__name__}([{inside}])")
    raise DataError(f"the tests pass a {kind.__name__} to the program; they can pass plain data and its own objects")


def named(exchange: Exchange, name: str) -> Any:
    """The value of a global name of the program. KeyError if it has none."""
    return _local(exchange, exchange(call_line(_NAMESPACE, name, None, {})))


def _local(exchange: Exchange, line: bytes) -> Any:
    return _with_proxies(exchange, decoded(line))


def _with_proxies(exchange: Exchange, value: Any) -> Any:
    kind = type(value)
    if kind is RemoteObject:
        return Proxy(exchange, value.number)
    if kind in (list, tuple):
        return kind(_with_proxies(exchange, each) for each in value)
    if kind is dict:
        return {key: _with_proxies(exchange, each) for key, each in value.items()}
    return value


class Proxy:
    """A function, class or object of the program; attributes and results are plain data or other proxies.

    A proxy is equal only to itself, even if the program defines `__eq__`, and has no truth value.
    """

    __slots__ = ("_exchange", "_number")

    def __init__(self, exchange: Exchange, number: int) -> None:
        self._exchange, self._number = exchange, number

    def _call(self, name: str, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any]) -> Any:
        return _local(self._exchange, self._exchange(call_line(self._number, name, args, kwargs)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._call(name, None, {})

    def __getitem__(self, key: Any) -> Any:
        return self._call("__getitem__", (key,), {})

    def __len__(self) -> int:
        try:
            return self._call("__len__", (), {})
        except AttributeError as error:
            raise TypeError(str(error)) from error  # the type that `list` expects from an iterator without a length

    def __str__(self) -> str:
        return self._call("__str__", (), {})

    def __repr__(self) -> str:
        return self._call("__repr__", (), {})

    def __iter__(self) -> Iterator[Any]:
        items = self._call("__iter__", (), {})
        for _ in range(_MAX_ITEMS):
            try:
                item = items._call("__next__", (), {})
            except StopIteration:
                return
            yield item
        raise ProgramError("an iterator of the program does not end")

    def __bool__(self) -> bool:
        raise TypeError("an object of the program has no truth value in tests")


def same(result: Any, right: Any) -> bool:
    """Equality of plain data in which tuples equal lists, keys are compared as text, and floats in nine digits."""
    if isinstance(result, list | tuple) and isinstance(right, list | tuple):
        return len(result) == len(right) and all(map(same, result, right))
    if isinstance(result, dict) and isinstance(right, dict):
        given = {str(key): each for key, each in result.items()}
        wanted = {str(key): each for key, each in right.items()}
        return (
            len(result) == len(right)
            and given.keys() == wanted.keys()
            and all(same(given[k], wanted[k]) for k in wanted)
        )
    if float in (type(result), type(right)):
        if not isinstance(result, int | float) or not isinstance(right, int | float):
            return False
        return type(result) is not bool and (
            result == right or math.isclose(result, right, rel_tol=1e-9, abs_tol=1e-12)
        )
    return type(result) is type(right) and result == right


# --- Scorer `code`

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

    def __init__(self, programs: SandboxedPrograms, on_wait: Callable[[], object]) -> None:
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
    submissions: Sequence[Submission], programs: SandboxedPrograms, on_wait: Callable[[], object]
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


def _score_of_code(each: Submission, programs: SandboxedPrograms, on_wait: Callable[[], object]) -> float:
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
