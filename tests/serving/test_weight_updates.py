"""Weights that another trainer pushes over HTTP; the model is the golden Qwen3."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from safetensors import numpy as safetensors

from jaxroll.config import ModelConfig
from jaxroll.models import params
from jaxroll.records import Version
from jaxroll.serving import weight_updates
from tests.harness.http_engine import TOKEN, Engine, served

DEADLINE_S = 30.0
MODEL = Path(__file__).parents[1] / "golden" / "qwen3" / "tied"
SPEC = params.spec(ModelConfig(path=str(MODEL)), vocab_size=280)
TENSORS = {n: a for file in sorted(MODEL.glob("*.safetensors")) for n, a in safetensors.load_file(file).items()}
LIMIT_BYTES = 2 * sum(4 * array.size for array in TENSORS.values())
RAW = {"content-type": "application/octet-stream"}
Api = httpx.AsyncClient


class Server:
    """The weights of an engine, which takes those that are pushed when `takes` is set."""

    def __init__(self) -> None:
        self.version, self.used = Version(0, 3), list[Mapping[str, np.ndarray]]()
        self.takes = True
        self.updates = weight_updates.WeightUpdates(self.read, self.use, lambda: self.version, LIMIT_BYTES)

    def read(self, folder: Path) -> Mapping[str, np.ndarray]:
        return params.weights(ModelConfig(path=str(folder)), SPEC)

    def use(self, version: Version, values: Mapping[str, np.ndarray]) -> Future[None]:
        self.used.append(values)
        if self.takes:
            self.version = version
        done: Future[None] = Future()
        done.set_result(None)
        return done


def run(check: Callable[[Api, Server], Awaitable[None]], updates: bool = True) -> None:
    async def play() -> None:
        server = Server()
        routes = weight_updates.routes(server.updates if updates else None)
        shown = {"Authorization": f"Bearer {TOKEN}"}
        async with served(Engine(), routes) as (url, _), httpx.AsyncClient(base_url=url, headers=shown) as api:
            await check(api, server)

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))


def same(found: Mapping[str, np.ndarray], scale: float) -> bool:
    want = params.weights(ModelConfig(path=str(MODEL)), SPEC)
    return found.keys() == want.keys() and all(np.array_equal(found[name], scale * want[name]) for name in want)


def halves(scale: float) -> tuple[bytes, bytes]:
    """The tensors, scaled, as two files."""
    scaled = {name: (scale * array).astype(array.dtype) for name, array in TENSORS.items()}
    names = sorted(scaled)
    cut = len(names) // 2
    first, second = ({name: scaled[name] for name in part} for part in (names[:cut], names[cut:]))
    return safetensors.save(first), safetensors.save(second)


def test_a_folder_or_tensors_in_parts_become_the_next_version() -> None:
    async def check(api: Api, server: Server) -> None:
        assert (await api.post("/init_weight_transfer_engine", json={"init_info": {}})).status_code == 200
        alone = await api.post("/update_weights", json={"update_info": {"path": str(MODEL)}})
        assert alone.json()["weight_version"] == "0.4" and same(server.used[0], 1.0)
        again = await api.post("/update_weights", json={"weight_dir": str(MODEL)})  # as prime-rl sends it
        assert again.json()["weight_version"] == "0.5" and same(server.used.pop(), 1.0)
        assert (await api.post("/start_weight_update", json={"is_checkpoint_format": True})).status_code == 200
        for part in halves(2.0):
            assert (await api.post("/update_weights", content=part, headers=RAW)).status_code == 200
        assert len(server.used) == 1, "nothing changes before the end"
        assert (await api.post("/finish_weight_update")).json()["weight_version"] == "0.6" and same(server.used[1], 2.0)
        assert (await api.get("/weight_info")).json() == {"weight_version": "0.6"}
        assert (await api.get("/get_world_size")).json() == {"world_size": 1}

    run(check)


@pytest.mark.parametrize("whole", [True, False], ids=["finished", "failed"])
def test_what_a_trainer_sent_is_not_kept(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def check(api: Api, server: Server) -> None:
        await api.post("/start_weight_update")
        for part in halves(1.0)[: 1 + whole]:
            assert (await api.post("/update_weights", content=part, headers=RAW)).status_code == 200
        assert len(list(tmp_path.glob("*/*"))) == 1 + whole
        assert (await api.post("/finish_weight_update")).is_success == whole
        assert list(tmp_path.iterdir()) == []

    run(check)


def test_an_update_that_fails_leaves_the_version_and_another_can_begin(tmp_path: Path) -> None:
    async def check(api: Api, server: Server) -> None:
        async def refused(path: str, status: int, reason: str, **body: Any) -> None:
            found = await api.post(path, **body)
            assert found.status_code == status and reason in found.text, found.text

        first, _ = halves(1.0)
        group = {"master_address": "127.0.0.1"}
        await refused("/init_weight_transfer_engine", 400, "no collective transfer", json={"init_info": group})
        await refused("/start_weight_update", 400, "names of the checkpoint", json={"is_checkpoint_format": False})
        await refused("/update_weights", 409, "/start_weight_update has begun", content=first, headers=RAW)
        await refused("/finish_weight_update", 409, "no new weights")
        for path, reason in (("relative", "absolute"), (str(tmp_path / "none"), "this machine has")):
            await refused("/update_weights", 400, reason, json={"update_info": {"path": path}})
        await refused("/update_weights", 400, "safetensors", json={"update_info": {"path": str(tmp_path)}})
        await refused("/update_weights", 400, "missing required field `path`", json={"update_info": {}})
        await refused("/update_weights", 400, "one of update_info and weight_dir", json={})
        await api.post("/start_weight_update")
        await refused("/update_weights", 400, "not a safetensors file", content=b"x" * 64, headers=RAW)
        await refused("/update_weights", 413, "cannot have", content=b"x" * (LIMIT_BYTES + 1), headers=RAW)
        assert (await api.post("/update_weights", content=first, headers=RAW)).status_code == 200
        await refused("/finish_weight_update", 400, "has no tensor")  # of the other half
        await refused("/finish_weight_update", 409, "no new weights")  # those are forgotten
        assert server.version == Version(0, 3) and not server.used
        await api.post("/start_weight_update")
        await api.post("/update_weights", content=first, headers=RAW)
        await api.post("/start_weight_update")  # its trainer has died; another one begins
        await refused("/finish_weight_update", 409, "no new weights")

    run(check)


def test_the_answer_waits_until_the_engine_uses_the_weights() -> None:
    async def check(api: Api, server: Server) -> None:
        server.takes = False
        body = {"update_info": {"path": str(MODEL)}}
        pending = asyncio.create_task(api.post("/update_weights", json=body))
        while not server.used:
            await asyncio.sleep(0)
        assert (await api.post("/update_weights", json=body)).status_code == 409 and not pending.done()
        server.version = Version(0, 4)
        assert (await pending).json()["weight_version"] == "0.4"

    run(check)


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update", "/start_weight_update"])
def test_a_sampler_of_a_run_takes_weights_from_its_learner_only(path: str) -> None:
    async def check(api: Api, server: Server) -> None:
        found = await api.post(path, json={})
        assert found.status_code == 409 and "the learner of this run" in found.text

    run(check, updates=False)
