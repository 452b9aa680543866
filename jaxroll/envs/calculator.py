"""Environment with a calculator tool: the model may compute expressions before it answers."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from random import Random

from jaxroll.config import TaskConfig
from jaxroll.config.derived import is_compact
from jaxroll.config.parsing import nearest
from jaxroll.data.sources import GymSource
from jaxroll.envs.registry import Grader, refuse_unknown, register, settings_given, share
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import StepResult
from jaxroll.records import Item, Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool


@register("calculator")
class Calculator:
    """Environment that answers a tool call with its result (or "error") and scores any other answer as final.

    The final answer is graded as `task.extract` and `task.reward` say. The reward part `tool_used_ok` is 1
    if a call had a result.
    """

    max_turns = 6

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self._grader = Grader(pool, config)
        self.step_limit_s = self._grader.limit_s
        self.answer_tokens = 0
        self._env_args: str | None = None
        self._messages: tuple[Message, ...] = ()
        self._calls = self._results = 0

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's messages; `seed` has no effect."""
        self._env_args, self._calls, self._results = task.env_args, 0, 0
        self._messages = task.messages
        return task.messages

    async def step(self, answer: str) -> StepResult:
        """The tool's reply to a call, or the end of the episode; DataError when the final answer cannot be scored."""
        if self._env_args is None:
            raise DataError("step() before reset(): there is no question to answer")
        expression = first_call(answer)
        if expression is not None:
            reply, succeeded = tool_reply(expression)
            self._calls, self._results = self._calls + 1, self._results + succeeded
            state = b"%d %d" % (self._calls, self._results)
            return StepResult(done=False, messages=(Message("tool", reply),), state=state)
        grade = await self._grader.grade(self._env_args, answer, self.answer_tokens, self._messages)
        parts = {**grade.parts, "tool_used_ok": float(self._results > 0), "tool_calls": float(self._calls)}
        return StepResult(done=True, reward=grade.reward, reward_parts=parts, extracted=grade.extracted)

    def restore(self, state: bytes) -> None:
        """Continue after an earlier call of the tool."""
        self._calls, self._results = map(int, state.split())

    async def close(self) -> None:
        """Forget the task; the pool is shared and stays open."""
        self._env_args = None


# --- calls of the tool: grammar and evaluation, by a parser that never executes text
#
#     expression = term (("+" | "-") term)*
#     term       = factor (("*" | "/") factor)*
#     factor     = ("+" | "-") factor | "(" expression ")" | number
#     number     = digits ["." digits]
#
# Values are exact fractions; a value that is not an integer is shown with up to six decimal places.

OPEN, CLOSE = "<calc>", "</calc>"
ERROR = "error"
RULES = f"You may use a calculator: answer {OPEN}12*7{CLOSE} to get the result. Then answer.\n"
ALPHABET = OPEN + CLOSE + ERROR + "0123456789+-*/(). "
MAX_CHARS = 128  # of an expression; this also bounds the depth of brackets and the length of numbers
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|[-+*/()])", re.ASCII)
_PLACES = 6


class MalformedExpression(ValueError):
    """An expression without a value; the message gives the position or the reason."""


def first_call(answer: str) -> str | None:
    """The expression of the first call in `answer`; None if there is no call."""
    _, opened, rest = answer.partition(OPEN)
    expression, closed, _ = rest.partition(CLOSE)
    return expression if opened and closed else None


def value(expression: str) -> Fraction:
    """The value of `expression`. MalformedExpression when it is too long, not an expression, or divides by zero."""
    if len(expression) > MAX_CHARS:
        raise MalformedExpression(f"{len(expression)} characters; {MAX_CHARS} at most")
    parser = _Parser(_tokens(expression))
    found = parser.expression()
    parser.end()
    return found


def shown(value: Fraction) -> str:
    """`value` as text: an integer, or up to six decimal places, rounded half to even."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**_PLACES)
    digits = f"{abs(scaled):0{_PLACES + 1}d}"
    text = f"{digits[:-_PLACES]}.{digits[-_PLACES:]}".rstrip("0").rstrip(".")
    return f"-{text}" if scaled < 0 else text


def tool_reply(expression: str) -> tuple[str, bool]:
    """The tool's reply to a call, and True if it is a result (not an error)."""
    try:
        return shown(value(expression)), True
    except MalformedExpression:
        return ERROR, False


def worked(expression: str, answer: str, seed: int, direct: float, slips: float) -> tuple[Message, ...]:
    """An example conversation that ends in an answer: after a tool call or, with probability `direct`, at once.

    With probability `slips` a digit of the call is wrong; the answer is then the tool's result.
    """
    random = Random(f"calculator {seed}")
    if random.random() < direct:
        return (Message("assistant", answer),)
    slip = random.random() < slips
    typed = _with_wrong_digit(expression, random) if slip else expression
    result, succeeded = tool_reply(typed)
    final = result if slip and succeeded else answer
    call = Message("assistant", f"{OPEN}{typed}{CLOSE}")
    return (call, Message("tool", result), Message("assistant", final))


def _with_wrong_digit(expression: str, random: Random) -> str:
    places = [place for place, char in enumerate(expression) if char.isdigit()]
    place = random.choice(places)
    return expression[:place] + random.choice("123456789") + expression[place + 1 :]


def _tokens(expression: str) -> list[str]:
    tokens, position, text = [], 0, expression.rstrip()
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise MalformedExpression(f"{text[position]!r} at {position} is neither a number nor an operator")
        tokens.append(found.group(1))
        position = found.end()
    return tokens


class _Parser:
    """Recursive-descent parser of the grammar above."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at = tokens, 0

    def expression(self) -> Fraction:
        found = self._term()
        while (sign := self._taken("+", "-")) is not None:
            other = self._term()
            found = found + other if sign == "+" else found - other
        return found

    def end(self) -> None:
        if self._at < len(self._tokens):
            raise MalformedExpression(f"{self._tokens[self._at]!r} was not expected")

    def _term(self) -> Fraction:
        found = self._factor()
        while (sign := self._taken("*", "/")) is not None:
            other = self._factor()
            if sign == "/" and not other:
                raise MalformedExpression("a division by zero")
            found = found * other if sign == "*" else found / other
        return found

    def _factor(self) -> Fraction:
        if (sign := self._taken("+", "-")) is not None:
            found = self._factor()
            return -found if sign == "-" else found
        if self._taken("(") is not None:
            found = self.expression()
            if self._taken(")") is None:
                raise MalformedExpression("a bracket is not closed")
            return found
        if self._at == len(self._tokens) or not self._tokens[self._at][0].isdigit():
            raise MalformedExpression("a number was expected")
        self._at += 1
        return Fraction(self._tokens[self._at - 1])

    def _taken(self, *signs: str) -> str | None:
        """Consume the next token and return it if it is one of `signs`; otherwise return None."""
        if self._at < len(self._tokens) and self._tokens[self._at] in signs:
            self._at += 1
            return self._tokens[self._at - 1]
        return None


# --- the source of problems

_PROBLEMS = ("basic_arithmetic", "chain_sum", "decimal_chain_sum", "products")  # their compact form is an expression


class CalculatorSource:
    """Arithmetic problems of reasoning-gym, with a calculator tool.

    `task.args`: `problem`, a task of reasoning-gym, and its settings as `problem_args`; for the example conversations
    of the warm start, `direct`, the share of answers without the tool, and `slips`, the share of calls with a wrong
    digit.
    """

    size = None

    def __init__(self, cfg: TaskConfig) -> None:
        args = settings_given(cfg)
        self._direct, self._slips = share(args, "direct"), share(args, "slips")
        problem, settings = args.pop("problem", "products"), args.pop("problem_args", {})
        refuse_unknown(args, ("problem", "problem_args", "direct", "slips"))
        if problem not in _PROBLEMS:
            raise ConfigError("task.args.problem", problem, "it is not arithmetic", nearest(str(problem), _PROBLEMS))
        self._as_compact = is_compact(cfg)
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
