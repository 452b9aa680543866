"""Requests of the HTTP front end: their fields, limits, and what the engine is asked to do.

Layouts: OpenAI's completions and chat completions, and vLLM's `/inference/v1/generate`, `/tokenize`, `/detokenize`. A
field that this engine cannot honour is refused unless it has the value that changes nothing; an unknown field too.
"""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from jaxroll.errors import one_line
from jaxroll.protocols import SamplingParams, Tokenizer
from jaxroll.records import Message
from jaxroll.text.tokenizers import MOST_ENDS, end_ids

MAX_CHOICES = 128  # answers of one request
MAX_STOPS = 16
_IGNORED = frozenset(
    {  # of clients; they do not change an answer
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "priority",
        "cache_salt",
        "request_id",
        "parallel_tool_calls",
        "routed_experts_prompt_start",
    }
)
_ROLES = ("system", "user", "assistant", "tool")


class ApiError(Exception):
    """A request that is refused with `status`; `param` names its field. The message gives reason and remedy."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        self.message, self.param, self.status, self.code = message, param, status, code
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Draws(msgspec.Struct, kw_only=True):
    """Sampling fields that all layouts share. None: the default of `Wanted`."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    # Only with the value that changes nothing:
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Text(Draws, kw_only=True):
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class CompletionBody(_Text, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ChatBody(_Text, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None


class TokenSampling(Draws, kw_only=True):
    """`sampling_params` of `POST /inference/v1/generate`."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool | None = None
    output_kind: int | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """`POST /inference/v1/generate`: token ids in and out."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    stream: bool = False


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a text, or messages in the chat format."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


B = TypeVar("B", bound=msgspec.Struct)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "min_tokens": (0,),
    "skip_special_tokens": (True, False), "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True, False), "echo": (False,), "suffix": ("",), "prompt_logprobs": (0,),
    "detokenize": (True, False), "output_kind": (0, 1, 2), "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}  # fmt: skip


def parsed(values: Any, kind: type[B], where: str = "") -> B:
    """The fields of a JSON object as `kind`; ApiError for a missing, unknown, mistyped or unsupported one."""
    if not isinstance(values, dict):
        raise ApiError(f"{where or 'the body'} must be a JSON object", param=where or None)
    known = kind.__struct_fields__
    for name in values:
        if name not in known and name not in _IGNORED:
            near = difflib.get_close_matches(str(name), known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ApiError(f"unknown field {one_line(repr(name), 80)}: {remedy}", param=str(name)[:80])
    try:
        made = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ApiError(f"{where or 'the body'}: {one_line(str(error), 300)}", param=where or None) from error
    for name, allowed in _NEUTRAL.items():
        value = getattr(made, name, None)
        if value is not None and value not in allowed:
            shown = one_line(json.dumps(value), 80)
            raise ApiError(f"{name} = {shown}: this engine does not support it; leave it out", param=name)
    return made


@dataclass(frozen=True)
class Wanted:
    """Generations to run: `count` answers for each of `prompts`, and how to show them."""

    prompts: tuple[list[int], ...]
    count: int
    params: SamplingParams
    stream: bool = False
    usage: bool = False  # in a stream
    logprobs: bool = False
    top_logprobs: bool = False
    token_ids: bool = False
    token_names: bool = False  # "token_id:N" instead of text
    tools: bool = False  # parse tool calls


@dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine: positions of a request; and its tokenizer."""

    max_tokens: int
    tokenizer: Tokenizer


def completion(body: CompletionBody, room: EngineLimits) -> Wanted:
    """The generations of a completion request."""
    if body.best_of not in (None, body.n or 1):
        raise ApiError("best_of must equal n: answers are not ranked", param="best_of")
    if (body.logprobs or 0) > 1:
        raise ApiError(_TOP.format("logprobs", body.logprobs), param="logprobs")
    prompts = _prompts(body.prompt, room.tokenizer)
    params = _params(body, room, prompts, 16 if body.max_tokens is None else body.max_tokens)
    shown = body.logprobs is not None
    return _wanted(body, prompts, params, logprobs=shown, top_logprobs=bool(body.logprobs))


def chat(body: ChatBody, room: EngineLimits) -> Wanted:
    """The generations of a chat request."""
    if (body.top_logprobs or 0) > 1:
        raise ApiError(_TOP.format("top_logprobs", body.top_logprobs), param="top_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs = true", param="top_logprobs")
    choice = body.tool_choice
    if choice not in (None, "auto", "none"):
        raise ApiError("tool_choice: only 'auto' and 'none' are supported; the model decides", param="tool_choice")
    tools = body.tools if body.tools and choice != "none" else []
    prompts = [room.tokenizer.render(messages(body.messages), tools=tools)]
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = _params(body, room, prompts, most)
    tops = bool(body.top_logprobs)
    return _wanted(body, prompts, params, logprobs=bool(body.logprobs), top_logprobs=tops, tools=bool(tools))


def generate(body: GenerateBody, room: EngineLimits) -> Wanted:
    """The generations of a request by token ids."""
    if body.stream:
        raise ApiError("stream: this endpoint answers at once; use /v1/completions to stream", param="stream")
    sampling = parsed(body.sampling_params, TokenSampling, "sampling_params")
    if (sampling.logprobs or 0) > 1:
        raise ApiError(_TOP.format("sampling_params.logprobs", sampling.logprobs), param="sampling_params")
    prompts = [_ids(body.token_ids, "token_ids")]
    params = _params(sampling, room, prompts, sampling.max_tokens)
    return Wanted((prompts[0],), _count(sampling), params, logprobs=True, token_ids=True, token_names=True)


def tokenized(body: TokenizeBody, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a text, or of messages as a chat request would send them."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        return tokenizer.render(messages(body.messages), tools=body.tools or [])
    assert body.prompt is not None
    return tokenizer.encode(body.prompt)


_TOP = "{} = {}: the engine records the log-prob of the sampled token only; 0 and 1 are possible"


def _wanted(body: _Text, prompts: list[list[int]], params: SamplingParams, **shown: bool) -> Wanted:
    usage = body.stream and body.stream_options is not None and body.stream_options.include_usage
    return Wanted(
        tuple(prompts),
        _count(body, len(prompts)),
        params,
        body.stream,
        usage,
        token_ids=body.return_token_ids,
        token_names=body.return_tokens_as_token_ids,
        **shown,
    )


def _count(draws: Draws, prompts: int = 1) -> int:
    count = 1 if draws.n is None else draws.n
    if not 1 <= count * prompts <= MAX_CHOICES:
        raise ApiError(f"{prompts} prompts with n = {count}: 1 to {MAX_CHOICES} answers are possible", param="n")
    return count


def _params(draws: Draws, room: EngineLimits, prompts: Sequence[list[int]], most: int | None) -> SamplingParams:
    left = room.max_tokens - max(map(len, prompts))
    if left < 1:
        reason = f"the prompt has {room.max_tokens - left} tokens, and prompt and answer together may have"
        raise ApiError(f"{reason} {room.max_tokens}: shorten it", code="context_length_exceeded", param="prompt")
    if most is not None and most > left:
        reason = f"max_tokens = {most} and a prompt of {room.max_tokens - left} tokens exceed the engine's"
        raise ApiError(
            f"{reason} {room.max_tokens}: lower max_tokens", code="context_length_exceeded", param="max_tokens"
        )
    stops = [draws.stop] if isinstance(draws.stop, str) else draws.stop or []
    if len(stops) > MAX_STOPS or not all(0 < len(one) <= 256 for one in stops):
        raise ApiError(f"stop: up to {MAX_STOPS} strings of 1 to 256 characters are possible", param="stop")
    asked: dict[int, None] = dict.fromkeys([room.tokenizer.eos_id, *(draws.stop_token_ids or [])])
    ends = tuple(asked | dict.fromkeys(end_ids(room.tokenizer)))[: max(len(asked), MOST_ENDS)]
    seed = secrets.randbits(31) if draws.seed is None else draws.seed % 2**31
    given: Any = lambda value, default: default if value is None else value  # noqa: E731
    return SamplingParams(
        left if most is None else most,
        given(draws.temperature, 1.0),
        max(given(draws.top_k, 0), 0),
        given(draws.top_p, 1.0),
        ends,
        given(draws.min_p, 0.0),
        given(draws.repetition_penalty, 1.0),
        tuple(stops),
        draws.ignore_eos,
        seed,
    )


def _prompts(prompt: str | list[Any], tokenizer: Tokenizer) -> list[list[int]]:
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if prompt and all(isinstance(one, str) for one in prompt):
        return [tokenizer.encode(one) for one in prompt]
    if prompt and all(isinstance(one, list) for one in prompt):
        return [_ids(one, "prompt") for one in prompt]
    return [_ids(prompt, "prompt")]


def _ids(values: list[Any], param: str) -> list[int]:
    if not values or not all(type(one) is int and 0 <= one < 2**31 for one in values):
        raise ApiError(f"{param} must be a text or a list of at least one token id", param=param)
    return values


# --- messages


def messages(values: Sequence[Any]) -> tuple[Message, ...]:
    """The messages of a chat request; calls of tools are written as a model of Qwen's family writes them."""
    if not values:
        raise ApiError("messages: at least one is needed", param="messages")
    return tuple(_message(one, f"messages[{index}]") for index, one in enumerate(values))


def _message(value: Any, where: str) -> Message:
    role = value.get("role") if isinstance(value, Mapping) else None
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise ApiError(f"{where}.role = {one_line(repr(role), 40)}: one of {', '.join(_ROLES)} is needed", param=where)
    text = _content(value.get("content"), where)
    calls = value.get("tool_calls") or []
    if role == "assistant" and calls:
        text = "\n".join([*([text] if text else []), *(_call_text(call, where) for call in calls)])
    return Message(role, text)


def _content(value: Any, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    texts = (
        [one.get("text") if isinstance(one, Mapping) else None for one in value] if isinstance(value, list) else [None]
    )
    if not all(isinstance(one, str) for one in texts):
        raise ApiError(f"{where}.content: a text, or a list of parts of type 'text', is needed", param=where)
    return "".join(map(str, texts))


def _call_text(call: Any, where: str) -> str:
    try:
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        named = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    except (TypeError, KeyError, ValueError) as error:
        raise ApiError(
            f"{where}.tool_calls: each needs a function with name and JSON arguments", param=where
        ) from error
    return f"<tool_call>\n{named}\n</tool_call>"
