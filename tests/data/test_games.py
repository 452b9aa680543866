"""Games as sources: split by map, worked play that fits the tokenizer and the episode, nothing held out is taught."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.config.derived import episode_tokens
from jaxroll.data import preparation, sources
from jaxroll.data import tasks as heldout
from jaxroll.data.tasks import PromptPipeline
from jaxroll.envs import calculator
from jaxroll.envs.frozen_lake import FrozenLake
from jaxroll.records import Message, Task
from jaxroll.text import tokenizers

ROOT = Path(__file__).parents[2]
AGENTIC = [ROOT / "configs" / f"agentic_{name}.py" for name in ("frozen_lake", "calculator")]
agentic = pytest.mark.parametrize("path", AGENTIC, ids=lambda path: path.stem)


def loaded(path: Path) -> Config:
    config = configs.load(path)
    return dataclasses.replace(config, task=dataclasses.replace(config.task, heldout_items=64))


@agentic
def test_held_out_questions_are_neither_trained_on_nor_taught(path: Path) -> None:
    config = loaded(path)
    kept = heldout.tasks(config)
    trained = list(itertools.islice(PromptPipeline(config), 300))
    taught = [task for task, _ in preparation.examples(config, 300)]
    assert len(heldout.hashes(kept)) == len(kept)
    assert not heldout.overlap(kept, (task.question_hash for task in trained))
    assert not heldout.overlap(kept, (task.question_hash for task in taught))


@agentic
def test_conversations_fit_the_tokenizer_and_the_episode(path: Path) -> None:
    config = loaded(path)
    text = tokenizers.build(config.tokenizer, sources.alphabet(config.task))
    lengths = []
    for task, said in preparation.examples(config, 300):
        runs = tokenizers.runs(text, task.messages, said)
        assert [trained for _, trained in runs] == [False, True] * (len(runs) // 2)
        assert all(len(run) <= config.sampling.max_tokens for run, trained in runs if trained)
        answers = [text.decode(run[:-1]) for run, trained in runs if trained]
        assert answers == [message.content for message in said if message.role == "assistant"]
        lengths.append(sum(len(run) for run, _ in runs))
    assert max(lengths) <= episode_tokens(config)


def test_worked_conversations_match_the_environment() -> None:
    config = loaded(AGENTIC[0])
    for task, said in preparation.examples(config, 50):
        env = FrozenLake(None, config.task)  # type: ignore[arg-type]
        env.reset(task, task.seed)
        results = [env.step(message.content) for message in said if message.role == "assistant"]
        shown = [message for result in results for message in result.messages]
        assert shown[: len(results) - 1] == [message for message in said if message.role == "user"]


def test_the_tool_agrees_with_the_problems() -> None:
    """For every expression of the four kinds of problem the calculator's value is the gold answer."""
    for problem, settings in (("products", {}), ("chain_sum", {}), ("basic_arithmetic", {}), ("decimal_chain_sum", {})):
        base = loaded(AGENTIC[1])
        args = {"problem": problem, "problem_args": settings}
        source = sources.open_source(dataclasses.replace(base.task, args=args))
        for index in range(40):
            item = source.item(index)
            reply, right = calculator.tool_reply(item.compact)
            assert right and item.answer is not None
            assert float(reply) == pytest.approx(float(item.answer)), (problem, item)


def test_a_dialogue_is_the_tokens_of_an_episode() -> None:
    text = tokenizers.CharTokenizer("abc")
    bos, eos, turn, a, b, c = text.bos_id, text.eos_id, text.turn_id, 4, 5, 6
    said = (Message("assistant", "b"), Message("tool", "c"), Message("assistant", ""))
    found = tokenizers.runs(text, (Message("user", "a"),), said)
    assert found == [([bos, a, turn], False), ([b, eos], True), ([c, turn], False), ([eos], True)]


def test_full_prompts_say_the_rules() -> None:
    for path, words in ((AGENTIC[0], "Answer with one word"), (AGENTIC[1], "<calc>12*7</calc>")):
        task = dataclasses.replace(loaded(path).task, prompt_style="full")
        source = sources.open_source(task)
        assert words in source.item(3).question
        assert set(source.item(3).question) <= set(source.alphabet())


def test_a_task_carries_its_seed_and_its_lake() -> None:
    config = loaded(AGENTIC[0])
    tasks: list[Task] = list(itertools.islice(PromptPipeline(config), 20))
    assert len({task.args()["cells"] for task in tasks}) > 15
    assert all(task.seed == task.index and task.env == "frozen_lake" for task in tasks)
