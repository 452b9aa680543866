"""Extraction of the answer from a completion: pure functions, one per mode of `task.extract` (docs/rewards.md).

Each returns the answer without surrounding white space; "" if the completion contains none, which pays nothing. All
take time linear in the length of the completion.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
_ANSWER_TAGS = re.compile(r"</?answer>")
_BOX_TOKENS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# A sign counts only where no operand precedes it: the last number of "10-7" is 7. Digits and commas are taken together
# and sorted out later, because a pattern of groups of three would need quadratic time.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}.,])[-\N{MINUS SIGN}])?\$?"
    r"(?:(?P<digits>\d+(?:,\d+)*)(?P<rest>(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<fraction>\.\d+))",
    re.ASCII,
)
_GROUPS_OF_THREE = re.compile(r"\d{1,3}(?:,\d{3})+", re.ASCII)


def after_think(completion: str) -> str:
    """The text after the last `</think>`; the whole completion if it has no think tag.

    A completion that opens `<think>` and never closes it has no answer.
    """
    before, closed, rest = completion.rpartition(CLOSE_THINK)
    if closed:
        return "" if OPEN_THINK in rest else rest.strip()
    return "" if OPEN_THINK in before + rest else rest.strip()


def answer_tag(completion: str) -> str:
    """The content of the last complete `<answer>…</answer>` after the reasoning."""
    text, start, answer = after_think(completion), None, ""
    for tag in _ANSWER_TAGS.finditer(text):
        if tag.group() == "<answer>":
            start = tag.end()
        elif start is not None:
            answer, start = text[start : tag.start()].strip(), None
    return answer


def boxed(completion: str) -> str:
    r"""The content of the last complete `\boxed{…}` or `\fbox{…}` after the reasoning; braces may be nested."""
    text, answer, latest = after_think(completion), "", -1
    opened: list[int | None] = []  # the start of the content of each open box; None for other braces
    for token in _BOX_TOKENS.finditer(text):
        if token.group().endswith("{") and len(token.group()) > 2:
            opened.append(token.end())
        elif token.group() == "{":
            opened.append(None)
        elif token.group() == "}" and opened:
            start = opened.pop()
            if start is not None and start > latest:
                answer, latest = text[start : token.start()].strip(), start
    return answer


def last_number(completion: str) -> str:
    """The last number after the reasoning, without thousands separators: `-1,234.50` gives `-1234.50`."""
    found = deque(_NUMBER.finditer(after_think(completion)), maxlen=1)
    if not found:
        return ""
    match = found[0]
    sign, digits, rest = "-" if match["sign"] else "", match["digits"] or "0", match["rest"] or match["fraction"] or ""
    if "," in digits and not _GROUPS_OF_THREE.fullmatch(digits):  # a list
        sign, digits = "", digits.rpartition(",")[2]
    return sign + digits.replace(",", "") + rest


def none(completion: str) -> str:
    """The whole completion, unchanged."""
    return completion


MODES: Mapping[str, Callable[[str], str]] = MappingProxyType({
    "none": none, "answer_tag": answer_tag, "boxed": boxed, "after_think": after_think, "last_number": last_number,
})  # fmt: skip
