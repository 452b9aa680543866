"""Move and merge modules of the repository by a table, with every import, path and dotted name that refers to them.

    python .ci/restructure/move.py .ci/restructure/01_folders.txt

A line `store.core -> store.core.machine` moves a module of `jaxroll`, `a + b -> c` merges modules in this order,
`math.* -> algorithms.*` moves a package, `- schedule` removes a package's `__init__.py`, and
`tests/a.py -> tests/b.py` moves a file. Three more kinds of lines change single files, named by their paths before the
moves (`=`, `+`) or after them (`::`):

    @ jaxroll.a.b: b, bs                         after the moves each file imports this module by one name, the first
                                                 of these that the file does not use for something else
    = FILE: "old" => "new"                       replaces text (Python literals); "old" must be there, unless `=?`
    = FILE: "old" =>                             followed by the literal on the next line, if it is long
    + FILE: "text"                               creates a file
    FILE :: name, first..last -> OTHER | Title.  moves top-level definitions into a file, which is created if needed

A file of `benchmarks/` that was imported by its bare name (`from _report import …`) becomes a module of the package
`benchmarks`. Files in `KEPT` are not changed: their lines that name a moved file are printed instead.
Run `ruff check --fix` and `ruff format` afterwards.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

KEPT = {"benchmarks/RESULTS.md"}
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".ipynb", ".sh", ".json", ".txt", ".cfg", ""}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def file_of(module: str) -> Path:
    """The file of a dotted module in `jaxroll` or `tests`."""
    path = Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() and not path.with_suffix(".py").exists() else path.with_suffix(".py")


def rows(table: Path) -> Iterator[tuple[list[str], str]]:
    """(sources, target) as dotted modules or paths; an empty target removes the sources."""
    for line in table.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if not line or line.startswith(("= ", "=? ", "+ ", "@ ", "'", '"')) or " :: " in line:
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
    """The names that a module binds at its top level, except imports, with the statement of each."""
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


def filled(paragraph: str) -> list[str]:
    """The lines of a docstring's paragraph, filled again if one is too long for a comment; a table stays as it is."""
    lines = paragraph.splitlines()
    if "  " in paragraph or all(len(line) <= 118 for line in lines):
        return lines
    return textwrap.wrap(" ".join(lines), 118)


def merge(sources: list[str], target: str) -> None:
    """Write the modules `sources` into the file of `target`; references between them are resolved later.

    The file keeps the docstring of `target`, or of the first module if `target` is new. The docstrings of the others
    become comments above their parts. `if __name__ == "__main__"` goes to the end.
    """
    texts = [file_of(name).read_text() for name in sources]
    for i in range(1, len(texts)):
        known = {word for text in texts[:i] for word in definitions(text)}
        texts[i] = without(texts[i], known & set(definitions(texts[i])))
    parts = [split(text) for text in texts]
    leading = sources.index(target) if target in sources else 0
    doc, imports, body, ends = parts[leading][0], [], [], []
    for i, (part_doc, part_imports, part_rest) in enumerate(parts):
        imports += [line for line in part_imports if not imports or "__future__" not in line]
        text, _, end = part_rest.partition('\nif __name__ == "__main__":\n')
        ends += [f'if __name__ == "__main__":\n{end}'] if end else []
        title, *extra = part_doc.strip().splitlines()
        if i == leading:
            title, extra = title.partition(":")[0].partition("; ")[0], []
        extra = [line for part in "\n".join(extra[1:]).split("\n\n") for line in ["", *filled(part)]][1:]
        comment = f"# --- {title.rstrip('.')}\n"
        comment += "".join(f"# {line}".rstrip() + "\n" for line in (extra and ["", *extra]))
        body.append(text.strip("\n") + "\n" if i == leading == 0 else f"{comment}\n{text.strip(chr(10))}\n")
    body += ends
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
    taken |= {
        a.asname or a.name
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom)
        for a in n.names
        if f"{n.module}.{a.name}" not in moved
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and len(node.names) == 1 and node.names[0].name in moved:
            alias = node.names[0]
            package, _, base = moved[alias.name].rpartition(".")
            if package and not alias.asname and "." not in alias.name:
                renamed |= {alias.name: base} if base not in taken else {}
            elif not package or alias.asname is None:
                continue
            local = renamed.get(alias.name, alias.asname or alias.name)
            edit.replace(node, f"\0{len(imports)}\0")
            imports.append(f"from {package} import {base}" + (f" as {local}" if local != base else ""))
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
                if package == here:  # the name is now defined in this file
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


def with_one_alias(text: str, names: dict[str, list[str]]) -> str:
    """The text of a Python file that imports each of these modules by one name, the first one that is free.

    A merge leaves `from transfer import manifest as plan` and `from transfer import manifest as digest` in one file.
    """
    tree = ast.parse(text)
    aliases: dict[str, set[str]] = {}
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    bound |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} | set(definitions(text))
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            aliases.setdefault(full, set()).add(alias.asname or alias.name)
    edit = Edit(text)
    for module, wanted in names.items():
        mine = aliases.pop(module, set())
        if not mine - {wanted[0]} or mine & bound:
            continue
        others = bound.union(*aliases.values())
        name = next(name for name in [*wanted, *sorted(mine)] if name not in others)
        package, _, base = module.rpartition(".")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in mine:
                edit.replace(node, name)
            elif isinstance(node, ast.ImportFrom) and node.module == package:
                for alias in node.names:
                    if alias.name == base:
                        edit.replace(alias, base + (f" as {name}" if name != base else ""))
        aliases[module] = {name}
    return edit.done()


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def one_of(before: str, words: dict[str, str]) -> re.Pattern[str]:
    """A pattern for any of the words, the longest first, not within a longer word."""
    return re.compile(before + "(" + "|".join(map(re.escape, sorted(words, key=len, reverse=True))) + r")(?!\w)")


def restored(text: str, imports: list[str]) -> str:
    """The text with the placeholders replaced by the imports."""
    return re.sub("\0(\\d+)\0", lambda m: imports[int(m[1])], text)


def relocated(text: str, old: Path, new: Path, paths: dict[str, str]) -> str:
    """The text of a file with `Path(__file__)` expressions adapted to its new path and to those of its siblings."""
    deeper = len(new.parts) - len(old.parts)
    file = r"(?P<file>(?:pathlib\.)?Path\(__file__\)(?:\.resolve\(\))?)"

    def sibling(name: str, file: str) -> str:
        """An expression for the path of a file that was in the same folder."""
        target = Path(paths.get(str(old.parent / name), str(new.parent / name)))
        if target.parent == new.parent:
            return f'{file}.with_name("{target.name}")'
        up = next(k for k in range(len(new.parents)) if target.is_relative_to(new.parents[k]))
        return f'{file}.parents[{up}] / "{target.relative_to(new.parents[up])}"'

    if deeper:
        text = re.sub(
            file + r"\.parents\[(?P<up>\d+)\]", lambda m: f"{m['file']}.parents[{int(m['up']) + deeper}]", text
        )
        text = re.sub(
            file + r"(?P<up>(?:\.parent\b){2,})",
            lambda m: f"{m['file']}.parents[{m['up'].count('.parent') - 1 + deeper}]",
            text,
        )
    text = re.sub(file + r"\.with_name\(\"(?P<name>[^\"]+)\"\)", lambda m: sibling(m["name"], m["file"]), text)
    for variable in re.findall(r"^(\w+) = " + file + r"\.parent$", text, re.MULTILINE):
        used = re.compile(rf"\b{variable[0]} / \"([\w.]+)\"")
        for name in set(used.findall(text)):
            if (target := paths.get(str(old.parent / name))) is None:
                continue
            up = next(k for k in range(len(new.parents)) if Path(target).is_relative_to(new.parents[k]))
            path = f'{variable[0]}{".parent" * up} / "{Path(target).relative_to(new.parents[up])}"'
            text = text.replace(f'{variable[0]} / "{name}"', path)
    return text


def literal(text: str, following: str) -> str:
    """The string of a Python literal, on this line of a table or on the next one."""
    return ast.literal_eval(text.strip() or following.strip())


def edit_texts(table: Path) -> None:
    """Carry out the lines that replace text in a file or create one."""
    lines = table.read_text().splitlines()
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if line.startswith(("= ", "=? ")):
            name, _, rest = line.partition(" ")[2].partition(": ")
            old, _, new = rest.partition(" =>")
            path, old = Path(name), ast.literal_eval(old.strip())
            text = path.read_text()
            if old not in text and line.startswith("= "):
                raise SystemExit(f"{path} has no {old!r}")
            path.write_text(text.replace(old, literal(new, following)))
        elif line.startswith("+ "):
            name, _, rest = line[2:].partition(":")
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(literal(rest, following))
            git("add", name)


def spans(source: str) -> list[tuple[list[str], int, int]]:
    """(names, first line, last line) of each top-level statement that binds names, with the comment right above it."""
    lines, found = source.splitlines(), []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
            begin = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names, begin = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)], node.lineno
        else:
            continue
        while begin > 1 and lines[begin - 2].startswith("#"):
            begin -= 1
        found.append((names, begin, node.end_lineno or begin))
    return found


def used(source: str) -> set[str]:
    """The module's names that its statements use, without those that a function binds itself."""
    found, statements = set(), list(ast.parse(source).body)
    for statement in statements:
        nodes = list(ast.walk(statement))
        own = set()
        if isinstance(statement, ast.ClassDef):
            statements += statement.body
            nodes = [node for part in (*statement.bases, *statement.decorator_list) for node in ast.walk(part)]
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
            own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
            own |= {node.name for node in nodes[1:] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)} - own
    return found


def extract(path: Path, wanted: list[str], target: Path, title: str) -> dict[str, str]:
    """Move definitions from one file into another; return the new dotted names by the old ones."""
    source = path.read_text()
    known = spans(source)
    order = [name for names, _, _ in known for name in names]
    names: set[str] = set()
    for word in wanted:
        first, _, last = word.partition("..")
        if missing := [name for name in (first, last or first) if name not in order]:
            raise SystemExit(f"{path} has no {', '.join(missing)}")
        names |= set(order[order.index(first) : order.index(last or first) + 1])
    lines, body, gone = source.splitlines(keepends=True), [], set()
    last_end = 0
    for bound, begin, end in known:
        if set(bound) & names:
            names |= set(bound)
            if begin == last_end + 1:
                body[-1] += "".join(lines[begin - 1 : end])
            else:
                body.append("".join(lines[begin - 1 : end]))
            gone |= set(range(begin - 1, end))
            last_end = end
    rest = "".join(line for k, line in enumerate(lines) if k not in gone)
    rest = re.sub(r"(?:^# --- [^\n]*\n\s*)+(?=^# ---|\Z)", "", rest, flags=re.MULTILINE)
    moved_text = "\n\n".join(body)
    here, there = module_of(path), module_of(target)
    is_test = target.name.startswith("test_")
    if target.exists():  # identical definitions are not written twice
        there_already = definitions(target.read_text())
        same = {n for n in names & set(there_already) if there_already[n] == definitions(source)[n]}
        body = [text for text in body if not set(definitions(text)) <= same]
        moved_text = "\n\n".join(body)
        if clash := (set(definitions(moved_text)) & set(there_already)):
            raise SystemExit(f"{target} has another {', '.join(sorted(clash))}")
    if lost := used(moved_text) & (set(definitions(rest)) - names):
        raise SystemExit(f"{target} needs {', '.join(sorted(lost))}, which stays in {path}")
    if (back := used(rest) & names) and is_test:
        raise SystemExit(f"{path} needs {', '.join(sorted(back))}, which goes to {target}")
    doc, imports, _ = split(source)
    plain = [line for line in imports if "__future__" not in line]
    if target.exists():
        old_doc, old_imports, old_code = split(target.read_text())
        future = [line for line in old_imports if "__future__" in line]
        plain = list(dict.fromkeys([*(line for line in old_imports if "__future__" not in line), *plain]))
        doc, moved_text = old_doc, old_code + "\n\n" + moved_text
        plain = [line for line in plain if not re.match(rf"from {re.escape(there)} import ", line)]
    else:
        future, doc = [line for line in imports if "__future__" in line], title
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f'"""{doc}"""\n\n' + "".join(future) + "\n" + "".join(plain) + "\n\n" + moved_text)
    git("add", "-N", str(target))
    if not spans(rest):
        git("rm", "-qf", str(path))
    else:
        if back:
            line = f"from {there} import {', '.join(sorted(back))}\n"
            at = split(rest)[1][-1]
            rest = rest.replace(at, at + line, 1)
        path.write_text(rest)
    return {f"{here}.{name}": f"{there}.{name}" for name in names}


def extract_all(table: Path) -> None:
    """Carry out the lines that move definitions between files, and adapt imports and documents that name them."""
    for line in table.read_text().splitlines():
        if line.startswith("#") or " :: " not in line:
            continue
        name, _, rest = line.partition(" :: ")
        wanted, _, rest = rest.partition(" -> ")
        into, _, title = rest.partition(" | ")
        path, target = Path(name.strip()), Path(into.strip())
        moved = extract(path, [word.strip() for word in wanted.split(",")], target, title.strip())
        cited = one_of(r"(?<![\w/])", {f"{path}::{old.rpartition('.')[2]}": "" for old in moved})
        for file in tracked():
            text = file.read_text()
            rewritten, imports = text, []
            if file.suffix == ".py" and module_of(path) in text:
                rewritten, imports = rewrite(file, moved, module_of(file))
            new = restored(cited.sub(lambda m, to=str(target): to + m[0][m[0].index("::") :], rewritten), imports)
            if new != text:
                put(file, text, new)


def wrapped(text: str, width: int = 120) -> str:
    """The text of a Python file, with docstring lines that became too long broken at a space."""
    lines = text.split("\n")
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose |= set(range(node.lineno, node.end_lineno or 0))  # the first line stays whole
    for number in sorted(prose):
        line = lines[number]
        if len(line) <= width:
            continue
        at = line.rindex(" ", 0, width + 1)
        indent = line[: len(line) - len(line.lstrip())]
        rest = line[at + 1 :]
        lines[number] = line[:at]
        following = lines[number + 1] if number + 1 in prose else ""
        if following.strip(' "') and following[len(indent) : len(indent) + 1].strip() and rest[-3:] != '"""':
            lines[number + 1] = f"{indent}{rest} {following.strip()}"
        else:
            lines[number] += f"\n{indent}{rest}"
    return "\n".join(lines)


def put(path: Path, old: str, new: str) -> None:
    """Write a file; for a file in `KEPT` print the changes instead."""
    if str(path) not in KEPT:
        path.write_text(wrapped(new) if path.suffix == ".py" else new)
        return
    for number, (before, after) in enumerate(zip(old.splitlines(), new.splitlines(), strict=True), 1):
        if before != after:
            print(f"{path}:{number}: not changed; it should be:\n  {after}")


def tracked() -> list[Path]:
    """The text files of the repository except those of this folder."""
    found = []
    for path in map(Path, git("ls-files").splitlines()):
        if path.is_symlink() or path.suffix not in TEXT or not path.is_file():
            continue
        if path.parts[:2] == (".ci", "restructure"):
            continue
        try:
            path.read_text()
        except UnicodeDecodeError:
            continue
        found.append(path)
    return found


def program_names(text: str, flat: dict[str, str], paths: dict[str, str]) -> str:
    """The text with programs of `benchmarks/` called as modules instead of by path or bare name."""
    for old, module in flat.items():
        path = f"benchmarks/{old}.py"
        text = re.sub(rf"python {re.escape(path)}\b", f"python -m {module}", text)
        text = re.sub(rf"(?<!\w){re.escape(path)}(?= --)", f"python -m {module}", text)
        text = re.sub(rf'((?:import_module|load)\()"{old}"', rf'\1"{module_of(Path(paths[path]))}"', text)
        text = re.sub(rf"SCRIPTS={re.escape(path)}\b", f"BENCH={module.removeprefix('benchmarks.')}", text)
        if paths[path].endswith("/__main__.py"):
            text = re.sub(rf"(?<!\w){re.escape(path)}\b", str(Path(paths[path]).parent), text)
        if old.startswith("_"):
            text = re.sub(rf"python {old}\.py\b", f"python -m {module}", text)
            text = re.sub(rf'"{old}(?:\.py)?"', f'"{module}"', text)
            text = re.sub(rf"(?<![\w/.])({old})(?=:[\w{{])", module, text)
            text = re.sub(rf"(?<![\w/.\"]){old}\.py\b", paths[path], text)
    return text


def main(table: Path) -> None:
    edit_texts(table)
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
    flat = {
        Path(old).stem: module_of(Path(new)).removesuffix(".__main__")
        for old, new in paths.items()
        if old.startswith("benchmarks/") and old.count("/") == 1 and old.endswith(".py")
    }
    bare = {Path(old).stem: module_of(Path(new)) for old, new in paths.items() if Path(old).stem in flat}
    names = (
        re.compile(r"(?<![\w.])(" + "|".join(re.escape(k) for k in sorted(dotted, key=len, reverse=True)) + r")(?!\w)")
        if dotted
        else None
    )
    changed = {old: new for old, new in paths.items() if old != new and old.startswith("jaxroll/")}
    short = {old.removeprefix("jaxroll/"): new.removeprefix("jaxroll/") for old, new in changed.items()}
    files = one_of(r"(?<!\w)", paths)
    within = one_of(r"(?<![\w/.-])", short) if short else None  # paths within `jaxroll/`, as docs and tests name them
    everywhere = [path.name for path in map(Path, git("ls-files").splitlines())]
    mentioned = {
        Path(old).name: Path(new).name
        for old, new in paths.items()
        if old.startswith("tests/") and Path(old).name != Path(new).name and everywhere.count(Path(old).name) == 1
    }
    mentions = one_of(r"(?<![\w/.*])", mentioned) if mentioned else None
    for path in tracked():
        text = path.read_text()
        rewritten, imports = text, []
        mine = path.parts[0] == "benchmarks"
        if path.suffix == ".py":
            here = moved.get(module_of(path), module_of(path))
            rewritten, imports = rewrite(path, moved | bare if mine else moved, here)
            rewritten = relocated(rewritten, path, Path(paths.get(str(path), str(path))), paths)
        if flat and (mine or path.parts[0] != "jaxroll"):
            rewritten = program_names(rewritten, flat, paths)
        new = files.sub(lambda m: paths[m[1]], rewritten)
        new = within.sub(lambda m: short[m[1]], new) if within else new
        new = mentions.sub(lambda m: mentioned[m[1]], new) if mentions else new
        new = restored(names.sub(lambda m: dotted[m[1]], new) if dotted else new, imports)
        if new != text:
            put(path, text, new)
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
    extract_all(table)
    lines = [line[2:].partition(":") for line in table.read_text().splitlines() if line.startswith("@ ")]
    names = {module: [name.strip() for name in words.split(",")] for module, _, words in lines}
    for path in [path for path in tracked() if path.suffix == ".py"] if names else ():
        text = path.read_text()
        if any(module.rpartition(".")[2] in text for module in names):
            put(path, text, with_one_alias(text, names))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
