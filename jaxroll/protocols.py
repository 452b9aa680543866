"""Interfaces between packages that do not import each other: environments (with checks), tokenizers, generation."""

from __future__ import annotations

import inspect
import math
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import msgspec
import numpy as np

from jaxroll.errors import DataError
from jaxroll.records import (
    MAX_EXTRACTED_CHARS,
    MAX_LABEL_CHARS,
    MAX_PARTS,
    NO_EXPERTS,
    UNMARKED,
    Item,
    Message,
    Task,
    VersionRun,
)


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling parameters. `max_tokens` counts new tokens; `temperature` 0 is greedy; defaults switch options off.

    `min_p` keeps tokens whose probability is at least that fraction of the largest one. `repetition_penalty` divides
    positive logits of tokens that occur in the prompt or the answer, and multiplies negative ones (CTRL, arXiv
    1909.05858). A stop string ends an answer with the token that completes it. With `ignore_eos` no stop token ends an
    answer. `seed` replaces the run's seed. With `untruncated_logprobs`, log-probs are those before truncation:
    log softmax(logits / τ).
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
    """The rollout that a token belongs to; with the run's seed and the token's position it determines the random key.

    `salt` is 0, or derived from the attempt after a DATA failure, which would otherwise repeat.
    """

    group: int
    member: int
    salt: int = 0


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A completion sampled by the engine: T new tokens, including the stop token if `finish` is stop.

    `logprobs` are those of the sampling distribution (temperature and truncation included). `finish` is stop, length
    or abort. `versions` covers the T tokens in order. `support` holds the ids to which truncation restricted each token
    (serialized `Supports`), if the engine records them and a token was truncated; otherwise it is empty.
    `experts`, if recorded, holds the experts chosen for the P tokens of the prompt and all tokens but the last: X
    numbers each, those of every layer in order.
    """

    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    versions: tuple[VersionRun, ...]
    finish: str
    support: np.ndarray = UNMARKED  # uint8 [N]
    experts: np.ndarray = NO_EXPERTS  # uint8 or uint16 [P + T - 1, X], or [0, 0]


class LLMProxy(Protocol):
    """Asynchronous text generation; many requests may be in flight, and none waits for another."""

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        """The completion of `prompt` (int32 [P]); cancelling the call aborts the request.

        Pass `keep` when a later prompt will begin with this prompt and its completion: their KV cache is then kept
        while there is room.
        """
        ...


class StepResult(msgspec.Struct, frozen=True):
    """The result of an environment's step: the next messages (none when done), the reward so far, its parts.

    `extracted` is the part of the answer that was scored; None if it was the whole answer. `state` is what `restore`
    (see Environment) needs to continue after this step; None if it cannot.
    """

    done: bool
    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    reward_parts: dict[str, float] = {}
    extracted: str | None = None
    state: bytes | None = None


@runtime_checkable
class Environment(Protocol):
    """An environment, which plays one episode. RLVR is an environment of one turn.

    Its methods are coroutines or plain functions. It declares its `Traits` as attributes (of the class, if they do not
    depend on the config); absent attributes have the defaults of `traits`. An environment on the event loop that has an
    attribute `answer_tokens` finds there, at each step, the number of tokens of the answer.

    Optional: `restore(state)`, after `reset` with the same task and seed, continues after the step whose result had
    this `StepResult.state`, as if the steps up to it had been made here. If it raises, the instance is closed.
    """

    step_limit_s: float

    def reset(self, task: Task, seed: int) -> tuple[Message, ...] | Awaitable[tuple[Message, ...]]:
        """The first messages for the model."""
        ...

    def step(self, answer: str) -> StepResult | Awaitable[StepResult]:
        """The result of one assistant message. Raise DataError or InfraError instead of returning a made-up reward."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Release resources. Called once at the end of every episode, unless a call never returned."""
        ...


Place = Literal["loop", "thread", "process"]
PLACES: tuple[Place, ...] = get_args(Place)
MAX_TURNS = 64
MAX_RETRIES = 100  # with pauses of up to 10 s, during which the member's lease is renewed


class Traits(msgspec.Struct, frozen=True):
    """Declarations of an environment: executor, time limits, retries, number of turns.

    `place` is where its methods run: on the event loop (coroutines, and functions that return at once), in a thread, or
    in a process that is killed when it hangs. A call that raises InfraError is repeated up to `reset_retries` or
    `step_retries` times, after pauses that double: declare retries only if a failed call changes nothing. An episode
    has at most `max_turns` answers. `restores` is True if it has a method `restore`.
    """

    place: Place
    reset_limit_s: float
    step_limit_s: float
    reset_retries: int = 0
    step_retries: int = 0
    max_turns: int = MAX_TURNS
    restores: bool = False


def traits(environment: Any) -> Traits:
    """The traits of `environment` (an object or its class). The default place is "loop" for coroutines, else "thread".

    Raises ValueError for an unknown place, and for limits and counts out of range.
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
    restores = callable(get("restore", None))
    return Traits(place, reset_limit_s, step_limit_s, reset_retries, step_retries, max_turns, restores)


def _declared(name: str, value: Any, least: float, most: float) -> float:
    """`value` of the attribute `name` as a number; ValueError outside of [least, most]."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} = {value!a}: it is not a number") from error
    if not least <= number <= most:
        raise ValueError(f"{name} = {value!a}: it must be between {least:g} and {most:g}")
    return number


class Owner:
    """Foreign code, such as one environment: its tasks and callbacks run in contexts in which `OWNER` is this object.

    `call` names what it does now. `blocked_at` is the source line at which it blocked the loop last, if it did, and
    `on_blocked` is called then. `cancelled` counts the tasks of others that it tried to cancel. `threads` are those
    that it started in a process with a `LoopThread`, `calls` the futures of its calls in threads of the executor.
    """

    def __init__(self, call: str, on_blocked: Callable[[Owner], None], name: str = "") -> None:
        self.call, self.blocked_at, self.cancelled, self._on_blocked = call, "", 0, on_blocked
        self.name = name or call.partition(".")[0]
        self.threads: list[weakref.ref[threading.Thread]] = []
        self.calls: set[Any] = set()

    def note_blocked(self, where: str) -> None:
        """Record that this owner blocked the loop."""
        self.blocked_at = where
        self._on_blocked(self)


OWNER: ContextVar[Owner | None] = ContextVar("OWNER", default=None)


class Tokenizer(Protocol):
    """Converter between text and token ids. Sampled ids are never re-tokenized."""

    vocab_size: int
    pad_id: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def render(
        self, messages: tuple[Message, ...], *, first: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of `messages`, ending at the start of the assistant's turn; `first` starts a conversation.

        `tools` are JSON schemas that the chat template shows; ConfigError if it shows none.
        """
        ...


class Source(Protocol):
    """Items by index. An endless source computes each item on request."""

    identity: str  # two sources with the same identity hold the same items

    @property
    def size(self) -> int | None:
        """The number of items; None for an endless source."""
        ...

    def item(self, index: int) -> Item:
        """Item `index`, always the same. Raises DataError when the source cannot make it."""
        ...

    def alphabet(self) -> str:
        """All characters of the prompts and answers, sorted."""
        ...


Progress = Callable[[str], None]


# --- Checks of the values that an environment or a scorer returned: they fit the records, or DataError names the field
#
# User code returns numpy scalars, booleans, lists, and values that cannot be serialized. Values that can be converted
# without loss are converted here, where the member is known; otherwise the store would refuse the whole put.

MAX_SHOWN_CHARS = 2**20  # in the messages of one turn, because they are tokenized on the event loop
_NOT_REAL = "cOSUmM"  # kinds of numpy dtypes that `float` converts with loss, or by parsing text
_OWN_PARTS = 1  # the episode adds `truncated`


def step_result(value: Any) -> StepResult:
    """`value` as a StepResult whose fields have their declared types; DataError otherwise."""
    if not isinstance(value, StepResult):
        raise DataError(f"step() returned {_named(value)}, not a StepResult")
    done = flag(value.done, "StepResult.done")
    extracted = value.extracted
    if extracted is not None:
        extracted = text(extracted, "StepResult.extracted", MAX_SHOWN_CHARS)[:MAX_EXTRACTED_CHARS]
    shown = () if done else messages(value.messages, "StepResult.messages")
    if not isinstance(value.state, bytes | None):
        raise DataError(f"StepResult.state is {_named(value.state)}, not bytes")
    reward = number(value.reward, "the reward")
    return StepResult(done, shown, reward, parts(value.reward_parts), extracted, value.state)


def messages(value: Any, field: str) -> tuple[Message, ...]:
    """`value`, a list or tuple of Message, as a tuple whose texts can be encoded; DataError otherwise."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise DataError(f"{field} is {_named(value)}, not a tuple of Message")
    size = 0
    for place, message in enumerate(value):
        if not isinstance(message, Message):
            raise DataError(f"{field}[{place}] is {_named(message)}, not a Message")
        text(message.role, f"{field}[{place}].role", MAX_LABEL_CHARS)
        size += len(text(message.content, f"{field}[{place}].content", MAX_SHOWN_CHARS))
    if size > MAX_SHOWN_CHARS:
        raise DataError(f"{field}: {size} characters in one turn, at most {MAX_SHOWN_CHARS} are taken")
    return tuple(value)


def parts(value: Any) -> dict[str, float]:
    """`value`, a mapping from label to number, with finite floats; DataError otherwise."""
    if not isinstance(value, Mapping):
        raise DataError(f"StepResult.reward_parts is {_named(value)}, not a dict of label to number")
    if len(value) > MAX_PARTS - _OWN_PARTS:
        raise DataError(f"StepResult.reward_parts has {len(value)} entries, at most {MAX_PARTS - _OWN_PARTS} are taken")
    return {
        text(name, "a label of StepResult.reward_parts", MAX_LABEL_CHARS): number(
            part, f"reward part {str(name)[:40]!a}"
        )
        for name, part in value.items()
    }


def number(value: Any, field: str) -> float:
    """`value` (a real number, a boolean, or an array without dimensions) as a finite float; DataError otherwise."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if isinstance(value, str | bytes | bytearray) or getattr(value, "shape", ()) != () or kind in _NOT_REAL:
        raise DataError(f"{field} is {_named(value)}, not a finite number")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{field} is {_named(value)}, not a finite number: {error}") from error
    if not math.isfinite(found):
        raise DataError(f"{field} is {found}, which is not a finite number")
    return found


def flag(value: Any, field: str) -> bool:
    """`value` (a boolean of Python or numpy) as a bool; DataError otherwise."""
    if isinstance(value, bool) or (str(getattr(value, "dtype", "")) == "bool" and getattr(value, "shape", None) == ()):
        return bool(value)
    raise DataError(f"{field} is {_named(value)}, not True or False")


def text(value: Any, field: str, max_chars: int) -> str:
    """`value`, a str of at most `max_chars` characters that UTF-8 can encode; DataError otherwise."""
    if not isinstance(value, str):
        raise DataError(f"{field} is {_named(value)}, not a str")
    if len(value) > max_chars:
        raise DataError(f"{field} has {len(value)} characters, at most {max_chars} are taken")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{field} holds the lone surrogate {value[error.start]!a} at {error.start}, which UTF-8 cannot encode"
        ) from error
    return str(value)  # a plain str, because subclasses cannot be serialized


def _named(value: Any) -> str:
    """A description of `value` for an error message: None, or its type."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


# --- supports of truncated sampling: the token ids to which top-k, top-p or min-p restricted each sampled token
#
# The behavior distribution is renormalized over the support, so the learner must renormalize over the same ids. The
# serialized form of T sampled tokens is a series of varints (LEB128, 7 bits a byte, low bits first): T sizes, then for
# each token the ids of its support except the token itself, ascending, as differences to the previous id minus 1. A
# token that was certain takes one byte. Size 0 means that the token was sampled from the whole vocabulary.

_BITS, _MOST = 7, 5  # of a varint: bits per byte, bytes


@dataclass(frozen=True, eq=False)
class Supports:
    """The supports of T tokens: their `sizes` (int64 [T], 0 for the whole vocabulary) and all `ids`, in token order."""

    NONE: ClassVar[int] = -1  # fills the rows of an array [T, K] behind the ids
    MAX_ID: ClassVar[int] = 2**31 - 1

    sizes: np.ndarray
    ids: np.ndarray  # int32 [Σ sizes]

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> Supports:
        """The supports in `rows` (int32 [T, K]; entries below 0 are no ids)."""
        held = rows >= 0
        return cls(held.sum(axis=1, dtype=np.int64), rows[held])

    @classmethod
    def whole(cls, tokens: int) -> Supports:
        """The supports of `tokens` tokens that were sampled from the whole vocabulary."""
        return cls(np.zeros(tokens, np.int64), np.zeros(0, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[Supports]) -> Supports:
        """The supports of the tokens of all `parts`, in order."""
        each = [cls.whole(0), *parts]
        return cls(np.concatenate([part.sizes for part in each]), np.concatenate([part.ids for part in each]))

    @classmethod
    def decoded(cls, data: np.ndarray, tokens: np.ndarray) -> Supports:
        """The supports serialized in `data` (uint8 [N]) of the sampled `tokens` (int32 [T]), each with its token first.

        DataError if `data` is not a valid serialization for so many tokens.
        """
        if not data.size:
            return cls.whole(len(tokens))
        values = _integers(data)
        sizes, gaps = values[: len(tokens)], values[len(tokens) :]
        counts = np.maximum(sizes - 1, 0)
        if len(sizes) < len(tokens) or counts.sum() != len(gaps):
            raise DataError(f"supports of {len(tokens)} tokens: {len(values)} numbers do not match the sizes")
        sums = np.concatenate([[0], np.cumsum(gaps + 1)])
        ends = np.cumsum(counts)
        others = sums[1:] - 1 - np.repeat(sums[ends - counts], counts)
        if others.max(initial=0) > cls.MAX_ID:
            raise DataError(f"a support has the token id {others.max()}")
        if (others == np.repeat(tokens, counts)).any():
            raise DataError("a support lists its own token twice")
        ids = np.empty(sizes.sum(), np.int32)
        starts = np.cumsum(sizes) - sizes
        own = np.zeros(len(ids), bool)
        own[starts[sizes > 0]] = True
        ids[own], ids[~own] = tokens[sizes > 0], others
        return cls(sizes, ids)

    @staticmethod
    def worst_bytes(width: int, vocab_size: int) -> int:
        """The largest serialized size of one token's support of `width` ids; 0 for `width` 0."""
        if not width:
            return 0
        # The differences of a support sum to less than the vocabulary, so few of them need more than one byte.
        longer = [min(width - 1, vocab_size >> (_BITS * n)) for n in range(1, _MOST)]
        return len(_varints(np.array([width]))) + width - 1 + sum(longer)

    def encoded(self, tokens: np.ndarray) -> np.ndarray:
        """uint8 [N]: the serialized supports of the sampled `tokens` (int32 [T]); empty if no token has one.

        ValueError if a support lacks its token.
        """
        sizes = self.sizes
        if not sizes.any():
            return np.zeros(0, np.uint8)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        others = self.ids != tokens[owner]
        if len(others) - others.sum() != np.count_nonzero(sizes):
            raise ValueError("a sampled token is not in its support")
        owner, ids = owner[others], self.ids[others].astype(np.int64)
        order = np.argsort((owner << 32) + ids)
        ids, owner = ids[order], owner[order]
        before = np.concatenate([[self.NONE], ids[:-1]])
        before[np.flatnonzero(np.diff(owner, prepend=-1))] = self.NONE
        return _varints(np.concatenate([sizes, ids - before - 1]))

    def rows(self, width: int) -> np.ndarray:
        """int32 [T, width]: the ids of each token, then `NONE`. ValueError if a support has more than `width` ids."""
        if self.sizes.max(initial=0) > width:
            raise ValueError(f"a support of {self.sizes.max()} tokens does not fit into {width}")
        rows = np.full((len(self.sizes), width), self.NONE, np.int32)
        rows[np.arange(width) < self.sizes[:, None]] = self.ids
        return rows

    def part(self, start: int, stop: int) -> Supports:
        """The supports of the tokens [start, stop)."""
        ends = np.concatenate([[0], np.cumsum(self.sizes)])
        return Supports(self.sizes[start:stop], self.ids[ends[start] : ends[stop]])

    def first(self, tokens: int) -> Supports:
        """The supports of the first `tokens` tokens."""
        return Supports(self.sizes[:tokens], self.ids[: self.sizes[:tokens].sum()])


def _varints(values: np.ndarray) -> np.ndarray:
    """uint8 [N]: `values` (0 ≤ value < 2³⁵) as varints."""
    lengths = 1 + sum(((values >= 1 << (_BITS * n)).astype(np.int64) for n in range(1, _MOST)), np.zeros_like(values))
    ends = np.cumsum(lengths)
    out = np.empty(ends[-1] if len(ends) else 0, np.uint8)
    for n in range(int(lengths.max(initial=0))):
        has = lengths > n
        bits = (values[has] >> (_BITS * n)) & 127
        out[(ends - lengths)[has] + n] = bits | ((lengths[has] > n + 1) << _BITS)
    return out


def _integers(data: np.ndarray) -> np.ndarray:
    """int64 [M]: the varints in `data`."""
    ends = np.flatnonzero(data < 128)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise DataError("a support is cut off")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > _MOST:
        raise DataError("a support has a number that is too large")
    values = np.zeros(len(ends), np.int64)
    for n in range(int(lengths.max())):
        has = lengths > n
        values[has] |= (data[starts[has] + n] & 127).astype(np.int64) << (_BITS * n)
    return values
