"""Limits of a chat template: processor time, and the size of everything that it builds.

Jinja's sandbox protects Python's internals but does not limit work: three nested loops run forever, a string can be
doubled sixty times, and `'x' * 10**10` is one expression. Here every loop, call, filter, operator and literal of a
template is charged to a meter before it runs. Operations whose result one call into C could multiply are either not
available or their size is computed first, so that no step between two checks of the meter takes long.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from typing import Any

from jinja2 import meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

SOURCE_CHARACTERS = 1 << 18
UNITS = 1 << 25  # characters that one rendering may build or iterate over; an element or a step counts as STEP
STEP = 64
CPU_S = 3.0
DEEPEST, DEEPEST_LOOPS = 200, 8  # nesting; the compiler's time grows exponentially with nested loops
LARGEST_ARGUMENT = 1_000  # limit of a width or a count that is passed to a filter or a format
_LARGEST_BITS = 1 << 12
_LONG_NUMBER, _NESTED_FIELD = re.compile(r"\d{4}"), re.compile(r"\{[^{}]*\{")

_FILTERS = frozenset({
    "abs", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format",
    "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject",
    "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string",
    "title", "tojson", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
})  # fmt: skip
_TEXT_METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip",
    "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip",
    "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
})  # fmt: skip
_CONSTANT = frozenset({"length", "count", "first", "last", "default", "d"})  # filters with constant cost


class TooMuch(Exception):
    """A template exceeds its limits. It is not a TemplateError, which templates raise to refuse messages."""


class Meter:
    """The remaining budget of one rendering."""

    def __init__(self, units: int, cpu_s: float) -> None:
        self._left, self._end_s = units, time.thread_time() + cpu_s

    def charge(self, units: int) -> None:
        """Subtract `units` plus STEP from the budget; TooMuch when it is exhausted."""
        self._left -= units + STEP
        if self._left < 0 or time.thread_time() > self._end_s:
            raise TooMuch(f"it builds more than {UNITS:,} characters or computes for more than {CPU_S:g} s")

    def charge_whole(self, value: Any) -> None:
        """Subtract the size of `value` as text; an object that it contains twice counts twice."""
        total, stack = 0, [value]
        while stack:
            one = stack.pop()
            total += STEP
            if isinstance(one, str):
                total += len(one)
            elif isinstance(one, int):
                total += one.bit_length() // 8
            elif isinstance(one, Mapping):
                stack += [*one.keys(), *one.values()]
            elif isinstance(one, (list, tuple, set, frozenset)):
                stack += one
            elif isinstance(one, range):
                total += len(one)
            elif isinstance(one, Namespace):
                stack.append(object.__getattribute__(one, "_Namespace__attrs"))
            if total > self._left:
                break
        self.charge(total)


_METER: ContextVar[Meter] = ContextVar("meter")


def metered(render: Callable[..., str], **variables: Any) -> str:
    """The text that `render` returns for `variables`; TooMuch when that exceeds the limits."""
    token = _METER.set(Meter(UNITS, CPU_S))
    try:
        return render(**variables)
    finally:
        _METER.reset(token)


def variables(environment: BoundedEnvironment, source: str) -> frozenset[str]:
    """The variables that the template `source` reads, without functions of the environment."""
    return frozenset(meta.find_undeclared_variables(environment.parsed(source)))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a meter at every step. Parse templates with `parsed`, which inserts the meter's calls."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, tojson: Callable[..., str]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, Generation],
            optimized=False,  # otherwise the compiler would evaluate constant expressions
            finalize=_written,
        )
        self.concat = _concatenated
        known = {**self.filters, "tojson": tojson}
        self.filters = {name: _bounded(name, known[name]) for name in _FILTERS}
        self.filters |= {"_walked": _walked, "_built": _built, "_joined": _joined}
        self.globals = {name: value for name, value in self.globals.items() if name != "lipsum"}

    def parsed(self, source: str) -> nodes.Template:
        """The syntax tree with calls of the meter at every loop, concatenation, display and slice."""
        if len(source) > SOURCE_CHARACTERS:
            raise TooMuch(f"it has {len(source):,} characters; at most {SOURCE_CHARACTERS:,} are read")
        return _Metering().visit(self.parse(source))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in the sandbox; for text and numbers, only methods whose cost is linear in their arguments."""
        if isinstance(obj, (str, bytes, int, float)) and not (isinstance(obj, str) and attr in _TEXT_METHODS):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The result of a function, macro or method; arguments and result are charged."""
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_method(method.__name__, owner, args, kwargs)
        _charge_arguments(args, kwargs)
        return _built(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator, after checking that its size is within limits."""
        del context
        _check_operands(operator, left, right)
        return _built(self.binop_table[operator](left, right))


class Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for masks in other libraries; it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - an instance variable of Extension

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metering(NodeTransformer):
    def __init__(self) -> None:
        self._depth, self._loops = 0, 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > DEEPEST:
            raise TooMuch(f"its expressions and blocks nest more than {DEEPEST} deep")
        try:
            return super().visit(node, *args, **kwargs)
        finally:
            self._depth -= 1

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._loops += 1
        if self._loops > DEEPEST_LOOPS:
            raise TooMuch(f"it has more than {DEEPEST_LOOPS} nested loops")
        self.generic_visit(node)
        self._loops -= 1
        node.iter = _through("_walked", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("_joined", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through("_built", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _through("_built", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through("_built", node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("_walked", node) if isinstance(node.arg, nodes.Slice) else node


def _through(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _walked(value: Any) -> Any:
    """`value`, charged for one iteration over it; a value without a length is charged while it is iterated."""
    if isinstance(value, Sized):
        _METER.get().charge(len(value))
        return value
    return _each(value) if isinstance(value, Iterator) else value


def _each(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _METER.get().charge(0)
        yield item


def _built(value: Any) -> Any:
    _METER.get().charge_whole(value)
    return _each(value) if isinstance(value, Iterator) else value


def _joined(values: list[Any]) -> str:
    _METER.get().charge_whole(values)
    return "".join(map(str, values))


def _concatenated(pieces: Iterable[str]) -> str:
    found = []
    for piece in pieces:
        _METER.get().charge(len(piece))
        found.append(piece)
    return "".join(found)


@pass_context  # otherwise the compiler would call it for constants
def _written(context: Context, value: Any) -> Any:
    del context
    _METER.get().charge_whole(value)
    return value


def _bounded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `call`; its arguments and its result are charged."""
    if name in _CONSTANT:
        return call
    kind = getattr(call, "jinja_pass_arg", None)  # if set, the first argument is the environment or the context

    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, *rest = args if kind is None else args[1:]
        _charge_arguments((value, *rest), kwargs)
        if isinstance(value, Iterator):  # its items were charged when they were made
            value = list(value)
            _METER.get().charge_whole(value)
        _check_filter(name, value, rest, kwargs)
        return _built(call(*args[: kind is not None], value, *rest, **kwargs))

    if kind is not None:
        bounded.jinja_pass_arg = kind  # type: ignore[attr-defined]
    return bounded


def _charge_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        _METER.get().charge_whole(value)


def _check_filter(name: str, value: Any, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    given = [*args, *kwargs.values()]
    if name == "replace":
        old, new = (str(kwargs.get(key, one)) for key, one in zip(("old", "new"), (*args, "", ""), strict=False))
        _check_method(name, str(value), (old, new), {})
    elif name == "join" and isinstance(value, Sized):
        _METER.get().charge(len(value) * max(map(_width, given), default=0))
    elif name == "format":
        _check_format(str(value), given)
    elif name in ("indent", "tojson"):
        lines = str(value).count("\n") + 1 if name == "indent" else len(repr(value))
        _METER.get().charge(lines * max(map(_width, given), default=0))
    elif name in ("batch", "slice", "round") and any(_width(one) > LARGEST_ARGUMENT for one in given):
        raise TooMuch(f"the filter {name} gets a number above {LARGEST_ARGUMENT:,}")


def _width(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return sum(map(_width, value)) if isinstance(value, (tuple, list)) else len(value) if isinstance(value, str) else 0


def _check_method(name: str, owner: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    cost = len(owner)
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        old, new = args[:2]
        cost += owner.count(old) * len(new) if old else (len(owner) + 1) * len(new)
    elif name == "join" and args and isinstance(args[0], Sized):
        cost *= len(args[0]) + 1
    elif name == "format":
        _check_format(owner, [*args, *kwargs.values()])
    _METER.get().charge(cost)


def _check_format(text: str, args: Sequence[Any]) -> None:
    """Raise TooMuch for large widths, and charge the largest possible result."""
    # A width is part of the format or, for `*` and `{:{}}`, an argument; every field may refer to the same argument.
    if _LONG_NUMBER.search(text):
        raise TooMuch("it formats with a number of four digits")
    if ("*" in text or _NESTED_FIELD.search(text)) and any(_width(one) > LARGEST_ARGUMENT for one in args):
        raise TooMuch(f"it formats with a number above {LARGEST_ARGUMENT:,}")
    size = sum(len(str(one)) for one in args if _METER.get().charge_whole(one) is None)
    _METER.get().charge((text.count("{") + text.count("%")) * (size + LARGEST_ARGUMENT))


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, (str, bytes)):
        _check_format(str(left), right if isinstance(right, tuple) else [right])
    elif operator == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(one, (str, bytes, list, tuple)) and isinstance(times, int):
                _METER.get().charge(max(0, times) * len(one))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * max(0, right) > _LARGEST_BITS:
            raise TooMuch(f"it computes a number of more than {_LARGEST_BITS:,} bits")
    if any(isinstance(one, int) and one.bit_length() > _LARGEST_BITS for one in (left, right)):
        raise TooMuch(f"it computes with a number of more than {_LARGEST_BITS:,} bits")
