"""Values of reward parts: pure functions of the answer or of the completion, each with its source (docs/rewards.md)."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxroll.errors import DataError
from jaxroll.rewards.extract import CLOSE_THINK, OPEN_THINK

if TYPE_CHECKING:  # the import of `jaxroll.config` takes longer than that of a worker
    from jaxroll.config.rewards import LengthSettings

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
