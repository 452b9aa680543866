"""The words of a run (docs/glossary.md): immutable records that every process understands.

Array fields are numpy arrays; `jaxroll.wire` carries them as raw little-endian buffers with declared dtype and shape.
T is the number of tokens of a segment. A store holds many thousands of some of them at once: those are kept from the
garbage collector (`gc=False`), whose walks over them would halt its event loop for tenths of a second. They hold no
cycles.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

import msgspec
import numpy as np

# Checked while a record is decoded, before anything that long is made. A member of 10⁵ tokens has two segments and a
# few runs; a dialogue of a thousand turns has two thousand segments.
MAX_SEGMENTS, MAX_RUNS, MAX_PARTS, MAX_LABEL_CHARS, MAX_ADDRESS_CHARS = 4096, 65_536, 256, 128, 4096
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # what every table and JSON reader can hold
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL_CHARS)]


class Version(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A parameter version. `step` counts claims trained; `lineage` grows when a learner resumes from an older step."""

    lineage: Count
    step: Count

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` consecutive sampled tokens that were drawn at `version`."""

    version: Version
    count: Count


class Message(msgspec.Struct, frozen=True, gc=False):
    """One chat message; `role` is system, user, assistant or tool."""

    role: str
    content: str


class Task(msgspec.Struct, frozen=True, gc=False):
    """One dataset item. `env_args` is a JSON object for the environment; `question_hash` identifies the question."""

    index: int
    messages: tuple[Message, ...]
    env: str
    env_args: str
    seed: int
    question_hash: str

    def args(self) -> dict[str, Any]:
        """The environment's arguments, decoded."""
        return json.loads(self.env_args)


UNMARKED = np.zeros(0, np.uint8)


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run of tokens with one role. Sampled tokens have loss_mask 1 and the log-prob they were drawn with.

    Where the store took the loss mask of stale tokens away, `sampled` keeps what the mask was; otherwise it is empty.
    """

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]: trained on
    logprobs: np.ndarray  # float32 [T], 0 where not sampled
    sampled: np.ndarray = UNMARKED  # uint8 [T], or [0]: the same as loss_mask

    @property
    def sampled_mask(self) -> np.ndarray:
        """bool [T]: drawn by the model, whether trained on or masked as stale."""
        return (self.sampled if self.sampled.size else self.loss_mask).astype(bool)


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A rollout that ended by itself. `versions` run-length encodes the version of every sampled token, in order."""

    segments: Annotated[tuple[Segment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)]
    finish: Label  # stop | length | done
    reward: float
    reward_parts: Annotated[dict[Label, float], msgspec.Meta(max_length=MAX_PARTS)]
    versions: Annotated[tuple[VersionRun, ...], msgspec.Meta(max_length=MAX_RUNS)]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A rollout that broke. It has no reward, so it cannot be trained on. `kind` is INFRA or DATA."""

    kind: Label
    error: str


Outcome = Finished | Failed


class Member(msgspec.Struct, frozen=True):
    """Member `member` of group `group`, as produced by lease attempt `attempt`."""

    group: Count
    member: Count
    attempt: Count
    outcome: Outcome


class Grant(msgspec.Struct, frozen=True):
    """A lease: produce these members of this group. `members` lists (member, attempt); `ttl_s` is the time to renew."""

    group: int
    task: Task
    members: tuple[tuple[int, int], ...]
    ttl_s: float
    key_salt: int = 0


class ClaimedGroup(msgspec.Struct, frozen=True):
    """A complete group handed to the learner: only members that finished."""

    group: int
    task: Task
    members: tuple[Member, ...]


class Claim(msgspec.Struct, frozen=True):
    """The batch of step `step`: same groups in the same order however often it is asked for."""

    step: int
    lineage: int
    groups: tuple[ClaimedGroup, ...]
    shuffle_seed: int
    replayed: bool
    checkpoint_wanted: bool = False


class VersionRef(msgspec.Struct, frozen=True):
    """Where the parameters of one version can be fetched. `manifest_digest` names the exact bytes."""

    version: Version
    channel: Label
    address: Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS)]
    manifest_digest: Label


def question_hash(text: str) -> str:
    """The identity of a question: 16 hex digits of its blake2b, blanks normalised."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8).hexdigest()


def ages(versions: tuple[VersionRun, ...], trained_at: int) -> np.ndarray:
    """int32 [sampled tokens]: trained step minus sampled step of every sampled token.

    Steps are comparable across lineages only along one line of ancestry, which the store guarantees for what it hands
    out.
    """
    if not versions:
        return np.zeros(0, np.int32)
    steps = np.repeat([run.version.step for run in versions], [run.count for run in versions])
    return (trained_at - steps).astype(np.int32)


class Item(msgspec.Struct, frozen=True):
    """One question with its answer.

    `question` is the full text, `compact` the short form for small models (the same text where a source has none).
    `answer` is None where the source knows no answer; `env_args` is what the environment needs to judge one. `worked`
    is a conversation that a teacher would have had, its own messages and the environment's in turn, where an answer
    alone does not tell.
    """

    question: str
    compact: str
    answer: str | None
    env_args: dict[str, Any]
    worked: tuple[Message, ...] = ()
