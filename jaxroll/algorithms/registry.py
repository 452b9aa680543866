"""Algorithms by name: what the learner minimises, and who earns what.

Those of `jaxroll.config.presets` are put together here. A new one is one file: a function of the learner's config
under `@register("name")`, named `package.module:name` in a config.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax

from jaxroll.algorithms import losses
from jaxroll.algorithms.advantages import Credit
from jaxroll.algorithms.tokens import Objective, TokenLoss, Tokens
from jaxroll.config import LearnerConfig
from jaxroll.config import presets as rows
from jaxroll.config.parsing import nearest
from jaxroll.errors import ConfigError


@dataclass(frozen=True)
class Algorithm:
    """What the learner needs to know; it is blind to everything else.

    `credit` gives every member of every group its advantage; None leaves that to `learner.advantage`. A member without
    advantage is not computed when `multiple_of_advantage` says that its loss is 0 anyway. `credited_only` leaves those
    members out of the denominators too. Members of a group with an advantage share a row when they are `together`
    (2: pairs). `penalised`: something is added to the loss that every member pays, whatever its advantage; it is
    counted over them all, unless the loss is of the credited only and no multiple of the advantage.
    """

    objective: Objective
    credit: Credit | None = None
    multiple_of_advantage: bool = False
    credited_only: bool = False
    needs_reference: bool = False
    together: int = 1
    penalised: bool = False


Factory = Callable[[LearnerConfig], Algorithm]

_LOSSES: dict[str, Callable[[LearnerConfig], Objective]] = {
    "clipped": losses.clipped,
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    "topr": losses.topr,
    "likelihood": losses.likelihood,
    "preference": losses.dpo,
}
_FACTORIES: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """A decorator that makes a function of the (settled) learner's config the algorithm `name`."""

    def add(factory: Factory) -> Factory:
        if _FACTORIES.get(name, factory) is not factory:
            raise ValueError(f"there is an algorithm {name!r} already")
        _FACTORIES[name] = factory
        return factory

    return add


def build(learner: LearnerConfig) -> Algorithm:
    """The algorithm that the config describes, with its KL penalty; ConfigError when there is none of its name."""
    learner = rows.settled(learner)
    if rows.is_custom(learner.algorithm):
        return penalised(_custom(learner), learner)
    row = rows.preset(learner.algorithm)
    made = Algorithm(
        objective=_LOSSES[row.loss](learner),
        multiple_of_advantage=True,
        credited_only=row.credited_only,
        needs_reference=row.needs_reference,
        together=2 if row.loss == "preference" else 1,
    )
    return penalised(made, learner)


def penalised(algorithm: Algorithm, learner: LearnerConfig) -> Algorithm:
    """`algorithm` with coef · sg[min(ρ, cap)] · k2(π_θ, π_ref), or k3, added to its loss if the config has it there."""
    if not learner.kl_coef or learner.kl_in != "loss":
        return algorithm

    def token_loss(tokens: Tokens) -> TokenLoss:
        token = algorithm.objective(tokens)
        weight = losses.truncated(losses.ratio(tokens.logprob, tokens.behaviour), learner.correction_cap)
        penalty = losses.loss(learner.kl_estimator, tokens.logprob, jax.lax.stop_gradient(tokens.reference), weight)
        return TokenLoss(token.loss + learner.kl_coef * penalty, token.bounded)

    # A member without advantage is held near the reference like any other.
    return replace(algorithm, objective=token_loss, needs_reference=True, penalised=True)


def _custom(learner: LearnerConfig) -> Algorithm:
    """The user's algorithm; imports its module."""
    module, _, short = learner.algorithm.rpartition(":")
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a user's module raises, the config named it
        reason = f"its module cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError("learner.algorithm", learner.algorithm, reason, "Mend it, or run where it is.") from error
    if short not in _FACTORIES:
        raise ConfigError("learner.algorithm", learner.algorithm, "there is no such algorithm in that module",
                          nearest(short, tuple(_FACTORIES)))  # fmt: skip
    made = _FACTORIES[short](learner)
    if made.credit is not None and learner.critic != "none":
        raise ConfigError("learner.critic", learner.critic, f"{learner.algorithm} gives credit by itself",
                          "Set it to 'none', or leave credit out.")  # fmt: skip
    if made.needs_reference and learner.reference == "none":
        raise ConfigError("learner.reference", "none", f"{learner.algorithm} compares with a reference model",
                          "Set it to 'init'.")  # fmt: skip
    return made
