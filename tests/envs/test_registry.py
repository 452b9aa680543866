"""Environments by name: the built-in one, and one that a user wrote in a single file with its own scorer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from jaxroll.config import TaskConfig
from jaxroll.envs import registry
from jaxroll.envs.registry import SingleTurn
from jaxroll.errors import ConfigError
from jaxroll.records import Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool

USER_FILE = '''
"""Counts how long the answer is: one file, environment and scorer."""
from jaxroll.envs import registry
from jaxroll.envs.registry import SingleTurn
from jaxroll.rewards import scorers

@scorers.register("length")
def length(args, answer):
    return 1.0 if len(answer) == args["length"] else 0.0

@registry.register("length_game")
class LengthGame(SingleTurn):
    pass
'''
TASK = Task(0, (Message("user", "3?"),), "length_game_file:length_game", '{"scorer": "length", "length": 3}', 0, "h")


def test_the_built_in_environment() -> None:
    assert isinstance(registry.create("single_turn", ScoringPool(1), TaskConfig()), SingleTurn)
    assert registry.scorer_modules("single_turn") == ()


@pytest.mark.process
def test_a_single_file_adds_an_environment_with_its_scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "length_game_file.py").write_text(USER_FILE)
    monkeypatch.syspath_prepend(tmp_path)

    async def play() -> list[float]:
        pool = ScoringPool(1, libraries=(), modules=registry.scorer_modules(TASK.env))
        pool.start()
        try:
            rewards = []
            for answer in ("abc", "ab"):
                env = registry.create(TASK.env, pool, TaskConfig())
                await env.reset(TASK, 0)
                rewards.append((await env.step(answer)).reward)
                await env.close()
            return rewards
        finally:
            pool.close()

    assert asyncio.run(play()) == [1.0, 0.0]


@pytest.mark.parametrize("name", ["nonesuch", "no_such_module_anywhere:env", "jaxroll.envs.registry:nonesuch"])
def test_an_unknown_environment_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.env"):
        registry.create(name, ScoringPool(1), TaskConfig())


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="already"):
        registry.register("single_turn")(lambda pool, config: None)


def test_another_game_does_not_take_the_name_of_the_shop(monkeypatch: pytest.MonkeyPatch) -> None:
    """All games import the module of the shop, and a user's environment may have that name."""
    registry.factory("single_turn")  # the modules of all runs are loaded once, before the registry is replaced
    monkeypatch.setattr(registry, "_FACTORIES", {})
    for module in ("text_games", "games"):
        monkeypatch.delitem(sys.modules, f"jaxroll.envs.adapters.{module}", raising=False)
    registry.factory("sokoban")
    assert list(registry._FACTORIES) == ["sokoban"]
    assert registry.factory("shop").__name__ == "Shop" and registry.factory("shop") is registry.factory("shop")
    del registry._FACTORIES["shop"]
    registry.register("shop")(SingleTurn)
    with pytest.raises(ConfigError, match=r"task\.env = 'shop'.*registered already"):
        registry.factory("shop")
