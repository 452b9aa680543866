"""Claims made of random tokens, and a small config for them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from jaxroll.config import Config, LearnerConfig, MeshConfig, ScheduleConfig
from jaxroll.records import Claim, ClaimedGroup, Finished, Member, Task, Version, VersionRun
from tests.harness.learner_segments import answer, prompt

VOCAB = 24


@pytest.fixture
def small_config() -> Callable[..., Config]:
    """A config for claims of `make_claim`; keyword arguments replace fields of its learner section.

    Micro-batches have three rows a shard, because a program is compiled for each half of an even number.
    """

    def make(alpha: float = 1.0, **learner: Any) -> Config:
        fields = {
            "micro_batch_rows": 3 * learner.get("mesh", MeshConfig()).shards,
            "row_tokens": 64,
            "mesh": MeshConfig(),
            "learning_rate": 1e-2,
            "warmup_steps": 1,
        }
        return Config(
            schedule=ScheduleConfig(alpha=alpha, groups_per_step=4, group_size=4),
            learner=replace(LearnerConfig(), **(fields | learner)),
        )

    return make


@pytest.fixture
def make_claim() -> Callable[..., Claim]:
    """A claim of random members: prompts of 3–8 tokens, answers of 2–9, sampled `age` steps before `step`."""

    def make(step: int = 1, groups: int = 4, size: int = 4, age: int = 0, seed: int = 0, version=None) -> Claim:
        rng = np.random.default_rng([seed, step])
        version = version or Version(0, step - age)
        claimed = []
        for group in range(groups):
            question = rng.integers(4, VOCAB, rng.integers(3, 9))
            members = []
            for member in range(size):
                count = int(rng.integers(2, 10))
                segments = (prompt(question), answer(rng.integers(4, VOCAB, count), -3 * rng.random(count)))
                runs = (VersionRun(version, count),)
                reward = float(rng.integers(0, 2))
                members.append(Member(group, member, 0, Finished(segments, "stop", reward, {}, runs)))
            claimed.append(ClaimedGroup(group, Task(group, (), "none", "{}", 0, str(group)), tuple(members)))
        return Claim(step, 0, tuple(claimed), shuffle_seed=step, replayed=False)

    return make


@pytest.fixture(scope="session")
def make_recipe() -> Callable[..., Any]:
    """The recipe of a nano model under a config, without the arrays and programs of a trainer."""
    from jaxroll import sharding
    from jaxroll.learner.step import Recipe
    from jaxroll.models import families
    from jaxroll.sharding import Layout

    def make(config: Config) -> Recipe:
        spec = families.spec("nano", vocab_size=VOCAB, compute_dtype=config.model.dtype)
        return Recipe.of(config, spec, Layout(sharding.build(config.learner.mesh), sharding.LEARNER))

    return make


FIRST: dict[str, tuple[Any, Any]] = {}  # by config, the trainer that was made for it and its first state
COMPILED: dict[Any, Any] = {}  # by what determines them, programs
# The fields of a recipe that a program does not read (`test_no_program_reads_a_field_over_which_it_is_shared`).
FORWARD = {"token_loss", "temperature", "row_tokens", "added", "logits_mb", "attention", "rows", "support", "streaming"}
UNREAD = {
    **{name: {*FORWARD, "optimizer"} for name in ("zeros", "merge", "divided")},
    **dict.fromkeys(("apply", "report", "layer", "rest"), FORWARD),
    **{name: {"optimizer", "token_loss", "added", "streaming"} for name in ("logprobs", "values")},
    "accumulate": {"optimizer", "streaming"},
}
# Settings that no loss reads (`test_no_loss_reads_a_setting_over_which_programs_are_shared`).
HOSTS = {"aggregation", "advantage", "raw_advantages", "gae_lambda", "gae_discount", "value_clip", "critic_offload"}
HOSTS |= {"reference_offload", "micro_batch_rows", "streaming"}


def described(thing: Any) -> Any:
    """A key that is equal for things that give equal programs: functions count by their code and what they enclose."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        left_out = HOSTS if isinstance(thing, LearnerConfig) else ()
        names = (field.name for field in dataclasses.fields(thing) if field.name not in left_out)
        return type(thing), *(described(getattr(thing, name)) for name in names)
    if isinstance(thing, FunctionType):
        thing = inspect.unwrap(thing)
        if "<locals>" not in thing.__qualname__:
            return thing
        cells = tuple(cell.cell_contents for cell in thing.__closure__ or ())
        return thing.__code__, described((cells, thing.__defaults__, thing.__kwdefaults__))
    if isinstance(thing, functools.partial):
        return described((thing.func, thing.args, thing.keywords))
    if isinstance(thing, Mapping):
        return tuple((name, described(value)) for name, value in sorted(thing.items()))
    if isinstance(thing, tuple | list):
        return type(thing), *map(described, thing)
    hash(thing)  # TypeError: say above how it is compared
    return type(thing), thing


class Shared(dict[tuple[str, int], Any]):
    """The programs of a trainer: an earlier one's if their recipes differ in nothing that the program reads."""

    def __init__(self, own: Any, recipe: Any, *settings: Any) -> None:
        super().__init__()
        self.own, self.recipe, self.settings = own, recipe, described(settings)

    def compile(self, name: str, rows: int = 0, progress: Any = None) -> None:
        """As `AheadOfTime.compile`."""
        self.compiled(name).compile(name, rows, progress)

    def compiled(self, name: str) -> Any:
        """The programs among which `name` is found."""
        names = (field.name for field in dataclasses.fields(self.recipe) if field.name not in UNREAD[name])
        settings = self.settings if name == "accumulate" else ()
        key = name, settings, *(described(getattr(self.recipe, field)) for field in names)
        return COMPILED.setdefault(key, self.own)

    def __missing__(self, key: tuple[str, int]) -> Any:
        self[key] = self.compiled(key[0])[key]
        return self[key]


def share_programs(trainer: Any) -> None:
    """Use the programs of earlier trainers: most settings of a config change no program, and others only one."""
    held, critic = trainer.programs, trainer.critic
    held._compiled = Shared(held._compiled, held.recipe)
    if critic:
        critic._compiled = Shared(critic._compiled, critic.recipe, critic.clip)


@pytest.fixture
def host_settings() -> set[str]:
    """The settings of a learner in which trainers that share programs may differ."""
    return HOSTS


@pytest.fixture
def unread_fields() -> Mapping[str, set[str]]:
    """By program, the fields of a recipe in which trainers that share it may differ."""
    return UNREAD


@pytest.fixture(scope="session", autouse=True)
def trainers_can_be_forgotten(program_holders: list[Callable[[], None]]) -> None:
    """See `programs_are_forgotten`: a trainer's programs live as long as it does."""
    program_holders.extend((FIRST.clear, COMPILED.clear))


@pytest.fixture(scope="session")
def make_trainer() -> Callable[..., Any]:
    """A trainer of a nano model under `config`, on a mesh of the forced CPU devices.

    It uses the programs of other trainers, unless it is `alone`: what it compiles can then be counted.
    """
    import jax

    from jaxroll import sharding
    from jaxroll.learner.trainer import Trainer
    from jaxroll.models import families

    def make(config: Config, *, alone: bool = False) -> Trainer:
        key = f"{config} {alone}"
        if key not in FIRST:
            spec = families.spec("nano", vocab_size=VOCAB, compute_dtype=config.model.dtype)
            mesh = sharding.build(config.learner.mesh)
            trainer = Trainer(config, spec, mesh, sharding.LEARNER, key=jax.random.key(0))
            if not alone:
                share_programs(trainer)
            FIRST[key] = trainer, jax.device_get(trainer.state)
        trainer, state = FIRST[key]
        again = copy.copy(trainer)  # shares the compiled programs, has its own state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, trainer.abstract_state())
        again.state, again._accumulator = jax.device_put(state, shardings, may_alias=False), None
        again._streamed = None
        return again

    return make
