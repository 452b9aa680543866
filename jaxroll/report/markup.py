"""HTML and SVG as values that cannot carry foreign markup: whatever is not `Markup` is text, and text is escaped.

What a model wrote is hostile. Only `tag`, `joined` and `raw` make Markup, and `raw` is for literals of this package.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


class Markup(str):
    """A string that is markup already."""


def raw(literal: str) -> Markup:
    """`literal` as markup; never give it anything read from a file."""
    return Markup(literal)


def text(value: object) -> Markup:
    """`value` as text: escaped, with control characters shown by their symbols and lone surrogates replaced."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape("".join(map(_printable, str(value)))))


def _printable(char: str) -> str:
    code = ord(char)
    if code < 0x20 and char not in "\n\t":
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if 0x80 <= code < 0xA0 or 0xD800 <= code < 0xE000 or code & 0xFFFE == 0xFFFE:
        return "\ufffd"
    return char


def joined(parts: Iterable[object]) -> Markup:
    """The parts one after another."""
    return Markup("".join(map(text, parts)))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """The element `name`. `class_` is class, underscores are hyphens; None and False leave an attribute out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value not in (None, False))
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(children)}</{name}>")


def _attribute(key: str, value: object) -> str:
    name = key.removesuffix("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{text(_rounded(value))}"'


def _rounded(value: object) -> object:
    """Coordinates to a hundredth: what an eye can see, and no more bytes than that."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
