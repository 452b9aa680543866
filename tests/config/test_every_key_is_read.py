"""Every key of the config has an effect: it is read by name somewhere outside `jaxroll/config/`.

The tests search the source with `ast`. A read is `<section>.<key>` where the left side is known to be that section: an
attribute of that name (`config.store`, `self._config.store`), a variable that one was assigned to, or an argument
annotated with the section's class. Reads in functions of `jaxroll/config/` count if another package imports the
function (one reads the memory fractions); reads in the rules, which only refuse configs, do not count.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

import pytest

from jaxroll.config import Config
from jaxroll.config.parsing import leaves

PACKAGE = Path(__file__).parents[2] / "jaxroll"
WHITELIST: frozenset[str] = frozenset()
MOST_READERS = 4  # files outside `jaxroll/config/`; others get values derived from the key
# Keys above the limit, with their files; the numbers may only fall. A predicate of one key (`is_compact`) derives
# nothing, so the files that ask it count as readers of its key.
READ_IN_MORE = {"sft.steps": 5, "task.prompt_style": 6}

Kinds = dict[str, type]  # expression, as written → the dataclass it holds


@functools.cache
def hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def sections(kind: type = Config, prefix: str = "") -> dict[type, list[str]]:
    """The dotted prefixes of each dataclass of the schema: MeshConfig has three."""
    found: dict[type, list[str]] = {kind: [prefix]}
    for field in fields(kind):
        hint = hints(kind)[field.name]
        if is_dataclass(hint):
            for inner, prefixes in sections(cast(type, hint), f"{prefix}{field.name}.").items():
                found.setdefault(inner, []).extend(prefixes)
    return found


SECTIONS = sections()
ALL_KEYS = frozenset(leaves(Config))
CLASSES = {kind.__name__: kind for kind in SECTIONS}
NAMED = {
    prefix.rstrip(".").rpartition(".")[2]: kind for kind, prefixes in SECTIONS.items() for prefix in prefixes if prefix
}


def kind_of(node: ast.AST, known: Kinds) -> type | None:
    """The dataclass of the schema that an expression holds."""
    if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in known:
        return known[ast.unparse(node)]
    if isinstance(node, ast.Attribute):
        inner = kind_of(node.value, known)
        if inner is not None:
            hint = hints(inner).get(node.attr)
            return cast(type, hint) if is_dataclass(hint) else None
        return NAMED.get(node.attr) if node.attr not in hints(Config) or _looks_like_a_config(node.value) else None
    return None


def _looks_like_a_config(node: ast.AST) -> bool:
    """True for `config`, `cfg`, `x.config`, `self._config`, which are whole configs even without an annotation."""
    return ast.unparse(node).rpartition(".")[2].lstrip("_") in ("config", "cfg")


def bindings(tree: ast.AST) -> Kinds:
    """The kinds of the names of one file, from annotations and assignments."""
    known, nodes = dict[str, type](), list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            if (kind := CLASSES.get(ast.unparse(node.annotation))) is not None:
                known[name] = kind
    for _ in range(2):  # a name may be assigned from another name
        for node in nodes:
            for target, value in assigned(node):
                if (kind := kind_of(value, known)) is not None:
                    known[ast.unparse(target)] = kind
    return known


def assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(target, value) of an assignment, also of `a, b = c, d`."""
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def reads(tree: ast.AST) -> set[tuple[type, str]]:
    """(dataclass, key) of every value that is read in one file."""
    known = bindings(tree)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            kind = kind_of(node.value, known)
            if kind is not None and node.attr in hints(kind):
                found.add((kind, node.attr))
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def reads_of(path: Path) -> set[tuple[type, str]]:
    return reads(parsed(path))


def imported_from_config(files: Iterable[Path]) -> set[str]:
    """Names that the files import from jaxroll.config and its modules."""
    found = set()
    for path in files:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxroll.config"):
                found |= {alias.name for alias in node.names}
    return found


def keys_read(package: Path) -> set[str]:
    """The dotted keys that `package` reads outside its config/."""
    outside = [path for path in package.rglob("*.py") if "config" not in path.relative_to(package).parts[:-1]]
    used = {name for name in imported_from_config(outside) if not name.startswith("check")}
    found = {pair for path in outside for pair in reads_of(path)}
    for path in (package / "config").glob("*.py"):
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef) and node.name in used:
                found |= reads(node)
    return {f"{prefix}{key}" for kind, key in found for prefix in SECTIONS[kind]}


def keys_among(found: Iterable[tuple[type, str]]) -> set[str]:
    """The dotted keys with a value of their own among these reads."""
    return {f"{prefix}{key}" for kind, key in found for prefix in SECTIONS[kind]} & ALL_KEYS


def predicates(package: Path) -> dict[str, set[str]]:
    """The key of each function of config/derived.py that only tells whether one key has a value."""
    found = {}
    for node in parsed(package / "config" / "derived.py").body:
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or node) == "bool":
            keys, calls = keys_among(reads(node)), any(isinstance(inner, ast.Call) for inner in ast.walk(node))
            if len(keys) == 1 and not calls:
                found[node.name] = keys
    return found


def readers(package: Path) -> dict[str, int]:
    """The number of files outside config/ that read each key, also by a predicate."""
    found: dict[str, int] = {}
    asked = predicates(package)
    for path in package.rglob("*.py"):
        if "config" not in path.relative_to(package).parts[:-1]:
            keys = keys_among(reads_of(path))
            for name in imported_from_config([path]) & asked.keys():
                keys |= asked[name]
            for key in keys:
                found[key] = found.get(key, 0) + 1
    return found


def test_a_key_is_read_in_few_files() -> None:
    above = {key: count for key, count in readers(PACKAGE).items() if count > MOST_READERS}
    assert above == READ_IN_MORE, "pass derived values (config/derived.py) instead of reading a key in another file"


def test_predicates_of_one_key_are_found() -> None:
    assert set(predicates(PACKAGE)) == {"has_warm_start", "is_compact", "one_version"}


def test_every_key_is_read_outside_the_config_package() -> None:
    unread = set(leaves(Config)) - keys_read(PACKAGE) - WHITELIST
    assert not unread, f"keys without a reader: {', '.join(sorted(unread))}"


@pytest.mark.parametrize(
    "text",
    [
        "def f(config: Config): return config.store.lease_s",
        "def f(config): s = config.store; return s.lease_s",
        "class A:\n def __init__(self, c: Config): self.made = c\n def f(self): self.made.store.lease_s",
        "def f(store: StoreConfig): return store.lease_s",
        "def f(session):\n a, b = session.config.run, session.config.store\n return b.lease_s",
    ],
)
def test_reads_are_found(text: str) -> None:
    assert (CLASSES["StoreConfig"], "lease_s") in reads(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "def f(settings): return settings.lease_s",  # not a section of the config
        "def f(config): return config.store.lease",
        "def f(config): config.store.lease_s = 3",
        "def f(run): return run.store.lease_s",  # a run's store is not a config
        "def f(config): return config.schedule.lease_s",
    ],
)
def test_other_expressions_are_not_reads(text: str) -> None:
    assert (CLASSES["StoreConfig"], "lease_s") not in reads(ast.parse(text))


def test_a_key_without_a_reader_is_found(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "rules.py").write_text("def check(c: Config):\n    return c.run.seed\n")
    (tmp_path / "a.py").write_text("def f(config):\n    return config.run.name\n")
    assert keys_read(tmp_path) == {"run.name"}
