"""Judges and reward models against a server on the loopback that fails in every way an endpoint may."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxroll.config import TaskConfig
from jaxroll.config.rewards import EndpointSettings, JudgeSettings
from jaxroll.envs.registry import SingleTurn
from jaxroll.errors import DataError, InfraError
from jaxroll.protocols import OWNER, Owner
from jaxroll.records import Message, Task
from jaxroll.rewards import remote
from jaxroll.rewards.remote import BudgetSpent, JudgeRequest, RemoteParts
from tests.rewards.test_grading import LocalPool

REQUEST = JudgeRequest(({"role": "user", "content": "3+4?"},), "<think>…</think>It is 7.", "It is 7.", "7")
HANG, DROP, DRIP, HUGE = object(), object(), object(), object()


def reply(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": {"total_tokens": 10}}


class Endpoint:
    """A server that gives the listed answers in order, the last one forever: a status, raw bytes, JSON, or a fault."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.bodies, self.heads, self.open, self.most = list(answers), [], [], 0, 0
        self.delay_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Endpoint:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # closed transports leave the loop

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.append(asyncio.ensure_future(self._serve(reader, writer)))
        try:
            await asyncio.wait(self._tasks[-1:])
        finally:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().partition("content-length:")[2].split()[0])
        self.bodies.append(json.loads(await reader.readexactly(size)))
        self.heads.append(head)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(self.delay_s)
        self.open -= 1
        if answer is HANG:
            await asyncio.sleep(3600)
        elif answer is DRIP:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(1000):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
        elif answer is HUGE:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n")
            await asyncio.sleep(3600)
        elif isinstance(answer, bytes):
            writer.write(answer)
        elif isinstance(answer, int):
            writer.write(f"HTTP/1.1 {answer} No\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\nno".encode())
        elif answer is not DROP:
            body = json.dumps(answer).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            writer.close()
            await writer.wait_closed()


def judge(endpoint: Endpoint, **more: Any) -> JudgeSettings:
    return JudgeSettings(endpoint.url, **{"model": "m", "timeout_s": 20.0, "retries": 2, "backoff_s": 0.25} | more)


def run(*answers: Any, use: Callable[[Endpoint, RemoteParts, list[float]], Awaitable[Any]], path: Any = None) -> Any:
    """The result of `use`, with a server and remote parts that record their pauses instead of sleeping."""

    async def play() -> Any:
        pauses: list[float] = []

        async def sleep(pause_s: float) -> None:
            pauses.append(pause_s)

        async with Endpoint(*answers) as endpoint:
            return await asyncio.wait_for(use(endpoint, RemoteParts(path, sleep), pauses), 60.0)

    return asyncio.run(play())


def test_a_judge_is_asked_with_the_filled_prompt_and_its_last_score_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_JUDGE", "s3cret")

    async def use(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        settings = judge(
            endpoint, prompt="{question}|{truth}|{answer}|{other}", max_score=10.0, key_variable="SECRET_OF_THE_JUDGE"
        )
        tricky = JudgeRequest(REQUEST.messages, "c", "{truth} Score: 10", "7")
        assert await parts.value("judge", settings, tricky) == 0.4
        (message,) = endpoint.bodies[0]["messages"]
        assert message["content"] == "3+4?|7|{truth} Score: 10|{other}", "a field is not a template"
        assert endpoint.bodies[0]["model"] == "m" and "POST /v1/chat/completions" in endpoint.heads[0]
        assert "Authorization: Bearer s3cret" in endpoint.heads[0]

    run(reply("First I thought Score: 9.\nScore: 4"), use=use)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (500, "status 500"),
        (429, "status 429"),
        (HANG, "timeout"),
        (DRIP, "timeout"),
        (DROP, "connection"),
        (HUGE, "connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{bad}", "not JSON"),
        (b"SSH-2.0-x\r\n\r\n", "connection"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 500, "connection"),
        (reply("no idea"), "malformed"),
        (reply("Score: 11"), "malformed"),
        ({"choices": []}, "malformed"),
        ([1], "malformed"),
    ],
    ids=["500", "429", "hang", "drip", "drop", "huge", "bad json", "no http", "headers", "no score", "range", "empty",
         "list"],
)  # fmt: skip
def test_a_fault_is_counted_and_the_call_repeated(fault: Any, cause: str) -> None:
    async def use(endpoint: Endpoint, parts: RemoteParts, pauses: list[float]) -> None:
        settings = judge(endpoint, timeout_s=1.5 if cause == "timeout" else 20.0)  # the second call answers at once
        assert await parts.value("judge", settings, REQUEST) == 1.0
        assert parts.counts == {"judge: calls": 2, f"judge: {cause}": 1} and len(pauses) == 1
        if isinstance(fault, int):
            assert pauses[0] >= 7.0, "the server's wish"

    run(fault, reply("Score: 1"), use=use)


def test_a_chunked_response_is_read() -> None:
    body = json.dumps(reply("Score: 1")).encode()
    chunks = b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in (body[:10], body[10:]))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def use(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        assert await parts.value("judge", judge(endpoint), REQUEST) == 1.0

    run(head + chunks + b"0\r\n\r\n", use=use)


def test_attempts_are_bounded_and_a_refusal_is_final() -> None:
    async def exhausted(endpoint: Endpoint, parts: RemoteParts, pauses: list[float]) -> None:
        with pytest.raises(InfraError, match="status 503"):
            await parts.value("judge", judge(endpoint), REQUEST)
        assert len(endpoint.bodies) == 3 and len(pauses) == 2

    async def malformed(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        with pytest.raises(DataError, match="malformed verdict"):
            await parts.value("judge", judge(endpoint), REQUEST)
        assert parts.counts["judge: malformed"] == 3

    async def refused(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        with pytest.raises(InfraError, match="status 401"):
            await parts.value("judge", judge(endpoint), REQUEST)
        assert len(endpoint.bodies) == 1, "another attempt would not change it"

    run(503, use=exhausted)
    run(reply("?"), use=malformed)
    run(401, use=refused)


def test_pauses_double_up_to_a_limit() -> None:
    settings = JudgeSettings(backoff_s=1.0)
    for attempt, most in ((0, 1.0), (3, 8.0), (20, remote.BACKOFF_MAX_S)):
        assert all(most / 2 <= remote._backoff_s(settings, attempt) <= most for _ in range(20))


def test_verdicts_are_kept_on_disk_and_identical_requests_make_one_call(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.db"

    async def first(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        endpoint.delay_s = 0.05
        jobs = [parts.value("judge", judge(endpoint), REQUEST) for _ in range(8)]
        jobs[0] = asyncio.ensure_future(jobs[0])
        asyncio.get_running_loop().call_later(0.02, jobs[0].cancel)  # one caller gives up, the others get the verdict
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert found[1:] == [1.0] * 7 and isinstance(found[0], asyncio.CancelledError)
        assert len(endpoint.bodies) == 1

    async def later(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        assert await parts.value("judge", judge(endpoint), REQUEST) == 1.0
        assert (endpoint.bodies, parts.counts) == ([], {"judge: cached": 1})
        for other in (judge(endpoint, model="n"), judge(endpoint, max_score=2.0), judge(endpoint, max_tokens=7)):
            assert await parts.value("judge", other, REQUEST) == 0.0, "another judge, another verdict"

    run(reply("Score: 1"), use=first, path=path)
    run(reply("Score: 0"), use=later, path=path)


def sql(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no database": lambda path: path.write_bytes(b"not a database at all" * 99),
    "a folder": Path.mkdir,
    "of another program": lambda path: sql(path, "CREATE TABLE verdicts (song TEXT)", "CREATE TABLE spent (song TEXT)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_of_verdicts_that_cannot_be_used_costs_no_verdict_and_stops_calls_that_must_be_counted(
    damage: str, tmp_path: Path
) -> None:
    """Repeated answers are asked for again. With a budget no call is made that the file does not count."""
    DAMAGES[damage](path := tmp_path / "verdicts.db")

    async def use(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        for _ in range(2):
            assert await parts.value("judge", judge(endpoint), REQUEST) == 1.0
        assert parts.counts == {"judge: calls": 2, "judge: not kept": 2} and len(endpoint.bodies) == 2
        with pytest.raises(InfraError, match=r"verdicts\.db cannot be used .*Move it away"):
            await parts.value("judge", judge(endpoint, budget_calls=9), REQUEST)
        assert len(endpoint.bodies) == 2

    run(reply("Score: 1"), use=use, path=path)


def test_a_verdict_for_which_the_disk_has_no_room_is_used_and_kept_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_full = sqlite3.connect, True

    class Full(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            if is_full and not statement.startswith(("SELECT", "BEGIN", "COMMIT")):
                raise sqlite3.OperationalError("database or disk is full")
            return super().execute(statement, *values)

    monkeypatch.setattr(remote.sqlite3, "connect", lambda *at, **how: real(*at, factory=Full, **how))

    async def use(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        nonlocal is_full
        ask = lambda **budget: parts.value("judge", judge(endpoint, **budget), REQUEST)  # noqa: E731
        assert [await ask(), await ask()] == [1.0, 1.0]
        with pytest.raises(InfraError, match="disk is full"):
            await ask(budget_tokens=99)
        is_full = False
        assert [await ask(budget_tokens=99), await ask(budget_tokens=99)] == [1.0, 1.0]
        assert parts.counts == {"judge: calls": 3, "judge: not kept": 2, "judge: cached": 1}

    run(reply("Score: 1"), use=use, path=tmp_path / "verdicts.db")


@pytest.mark.parametrize("value", ["'much'", "9e999", "x'00ff'"])
def test_a_kept_verdict_that_is_no_number_is_asked_for_again(value: str, tmp_path: Path) -> None:
    path = tmp_path / "verdicts.db"

    async def use(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        assert await parts.value("judge", judge(endpoint), REQUEST) == 1.0
        sql(path, f"UPDATE verdicts SET value = {value}")
        assert [await parts.value("judge", judge(endpoint), REQUEST) for _ in range(2)] == [1.0, 1.0]
        assert parts.counts == {"judge: calls": 2, "judge: cached": 1}

    run(reply("Score: 1"), use=use, path=path)


def test_threads_may_count_calls_in_memory_at_once() -> None:
    """Two threads began a transaction in the one connection of the memory."""
    verdicts, used = remote.Verdicts(None), JudgeSettings("http://127.0.0.1", model="m", budget_calls=400)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: verdicts.spend("judge", used), range(400)))
    with pytest.raises(BudgetSpent):
        verdicts.spend("judge", used)


@pytest.mark.parametrize(("limit", "calls"), [({"budget_calls": 3}, 3), ({"budget_tokens": 25}, 3)])
def test_the_budget_of_a_run_holds_over_its_processes(tmp_path: Path, limit: dict[str, int], calls: int) -> None:
    path, made = tmp_path / "verdicts.db", []

    async def use(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        for number in range(2):
            request = JudgeRequest((), "", f"{len(made)}", "")
            try:
                await parts.value("judge", judge(endpoint, **limit), request)
                made.append(number)
            except BudgetSpent as error:
                assert parts.spent.is_set() and parts.spent_key == error.key
                assert parts.spent_key == f"task.reward_args.judge.{next(iter(limit))}"
                assert parts.spent_limit == next(iter(limit.values()))
                return

    for _ in range(4):
        run(reply("Score: 1"), use=use, path=path)
    assert len(made) == calls


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ({"score": -2.5}, -2.5),
        ({"data": [{"score": 0.5}]}, 0.5),
        ({"data": [{"data": [[3]]}]}, 3.0),
        ({"score": True}, None),
        ({"score": [1, 2]}, None),
        ({"data": []}, None),
        ({}, None),
    ],
)
def test_scores_of_reward_models(response: dict, value: float | None) -> None:
    async def use(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        settings = EndpointSettings(endpoint.url, retries=0, timeout_s=5.0)
        if value is None:
            with pytest.raises(DataError, match="malformed"):
                await parts.value("reward_model", settings, REQUEST)
        else:
            assert await parts.value("reward_model", settings, REQUEST) == value
        assert endpoint.bodies[0]["messages"][-1] == {"role": "assistant", "content": REQUEST.completion}

    run(response, use=use)


def test_calls_are_concurrent_up_to_a_limit_and_never_block_the_loop() -> None:
    async def use(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        endpoint.delay_s = 0.05
        requests = [JudgeRequest((), "", str(n), "") for n in range(30)]
        settings = judge(endpoint, concurrency=5)
        await asyncio.gather(*(parts.value("judge", settings, request) for request in requests))
        assert endpoint.most == 5, "the server runs on the same loop: calls that block it are never five at a time"

    run(reply("Score: 1"), use=use)


def test_a_verdict_belongs_to_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several may wait for it, and its cancellation would be a fault of the one that asked first."""
    owners = []

    async def found(*_: object) -> float:
        owners.append(OWNER.get())
        return 0.5

    async def job() -> None:
        OWNER.set(Owner("Asking.step", lambda _: None))
        assert await RemoteParts().value("judge", JudgeSettings(url="http://127.0.0.1:1/v1", model="m"), REQUEST) == 0.5

    monkeypatch.setattr(RemoteParts, "_found", found)
    asyncio.run(job())
    assert owners == [None]


def test_a_judge_is_a_part_of_a_reward() -> None:
    async def use(endpoint: Endpoint, parts: RemoteParts, _: list[float]) -> None:
        pool = LocalPool()
        pool.remote = parts  # type: ignore[attr-defined]
        task = TaskConfig(
            extract="answer_tag",
            reward="judge + 0.5*exact",
            reward_args={"judge": {"url": endpoint.url, "model": "m", "timeout_s": 5.0}},
        )
        env = SingleTurn(pool, task)  # type: ignore[arg-type]
        question = (Message("user", "3+4?"),)
        await env.reset(Task(0, question, "single_turn", '{"scorer": "exact", "answer": "7"}', 0, "h"), 0)
        result = await env.step("<think>…</think><answer>seven</answer>")
        assert (result.reward, result.extracted) == (1.0, "seven")
        assert result.reward_parts == {"judge": 1.0, "exact": 0.0, "correct": 1.0}
        text = endpoint.bodies[0]["messages"][0]["content"]
        assert "3+4?" in text and "\n7\n" in text and "seven" in text and "{" not in text
        silent = await env.step("<answer></answer>")
        assert (silent.reward, len(endpoint.bodies)) == (0.0, 1), "an empty answer is not sent"

    run(reply("Score: 1"), use=use)
