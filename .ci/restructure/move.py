"""Move and merge modules of the repository by a table, with every import, path and dotted name that refers to them.

    python .ci/restructure/move.py .ci/restructure/01_folders.txt

A line `store.core -> store.core.machine` moves a module of `jaxroll`, `a + b -> c` merges modules in this order,
`math.* -> algorithms.*` moves a package, `- schedule` removes a package's `__init__.py`, and
`tests/a.py -> tests/b.py` moves a file. Run `ruff check --fix` and `ruff format` afterwards.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

HERE = Path(".ci/restructure")
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".ipynb", ".sh", ".json", ".txt", ".cfg", ""}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def file_of(module: str) -> Path:
    """The file of a dotted module, `jaxroll.` and `tests.` included."""
    path = Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() and not path.with_suffix(".py").exists() else path.with_suffix(".py")


def rows(table: Path) -> Iterator[tuple[list[str], str]]:
    """(sources, target) as dotted modules or paths; the target '' removes."""
    for line in table.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        if line.startswith("- "):
            yield [f"jaxroll.{line[2:]}"], ""
            continue
        left, _, right = (part.strip() for part in line.partition("->"))
        if "/" in left:
            for path in sorted(map(str, Path().glob(left))) if "*" in left else [left]:
                yield [path], right.rstrip("/") + "/" + Path(path).name if right.endswith("/") else right
        elif left.endswith(".*"):
            package, into = left[:-2], right[:-2]
            folder = Path("jaxroll", *package.split("."))
            for path in sorted(folder.glob("*.py")):
                stem = path.stem
                if stem == "__init__":
                    yield [f"jaxroll.{package}"], f"jaxroll.{into}"
                else:
                    yield [f"jaxroll.{package}.{stem}"], f"jaxroll.{into}.{stem}"
        else:
            yield [f"jaxroll.{name.strip()}" for name in left.split("+")], f"jaxroll.{right}"


def split(source: str) -> tuple[str, list[str], str]:
    """(docstring, top-level import statements, the rest) of a module."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    doc, taken, imports = ast.get_docstring(tree, clean=False) or "", set(), []
    for i, node in enumerate(tree.body):
        span = range(node.lineno - 1, node.end_lineno or node.lineno)
        if i == 0 and doc:
            taken |= set(span)
        elif isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            imports.append("".join(lines[k] for k in span))
            taken |= set(span)
    rest = "".join(line for k, line in enumerate(lines) if k not in taken)
    return doc, imports, rest.strip("\n") + "\n"


def definitions(source: str) -> dict[str, str]:
    """The names that a module binds at its top level with the statement of each, imports left out."""
    names = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)):
                names[name] = ast.unparse(node)
    return names


def without(source: str, names: set[str]) -> str:
    """The module without the top-level assignments of these names."""
    lines, gone = source.splitlines(keepends=True), set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and {ast.unparse(t) for t in node.targets} <= names:
            gone |= set(range(node.lineno - 1, node.end_lineno or node.lineno))
    return "".join(line for k, line in enumerate(lines) if k not in gone)


def collisions(sources: list[str]) -> list[str]:
    """Names that two of the modules define differently."""
    seen: dict[str, tuple[str, str]] = {}
    found = []
    for name in sources:
        for word, statement in definitions(file_of(name).read_text()).items():
            if word in seen and (seen[word][1] != statement or statement.startswith(("def", "class", "async", "@"))):
                found.append(f"{word} is defined in {seen[word][0]} and in {name}")
            seen.setdefault(word, (name, statement))
    return found


def merge(sources: list[str], target: str) -> None:
    """Write the modules `sources` into the file of `target`, whose references to one another are resolved later."""
    texts = [file_of(name).read_text() for name in sources]
    for i in range(1, len(texts)):
        known = {word for text in texts[:i] for word in definitions(text)}
        texts[i] = without(texts[i], known & set(definitions(texts[i])))
    doc, imports, rest = split(texts[0])
    body = [rest]
    for text in texts[1:]:
        more_doc, more, more_rest = split(text)
        imports += [line for line in more if "__future__" not in line]
        title = more_doc.strip().splitlines()[0].rstrip(".")
        extra = [wrapped for line in more_doc.strip().splitlines()[2:] for wrapped in textwrap.wrap(line, 118) or [""]]
        comment = f"# --- {title}\n" + "".join(f"# {line}".rstrip() + "\n" for line in (extra and ["", *extra]))
        body.append(f"{comment}\n{more_rest}")
    future = [line for line in imports if "__future__" in line][:1]
    others = list(dict.fromkeys(line for line in imports if "__future__" not in line))
    first = file_of(sources[0])
    out = Path(*target.split(".")).with_suffix(".py")
    out.parent.mkdir(parents=True, exist_ok=True)
    git("mv", "-f", str(first), str(out)) if first != out else None
    for name in sources[1:]:
        if file_of(name) != out:
            git("rm", "-qf", str(file_of(name)))
    out.write_text(f'"""{doc}"""\n\n' + "".join(future) + "\n" + "".join(others) + "\n\n" + "\n\n".join(body))


class Edit:
    """Replacements in one source text, by position."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._changes: list[tuple[int, int, str]] = []

    def replace(self, node: ast.AST, text: str) -> None:
        begin = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        self._changes.append((begin, end, text))

    def done(self) -> str:
        data = self.source.encode()
        for begin, end, text in sorted(self._changes, reverse=True):
            data = data[:begin] + text.encode() + data[end:]
        return data.decode()


def rewrite(path: Path, moved: dict[str, str], here: str) -> tuple[str, list[str]]:
    """The text of a Python file with `\\0n\\0` in place of its n-th `from … import`, and these, rewritten."""
    source = path.read_text()
    edit, renamed, dropped, imports = Edit(source), {}, set(), []
    tree = ast.parse(source)
    taken = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    taken |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} | set(definitions(source))
    taken |= {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names
              if f"{n.module}.{a.name}" not in moved}  # fmt: skip
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
            continue
        groups: dict[str, list[str]] = {}
        changed = moved.get(node.module, node.module) != node.module
        for alias in node.names:
            full, local = f"{node.module}.{alias.name}", alias.asname or alias.name
            if full in moved:
                changed = True
                package, _, base = moved[full].rpartition(".")
                if moved[full] == here:
                    dropped.add(local)
                    continue
                if alias.asname:
                    base += f" as {alias.asname}"
                elif base != alias.name and base not in taken and alias.name not in taken:
                    renamed[alias.name] = base
                elif base != alias.name:
                    base += f" as {alias.name}"
                groups.setdefault(package, []).append(base)
            else:
                package = moved.get(node.module, node.module)
                if package == here:  # a name of a module that is this file now
                    changed = True
                    continue
                groups.setdefault(package, []).append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
        text = ast.get_source_segment(source, node) or ""
        if changed:
            pad = "\n" + " " * node.col_offset
            text = pad.join(f"from {package} import {', '.join(names)}" for package, names in groups.items())
            text = text or ("pass" if node.col_offset else "")
        edit.replace(node, f"\0{len(imports)}\0")
        imports.append(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in dropped:
            edit.replace(node, node.attr)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in renamed:
            edit.replace(node, renamed[node.id])
    return edit.done(), imports


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def one_of(before: str, words: dict[str, str]) -> re.Pattern[str]:
    """A pattern for any of the words, the longest first, not within a longer word."""
    return re.compile(before + "(" + "|".join(map(re.escape, sorted(words, key=len, reverse=True))) + r")(?!\w)")


def restored(text: str, imports: list[str]) -> str:
    """The text with its imports in their places again."""
    return re.sub("\0(\\d+)\0", lambda m: imports[int(m[1])], text)


def main(table: Path) -> None:
    plan = list(rows(table))
    moved: dict[str, str] = {}
    paths: dict[str, str] = {}
    merged: set[str] = set()
    for sources, target in plan:
        if "/" in sources[0]:
            paths[sources[0]] = target
        elif target:
            for name in sources:
                moved[name] = target
                paths[str(file_of(name))] = str(Path(*target.split(".")).with_suffix(".py"))
    if found := [line for sources, target in plan if len(sources) > 1 for line in collisions(sources)]:
        raise SystemExit("rename first:\n" + "\n".join(found))
    for old, new in list(paths.items()):
        if old.startswith("tests/") and old.endswith(".py") and new.endswith(".py"):
            moved[old[:-3].replace("/", ".")] = new[:-3].replace("/", ".")
    dotted = {k: v for k, v in moved.items() if k != v}
    names = (
        re.compile(r"(?<![\w.])(" + "|".join(re.escape(k) for k in sorted(dotted, key=len, reverse=True)) + r")(?!\w)")
        if dotted
        else None
    )
    files = re.compile(
        r"(?<![\w])(" + "|".join(re.escape(k) for k in sorted(paths, key=len, reverse=True)) + r")(?!\w)"
    )
    everything = [Path(line) for line in git("ls-files").splitlines()]
    for path in everything:
        if (
            path.is_symlink()
            or path.suffix not in TEXT
            or not path.is_file()
            or path.parts[:2] == (".ci", "restructure")
        ):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        rewritten, imports = text, []
        if path.suffix == ".py":
            rewritten, imports = rewrite(path, moved, moved.get(module_of(path), module_of(path)))
        new = files.sub(lambda m: paths[m[1]], rewritten)
        new = restored(names.sub(lambda m: dotted[m[1]], new) if dotted else new, imports)
        if new != text:
            path.write_text(new)
    for sources, target in plan:
        if "/" in sources[0]:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            git("mv", sources[0], target)
        elif not target:
            git("rm", "-qf", str(file_of(sources[0])))
        elif len(sources) > 1:
            merge(sources, target)
            merged.add(target)
        else:
            old = file_of(sources[0])
            new = (
                Path(*target.split(".")) / "__init__.py"
                if old.name == "__init__.py"
                else Path(*target.split(".")).with_suffix(".py")
            )
            if old != new:
                new.parent.mkdir(parents=True, exist_ok=True)
                git("mv", str(old), str(new))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
