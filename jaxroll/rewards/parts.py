"""Answers of completions, and the values of reward parts: pure functions, each with its source (docs/rewards.md)."""

from __future__ import annotations

import logging
import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from jaxroll.errors import DataError

if TYPE_CHECKING:  # the import of `jaxroll.config` takes longer than that of a worker
    from jaxroll.config.rewards import LengthSettings


# --- Extraction of the answer from a completion: pure functions, one per mode of `task.extract` (docs/rewards.md)
#
# Each returns the answer without surrounding white space; "" if the completion contains none, which pays nothing. All
# take time linear in the length of the completion.

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


MODES: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {
        "none": none,
        "answer_tag": answer_tag,
        "boxed": boxed,
        "after_think": after_think,
        "last_number": last_number,
    }
)


# --- Values of reward parts

MATH_LIBRARY = "math_verify"
MAX_MATH_CHARS = 2000
_IN_LATEX = re.compile(r"\$|\\boxed|\\\(|\\\[")
_COMMANDS = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+")
_NO_LIMIT: dict[str, Any] = {"parsing_timeout": None}
_PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")


def truth(args: Mapping[str, Any]) -> str:
    """The ground truth in a task's `env_args`. DataError when there is none."""
    entry = args.get("entry")
    found = args.get("answer", entry.get("answer") if isinstance(entry, Mapping) else None)
    if found is None:
        raise DataError("the item has no answer to compare with")
    return str(found)


def truth_or_empty(args: Mapping[str, Any]) -> str:
    """The ground truth, "" when there is none."""
    try:
        return truth(args)
    except DataError:
        return ""


def exact(wanted: str, answer: str) -> float:
    """1 if the answer is the ground truth, character by character, else 0."""
    return float(answer == wanted)


def mathematical(wanted: str, answer: str, float_digits: int = 6) -> float:
    """1 if the answer is mathematically equal to the ground truth, as math-verify judges it, else 0.

    math-verify's relation is not symmetric (an answer `x = 3` matches the truth 3, a set may match its elements), so
    the truth is always its first argument. A truth that it cannot parse is compared as text. Nothing here bounds the
    time: the scoring pool kills a worker that simplifies too long.
    """
    if _plain(wanted) == _plain(answer):
        return 1.0
    _silence_warnings()
    from math_verify import verify

    gold, given = _parsed(wanted), _parsed(answer)
    # Its own time limits use SIGALRM, which works in main threads only and interrupts other code of the process.
    right = gold and given and verify(gold, given, float_rounding=float_digits, timeout_seconds=None)
    return float(bool(right))


def _silence_warnings() -> None:
    """Drop its warning, with every call, that time limits are off."""
    logging.getLogger(MATH_LIBRARY).setLevel(logging.ERROR)


def _plain(text: str) -> str:
    return "".join(text.strip().strip("$").split())


def _parsed(text: str) -> list[Any]:
    """The expressions that math-verify finds in `text`: in its LaTeX; bare formulas are read as LaTeX, prose is not."""
    from math_verify import parse

    found: list[Any] = []
    if not _IN_LATEX.search(text) and not _PROSE.search(_COMMANDS.sub(" ", text)):
        found = parse(f"${text}$", **_NO_LIMIT)
    return found or parse(text, **_NO_LIMIT)


def well_formed(completion: str, style: str = "think_answer", pattern: str = "") -> float:
    """1 if the whole completion matches `pattern`, or without one has the form `style`; else 0.

    Styles: `think` is `<think>…</think>` and a text after it, `answer` a text with one `<answer>…</answer>` at its end,
    `think_answer` both, with nothing between and around them. Every tag occurs once. The opening `<think>` may be
    missing, because some chat templates write it at the end of the prompt.
    """
    if pattern:
        return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)
    text, answers = completion.strip(), True
    if style != "answer":
        text = text.removeprefix(OPEN_THINK)
        before, closed, text = text.partition(CLOSE_THINK)
        if not closed or OPEN_THINK in before + text or CLOSE_THINK in text or not text.strip():
            return 0.0
        answers = "<answer>" not in before and "</answer>" not in before
    if style != "think":
        text = text.strip()
        at = text.find("<answer>")
        once = text.count("<answer>") == text.count("</answer>") == 1 and text.endswith("</answer>")
        return float(answers and once and at < text.find("</answer>") and (at == 0 or style == "answer"))
    return 1.0


def length(tokens: int, right: bool, settings: LengthSettings) -> float:
    """The value of a completion of `tokens` tokens; L_max is `max_tokens`, b is `buffer_tokens`.

    soft_overlong (DAPO, arXiv 2503.14476, equation 13): 0 up to L_max − b, then falling linearly to −1 at L_max.
    linear: −tokens / L_max.
    cosine (Yeo et al., arXiv 2502.03373): r_L + ½ (r_0 − r_L)(1 + cos(π tokens / L_max)), with r_0 (`…_short`) and r_L
    (`…_long`) for right answers and others for wrong ones.
    Tokens beyond L_max count as L_max.
    """
    L_max = settings.max_tokens
    used = min(tokens, L_max)
    if settings.shape == "soft_overlong":
        return -max(0.0, used - (L_max - settings.buffer_tokens)) / settings.buffer_tokens
    if settings.shape == "linear":
        return -used / L_max
    short, long = (settings.right_short, settings.right_long) if right else (settings.wrong_short, settings.wrong_long)
    return long + 0.5 * (short - long) * (1 + math.cos(math.pi * used / L_max))


# --- Several answers to each item


class Scored(Protocol):
    """A scored answer: whether it is right, and whether it counts."""

    @property
    def right(self) -> bool: ...

    @property
    def pinned(self) -> bool: ...


def counts(samples: Sequence[Sequence[Scored]]) -> list[tuple[int, int]]:
    """(answers that count, right ones) of each item, for the items with any; `samples` has one list per repetition."""
    found = []
    for answers in zip(*samples, strict=True):
        counted = [answer.right for answer in answers if answer.pinned]
        if counted:
            found.append((len(counted), sum(counted)))
    return found
