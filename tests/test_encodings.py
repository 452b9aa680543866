"""Every text file that the package opens names its encoding: the locale's is another one on another machine."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "jaxroll"
MODES = frozenset("rwaxt+")


def unnamed(source: str) -> Iterator[int]:
    """The lines of `source` that open a file as text without an encoding, as far as the call shows it."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        owner, name = "", node.func
        if isinstance(name, ast.Attribute):
            owner, name = ast.unparse(name.value), ast.Name(name.attr)
        if isinstance(name, ast.Name) and _is_text(owner, name.id, node):
            yield node.lineno


def _is_text(owner: str, name: str, call: ast.Call) -> bool:
    if name in ("read_text", "write_text"):
        return bool(owner) and owner != "disk"  # which reads UTF-8 only
    if (owner, name) in (("", "open"), ("os", "fdopen")):
        return set(_mode(call, 1, "r")) <= MODES
    return name == "open" and bool(owner) and set(_mode(call, 0, "?")) <= MODES


def _mode(call: ast.Call, position: int, default: str) -> str:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] or call.args[position : position + 1]
    if not given:
        return default
    return given[0].value if isinstance(given[0], ast.Constant) and isinstance(given[0].value, str) else "?"


def test_every_text_file_has_a_named_encoding() -> None:
    gc.collect()  # a traceback that is formatted while Python 3.11 parses breaks the parse (python/cpython 106905)
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in unnamed(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"name the encoding: {found}"


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("open(p)", True), ("open(p, 'a+')", True), ("open(p, mode='w')", True), ("p.open('w')", True),
        ("p.read_text()", True), ("p.write_text(t)", True), ("os.fdopen(fd, 'w')", True),
        ("open(p, encoding='utf-8')", False), ("open(p, 'rb')", False), ("p.open('xb')", False),
        ("disk.read_text(p)", False), ("read_text(p)", False), ("ts.open(spec)", False), ("life.open()", False),
        ("p.read_text(encoding='utf-8')", False),
    ],
)  # fmt: skip
def test_calls_that_open_text_are_found(call: str, is_found: bool) -> None:
    assert bool(list(unnamed(call))) == is_found
