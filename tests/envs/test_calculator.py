"""The calculator against Python's own arithmetic, and against text that is not an expression."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.envs import calculator

NUMBERS = st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(lambda d: f"{d:f}")
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " + ", " * "]), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-({text})"),
    ),
    max_leaves=8,
)


def oracle(expression: str) -> Fraction | None:
    import re

    exact = re.sub(r"\d+(?:\.\d+)?", lambda found: f"Fraction('{found.group()}')", expression)
    try:
        return eval(exact, {"Fraction": Fraction, "__builtins__": {}})  # text of our own making
    except ZeroDivisionError:
        return None


@given(EXPRESSIONS)
def test_values_are_pythons(expression: str) -> None:
    expected = oracle(expression)
    if expected is None or len(expression) > calculator.MAX_CHARS:
        with pytest.raises(calculator.MalformedExpression):
            calculator.value(expression)
    else:
        assert calculator.value(expression) == expected


@given(st.text(alphabet="0123456789+-*/(). x_e", max_size=40) | st.text(max_size=40))
def test_any_text_has_a_value_or_is_malformed(text: str) -> None:
    reply, right = calculator.tool_reply(text)
    assert right == (reply != "error")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1+",
        "+",
        "(1",
        "1)",
        "1 2",
        "2**3",
        "1/0",
        "1//2",
        "9" * 129,
        "(" * 60,
        "1.",
        ".5",
        "1e3",
        "0x1",
        "١",
        "__import__('os')",
        "a",
        "1,000",
        "1/(2-2)",
    ],
)
def test_a_malformed_expression_is_an_error(text: str) -> None:
    assert calculator.tool_reply(text) == ("error", False)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(84), "84"),
        (Fraction(-3), "-3"),
        (Fraction(1, 2), "0.5"),
        (Fraction(-1, 3), "-0.333333"),
        (Fraction(1, 3 * 10**9), "0"),
        (Fraction(10**30), "1" + "0" * 30),
        (Fraction(12345, 100), "123.45"),
    ],
)
def test_numbers_as_text(value: Fraction, text: str) -> None:
    assert calculator.shown(value) == text


@pytest.mark.parametrize(
    ("answer", "expression"),
    [
        ("<calc>12*7</calc>", "12*7"),
        ("so <calc> 1 </calc> and <calc>2</calc>", " 1 "),
        ("12", None),
        ("<calc>1", None),
        ("<calc></calc>", ""),
        ("</calc>1<calc>", None),
    ],
)
def test_a_call_is_the_text_between_its_marks(answer: str, expression: str | None) -> None:
    assert calculator.first_call(answer) == expression


def test_worked_conversations() -> None:
    assert [m.content for m in calculator.worked("12*7", "84", 0, 0.0, 0.0)] == ["<calc>12*7</calc>", "84", "84"]
    assert [m.content for m in calculator.worked("12*7", "84", 0, 1.0, 0.0)] == ["84"]
    several = [calculator.worked("12*7", "84", seed, 0.5, 0.0) for seed in range(200)]
    assert 70 < sum(len(said) == 1 for said in several) < 130
    for seed in range(20):
        call, result, final = (m.content for m in calculator.worked("12*7", "84", seed, 0.0, 1.0))
        assert (result, True) == calculator.tool_reply(calculator.first_call(call) or "") and final == result


def test_marks_without_end_take_no_time() -> None:
    """Four million opening marks: a search that starts again at each of them would take hours."""
    assert calculator.first_call("<calc>" * (4 << 20)) is None
