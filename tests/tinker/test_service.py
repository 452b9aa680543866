"""The order of a model's requests, promises, sessions that end, access, and the engine that many models share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from jaxroll import wire
from jaxroll.config import Config
from jaxroll.errors import DataError
from jaxroll.protocols import Completion
from jaxroll.records import Version, VersionRef, VersionRun
from jaxroll.tinker import messages, server, service
from jaxroll.tinker.sampler import BASE, LoadCall, Rotation, SampleCall, SampleReply
from jaxroll.tinker.service import RefusedRequest, Tinker
from jaxroll.tinker.trainer import ClientModel

ADAM = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


class Trainer:
    """Notes what it is asked for, in order."""

    context, config = 32, Config()

    class text:
        eos_id = 2

    class spec:
        name, vocab_size = "nano", 32

    def __init__(self) -> None:
        self.ran: list[Any] = []

    def create(self, rank: int | None, seed: int, **_: bool) -> ClientModel:
        self.ran.append(("create", rank))
        return ClientModel(len(self.ran), None, {}, None)

    def run(self, model: ClientModel, asked: messages.ForwardBackward) -> Any:
        self.ran.append(("run", len(asked.data)))
        if asked.loss == "unknown":
            model.broken = "no such loss"
            raise DataError("no such loss")
        return [{"logprobs": datum.tokens.astype(np.float32)} for datum in asked.data], {"loss:sum": 1.5}

    def step(self, model: ClientModel, params: dict[str, float]) -> dict[str, float]:
        self.ran.append(("step", params["learning_rate"]))
        return {}


class Sampler:
    """A sampler process: holds the names that were loaded, and answers with the prompt."""

    def __init__(self) -> None:
        self.held, self.calls, self.free = {BASE}, list[Any](), asyncio.Event()
        self.free.set()

    async def call(self, method: str, body: bytes, deadline_s: float, *, patience_s: float = 0.0) -> bytes:
        if method == "Drop":
            name = wire.decode(body, str)
            self.held = {one for one in self.held if one != name and not one.startswith(f"{name}/")}
            return b""
        if method == "Load":
            self.held.add(wire.decode(body, LoadCall).name)
            return wire.encode(SampleReply())
        call = wire.decode(body, SampleCall)
        self.calls.append(call)
        await self.free.wait()
        if call.name not in self.held:
            return wire.encode(SampleReply(missing=True))
        logprobs = np.zeros(len(call.prompt), np.float32)
        one = Completion(call.prompt, logprobs, (VersionRun(Version(0, 1), len(call.prompt)),), "stop")
        return wire.encode(SampleReply((one,) * call.count))


class Publisher:
    def publish(self, version: Version, params: Any) -> VersionRef:
        return VersionRef(version, "tcp", "127.0.0.1:1", "digest")


class Parts:
    def __init__(self, folder: Path, patience_s: float = 1e9) -> None:
        self.trainer, self.sampler = Trainer(), Sampler()

        async def on_device(job: Callable[[], Any]) -> Any:
            await asyncio.sleep(0)
            return job()

        parts: Any = (self.trainer, on_device, self.sampler, Publisher())
        self.tinker = Tinker("base", *parts, folder, patience_s)

    async def model(self) -> tuple[str, str]:
        """A session and a model of it."""
        session = self.tinker.begin()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
        reply = self.tinker.create(body)
        assert await self.tinker.fetch(reply["request_id"]) == {"type": "create_model", "model_id": reply["model_id"]}
        return session, reply["model_id"]


def run(tmp_path: Path, check: Callable[[Parts], Awaitable[None]], **kwargs: Any) -> None:
    async def play() -> None:
        async with asyncio.timeout(30):
            await check(Parts(tmp_path, **kwargs))

    asyncio.run(play())


def passed(model: str, seq: int, count: int = 1, loss: str = "cross_entropy") -> bytes:
    """A ForwardBackwardRequest of `count` datums."""
    asked = messages._MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=seq, loss_fn=loss)
    for _ in range(count):
        datum = asked.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([3, 4], "<i4").tobytes()
        target = datum.loss_fn_inputs.add(key="target_tokens")
        target.value.dense, target.value.dtype = np.array([4, 5], "<i8").tobytes(), 2
        target.value.shape.append(2)
    return asked.SerializeToString()


def test_requests_run_in_the_order_of_their_numbers_and_once(tmp_path: Path) -> None:
    async def check(parts: Parts) -> None:
        tinker = parts.tinker
        _, model = await parts.model()
        step = {"model_id": model, "seq_id": 3, "adam_params": ADAM}
        replies = [tinker.step(step), tinker.forward_backward(passed(model, 2, count=2))]
        await asyncio.sleep(0.01)
        assert parts.trainer.ran == [("create", 4)], "the first request has not arrived"
        replies += [tinker.forward_backward(passed(model, 1)), tinker.forward_backward(passed(model, 2, count=2))]
        results = [await tinker.fetch(reply["request_id"]) for reply in replies]
        assert parts.trainer.ran[1:] == [("run", 1), ("run", 2), ("step", 0.1)]
        assert results[1] == results[3] and results[0] == {"type": "optim_step", "metrics": {}}

    run(tmp_path, check)


def test_a_request_whose_predecessor_is_lost_fails_and_the_order_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "GAP_S", 0.05)

    async def check(parts: Parts) -> None:
        tinker = parts.tinker
        _, model = await parts.model()
        late = await tinker.fetch(tinker.forward_backward(passed(model, 3))["request_id"])
        assert isinstance(late, dict) and "request 1 of model" in late["error"] and late["category"] == "user"
        assert isinstance(await tinker.fetch(tinker.forward_backward(passed(model, 4))["request_id"]), bytes)
        assert "did not arrive" in tinker.models[model].trained.broken, "the next step's gradients are not complete"

    run(tmp_path, check)


def test_a_pass_that_fails_is_the_failure_of_its_promise(tmp_path: Path) -> None:
    async def check(parts: Parts) -> None:
        tinker = parts.tinker
        _, model = await parts.model()
        failed = await tinker.fetch(tinker.forward_backward(passed(model, 1, loss="unknown"))["request_id"])
        assert failed == {"error": "no such loss", "category": "user"}
        assert tinker.models[model].trained.broken == "no such loss"  # type: ignore[union-attr]
        with pytest.raises(DataError, match="ForwardBackwardRequest"):
            tinker.forward_backward(b"\xff\xff\xff")

    run(tmp_path, check)


def test_a_silent_session_ends_with_all_that_it_has_and_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(parts: Parts) -> None:
        tinker = parts.tinker
        (silent, mine), (heard, other) = await parts.model(), await parts.model()
        saved = tinker.save_for_sampler({"model_id": mine, "seq_id": 1, "sampling_session_seq_id": 0})
        found = await tinker.fetch(saved["request_id"])
        assert isinstance(found, dict) and f"{silent}/{found['sampling_session_id']}" in parts.sampler.held
        parts.sampler.free.clear()
        under_way = tinker.sample(sampled(found["sampling_session_id"], 1))
        await asyncio.sleep(0.01)
        (running,) = parts.sampler.calls
        assert running.count == 2
        task = tinker.promises[under_way["request_id"]].task
        begun_s = tinker._now_s()
        monkeypatch.setattr(tinker, "_now_s", lambda: begun_s + 99.0)
        await tinker.expire()
        tinker.session(heard)
        assert silent in tinker.sessions
        monkeypatch.setattr(tinker, "_now_s", lambda: begun_s + 101.0)
        await tinker.expire()
        await asyncio.wait([task])
        assert task.cancelled() and list(tinker.models) == [other] and tinker.weights == {}
        assert {promise.session for promise in tinker.promises.values()} == {heard}
        assert parts.sampler.held == {BASE}
        with pytest.raises(RefusedRequest) as refused:
            tinker.session(silent)
        assert refused.value.status == 410

    run(tmp_path, check, patience_s=100.0)


def sampled(session: str, seq: int, **params: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]}
    return {
        "sampling_session_id": session,
        "seq_id": seq,
        "num_samples": 2,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 4, **params},
    }


def test_a_snapshot_that_left_the_sampler_is_named(tmp_path: Path) -> None:
    async def check(parts: Parts) -> None:
        tinker = parts.tinker
        _, model = await parts.model()
        saved = tinker.save_for_sampler({"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0})
        id = (await tinker.fetch(saved["request_id"]))["sampling_session_id"]  # type: ignore[index]
        reply = tinker.sample(sampled(id, 0, seed=5, stop=["x"], top_k=-1))
        assert reply["sample_sequence_ids"] == [f"{id}:0:0", f"{id}:0:1"]
        assert isinstance(await tinker.fetch(reply["request_id"]), bytes)
        params = parts.sampler.calls[-1].params
        assert (params.seed, params.stop_strings, params.stop_tokens, params.top_k) == (5, ("x",), (2,), 0)
        parts.sampler.held = {BASE}  # it was started again
        gone = await tinker.fetch(tinker.sample(sampled(id, 1))["request_id"])
        assert isinstance(gone, dict) and "no longer holds this snapshot" in gone["error"]

    run(tmp_path, check)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": {"chunks": []}}, "the prompt is empty"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "something else than tokens"),
        ({"sampling_params": {"max_tokens": 30}}, "room for 29"),
        ({"topk_prompt_logprobs": 2}, "is not available"),
    ],
)
def test_sampling_requests_that_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    async def check(parts: Parts) -> None:
        tinker = parts.tinker
        session = tinker.begin()
        id = tinker.begin_sampling({"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"})
        found = await tinker.fetch(tinker.sample(sampled(id, 0) | changes)["request_id"])
        assert isinstance(found, dict) and reason in found["error"] and found["category"] == "user"

    run(tmp_path, check)


def test_paths_stay_in_the_folder_of_the_server(tmp_path: Path) -> None:
    async def check(parts: Parts) -> None:
        tinker = parts.tinker
        _, model = await parts.model()
        (tmp_path / "weights").mkdir()
        for path in ("tinker://../x/weights", "tinker://a/weights/../../b", "/etc", "tinker://a/weights", None):
            with pytest.raises(RefusedRequest):
                tinker.folder_of(path)
        bad = await tinker.fetch(tinker.save({"model_id": model, "seq_id": 1, "path": "../up"})["request_id"])
        assert isinstance(bad, dict) and "use letters" in bad["error"] and not (tmp_path.parent / "up").exists()

    run(tmp_path, check)


def test_http_asks_for_the_key_and_holds_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HELD_S", 0.02)

    async def check(parts: Parts) -> None:
        transport = httpx.ASGITransport(server.app(parts.tinker, "secret"))
        async with httpx.AsyncClient(transport=transport, base_url="http://x/api/v1") as client:
            assert (await client.get("/healthz")).status_code == 200
            for key in ({}, {"X-API-Key": "tml-wrong"}):
                assert (await client.post("/create_session", json={}, headers=key)).status_code == 401
            client.headers["X-API-Key"] = "tml-secret"

            async def post(path: str, **body: Any) -> tuple[int, dict[str, Any]]:
                answer = await client.post(path, json=body)
                return answer.status_code, answer.json()

            _, begun = await post("/create_session")
            status, model = await post(
                "/create_model",
                session_id=begun["session_id"],
                model_seq_id=0,
                base_model="other",
                lora_config={"rank": 4},
            )
            assert status == 404 and "this server has 'base'" in model["detail"]
            _, model = await post(
                "/create_model",
                session_id=begun["session_id"],
                model_seq_id=0,
                base_model="base",
                lora_config={"rank": 4},
            )
            step = {"model_id": model["model_id"], "seq_id": 2, "adam_params": ADAM}
            _, waiting = await post("/optim_step", **step)
            status, later = await post("/retrieve_future", request_id=waiting["request_id"])
            assert status == 408 and later["type"] == "try_again"
            answer = await client.post("/forward_backward", content=passed(model["model_id"], 1))
            key = {"request_id": answer.json()["request_id"]}
            while (answer := await client.post("/retrieve_future", json=key)).status_code == 408:
                pass  # held for a short time only
            assert answer.headers["content-type"] == "application/x-protobuf" and answer.content
            while (done := await post("/retrieve_future", request_id=waiting["request_id"]))[0] == 408:
                pass
            assert done[1]["type"] == "optim_step"
            assert (await post("/retrieve_future", request_id="other"))[0] == 410
            assert (await post("/optim_step", model_id=model["model_id"], seq_id="two"))[0] == 400
            assert (await post("/get_info", model_id="gone"))[0] == 404
            assert (await client.post("/create_session", content=b"[")).status_code == 400
            assert (await client.post(f"/sessions/{begun['session_id']}/finish")).status_code == 200
            assert (await post("/session_heartbeat", session_id=begun["session_id"]))[0] == 410

    run(tmp_path, check)


@pytest.mark.parametrize("seed", range(5))
def test_the_engine_has_the_weights_of_its_users_and_no_name_waits_for_more_than_a_round(seed: int) -> None:
    """Many users of four names, some cancelled, one name that fails."""
    chance = random.Random(seed)
    active, users, switches = "a", 0, list[str]()

    async def switch(name: str) -> None:
        nonlocal active
        assert users == 0, "the weights change under a request"
        switches.append(name)
        await asyncio.sleep(0)
        if name == "bad":
            raise DataError("gone")
        active = name

    async def one(rotation: Rotation, name: str, steps: int) -> None:
        nonlocal users
        async with rotation.use(name):
            assert active == name
            users += 1
            try:
                for _ in range(steps):
                    assert active == name
                    await asyncio.sleep(0)
            finally:
                users -= 1

    async def play() -> None:
        rotation = Rotation(switch, "a")
        tasks = []
        for number in range(200):
            name = chance.choice(("a", "b", "c", "bad"))
            tasks.append(asyncio.ensure_future(one(rotation, name, chance.randrange(6))))
            if number % 3 == 0:
                await asyncio.sleep(0)
            if number % 5 == 0:
                chance.choice(tasks).cancel()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        kinds = {type(end) for end in ended}
        assert kinds == {type(None), asyncio.CancelledError, DataError} and users == 0 and rotation._users == 0
        async with asyncio.timeout(5):
            await one(rotation, "b", 1)

    asyncio.run(play())
    assert len(switches) < 150, "requests for the same weights run together"
