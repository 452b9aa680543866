"""Advantages with a critic (GAE) and without one (group, batch, turn); per-token inputs and weights of a loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxroll.config import LearnerConfig

# --- Per-token inputs of a loss, and the weights that reduce per-token losses to one number
#
# The loss of an optimizer step is Σₜ weightₜ · lossₜ. The weights contain all denominators, which are counted once over
# all sequences of the step, so the sum may be split over micro-batches, rows and hosts in any way.
# With N sequences that have a trained token, and |i| trained tokens of sequence i, the weights are:
#
#     token_mean           1 / Σᵢ|i|
#     seq_mean_token_mean  1 / (N · |i|)
#     seq_mean_token_sum   1 / N
#     constant_length      1 / (N · L), L the same for every step (Dr. GRPO, arXiv 2503.20783)

KINDS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length")


def sequence_weights(trained_tokens: np.ndarray, kind: str, length: int = 1, count: float | None = None) -> np.ndarray:
    """float32 [N]: the weight of each trained token of a sequence; `trained_tokens` (int [N]) counts them.

    `length` is the L of `constant_length`; other kinds ignore it. `count` takes the place of `denominator`. A sequence
    without trained tokens gets 0 and does not count. ValueError for an unknown kind.
    """
    counts = np.asarray(trained_tokens, np.float64)
    count = denominator(counts, kind) if count is None else count
    if kind == "seq_mean_token_mean":
        weights = 1.0 / (count * np.maximum(counts, 1.0))
    else:
        weights = np.full_like(counts, 1.0 / (count * (length if kind == "constant_length" else 1)))
    return np.where(counts > 0, weights, 0.0).astype(np.float32)


def denominator(trained_tokens: np.ndarray, kind: str) -> float:
    """The number by which a step divides: Σᵢ|i| over its sequences for `token_mean`, N for the others; at least 1."""
    if kind not in KINDS:
        raise ValueError(f"aggregation {kind!r} is not one of {', '.join(KINDS)}")
    counts = np.asarray(trained_tokens, np.float64)
    return max(float(counts.sum() if kind == "token_mean" else (counts > 0).sum()), 1.0)


# --- sums over the samples of a packed row, for losses on whole sequences; T tokens of a row, any leading axes
#
# A segment is a run of equal numbers. The sums take log₂ T shifts of the row instead of a scatter or a T×T array, and
# are deterministic.


def totals(values: Float[Array, "*R T"], segments: Int[Array, "*R T"]) -> Float[Array, "*R T"]:
    """At every token: the sum of `values` over its segment. Gradients flow through it."""
    until = _running(values, segments)
    since = jnp.flip(_running(jnp.flip(values, -1), jnp.flip(segments, -1)), -1)
    return until + since - values


def means(
    values: Float[Array, "*R T"], mask: Bool[Array, "*R T"], segments: Int[Array, "*R T"]
) -> Float[Array, "*R T"]:
    """At every token: the mean of `values` over the tokens of its segment in `mask`; 0 if there are none."""
    count = totals(mask.astype(jnp.float32), segments)
    return totals(jnp.where(mask, values, 0.0), segments) / jnp.maximum(count, 1.0)


def _running(values: Float[Array, "*R T"], segments: Int[Array, "*R T"]) -> Float[Array, "*R T"]:
    """The running sum of `values` from the segment's first token, by doubling the reach in each iteration."""
    reach, tokens = 1, values.shape[-1]
    while reach < tokens:
        ahead = [(0, 0)] * (values.ndim - 1) + [(reach, 0)]
        same = jnp.pad(segments[..., :-reach], ahead, constant_values=-1) == segments
        values = values + jnp.where(same, jnp.pad(values[..., :-reach], ahead), 0.0)
        reach *= 2
    return values


# --- per-token streams of a packed micro-batch
#
# π_θ is the policy being trained, π_prox the trainer's at the start of the claim, π_b the behavior policy, π_ref a
# frozen reference. Values of tokens outside `mask` are undefined, and their losses are ignored.


class Tokens(NamedTuple):
    """The inputs of a loss. Gradients flow through `logprob` only; `reference` is 0 without a reference model."""

    logprob: Float[Array, "*R T"]  # log π_θ
    proximal: Float[Array, "*R T"]  # log π_prox
    behaviour: Float[Array, "*R T"]  # log π_b
    reference: Float[Array, "*R T"]  # log π_ref
    advantage: Float[Array, "*R T"]
    mask: Bool[Array, "*R T"]  # trained on
    segments: Int[Array, "*R T"]  # number of the sample in its row, from 1; 0 is padding
    ages: Int[Array, "*R T"] | int = 0  # steps between the version that sampled a token and the trained version


class TokenLoss(NamedTuple):
    """The `loss` to minimize, and in `bounded` True where a clip of the ratio or a cap of the weight is active."""

    loss: Float[Array, "*R T"]
    bounded: Bool[Array, "*R T"]


Objective = Callable[[Tokens], TokenLoss]


# --- Advantages with a critic (GAE) and without one (group, batch, turn)


def gae(
    rewards: Float[Array, " T"],
    values: Float[Array, " T"],
    mask: Float[Array, " T"],
    discount: float | Float[Array, ""] = 1.0,
    decay: float | Float[Array, ""] = 0.95,
) -> Float[Array, " T"]:
    """float32 [T]: Aₜ = δₜ + γλ·Aₜ₊₁, δₜ = rₜ + γ·V(sₜ₊₁) − V(sₜ) (GAE, arXiv 1506.02438); 0 where `mask` is 0.

    Steps are the tokens whose mask is 1, adjacent or not; the value after the last step is 0. Values at other tokens
    (padding, prompts, environment messages) are never read. The critic's target is A + V.
    """

    def back(later, now):
        advantage_after, value_after = later
        reward, value, acted = now
        delta = reward + discount * value_after - value
        advantage = jnp.where(acted, delta + discount * decay * advantage_after, advantage_after)
        return (advantage, jnp.where(acted, value, value_after)), jnp.where(acted, advantage, 0.0)

    acted = mask > 0
    streams = (jnp.where(acted, rewards, 0.0), jnp.where(acted, values, 0.0), acted)
    zero = jnp.zeros((), jnp.float32)
    _, advantages = jax.lax.scan(back, (zero, zero), streams, reverse=True)
    return advantages


def clipped_value_loss(
    value: Float[Array, "*T"], before: Float[Array, "*T"], target: Float[Array, "*T"], clip: float
) -> Float[Array, "*T"]:
    """½·max((V − R)², (clip(V, V₀ ± ε) − R)²): PPO's clipped loss of the critic, V₀ its value at the claim's start.

    With ε = 0 it is not clipped: ½·(V − R)².
    """
    if not clip:
        return 0.5 * jnp.square(value - target)
    near = before + jnp.clip(value - before, -clip, clip)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(near - target))


# --- estimators without a critic: groups, whole batches, selections, turns of an episode
#
# On the host in float64, so that no device has to be free for them. G members of a group, K turns of a member,
# T tokens.

STD_FLOOR = 1e-6  # rewards with a smaller deviation count as equal; relative to the largest reward if that is above 1

Advantage = float | np.ndarray  # one number for all trained tokens, or float32 [T]


class Turn(NamedTuple):
    """One turn: its sampled tokens [start, stop), the state (bytes of the tokens shown before it) and its reward."""

    start: int
    stop: int
    state: bytes
    reward: float


@runtime_checkable
class Rollout(Protocol):
    """The properties of a member that estimators use."""

    @property
    def reward(self) -> float: ...
    @property
    def mask(self) -> np.ndarray: ...  # bool [T]: trained on
    @property
    def turns(self) -> tuple[Turn, ...]: ...


Group = Sequence[Rollout]
Credit = Callable[[Sequence[Group]], list[list[Advantage]]]


def standardised(values: np.ndarray, *, divide_by_std: bool = True) -> np.ndarray:
    """float64 [n]: (x − mean) / std with divisor n − 1; 0 if all values are equal up to rounding, or n = 1.

    Applied to a group's rewards this is GRPO's advantage (DeepSeekMath, arXiv 2402.03300; the divisor of TRL and verl),
    without `divide_by_std` that of Dr. GRPO (arXiv 2503.20783).
    """
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return np.zeros(len(values))
    centred = values - values.mean()
    std = values.std(ddof=1)
    if std <= STD_FLOOR * max(1.0, float(np.abs(values).max())):
        return np.zeros(len(values))
    return centred / std if divide_by_std else centred


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """float64 [G]: rᵢ − mean of the other members' rewards (RLOO, arXiv 2402.14740); 0 for a single member."""
    return len(rewards) / max(len(rewards) - 1, 1) * standardised(rewards, divide_by_std=False)


def batch_standardised(groups: Sequence[np.ndarray], *, group_baseline: bool = False) -> list[np.ndarray]:
    """[Gᵢ] for every group: rewards standardized over all members of the batch (REINFORCE++, arXiv 2501.03262).

    With `group_baseline` the mean of each group is subtracted first, so a group of equal rewards has advantage 0.
    """
    if group_baseline:
        groups = [group - group.mean() if len(group) else group for group in groups]
    return _cut(standardised(np.concatenate([np.zeros(0), *groups])), groups)


def positive(rewards: np.ndarray) -> np.ndarray:
    """[G]: 1 if the reward is above 0, else 0 (RAFT++, arXiv 2504.11343)."""
    return (np.asarray(rewards) > 0).astype(np.float64)


def best(rewards: np.ndarray, trainable: np.ndarray) -> np.ndarray:
    """[G]: 1 for the first of the best trainable members (RAFT, arXiv 2304.06767), 0 for the others.

    All 0 if all rewards are equal and none is above 0.
    """
    chosen = np.zeros(len(rewards))
    rewards = np.where(trainable, rewards, -np.inf)
    if trainable.any() and (rewards.max() > 0 or rewards.max() > rewards[trainable].min()):
        chosen[rewards.argmax()] = 1.0
    return chosen


def best_worst(rewards: np.ndarray, trainable: np.ndarray) -> np.ndarray:
    """[G]: 1 for the first of the best trainable members, −1 for the first of the worst, 0 otherwise.

    All 0 if all rewards are equal.
    """
    signs = np.zeros(len(rewards))
    high, low = np.where(trainable, rewards, -np.inf), np.where(trainable, rewards, np.inf)
    if trainable.any() and high.max() > low.min():
        signs[high.argmax()], signs[low.argmin()] = 1.0, -1.0
    return signs


def discounted_returns(rewards: np.ndarray, discount: float) -> np.ndarray:
    """[K]: Gₖ = rₖ + γ·Gₖ₊₁, the discounted return of each turn."""
    returns, after = np.zeros(len(rewards)), 0.0
    for turn in reversed(range(len(rewards))):
        returns[turn] = after = rewards[turn] + discount * after
    return returns


def segment_return(group: Group, discount: float) -> list[Advantage]:
    """[T] for every member: the discounted return of each turn, standardized over all turns of the group."""
    returns = _returns(group, discount)
    every = standardised(np.concatenate([np.zeros(0), *returns]))
    return _spread(group, _cut(every, returns))


def gigpo(group: Group, discount: float, step_weight: float) -> list[Advantage]:
    """[T] for every member: A = A_episode + ω·A_step (GiGPO, arXiv 2505.10978).

    A_episode is the standardized reward of the episode. A_step standardizes the discounted returns of all turns of the
    group in the same state; it is 0 for a state that occurs once. A state is the tokens shown before the turn.
    """
    episode = standardised(np.array([member.reward for member in group]))
    met: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for i, member in enumerate(group):
        for k, turn in enumerate(member.turns):
            met[turn.state].append((i, k))
    returns = _returns(group, discount)
    values = [np.full(len(member), episode[i]) for i, member in enumerate(returns)]
    for places in met.values():
        steps = standardised(np.array([returns[i][k] for i, k in places]))
        for (i, k), step in zip(places, steps, strict=True):
            values[i][k] += step_weight * step
    return _spread(group, values)


def overlong_penalty(tokens: int, limit: int, last: int) -> float:
    """The penalty from 0 to −1 over the `last` tokens before `limit` (DAPO's soft overlong punishment, 2503.14476)."""
    return -min(max(tokens - (limit - last), 0) / last, 1.0) if last else 0.0


def _returns(group: Group, discount: float) -> list[np.ndarray]:
    return [discounted_returns(np.array([turn.reward for turn in member.turns]), discount) for member in group]


def _cut(values: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`values` split into parts with the lengths of `like`."""
    ends = np.cumsum([0, *(len(part) for part in like)])
    return [values[start:end] for start, end in pairwise(ends)]


def _spread(group: Group, values: Sequence[np.ndarray]) -> list[Advantage]:
    """[T] for every member: each turn's value at the tokens of the turn, 0 elsewhere."""
    spread: list[Advantage] = []
    for member, of_turns in zip(group, values, strict=True):
        tokens = np.zeros(len(member.mask), np.float32)
        for turn, value in zip(member.turns, of_turns, strict=True):
            tokens[turn.start : turn.stop] = value
        spread.append(tokens)
    return spread


# --- the estimator that `learner.advantage` names

_PER_GROUP: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {  # (rewards, trainable) → advantages
    "group_std": lambda rewards, _: standardised(rewards),
    "group_mean": lambda rewards, _: standardised(rewards, divide_by_std=False),
    "leave_one_out": lambda rewards, _: leave_one_out(rewards),
    "positive": lambda rewards, _: positive(rewards),
    "best": best,
    "best_worst": best_worst,
}


def estimator(learner: LearnerConfig) -> Credit:
    """groups → the advantage of every member, by the settled `learner.advantage`; not for GAE, which needs a critic."""
    kind = learner.advantage
    if kind in ("batch_std", "group_mean_batch_std"):
        baseline = kind == "group_mean_batch_std"
        return lambda groups: _listed(batch_standardised(_rewards(groups), group_baseline=baseline))
    if kind == "segment_return":
        return lambda groups: [segment_return(group, learner.turn_discount) for group in groups]
    if kind == "gigpo":
        return lambda groups: [gigpo(group, learner.turn_discount, learner.step_weight) for group in groups]
    of_group = _PER_GROUP[kind]
    return lambda groups: _listed([of_group(_of(group), _trainable(group)) for group in groups])


def _of(group: Group) -> np.ndarray:
    return np.array([sample.reward for sample in group], np.float32)


def _rewards(groups: Sequence[Group]) -> list[np.ndarray]:
    return [_of(group) for group in groups]


def _trainable(group: Group) -> np.ndarray:
    return np.array([sample.mask.any() for sample in group], bool)


def _listed(advantages: Sequence[np.ndarray]) -> list[list[Advantage]]:
    return [[float(value) for value in of_group] for of_group in advantages]
