"""A run of the real loops in one event loop (`jaxroll.sim.world`), with an engine and a trainer that only take time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from jaxroll import sharding
from jaxroll.config import Config, MeshConfig
from jaxroll.engine.sequence import EngineStats
from jaxroll.envs import registry
from jaxroll.errors import TransferError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, StepResult
from jaxroll.records import Claim, Finished, Message, Task, Version, VersionRef, VersionRun
from jaxroll.roles.evaluator import EvaluatorLoops
from jaxroll.roles.sampler import SamplerLoops
from jaxroll.sim.world import TOKENIZER, Feed, MemoryPublisher, World

ENV = "tests.harness.virtual_run:instant"


@registry.register("instant")
class Instant:
    """One question, one answer, at once."""

    step_limit_s = 60.0

    def __init__(self, pool: object, config: object) -> None: ...

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        return task.messages

    async def step(self, answer: str) -> StepResult:
        return StepResult(done=True, reward=1.0)

    async def close(self) -> None: ...


@dataclass
class Behaviour:
    """The engine of a sampler: seconds of an answer, and of fetching weights; `fails` makes a generation raise."""

    answer_s: Callable[[GenerationKey], float] = lambda key: 1.0
    fetch_s: float = 0.1
    fails: Callable[[GenerationKey], Exception | None] = lambda key: None
    weights_reachable: bool = True


class DelayEngine:
    """Replaces the engine, its thread and its proxy: up to `slots` answers at a time, each after a delay.

    An answer has two tokens: the first is of the version at its start, the last of the version at its end.
    """

    in_force_s = 0.0

    def __init__(self, behaviour: Behaviour, slots: int) -> None:
        self.behaviour, self._slots, self._version = behaviour, asyncio.Semaphore(slots), None
        self.engine = self.spans = self.latencies = self
        self.flush_wait_s = 0.0
        self.generations = 0

    def call(self, job: Callable[[], Any]) -> Future[Any]:
        """Run `job` at once, as the JAX thread does between two steps."""
        done: Future[Any] = Future()
        done.set_result(job())
        return done

    def warmup(self, params: object) -> None: ...

    def drop_waiting_swap(self) -> None: ...

    def swap(self, version: Version, params: object) -> None:
        self._version = version

    def stats(self) -> EngineStats:
        return EngineStats(version=self._version)

    def take(self) -> list[Any]:
        return []

    def take_intervals(self) -> list[Any]:
        return []

    def percentiles(self) -> dict[str, float]:
        return {}

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        async with self._slots:
            self.generations += 1
            version = self._version
            assert version is not None, "a token before the first weights"
            await asyncio.sleep(self.behaviour.answer_s(key))
            if (error := self.behaviour.fails(key)) is not None:
                raise error
            tokens = np.array([TOKENIZER.encode("b")[0], TOKENIZER.eos_id], np.int32)
            last = self._version
            assert last is not None
            runs = (VersionRun(version, 2),) if last == version else (VersionRun(version, 1), VersionRun(last, 1))
            return Completion(tokens, np.full(2, -0.5, np.float32), runs, "stop")

    async def fetch(self, ref: VersionRef) -> Any:
        await asyncio.sleep(self.behaviour.fetch_s)
        if not self.behaviour.weights_reachable:
            raise TransferError("the learner cannot be reached")
        return SimpleNamespace(fetched_bytes=0)

    def place(self, staged: object) -> dict[str, Any]:
        return {}


class Trained(NamedTuple):
    """A step of a learner: its groups, the age of its oldest token in versions, and the time of its start."""

    lineage: int
    step: int
    groups: tuple[int, ...]
    age: int
    at_s: float


class DelayTrainer:
    """Replaces the trainer: a step takes `train_s`, and `trained` lists the claims in order."""

    lora = reference = state = spec = None
    sends_adapters, prepares_ahead = False, True

    def __init__(self, train_s: float) -> None:
        self._train_s, self.trained = train_s, list[Trained]()
        self.layout = SimpleNamespace(mesh=sharding.build(MeshConfig()))
        self.programs = SimpleNamespace(recipe=SimpleNamespace(attention="none"))

    def warmup(self, progress: object) -> None: ...

    def abstract_state(self) -> None: ...

    def release(self) -> None: ...

    def base_digest(self) -> str:
        return ""

    def publishable_params(self) -> dict[str, Any]:
        return {}

    def prepare(self, claim: Claim) -> Any:
        return SimpleNamespace(claim=claim)

    def dispatch_step(self, ready: Any) -> Any:
        loop = asyncio.get_running_loop()
        claim: Claim = ready.claim
        outcomes = [member.outcome for group in claim.groups for member in group.members]
        oldest = min(run.version.step for o in outcomes if isinstance(o, Finished) for run in o.versions)
        groups = tuple(group.group for group in claim.groups)
        self.trained.append(Trained(claim.lineage, claim.step, groups, claim.step - oldest, loop.time()))
        end_s = loop.time() + self._train_s
        return SimpleNamespace(is_done=lambda: loop.time() >= end_s, left_s=lambda: end_s - loop.time())

    async def await_step(self, running: Any) -> dict[str, Any]:
        await asyncio.sleep(running.left_s())
        return {}


class VirtualRun(World):
    """A store and its roles, for one test. Use it as an asynchronous context manager."""

    def __init__(self, config: Config, run_dir: Path, prompts: int | None = None) -> None:
        super().__init__(config, run_dir, lambda: Feed(ENV, prompts))

    def sampler(self, index: int = 0, behaviour: Behaviour | None = None) -> asyncio.Future[None]:
        """Start a sampler; the future ends as its process would."""
        return self._start(f"sampler-{index}", behaviour or Behaviour(), lambda session: SamplerLoops(session).run())

    def evaluator(self, tasks: Sequence[Task], behaviour: Behaviour | None = None) -> asyncio.Future[None]:
        """Start an evaluator of `tasks`."""
        play = lambda session: EvaluatorLoops(session, {"heldout": tasks}).run()  # noqa: E731
        return self._start("evaluator", behaviour or Behaviour(), play)

    def learner(self, train_s: float = 1.0) -> asyncio.Future[int]:
        """Start a learner whose steps take `train_s`; see `start_learner`."""
        return self.start_learner(DelayTrainer(train_s), MemoryPublisher())

    def _start(self, role: str, behaviour: Behaviour, play: Any) -> asyncio.Future[None]:
        return self.start_engine(role, DelayEngine(behaviour, self.config.sampler.slots), play)
