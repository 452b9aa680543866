"""HTTP front end of an engine: OpenAI's endpoints, generation by token ids, control of the engine, and metrics.

It runs on the event loop that the engine's proxy belongs to, so that requests, cancellations and the pause of the
engine need no locks, and a token reaches its stream without another thread. Its work on that loop is bounded: a body
has at most `MAX_BODY_BYTES`, and long prompts are tokenized in a thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxroll.errors import ConfigError, DataError, InfraError
from jaxroll.protocols import Completion, GenerationKey
from jaxroll.records import versions_after
from jaxroll.rpc import http
from jaxroll.serving import http_requests as requests
from jaxroll.serving.engine_thread import Admission, PauseMode, WakeQueue
from jaxroll.serving.http_answers import (
    AnswerFormat,
    ChatLayout,
    JoinedTokens,
    Piece,
    Served,
    StreamedAnswer,
    TextLayout,
    TokenLayout,
    event,
)
from jaxroll.serving.http_requests import ApiError, EngineLimits, Wanted

T = TypeVar("T")
MAX_BODY_BYTES = 4 << 20
_TOKENIZED_HERE_BYTES = 64 << 10  # longer bodies are tokenized in a thread
_RETRY_AFTER_S = 1
_UNWRAPPED = "jaxroll.send"  # of a scope: the server's `send`, for the events of a stream after its first
_OPEN_PATHS = ("/health",)  # without a token


@dataclass
class _Counts:
    open: int = 0
    of_client: Counter[str] = field(default_factory=Counter)  # open ones
    answers: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)


class FrontEnd:
    """Answers the HTTP requests for one model, for clients that show `token`. Belongs to one event loop.

    `more` are further endpoints.
    """

    def __init__(self, model: Served, token: str, more: Sequence[Route] = ()) -> None:
        self.model, self.counts, self._wake_queue = model, _Counts(), WakeQueue()
        slots = model.slots or model.max_open
        self._admission = Admission(slots + max(1, slots // 8))  # some wait in the engine, so that no slot is idle
        self._token, self._ids = token.encode(), 0
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/is_paused", self._is_paused),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            *more,
        ]
        self._paths = {route.path for route in routes}
        kinds = (ApiError, DataError, ConfigError, InfraError, HTTPException)
        handlers: dict[Any, Any] = dict.fromkeys(kinds, refused)
        self.app: ASGIApp = self._guarded(Starlette(routes=routes, exception_handlers=handlers))

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        """`app` for clients with the token; counts the responses."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)

            async def counted(message: Any) -> None:
                if message["type"] == "http.response.start":
                    known = scope["path"] if scope["path"] in self._paths else "other"
                    self.counts.responses[known, message["status"]] += 1
                await send(message)

            if scope["path"] not in _OPEN_PATHS and not http.shows_token(scope, self._token):
                response = _error(
                    ApiError(
                        "this server needs its token: send `Authorization: Bearer TOKEN`, with the content of the "
                        "token file that it names at its start",
                        status=401,
                        code="invalid_api_key",
                    )
                )
                return await response(scope, receive, counted)
            scope[_UNWRAPPED] = send
            await app(scope, receive, counted)

        return guarded

    # --- endpoints that generate

    async def _completions(self, request: Request) -> ASGIApp:
        wanted, body = await self._wanted(request, requests.CompletionBody, requests.completion)
        return await self._answered(request, body, wanted, TextLayout(self.model, wanted, self._new_id("cmpl")))

    async def _chat(self, request: Request) -> ASGIApp:
        wanted, body = await self._wanted(request, requests.ChatBody, requests.chat)
        return await self._answered(request, body, wanted, ChatLayout(self.model, wanted, self._new_id("chatcmpl")))

    async def _generate(self, request: Request) -> ASGIApp:
        wanted, body = await self._wanted(request, requests.GenerateBody, requests.generate)
        name = body.get("request_id")
        layout = TokenLayout(self.model, wanted, name if isinstance(name, str) else self._new_id("generate"))
        return await self._answered(request, body, wanted, layout)

    async def _wanted(
        self, request: Request, kind: type[requests.B], read: Callable[[requests.B, EngineLimits], Wanted]
    ) -> tuple[Wanted, dict[str, Any]]:
        values, size_bytes = await json_body(request)
        body = requests.parsed(values, kind)
        self._check_model(getattr(body, "model", None))
        if size_bytes <= _TOKENIZED_HERE_BYTES:
            return read(body, self.model.room), values
        return await asyncio.to_thread(read, body, self.model.room), values

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.model.name):
            raise ApiError(
                f"this server has no model {name[:80]!r}; it serves {self.model.name!r}",
                param="model",
                status=404,
                code="model_not_found",
            )

    def _new_id(self, kind: str) -> str:
        self._ids += 1
        return f"{kind}-{self._ids}"

    async def _answered(
        self, request: Request, body: Mapping[str, Any], wanted: Wanted, layout: AnswerFormat
    ) -> ASGIApp:
        client = client_of(request, body)
        if wanted.stream:
            return EventStream(request, self._shown(wanted, client, layout.event_of, layout.closing))
        pieces = self._shown(wanted, client, lambda choice, piece: (choice, piece))
        return json_response(await while_connected(request, self._all(pieces, layout)))

    async def _all(self, arriving: AsyncGenerator[tuple[int, Piece], None], layout: AnswerFormat) -> dict[str, Any]:
        pieces: dict[int, Piece] = {}
        async with aclosing(arriving):
            async for choice, piece in arriving:
                pieces[choice] = piece
        return layout.whole([pieces[choice] for choice in sorted(pieces)])

    async def _shown(
        self, wanted: Wanted, client: str, show: Callable[[int, Piece], T], closing: Callable[[], list[T]] = list
    ) -> AsyncGenerator[T, None]:
        """`show` of the choice and content of every piece, then `closing`.

        The pieces of a stream come as they are sampled, otherwise there is one for each answer. Ending the iteration
        aborts what runs. ApiError (429) if too many requests of this client wait.
        """
        counts, total = self.counts, len(wanted.prompts) * wanted.count
        share = self.model.max_open // (len(counts.of_client) + (client not in counts.of_client))
        if counts.of_client[client] + total > share:
            raise ApiError(
                f"{counts.open} answers are computed or wait, of {self.model.max_open} ({share} of each client): try "
                "again later",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=_RETRY_AFTER_S,
            )
        counts.open += total
        counts.of_client[client] += total
        arriving = JoinedTokens(client, self._wake_queue)
        made = [StreamedAnswer(self.model.room.tokenizer, wanted) for _ in range(total)]
        tasks = [asyncio.create_task(self._one(choice, wanted, client, arriving)) for choice in range(total)]
        left = total
        try:
            while left:
                for choice, pieces in await arriving.take():
                    new = pieces[-1]
                    if not new.finish:
                        yield show(choice, made[choice].add(pieces))
                        continue
                    left -= 1
                    sent = made[choice].count
                    versions = versions_after(new.versions, sent)
                    rest = Completion(new.tokens[sent:], new.logprobs[sent:], versions, new.finish)
                    counts.answers += 1
                    counts.completion_tokens += len(new.tokens)
                    yield show(choice, made[choice].end(rest))
            counts.prompt_tokens += sum(map(len, wanted.prompts))
            for one in closing():
                yield one
        finally:
            counts.open -= total
            counts.of_client[client] -= total
            if not counts.of_client[client]:
                del counts.of_client[client]
            counts.cancelled += left
            for task in tasks:
                task.cancel()

    async def _one(self, choice: int, wanted: Wanted, client: str, arriving: JoinedTokens) -> None:
        prompt = np.asarray(wanted.prompts[choice // wanted.count], np.int32)
        key = GenerationKey(choice // wanted.count, choice % wanted.count)
        on_tokens = partial(arriving.add, choice) if wanted.stream else None
        try:
            async with self._admission.admitted(client, len(prompt) + wanted.params.max_tokens):
                completion = await self.model.proxy.generate(prompt, key, wanted.params, on_tokens=on_tokens)
        except Exception as error:  # noqa: BLE001 - raised again where the request is answered
            arriving.add(choice, error)
        else:
            arriving.add(choice, completion)

    # --- other endpoints

    async def _models(self, request: Request) -> Response:
        version, room = self.model.version(), self.model.room
        card = {
            "id": self.model.name,
            "object": "model",
            "created": 0,
            "owned_by": "jaxroll",
            "max_model_len": room.max_tokens,
            "weight_version": version and str(version),
        }
        return json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: Request) -> Response:
        values, _ = await json_body(request)
        body, room = requests.parsed(values, requests.TokenizeBody), self.model.room
        self._check_model(body.model)
        ids = await asyncio.to_thread(requests.tokenized, body, room.tokenizer)
        return json_response({"count": len(ids), "max_model_len": room.max_tokens, "tokens": ids})

    async def _detokenize(self, request: Request) -> Response:
        values, _ = await json_body(request)
        body = requests.parsed(values, requests.DetokenizeBody)
        self._check_model(body.model)
        size = self.model.room.tokenizer.vocab_size
        if wrong := [token for token in body.tokens if not 0 <= token < size]:
            raise ApiError(f"tokens: {wrong[0]} is not in 0..{size - 1}, the vocabulary", param="tokens")
        return json_response({"prompt": await asyncio.to_thread(self.model.room.tokenizer.decode, body.tokens)})

    async def _pause(self, request: Request) -> Response:
        mode: Any = request.query_params.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise ApiError(f"mode = {mode[:40]!r}: one of {', '.join(get_args(PauseMode))} is needed", param="mode")
        if unknown := set(request.query_params) - {"mode", "clear_cache"}:
            reason = f"{min(unknown)[:40]}: only mode and clear_cache are possible"
            raise ApiError(reason, param=min(unknown)[:40])
        done = "false" if self.model.swap == "keep_kv" else "true"
        if (cleared := request.query_params.get("clear_cache", done).lower()) != done:
            raise ApiError(
                f"clear_cache = {cleared[:40]!r}: with schedule.weight_swap={self.model.swap} it is {done}; leave it "
                "out, or serve with another policy (keep_kv: false, reprefill: true)",
                param="clear_cache",
            )
        await while_connected(request, self.model.proxy.pause(mode))
        return self._state()

    async def _resume(self, request: Request) -> Response:
        self.model.proxy.resume()
        return self._state()

    async def _is_paused(self, request: Request) -> Response:
        return json_response({"is_paused": self.model.proxy.paused is not None})

    def _state(self) -> Response:
        paused, version = self.model.proxy.paused, self.model.version()
        shown = None if version is None else str(version)
        return json_response(
            {"status": "resumed" if paused is None else "paused", "mode": paused, "weight_version": shown}
        )

    async def _health(self, request: Request) -> Response:
        version = self.model.version()
        if version is None:
            raise ApiError("the engine has no weights yet: try again later", status=503, retry_after_s=_RETRY_AFTER_S)
        return json_response({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.exposition(), media_type="text/plain; version=0.0.4")

    def exposition(self) -> str:
        """Metrics of engine and front end in Prometheus' text format."""
        stats, counts = self.model.stats(), self.counts
        gauges = {
            "engine_running_requests": stats.active,
            "engine_waiting_requests": stats.queue_depth,
            "engine_suspended": int(stats.suspended),
            "http_open_answers": counts.open,
            "http_waiting_answers": self._admission.waiting,
            "weights_step": -1 if stats.version is None else stats.version.step,
        }
        totals = {
            "engine_tokens_decoded": stats.tokens_decoded,
            "engine_prefill_tokens": stats.prefill_tokens,
            "engine_requests_finished": stats.finished,
            "engine_requests_aborted": stats.aborted,
            "engine_preemptions": stats.preemptions,
            "engine_prefix_hits": stats.prefix_hits,
            "engine_tokens_drafted": stats.tokens_drafted,
            "engine_tokens_accepted": stats.tokens_accepted,
            "engine_weight_swaps": stats.weight_swaps,
            "http_answers": counts.answers,
            "http_answers_cancelled": counts.cancelled,
            "http_prompt_tokens": counts.prompt_tokens,
            "http_completion_tokens": counts.completion_tokens,
        }
        lines = [f"# TYPE jaxroll_{name} gauge\njaxroll_{name} {value}" for name, value in gauges.items()]
        lines += [
            f"# TYPE jaxroll_{name}_total counter\njaxroll_{name}_total {value}" for name, value in totals.items()
        ]
        lines.append("# TYPE jaxroll_http_responses_total counter")
        lines += [
            f'jaxroll_http_responses_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(counts.responses.items())
        ]
        for name, value in self.model.latencies().items():
            if value is not None:
                lines.append(f"# TYPE jaxroll_engine_{name} gauge\njaxroll_engine_{name} {value:.9g}")
        return "\n".join(lines) + "\n"


# --- requests and responses


def client_of(request: Request, body: Mapping[str, Any]) -> str:
    """The client whose turn a request takes: its field `user`, else its address, and at 127.0.0.1 its connection."""
    if isinstance(user := body.get("user"), str) and user:
        return f"user {user}"
    host, port = request.client or ("", 0)
    return f"{host} {port}" if host in ("127.0.0.1", "::1") else host


async def json_body(request: Request) -> tuple[Any, int]:
    """The JSON value of the body and its size; ApiError if it is too large or is not JSON."""
    read = bytearray()
    async for part in request.stream():
        read += part
        if len(read) > MAX_BODY_BYTES:
            raise ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes: send a shorter prompt", status=413)
    try:
        return msgspec.json.decode(bytes(read)), len(read)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {str(error)[:200]}") from error


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _shown(error: ApiError) -> dict[str, Any]:
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _error(error: ApiError) -> Response:
    """The error in OpenAI's layout."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return json_response(_shown(error), error.status, headers)


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(f"{error.detail}: docs/serving.md lists paths and methods", status=error.status_code)
    return ApiError(str(error), status=503 if isinstance(error, InfraError) else 400)


async def refused(request: Request, error: Exception) -> Response:
    return _error(_as_api_error(error))


class EventStream:
    """A response of server-sent events. An error before the first event is an ordinary error response."""

    def __init__(self, request: Request, events: AsyncGenerator[bytes, None]) -> None:
        self._request, self._events = request, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await while_connected(self._request, self._send(send, scope.get(_UNWRAPPED, send)))

    async def _send(self, send: Send, unwrapped: Send) -> None:
        first = await anext(self._events)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        last = b"data: [DONE]\n\n"
        try:
            async for one in self._events:
                await unwrapped({"type": "http.response.body", "body": one, "more_body": True})
        except (ApiError, DataError, InfraError) as error:
            last = event(_shown(_as_api_error(error)))
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects (ApiError, which no client receives)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("the client has disconnected", status=499)
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait([task, gone])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
