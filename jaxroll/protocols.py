"""How the rooms of floor 5 speak to one another without importing one another."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import msgspec
import numpy as np

from jaxroll.records import Item, Message, Task, VersionRun


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

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        """The completion of `prompt` (int32 [P]); cancelling the call aborts the request.

        With `keep` a later prompt that begins with this one and its completion will follow: what is computed for them
        stays as long as there is room.
        """
        ...


class StepResult(msgspec.Struct, frozen=True):
    """What an environment answers: messages to show next (none when done), the reward so far, its parts."""

    done: bool
    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    reward_parts: dict[str, float] = {}


@runtime_checkable
class Environment(Protocol):
    """One episode's world. RLVR is an environment of one turn.

    Its methods are coroutines or plain functions. What it declares about itself it has as attributes, of the class
    where they do not depend on the config; those that are absent are as in `Traits`.
    """

    step_limit_s: float

    def reset(self, task: Task, seed: int) -> tuple[Message, ...] | Awaitable[tuple[Message, ...]]:
        """The messages the model sees first."""
        ...

    def step(self, answer: str) -> StepResult | Awaitable[StepResult]:
        """The consequence of one assistant message. Raises DataError or InfraError, never returns a made-up reward."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Let go of what is held. Called once, however the episode ended; not after a call that never came back."""
        ...


Place = Literal["loop", "thread", "process"]
PLACES: tuple[Place, ...] = get_args(Place)
MAX_TURNS = 64
MAX_RETRIES = 100  # each rests for up to 10 s, and the member's lease is renewed meanwhile


class Traits(msgspec.Struct, frozen=True):
    """What an environment declares: limits of its calls, where they run, what may be repeated, how long it may last.

    `place` is where its methods run: on the event loop (coroutines, and functions that return at once), in a thread, or
    in a process that is killed when it hangs. A call that raises InfraError is made again, after a pause that doubles,
    up to `reset_retries` or `step_retries` times: declare these only where a call that failed has changed nothing.
    `max_turns` answers are asked for at most.
    """

    place: Place
    reset_limit_s: float
    step_limit_s: float
    reset_retries: int = 0
    step_retries: int = 0
    max_turns: int = MAX_TURNS


def traits(environment: Any) -> Traits:
    """What `environment` (an object or its class) declares. Without a place, coroutines run on the loop, others do not.

    Raises ValueError for a place that there is not, and for limits and counts that make no sense.
    """
    get = lambda name, default: getattr(environment, name, default)  # noqa: E731
    step_limit_s = _declared("step_limit_s", get("step_limit_s", 60.0), 1e-3, math.inf)
    usual = "loop" if inspect.iscoroutinefunction(get("step", None)) else "thread"
    place = get("place", usual)
    if place not in PLACES:
        raise ValueError(f"place = {place!r}: an environment runs in one of {', '.join(PLACES)}")
    reset_limit_s = _declared("reset_limit_s", get("reset_limit_s", step_limit_s), 1e-3, math.inf)
    reset_retries = int(_declared("reset_retries", get("reset_retries", 0), 0, MAX_RETRIES))
    step_retries = int(_declared("step_retries", get("step_retries", 0), 0, MAX_RETRIES))
    max_turns = int(_declared("max_turns", get("max_turns", MAX_TURNS), 1, 2**31))
    return Traits(place, reset_limit_s, step_limit_s, reset_retries, step_retries, max_turns)


def _declared(name: str, value: Any, least: float, most: float) -> float:
    """The number `value` of the attribute `name`; ValueError outside of [least, most]."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} = {value!a}: it is no number") from error
    if not least <= number <= most:
        raise ValueError(f"{name} = {value!a}: it must be between {least:g} and {most:g}")
    return number


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


class Source(Protocol):
    """Items by index. Nothing is materialised: an endless source computes an item when it is asked for."""

    identity: str  # two sources with the same identity hold the same items

    @property
    def size(self) -> int | None:
        """How many items there are; None: endless."""
        ...

    def item(self, index: int) -> Item:
        """Item `index`, always the same. Raises DataError where the source cannot make one."""
        ...

    def alphabet(self) -> str:
        """All characters of the prompts and answers, sorted."""
        ...


Progress = Callable[[str], None]
