"""Sources of a mixture that are played and scored in their own way: a question, another question and a game at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.config.parsing import SOURCE_ITEMS, labels, played_tasks
from jaxroll.data.tasks import Candidates, WorkedTask, evaluated
from jaxroll.envs import registry
from jaxroll.envs.executors import Executors
from jaxroll.errors import DataError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Finished, Grant, Member, Message, Version, VersionRun
from jaxroll.roles.session import episode_counts
from jaxroll.rollout import episode
from jaxroll.rollout.episode import RolloutManager, Score, own_bounds, scores
from tests.harness.rollout_proxy import LocalPool, run_group

GYM = {"source": "reasoning_gym"}
BITS = GYM | {"label": "bits", "name": "count_bits", "args": {"max_n": 30}, "reward": "0.5*reasoning_gym"}
LAKE = {"label": "lake", "source": "game", "name": "frozen_lake", "env": "frozen_lake", "args": {"size": 3}}
SPELL = GYM | {"label": "spell", "name": "spell_backward", "args": {"max_word_len": 5}}
SHOWN = {"label": "shown", "name": "gcd", "system_prompt": "12"} | GYM
SET = {"name": "count_bits", "args": {"max_n": 30}, "items": 2}
SETS = {"double": SET | {"reward": "2*reasoning_gym"}, "more": SET}


def config(*mixture: dict[str, Any], **task: Any) -> Config:
    limits = {"max_prompt_tokens": 40, "max_episode_tokens": 120, "heldout_items": 4}
    return configs.parse({"task": {"mixture": list(mixture), **limits, **task}, "evaluator": {"sets": SETS}})


MIXED = config(BITS, LAKE, SPELL)


class Scripted:
    """A model that answers as the worked conversations do; odd members begin with a wrong answer."""

    def __init__(self, found: dict[int, WorkedTask], words: Any) -> None:
        self._found, self._words, self._turns = found, words, Counter[tuple[int, int]]()

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        worked = [message.content for message in self._found[key.group].worked if message.role == "assistant"]
        answer = "?" if key.member % 2 else worked[self._turns[key.group, key.member]]
        self._turns[key.group, key.member] += 1
        tokens = [*self._words.encode(answer), self._words.eos_id]
        runs = (VersionRun(Version(0, 0), len(tokens)),)
        return Completion(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), runs, "stop")


def played(made: Config, count: int = 4) -> tuple[dict[tuple[str, int], list[Finished]], dict[str, Any]]:
    """The outcomes by source and member, and the row of counts; `count` items of each source are played at once."""
    candidates = Candidates(made)
    items = [candidates.at(index) for part in candidates.parts for index in part.ranges.train[:count]]
    found = dict(enumerate(items))
    outcomes: dict[tuple[str, int], list[Finished]] = {}

    async def put(member: Member) -> None:
        assert isinstance(member.outcome, Finished), member.outcome
        outcomes.setdefault((found[member.group].task.args()["source"], member.member), []).append(member.outcome)

    async def job() -> dict[str, Any]:
        executors = Executors(_Pool(), made)  # type: ignore[arg-type]
        words = candidates.tokenizer
        manager = RolloutManager(
            Scripted(found, words), executors.create, words, SamplingParams(max_tokens=12),
            bounds=episode.bounds_of(made), own_bounds=own_bounds(made), sources=[p.label for p in candidates.parts],
        )  # fmt: skip
        grants = [Grant(group, item.task, ((0, 0), (1, 0)), 30.0) for group, item in found.items()]
        await asyncio.gather(*(run_group(manager, grant, put) for grant in grants))
        await executors.close()
        return episode_counts(manager, executors)

    return outcomes, asyncio.run(job())


class _Pool(LocalPool):
    restarts = failed_starts = found_slow = 0
    rejected = failed = MappingProxyType({})
    remote = None


def test_only_sources_with_keys_of_their_own_have_an_environment_of_their_own() -> None:
    candidates = Candidates(MIXED)
    envs = [candidates.at(part.ranges.train[0]).task.env for part in candidates.parts]
    assert envs == ["single_turn@bits", "frozen_lake@lake", "single_turn"]
    sets = {name: {task.env for task in found} for name, found in evaluated(MIXED, candidates).items()}
    assert sets == {"heldout": {*envs}, "double": {"single_turn@sets.double"}, "more": {"single_turn"}}


def test_a_set_of_games_is_played_with_the_settings_that_made_its_items() -> None:
    game = {key: LAKE[key] for key in ("source", "name")}
    task = game | {"env": "frozen_lake", "args": {"size": 4}}
    made = configs.parse({"task": task, "evaluator": {"sets": {"usual": {"items": 2} | game, "same": {"items": 2}}}})
    assert {env: section.args for env, section in played_tasks(made).items()} == {
        "frozen_lake": {"size": 4}, "frozen_lake@sets.usual": {},
    }  # fmt: skip


def test_each_source_of_a_run_gets_its_own_environment_and_reward() -> None:
    outcomes, row = played(MIXED)
    rewards = {key: {outcome.reward for outcome in found} for key, found in outcomes.items()}
    right = {("bits", 0): {0.5}, ("lake", 0): {1.0}, ("spell", 0): {1.0}}
    assert rewards == right | {("bits", 1): {0.0}, ("lake", 1): {0.0}, ("spell", 1): {0.0}}
    names = {key: {*found[0].reward_parts} - {"truncated"} for key, found in outcomes.items() if not key[1]}
    assert names["bits", 0] == {"reasoning_gym", "raw_score", "correct"} and names["spell", 0] == {"raw_score"}
    assert names["lake", 0] == {"success", "fell", "turns", "misread"}
    assert max(outcome.reward_parts["turns"] for outcome in outcomes["lake", 0]) > 1, "the game has one turn only"
    assert {name: (of["episodes"], of["reward"]) for name, of in row["sources"].items()} == {
        "bits": (8, 0.25), "lake": (8, 0.5), "spell": (8, 0.5),
    }  # fmt: skip
    tokens = [sum(run.count for run in outcome.versions) for member in (0, 1) for outcome in outcomes["lake", member]]
    assert row["sources"]["lake"]["tokens"] == np.mean(tokens) and row["failed_by_source"] == {}


def test_limits_of_a_source_are_its_own() -> None:
    outcomes, _ = played(config(BITS, LAKE | {"max_turns": 1}, LAKE | {"label": "long"}))
    ends = {label: {(one.finish, one.reward) for one in outcomes[label, 0]} for label in ("lake", "long", "bits")}
    assert ends == {"lake": {("length", 0.0)}, "long": {("done", 1.0)}, "bits": {("stop", 0.5)}}
    bounds = own_bounds(config(BITS | {"max_episode_tokens": 60}, LAKE | {"max_turns": 3}))
    assert [(bounds[name].tokens, bounds[name].turns) for name in ("single_turn@bits", "frozen_lake@lake")] == [
        (60, 0), (120, 3),
    ]  # fmt: skip


def test_items_of_a_held_out_set_may_have_any_index() -> None:
    sets = {"far": SET | {"heldout_start": 3 * SOURCE_ITEMS}}
    made = replace(MIXED, evaluator=replace(MIXED.evaluator, sets=sets))
    candidates = Candidates(made)
    (task, *_) = evaluated(made, candidates)["far"]
    assert task.index >= 3 * SOURCE_ITEMS

    async def job() -> list[list[Score]]:
        executors = Executors(_Pool(), made)  # type: ignore[arg-type]
        manager = RolloutManager(
            Scripted({0: WorkedTask(task, (Message("assistant", "1"),))}, candidates.tokenizer), executors.create,
            candidates.tokenizer, SamplingParams(max_tokens=12), sources=labels(made),
        )  # fmt: skip
        found = await scores(manager, [task], candidates.tokenizer, Version(0, 0), permits=1)
        await executors.close()
        return found

    assert [(score.failed, score.pinned) for score in asyncio.run(job())[0]] == [("", True)]


def test_a_source_may_have_a_system_prompt_of_its_own() -> None:
    candidates = Candidates(config(BITS, SHOWN, system_prompt="0"))
    found = [candidates.at(part.ranges.train[0]).task.messages for part in candidates.parts]
    assert [(messages[0].role, messages[0].content) for messages in found] == [("system", "0"), ("system", "12")]


def test_a_task_of_an_unknown_source_is_refused() -> None:
    """As after a change of the config, which the store refuses first."""
    with pytest.raises(DataError, match="no source 'gone'"):
        Executors(_Pool(), MIXED).create("single_turn@gone")  # type: ignore[arg-type]


def test_a_run_uses_processes_if_one_of_its_sources_does() -> None:
    assert not registry.uses_processes(MIXED)
    slow = replace(MIXED.task, mixture=[BITS, SPELL | {"env": "tests.harness.envs.blocking:in_process"}])
    assert registry.uses_processes(replace(MIXED, task=slow))
