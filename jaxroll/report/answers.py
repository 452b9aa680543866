"""What the model wrote to the same held-out questions at the first and at the last evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxroll.report.markup import Markup, raw, tag

Row = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One text and whether it was right."""

    text: str
    ok: bool


@dataclass(frozen=True)
class Question:
    """A prompt with its answers; `expected` is empty where the task does not say."""

    prompt: str
    expected: str
    before: Answer
    after: Answer | None


def questions(evals: Sequence[Row]) -> list[Question]:
    """The examples of the first evaluation, each with its answer at the last one when that is another."""
    if not evals:
        return []
    later = {_place(example): example for example in _examples(evals[-1])} if len(evals) > 1 else {}
    return [
        Question(str(example.get("prompt", "")), str(example.get("answer") or ""), _answer(example),
                 _answer(later[_place(example)]) if _place(example) in later else None)
        for example in _examples(evals[0])
    ]  # fmt: skip


def _examples(row: Row) -> list[dict]:
    return [example for example in row.get("examples") or () if isinstance(example, dict)]


def _place(example: dict) -> str:
    return str(example.get("prompt", ""))


def _answer(example: dict) -> Answer:
    return Answer(str(example.get("text", "")), bool(example.get("ok")))


def table(found: Sequence[Question], first_step: int, last_step: int) -> Markup:
    """The questions side by side, right and wrong by colour and sign."""
    if not found:
        return raw("")
    head = ["question", f"at step {first_step}"] + ([f"at step {last_step}"] if found[0].after else [])
    rows = [tag("tr", tag("td", _prompt(q)), tag("td", _cell(q.before)), *_after(q)) for q in found]
    headings = tag("tr", *(tag("th", words) for words in head))
    return tag("div", tag("table", headings, *rows, class_="answers"), class_="scroll")


def _prompt(question: Question) -> Markup:
    expected = [tag("div", "answer: ", tag("bdi", question.expected, class_="mono"), class_="hint")]
    return tag("div", tag("bdi", question.prompt, class_="mono"), *(expected if question.expected else []))


def _after(question: Question) -> list[Markup]:
    return [tag("td", _cell(question.after))] if question.after else []


def _cell(answer: Answer) -> Markup:
    words = answer.text or "(nothing)"
    return tag(
        "bdi", words, class_=f"mono {'right' if answer.ok else 'wrong'}", title="right" if answer.ok else "wrong"
    )
