"""Calculator tool as an environment: the model may ask for the value of expressions before it answers."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from random import Random

from jaxroll.config import TaskConfig
from jaxroll.config.parsing import nearest
from jaxroll.data.gym import GymSource
from jaxroll.envs.registry import refuse_unknown, register, share
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import StepResult
from jaxroll.records import Item, Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool

_QUEUE_ALLOWANCE_S = 120.0  # scores of others that are ahead in the pool, and a worker that is starting


@register("calculator")
class Calculator:
    """An answer that holds a call is answered with the result (or "error"); any other is final and is scored.

    Reward 1 when its raw score is exactly 1.0, else 0. `tool_used_ok` says whether some call had a result.
    """

    max_turns = 6

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self.step_limit_s = pool.time_limit_s + _QUEUE_ALLOWANCE_S
        self._pool = pool
        self._env_args: str | None = None
        self._calls = self._results = 0

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's messages; there is no chance in them."""
        self._env_args, self._calls, self._results = task.env_args, 0, 0
        return task.messages

    async def step(self, answer: str) -> StepResult:
        """The tool's reply to a call, or the end; DataError when the final answer cannot be scored."""
        if self._env_args is None:
            raise DataError("step() before reset(): there is no question to answer")
        expression = called(answer)
        if expression is not None:
            reply, right = replied(expression)
            self._calls, self._results = self._calls + 1, self._results + right
            return StepResult(done=False, messages=(Message("tool", reply),))
        raw = await self._pool.score(self._env_args, answer)
        parts = {"raw_score": raw, "tool_used_ok": float(self._results > 0), "tool_calls": float(self._calls)}
        return StepResult(done=True, reward=1.0 if raw == 1.0 else 0.0, reward_parts=parts)

    async def close(self) -> None:
        """Nothing to end: the pool outlives the episode."""
        self._env_args = None


# --- calls of the tool: how one is written, and its value. No part of the text is ever executed
#
#     expression = term (("+" | "-") term)*
#     term       = factor (("*" | "/") factor)*
#     factor     = ("+" | "-") factor | "(" expression ")" | number
#     number     = digits ["." digits]
#
# Values are exact fractions; what is no integer is shown with up to six places.

OPEN, CLOSE = "<calc>", "</calc>"
ERROR = "error"
RULES = f"You may use a calculator: answer {OPEN}12*7{CLOSE} and you are told the result. Then answer.\n"
ALPHABET = OPEN + CLOSE + ERROR + "0123456789+-*/(). "
MAX_CHARS = 128  # of an expression: bounds the depth of brackets and the length of numbers, too
_WORD = re.compile(r"\s*(\d+(?:\.\d+)?|[-+*/()])", re.ASCII)
_PLACES = 6


class Malformed(ValueError):
    """An expression that has no value: says where it goes wrong."""


def called(answer: str) -> str | None:
    """The expression of the first call in `answer`; None where there is no call."""
    _, opened, rest = answer.partition(OPEN)
    expression, closed, _ = rest.partition(CLOSE)
    return expression if opened and closed else None


def value(expression: str) -> Fraction:
    """What `expression` comes to. Malformed when it is too long, no expression, or divides by zero."""
    if len(expression) > MAX_CHARS:
        raise Malformed(f"{len(expression)} characters; {MAX_CHARS} at most")
    reader = _Reader(_words(expression))
    found = reader.expression()
    reader.end()
    return found


def shown(value: Fraction) -> str:
    """The number as text: whole, or with up to six places, rounded half to even."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**_PLACES)
    digits = f"{abs(scaled):0{_PLACES + 1}d}"
    text = f"{digits[:-_PLACES]}.{digits[-_PLACES:]}".rstrip("0").rstrip(".")
    return f"-{text}" if scaled < 0 else text


def replied(expression: str) -> tuple[str, bool]:
    """What the tool says to a call, and whether that is a result."""
    try:
        return shown(value(expression)), True
    except Malformed:
        return ERROR, False


def worked(expression: str, answer: str, seed: int, direct: float, slips: float) -> tuple[Message, ...]:
    """A conversation that ends in an answer: through the tool, or, with probability `direct`, at once.

    With probability `slips` a digit of the call is wrong; the answer then is what the tool said.
    """
    random = Random(f"calculator {seed}")
    if random.random() < direct:
        return (Message("assistant", answer),)
    slip = random.random() < slips
    typed = _slipped(expression, random) if slip else expression
    result, right = replied(typed)
    final = result if slip and right else answer
    call = Message("assistant", f"{OPEN}{typed}{CLOSE}")
    return (call, Message("tool", result), Message("assistant", final))


def _slipped(expression: str, random: Random) -> str:
    places = [place for place, char in enumerate(expression) if char.isdigit()]
    place = random.choice(places)
    return expression[:place] + random.choice("123456789") + expression[place + 1 :]


def _words(expression: str) -> list[str]:
    words, position, text = [], 0, expression.rstrip()
    while position < len(text):
        found = _WORD.match(text, position)
        if found is None:
            raise Malformed(f"{text[position]!r} at {position} is no number and no sign")
        words.append(found.group(1))
        position = found.end()
    return words


class _Reader:
    """Reads words by the grammar above."""

    def __init__(self, words: list[str]) -> None:
        self._words, self._at = words, 0

    def expression(self) -> Fraction:
        found = self._term()
        while (sign := self._taken("+", "-")) is not None:
            other = self._term()
            found = found + other if sign == "+" else found - other
        return found

    def end(self) -> None:
        if self._at < len(self._words):
            raise Malformed(f"{self._words[self._at]!r} was not expected")

    def _term(self) -> Fraction:
        found = self._factor()
        while (sign := self._taken("*", "/")) is not None:
            other = self._factor()
            if sign == "/" and not other:
                raise Malformed("a division by zero")
            found = found * other if sign == "*" else found / other
        return found

    def _factor(self) -> Fraction:
        if (sign := self._taken("+", "-")) is not None:
            found = self._factor()
            return -found if sign == "-" else found
        if self._taken("(") is not None:
            found = self.expression()
            if self._taken(")") is None:
                raise Malformed("a bracket is not closed")
            return found
        if self._at == len(self._words) or not self._words[self._at][0].isdigit():
            raise Malformed("a number was expected")
        self._at += 1
        return Fraction(self._words[self._at - 1])

    def _taken(self, *signs: str) -> str | None:
        """The next word if it is one of `signs`; it is used up then."""
        if self._at < len(self._words) and self._words[self._at] in signs:
            self._at += 1
            return self._words[self._at - 1]
        return None


# --- the source of problems

_PROBLEMS = ("basic_arithmetic", "chain_sum", "decimal_chain_sum", "products")  # their compact form is an expression


class CalculatorSource:
    """Arithmetic of reasoning-gym with a calculator at hand.

    `task.args`: `problem`, a task of reasoning-gym, its settings as `problem_args`; of worked play, `direct`, the share
    of answers without the tool, and `slips`, the share of calls with a wrong digit.
    """

    size = None

    def __init__(self, cfg: TaskConfig) -> None:
        args = dict(cfg.args)
        self._direct, self._slips = share(args, "direct"), share(args, "slips")
        problem, settings = args.pop("problem", "products"), args.pop("problem_args", {})
        refuse_unknown(args, ("problem", "problem_args", "direct", "slips"))
        if problem not in _PROBLEMS:
            raise ConfigError("task.args.problem", problem, "it is not arithmetic", nearest(str(problem), _PROBLEMS))
        self._as_compact = cfg.prompt_style == "compact"
        self._gym = GymSource(dataclasses.replace(cfg, source="reasoning_gym", name=problem, args=settings))
        self.identity = f"calculator/{self._gym.identity}"

    def item(self, index: int) -> Item:
        """Problem `index`."""
        found = self._gym.item(index)
        assert found.answer is not None
        dialogue = worked(self._expression(index), found.answer, index, self._direct, self._slips)
        return Item(RULES + found.question, found.compact, found.answer, found.env_args, dialogue)

    def alphabet(self) -> str:
        """The characters of problems, calls and results; printable ASCII for full prompts."""
        return "".join(sorted(set(self._gym.alphabet() + ALPHABET)))

    def _expression(self, index: int) -> str:
        return self._gym.item(index).compact
