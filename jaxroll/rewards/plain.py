"""Plain programs: they use a part of Python that reaches nothing but its own data, so that many share one process.

The fork server forks once for a batch of programs (mode "B"), and `outcomes` runs those of them that are plain, one
after the other, in that fork. `is_plain` allows the syntax in `_NODES`, the functions in `_BUILTINS`, the methods in
`_METHODS`, and nothing else: no import, no class, no exception handler, no other attribute, no name that begins with
two underscores. Each program gets its own globals, stdin and stdout. It cannot name an object of another program, a
frame or a module, and every type and function that it can name is immutable. None of its code runs after its end:
without classes and exception handlers, nothing of it is called when its objects are freed.

The outcome of a program does not depend on the others of its batch either. These programs have no outcome here and run
again, each in a process of its own:

- those that are not plain, print much, or print the address of an object, which depends on earlier allocations;
- those that run out of memory or stack, or past the time limit of the batch, and all programs after them;
- those whose turn comes later than `BATCH_S`.

The kernel restricts the process of a batch as it restricts that of a single program. Like `fork_server`, which executes
this module, it imports nothing of JaxRoll.
"""

import _ast
import builtins
import sys
import time
from _ast import Attribute, Constant, Load, Name, PyCF_ONLY_AST
from _io import BytesIO, TextIOWrapper

MAX_PROGRAMS = 64
MAX_SOURCE_CHARS, MAX_INPUT_BYTES, MAX_OUTPUT_BYTES = 4096, 4096, 8192  # of one program
BATCH_S = 0.05  # of processor time: no program of a batch starts later than this
FINISHED, FAILED, ALONE = range(3)  # well; with an exception; it has to run in its own process

_NODES = frozenset(
    getattr(_ast, name)
    for name in (  # noqa: SIM905
        "Module Expr Assign AugAssign AnnAssign For While If FunctionDef Return Pass Break Continue Delete Global "
        "Nonlocal Assert arguments arg keyword comprehension BoolOp And Or NamedExpr BinOp UnaryOp Lambda IfExp Dict "
        "Set ListComp SetComp DictComp GeneratorExp Compare Call JoinedStr FormattedValue Attribute Subscript Starred "
        "List Tuple Slice Load Store Del Add Sub Mult Div Mod Pow LShift RShift BitOr BitXor BitAnd FloorDiv Invert "
        "Not UAdd USub Eq NotEq Lt LtE Gt GtE Is IsNot In NotIn"
    ).split()
)
_METHODS = frozenset(
    (  # noqa: SIM905
        "add append capitalize center clear copy count difference discard endswith extend find get index insert "
        "intersection isalnum isalpha isdecimal isdigit islower isnumeric isspace issubset issuperset istitle isupper "
        "items join keys ljust lower lstrip partition pop popitem remove removeprefix removesuffix replace reverse "
        "rfind rindex rjust rpartition rsplit rstrip setdefault sort split splitlines startswith strip swapcase "
        "symmetric_difference title union update upper values zfill"
    ).split()
)
_BUILTINS = {
    name: getattr(builtins, name)
    for name in (  # noqa: SIM905
        "abs all any bin bool chr dict divmod enumerate filter float frozenset hex input int isinstance iter len list "
        "map max min next oct ord pow print range repr reversed round set slice sorted str sum tuple zip"
    ).split()
}
_REFUSED = frozenset(dir(builtins)) - frozenset(_BUILTINS)


def is_plain(tree: _ast.AST) -> bool:
    """True if the program can neither reach nor leave anything outside its own names, stdin and stdout."""
    nodes: list = [tree]
    for node in nodes:  # the list grows
        kind = type(node)
        if kind is Name:
            name = node.id
            if name == "__name__" and type(node.ctx) is Load:
                continue
            if name in _REFUSED or name[:2] == "__":
                return False
        elif kind in _NODES:
            if kind is Attribute and node.attr not in _METHODS:
                return False
            for field in node._fields:
                value = getattr(node, field)
                if type(value) is list:
                    nodes += value
                else:
                    nodes.append(value)
        elif kind is str:  # an identifier, as the parser has normalized it
            if node[:2] == "__":
                return False
        elif kind is not Constant and kind is not int and node is not None:
            return False
    return True


def outcomes(batch: bytes) -> bytes:
    """Run a batch: for each program its size, the size of its input, and both. Return as many records as programs have
    run: one byte, four for the size of the output, the output."""
    found, place, streams = b"", 0, (sys.stdin, sys.stdout)
    end_s = time.process_time() + BATCH_S
    while place < len(batch) and time.process_time() < end_s:
        given = place + 8 + int.from_bytes(batch[place : place + 4], "little")
        end = given + int.from_bytes(batch[place + 4 : place + 8], "little")
        try:
            status, output = _outcome(batch[place + 8 : given], batch[given:end])
        except BaseException:  # noqa: BLE001 - out of memory or stack: this process is not as it was
            break
        found += bytes((status,)) + len(output).to_bytes(4, "little") + output
        place = end
    sys.stdin, sys.stdout = streams
    return found


def _outcome(source: bytes, given: bytes) -> tuple[int, bytes]:
    output = BytesIO()
    sys.stdin = TextIOWrapper(BytesIO(given), "utf-8", "surrogateescape", "\n")
    sys.stdout = TextIOWrapper(output, "utf-8", "surrogateescape", "\n")
    status = FINISHED
    try:
        text = source.decode("utf-8", "surrogatepass")
        tree = compile(text, "<program>", "exec", PyCF_ONLY_AST, True)
        if not is_plain(tree):
            return ALONE, b""
        checked = compile(tree, "<program>", "exec", 0, True)  # pyright: ignore[reportArgumentType, reportCallIssue]
        exec(checked, {"__builtins__": _BUILTINS.copy(), "__name__": "__main__"})
        sys.stdout.flush()
    except (MemoryError, RecursionError, SystemError):
        raise
    except Exception:  # noqa: BLE001 - the program may raise anything
        status = FAILED
    printed = output.getvalue()
    return (ALONE, b"") if len(printed) > MAX_OUTPUT_BYTES or b" at 0x" in printed else (status, printed)
