"""Immutable records that all processes of a run exchange (docs/glossary.md): tasks, groups, segments, versions; and
statistics of the store.

Array fields are numpy arrays; `jaxroll.wire` serializes them as raw little-endian buffers with dtype and shape.
T is the number of tokens of a segment. Records that a store holds by the thousand are excluded from garbage collection
(`gc=False`), whose passes would stop its event loop for tenths of a second; they contain no reference cycles.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

import msgspec
import numpy as np

# Limits that are checked while a record is decoded, before memory is allocated. A member of 10⁵ tokens has two segments
# and a few runs; a dialogue of a thousand turns has two thousand segments.
MAX_SEGMENTS, MAX_RUNS, MAX_PARTS, MAX_LABEL_CHARS, MAX_ADDRESS_CHARS = 4096, 65_536, 256, 128, 4096
MAX_STATE_BYTES = 64 * 2**10  # of an environment after one turn; a member holds one for each of its turns
MAX_EXTRACTED_CHARS = 2000  # recorded with a sample; scorers receive the whole answer
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # the largest integer that every JSON reader represents exactly
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL_CHARS)]


class Version(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A parameter version. `step` counts claims trained; `lineage` grows when a learner resumes from an older step."""

    lineage: Count
    step: Count

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` consecutive tokens that were sampled at `version`."""

    version: Version
    count: Count


class Message(msgspec.Struct, frozen=True, gc=False):
    """One chat message; `role` is system, user, assistant or tool."""

    role: str
    content: str


class Task(msgspec.Struct, frozen=True, gc=False):
    """One dataset item. `env_args` is a JSON object for the environment; `question_hash` identifies the question.

    Two keys of `env_args` have a meaning for all environments: `tools` (JSON schemas that the chat template shows) and
    `source` (the name of the item's source in a mixture or held-out set).
    """

    index: int
    messages: tuple[Message, ...]
    env: str
    env_args: str
    seed: int
    question_hash: str

    def args(self) -> dict[str, Any]:
        """The environment's arguments, decoded."""
        return json.loads(self.env_args)

    def tools(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools that the model is shown."""
        found = self.args().get("tools") if '"tools"' in self.env_args else None
        return [tool for tool in found if isinstance(tool, dict)] if isinstance(found, list) else []


UNMARKED = np.zeros(0, np.uint8)


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run of tokens with one role. Sampled tokens have loss_mask 1 and the log-prob with which they were sampled.

    If the store has masked stale tokens, `sampled` holds the original mask; otherwise it is empty. With truncated
    sampling, `support` holds the ids to which each sampled token was restricted (`protocols.Supports`).
    """

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]: trained on
    logprobs: np.ndarray  # float32 [T], 0 where not sampled
    sampled: np.ndarray = UNMARKED  # uint8 [T], or [0] if equal to loss_mask
    support: np.ndarray = UNMARKED  # uint8 [N], or [0] if no token was truncated
    branch: bool = False  # begins another conversation of the member: no earlier segment is in its context

    @property
    def sampled_mask(self) -> np.ndarray:
        """bool [T]: sampled by the model, including tokens masked as stale."""
        return (self.sampled if self.sampled.size else self.loss_mask).astype(bool)


NO_EXPERTS = np.zeros((0, 0), np.uint8)


class Finished(msgspec.Struct, frozen=True, tag="finished", omit_defaults=True):
    """A complete rollout. `versions` run-length encodes the version of every sampled token, in order.

    `extracted` is the part of the answer that was scored, cut to `MAX_EXTRACTED_CHARS`; None if it was all of it.
    `experts` are the experts that the sampler chose for the first E of all tokens (for a mixture of experts, if
    `learner.routing_replay`): X numbers per token, those of every layer in order.
    """

    segments: Annotated[tuple[Segment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)]
    finish: Label  # stop | length | done
    reward: float
    reward_parts: Annotated[dict[Label, float], msgspec.Meta(max_length=MAX_PARTS)]
    versions: Annotated[tuple[VersionRun, ...], msgspec.Meta(max_length=MAX_RUNS)]
    extracted: Annotated[str, msgspec.Meta(max_length=MAX_EXTRACTED_CHARS)] | None = None
    experts: np.ndarray = NO_EXPERTS  # uint8 or uint16 [E, X]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A failed rollout. It has no reward, so it cannot be trained on. `kind` is INFRA or DATA."""

    kind: Label
    error: str


Outcome = Finished | Failed


class TurnEnd(msgspec.Struct, frozen=True):
    """The end of a turn in a conversation: S tokens shown after its answer, and the environment's state then."""

    shown: np.ndarray  # int32 [S]
    state: Annotated[bytes, msgspec.Meta(max_length=MAX_STATE_BYTES)]


class Partial(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampled tokens of an unfinished member: T of them, all of one answer, from its sampled token `start` on.

    `prompt` is the digest of the tokens that precede the answer (`prompt_digest`); an answer continues only behind the
    same prompt. `versions` and `support` are those of the T tokens, as in `Finished` and `Segment`. With `turn` the
    answer ends with these tokens.
    """

    group: Count
    member: Count
    attempt: Count
    start: Count
    prompt: Label
    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    versions: Annotated[tuple[VersionRun, ...], msgspec.Meta(max_length=MAX_RUNS)]
    support: np.ndarray = UNMARKED  # uint8 [N], or [0] if no token was truncated
    turn: TurnEnd | None = None


class Member(msgspec.Struct, frozen=True):
    """Member `member` of group `group`, as produced by lease attempt `attempt`."""

    group: Count
    member: Count
    attempt: Count
    outcome: Outcome


class Grant(msgspec.Struct, frozen=True):
    """A lease on members of a group. `members` lists (member, attempt); renew the lease within `ttl_s` seconds.

    `resumed` lists (member, tokens) for members of which the store has the first tokens (`Partial`).
    """

    group: int
    task: Task
    members: tuple[tuple[int, int], ...]
    ttl_s: float
    key_salt: int = 0
    resumed: tuple[tuple[int, int], ...] = ()


class ClaimedGroup(msgspec.Struct, frozen=True):
    """A complete group for the learner, with finished members only."""

    group: int
    task: Task
    members: tuple[Member, ...]


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """Position of the prompt stream after a claim, from which a fork or a new log continues.

    The prompts below `ordinal` had ended by then, and so had the later ones in `passed`. `cursor` is the pipeline's
    state before `ordinal` (None: the beginning). `groups` had been issued.
    """

    ordinal: Count = 0
    passed: tuple[Count, ...] = ()
    cursor: bytes | None = None
    groups: Count = 0


class LogStart(msgspec.Struct, frozen=True, array_like=True):
    """The part of the log that a checkpoint has, so that a new log can begin at it if the old one is lost.

    It has the position of the prompt stream, and the lineages as (parent, step at which they left it).
    """

    cut: Cut = Cut()
    lines: tuple[tuple[Count | None, Count], ...] = ((None, 0),)

    @property
    def is_sound(self) -> bool:
        """True if every lineage but the first left an earlier one."""
        return bool(self.lines) and all(
            (index == 0) if parent is None else parent < index for index, (parent, _) in enumerate(self.lines)
        )

    def until(self, version: Version, lineages: int) -> LogStart:
        """The same with at least `lineages` lineages. Each new one branches off its predecessor at `version.step`."""
        known = len(self.lines)
        more = tuple((index - 1, version.step) for index in range(known, max(lineages, version.lineage + 1)))
        return msgspec.structs.replace(self, lines=self.lines + more)


class Claim(msgspec.Struct, frozen=True):
    """The batch of step `step`; repeated requests return the same groups in the same order.

    Not `whole`: groups of the batch that are finished before the others. Only the whole batch is claimed.
    """

    step: int
    lineage: int
    groups: tuple[ClaimedGroup, ...]
    shuffle_seed: int
    replayed: bool
    checkpoint_wanted: bool = False
    after: LogStart | None = None  # for a checkpoint after this step
    whole: bool = True


class VersionRef(msgspec.Struct, frozen=True):
    """The address of one version's parameters. `manifest_digest` identifies the exact bytes."""

    version: Version
    channel: Label
    address: Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS)]
    manifest_digest: Label


class Relay(msgspec.Struct, frozen=True):
    """A process that serves the weights it received to others: its name, and HOST:PORT of its `tcp` listener."""

    name: Label
    address: Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS)]


def question_hash(text: str) -> str:
    """The identity of a question: 16 hex digits of its blake2b digest, with white space normalized."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8).hexdigest()


def prompt_digest(prompt: np.ndarray) -> str:
    """The identity of prompt tokens (int32 [P]): 16 hex digits of their blake2b digest."""
    return hashlib.blake2b(np.ascontiguousarray(prompt, "<i4").tobytes(), digest_size=8).hexdigest()


def versions_after(versions: tuple[VersionRun, ...], tokens: int) -> tuple[VersionRun, ...]:
    """The versions of the tokens after the first `tokens`."""
    kept, skipped = [], tokens
    for run in versions:
        if run.count > skipped:
            kept.append(VersionRun(run.version, run.count - skipped))
        skipped = max(skipped - run.count, 0)
    return tuple(kept)


def ages(versions: tuple[VersionRun, ...], trained_at: int) -> np.ndarray:
    """int32 [sampled tokens]: trained step minus sampled step of every sampled token.

    Steps of different lineages are comparable only along one line of ancestry, which the store guarantees for claims.
    """
    if not versions:
        return np.zeros(0, np.int32)
    steps = np.repeat([run.version.step for run in versions], [run.count for run in versions])
    return (trained_at - steps).astype(np.int32)


class Item(msgspec.Struct, frozen=True):
    """One question with its answer.

    `question` is the full text, `compact` the short form for small models (the same text if the source has none).
    `answer` is None if the source knows no answer; `env_args` are the environment's arguments to judge one. `worked`
    is an example conversation for the warm start (assistant and environment messages alternate), for tasks in which
    the answer alone is not enough. `messages` are the chat messages of the prompt, if it is not the question alone.
    """

    question: str
    compact: str
    answer: str | None
    env_args: dict[str, Any]
    worked: tuple[Message, ...] = ()
    messages: tuple[Message, ...] = ()


# --- Statistics that the store keeps, which change: of questions, and of the holders of leases
#
# Each group of a question counts once, however often a learner trains on it.

QUESTIONS_KEPT = 20_000  # those touched last; the store's table `questions` has all


class Question(msgspec.Struct, array_like=True):
    """Counts of one question: groups issued and trained; members claimed or filtered, their rewards and tokens."""

    issued: int = 0
    trained: int = 0
    members: int = 0
    reward_sum: float = 0.0
    last_step: int | None = None  # the claim that took it last
    tokens: int = 0  # sampled by these members

    @property
    def reward_mean(self) -> float | None:
        """Mean reward over all members that were claimed or filtered; None before the first."""
        return self.reward_sum / self.members if self.members else None


def touch(questions: dict[str, Question], question_hash: str) -> Question:
    """Return the question's row and make it the newest; drop the oldest beyond `QUESTIONS_KEPT`."""
    row = questions.pop(question_hash, None) or Question()
    questions[question_hash] = row
    if len(questions) > QUESTIONS_KEPT:
        del questions[next(iter(questions))]
    return row


class Recent(msgspec.Struct):
    """Means of the last members of a holder, of which newer ones weigh more: duration, tokens, and `mean_got`, the
    members put lately and leases held when a member ended. `count`: members in them; `done`: put, halved at each claim.
    """

    mean_s: float = 0.0
    count: int = 0
    mean_tokens: float = 0.0
    done: float = 0.0
    mean_got: float = 0.0

    @property
    def per_token_s(self) -> float:
        """Seconds per token; 0 if tokens are unknown."""
        return self.mean_s / self.mean_tokens if self.mean_tokens else 0.0


def recent_mean_s(before_s: float, now_s: float) -> float:
    """The running mean of durations after a new one of `now_s`; `before_s` is the mean before, 0 if there was none."""
    return now_s if before_s == 0.0 else 0.8 * before_s + 0.2 * now_s
