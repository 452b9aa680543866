"""Check the prose of this repository: find words and phrases that have a plainer replacement.

    python .ci/prose.py                           all files of the repository
    python .ci/prose.py jaxroll/store README.md   some folders and files
    python .ci/prose.py --summary                 counts per package and per rule

The rules are in `.ci/prose.toml`. The check reads

- Python files: docstrings, comments, and string literals of at least three words,
- Markdown, and the cells of notebooks,
- the Makefile and shell scripts: comments and quoted strings; TOML and YAML files: comments.

It skips code fences, inline code, link targets, replacement fields of f-strings, byte strings, and string literals that
hold SQL or a Python program. Exit code: 0 without complaints, else 1.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
RULES = Path(__file__).with_suffix(".toml")

# A whole text is prose, or a docstring; a function's docstring may begin in fewer ways than others.
Kind = Literal["text", "docstring", "function docstring"]
SCOPES: dict[str, tuple[Kind, ...]] = {
    "phrases": ("text", "docstring", "function docstring"),
    "docstring_openings": ("docstring", "function docstring"),
    "function_openings": ("function docstring",),
}


# --- rules and complaints


@dataclass(frozen=True)
class Rule:
    """A regular expression for what to avoid, the plain text to write, and an example that the rule finds."""

    find: str
    write: str
    example: str
    kinds: tuple[Kind, ...] = SCOPES["phrases"]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """`find` as whole words in any case, where a space matches any white space; openings only at the start."""
        words = self.find.replace(" ", r"\s+")
        start = r"(?<![\w-])" if "text" in self.kinds else r"\A\s*"
        return re.compile(rf"{start}(?P<phrase>{words})(?![\w-])", re.I)


@dataclass(frozen=True)
class Complaint:
    path: Path
    line: int
    phrase: str
    rule: Rule

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: "{self.phrase}" -> {self.rule.write}'


def read_rules(path: Path = RULES) -> list[Rule]:
    """The rules of all scopes in the data file."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Rule(*row, kinds=kinds) for scope, kinds in SCOPES.items() for row in table[scope]]


def complaints(path: Path, rules: Sequence[Rule]) -> list[Complaint]:
    """Complaints about one file, in the order of its lines; at most one where several rules match the same words."""
    found: dict[tuple[int, str], Complaint] = {}
    for passage in passages(path):
        program: bool | None = None
        for rule in rules:
            if passage.kind not in rule.kinds:
                continue
            for match in rule.pattern.finditer(passage.text):
                if program is None:
                    program = passage.kind == "text" and path.suffix == ".py" and is_program(passage.text)
                if program:
                    break
                line = passage.line(match.start("phrase"))
                phrase = " ".join(match["phrase"].split())
                found.setdefault((line, phrase), Complaint(path, line, phrase, rule))
    return sorted(found.values(), key=lambda complaint: complaint.line)


# --- passages


@dataclass(frozen=True)
class Passage:
    """A text without its code: pieces in the order of the source, each with the line on which it starts."""

    pieces: tuple[tuple[int, str], ...]
    kind: Kind = "text"

    @cached_property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for _, text in self.pieces[:-1]:
            starts.append(starts[-1] + len(text))
        return starts

    def line(self, offset: int) -> int:
        """Line in the file of the character at `offset` of `text`."""
        index = bisect_right(self._starts, offset) - 1
        first, text = self.pieces[index]
        return first + text.count("\n", 0, offset - self._starts[index])


def passages(path: Path) -> Iterator[Passage]:
    """Passages of one file; none for a file of another type than those listed at the top."""
    if path.suffix not in (".py", ".md", ".ipynb", ".sh", ".toml", ".yml", ".yaml", ""):
        return
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from python_passages(source)
    elif path.suffix == ".md":
        yield markdown_passage(source)
    elif path.suffix == ".ipynb":
        yield from notebook_passages(source)
    elif path.suffix in (".toml", ".yml", ".yaml"):
        yield from line_passages(source, _COMMENT)
    elif path.suffix == ".sh" or path.name == "Makefile" or source.startswith("#!"):
        yield from line_passages(source, _SHELL_TEXT)


_BLANK = "¤"  # in place of a character of code, so that a match keeps its line
_CODE = re.compile(r"(?s:(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`))|https?://[^\s)>\"']+")
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n]*\n.*?(?:^[ \t]*\1[ \t]*$|\Z)", re.M | re.S)
_TARGET = re.compile(r"(?<=\])\([^()\s]*\)")
_COMMENT = re.compile(r"(?:^|\s)#+\s(.*)")
_SHELL_TEXT = re.compile(r"(?:^|\s)#+\s(.*)|\"([^\"]*)\"")


def blank(text: str) -> str:
    return re.sub(r"[^\n]", _BLANK, text)


def without_code(text: str) -> str:
    """`text` with its inline code and addresses replaced by as many characters that no rule matches."""
    return _CODE.sub(lambda match: blank(match[0]), text) if "`" in text or "http" in text else text


def markdown_passage(source: str, first_line: int = 1) -> Passage:
    for code in (_FENCE, _TARGET):
        source = code.sub(lambda match: blank(match[0]), source)
    return Passage(((first_line, without_code(source)),))


def notebook_passages(source: str) -> Iterator[Passage]:
    """Passages of the cells; lines are those of the JSON file, which holds each line of a cell on its own line."""
    raw = source.splitlines()
    position = 0
    for cell in json.loads(source)["cells"]:
        numbers = []
        for text in cell["source"]:
            quoted = json.dumps(text, ensure_ascii=False)
            position = next((n for n in range(position, len(raw)) if raw[n].strip(" ,") == quoted), position) + 1
            numbers.append(position)
        text = "".join(cell["source"])
        found = [markdown_passage(text)] if cell["cell_type"] == "markdown" else python_passages(text)
        for passage in found if numbers else ():
            pieces = []
            for line, piece in passage.pieces:
                for offset, part in enumerate(piece.splitlines(keepends=True)):
                    pieces.append((numbers[min(line + offset, len(numbers)) - 1], part))
            yield Passage(tuple(pieces), passage.kind)


def line_passages(source: str, text: re.Pattern[str]) -> Iterator[Passage]:
    """Matches of `text` in each line; comments on adjacent lines are one passage."""
    comment: list[tuple[int, str]] = []
    for number, line in enumerate(source.splitlines(), 1):
        for match in text.finditer(line):
            content = without_code(match[match.lastindex or 0])
            if "#" not in match[0][:2]:
                if len(_WORD.findall(content)) >= 3:
                    yield Passage(((number, content),))
                continue
            if comment and number != comment[-1][0] + 1:
                yield Passage(tuple(comment))
                comment = []
            comment.append((number, content + "\n"))
    if comment:
        yield Passage(tuple(comment))


# --- Python

_TOKEN = re.compile(
    r"""\#(?P<comment>[^\n]*)
      | (?P<prefix>\b[A-Za-z]{1,2}(?=["']))?(?P<quote>\"{3}|'{3}|["'])
        (?P<body>(?:[^\\"']+|\\.|(?!(?P=quote)).)*)(?P=quote)""",
    re.S | re.X,
)
_ESCAPE = re.compile(r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|N\{[^}]*\}|.)", re.S)
_WORD = re.compile(r"(?<![\w.])[^\W\d_]+(?![\w(])")
_SQL = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|DROP|ALTER|PRAGMA|WITH)\b")


def python_passages(source: str, first_line: int = 1) -> Iterator[Passage]:
    """Comments (adjacent lines together), docstrings and other string literals (adjacent ones together)."""
    kinds = docstring_kinds(source)
    comment: list[tuple[int, str]] = []
    literal: list[tuple[int, str]] = []
    kind: Kind = "text"
    line, counted, end = first_line, 0, 0
    for token in _TOKEN.finditer(source):
        line += source.count("\n", counted, token.start())
        counted = token.start()
        if token["comment"] is not None:
            alone = not source[source.rfind("\n", 0, token.start()) + 1 : token.start()].strip()
            if comment and not (alone and line == comment[-1][0] + 1):
                yield Passage(tuple(comment))
                comment = []
            comment.append((line, without_code(token["comment"]) + "\n"))
            continue
        if literal and re.sub(r"#[^\n]*|\\\n", "", source[end : token.start()]).strip():
            yield from literal_passage(literal, kind)
            literal = []
        if not literal:
            kind = kinds.get(line - first_line + 1, "text")
        end = token.end()
        prefix = (token["prefix"] or "").lower()
        if "b" in prefix:
            continue
        body = token["body"]
        if "f" in prefix:
            body, fields = without_fields(body)
            for offset, field in fields:
                yield from python_passages(field, line + body.count("\n", 0, offset))
        if "r" not in prefix:
            body = _ESCAPE.sub(unescaped, body)
        literal.append((line, body))
    if comment:
        yield Passage(tuple(comment))
    yield from literal_passage(literal, kind)


def literal_passage(pieces: Sequence[tuple[int, str]], kind: Kind) -> Iterator[Passage]:
    """The passage of adjacent string literals; none for an identifier, a label of one or two words, and SQL."""
    passage = Passage(tuple((line, without_code(text)) for line, text in pieces), kind)
    if kind != "text" or (len(_WORD.findall(passage.text)) >= 3 and not _SQL.match(passage.text)):
        yield passage


def unescaped(match: re.Match[str]) -> str:
    """The character of an escape sequence, or spaces, padded to the sequence's length."""
    if match[1] == "\n":
        return " \n"
    return " " + match[1] if match[1] in "\"'\\" else " " * len(match[0])


def without_fields(body: str) -> tuple[str, list[tuple[int, str]]]:
    """The body of an f-string with blanks for its replacement fields, and the fields with their offsets."""
    text, fields, depth, start = list(body.replace("{{", "  ").replace("}}", "  ")), [], 0, 0
    for index, character in enumerate("".join(text)):
        if character == "{":
            start = index if depth == 0 else start
            depth += 1
        elif character == "}" and depth:
            depth -= 1
            if depth == 0:
                fields.append((start, body[start : index + 1]))
                text[start : index + 1] = blank(body[start : index + 1])
    return "".join(text), fields


def docstring_kinds(source: str) -> dict[int, Kind]:
    """Kinds of the docstrings in `source` by the line on which they start; empty for a part of a program."""
    try:
        waiting: list[ast.AST] = [ast.parse(source)]
    except SyntaxError:
        return {}
    kinds: dict[int, Kind] = {}
    while waiting:
        node = waiting.pop()
        match node:
            case (
                ast.Module(body=[ast.Expr(value=ast.Constant(value=str()) as text), *_])
                | ast.ClassDef(body=[ast.Expr(value=ast.Constant(value=str()) as text), *_])
            ):
                kinds[text.lineno] = "docstring"
            case (
                ast.FunctionDef(body=[ast.Expr(value=ast.Constant(value=str()) as text), *_])
                | ast.AsyncFunctionDef(body=[ast.Expr(value=ast.Constant(value=str()) as text), *_])
            ):
                kinds[text.lineno] = "function docstring"
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            children = getattr(node, field, ())
            waiting.extend(children if isinstance(children, list) else ())
    return kinds


def is_program(text: str) -> bool:
    """True if a string literal holds Python statements rather than a text."""
    try:
        tree = ast.parse(textwrap.dedent(text.replace(_BLANK, "_")))
    except SyntaxError:
        return False
    return any(not isinstance(statement, ast.Expr) for statement in tree.body)


# --- command line


def files(paths: Iterable[Path]) -> list[Path]:
    """The files in `paths`, folders as git lists them: tracked, and untracked ones that it does not ignore."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
            names = subprocess.run(listing, cwd=path, check=True, capture_output=True, text=True).stdout
            found.extend(path / name for name in sorted(set(names.split("\0"))) if name)
        else:
            found.append(path)
    return [path for path in found if path.is_file() and "third_party" not in path.parts]


def package_of(path: Path) -> str:
    """The package of a file in reports: `jaxroll/store`, `tests/engine`, `benchmarks`, `README.md`."""
    parts = path.parts
    return "/".join(parts[:2]) if parts[0] in ("jaxroll", "tests") and len(parts) > 2 else parts[0]


def summary(found: Iterable[Complaint]) -> Iterator[str]:
    """Lines with the number of complaints per package and per rule, largest first."""
    packages, phrases = Counter(), Counter()
    for complaint in found:
        packages[package_of(complaint.path)] += 1
        phrases[f"{complaint.rule.find} -> {complaint.rule.write}"] += 1
    for title, counts in (("package", packages), ("rule", phrases)):
        yield f"complaints  {title}"
        yield from (f"{count:10}  {name}" for name, count in counts.most_common())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the prose of files against the rules in .ci/prose.toml.")
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; default: the whole repository")
    parser.add_argument("--summary", action="store_true", help="print counts per package and per rule")
    options = parser.parse_args(arguments)
    here, known = Path.cwd(), read_rules()
    found: list[Complaint] = []
    chosen = files(path.resolve() for path in options.paths or [ROOT])
    for path in chosen:
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        found += [Complaint(shown, item.line, item.phrase, item.rule) for item in complaints(path, known)]
    print("\n".join(summary(found) if options.summary else map(str, found)), end="\n" if found else "")
    print(f"{len(found)} complaints in {len({item.path for item in found})} of {len(chosen)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
