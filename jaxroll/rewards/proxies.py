"""Proxies of a program's functions and objects, and the plain data that crosses between the two processes.

Results are decoded from JSON into plain data of exact built-in types, so that no method of the program runs here.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from jaxroll.errors import DataError

Exchange = Callable[[bytes], bytes]  # one line of a call -> one line of its result

_NAMESPACE = -1  # in place of an object's number: the names of the program
_MAX_ITEMS = 1_000_000  # of an iterator of the program


class ProgramError(Exception):
    """An exception of the program that is not a built-in one, or a result that cannot be read."""


class Reference(msgspec.Struct, frozen=True):
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
    "r": lambda body: Reference(int(body)),
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
    if kind is Reference:
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
