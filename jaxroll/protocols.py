"""How the rooms of floor 5 speak to one another without importing one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from jaxroll.records import Message, Task, Version, VersionRun


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn. `temperature` 0: greedy; `max_tokens` counts new ones; what is at its default is off.

    `min_p` keeps words at least that likely relative to the likeliest. `repetition_penalty` divides the positive logits
    of words that stand in the prompt or the answer, and multiplies the negative ones (CTRL, arXiv 1909.05858). A stop
    string ends an answer with the token that completes it. With `ignore_eos` no stop token ends it. `seed` takes the
    place of the run's seed. With `untruncated_logprobs` the log-probs are those before truncation: softmax(logits / τ).
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    untruncated_logprobs: bool = False


class GenerationKey(msgspec.Struct, frozen=True):
    """Who a token belongs to; with the run's seed and its position this decides its random key.

    `salt` folds the attempt in after a DATA failure (else it would repeat itself); 0 otherwise.
    """

    group: int
    member: int
    salt: int = 0


class Completion(msgspec.Struct, frozen=True):
    """What the engine sampled after a prompt: T new tokens, the stop token included when `finish` is stop.

    `logprobs` are of the distribution really sampled (temperature and truncation included); `finish` is stop, length
    or abort; `versions` covers the T tokens in order.
    """

    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    versions: tuple[VersionRun, ...]
    finish: str


class LLMProxy(Protocol):
    """Generation as a service: many requests in flight, none waits for another."""

    async def generate(self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams) -> Completion:
        """The completion of `prompt` (int32 [P]); cancelling the call aborts the request."""
        ...


class StepResult(msgspec.Struct, frozen=True):
    """What an environment answers: messages to show next (none when done), the reward so far, its parts."""

    done: bool
    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    reward_parts: dict[str, float] = {}


@runtime_checkable
class Environment(Protocol):
    """One episode's world. RLVR is an environment of one turn."""

    step_limit_s: float

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The messages the model sees first."""
        ...

    async def step(self, answer: str) -> StepResult:
        """The consequence of one assistant message. Raises DataError or InfraError, never returns a made-up reward."""
        ...

    async def close(self) -> None: ...


class Tokenizer(Protocol):
    """Text to token ids and back. Ids are never re-tokenised once sampled."""

    vocab_size: int
    pad_id: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def render(self, messages: tuple[Message, ...], *, first: bool = True) -> list[int]:
        """Token ids of `messages`, ending where the assistant is to speak; `first` opens a conversation."""
        ...


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Channel(Protocol):
    """A way to move the slices of a snapshot from the learner's processes to a sampler's.

    The sending side offers a snapshot and gets an address; the receiving side opens that address and asks for slices
    by (leaf name, box). Every slice carries its version; a slice of another version raises VersionMixed.
    """

    name: str


Progress = Callable[[str], None]


def version_or_none(version: Version | None) -> str:
    """`lineage.step`, or a dash before the first version."""
    return "-" if version is None else str(version)
