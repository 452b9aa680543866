"""Environments of an OpenEnv server, one session of its WebSocket `/ws` for each episode.

Messages are JSON objects of `type` and `data`: reset (seed), step (the action), state, close. The server answers with
an observation (`observation`, `reward`, `done`), the state, or an error with a code.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxroll.envs.adapters.games import UNREAD, Game, GameEnvironment, GameSource, GameView, library
from jaxroll.envs.registry import register
from jaxroll.errors import ConfigError, DataError, InfraError, one_line

client = library("websockets.sync.client", "websockets", "openenv")
exceptions = library("websockets.exceptions", "websockets", "openenv")

OPEN_S, ANSWER_S = 10.0, 60.0
MAX_BYTES = 16 << 20
_UNREADABLE = "VALIDATION_ERROR"  # an action that the server cannot read
_FULL = "CAPACITY_REACHED"


@dataclass(frozen=True)
class Settings:
    """Settings of `task.args`.

    `url` is the server's (http://… or ws://…). `action` is the field of the action that gets the answer; empty: the
    answer is the action as JSON. `observation` is the field that the model sees; empty: `messages` if there are any, a
    single text, or all as JSON. `reset` is sent with every reset, in addition to the seed. The reward is the sum of the
    server's rewards. `moves` are answers that the teacher of the warm start draws at random. `rules` precedes the first
    observation in full prompts; `hidden` says that different seeds can begin with the same observation.
    """

    url: str = ""
    action: str = ""
    observation: str = ""
    reset: Mapping[str, Any] = field(default_factory=dict)
    moves: Sequence[str] = ()
    rules: str = ""
    hidden: bool = False

    @property
    def address(self) -> str:
        """The URL of the WebSocket. ConfigError if `url` is not a URL."""
        scheme, _, rest = self.url.rstrip("/").partition("://")
        if scheme not in ("http", "https", "ws", "wss") or not rest:
            raise ConfigError(
                "task.args.url",
                _PASSWORD.sub("//", self.url),
                "it is not a URL",
                "Give the server's, such as http://127.0.0.1:8000.",
            )
        return f"{scheme.replace('http', 'ws')}://{rest}/ws"


_PASSWORD = re.compile("//[^/]*@")  # of a URL; messages do not show it


class ServerSession:
    """A session with the server at `address`. InfraError when it cannot be reached or breaks off."""

    def __init__(self, address: str) -> None:
        self._address, self._open = _PASSWORD.sub("//", address), contextlib.ExitStack()
        try:
            connecting = client.connect(address, open_timeout=OPEN_S, max_size=MAX_BYTES, proxy=None)
            self._socket = self._open.enter_context(connecting)
        except (OSError, TimeoutError, exceptions.WebSocketException) as error:
            reason = f"the OpenEnv server {self._address} cannot be reached: {_PASSWORD.sub('//', str(error))}"
            raise InfraError(f"{reason}. Start it, or correct task.args.url") from error

    def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The `data` of the answer to a message, or {"error": message, "code": code}."""
        message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        try:
            with contextlib.suppress(exceptions.ConnectionClosed):  # the server may have given its reason before
                self._socket.send(json.dumps(message))
            answer = json.loads(self._socket.recv(ANSWER_S))
        except (OSError, TimeoutError, exceptions.WebSocketException) as error:
            raise InfraError(f"the OpenEnv server {self._address} broke off: {error!r}") from error
        except ValueError as error:
            raise DataError(f"the OpenEnv server answered {kind} without JSON: {error}") from error
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            raise DataError(f"the OpenEnv server answered {kind} with {one_line(repr(answer), 120)}")
        if answer.get("type") == "error" and found.get("code") == _FULL:
            reason = f"the OpenEnv server {self._address} has no room for another session"
            raise InfraError(f"{reason}: {found.get('message')}. Raise its limit, or lower sampler.concurrent_episodes")
        if answer.get("type") == "error":
            return {"error": str(found.get("message")), "code": found.get("code")}
        return found

    def close(self) -> None:
        """End the session."""
        with contextlib.suppress(OSError, exceptions.WebSocketException):
            self._socket.send('{"type": "close"}')
        self._open.close()


class OpenEnvGame(Game):
    """An episode of one session."""

    Settings = Settings
    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.rules, self.hidden = settings.rules, settings.hidden
        self._address, self._session = settings.address, None
        self._last, self._reward = "", 0.0

    def start(self, seed: int) -> str:
        """The first observation after a reset with `seed`."""
        self.close()
        self._session, self._reward = ServerSession(self._address), 0.0
        self._last = self._shown(self._session.ask("reset", {"seed": seed, **self.settings.reset}), "reset")
        return self._last

    def play(self, answer: str) -> GameView:
        """The observation after an action; an action that the server cannot read changes nothing."""
        if self._session is None:
            raise DataError("the game has not begun")
        action: Any = {self.settings.action: answer}
        if not self.settings.action:
            try:
                action = json.loads(answer)
            except ValueError:
                action = None
        found = self._session.ask("step", action) if isinstance(action, dict) else {"code": _UNREADABLE}
        if found.get("code") == _UNREADABLE and "observation" not in found:
            return GameView(f"{UNREAD}\n{self._last}", reward=self._reward, misread=True)
        self._last = self._shown(found, "step")
        reward = found.get("reward") or 0.0
        if isinstance(reward, str | list | dict):
            raise DataError(f"the OpenEnv server gave the reward {one_line(repr(reward), 80)}")
        self._reward += float(reward)
        over = found.get("done") is True
        parts = {"steps": float(self._session.ask("state").get("step_count", 0))} if over else {}
        return GameView(self._last, over, self._reward, parts)

    def choices(self) -> Sequence[str]:
        """The answers that the teacher of the warm start draws: `moves`."""
        return self.settings.moves

    def close(self) -> None:
        """End the session."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _shown(self, found: dict[str, Any], kind: str) -> str:
        if "observation" not in found:
            raise DataError(f"the OpenEnv server failed at {kind}: {one_line(str(found), 300)}")
        seen = found["observation"]
        if self.settings.observation:
            if not isinstance(seen, dict) or self.settings.observation not in seen:
                raise DataError(
                    f"the observation has no field {self.settings.observation!r}: {one_line(str(seen), 200)}"
                )
            seen = seen[self.settings.observation]
        elif isinstance(seen, dict):
            texts = [value for value in seen.values() if isinstance(value, str)]
            messages = seen.get("messages")
            if isinstance(messages, list) and all(isinstance(one, dict) for one in messages):
                seen = "\n".join(str(one.get("content", "")) for one in messages)
            elif len(texts) == 1:
                seen = texts[0]
        return seen if isinstance(seen, str) else json.dumps(seen)


@register("openenv")
class OpenEnv(GameEnvironment):
    """Plays one session per episode."""

    game = OpenEnvGame


class OpenEnvSource(GameSource):
    """Tasks of the server: the number of a task is the seed of its reset."""

    name, game = "openenv", OpenEnvGame
