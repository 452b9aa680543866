"""OpenAI endpoints for agents: one for each member whose program calls the model itself.

The server listens on 127.0.0.1 of the process that plays the episodes, from its first member on. `/member/TOKEN/v1` is
the base URL of one member; a token is valid until its member ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec

from jaxroll import protocols
from jaxroll.config import TaskConfig
from jaxroll.envs.agent import given
from jaxroll.errors import DataError, InfraError
from jaxroll.protocols import Environment, GenerationKey, LLMProxy, SamplingParams, Tokenizer
from jaxroll.records import Finished, Message, Task
from jaxroll.rewards.grader import Grader
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.rollout.branches import ENDED, Branches, Call, NoRoom
from jaxroll.rollout.episode import Bounds, EnvironmentCalls, Transcript

if TYPE_CHECKING:  # these load JAX, which must come after the scoring pool
    from starlette.requests import Request
    from starlette.types import ASGIApp

    from jaxroll.serving.http_answers import Piece
    from jaxroll.serving.http_requests import Wanted

LOOPBACK = "127.0.0.1"


class _Member(Branches):
    """The calls of one member, and the reward that its program posted."""

    reward: tuple[float, dict[str, float]] | None = None  # and its parts


class Agents:
    """Plays the members of a run whose environment is `agent`; belongs to one event loop. `close` it at the end."""

    def __init__(self, pool: ScoringPool, task: TaskConfig) -> None:
        self._task, self._grader = task, Grader(pool, task)
        self._members: dict[str, _Member] = {}
        self._serving: asyncio.Task[None] | None = None
        self._listening: socket.socket | None = None
        self._address = ""

    async def play(
        self, task: Task, key: GenerationKey, *, env: Environment, proxy: LLMProxy, tokenizer: Tokenizer,
        sampling: SamplingParams, bounds: Bounds, env_calls: EnvironmentCalls, transcript: Transcript | None = None,
    ) -> Finished:  # fmt: skip
        """The finished episode of an agent (arguments and errors of `rollout.episode.run`).

        The reward is what the program returned, else what it posted, else the grade of the model's last answer.
        """
        token, member = secrets.token_urlsafe(24), _Member(proxy, key, tokenizer, sampling, bounds, transcript)
        base = f"{self._served()}/member/{token}"
        self._members[token] = member
        limit = asyncio.timeout(self._task.agent_limit_s)
        try:
            await env_calls.reset(env, task)  # waits for a free process
            async with limit:
                job = {"base_url": f"{base}/v1", "api_key": token, "reward_url": f"{base}/reward"}
                result = protocols.step_result(await env_calls.step(env, json.dumps(job)))
        except TimeoutError as error:
            if not limit.expired():
                raise
            env_calls.counts.overdue += 1
            raise DataError(f"the agent took longer than task.agent_limit_s = {self._task.agent_limit_s:g}") from error
        except InfraError:
            raise
        except Exception as error:
            if isinstance(member.failure, InfraError):
                raise InfraError(f"the engine failed, and then the agent: {member.failure}") from error
            if member.out_of_room:
                return member.finished("length", 0.0, {"truncated": 1.0})
            raise
        finally:
            del self._members[token]
            await member.close()
        given = (result.reward, result.reward_parts) if result.done else member.reward
        extracted = result.extracted
        if given is None and member.begun:
            grade = await self._grader.grade(task.env_args, member.answer, member.answer_tokens, task.messages)
            given, extracted = (grade.reward, grade.parts), grade.extracted
        reward, parts = given or (0.0, {})
        parts = {**parts, "calls": float(member.calls), "truncated": float(member.cut or member.out_of_room)}
        return member.finished("done", reward, parts, extracted)

    async def close(self) -> None:
        """End the server."""
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        if self._listening is not None:
            self._listening.close()

    def _served(self) -> str:
        """The address of the server, which the first member starts."""
        if self._serving is None:
            from jaxroll.rpc import http

            self._listening = listening = http.listen(LOOPBACK, 0)
            self._address = http.address(LOOPBACK, listening)
            self._serving = asyncio.ensure_future(http.serve(self._app(), listening))
        return self._address

    def _app(self) -> ASGIApp:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.routing import Route

        from jaxroll.errors import ConfigError
        from jaxroll.serving import http_server
        from jaxroll.serving.http_requests import ApiError

        routes = [
            Route("/member/{token}/v1/models", self._models),
            Route("/member/{token}/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/member/{token}/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/member/{token}/v1/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/member/{token}/reward", self._reward, methods=["POST"]),
        ]
        kinds: tuple[Any, ...] = (ApiError, DataError, ConfigError, InfraError, HTTPException)
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, http_server.refused))

    def _member(self, request: Request) -> _Member:
        from jaxroll.serving.http_requests import ApiError

        member = self._members.get(request.path_params["token"])
        if member is None or member.closed:
            raise ApiError(ENDED, status=410, code="member_ended")
        return member

    async def _models(self, request: Request) -> ASGIApp:
        from jaxroll.serving import http_server

        self._member(request)
        card = {"id": "policy", "object": "model", "created": 0, "owned_by": "jaxroll"}
        return http_server.json_response({"object": "list", "data": [card]})

    async def _reward(self, request: Request) -> ASGIApp:
        from jaxroll.serving import http_server

        member, (body, _) = self._member(request), await http_server.json_body(request)
        member.reward = given(body)
        return http_server.json_response({})

    async def _chat(self, request: Request) -> ASGIApp:
        from jaxroll.serving import http_requests as requests
        from jaxroll.serving import http_server
        from jaxroll.serving.http_answers import ChatLayout

        member, (values, _) = self._member(request), await http_server.json_body(request)
        body = requests.parsed(values, requests.ChatBody)
        if body.tool_choice not in (None, "auto", "none"):
            raise requests.ApiError("tool_choice: only 'auto' and 'none' are supported", param="tool_choice")
        if (body.top_logprobs or 0) > 1:
            raise requests.ApiError("top_logprobs: 0 and 1 are possible", param="top_logprobs")
        tools = body.tools if body.tools and body.tool_choice != "none" else []
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        params = _params(member.sampling, body, most)
        work = member.chat(requests.messages(body.messages), tools, params)
        call = await http_server.while_connected(request, _answered(work))
        wanted = requests.Wanted(
            (call.prompt,), 1, call.params, body.stream,
            bool(body.stream_options and body.stream_options.include_usage),
            bool(body.logprobs), bool(body.top_logprobs), body.return_token_ids, body.return_tokens_as_token_ids,
            bool(tools),
        )  # fmt: skip
        piece, layout = _piece(member, wanted, call), ChatLayout(_served(member, body.model), wanted, _id("chatcmpl"))
        member.heard(call, requests.messages([layout.choice(0, piece)["message"]])[0])
        if body.stream:
            return http_server.EventStream(request, layout.events(_once(piece)))
        return http_server.json_response(layout.whole([piece]))

    async def _generate(self, request: Request) -> ASGIApp:
        from jaxroll.serving import http_requests as requests
        from jaxroll.serving import http_server
        from jaxroll.serving.http_answers import TokenLayout

        member, (values, _) = self._member(request), await http_server.json_body(request)
        body = requests.parsed(values, requests.GenerateBody)
        draws = requests.parsed(body.sampling_params, requests.TokenSampling, "sampling_params")
        params = _params(member.sampling, draws, draws.max_tokens)
        call = await http_server.while_connected(request, _answered(member.tokens(body.token_ids, params)))
        wanted = requests.Wanted((call.prompt,), 1, call.params, logprobs=True, token_ids=True, token_names=True)
        piece = _piece(member, wanted, call)
        member.heard(call, Message("assistant", piece.text))
        layout = TokenLayout(_served(member, body.model), wanted, _id("generate"))
        return http_server.json_response(layout.whole([piece]))


async def _answered(work: Any) -> Call:
    from jaxroll.serving.http_requests import ApiError

    try:
        return await work
    except NoRoom as error:
        raise ApiError(str(error), code="context_length_exceeded") from error


def _params(run: SamplingParams, body: Any, most: int | None) -> SamplingParams:
    """The run's sampling parameters, with the limit and the stop strings of a request."""
    from jaxroll.serving.http_requests import MAX_STOPS, ApiError

    if body.n not in (None, 1):
        raise ApiError("n: one answer a call is recorded; call again for another", param="n")
    if most is not None and most < 1:
        raise ApiError("max_tokens must be positive", param="max_tokens")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS or not all(0 < len(one) <= 256 for one in stops):
        raise ApiError(f"stop: up to {MAX_STOPS} strings of 1 to 256 characters are possible", param="stop")
    limit = min(run.max_tokens, most or run.max_tokens)
    return msgspec.structs.replace(run, max_tokens=limit, stop_strings=tuple(stops))


def _piece(member: _Member, wanted: Wanted, call: Call) -> Piece:
    from jaxroll.serving.http_answers import Answer

    return Answer(member.tokenizer, wanted).end(call.completion)


def _served(member: _Member, name: str | None) -> Any:
    """The model as `http_answers` describes it; its only property that they show is the name."""
    from jaxroll.serving.http_answers import Served
    from jaxroll.serving.http_requests import Room

    return Served(name or "policy", None, Room(0, member.tokenizer), lambda: None, lambda: None)  # type: ignore[arg-type]


async def _once(piece: Piece) -> AsyncGenerator[tuple[int, Piece], None]:
    yield 0, piece


def _id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(8)}"
