"""An agent with the openai client and one tool. It does not import JaxRoll: it gets a base URL, a key and a row."""

from __future__ import annotations

import ast
import operator
import re
from typing import Any

from openai import OpenAI

TURNS = 3
_CALL = re.compile(r"<calc>([0-9+*/ -]{1,60})</calc>")
_OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def answer(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    """Ask until the model answers without a call of the calculator; the task grades the last answer."""
    messages = list(row["messages"])
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(TURNS):
            found = client.chat.completions.create(model="policy", messages=messages)
            text = found.choices[0].message.content or ""
            call = _CALL.search(text)
            if call is None:
                return
            messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": _result(call[1])}]


def _result(expression: str) -> str:
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, TypeError):
        return "error"


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no calculation")
