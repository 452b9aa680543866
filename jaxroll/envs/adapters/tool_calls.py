"""Tool calls with JSON schemas: the model calls tools until it gives an answer without a call.

A call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as chat templates of Qwen and Hermes write it. Its
arguments are checked against the tool's schema, and a call that does not fit gets an error as its result. Full prompts
show the schemas through the chat template; compact prompts have no room for them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from jaxroll.envs.adapters.games import Game, GameEnvironment, GameSource, GameView
from jaxroll.envs.registry import register
from jaxroll.errors import ConfigError
from jaxroll.protocols import Place

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
_MAX_CALL_CHARS = 20_000


@dataclass(frozen=True)
class Tool:
    """A tool: `parameters` is the JSON schema of its arguments, `run` gets them by name and returns JSON data."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[..., Any]

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as OpenAI's API and chat templates describe it."""
        described = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class Problem:
    """A question with tools and its answer.

    `compact` is the question's short form. `teacher` are the right calls, and `others` calls that are possible but
    wrong, for the play of a teacher.
    """

    question: str
    compact: str
    answer: str
    tools: tuple[Tool, ...]
    teacher: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    others: tuple[tuple[str, Mapping[str, Any]], ...] = ()


def stocktaking(seed: int) -> Problem:
    """A question about the price or the stock of one of a few goods; only the tools know the numbers."""
    random = Random(f"stock {seed}")
    goods = ["".join(random.choice("abcdefgh") for _ in range(3)) for _ in range(3)]
    numbers = {(what, good): random.randint(10, 99) for what in ("price", "stock") for good in goods}
    wanted, good = random.choice(("price", "stock")), goods[0]
    schema = {
        "type": "object",
        "properties": {"item": {"type": "string", "description": "The name of the item."}},
        "required": ["item"],
        "additionalProperties": False,
    }

    def tool(what: str, description: str) -> Tool:
        return Tool(what, description, schema, lambda item: numbers.get((what, item), "unknown item"))

    tools = (tool("price", "The price of an item."), tool("stock", "How many pieces of an item are in stock."))
    others = tuple((name, {"item": each}) for name in ("price", "stock") for each in (good, good[::-1]))
    return Problem(
        f"What is the {wanted} of {good}? Answer with the number alone.",
        f"{wanted} {good}",
        str(numbers[wanted, good]),
        tools,
        ((wanted, {"item": good}),),
        others,
    )


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of a call."""
    return f"{OPEN}{json.dumps({'name': name, 'arguments': dict(arguments)})}{CLOSE}"


def first_call(answer: str) -> str | None:
    """The JSON text of the first call in `answer`; None if there is no call."""
    _, opened, rest = answer.partition(OPEN)
    body, closed, _ = rest.partition(CLOSE)
    return body if opened and closed else None


def result(body: str, tools: Sequence[Tool]) -> tuple[str, bool]:
    """The result of the call `body` as JSON text, and True if the tool ran."""
    try:
        called = json.loads(body) if len(body) <= _MAX_CALL_CHARS else None
    except (ValueError, RecursionError):
        called = None
    if not isinstance(called, dict) or not isinstance(called.get("arguments", {}), dict):
        return _error("a call is a JSON object with name and arguments"), False
    found = next((tool for tool in tools if tool.name == called.get("name")), None)
    if found is None:
        return _error(f"no such tool; there are {', '.join(tool.name for tool in tools)}"), False
    arguments = called.get("arguments", {})
    if wrong := misfit(arguments, found.parameters):
        return _error(wrong), False
    return json.dumps(found.run(**arguments)), True


def misfit(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """The reason why `arguments` do not fit the JSON schema; "" if they do.

    It knows `properties` with `type` and `enum`, `required` and `additionalProperties`. A name without a property is
    refused unless `additionalProperties` is true.
    """
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"the argument {name} is missing"
    for name, value in arguments.items():
        if name not in known:
            if schema.get("additionalProperties") is not True:
                return "there is an argument that the tool does not have"
            continue
        kind = known[name].get("type")
        fits = kind not in _TYPES or isinstance(value, _TYPES[kind])
        if not fits or (isinstance(value, bool) and kind in ("integer", "number")):
            return f"the argument {name} must be of type {kind}"
        if "enum" in known[name] and value not in known[name]["enum"]:
            return f"the argument {name} must be one of {json.dumps(known[name]['enum'])}"
    return ""


def _error(text: str) -> str:
    return json.dumps({"error": text})


@dataclass(frozen=True)
class Settings:
    """Settings of `task.args`: `problems`, a function of the seed that returns a Problem, as `package.module:name`."""

    problems: str = "jaxroll.envs.adapters.tool_calls:stocktaking"


class ToolCallGame(Game):
    """One problem; the reward is 1 for the right final answer."""

    Settings = Settings
    hidden = True  # the tools know what the question does not say

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        module, _, name = settings.problems.rpartition(":")
        try:
            self._problem_of: Callable[[int], Problem] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            remedy = "Give package.module:function."
            raise ConfigError("task.args.problems", settings.problems, f"not found: {error}", remedy) from error
        self._problem: Problem | None = None

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [tool.schema for tool in self._problem.tools] if self._problem else ()

    def start(self, seed: int) -> str:
        self._problem = self._problem_of(seed)
        self._left, self._calls, self._ran, self._seen = list(self._problem.teacher), 0, 0, ""
        return self._problem.compact

    def question(self, view: str) -> str:
        return self._problem.question if self._problem else view

    def play(self, answer: str) -> GameView:
        assert self._problem is not None
        body = first_call(answer)
        if body is not None:
            text, ran = result(body, self._problem.tools)
            self._calls, self._ran = self._calls + 1, self._ran + ran
            self._left, self._seen = self._left[1:], text
            return GameView(text, role="tool", misread=not ran)
        right = float(answer.strip() == self._problem.answer)
        return GameView("", True, right, {"calls": float(self._calls), "calls_ok": float(self._ran)})

    def choices(self) -> Sequence[str]:
        """Wrong calls while calls are due, and then the last result, which is the answer if the calls were right."""
        assert self._problem is not None
        return [call_text(*call) for call in self._problem.others] if self._left else [self._seen.strip('"')]

    def advice(self) -> str | None:
        assert self._problem is not None
        return call_text(*self._left[0]) if self._left else self._seen.strip('"')


@register("tool_calls")
class ToolCalls(GameEnvironment):
    """Tool calls, then an answer."""

    game = ToolCallGame
    place: Place = "loop"  # tools that wait belong into a class of your own with place = "thread"


class ToolCallSource(GameSource):
    """Problems by seed."""

    name, game = "tool_calls", ToolCallGame
