"""The HTTP front end before a scripted engine: the real openai client, limits, cancellation, errors."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import httpx2 as httpx
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxroll.engine.sequence import EngineStats
from jaxroll.errors import ConfigError
from jaxroll.protocols import SamplingParams
from jaxroll.rpc import http, protocol
from jaxroll.serving import http_server
from jaxroll.serving.http_answers import CallStream, ChatLayout, Piece, Served, TextStream, event
from jaxroll.serving.http_requests import EngineLimits, Wanted
from jaxroll.text.tokenizers import HFTokenizer
from tests.harness.http_engine import TEXT, TOKEN, V1, V2, Engine, served

DEADLINE_S = 60.0
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'


def run(job) -> None:
    asyncio.run(asyncio.wait_for(job, DEADLINE_S))


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=DEADLINE_S)


def connect(url: str, token: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=DEADLINE_S)


QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
IDS = {"return_token_ids": True}


def test_a_streamed_chat_equals_the_single_answer_with_ids_logprobs_and_versions() -> None:
    async def check() -> None:
        engine = Engine("hello")
        async with served(engine) as (url, _), client(url) as api:
            asked = {"model": "m", "messages": QUESTION, "logprobs": True, "top_logprobs": 1, "n": 2, "extra_body": IDS}
            whole = await api.chat.completions.create(**asked)
            parts: dict[int, list] = {0: [], 1: []}
            heads, usage = 0, None
            stream = await api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            async for chunk in stream:
                heads += "prompt_token_ids" in (chunk.model_extra or {})
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    parts[choice.index].append(choice)
            ids = [*TEXT.encode("hello"), TEXT.eos_id]
            for choice in whole.choices:
                extra, chunks = choice.model_extra, parts[choice.index]
                assert choice.message.content == "".join(c.delta.content or "" for c in chunks) == "hello"
                assert choice.finish_reason == chunks[-1].finish_reason == "stop" and len(chunks) == 6
                assert extra["token_ids"] == [i for c in chunks for i in c.model_extra["token_ids"]] == ids
                assert extra["weight_versions"] == [{"version": "0.1", "count": 1}, {"version": "0.2", "count": 5}]
                assert chunks[1].model_extra["weight_versions"] == [{"version": "0.2", "count": 1}]
                logprobs = [one.logprob for c in chunks for one in c.logprobs.content]
                assert [one.logprob for one in choice.logprobs.content] == logprobs == [-0.25 * n for n in range(1, 7)]
                assert choice.logprobs.content[0].top_logprobs[0].token == "h"
            assert whole.model_extra["prompt_token_ids"] == engine.asked[0][0] and heads == 2
            assert whole.usage == usage and usage.completion_tokens == 12

    run(check())


def test_an_event_names_the_weights_that_the_server_has_then() -> None:
    at = [V1]
    wanted = Wanted(([1],), 1, SamplingParams(4), stream=True, token_ids=True)
    layout = ChatLayout(Served("m", Engine(), EngineLimits(9, TEXT), lambda: at[0], EngineStats), wanted, "id")

    async def pieces():
        for text in "abcd":
            yield 0, Piece(text, [], [1], [0.0], ())
            at[0] = V2 if text == "b" else at[0]

    async def check() -> None:
        events = [one async for one in layout.events(pieces())]
        values = [json.loads(one.removeprefix(b"data: ")) for one in events]
        assert [value["system_fingerprint"] for value in values] == ["weights 0.1"] * 2 + ["weights 0.2"] * 2
        assert [value["choices"][0]["delta"]["content"] for value in values] == [*"abcd"]
        assert events == [event(value) for value in values]

    run(check())


def test_tools_are_called_in_streams_and_single_answers() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    async def check() -> None:
        engine = Engine(f"Let me see.\n{CALL}\n{CALL}")
        async with served(engine) as (url, front), client(url) as api:
            front.model.room.tokenizer.render = lambda messages, tools=(): TEXT.encode(f"{len(tools)} tools")
            try:
                asked = {"model": "m", "messages": QUESTION, "tools": [tool]}
                choice = (await api.chat.completions.create(**asked)).choices[0]
                streamed, said = [], ""
                async for chunk in await api.chat.completions.create(**asked, stream=True):
                    said += chunk.choices[0].delta.content or ""
                    streamed += chunk.choices[0].delta.tool_calls or []
                    last = chunk.choices[0].finish_reason
            finally:
                del front.model.room.tokenizer.render
        assert engine.asked[0][0] == TEXT.encode("1 tools")
        assert choice.finish_reason == last == "tool_calls" and choice.message.content == said == "Let me see."
        calls = choice.message.tool_calls
        assert [call.function.name for call in calls] == [one.function.name for one in streamed] == ["add", "add"]
        assert [one.index for one in streamed] == [0, 1] and calls[0].id != calls[1].id
        assert json.loads(calls[1].function.arguments) == {"a": 1, "b": [2]}

    run(check())


def test_earlier_calls_and_results_of_tools_are_shown_as_the_model_writes_them() -> None:
    async def check() -> None:
        engine = Engine()
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}
        history = [
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ]
        async with served(engine) as (url, _), client(url) as api:
            await api.chat.completions.create(model="m", messages=history)
        assert CALL in TEXT.decode(engine.asked[0][0])

    run(check())


def test_completions_stop_at_strings_and_report_tokens() -> None:
    async def check() -> None:
        engine = Engine("one, two; three")
        async with served(engine) as (url, _), client(url) as api:
            asked = {
                "model": "m",
                "prompt": ["a", "bc"],
                "max_tokens": 50,
                "logprobs": 1,
                "stop": ["; ", "xyz"],
                "seed": 3,
            }
            whole = await api.completions.create(**asked)
            text = ["", ""]
            async for chunk in await api.completions.create(**asked, stream=True):
                text[chunk.choices[0].index] += chunk.choices[0].text
                assert ";" not in chunk.choices[0].text
            assert [choice.text for choice in whole.choices] == text == ["one, two"] * 2
            assert whole.choices[0].finish_reason == "stop"
            logprobs = whole.choices[0].logprobs
            assert "".join(logprobs.tokens) == "one, two; " and logprobs.text_offset == list(range(10))
            assert [params.seed for _, _, params in engine.asked] == [3] * 4
            assert [prompt for prompt, _, _ in engine.asked[:2]] == [TEXT.encode("a"), TEXT.encode("bc")]

    run(check())


def test_token_ids_go_in_and_come_out_with_their_logprobs() -> None:
    async def check() -> None:
        engine = Engine("abc")
        async with served(engine) as (url, _), connect(url, TOKEN) as api:
            sampling = {"max_tokens": 3, "temperature": 0.5, "top_k": -1, "logprobs": 1, "stop_token_ids": [7]}
            body = {"model": "m", "token_ids": [5, 6], "sampling_params": sampling | {"skip_special_tokens": False}}
            got = (await api.post("/inference/v1/generate", json=body)).json()
            choice = got["choices"][0]
            assert got["prompt_token_ids"] == [5, 6] and choice["token_ids"] == TEXT.encode("abc")
            named = [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]]
            assert named == [(f"token_id:{i}", -0.25 * n) for n, i in enumerate(TEXT.encode("abc"), 1)]
            assert choice["finish_reason"] == "length"
            params = engine.asked[0][2]
            assert (params.temperature, params.top_k, set(params.stop_tokens)) == (0.5, 0, {TEXT.eos_id, 7})
            ids = (await api.post("/tokenize", json={"prompt": "ab"})).json()["tokens"]
            assert ids == TEXT.encode("ab")
            assert (await api.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "ab"}
            chat = (await api.post("/tokenize", json={"messages": QUESTION})).json()["tokens"]
            assert chat[0] == TEXT.bos_id and chat[-1] == TEXT.turn_id

    run(check())


REFUSED = [
    ("/v1/completions", {"model": "other", "prompt": "a"}, 404, "model", "it serves 'm'"),
    ("/v1/completions", {"prompt": "a", "temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
    ("/v1/completions", {"prompt": "a", "max_tokens": "5"}, 400, None, "Expected `int"),
    ("/v1/completions", {"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty", "does not support"),
    ("/v1/completions", {"prompt": "a", "logprobs": 5}, 400, "logprobs", "sampled token only"),
    ("/v1/completions", {"prompt": "a", "n": 1000}, 400, "n", "1 to 128"),
    ("/v1/completions", {"prompt": "a" * 300}, 400, "prompt", "may have 200"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 300}, 400, "max_tokens", "lower max_tokens"),
    ("/v1/completions", {"prompt": "é"}, 400, None, "not in the alphabet"),
    ("/v1/completions", {"prompt": [1, -2]}, 400, "prompt", "token id"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [99]}, 400, None, "not made with"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [99], "stream": True}, 400, None, "not made with"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages", "at least one"),
    ("/v1/chat/completions", {"messages": [{"role": "robot"}]}, 400, "messages[0]", "one of system"),
    ("/v1/chat/completions", {"messages": QUESTION, "tools": [{"type": "function"}]}, 400, None, "chat template"),
    (
        "/v1/chat/completions",
        {"messages": QUESTION, "tool_choice": "required"},
        400,
        "tool_choice",
        "the model decides",
    ),
    ("/inference/v1/generate", {"token_ids": []}, 400, "token_ids", "at least one"),
    ("/detokenize", {"tokens": [100000]}, 400, "tokens", "vocabulary"),
    ("/pause?mode=later", {}, 400, "mode", "abort, wait, keep"),
    ("/pause?clear_cache=true", {}, 400, "clear_cache", "schedule.weight_swap=keep_kv it is false"),
    ("/pause?wait=1", {}, 400, "wait", "only mode and clear_cache"),
    ("/v1/nothing", {}, 404, None, "docs/serving.md"),
]


def test_refused_requests_name_field_reason_and_remedy_in_openais_layout() -> None:
    async def check() -> None:
        async with served(Engine()) as (url, _), connect(url, TOKEN) as api:
            for path, body, status, param, reason in REFUSED:
                answer = await api.post(path, json=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (status, param), (path, body, error)
                assert reason in error["message"] and error["type"] == "invalid_request_error", error
            large = await api.post("/v1/completions", content=b"[" * (http_server.MAX_BODY_BYTES + 1))
            assert large.status_code == 413 and "shorter prompt" in large.json()["error"]["message"]
            broken = await api.post("/v1/completions", content=b"{")
            assert broken.status_code == 400 and "not JSON" in broken.json()["error"]["message"]

    run(check())


def test_only_the_health_is_shown_without_the_token() -> None:
    async def check() -> None:
        async with served(Engine()) as (url, _):
            for shown in ("", "another"):
                async with connect(url, shown) as api:
                    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/pause"), ("GET", "/x")):
                        answer = await api.request(method, path)
                        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                    assert (await api.get("/health")).json() == {"status": "ok"}
            async with connect(url, TOKEN) as api:
                card = (await api.get("/v1/models")).json()["data"][0]
                assert (card["id"], card["max_model_len"], card["weight_version"]) == ("m", 200, "0.2")
                metrics = (await api.get("/metrics")).text
                assert 'jaxroll_http_responses_total{path="/pause",status="401"} 2' in metrics
                assert 'path="other",status="401"} 2' in metrics and "jaxroll_weights_step" in metrics
                names = {family.name for family in text_string_to_metric_families(metrics)}
                assert names >= {"jaxroll_http_responses", "jaxroll_engine_running_requests", "jaxroll_weights_step"}

    run(check())


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "single answer"])
def test_a_client_that_disconnects_frees_its_slot(stream: bool) -> None:
    async def check() -> None:
        engine = Engine(slots=1)
        engine.go.clear()
        async with served(engine) as (url, front):
            async with connect(url, TOKEN) as api:
                body = {"prompt": "a", "stream": stream}
                asking = asyncio.create_task(api.post("/v1/completions", json=body))
                async with engine.changed:
                    await engine.changed.wait_for(lambda: engine.running == 1)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            while engine.running or front.counts.open:
                await asyncio.sleep(0.005)
            assert front.counts.cancelled == 1
            engine.go.set()
            async with client(url) as api:
                assert (await api.completions.create(model="m", prompt="a")).choices[0].text == "abc"

    run(check())


def test_a_refusal_of_too_many_requests_says_when_to_try_again() -> None:
    async def check() -> None:
        engine = Engine(slots=1)
        engine.go.clear()
        async with served(engine, max_open=3) as (url, _), connect(url, TOKEN) as api:
            asking = [asyncio.create_task(api.post("/v1/completions", json={"prompt": "a"})) for _ in range(3)]
            while len(engine.asked) < 3:
                await asyncio.sleep(0.005)
            for stream in (False, True):
                refused = await api.post("/v1/completions", json={"prompt": "a", "stream": stream})
                assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
                assert refused.json()["error"]["type"] == "rate_limit_error"
            engine.go.set()
            assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 3

    run(check())


@pytest.mark.parametrize("clients", [64, pytest.param(256, marks=pytest.mark.soak)])
def test_many_concurrent_streams_lose_nothing(clients: int) -> None:
    async def check() -> None:
        engine = Engine("the same answer", slots=16)
        async with served(engine, max_open=clients) as (url, front), client(url) as api:

            async def ask() -> str:
                stream = await api.completions.create(model="m", prompt="a", max_tokens=50, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            assert await asyncio.gather(*(ask() for _ in range(clients))) == ["the same answer"] * clients
            assert engine.most == 16 and front.counts.open == 0 and front.counts.answers == clients

    run(check())


def test_the_cache_that_a_pause_clears_is_that_of_the_weight_swap() -> None:
    async def check() -> None:
        async with served(Engine(), swap="reprefill") as (url, _), connect(url, TOKEN) as api:
            assert (await api.post("/pause?mode=keep&clear_cache=True")).status_code == 200
            refused = await api.post("/pause?mode=keep&clear_cache=false")
            assert refused.status_code == 400 and "schedule.weight_swap=reprefill it is true" in refused.text

    run(check())


def test_the_verbs_of_control_reach_the_engine() -> None:
    async def check() -> None:
        engine = Engine()
        async with served(engine) as (url, _), connect(url, TOKEN) as api:
            for mode in ("abort", "wait", "keep"):
                assert (await api.post(f"/pause?mode={mode}")).json()["mode"] == engine.paused == mode
            assert (await api.get("/is_paused")).json() == {"is_paused": True}
            assert (await api.post("/pause?mode=keep&clear_cache=false")).status_code == 200, "as prime-rl sends it"
            assert (await api.post("/resume")).json()["status"] == "resumed" and engine.paused is None

    run(check())


# --- pieces of text and calls


def test_text_in_pieces_is_the_text_of_all_tokens() -> None:
    tokenizer = HFTokenizer(Path(__file__).parents[1] / "golden" / "qwen3" / "tied")
    rng = np.random.default_rng(0)
    ids = [i for text in ("naïve – 漢字 🙂🙂 end", "\n  spaced ") for i in tokenizer.encode(text)]
    for sequence in (ids, rng.integers(0, tokenizer.vocab_size, 60).tolist()):
        for _ in range(20):
            cuts = sorted(rng.integers(0, len(sequence), 12).tolist())
            stream, pieces = TextStream(tokenizer.decode), []
            for start, end in zip([0, *cuts], [*cuts, len(sequence)], strict=True):
                pieces.append(stream.add(sequence[start:end]))
            assert "".join(pieces) + stream.end(stopped=True) == tokenizer.decode(sequence)
    stream = TextStream(tokenizer.decode)
    assert all("\N{REPLACEMENT CHARACTER}" not in stream.add([i]) for i in ids)


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    stream = TextStream(TEXT.decode, ("stop", "st."))
    assert [stream.add(TEXT.encode(text)) for text in ("as", "ts", "to", "pp")] == ["a", "st", "", ""]
    assert stream.end(stopped=True) == ""
    other = TextStream(TEXT.decode, ("stop",))
    assert other.add(TEXT.encode("list")) + other.end(stopped=False) == "list"


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (f"{CALL}", "", ["add"]),
        (f"ok\n{CALL}\n{CALL}\n", "ok", ["add", "add"]),
        ("a <tool_call>no json</tool_call> b", "a <tool_call>no json</tool_call> b", []),
        ("a <tool_call>{", "a <tool_call>{", []),
        (
            'x <tool_call>{"name": 3, "arguments": {}}</tool_call>',
            'x <tool_call>{"name": 3, "arguments": {}}</tool_call>',
            [],
        ),
        ("a < b  ", "a < b  ", []),
    ],
)
def test_calls_are_separated_from_the_text_in_any_pieces(text: str, content: str, names: list[str]) -> None:
    for size in (1, 3, len(text)):
        stream, shown, called = CallStream(), "", []
        for at in range(0, len(text), size):
            more, calls = stream.add(text[at : at + size])
            shown, called = shown + more, called + calls
        assert shown + stream.end() == content and [call.name for call in called] == names


# --- token and address


def test_the_token_is_private_and_lasts(tmp_path: Path) -> None:
    path = tmp_path / "state" / "http.token"
    first = http.token(None, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(first) == 64
    assert http.token(None, path) == first == path.read_text().strip()
    of_run = http.token("secret", tmp_path / "http.token")
    assert of_run == http.token("secret", tmp_path / "other") != http.token("another", tmp_path / "third")
    assert of_run not in {protocol.bearer("secret", right) for right in protocol.ROLES}


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_are_served_only_on_request(host: str) -> None:
    with pytest.raises(ConfigError, match="plain text"):
        http.listen(host, 0)
    if host == "0.0.0.0":
        http.listen(host, 0, insecure=True).close()


def test_the_head_of_a_request_is_bounded() -> None:
    async def check() -> None:
        async with served(Engine()) as (url, _):
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nLong: ".ljust((64 << 10) + 1, b"x"))
            assert b"400 Bad Request" in await reader.read()  # until the server closes the connection
            writer.close()

    run(check())


def test_an_occupied_port_is_refused() -> None:
    taken = http.listen("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="Use 0 for a free port"):
        http.listen("127.0.0.1", taken.getsockname()[1])
    taken.close()
