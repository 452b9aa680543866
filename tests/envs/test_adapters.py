"""Adapters of other packages, against the real packages: one config each, seeds, and the contract of environments."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxroll import config as configs
from jaxroll.config import Config, rules
from jaxroll.config.derived import episode_tokens
from jaxroll.data import preparation, sources, tasks
from jaxroll.data.tasks import Candidates
from jaxroll.envs import registry
from jaxroll.errors import ConfigError
from jaxroll.records import Message
from jaxroll.testing.environments import check_environment
from jaxroll.text import tokenizers

ROOT = Path(__file__).parents[2]
GAMES = ["gymnasium_blackjack", "sokoban", "tool_calls", "shop"]
each_game = pytest.mark.parametrize("name", GAMES)


def loaded(name: str) -> Config:
    config = configs.load(ROOT / "configs" / f"{name}.py")
    return dataclasses.replace(config, task=dataclasses.replace(config.task, heldout_items=8))


def played(config: Config, task: Any, answers: list[str]) -> list[Any]:
    """The results of an episode in which the model gives `answers`."""
    env: Any = registry.factory(config.task.env)(None, config.task)  # type: ignore[arg-type]
    found = [env.reset(task, task.seed)]
    for answer in answers:
        found.append(env.step(answer))
        if found[-1].done:
            break
    env.close()
    return found


@each_game
def test_a_seed_gives_one_episode(name: str) -> None:
    config = loaded(name)
    candidates = Candidates(config)
    for index in range(6):
        candidate = candidates.at(index)
        assert candidates.at(index) == candidate
        answers = [message.content for message in candidate.worked if message.role == "assistant"] or ["0", "x"]
        assert played(config, candidate.task, answers) == played(config, candidate.task, answers)
    assert len({candidates.at(index).task.question_hash for index in range(40)}) > 10


@each_game
def test_worked_play_is_that_of_the_environment_and_fits_the_config(name: str) -> None:
    config = loaded(name)
    text = tokenizers.build(config.tokenizer, sources.alphabet(config.task))
    for task, worked in preparation.examples(config, 40):
        results = played(config, task, [message.content for message in worked if message.role == "assistant"])
        shown = [message for result in results[1:] for message in result.messages]
        views = [message for message in worked if message.role != "assistant"]
        assert (views and shown[: len(views)] == views) or not views
        runs = tokenizers.runs(text, task.messages, worked)
        assert all(len(run) <= config.sampling.max_tokens for run, trained in runs if trained)
        assert sum(len(run) for run, _ in runs) <= episode_tokens(config)


def test_a_number_of_games_is_played_again_and_again_without_the_held_out_ones() -> None:
    """In the training and in the warm start: 40 games, of which the last eight are held out."""
    config = loaded("shop")
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, args={**config.task.args, "games": 40}))
    rules.check(dataclasses.replace(config, task=dataclasses.replace(config.task, heldout_start=32)))
    heldout = {task.args()["seed"] for task in tasks.tasks(config)}
    trained = [task.args()["seed"] for task in itertools.islice(tasks.PromptPipeline(config), 96)]
    shown = [task.args()["seed"] for task, _ in preparation.examples(config, 96)]
    assert heldout == {*range(32, 40)} and {*trained} == {*shown} == {*range(32)}
    assert {*Counter(trained).values()} == {*Counter(shown).values()} == {3}, "an epoch has each game once"


@pytest.mark.parametrize("games", [0, -1, True, 2.0, "many"])
def test_a_wrong_number_of_games_is_refused(games: object) -> None:
    config = loaded("shop")
    with pytest.raises(ConfigError, match=r"task\.args\.games.*an integer above 0"):
        sources.open_source(dataclasses.replace(config.task, args={**config.task.args, "games": games}))


@pytest.mark.parametrize("name", [*GAMES, "code_repair"])
@pytest.mark.process
def test_it_keeps_the_contract(name: str) -> None:
    config = loaded(name)
    assert check_environment(config.task.env, config, episodes=16) == []


# --- gymnasium


def gymnasium_text(**settings: Any) -> Any:
    from jaxroll.envs.adapters import gymnasium_env

    return gymnasium_env.text_env(gymnasium_env.Settings(**settings))


@pytest.mark.parametrize(("answers", "rewards"), [(["x"] * 8, [0.0] * 8), (["0"], [0.0, 1.0])], ids=["unread", "stick"])
def test_a_goal_of_zero_is_not_reached_by_answers_that_are_no_action(answers: list[str], rewards: list[float]) -> None:
    config = loaded("gymnasium_blackjack")
    task = dataclasses.replace(config.task, args={**config.task.args, "goal": 0.0})
    config = dataclasses.replace(config, task=task)
    candidates, found = Candidates(config), set[float]()
    for index in range(12):
        *_, last = played(config, candidates.at(index).task, answers)
        found.add(last.reward)
    assert sorted(found) == sorted(set(rewards))


@pytest.mark.parametrize("settings", [
    {"id": "Blackjack-v1"},
    {"id": "FrozenLake-v1", "observation": "ansi", "actions": ["left", "down", "right", "up"]},
    {"id": "CartPole-v1", "actions": ["left", "right"]},
], ids=lambda settings: settings["id"])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_gymnasiums_checker_accepts_the_text(settings: dict) -> None:
    from gymnasium.utils.env_checker import check_env

    text = gymnasium_text(**settings)
    check_env(text, skip_render_check=True)
    assert text.observation_space.contains(text.reset(seed=0)[0])


def test_text_steps_are_those_of_the_environment_itself() -> None:
    """Every observation, reward and end of gymnasium's own CliffWalking, for the same actions."""
    import gymnasium

    names = ("up", "right", "down", "left")
    text, own = gymnasium_text(id="CliffWalking-v1", actions=names), gymnasium.make("CliffWalking-v1")
    assert text.reset(seed=3)[0] == str(own.reset(seed=3)[0])
    for action in (1, 0, 3, 2, 0, *[1] * 11, 2, 2):
        found, theirs = text.step(f"I go {names[action]}."), own.step(action)
        assert (found[0], *found[1:4]) == (str(theirs[0]), *theirs[1:4])
    assert text.step("nowhere")[0].startswith("?\n")


@pytest.mark.parametrize(("settings", "words"), [
    ({"id": "Nonsense-v0"}, "gymnasium cannot make it"),
    ({"id": "Pendulum-v1"}, "neither discrete nor text"),
    ({"id": "FrozenLake-v1", "actions": ["left"]}, "there are 4 actions"),
    ({"id": "CartPole-v1", "observation": "nowhere:f"}, "no such function"),
])  # fmt: skip
def test_what_has_no_text_is_refused(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        gymnasium_text(**settings)


def test_a_rendered_view_marks_the_coloured_cell() -> None:
    env = gymnasium_text(id="FrozenLake-v1", make={"is_slippery": False}, observation="ansi")
    assert env.reset(seed=0)[0].startswith("[S]FFF\nFHFH")
    assert "S[F]FF" in env.step("2")[0]


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxroll.envs.adapters.games import library

    with pytest.raises(ConfigError, match=r"jaxroll\[envs-more\]"):
        library("a_package_that_nobody_has", "it", "envs-more")


# --- Sokoban


def test_solutions_are_right_for_the_scorer_of_reasoning_gym() -> None:
    """reasoning-gym simulates our solutions on our levels by its own rules; a solution without its end is none."""
    from jaxroll.envs.adapters import text_games as sokoban
    from jaxroll.rewards import scorers

    judge = scorers.import_library("reasoning_gym").create_dataset("sokoban", seed=0, size=1)
    signs = str.maketrans({".": "-", "#": "+", "$": "@", "G": "X", "@": "*", "*": "$", "+": "%"})
    settings = sokoban.SokobanSettings(rows=5, columns=5, boxes=2, walls=0.1, pulls=6)
    for seed in range(25):
        start = sokoban.level(seed, settings)
        moves = sokoban.solution(start)
        assert moves, "the generator pulls boxes from their goals, so there is a solution"
        rows = ["+" * 7, *(f"+{row.translate(signs)}+" for row in start.text().split("\n")), "+" * 7]
        entry = {"metadata": {"gamestr": "\n".join(" ".join(row) for row in rows)}}
        letters = "".join(move[0].upper() for move in moves)
        assert judge.score_answer(letters, entry) == 1.0 > judge.score_answer(letters[:-1], entry), seed


def test_walls_and_second_boxes_stop_a_push() -> None:
    from jaxroll.envs.adapters.text_games import Level

    level = Level(3, 3, frozenset(), frozenset({(0, 2)}), frozenset({(1, 1), (1, 2)}), (1, 0))
    assert level.after("right") == level
    free = dataclasses.replace(level, boxes=frozenset({(1, 1)}))
    pushed = free.after("right")
    assert (pushed.player, pushed.boxes) == ((1, 1), frozenset({(1, 2)}))
    assert pushed.after("right") == pushed, "the edge is a wall"
    assert pushed.before("right") == free


# --- tool calls


def test_calls_are_checked_against_their_schema() -> None:
    from jaxroll.envs.adapters import tool_calls

    schema = {
        "type": "object",
        "required": ["city"],
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
    }
    weather = tool_calls.Tool("weather", "", schema, lambda city, days=1: [city, days])

    def reply(text: str) -> Any:
        body = tool_calls.first_call(text)
        assert body is not None
        return tool_calls.result(body, (weather,))

    assert reply(tool_calls.call_text("weather", {"city": "Rome", "days": 2})) == ('["Rome", 2]', True)
    for arguments, words in [
        ({}, "city is missing"),
        ({"city": 3}, "of type string"),
        ({"city": "Bonn"}, "one of"),
        ({"city": "Rome", "days": True}, "of type integer"),
        ({"city": "Rome", "x": 1}, "does not have"),
    ]:
        text, ran = reply(tool_calls.call_text("weather", arguments))
        assert words in text and not ran
    for body in ("", "[]", "{", '{"name": 1}', '{"name": "weather", "arguments": []}', "[" * 10_000, "9" * 30_000):
        text, ran = tool_calls.result(body, (weather,))
        assert "error" in text and not ran
    assert tool_calls.first_call("<tool_call>") is None is tool_calls.first_call("</tool_call><tool_call>")


def test_full_prompts_carry_the_schemas_and_compact_ones_do_not() -> None:
    config = loaded("tool_calls")
    assert Candidates(config).at(0).task.tools() == []
    full = sources.open_source(dataclasses.replace(config.task, prompt_style="full")).item(0)
    (message,) = full.messages
    assert [tool["function"]["name"] for tool in full.env_args["tools"]] == ["price", "stock"]
    assert message.content.startswith("What is the ")


def test_only_the_right_tool_leads_to_the_answer() -> None:
    from jaxroll.envs.adapters import tool_calls

    config = loaded("tool_calls")
    for index in range(20):
        problem = tool_calls.stocktaking(index)
        (call,) = problem.teacher
        right = played(config, Candidates(config).at(index).task, [tool_calls.call_text(*call), problem.answer])
        assert right[1].messages == (Message("tool", problem.answer),) and right[2].reward == 1.0
        assert right[2].reward_parts["calls_ok"] == 1.0
        wrong = played(config, Candidates(config).at(index).task, ["0"])
        assert wrong[1].done and wrong[1].reward == 0.0


# --- repair of a file


def test_an_edit_replaces_one_line_and_keeps_its_indentation() -> None:
    from jaxroll.envs.adapters.code_repair import with_edit

    lines = ["def f():", "    return 1"]
    assert with_edit(lines, "2: return 2\nand more") == ["def f():", "    return 2"]
    for answer in ("", "return 2", "0: x", "3: x", "-1: x", "2 return", "9" * 50 + ": x", "1:" + "x" * 200_000):
        assert with_edit(lines, answer) is None, answer[:20]


@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_the_teacher_of_repairs_edits_until_the_tests_pass(noise: float) -> None:
    """By Python itself, on files of our own making: all tests fail before, and those that it is shown after an edit."""
    from jaxroll.envs.adapters import code_repair

    config, found = loaded("code_repair"), Counter[int]()
    source = code_repair.CodeRepairSource(
        dataclasses.replace(config.task, args={"lines": 3, "tests": 3, "max_turns": 4, "noise": noise})
    )
    for seed in range(60):
        made, worked = code_repair.broken(seed, code_repair.Settings(lines=3, tests=3)), source.item(seed).worked
        lines: list[str] | None = list(made.lines)
        assert failing_by_python(lines, made.tests) == list(made.tests)
        for message in worked:
            if message.role == "assistant":
                lines = code_repair.with_edit(lines or (), message.content)
            else:
                assert "\n".join(failing_by_python(lines or (), made.tests)) == message.content
        edits = len(worked) // 2 + 1
        found[edits] += 1
        assert worked[-1].role == "assistant" and (edits == 4 or not failing_by_python(lines or (), made.tests))
    assert set(found) == ({1} if noise == 0 else {1, 2, 3, 4})


def failing_by_python(lines: Sequence[str], tests: Sequence[str]) -> list[str]:
    names: dict = {}
    exec("\n".join(lines), names)
    calls = [(test, *test.removeprefix("assert ").split("==")) for test in tests]
    return [test for test, call, value in calls if eval(call, names) != int(value)]


@pytest.mark.process
def test_the_sandbox_judges_each_edit() -> None:
    from jaxroll.envs.adapters import code_repair
    from jaxroll.envs.adapters.code_repair import CodeRepair
    from jaxroll.records import Task
    from jaxroll.rewards.scoring_pool import ScoringPool

    config = loaded("code_repair")
    file = "def f(a, b):\n    return a - b"
    tests = ["assert f(1, 2) == 3", "assert f(5, 0) == 5"]
    task = Task(0, (Message("user", "?"),), "code_repair", json.dumps({"file": file, "tests": tests}), 0, "")

    async def edits() -> list[Any]:
        pool = ScoringPool(1, libraries=(), programs=True)
        pool.start()
        try:
            env, found = CodeRepair(pool, config.task), []
            await env.reset(task, 0)
            for answer in ("hm", "2: return a * b", "2: import os; os.abort()", "2: return a + b"):
                found.append(await env.step(answer))
            await env.close()
            return found
        finally:
            pool.close()

    unread, worse, dead, right = asyncio.run(edits())
    assert unread.messages == (Message("tool", code_repair.UNREAD),)
    assert worse.messages == dead.messages == (Message("tool", "\n".join(tests)),)
    assert right.done and right.reward == 1.0
    assert right.reward_parts == {"passed": 1.0, "edits": 4.0, "misread": 1.0}


# --- self-play


def test_turns_of_the_winner_are_reinforced_and_those_of_the_loser_are_not() -> None:
    """`player_parts`, through the learner's own samples and estimator, as configs/pettingzoo_tictactoe.py sets it."""
    import numpy as np

    from jaxroll.algorithms.advantages import segment_return
    from jaxroll.envs.adapters.games import player_parts
    from jaxroll.learner import minibatch
    from jaxroll.records import Finished, Member, Segment, Version, VersionRun

    def member(number: int, first: float) -> Any:
        parts = player_parts([0, 1, 0], {0: first, 1: -first})
        shown = Segment(np.arange(2, dtype=np.int32), np.zeros(2, np.uint8), np.zeros(2, np.float32))
        said = Segment(np.arange(3, dtype=np.int32), np.ones(3, np.uint8), np.zeros(3, np.float32))
        runs = (VersionRun(Version(0, 0), 9),)
        return minibatch.of_member(
            Member(0, number, 1, Finished((shown, said) * 3, "done", first, parts, runs)), Version(0, 0)
        )

    config = configs.load(ROOT / "configs" / "pettingzoo_tictactoe.py")
    assert config.learner.advantage == "segment_return"
    won, lost = segment_return([member(0, 1.0), member(1, -1.0)], config.learner.turn_discount)
    signs = np.sign(np.asarray(won)).tolist()
    assert signs == [0, 0, 1, 1, 1, 0, 0, -1, -1, -1, 0, 0, 1, 1, 1]
    assert np.array_equal(np.asarray(won), -np.asarray(lost))
