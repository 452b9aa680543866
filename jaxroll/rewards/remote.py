"""Reward parts from other processes, over HTTP: a reward model (a server, or a folder), and a judge (OpenAI's chat).

Everything runs on one event loop; only the cache on disk is read and written in threads. Identical requests that are
under way at the same time make one call. Verdicts are kept by a digest of all that determines them, so a repeated
answer, and a resumed run, makes none. The budget of a run counts calls and tokens of all its processes that share the
cache's file.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import os
import random
import re
import sqlite3
import ssl
import sys
import threading
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from jaxroll.config.rewards import EndpointSettings, JudgeSettings, RewardModelSettings
from jaxroll.errors import DataError, InfraError
from jaxroll.lifeline import PARENT_ENV
from jaxroll.records import Message
from jaxroll.rewards.processes import environment

_LOG = logging.getLogger(__name__)

# --- A JSON call over HTTP/1.1 on the event loop: one connection per call, which a cancellation closes at once

MAX_BODY_BYTES = 4 << 20
_MAX_HEADERS = 100


class HttpError(Exception):
    """A call without a usable response. `retry_after_s` is the server's wish, 0 without one."""

    def __init__(self, cause: str, detail: str = "", *, retry: bool = True, retry_after_s: float = 0.0) -> None:
        self.cause, self.retry, self.retry_after_s = cause, retry, retry_after_s
        super().__init__(f"{cause} {detail}".strip())


async def post_json(url: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> Any:
    """The decoded response to a POST of `body` as JSON, at most `timeout_s` after the call.

    Raises HttpError, with `retry` false for a status that another attempt would not change (4xx except 408 and 429).
    """
    try:
        async with asyncio.timeout(timeout_s):
            status, found, text = await _exchange(url, msgspec.json.encode(body), headers)
    except TimeoutError as error:
        raise HttpError("timeout", f"after {timeout_s:g} s") from error
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise HttpError("connection", f"{type(error).__name__}: {error}") from error
    if status != 200:
        retry = status >= 500 or status in (408, 429)
        try:
            after_s = max(0.0, float(found.get("retry-after", 0)))
        except ValueError:  # a date
            after_s = 0.0
        raise HttpError(f"status {status}", text[:200].decode(errors="replace"), retry=retry, retry_after_s=after_s)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError("not JSON", str(error)) from error


async def _exchange(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(host, port, ssl=ssl.create_default_context() if secure else None)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = {
            "Host": parts.netloc.rpartition("@")[2],
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"POST {target} HTTP/1.1\r\n{head}\r\n".encode() + body)
        await writer.drain()
        status, found = await _head(reader)
        return status, found, await _body(reader, found)
    finally:
        writer.transport.abort()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    line = (await reader.readuntil(b"\r\n")).decode("latin-1").split()
    if len(line) < 2 or not line[0].startswith("HTTP/1"):
        raise ValueError("not an HTTP response")
    found: dict[str, str] = {}
    while (text := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = text.decode("latin-1").partition(":")
        found[name.strip().lower()] = value.strip()
        if len(found) > _MAX_HEADERS:
            raise ValueError("too many headers")
    return int(line[1]), found


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        found = bytearray()
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            _limit(len(found) + size)
            found += (await reader.readexactly(size + 2))[:size]
        return bytes(found)
    if "content-length" in headers:
        size = int(headers["content-length"])
        _limit(size)
        return await reader.readexactly(size)
    found = bytearray()
    while data := await reader.read(1 << 16):
        found += data
        _limit(len(found))
    return bytes(found)


def _limit(size: int) -> None:
    if not 0 <= size <= MAX_BODY_BYTES:
        raise ValueError(f"a response of {size} bytes, at most {MAX_BODY_BYTES} are taken")


# --- A reward model in a folder, scored by a process of its own (`jaxroll.tools.classifier`), which has JAX. None here
#
# Questions wait in the process, which answers all that are there in batches of bounded size. A question that is not
# answered within its time kills the process; the next one starts another.

READY = -1  # the id of the first line of the process
START_S = 600.0  # to load JAX and the weights
_LINE_BYTES = 1 << 20
_CACHE_LIMITS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"
_PASSED_ON = ("NPROC", "JAX_COMPILATION_CACHE_DIR", *_CACHE_LIMITS)


class ProcessSettings(msgspec.Struct, frozen=True):
    """Settings of the process: the folder, the data type of its parameters, and limits in tokens."""

    path: str
    dtype: str
    max_tokens: int
    batch_tokens: int


class ScoringQuestion(msgspec.Struct, frozen=True):
    """A conversation to score."""

    id: int
    messages: tuple[Message, ...]


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The score of a question, or the reason why there is none."""

    id: int
    score: float | None = None
    error: str = ""


class Classifier:
    """The process and its unanswered questions. Everything runs on one event loop."""

    def __init__(self, settings: ProcessSettings, start_s: float = START_S) -> None:
        self._settings, self._start_s = settings, start_s
        self._ids = itertools.count()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._starting = asyncio.Lock()

    async def score(self, messages: Sequence[Mapping[str, str]], timeout_s: float) -> dict[str, Any]:
        """The response of a reward model to a conversation: `score`.

        HttpError if the process gives none in time, ValueError if it cannot score the conversation.
        """
        process = await self._running()
        number = next(self._ids)
        shown = tuple(Message(message["role"], message["content"]) for message in messages)
        line = msgspec.json.encode(ScoringQuestion(number, shown)) + b"\n"
        verdict = await self._answer(process, number, line, timeout_s)
        if verdict.error:
            raise ValueError(verdict.error)
        return {"score": verdict.score}

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is not None:
                return self._process
            settings = msgspec.json.encode(self._settings).decode()
            command = (sys.executable, "-P", "-m", "jaxroll.tools.classifier", settings)
            passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
            env = environment() | passed_on | {"JAX_PLATFORMS": "cpu", PARENT_ENV: str(os.getpid())}
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, env=env, limit=_LINE_BYTES, start_new_session=True, stdin=PIPE, stdout=PIPE
                )
            except OSError as error:
                raise HttpError("start", str(error)) from error
            self._process, self._reading = process, asyncio.ensure_future(self._read(process))
            await self._answer(process, READY, b"", self._start_s)
            return process

    async def _answer(self, process: asyncio.subprocess.Process, number: int, line: bytes, limit_s: float) -> Verdict:
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit_s):
                assert process.stdin is not None
                process.stdin.write(line)
                with contextlib.suppress(OSError):  # it has ended, which `_read` reports
                    await process.stdin.drain()
                return await future
        except TimeoutError as error:
            self.close()
            raise HttpError("timeout", f"after {limit_s:g} s") from error
        finally:
            self._waiting.pop(number, None)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                verdict = msgspec.json.decode(line, type=Verdict)
                if (future := self._waiting.get(verdict.id)) and not future.done():
                    future.set_result(verdict)
        except (ValueError, msgspec.MsgspecError) as error:
            self._lose(process, f"malformed output: {error}")
        else:
            self._lose(process, f"it ended with {await process.wait()}; its log has the reason")

    def _lose(self, process: asyncio.subprocess.Process, why: str) -> None:
        """Fail the questions of a process that is gone, or is killed here."""
        if process is not self._process:
            return
        self._process = None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(HttpError("process", why))

    def close(self) -> None:
        """Kill the process; questions that wait fail. May be called twice."""
        if self._process is not None:
            self._lose(self._process, "it was killed")


# --- Reward parts from other processes, over HTTP

BACKOFF_MAX_S = 30.0  # also the wait for another process that writes to the file of verdicts
_TABLES = """
CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (part TEXT PRIMARY KEY, calls INTEGER NOT NULL, tokens INTEGER NOT NULL) WITHOUT ROWID;
"""


class BudgetSpent(InfraError):
    """The run has made as many calls, or used as many tokens, as its config allows."""

    def __init__(self, part: str, key: str, limit: int) -> None:
        self.key, self.limit = f"task.reward_args.{part}.{key}", limit
        super().__init__(f"{self.key} = {limit} is spent")


class Verdicts:
    """Values by key and the spent budget, in one SQLite file (None: in memory). Its methods may run in any thread, and
    raise InfraError if the file cannot be read or written."""

    def __init__(self, path: Path | None) -> None:
        self._path = str(path) if path else ""
        self._memory = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None) if not path else None
        self._one_at_a_time = threading.Lock()  # a transaction belongs to a connection, and threads share this one
        if self._memory is not None:
            self._memory.executescript(_TABLES)

    def value(self, key: str) -> float | None:
        """The kept value; None if there is none, or no number."""
        rows = self._run(lambda db: db.execute("SELECT value FROM verdicts WHERE key = ?", (key,)).fetchall())
        return next((float(found) for (found,) in rows if isinstance(found, float) and math.isfinite(found)), None)

    def keep(self, key: str, value: float) -> None:
        """Keep a value."""
        self._run(lambda db: db.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, value)))

    def spend(self, part: str, settings: EndpointSettings) -> None:
        """Count one call before it is made. BudgetSpent if it or its tokens exceed the budget."""

        def counted(db: sqlite3.Connection) -> None:
            db.execute("BEGIN IMMEDIATE")
            try:
                row = db.execute("SELECT calls, tokens FROM spent WHERE part = ?", (part,)).fetchone() or (0, 0)
                for key, used in (("budget_calls", row[0]), ("budget_tokens", row[1])):
                    if (limit := getattr(settings, key)) and used >= limit:
                        raise BudgetSpent(part, key, limit)
                db.execute("INSERT OR REPLACE INTO spent VALUES (?, ?, ?)", (part, row[0] + 1, row[1]))
            finally:
                db.execute("COMMIT")

        self._run(counted)

    def add_tokens(self, part: str, tokens: int) -> None:
        """Count the tokens of a call."""
        self._run(lambda db: db.execute("UPDATE spent SET tokens = tokens + ? WHERE part = ?", (tokens, part)))

    def _run(self, job: Callable[[sqlite3.Connection], Any]) -> Any:
        if self._memory is not None:
            with self._one_at_a_time:
                return job(self._memory)
        try:
            with contextlib.closing(sqlite3.connect(self._path, timeout=BACKOFF_MAX_S, isolation_level=None)) as db:
                db.executescript(_TABLES)  # a damaged file may have been moved away
                return job(db)
        except sqlite3.Error as error:
            remedy = "Free space if its disk is full. Move it away if it is damaged: its verdicts are asked for again."
            raise InfraError(f"{self._path} cannot be used ({error}). {remedy}") from error


class RemoteParts:
    """Values of remote parts. `counts` has calls, cache hits and failures by part and cause; `spent` is set at the end
    of a budget, `spent_key` is its config key."""

    def __init__(self, path: Path | None = None, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        self.counts: Counter[str] = Counter()
        self.spent, self.spent_key, self.spent_limit = asyncio.Event(), "", 0
        self._path, self._sleep = path, sleep
        self._verdicts: Verdicts | None = None
        self._under_way: dict[str, asyncio.Task[float]] = {}
        self._gates: dict[str, asyncio.Semaphore] = {}
        self._classifiers: dict[ProcessSettings, Classifier] = {}

    async def value(self, part: str, settings: EndpointSettings, request: JudgeRequest) -> float:
        """The value of a completion. InfraError if the endpoint fails or has no budget, DataError for bad verdicts."""
        body = request.body(settings)
        key = hashlib.blake2b(msgspec.json.encode((_identity(settings), body)), digest_size=16).hexdigest()
        task = self._under_way.get(key)
        if task is None:  # outside of the context of the environment that asks: others may wait for it
            task = self._under_way[key] = Context().run(asyncio.ensure_future, self._found(part, settings, key, body))
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)  # the caller may be cancelled; others may wait for the same verdict

    def _forget(self, key: str, done: asyncio.Task[float]) -> None:
        self._under_way.pop(key, None)
        if not done.cancelled():
            done.exception()  # it is reported by those that wait; there may be none left

    async def _found(self, part: str, settings: EndpointSettings, key: str, body: Any) -> float:
        verdicts = self._verdicts = self._verdicts or Verdicts(self._path)
        known = None
        with contextlib.suppress(InfraError):  # a file that cannot be used costs repeated calls, and no verdict
            known = await asyncio.to_thread(verdicts.value, key)
        if known is not None:
            self.counts[f"{part}: cached"] += 1
            return known
        async with self._gates.setdefault(part, asyncio.Semaphore(settings.concurrency)):
            value = await self._asked(part, settings, body, verdicts)
        try:
            await asyncio.to_thread(verdicts.keep, key, value)
        except InfraError as error:
            if not self.counts[f"{part}: not kept"]:
                _LOG.warning("verdicts are not kept: %s", error)
            self.counts[f"{part}: not kept"] += 1
        return value

    async def _asked(self, part: str, settings: EndpointSettings, body: Any, verdicts: Verdicts) -> float:
        for attempt in range(settings.retries + 1):
            try:
                await asyncio.to_thread(verdicts.spend, part, settings)
            except BudgetSpent as error:
                self.spent_key, self.spent_limit = error.key, error.limit
                self.spent.set()
                raise
            except InfraError:
                if settings.budget_calls or settings.budget_tokens:  # no call that is not counted
                    raise
            self.counts[f"{part}: calls"] += 1
            try:
                response = await self._response(settings, body)
                if tokens := _tokens(response):
                    with contextlib.suppress(InfraError):  # the call is paid; with a budget it is the last one
                        await asyncio.to_thread(verdicts.add_tokens, part, tokens)
                return verdict(settings, response)
            except HttpError as error:
                self.counts[f"{part}: {error.cause}"] += 1
                if attempt == settings.retries or not error.retry:
                    raise InfraError(f"reward part {part!r}: {_where(settings)}: {error}") from error
                pause_s = max(_backoff_s(settings, attempt), min(error.retry_after_s, BACKOFF_MAX_S))
            except (LookupError, TypeError, ValueError, OverflowError) as error:
                self.counts[f"{part}: malformed"] += 1
                if attempt == settings.retries:
                    raise DataError(f"reward part {part!r}: a malformed verdict: {error}") from error
                pause_s = 0.0
            await self._sleep(pause_s)
        raise AssertionError("unreachable")

    async def _response(self, settings: EndpointSettings, body: Any) -> Any:
        if not isinstance(settings, RewardModelSettings) or not settings.path:
            return await post_json(settings.endpoint, body, _headers(settings), settings.timeout_s)
        served = ProcessSettings(settings.path, settings.dtype, settings.max_tokens, settings.batch_tokens)
        classifier = self._classifiers.setdefault(served, Classifier(served))
        return await classifier.score(body["messages"], settings.timeout_s)

    def close(self) -> None:
        """Kill the processes of reward models."""
        for classifier in self._classifiers.values():
            classifier.close()


class JudgeRequest(msgspec.Struct, frozen=True):
    """A completion to judge: the prompt's messages, the completion, the extracted answer, and the ground truth."""

    messages: tuple[Mapping[str, str], ...]
    completion: str
    answer: str
    truth: str

    def body(self, settings: EndpointSettings) -> dict[str, Any]:
        """The JSON to send."""
        if not isinstance(settings, JudgeSettings):
            answer = {"role": "assistant", "content": self.completion}
            return {"model": settings.model, "messages": [*self.messages, answer]}
        question = self.messages[-1]["content"] if self.messages else ""
        fields = {"question": question, "answer": self.answer, "truth": self.truth, "completion": self.completion}
        # One pass, so that a field's text is never taken for a placeholder.
        text = re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), settings.prompt)
        messages = [{"role": "user", "content": text}]
        return {"model": settings.model, "messages": messages, "temperature": 0.0, "max_tokens": settings.max_tokens}


def verdict(settings: EndpointSettings, response: Any) -> float:
    """The value in a response. LookupError, TypeError or ValueError if there is none."""
    if isinstance(settings, JudgeSettings):
        text = response["choices"][0]["message"]["content"]
        found = re.findall(settings.verdict, text)
        if not found:
            raise ValueError(f"no score in {text[-200:]!a}")
        last = found[-1] if isinstance(found[-1], str) else found[-1][0]
        value = float(last) / settings.max_score
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"the score {last} is not between 0 and {settings.max_score:g}")
        return value
    value = response.get("score")
    if value is None:  # the interfaces of vLLM: /score and /pooling
        first = response["data"][0]
        value = first["score"] if "score" in first else first["data"]
    while isinstance(value, list):
        (value,) = value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the score is {str(value)[:40]!a}, not a finite number")
    return float(value)


def _identity(settings: EndpointSettings) -> tuple[Any, ...]:
    """The settings that determine a verdict, in addition to the request; of a judge not the address, which may move."""
    if isinstance(settings, JudgeSettings):
        return ("judge", settings.verdict, settings.max_score)
    if isinstance(settings, RewardModelSettings) and settings.path:
        return ("reward_model", settings.path, settings.dtype, settings.max_tokens)
    return ("reward_model", settings.url)


def _where(settings: EndpointSettings) -> str:
    """The endpoint or the folder, for errors."""
    return getattr(settings, "path", "") or settings.endpoint


def _headers(settings: EndpointSettings) -> dict[str, str]:
    """The authorization, from the environment variable that the settings name. InfraError if it is not set."""
    if not settings.key_variable:
        return {}
    secret = os.environ.get(settings.key_variable)
    if not secret:
        raise InfraError(f"the environment variable {settings.key_variable} is not set")
    return {"Authorization": f"Bearer {secret}"}


def _tokens(response: Any) -> int:
    usage = response.get("usage") if isinstance(response, dict) else None
    found = usage.get("total_tokens") if isinstance(usage, dict) else None
    return int(found) if isinstance(found, int | float) and math.isfinite(found) else 0


def _backoff_s(settings: EndpointSettings, attempt: int) -> float:
    """A pause that doubles with each attempt, with jitter, so that members do not return together."""
    return min(settings.backoff_s * 2**attempt, BACKOFF_MAX_S) * random.uniform(0.5, 1.0)
