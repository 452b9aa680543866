"""`jaxroll env serve`: an environment of JaxRoll behind OpenEnv's protocol, for its clients and other trainers.

A session of `/ws` is one instance of the environment. Its reset takes `seed`: the number of the task in the training
range of the config. The action is {"answer": text}; an observation has the new `messages`, and `parts` at the end.

OpenEnv's clients know no token, but they send the password of a URL as `Authorization: Basic`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from jaxroll import __version__, lifeline
from jaxroll.config import Config
from jaxroll.data.tasks import Candidates
from jaxroll.envs import registry
from jaxroll.envs.executors import EnvironmentCalls, Executors
from jaxroll.errors import ConfigError, DataError, JaxRollError, described
from jaxroll.protocols import Environment
from jaxroll.records import Message
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.rpc import http
from jaxroll.testing import environments

T = TypeVar("T")
VERSION = "1.0.0"  # of OpenEnv's HTTP interface
SESSIONS = 256
_MESSAGES = {
    "type": "array",
    "items": {"type": "object", "properties": {"role": {"type": "string"}, "content": {"type": "string"}}},
}
_METADATA = {"type": "object"}
SCHEMAS = {
    "action": {"title": "Action", "type": "object", "required": ["answer"], "additionalProperties": False,
               "properties": {"answer": {"type": "string"}, "metadata": _METADATA}},
    "observation": {"title": "Observation", "type": "object", "properties": {
        "messages": _MESSAGES, "parts": {"type": "object"}, "done": {"type": "boolean"},
        "reward": {"type": ["number", "null"]}, "metadata": _METADATA}},
    "state": {"title": "State", "type": "object", "properties": {
        "episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}, "task": {"type": "integer"}}},
}  # fmt: skip


class _Refused(Exception):
    """A message that is answered with an error of `code`."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class EnvironmentSession:
    """One instance of the environment, and its episode. Its calls take turns: without a session, clients share one."""

    def __init__(self, server: Server) -> None:
        self._server, self._env = server, None
        self.state: dict[str, Any] = {"episode_id": None, "step_count": 0}
        self._over, self._lock = True, asyncio.Lock()

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """The first observation of the task `seed`."""
        seed = data.get("seed")
        if seed is not None and (type(seed) is not int or seed < 0):
            raise _Refused("VALIDATION_ERROR", f"seed = {str(seed)[:40]}: a number from 0 on is needed")
        async with self._lock:
            await self.close_now()
            task = self._server.task(self._server.next_task() if seed is None else seed)
            self._env = await _with_data_errors(self._server.create())
            messages = await _with_data_errors(self._server.calls.reset(self._env, task))
            self.state = {"episode_id": data.get("episode_id"), "step_count": 0, "task": task.index}
            self._over = False
        return _observed(messages, None, False)

    async def step(self, data: dict[str, Any]) -> dict[str, Any]:
        """The observation after the action."""
        answer = data.get("answer")
        if not isinstance(answer, str) or set(data) - {"answer", "metadata"}:
            raise _Refused("VALIDATION_ERROR", 'the action is {"answer": text}')
        async with self._lock:
            if self._env is None or self._over:
                raise _Refused("EXECUTION_ERROR", "the episode is over: reset first")
            result = await _with_data_errors(self._server.calls.step(self._env, answer))
            self.state["step_count"] += 1
            self._over = result.done
        return _observed(result.messages, result.reward if result.done else None, result.done, result.reward_parts)

    async def close(self) -> None:
        """Close the instance."""
        async with self._lock:
            await self.close_now()

    async def close_now(self) -> None:
        """Close the instance in the middle of another call, too."""
        env, self._env = self._env, None
        self._over = True
        if env is not None:
            with contextlib.suppress(Exception):  # foreign code; the episode is over
                await self._server.calls.close(env)


async def _with_data_errors(call: Awaitable[T]) -> T:
    """The result of a call of the environment, whose own errors become DataError."""
    try:
        return await call
    except JaxRollError:
        raise
    except Exception as error:
        raise DataError(described(error)) from error


def _observed(messages: tuple[Message, ...], reward: float | None, done: bool, parts: Any = None) -> dict[str, Any]:
    shown = [{"role": message.role, "content": message.content} for message in messages]
    return {"observation": {"messages": shown, "parts": dict(parts or {})}, "reward": reward, "done": done}


class Server:
    """Sessions of the environment `name` on the tasks of `config`, for clients that show `token` (None: for all).

    Belongs to one event loop.
    """

    def __init__(self, name: str, config: Config, pool: ScoringPool, token: str | None = None) -> None:
        self._name, self._candidates, self.calls = name, Candidates(config), EnvironmentCalls()
        self._executors, self._numbers, self._open = Executors(pool, config), itertools.count(), 0
        self._described = (registry.factory(name).__doc__ or "").strip().partition("\n")[0]
        self._alone = EnvironmentSession(self)  # for the HTTP endpoints, which have no session
        self._token = None if token is None else token.encode()
        self.app = self._guarded(
            Starlette(
                routes=[
                    Route("/health", self._answers({"status": "healthy"})),
                    Route(
                        "/metadata",
                        self._answers({"name": name, "description": self._described, "version": __version__}),
                    ),
                    Route("/schema", self._answers(SCHEMAS)),
                    Route("/openapi.json", self._answers(self._openapi())),
                    Route("/mcp", self._mcp, methods=["POST"]),
                    Route("/reset", self._reset, methods=["POST"]),
                    Route("/step", self._step, methods=["POST"]),
                    Route("/state", self._state),
                    WebSocketRoute("/ws", self._session),
                ],
                exception_handlers={_Refused: _refused, JaxRollError: _refused},
            )
        )

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if self._token is None or scope["path"] == "/health" or http.shows_token(scope, self._token):
                return await app(scope, receive, send)
            if scope["type"] == "websocket":  # closed before it is accepted: status 403
                await receive()
                return await send({"type": "websocket.close", "code": 1008})
            message = "this server needs its token: use http://user:TOKEN@HOST:PORT, or Authorization: Bearer TOKEN"
            refused = JSONResponse({"detail": {"message": message, "code": "UNAUTHORIZED"}}, 401)
            await refused(scope, receive, send)

        return guarded

    async def create(self) -> Environment:
        """A fresh instance."""
        return await self.calls.make(self._executors.create, self._name)

    def next_task(self) -> int:
        """The number of a task for a reset without a seed."""
        return next(self._numbers)

    def task(self, seed: int) -> Any:
        """Task `seed` of the training range."""
        numbers = self._candidates.ranges.train
        try:
            return self._candidates.at(numbers[seed % len(numbers)]).task
        except DataError as error:
            raise _Refused("EXECUTION_ERROR", str(error)) from error

    async def close(self) -> None:
        """Close the instances that are left, without waiting for a call that still runs."""
        await self._alone.close_now()
        await self._executors.close()

    def _openapi(self) -> dict[str, Any]:
        paths = {path: {"get": {}} for path in ("/health", "/metadata", "/schema", "/state")}
        paths |= {path: {"post": {}} for path in ("/mcp", "/reset", "/step")}
        return {"openapi": "3.1.0", "info": {"title": self._name, "version": VERSION}, "paths": paths}

    @staticmethod
    def _answers(value: dict[str, Any]) -> Any:
        async def answer(request: Request) -> JSONResponse:
            return JSONResponse(value)

        return answer

    async def _mcp(self, request: Request) -> JSONResponse:
        error = {"code": -32601, "message": "this environment has no tools of MCP"}
        return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error})

    async def _reset(self, request: Request) -> JSONResponse:
        return JSONResponse(await self._alone.reset(_object(await request.body() or b"{}")))

    async def _step(self, request: Request) -> JSONResponse:
        return JSONResponse(await self._alone.step(_object(_object(await request.body()).get("action"))))

    async def _state(self, request: Request) -> JSONResponse:
        return JSONResponse(self._alone.state)

    async def _session(self, socket: WebSocket) -> None:
        await socket.accept()
        if self._open >= SESSIONS:
            await socket.send_json(_error("CAPACITY_REACHED", f"{self._open} of {SESSIONS} sessions are open"))
            return await socket.close()
        self._open += 1
        session = EnvironmentSession(self)
        try:
            while (answer := await self._answered(session, await socket.receive_text())) is not None:
                await socket.send_json(answer)
            await socket.close()
        except WebSocketDisconnect:
            pass
        finally:
            self._open -= 1
            await session.close()

    async def _answered(self, session: EnvironmentSession, text: str) -> dict[str, Any] | None:
        """The answer to a message; None to `close`."""
        try:
            message = _object(text)
            kind = message.get("type")
            if kind == "close":
                return None
            if kind == "state":
                return {"type": "state", "data": session.state}
            if kind not in ("reset", "step"):
                raise _Refused("UNKNOWN_TYPE", f"unknown message type: {str(kind)[:40]}")
            data = _object(message.get("data", {}))
            found = await (session.reset(data) if kind == "reset" else session.step(data))
            return {"type": "observation", "data": found}
        except _Refused as error:
            return _error(error.code, str(error))
        except JaxRollError as error:
            return _error("EXECUTION_ERROR", str(error))


def _object(value: Any) -> dict[str, Any]:
    """A JSON object, from its text or itself."""
    if isinstance(value, str | bytes):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _Refused("INVALID_JSON", f"the message is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise _Refused("VALIDATION_ERROR", "a JSON object is needed")
    return value


def _error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


async def _refused(request: Request, error: Exception) -> JSONResponse:
    code = error.code if isinstance(error, _Refused) else "EXECUTION_ERROR"
    return JSONResponse({"detail": {"message": str(error), "code": code}}, 422 if code != "EXECUTION_ERROR" else 409)


def main(options: argparse.Namespace) -> int:
    """Serve the environment until a stop signal and return 0. `options` are those of the command line."""
    name, host = options.name, options.host
    registry.factory(name)
    settings = environments.settings_for(name, options.config, options.overrides)
    token_file = Path(options.token_file) if options.token_file else http.user_token_file("openenv.token")
    token = http.token(None, token_file)
    pool = registry.scoring_pool(settings)
    pool.start()

    async def serve() -> None:
        stop = asyncio.Event()
        lifeline.on_stop_set(stop, asyncio.get_running_loop())
        listening = http.listen(host, options.port, insecure=options.insecure)
        server = Server(name, settings, pool, token)
        serving = asyncio.ensure_future(http.serve(server.app, listening, sockets=True))
        print(f"serves {name} on {http.address(host, listening)}, token in {token_file}", flush=True)
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await server.close()

    try:
        asyncio.run(serve())
    except ModuleNotFoundError as error:
        raise ConfigError("env serve", name, f"it needs {error.name}", "pip install 'jaxroll[openenv]'.") from error
    finally:
        pool.close()
    return 0
