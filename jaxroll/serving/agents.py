"""OpenAI endpoints for agents: one for each member whose program calls the model itself; the recorded conversations.

The server listens on 127.0.0.1 of the process that plays the episodes, from its first member on. `/member/TOKEN/v1` is
the base URL of one member; a token is valid until its member ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jaxroll import protocols
from jaxroll.config import TaskConfig
from jaxroll.envs.executors import EnvironmentCalls
from jaxroll.envs.registry import Grader, given
from jaxroll.errors import DataError, InfraError
from jaxroll.protocols import Completion, Environment, GenerationKey, LLMProxy, SamplingParams, Tokenizer
from jaxroll.records import Finished, Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.rollout import episode
from jaxroll.rollout.episode import Bounds, Transcript

if TYPE_CHECKING:  # these load JAX, which must come after the scoring pool
    from starlette.requests import Request
    from starlette.types import ASGIApp

    from jaxroll.serving.http_answers import Piece
    from jaxroll.serving.http_requests import Wanted


# --- The conversations of a member whose program calls the model itself, recorded as segments
#
# Token truth: a call that extends a recorded conversation appends to its tokens; only the new messages are rendered. So
# sampled tokens stay as they were sampled, also where the chat template would rewrite earlier answers. Any other call
# begins another conversation. If it shares recorded answers with an earlier one, it starts with the tokens of those.

MAX_CALLS = 256  # of one member; with its tools a call is two or three segments
ENDED = "the member has ended: it takes no more calls"
_SALT = 1 << 16  # between the random keys of two conversations; attempts of a member take the numbers below


class NoRoom(DataError):
    """The conversation has no room for another answer, or the member for another call."""


@dataclass
class _Conversation:
    """Messages and their tokens; `ends` has (messages, segments) after every answer, which later calls may extend."""

    number: int
    tools: list[Any]
    messages: list[Message] = field(default_factory=list)
    transcript: Transcript = field(default_factory=Transcript)
    ends: list[tuple[int, int]] = field(default_factory=list)
    busy: bool = False
    first: int = 0  # tokens of its first prompt


@dataclass(frozen=True)
class Call:
    """One answer: its prompt, the completion, its sampling parameters, and the number of its conversation."""

    prompt: list[int]
    completion: Completion
    params: SamplingParams
    conversation: int


class Branches:
    """Records the calls of one member, which may run concurrently, on one event loop.

    `transcript` counts the sampled tokens of all calls while they run.
    """

    def __init__(
        self,
        proxy: LLMProxy,
        key: GenerationKey,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        bounds: Bounds,
        transcript: Transcript | None = None,
    ) -> None:
        self.tokenizer, self.sampling, self._bounds = tokenizer, episode.with_stop(sampling, tokenizer), bounds
        self._proxy, self._key, self._counted = proxy, key, transcript or Transcript()
        self._conversations: list[_Conversation] = []
        self._calls: set[asyncio.Task[Completion]] = set()
        self.begun = 0
        self.cut = self.out_of_room = self.closed = False
        self.answer, self.answer_tokens = "", 0
        self.failure: BaseException | None = None  # of the engine, which the program may hide

    async def chat(self, messages: tuple[Message, ...], tools: list[Any], params: SamplingParams) -> Call:
        """The answer to `messages`. NoRoom, or what the tokenizer and the engine raise."""
        conversation, shared = self._extended(messages, tools)
        new = tuple(messages[shared:])
        if not new:
            raise DataError("messages: the last one is an answer of the model; a new message must follow")
        with _busy(conversation):
            ids = self._ended(conversation) + self.tokenizer.render(new, first=not shared, tools=tools)
            call = await self._answered(conversation, ids, params)
            conversation.messages = list(messages)
            return call

    async def tokens(self, prompt: list[int], params: SamplingParams) -> Call:
        """The answer to a prompt of token ids, which extends the longest recorded conversation that it begins with."""
        known = [(one.transcript.length, one) for one in self._conversations if not one.busy and one.ends]
        found = [one for length, one in known if prompt[:length] == one.transcript.context().tolist()]
        conversation = max(found, key=lambda one: one.transcript.length, default=None) or self._begun([])
        rest = prompt[conversation.transcript.length :]
        if not rest:
            raise DataError("token_ids: nothing follows the last answer")
        with _busy(conversation):
            call = await self._answered(conversation, rest, params)
            conversation.messages = []
            return call

    def record_answer(self, call: Call, answer: Message) -> None:
        """Record the text of the answer of `call`, by which a later call recognizes it."""
        for conversation in self._conversations:
            if conversation.number == call.conversation:
                conversation.messages.append(answer)
                conversation.ends[-1] = (len(conversation.messages), conversation.ends[-1][1])
        self.answer, self.answer_tokens = answer.content, len(call.completion.tokens)

    @property
    def calls(self) -> int:
        """Number of answers."""
        return sum(len(one.ends) for one in self._conversations)

    async def close(self) -> None:
        """Abort the calls that run; later ones are refused."""
        self.closed = True
        for call in (calls := list(self._calls)):
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def finished(self, finish: str, reward: float, parts: dict[str, float], extracted: str | None = None) -> Finished:
        """The outcome with the segments of all conversations; DataError if the model was never called."""
        whole = Transcript()
        for conversation in self._conversations:
            segments = list(conversation.transcript.segments)
            if not conversation.ends:
                continue
            segments[0] = msgspec.structs.replace(segments[0], branch=bool(whole.segments))
            whole.segments += segments
            whole.add_versions(conversation.transcript.versions)
        if not whole.segments:
            raise DataError("the agent ended without an answer of the model: there is nothing to train on")
        return whole.finished(finish, reward, parts, extracted)

    def _extended(self, messages: Sequence[Message], tools: list[Any]) -> tuple[_Conversation, int]:
        """The conversation for a call, and how many of the messages it has already."""
        best: tuple[int, int, _Conversation] | None = None
        for one in self._conversations:
            for known, segments in one.ends if one.tools == tools else ():
                shares = known <= len(messages) and one.messages[:known] == list(messages[:known])
                if shares and known and (best is None or known > best[0]):
                    best = (known, segments, one)
        if best is None:
            return self._begun(tools), 0
        known, segments, one = best
        if segments == len(one.transcript.segments) and not one.busy:
            return one, known
        fork = self._begun(tools)
        tokens = np.concatenate([segment.tokens for segment in one.transcript.segments[:segments]])
        fork.transcript.show(tokens.tolist())
        return fork, known

    def _begun(self, tools: list[Any]) -> _Conversation:
        self.begun += 1
        return _Conversation(self.begun - 1, tools)

    def _ended(self, conversation: _Conversation) -> list[int]:
        """The end of turn, if the last answer was cut before the model sampled it."""
        segments, stops = conversation.transcript.segments, self.sampling.stop_tokens
        return [self.tokenizer.eos_id] if segments and int(segments[-1].tokens[-1]) not in stops else []

    async def _answered(self, conversation: _Conversation, ids: list[int], params: SamplingParams) -> Call:
        if self.closed:
            raise DataError(ENDED)
        transcript = conversation.transcript
        prompt = np.concatenate([*(s.tokens for s in transcript.segments), np.asarray(ids, np.int32)])
        conversation.first = conversation.first or len(prompt)
        room = episode.room(self._bounds.most(conversation.first), len(prompt), params)
        if room is None or self.calls + len(self._calls) >= MAX_CALLS:
            self.out_of_room = True
            what = f"the member made {MAX_CALLS} calls" if room else f"the conversation has {len(prompt)} tokens"
            raise NoRoom(f"{what}: there is no room for another answer")
        key = msgspec.structs.replace(self._key, salt=self._key.salt + conversation.number * _SALT)
        task = asyncio.ensure_future(
            episode.generated(self._proxy, prompt, key, room, self._bounds.generation_s, keep=True)
        )
        self._calls.add(task)
        try:
            completion = await task
        except asyncio.CancelledError:
            if self.closed:
                raise DataError(ENDED) from None
            raise
        except Exception as error:
            self.failure = error
            raise
        finally:
            task.cancel()
            self._calls.discard(task)
        transcript.show(ids)
        transcript.add(completion)
        self._counted.add_versions(completion.versions)
        if conversation not in self._conversations:
            self._conversations.append(conversation)
        conversation.ends.append((0, len(transcript.segments)))
        self.cut = self.cut or completion.finish == "length"
        return Call(prompt.tolist(), completion, room, conversation.number)


@contextmanager
def _busy(conversation: _Conversation) -> Iterator[None]:
    """While a call is under way, another call with the same messages begins a conversation of its own."""
    conversation.busy = True
    try:
        yield
    finally:
        conversation.busy = False


# --- OpenAI endpoints for agents

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
        self,
        task: Task,
        key: GenerationKey,
        *,
        env: Environment,
        proxy: LLMProxy,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        bounds: Bounds,
        env_calls: EnvironmentCalls,
        transcript: Transcript | None = None,
    ) -> Finished:
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
            (call.prompt,),
            1,
            call.params,
            body.stream,
            bool(body.stream_options and body.stream_options.include_usage),
            bool(body.logprobs),
            bool(body.top_logprobs),
            body.return_token_ids,
            body.return_tokens_as_token_ids,
            bool(tools),
        )
        piece, layout = _piece(member, wanted, call), ChatLayout(_served(member, body.model), wanted, _id("chatcmpl"))
        member.record_answer(call, requests.messages([layout.choice(0, piece)["message"]])[0])
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
        member.record_answer(call, Message("assistant", piece.text))
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
    from jaxroll.serving.http_answers import StreamedAnswer

    return StreamedAnswer(member.tokenizer, wanted).end(call.completion)


def _served(member: _Member, name: str | None) -> Any:
    """The model as `http_answers` describes it; its only property that they show is the name."""
    from jaxroll.serving.http_answers import Served
    from jaxroll.serving.http_requests import EngineLimits

    return Served(name or "policy", None, EngineLimits(0, member.tokenizer), lambda: None, lambda: None)  # type: ignore[arg-type]


async def _once(piece: Piece) -> AsyncGenerator[tuple[int, Piece], None]:
    yield 0, piece


def _id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(8)}"
