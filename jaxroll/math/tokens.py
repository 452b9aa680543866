"""What a loss is given and what it gives back: per-token streams of a packed micro-batch, blind to who made them.

π_θ is the policy being trained, π_prox the trainer's at the start of the claim, π_b the one that sampled, π_ref a
frozen one. Tokens outside `mask` have numbers of no meaning; what a loss says about them is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Tokens(NamedTuple):
    """The streams. Gradients flow through `logprob` only; `reference` is 0 in a run without a reference model."""

    logprob: Float[Array, "*R T"]  # log π_θ
    proximal: Float[Array, "*R T"]  # log π_prox
    behaviour: Float[Array, "*R T"]  # log π_b
    reference: Float[Array, "*R T"]  # log π_ref
    advantage: Float[Array, "*R T"]
    mask: Bool[Array, "*R T"]  # trained on
    segments: Int[Array, "*R T"]  # which sample of the row, from 1; 0 is padding
    ages: Int[Array, "*R T"] | int = 0  # steps from the version that sampled a token to the one that is trained


class TokenLoss(NamedTuple):
    """`loss` to minimise, and where a clip of the policy ratio or a cap of an importance weight is active."""

    loss: Float[Array, "*R T"]
    bounded: Bool[Array, "*R T"]


Objective = Callable[[Tokens], TokenLoss]
