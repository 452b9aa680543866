"""Registry of scorers by name, and the grading of a completion by them. They run in scoring workers.

A scorer is a function `score(args, answer) -> float`, where `args` are the task's `env_args`. A module given to the
pool (see `ScoringPool(modules=…)`) may register its own with `@register("name")`. A scorer that cannot read every text
has a guard: an answer that the guard rejects scores 0 and is counted by reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from jaxroll import protocols
from jaxroll.errors import DataError, described
from jaxroll.rewards import gym_tasks, parts
from jaxroll.rewards.programs import ServerLost

ScoreFunction = Callable[[Mapping[str, Any], str], float]

Guard = Callable[[str, int], str]  # (answer, max_chars) -> the reason to reject it, or ""

MIN_ANSWER_CHARS = 8192
_CHARS_OF_TOKEN = 64  # longer than the tokens of common vocabularies, except runs of spaces
TOO_LONG, NOT_ASCII = "too long", "not ASCII"

# reasoning-gym imports these for the generators of a few tasks. They have no wheels, and pycosat needs a C compiler.
_NOT_NEEDED = {"reasoning_gym": ("cellpylib", "pycosat", "zss")}
# Its folders of tasks that can wait. The last ones take longest: cognition reads fonts, and algebra imports sympy.
# Without the folder `algorithmic` the package's own modules import one another in a circle.
_FOLDERS = (
    "arithmetic", "games", "graphs", "geometry", "probability", "induction", "code", "arc", "logic", "cognition",
    "algebra",
)  # fmt: skip


class Scorer(NamedTuple):
    """A scorer with its guard."""

    function: ScoreFunction
    guard: Guard | None = None


_SCORERS: dict[str, Scorer] = {}


def register(name: str, guard: Guard | None = None) -> Callable[[ScoreFunction], ScoreFunction]:
    """A decorator that registers a function as the scorer `name`; without a guard it receives every answer."""

    def add(function: ScoreFunction) -> ScoreFunction:
        if name in _SCORERS and _SCORERS[name].function is not function:
            raise ValueError(f"the scorer {name!r} is registered already")
        _SCORERS[name] = Scorer(function, guard)
        return function

    return add


def max_answer_chars(max_tokens: int) -> int:
    """The longest answer, in characters, that a guarded scorer reads when an episode generates `max_tokens`."""
    return max(MIN_ANSWER_CHARS, _CHARS_OF_TOKEN * max_tokens)


class Judgement(NamedTuple):
    """A raw score, and the guard's reason when the scorer did not see the answer."""

    score: float
    rejected: str = ""


def judge(env_args: str, answer: str, max_chars: int = MIN_ANSWER_CHARS) -> Judgement:
    """Score `answer` under `env_args` (JSON with the name `scorer` and its arguments).

    Raises DataError for an unknown scorer or a score that is not a finite number; errors of the scorer pass through.
    """
    return judge_args(msgspec.json.decode(env_args), answer, max_chars)


def judge_args(args: Mapping[str, Any], answer: str, max_chars: int = MIN_ANSWER_CHARS) -> Judgement:
    """Score `answer` under decoded `env_args`; see `judge`."""
    scorer = _SCORERS.get(str(args.get("scorer")))
    if scorer is None:
        raise DataError(f"there is no scorer {args.get('scorer')!r}; known are {', '.join(sorted(_SCORERS))}")
    if scorer.guard is not None and (reason := scorer.guard(answer, max_chars)):
        return Judgement(0.0, reason)
    try:
        raw = scorer.function(args, answer)
    except Rejected as rejection:
        return Judgement(0.0, rejection.reason)
    return Judgement(protocols.number(raw, f"the score of scorer {args['scorer']!r}"))


def score(env_args: str, answer: str) -> float:
    """The raw score of `answer`; see `judge`."""
    return judge(env_args, answer).score


@register("exact")
def exact(args: Mapping[str, Any], answer: str) -> float:
    """1 if the answer equals the expected text exactly, else 0."""
    return 1.0 if answer == args["answer"] else 0.0


def readable(answer: str, max_chars: int) -> str:
    """A guard that rejects long answers and null characters."""
    return TOO_LONG if len(answer) > max_chars else NOT_ASCII if "\0" in answer else ""


class Rejected(Exception):
    """Raised by a scorer that rejects an answer for `reason`; the answer scores 0."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@register("reasoning_gym", guard=readable)
def reasoning_gym(args: Mapping[str, Any], answer: str) -> float:
    """The score of the answer to `args["entry"]` (see `gym_tasks.score`); DataError for an unknown task.

    Characters outside ASCII are rejected where no right answer has them.
    """
    name, entry = args["dataset"], args["entry"]
    if name not in gym_tasks.TASKS:
        raise DataError(f"reasoning-gym's {name!r} is not in the table of tasks")
    plain = not gym_tasks.TASKS[name].any_script and (entry["answer"] or "").isascii()
    if plain and not answer.isascii():
        raise Rejected(NOT_ASCII)
    return gym_tasks.score(name, _dataset(name, msgspec.json.encode(args.get("settings", {}))), entry, answer)


@cache
def _dataset(name: str, settings: bytes) -> Any:
    """The dataset whose scorer is used. The scorer reads only the entry and the settings, not the dataset's items."""
    return import_library("reasoning_gym").create_dataset(name, seed=0, size=10, **msgspec.json.decode(settings))


def import_library(name: str, *, whole: bool = True) -> ModuleType:
    """Import a library, with empty modules in place of missing packages that only a few tasks use.

    reasoning-gym imports all its tasks at once; if the first call is without `whole`, its tables of tasks import a
    folder when a name is looked up that they do not have yet. Raises ImportError where the library itself is not
    installed.
    """
    folders = [f"{name}.{each}" for each in _FOLDERS] if name == "reasoning_gym" else []
    later = [] if whole or name in sys.modules else folders
    with contextlib.nullcontext() if name in sys.modules else _stand_ins(name, later):
        library = importlib.import_module(name)
    if later:
        importer, factory = _Importer(library, later), library.factory
        factory.DATASETS, factory.CURRICULA = (_Table(importer, of) for of in (factory.DATASETS, factory.CURRICULA))
    return library


@contextlib.contextmanager
def _stand_ins(name: str, more: Sequence[str] = ()) -> Iterator[None]:
    """Empty modules in place of `more` and of the missing packages that `name` can do without."""
    names = [*(each for each in _NOT_NEEDED.get(name, ()) if not importable(each)), *more]
    before = {each: sys.modules[each] for each in names if each in sys.modules}
    sys.modules.update((each, ModuleType(each)) for each in names)
    try:
        yield
    finally:
        for each in names:
            sys.modules.pop(each, None)
        sys.modules.update(before)


class _Importer:
    """Imports the folders of a package one by one, on demand, also as attributes of the package."""

    def __init__(self, package: ModuleType, folders: Sequence[str]) -> None:
        self._package, self._left = package.__name__, list(folders)
        self._lock, self._busy = threading.RLock(), False
        for each in folders:
            vars(package).pop(each.rpartition(".")[2], None)
        vars(package)["__getattr__"] = self._attribute

    def until(self, found: Callable[[], bool]) -> None:
        """Import folders until `found` is true; at once if the caller is a folder that is being imported."""
        with self._lock:
            while self._left and not self._busy and not found():
                self._busy = True
                try:
                    with _stand_ins(self._package):
                        importlib.import_module(self._left.pop(0))
                finally:
                    self._busy = False

    def _attribute(self, name: str) -> ModuleType:
        if f"{self._package}.{name}" not in self._left:
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}")
        with _stand_ins(self._package):
            return importlib.import_module(f"{self._package}.{name}")


class _Table(UserDict[str, Any]):
    """A table by name that a folder fills when it is imported: it is looked up in what an importer has imported."""

    def __init__(self, importer: _Importer, known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self._importer = importer

    def __contains__(self, name: object) -> bool:
        self._importer.until(lambda: name in self.data)
        return name in self.data

    def __missing__(self, name: str) -> Any:
        self._importer.until(lambda: name in self.data)
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        self._importer.until(lambda: False)
        return iter(self.data)

    def __len__(self) -> int:
        self._importer.until(lambda: False)
        return len(self.data)


def importable(name: str) -> bool:
    """True if the module `name` can be imported here."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


# --- Grading of a completion in a scoring worker: extraction of the answer, then the value of each reward part
#
# The worker computes raw values; `jaxroll.envs.registry` combines them on the event loop, because reward models and
# judges need the network, which workers do not have. This module does not load `jaxroll.config`, whose import would
# take longer than all others of a worker.

_FILE_PREFIX = "file:"
# Kinds of parts that need no network and no token count.
IN_WORKERS = ("exact", "math", "reasoning_gym", "code", "format")


class LocalPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part that a worker computes. An empty `kind` is the scorer that the task names."""

    label: str
    kind: str = ""
    settings: dict[str, Any] = {}


class Grading(msgspec.Struct, frozen=True, omit_defaults=True):
    """Instructions for a worker: the extraction and the parts to compute, in order."""

    extract: str = "none"
    parts: tuple[LocalPart, ...] = ()


class Graded(msgspec.Struct, frozen=True):
    """The answer, the raw value of each part, and the guards' reasons for answers that a scorer did not see."""

    answer: str
    values: dict[str, float]
    rejected: tuple[str, ...] = ()


class PartFailed(DataError):
    """A part that raised or returned no finite number. `cause` is short, for counts."""

    def __init__(self, label: str, cause: str, message: str) -> None:
        self.cause = f"{label}: {cause}"
        super().__init__(f"reward part {label!r}: {message}")


_DECODER = msgspec.json.Decoder(Grading)


@cache
def decoded(grading: str) -> Grading:
    """The instructions of an item, decoded once per worker."""
    return _DECODER.decode(grading)


def grade(grading: Grading, env_args: str, completion: str, max_chars: int = MIN_ANSWER_CHARS) -> Graded:
    """Extract the answer from `completion` and compute every part.

    An empty answer of an extraction has the value 0 in every part that reads answers. Raises PartFailed.
    """
    args = msgspec.json.decode(env_args)
    answer = extracted(grading.extract, completion)
    found = _Item(args, answer, completion, max_chars, grading.extract != "none")
    values = {part.label: found.value(part) for part in grading.parts}
    return Graded(answer, values, tuple(found.rejected))


def extracted(mode: str, completion: str) -> str:
    """The answer in `completion`; "" if there is none. PartFailed when a user's function raises or returns no text."""
    if mode in parts.MODES:
        return parts.MODES[mode](completion)
    try:
        found = load(mode)(completion)
    except MemoryError:
        raise
    except Exception as error:
        raise PartFailed("extract", type(error).__name__, described(error)) from error
    if found is None:
        return ""
    if not isinstance(found, str):
        raise PartFailed("extract", "not a str", f"{mode} returned {type(found).__name__}, not a str")
    return found.strip()


class _Item:
    """One completion with the task's arguments."""

    def __init__(self, args: dict[str, Any], answer: str, completion: str, max_chars: int, cut: bool) -> None:
        self.args, self.answer, self.completion, self.max_chars, self.cut = args, answer, completion, max_chars, cut
        self.rejected: list[str] = []

    def value(self, part: LocalPart) -> float:
        try:
            raw = self._raw(part)
        except (MemoryError, ServerLost):
            raise
        except Exception as error:
            raise PartFailed(part.label, type(error).__name__, described(error)) from error
        try:
            return protocols.number(raw, "its value")
        except DataError as error:
            raise PartFailed(part.label, "not a finite number", str(error)) from error

    def _raw(self, part: LocalPart) -> Any:
        if part.kind == "format":
            return parts.well_formed(self.completion, **part.settings)
        if self.cut and not self.answer:
            return 0.0
        if part.kind == "exact":
            wanted = parts.truth(self.args)
            return parts.exact(wanted.strip() if self.cut else wanted, self.answer)
        if part.kind == "math":
            if len(self.answer) > parts.MAX_MATH_CHARS:
                self.rejected.append(TOO_LONG)
                return 0.0
            return parts.mathematical(parts.truth(self.args), self.answer, **part.settings)
        if part.kind == "code":
            return judge_args(_with_tests(self.args, part), self.answer, self.max_chars).score
        if ":" in part.kind:
            return _called(load(part.kind), self.answer, self.args, self.completion, part.settings)
        judged = judge_args(self.args, self.answer, self.max_chars)
        self.rejected += [judged.rejected] if judged.rejected else []
        return judged.score


def programs(grading: Grading, env_args: str, completion: str) -> list[tuple[dict[str, Any], str]]:
    """The arguments and answer with which `grade` calls the scorer `code`, if it does; they may run ahead."""
    found = [part for part in grading.parts if part.kind == "code" or (not part.kind and '"code"' in env_args)]
    if not found:
        return []
    args = msgspec.json.decode(env_args)
    try:
        answer = extracted(grading.extract, completion)
    except PartFailed:  # `grade` raises it again
        return []
    calls = [_with_tests(args, part) if part.kind else args for part in found]
    return [(each, answer) for each in calls if each.get("scorer") == "code" and (answer or grading.extract == "none")]


def _with_tests(args: dict[str, Any], part: LocalPart) -> dict[str, Any]:
    """The arguments of the scorer `code` for a row with tests."""
    return {**args, **part.settings, "scorer": "code"}


def _called(
    function: Callable[..., Any], answer: str, args: Mapping[str, Any], completion: str, settings: Mapping[str, Any]
) -> Any:
    """The value of `function(answer, row, **settings)`; `completion=…` in addition if it has such a parameter."""
    row = dict(args.get("row") or args)
    if "answer" not in row:
        row["answer"] = args.get("answer", (args.get("entry") or {}).get("answer"))
    more = {"completion": completion} if "completion" in inspect.signature(function).parameters else {}
    return function(answer, row, **settings, **more)


# --- functions of users


@cache
def load(name: str) -> Callable[..., Any]:
    """The function `file:PATH:function` or `package.module:function`, imported once per process.

    Errors of the import pass through; AttributeError or TypeError if the module has no such function.
    """
    place, _, function = name.rpartition(":")
    found = getattr(_module(place), function)
    if not callable(found):
        raise TypeError(f"{name} is not a function")
    return found


@cache
def _module(place: str) -> ModuleType:
    if not place.startswith(_FILE_PREFIX):
        return importlib.import_module(place)
    path = Path(place.removeprefix(_FILE_PREFIX)).expanduser().resolve()
    name = f"jaxroll_functions_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for modules next to it
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
