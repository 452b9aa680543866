"""Registry of algorithms by name: the loss that the learner minimizes, and the advantages of members.

The presets of `jaxroll.config.derived` are built here. A new algorithm is one file: a function of the learner's config
under `@register("name")`, which a config names as `package.module:name`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax

from jaxroll.algorithms import losses
from jaxroll.algorithms.advantages import Credit, Objective, TokenLoss, Tokens
from jaxroll.config import LearnerConfig
from jaxroll.config import derived as rows
from jaxroll.config.parsing import nearest
from jaxroll.errors import ConfigError


@dataclass(frozen=True)
class Algorithm:
    """An algorithm, as far as the learner depends on it.

    `objective` is the per-token loss. `credit` returns the advantage of every member of every group; None selects the
    estimator `learner.advantage`. `multiple_of_advantage`: the loss is 0 if the advantage is 0, so such members are not
    computed. `credited_only`: members with advantage 0 do not count in the denominators either. `together`: this many
    consecutive members with an advantage share a row (2: pairs). `penalised`: the loss has a term that does not depend
    on the advantage; it is averaged over all members, unless the loss is `credited_only` and not
    `multiple_of_advantage`.
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
    """A decorator that registers a function of the (settled) learner's config as the algorithm `name`."""

    def add(factory: Factory) -> Factory:
        if _FACTORIES.get(name, factory) is not factory:
            raise ValueError(f"the algorithm {name!r} is registered already")
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
    """`algorithm` with coef · sg[min(ρ, cap)] · k2(π_θ, π_ref) (or k3) added to its loss, if the config asks for it."""
    if not learner.kl_coef or learner.kl_in != "loss":
        return algorithm

    def token_loss(tokens: Tokens) -> TokenLoss:
        token = algorithm.objective(tokens)
        weight = losses.truncated(losses.ratio(tokens.logprob, tokens.behaviour), learner.correction_cap)
        penalty = losses.loss(learner.kl_estimator, tokens.logprob, jax.lax.stop_gradient(tokens.reference), weight)
        return TokenLoss(token.loss + learner.kl_coef * penalty, token.bounded)

    # `penalised`, because the penalty also applies to members with advantage 0.
    return replace(algorithm, objective=token_loss, needs_reference=True, penalised=True)


def _custom(learner: LearnerConfig) -> Algorithm:
    """The user's algorithm; imports its module."""
    module, _, short = learner.algorithm.rpartition(":")
    try:
        importlib.import_module(module)
    except Exception as error:  # the config named the module, so any exception is an error of the config
        reason = f"its module cannot be imported: {type(error).__name__}: {error}"
        remedy = "Fix it, or start the run in a folder from which it can be imported."
        raise ConfigError("learner.algorithm", learner.algorithm, reason, remedy) from error
    if short not in _FACTORIES:
        reason = "there is no such algorithm in that module"
        raise ConfigError("learner.algorithm", learner.algorithm, reason, nearest(short, tuple(_FACTORIES)))
    made = _FACTORIES[short](learner)
    if made.credit is not None and learner.critic != "none":
        reason = f"{learner.algorithm} computes advantages itself"
        raise ConfigError("learner.critic", learner.critic, reason, "Set it to 'none', or leave credit out.")
    if made.needs_reference and learner.reference == "none":
        reason = f"{learner.algorithm} needs a reference model"
        raise ConfigError("learner.reference", "none", reason, "Set it to 'init'.")
    return made
