"""The lake's rules against gymnasium's, its text, and the play of a teacher."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from jaxroll.envs import frozen_lake as lakes

SETTINGS = lakes.Settings(size=4, ice=0.7)


@pytest.mark.parametrize("slippery", [False, True], ids=["ice that holds", "slippery"])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_the_dynamics_are_gymnasiums(size: int, slippery: bool) -> None:
    """Every place and action of a few lakes: the same chances of the same places, and the same ends."""
    toy = pytest.importorskip("gymnasium.envs.toy_text.frozen_lake")
    for seed in range(5):
        lake = lakes.lake(seed, lakes.Settings(size=size, ice=0.7))
        letters = lake.cells.replace(".", "F").replace("O", "H")
        rows = [letters[i : i + size] for i in range(0, size * size, size)]
        rows[0] = "S" + rows[0][1:]
        world = toy.FrozenLakeEnv(desc=rows, is_slippery=slippery)
        assert toy.is_valid([list(row) for row in rows], size), "the goal can be reached"
        for place in (place for place in range(size * size) if not lake.ends(place)):
            for action in range(4):
                theirs: Counter[tuple[int, bool, int]] = Counter()
                for chance, to, reward, over in world.P[place][action]:
                    theirs[to, over, reward] += chance
                turns = [(action + side) % 4 for side in ((-1, 0, 1) if slippery else (0,))]
                ours = Counter(lake.to(place, turn) for turn in turns)
                assert {to: n / len(turns) for to, n in ours.items()} == pytest.approx(
                    {to: chance for (to, _, _), chance in theirs.items()}
                )
                assert all((lake.ends(to), lake.cells[to] == "G") == (over, reward == 1) for to, over, reward in theirs)


def test_slippery_ice_slides_to_every_side_alike() -> None:
    random = Random(0)
    slid = Counter(lakes.executed_action(1, True, random) for _ in range(3000))
    assert set(slid) == {0, 1, 2} and all(900 < count < 1100 for count in slid.values())
    assert {lakes.executed_action(1, False, random) for _ in range(100)} == {1}


def test_distances_are_those_of_a_slow_search() -> None:
    """Bellman's equation until nothing changes, on lakes with holes and dead ends."""
    for seed in range(30):
        lake = lakes.lake(seed, lakes.Settings(size=5, ice=0.6))
        far = len(lake.cells)
        slow = [0 if cell == "G" else far for cell in lake.cells]
        for _ in range(far):
            for place, cell in enumerate(lake.cells):
                if cell == ".":
                    slow[place] = min([slow[place], *(1 + slow[lake.to(place, action)] for action in range(4))])
        found = {place: steps for place, steps in enumerate(slow) if steps < far and lake.cells[place] != "O"}
        assert dict(lake.distances) == found


def test_a_view_shows_the_player_and_the_lake() -> None:
    lake = lakes.Lake("..O..G.OG"[:4] + "....G"[:5])
    assert lake.shown(4) == "..O\n.@.\n..G"
    assert lakes.lake(3, SETTINGS) == lakes.lake(3, SETTINGS) != lakes.lake(4, SETTINGS)


@pytest.mark.parametrize(
    ("answer", "action"),
    [("left", 0), (" Down\n", 1), ("I go right.", 2), ("not left but up", 3), ("", None), ("lefty", None), ("l", None)],
)
def test_an_action_is_a_word(answer: str, action: int | None) -> None:
    assert lakes.action_in(answer) == action


def test_an_answer_without_an_action_changes_nothing() -> None:
    game = lakes.Game(lakes.Lake("...." * 3 + "...G"), slippery=False, seed=0)
    assert game.act("hm") == "?\n" + game.lake.shown(0)
    assert game.act("right").startswith(".@..")
    assert not game.over


def test_a_teacher_without_noise_takes_a_shortest_way() -> None:
    for seed in range(50):
        lake = lakes.lake(seed, SETTINGS)
        said = lakes.worked(lake, SETTINGS, seed, noise=0.0)
        answers = [message.content for message in said if message.role == "assistant"]
        assert len(answers) == lake.distances[0]
        assert [message.role for message in said] == ["assistant", *["user", "assistant"] * (len(answers) - 1)]
        game = lakes.Game(lake, slippery=False, seed=seed)
        views = [game.act(answer) for answer in answers]
        assert game.won and views[:-1] == [message.content for message in said if message.role == "user"]


def test_noise_makes_a_worse_teacher() -> None:
    def won(noise: float) -> int:
        count = 0
        for seed in range(200):
            game = lakes.Game(lakes.lake(seed, SETTINGS), slippery=False, seed=seed)
            for message in lakes.worked(game.lake, SETTINGS, seed, noise):
                if message.role == "assistant":
                    game.act(message.content)
            count += game.won
        return count

    assert won(0.0) == 200 > won(0.3) > won(0.7) > won(1.0)


@pytest.mark.parametrize("wrong", [{"size": 1}, {"size": 17}, {"ice": 0.0}, {"ice": 1.1}, {"max_turns": -1}])
def test_settings_that_make_no_lake_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="size is 2"):
        lakes.Settings(**wrong)
