"""Turns at the devices, for roles that share them within a process: a fair lock, and a trainer that heeds it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager

import jax
import numpy as np
from jax.sharding import Mesh

from jaxroll.config import Config
from jaxroll.learner.state import Params
from jaxroll.learner.trainer import Ready, Running, Trainer
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import Progress
from jaxroll.records import Claim
from jaxroll.sharding.rules import Rules


class Turn(AbstractContextManager):
    """A lock that is had in the order in which it was asked for: an engine between two steps asks again at once, and
    would keep a plain one from everybody else. Not reentrant."""

    def __init__(self) -> None:
        self._guard, self._taken = threading.Lock(), False
        self._asking: deque[threading.Semaphore] = deque()

    def __enter__(self) -> Turn:
        with self._guard:
            if not self._taken:
                self._taken = True
                return self
            mine = threading.Semaphore(0)
            self._asking.append(mine)
        mine.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._asking:
                self._asking.popleft().release()  # it is theirs now, and stays taken
            else:
                self._taken = False


class TrainerByTurns(Trainer):
    """A trainer whose programs are queued in turns. What only waits or reads (`finished`) takes none, and neither does
    what copies on each device for itself: the copy that is published, a checkpoint that is written or restored."""

    def __init__(
        self, turn: Turn, config: Config, spec: ModelSpec, mesh: Mesh, rules: Rules, *, key: jax.Array
    ) -> None:
        with turn:
            super().__init__(config, spec, mesh, rules, key=key)
        self._turn = turn

    def set_params(self, params: Mapping[str, np.ndarray]) -> None:
        """See Trainer."""
        with self._turn:
            super().set_params(params)

    def set_reference(self, params: Mapping[str, np.ndarray]) -> None:
        """See Trainer."""
        with self._turn:
            super().set_reference(params)

    def warmup(self, progress: Progress | None = None) -> None:
        """See Trainer."""
        with self._turn:
            super().warmup(progress)

    def prepared(self, claim: Claim) -> Ready:
        """See Trainer."""
        with self._turn:
            return super().prepared(claim)

    def started(self, ready: Ready) -> Running:
        """See Trainer."""
        with self._turn:
            return super().started(ready)

    def published(self) -> Params:
        """See Trainer."""
        with self._turn:
            return super().published()

    def frozen(self) -> Params:
        """See Trainer."""
        with self._turn:
            return super().frozen()
