"""The stream of training prompts: order, resumption, exclusion, and the end of patience."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxroll.config import Config, EvaluatorConfig, RunConfig, SftConfig, TaskConfig
from jaxroll.data import preparation, sources
from jaxroll.data import tasks as candidates
from jaxroll.data import tasks as heldout
from jaxroll.data.tasks import PromptPipeline
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import question_hash

BITS = TaskConfig(name="count_bits", args={"max_n": 200}, heldout_items=100)


def config(seed: int = 0, task: TaskConfig | None = None) -> Config:
    return dataclasses.replace(Config(), run=RunConfig(seed=seed), task=task or TaskConfig(heldout_items=16))


def draw(pipeline: PromptPipeline, count: int) -> list:
    return list(itertools.islice(pipeline, count))


@pytest.fixture(scope="module")
def undisturbed() -> list:
    return draw(PromptPipeline(config()), 400)


@settings(max_examples=10)
@given(position=st.integers(0, 300))
def test_a_restored_stream_continues_with_the_same_tasks(undisturbed: list, position: int) -> None:
    first = PromptPipeline(config())
    draw(first, position)
    second = PromptPipeline(config())
    draw(second, 7)  # its position before has no effect
    second.restore(first.state())
    assert draw(second, 100) == undisturbed[position : position + 100] == draw(first, 100)


def test_restoring_nothing_starts_again(undisturbed: list) -> None:
    pipeline = PromptPipeline(config())
    draw(pipeline, 9)
    pipeline.restore(None)
    assert draw(pipeline, 9) == undisturbed[:9]


def test_the_state_after_every_item_restores(undisturbed: list) -> None:
    pipeline, other = PromptPipeline(config(task=BITS)), PromptPipeline(config(task=BITS))
    states, tasks = [], []
    for task in itertools.islice(pipeline, 50):  # held-out questions are skipped in between
        states.append(pipeline.state())
        tasks.append(task)
    for position, state in enumerate(states[:-1]):
        other.restore(state)
        assert next(other) == tasks[position + 1]


def test_the_state_is_json_and_small() -> None:
    pipeline = PromptPipeline(config())
    draw(pipeline, 3)
    assert isinstance(json.loads(pipeline.state()), dict)
    assert len(pipeline.state()) < 200


def test_the_seed_decides_which_items_come_in_which_order() -> None:
    one, same, two = ([task.index for task in draw(PromptPipeline(config(seed)), 200)] for seed in (1, 1, 2))
    assert one == same
    assert len(set(one) & set(two)) < 5, "another seed sees other items"
    assert one != sorted(one)


def test_order_is_pinned() -> None:
    """The golden order. A change breaks `--resume` of runs started before it: bump the state's format then."""
    assert [task.messages[0].content for task in draw(PromptPipeline(config()), 5)] == GOLDEN


GOLDEN = ["polypod", "grounder", "lemonwood", "knight", "spattle"]


def test_held_out_questions_never_come(undisturbed: list) -> None:
    small = config(task=BITS)
    kept_aside = heldout.tasks(small)
    assert len(kept_aside) == 100
    drawn = draw(PromptPipeline(small), 2000)
    assert not heldout.overlap(kept_aside, (task.question_hash for task in drawn))
    assert len({task.question_hash for task in drawn}) == 100, "all other numbers up to 200 do come"


def test_a_task_carries_what_it_needs() -> None:
    task = next(PromptPipeline(config()))
    assert task.env == "single_turn"
    assert task.seed == task.index
    assert [m.role for m in task.messages] == ["user"]
    word = task.messages[0].content
    assert task.args() == {
        "scorer": "reasoning_gym",
        "dataset": "spell_backward",
        "entry": {"answer": task.args()["entry"]["answer"], "metadata": {}},
    }
    assert task.args()["entry"]["answer"].lower() == word[::-1]
    assert task.question_hash == question_hash(word)


def test_full_and_compact_prompts_are_the_same_question() -> None:
    compact = PromptPipeline(config())
    full = PromptPipeline(
        config(task=TaskConfig(prompt_style="full", max_prompt_tokens=80, heldout_items=16)),
    )
    one, other = draw(compact, 20), draw(full, 20)
    assert [t.question_hash for t in one] == [t.question_hash for t in other]
    assert one[0].messages[0].content in other[0].messages[0].content.lower()


def test_prompts_that_do_not_fit_are_skipped() -> None:
    tight = config(task=TaskConfig(max_prompt_tokens=6, heldout_items=16))  # bos, up to four letters, turn
    assert {len(task.messages[0].content) for task in draw(PromptPipeline(tight), 50)} == {3, 4}


def test_items_that_cannot_be_made_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = [task.index for task in draw(PromptPipeline(config()), 30)]
    at = candidates.Candidates.at

    def sometimes(self: candidates.Candidates, index: int) -> candidates.WorkedTask:
        if index % 2:
            raise DataError("odd")
        return at(self, index)

    monkeypatch.setattr(candidates.Candidates, "at", sometimes)
    assert [t.index for t in draw(PromptPipeline(config()), 10)] == [i for i in everything if i % 2 == 0][:10]


def test_when_nothing_is_left_to_train_on_it_says_so() -> None:
    all_held_out = dataclasses.replace(BITS, args={"max_n": 20}, heldout_items=20)
    with pytest.raises(ConfigError, match="held out"):
        next(PromptPipeline(config(task=all_held_out)))


@pytest.mark.parametrize("other", [config(seed=1), config(task=TaskConfig(args={}, heldout_items=16))])
def test_the_state_of_another_stream_is_refused(other: Config) -> None:
    with pytest.raises(ConfigError, match="other settings"):
        PromptPipeline(config()).restore(PromptPipeline(other).state())


@pytest.mark.parametrize("nonsense", [b"", b"{", b"[]", b'{"format": 9}', b'{"format": 1, "grain": 3}'])
def test_malformed_data_is_not_a_state(nonsense: bytes) -> None:
    with pytest.raises(DataError, match="not the state"):
        PromptPipeline(config()).restore(nonsense)


def file_config(path: Path, rows: int, **task: int) -> Config:
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": str(i)}) + "\n" for i in range(rows)))
    return config(task=TaskConfig(source="jsonl", path=str(path), **task))


def test_a_file_is_read_in_epochs_of_new_order_and_its_end_is_held_out(tmp_path: Path) -> None:
    cfg = file_config(tmp_path / "rows.jsonl", 50, heldout_items=10)
    assert sorted(task.index for task in heldout.tasks(cfg)) == list(range(40, 50))
    drawn = [task.index for task in draw(PromptPipeline(cfg), 80)]
    assert sorted(drawn[:40]) == sorted(drawn[40:]) == list(range(40))
    assert drawn[:40] != drawn[40:]


def test_a_changed_file_does_not_resume(tmp_path: Path) -> None:
    state = PromptPipeline(file_config(tmp_path / "a", 50, heldout_items=10)).state()
    with pytest.raises(ConfigError, match="other settings"):
        PromptPipeline(file_config(tmp_path / "a", 51, heldout_items=10)).restore(state)


@pytest.mark.process
def test_no_backend_is_initialised_by_using_the_room() -> None:
    """With an unknown platform, any use of a JAX device fails."""
    code = (
        "from jaxroll.config import Config; from jaxroll.data import preparation, tasks\n"
        "stream = tasks.PromptPipeline(Config()); next(stream); stream.restore(stream.state()); next(stream)\n"
        "preparation.examples(Config(), 3); tasks.tasks(Config())\n"
        "import jax\n"
        "try: jax.devices()\n"
        "except RuntimeError: print('untouched')\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "nosuchplatform"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "untouched", done.stderr


def test_skipped_items_say_why() -> None:
    pipeline = PromptPipeline(config(task=BITS))
    reasons = {r.reason for r in map(pipeline._admit, range(200)) if isinstance(r, candidates.SkippedItem)}
    assert reasons and all("held out" in reason for reason in reasons)


# --- messages before the question

SHOWN = dataclasses.replace(TaskConfig(heldout_items=8), system_prompt="reverse!", few_shot=[["abc", "cba"]])


def test_system_prompt_and_examples_come_before_the_question() -> None:
    shown = config(task=dataclasses.replace(SHOWN, max_prompt_tokens=40))
    pipeline = PromptPipeline(shown)
    task = next(pipeline)
    assert [message.role for message in task.messages] == ["system", "user", "assistant", "user"]
    assert [message.content for message in task.messages[:3]] == ["reverse!", "abc", "cba"]
    text = pipeline.tokenizer.decode(pipeline.tokenizer.render(task.messages))
    assert "reverse!" in text, "the alphabet has the characters of the system prompt"
    plain = next(PromptPipeline(config(task=TaskConfig(heldout_items=8))))
    assert (plain.messages[0], plain.question_hash) == (task.messages[3], task.question_hash)
    assert sources.alphabet(shown.task) == pipeline.tokenizer.alphabet  # type: ignore[attr-defined]


def test_another_system_prompt_is_another_stream() -> None:
    shown = config(task=dataclasses.replace(SHOWN, max_prompt_tokens=40))
    state = PromptPipeline(shown).state()
    with pytest.raises(ConfigError, match="other settings"):
        PromptPipeline(config(task=dataclasses.replace(shown.task, system_prompt="reverse"))).restore(state)


# --- mixtures

MIXTURE = [
    {"label": "bits", "source": "reasoning_gym", "name": "count_bits", "args": {"max_n": 30}, "weight": 1},
    {"label": "spell", "source": "reasoning_gym", "name": "spell_backward", "args": {"max_word_len": 5}, "weight": 3},
]
MIXED = TaskConfig(mixture=MIXTURE, heldout_items=16)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"question": f"{n}"} for n in range(9)], "sft.steps = .*no item of the source rows.* has no answer"),
        ([{"question": f"{n}", "answer": "9" * 400} for n in range(9)], "learner.row_tokens = .*worked answer"),
    ],
    ids=["absent", "too long"],
)
def test_worked_answers_of_every_source_are_checked(tmp_path: Path, rows: list[dict[str, str]], words: str) -> None:
    """The warm start keeps the shares of a mixture: without answers of one source it would find no example."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    column = "answer" if "answer" in rows[0] else "none"
    last = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "answer_column": column, "heldout_items": 1}
    task = TaskConfig(mixture=[MIXTURE[0] | {"heldout_items": 4}, last], prompt_style="full", max_prompt_tokens=200)
    with pytest.raises(ConfigError, match=words):
        preparation.check(config(task=task))
    preparation.check(dataclasses.replace(config(task=task), sft=SftConfig(steps=0)))


def test_shares_of_a_mixture_are_exact_although_items_are_skipped() -> None:
    pipeline = PromptPipeline(config(task=MIXED))
    found = [task.args()["source"] for task in draw(pipeline, 400)]
    assert found.count("bits") == 100
    assert all(block.count("bits") == 1 for block in zip(*[iter(found)] * 4, strict=True))
    assert pipeline.skipped["held_out"] > 10, "of 30 numbers 4 are held out, and each epoch meets them again"


def test_sources_of_a_mixture_have_orders_of_their_own() -> None:
    same = {"source": "reasoning_gym", "name": "count_bits", "args": {"max_n": 10**6}}
    parts = [{**same, "label": label} for label in ("first", "second")]
    found = draw(PromptPipeline(config(task=TaskConfig(mixture=parts, heldout_items=16))), 40)
    first, second = ([task.messages for task in found if task.args()["source"] == part["label"]] for part in parts)
    assert len(first) == len(second) == 20 and first != second


def test_held_out_questions_are_of_all_sources_and_never_trained() -> None:
    held = candidates.tasks(config(task=MIXED))
    assert [task.args()["source"] for task in held] == ["bits"] * 4 + ["spell"] * 12
    trained = {task.question_hash for task in draw(PromptPipeline(config(task=MIXED)), 1000)}
    assert not heldout.overlap(held, trained)


@settings(max_examples=5, deadline=None)
@given(position=st.integers(0, 300))
def test_a_restored_mixture_continues_with_the_same_tasks_and_counts(position: int) -> None:
    first, second = PromptPipeline(config(task=MIXED)), PromptPipeline(config(task=MIXED))
    draw(first, position)
    draw(second, 7)
    second.restore(first.state())
    assert second.skipped == first.skipped
    assert draw(second, 50) == draw(first, 50)
    assert second.skipped == first.skipped


def test_the_seed_decides_the_order_within_a_source() -> None:
    one, other = (draw(PromptPipeline(config(seed, MIXED)), 40) for seed in (1, 2))
    assert [task.index for task in one] != [task.index for task in other]
    assert [task.args()["source"] for task in one] == [task.args()["source"] for task in other]


def test_the_order_of_prompts_does_not_depend_on_the_address_of_a_judge() -> None:
    def judged(**settings: object) -> Config:
        judge = {"reward": "judge", "reward_args": {"judge": {"url": "http://a:1/v1", "model": "m"} | settings}}
        found = config(task=TaskConfig(mixture=[MIXTURE[0], MIXTURE[1] | judge], heldout_items=16))
        sets = {"some": {"name": "count_bits", "args": {"max_n": 30}, "items": 2, **judge}}
        return dataclasses.replace(found, evaluator=EvaluatorConfig(sets=sets))

    first, second = PromptPipeline(judged()), PromptPipeline(judged(url="http://b:2/v1", budget_calls=9))
    draw(first, 5)
    second.restore(first.state())
    assert draw(second, 20) == draw(first, 20)
    with pytest.raises(ConfigError, match="other settings"):
        PromptPipeline(judged(model="n")).restore(first.state())


def test_a_state_of_another_mixture_is_refused() -> None:
    state = PromptPipeline(config(task=MIXED)).state()
    heavier = [MIXTURE[0] | {"weight": 2}, MIXTURE[1]]
    for changed in (TaskConfig(mixture=heavier, heldout_items=16), TaskConfig(mixture=MIXTURE[:1], heldout_items=16)):
        with pytest.raises(ConfigError, match="other settings"):
            PromptPipeline(config(task=changed)).restore(state)


def test_worked_examples_come_from_all_sources() -> None:
    found = preparation.examples(config(task=MIXED), 40)
    assert [task.args()["source"] for task, _ in found].count("bits") == 10


# --- long prompts


@pytest.mark.parametrize(
    ("policy", "shown"), [("truncate_left", ["abc", "defghij"]), ("truncate_right", ["abc", "abcdefg"])]
)
def test_long_prompts_lose_the_tokens_at_one_side(tmp_path: Path, policy: str, shown: list[str]) -> None:
    rows = [
        {"question": "abc", "answer": "a"},
        {"question": "abcdefghij", "answer": "b"},
        {"question": "held", "answer": "c"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # bos and turn take two of nine tokens
    task = TaskConfig(source="jsonl", path=str(tmp_path / "rows.jsonl"), max_prompt_tokens=9, heldout_items=1)
    cut = dataclasses.replace(task, long_prompts=policy)  # type: ignore[arg-type]
    pipeline = PromptPipeline(config(task=cut))
    found = {task.messages[0].content: task for task in draw(pipeline, 20)}
    assert sorted(found) == sorted(shown)
    assert pipeline.skipped["truncated"] == 10
    dropping = PromptPipeline(config(task=task))
    assert {task.messages[0].content for task in draw(dropping, 20)} == {"abc"}
    assert dropping.skipped["too_long"] in (19, 20)
    assert found[shown[1]].question_hash == question_hash("abcdefghij")


def test_a_prompt_whose_other_messages_are_too_long_is_dropped() -> None:
    task = dataclasses.replace(SHOWN, long_prompts="truncate_left", max_prompt_tokens=10)
    with pytest.raises(ConfigError, match="prompt tokens"):
        preparation.check(config(task=task))
