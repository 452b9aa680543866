"""Members of a claim as flat per-token streams; the only module of the learner that reads their records.

T is the number of tokens of one member, prompt included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from jaxroll.algorithms.advantages import Advantage, Turn
from jaxroll.errors import DataError
from jaxroll.protocols import Supports
from jaxroll.records import Claim, Finished, Member, Segment, Version, ages


@dataclass(frozen=True)
class Sample:
    """One trainable sequence. `weight`, and an `advantage` that is one number, apply to each trained token."""

    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T]: trained on
    behaviour: np.ndarray  # float32 [T]: log-prob under the policy that sampled, 0 where not sampled
    ages: np.ndarray  # int32 [T]: trained step minus sampled step, 0 where not sampled
    sampled_tokens: int  # sampled, including those masked as stale
    fresh: bool  # all tokens were sampled by the version (lineage included) that is being trained
    reward: float
    turns: tuple[Turn, ...] = ()
    advantage: Advantage = 0.0
    weight: float = 0.0
    costs: float | np.ndarray = 0.0  # per token, float [T]; already subtracted from `reward`
    value: np.ndarray | None = None  # float32 [T]: the critic's value at the start of the claim
    target: np.ndarray | None = None  # float32 [T]: the regression target of that value
    supports: Supports | None = None  # of all T tokens, if some of them were truncated when they were sampled
    experts: np.ndarray | None = None  # [E, X]: chosen experts of the first E tokens (`records.Finished`)
    branches: tuple[int, ...] = ()  # the first token of every conversation after the first one (`Segment.branch`)

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that carry loss."""
        return int(self.mask.sum())

    @property
    def credited(self) -> bool:
        """True if some trained token has an advantage other than 0."""
        return bool(np.any(np.where(self.mask, self.advantage, 0.0)))

    def with_reward(self, reward: float) -> Sample:
        """The same sample with `reward` as the reward of its last turn, and 0 for the other turns."""
        last = len(self.turns) - 1
        turns = tuple(turn._replace(reward=reward if k == last else 0.0) for k, turn in enumerate(self.turns))
        return replace(self, reward=reward, turns=turns)

    def with_costs(self, costs: np.ndarray) -> Sample:
        """The same sample with the `costs` (float [T]) of trained tokens subtracted from all its rewards."""
        costs = np.where(self.mask, costs, 0.0)
        turns = tuple(
            turn._replace(reward=turn.reward - float(costs[turn.start : turn.stop].sum())) for turn in self.turns
        )
        return replace(self, reward=self.reward - float(costs.sum()), turns=turns, costs=self.costs + costs)


PerToken = Callable[[Sequence[Sample]], list[np.ndarray]]  # samples → one number per token of each, float [T]


def of_member(member: Member, trained_at: Version) -> Sample:
    """The sample of a finished member whose claim is trained at `trained_at`.

    DataError when the member failed or its record is inconsistent.
    """
    where = f"group {member.group}, member {member.member}"
    outcome = member.outcome
    if not isinstance(outcome, Finished):
        raise DataError(
            f"{where} failed ({outcome.error}) and cannot be trained on; a claim holds finished members only"
        )
    tokens, mask, behaviour = _streams(outcome.segments, where)
    sampled = _sampled_positions(outcome.segments, sum(run.count for run in outcome.versions), where)
    token_ages = np.zeros(len(tokens), np.int32)
    token_ages[sampled] = ages(outcome.versions, trained_at.step)
    return Sample(
        tokens=tokens,
        mask=mask,
        behaviour=np.where(mask, behaviour, np.float32(0)),
        ages=token_ages,
        sampled_tokens=len(sampled),
        fresh=all(run.version == trained_at for run in outcome.versions),
        reward=float(outcome.reward),
        turns=_turns(outcome.segments, sampled, float(outcome.reward), outcome.reward_parts),
        supports=_supports(outcome.segments),
        experts=outcome.experts if outcome.experts.size else None,
        branches=_branches(outcome.segments, mask, where),
    )


def conversations(sample: Sample) -> list[Sample]:
    """`sample` as one sample per conversation that has trained tokens, each with the advantages of its tokens.

    Losses treat them as sequences of their own; the denominators of the weights count members.
    """
    if not sample.branches:
        return [sample]
    bounds = (0, *sample.branches, len(sample.tokens))
    pieces = [_between(sample, start, stop) for start, stop in pairwise(bounds)]
    return [piece for piece in pieces if piece.mask.any()]


def per_conversation(per_token: PerToken) -> PerToken:
    """`per_token` for samples of several conversations: each one is evaluated without the others."""

    def joined(samples: Sequence[Sample]) -> list[np.ndarray]:
        bounds = [(0, *sample.branches, len(sample.tokens)) for sample in samples]
        pieces = [
            _between(sample, start, stop)
            for sample, of in zip(samples, bounds, strict=True)
            for start, stop in pairwise(of)
        ]
        found = iter(per_token(pieces))
        return [np.concatenate([next(found) for _ in of[1:]]) for of in bounds]

    return joined


def _between(sample: Sample, start: int, stop: int) -> Sample:
    """The tokens [start, stop) of `sample`."""
    if (start, stop) == (0, len(sample.tokens)):
        return sample
    cut = lambda values: values[start:stop] if isinstance(values, np.ndarray) and values.ndim else values  # noqa: E731
    turns = tuple(
        turn._replace(start=turn.start - start, stop=turn.stop - start)
        for turn in sample.turns
        if start <= turn.start < stop
    )
    return replace(
        sample,
        tokens=cut(sample.tokens),
        mask=cut(sample.mask),
        behaviour=cut(sample.behaviour),
        ages=cut(sample.ages),
        sampled_tokens=sum(turn.stop - turn.start for turn in turns),
        turns=turns,
        advantage=cut(sample.advantage),
        costs=cut(sample.costs),
        branches=(),
        supports=sample.supports and sample.supports.part(start, stop),
    )


def of_claim(claim: Claim) -> list[list[Sample]]:
    """The samples of every group of `claim`, in the claim's order."""
    trained_at = Version(claim.lineage, claim.step)
    return [[of_member(member, trained_at) for member in group.members] for group in claim.groups]


def supervised(runs: Sequence[tuple[Sequence[int], bool]]) -> Sample:
    """A sample made of concatenated (tokens, trained) runs, with advantage 1 on the trained ones."""
    mask = np.concatenate([np.full(len(run), trained, bool) for run, trained in runs])
    return Sample(
        tokens=np.concatenate([np.asarray(run, np.int32) for run, _ in runs]),
        mask=mask,
        behaviour=np.zeros(len(mask), np.float32),
        ages=np.zeros(len(mask), np.int32),
        sampled_tokens=int(mask.sum()),
        fresh=False,
        reward=0.0,
        advantage=1.0,
    )


def _turns(
    segments: tuple[Segment, ...], sampled: np.ndarray, reward: float, parts: Mapping[str, float]
) -> tuple[Turn, ...]:
    """One turn per sampled segment; its state is the bytes of the tokens shown since the previous sampled segment.

    Turn k earns the reward part `turn.k`. If the environment gives no such part, the last turn earns the whole reward.
    """
    is_sampled = np.zeros(sum(len(segment.tokens) for segment in segments), bool)
    is_sampled[sampled] = True
    found: list[tuple[int, int, bytes]] = []
    start, shown = 0, b""
    for segment in segments:
        stop = start + len(segment.tokens)
        if is_sampled[start:stop].any():
            found.append((start, stop, shown))
            shown = b""
        else:
            shown += segment.tokens.astype(np.int32).tobytes()
        start = stop
    names = [f"turn.{k}" for k in range(len(found))]
    earned = [parts.get(name, 0.0) for name in names]
    if found and not any(name in parts for name in names):
        earned[-1] = reward
    return tuple(Turn(*place, float(r)) for place, r in zip(found, earned, strict=True))


def _streams(segments: tuple[Segment, ...], where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, mask and behaviour log-probs of all segments, concatenated."""
    for segment in segments:
        if not len(segment.tokens) == len(segment.loss_mask) == len(segment.logprobs) == len(segment.sampled_mask):
            raise DataError(f"{where}: a segment's tokens, loss_mask, logprobs and sampled marks differ in length")
    if not segments:
        raise DataError(f"{where} has no segments")
    tokens = np.concatenate([segment.tokens for segment in segments]).astype(np.int32)
    mask = np.concatenate([segment.loss_mask for segment in segments]).astype(bool)
    behaviour = np.concatenate([segment.logprobs for segment in segments]).astype(np.float32)
    if len(tokens) == 0 or mask[0]:
        raise DataError(f"{where} starts with a sampled token; a prompt must precede it, since its log-prob needs one")
    if not np.isfinite(behaviour[mask]).all():
        raise DataError(f"{where} has a sampled token whose behaviour log-prob is not finite")
    return tokens, mask, behaviour


def _branches(segments: tuple[Segment, ...], mask: np.ndarray, where: str) -> tuple[int, ...]:
    """The first token of every conversation after the first one. DataError if it is a sampled one."""
    starts = np.cumsum([0, *(len(segment.tokens) for segment in segments)]).tolist()
    found = tuple(start for start, segment in zip(starts, segments, strict=False) if start and segment.branch)
    if any(start < len(mask) and mask[start] for start in found):
        raise DataError(f"{where} has a conversation that starts with a sampled token; a prompt must precede it")
    return found


def _supports(segments: tuple[Segment, ...]) -> Supports | None:
    """The supports of all tokens; None if none was truncated. DataError if a serialised one is malformed."""
    if not any(segment.support.size for segment in segments):
        return None
    each = []
    for segment in segments:
        sampled = segment.sampled_mask
        found = Supports.decoded(segment.support, segment.tokens[sampled])
        sizes = np.zeros(len(sampled), np.int64)
        sizes[sampled] = found.sizes
        each.append(Supports(sizes, found.ids))
    return Supports.joined(each)


def _sampled_positions(segments: tuple[Segment, ...], count: int, where: str) -> np.ndarray:
    """int [count]: the positions of the sampled tokens, including those masked as stale."""
    sampled = np.concatenate([segment.sampled_mask for segment in segments])
    if sampled.sum() != count:
        raise DataError(f"{where}: versions cover {count} tokens, its segments hold {int(sampled.sum())} sampled ones")
    return np.flatnonzero(sampled)
