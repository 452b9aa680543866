"""Titled tables for a person: drawn on a terminal, plain aligned lines elsewhere (so that `grep` and `less` work)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

_GAP = "  "


@dataclass(frozen=True)
class Section:
    """A table with a title; without headings it is pairs of name and value. `note` stands below it."""

    title: str
    headings: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = field(default_factory=list)
    note: str = ""
    right: frozenset[int] = frozenset()  # columns of numbers


def show(sections: Sequence[Section], console: Console) -> None:
    """Print the sections that have something to say."""
    for section in sections:
        if section.rows or section.note:
            if console.is_terminal:
                _draw(section, console)
            else:
                console.file.write("\n".join(plain(section)) + "\n")


def plain(section: Section) -> list[str]:
    """The lines of a section without a terminal: every cell on one line, columns aligned except the last."""
    rows = [tuple(safe(cell).replace("\n", "\\n") for cell in row) for row in section.rows]
    lines = [f"== {section.title}"] if section.title else []
    table = [section.headings, *rows] if section.headings else rows
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))] if table else []
    for row in table:
        cells = [
            c.rjust(w) if i in section.right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(_GAP.join(cells).rstrip())
    return [*lines, *([safe(section.note)] if section.note else []), ""]


def _draw(section: Section, console: Console) -> None:
    if section.title:
        console.print(Text(section.title, style="bold"))
    table = Table(box=None, pad_edge=False, show_header=bool(section.headings), header_style="dim")
    width = len(section.headings) or max((len(row) for row in section.rows), default=0)
    for i in range(width):
        heading = section.headings[i] if section.headings else ""
        style = "dim" if i == 0 and not section.headings else None
        table.add_column(heading, justify="right" if i in section.right else "left", style=style, overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(safe(cell)) for cell in row))
    if section.rows:
        console.print(table)
    if section.note:
        console.print(Text(safe(section.note), style="dim"))
    console.print()


def safe(text: str) -> str:
    """`text` with control characters written out: what a model wrote must not drive the terminal."""
    return "".join(char if char.isprintable() or char in "\n " else repr(char)[1:-1] for char in text)


def short(text: str, length: int = 60) -> str:
    """The beginning of `text` on one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"
