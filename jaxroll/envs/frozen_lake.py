"""FrozenLake in text: the model sees the lake, answers with a direction, and sees the lake again."""

from __future__ import annotations

from jaxroll.config import TaskConfig
from jaxroll.envs.registry import register
from jaxroll.envs.scoring import ScoringPool
from jaxroll.errors import DataError
from jaxroll.games import frozen_lake
from jaxroll.protocols import Place, StepResult
from jaxroll.records import Message, Task


@register("frozen_lake")
class FrozenLake:
    """Pays 1 at the goal and 0 in a hole or when the turns are over; an answer that names no direction costs a turn.

    The members of a group play one lake with one seed, so slippery ice does to all of them what it does to one.
    """

    place: Place = "loop"  # a step takes microseconds
    step_limit_s = 10.0

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self._game: frozen_lake.Game | None = None
        self._turns = self._misread = self._left = 0

    def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's messages: the lake with the player at its start."""
        args = task.args()
        self._game = frozen_lake.Game(frozen_lake.Lake(args["cells"]), bool(args["slippery"]), seed)
        self._turns, self._misread, self._left = 0, 0, int(args["max_turns"])
        return task.messages

    def step(self, answer: str) -> StepResult:
        """What the player sees after one move, or the end with its reward."""
        game = self._game
        if game is None:
            raise DataError("step() before reset(): there is no lake")
        self._turns, self._left = self._turns + 1, self._left - 1
        self._misread += frozen_lake.action_in(answer) is None
        view = game.act(answer)
        if not game.over and self._left > 0:
            return StepResult(done=False, messages=(Message("user", view),))
        parts = {"success": float(game.won), "fell": float(game.over and not game.won),
                 "turns": float(self._turns), "misread": float(self._misread)}  # fmt: skip
        return StepResult(done=True, reward=float(game.won), reward_parts=parts)

    def close(self) -> None:
        """Nothing to end."""
        self._game = None
