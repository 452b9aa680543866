"""Fenced code blocks of the pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page relative to the repository, its line there, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def lines(self) -> list[str]:
        """The lines that are not empty."""
        return [line.strip() for line in self.text.splitlines() if line.strip()]


def pages() -> list[Path]:
    """All pages with prose for users."""
    return [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "launch/README.md")] + sorted(
        (ROOT / "docs").rglob("*.md")
    )


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The blocks of a page, all or those in one language."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    found = [Block(name, text.count("\n", 0, match.start()) + 1, match[2], match[3]) for match in FENCE.finditer(text)]
    return [block for block in found if language in (None, block.language)]
