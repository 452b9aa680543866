"""New weights from another trainer over HTTP, through vLLM's endpoints: start, update and finish a weight update.

The trainer names a folder that this machine reads, or sends its tensors as files in the format of safetensors, in one
request or several. The engine gets them as the next version when the update is finished, under its weight-swap policy.
An update that fails leaves the engine on its version.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxroll.models import folders
from jaxroll.records import Version
from jaxroll.serving import http_requests as requests
from jaxroll.serving.http_requests import ApiError
from jaxroll.serving.http_server import json_body, json_response, while_connected

_POLL_S = 0.01  # whether the engine has taken the new weights


class InitBody(msgspec.Struct, kw_only=True):
    """`POST /init_weight_transfer_engine`."""

    init_info: dict[str, Any] = {}


class StartBody(msgspec.Struct, kw_only=True):
    """`POST /start_weight_update`."""

    is_checkpoint_format: bool = True


class FolderInfo(msgspec.Struct, kw_only=True):
    """A folder in Hugging Face's layout or JaxRoll's."""

    path: str


class UpdateBody(msgspec.Struct, kw_only=True):
    """`POST /update_weights` with a folder: vLLM's `update_info`, or prime-rl's `weight_dir`."""

    update_info: dict[str, Any] | None = None
    weight_dir: str | None = None


class WeightUpdates:
    """Reads the weights that a trainer pushes and gives them to an engine. Belongs to one event loop.

    `read` returns the parameters in a folder (it blocks); `use` gives them to the engine as a version; `version` is the
    one that the engine uses. An update has at most `limit_bytes`.
    """

    def __init__(
        self,
        read: Callable[[Path], Mapping[str, np.ndarray]],
        use: Callable[[Version, Mapping[str, np.ndarray]], Future[None]],
        version: Callable[[], Version],
        limit_bytes: int,
    ) -> None:
        self._read, self._use, self.version, self._limit_bytes = read, use, version, limit_bytes
        self._folder: Path | None = None  # of the trainer
        self._files: Path | None = None  # a temporary folder for what it sends
        self.begun, self._lock = False, asyncio.Lock()

    def begin(self) -> None:
        """Begin an update. An unfinished one is discarded, because its trainer may have died."""
        self.discard()
        self.begun = True

    def discard(self) -> None:
        """Forget the update."""
        if self._files is not None:
            shutil.rmtree(self._files, ignore_errors=True)
        self._folder = self._files = None
        self.begun = False

    async def add_file(self, request: Request) -> None:
        """Add the tensors in the body, a file in the format of safetensors."""
        if not self.begun or self._folder is not None:
            raise ApiError("tensors belong to an update that /start_weight_update has begun", status=409)
        if self._files is None:
            self._files = Path(tempfile.mkdtemp(prefix="jaxroll-weights-"))
        files = self._files
        path = files / f"part-{len(list(files.iterdir()))}.safetensors"
        left = self._limit_bytes - sum(one.stat().st_size for one in files.iterdir())
        try:
            with path.open("xb") as file:
                async for part in request.stream():
                    left -= len(part)
                    if left < 0:
                        raise ApiError(
                            f"the update has more than {self._limit_bytes} bytes, which this model cannot have",
                            status=413,
                        )
                    await asyncio.to_thread(file.write, part)
            await asyncio.to_thread(folders.opened, path)
        except BaseException:  # a cancelled request too: a part of a file must not become a tensor
            path.unlink(missing_ok=True)
            raise

    def add_folder(self, folder: str) -> None:
        """Take the weights from `folder`."""
        if self._files is not None:
            raise ApiError("this update has tensors already: finish it, or begin another", status=409)
        if not Path(folder).is_absolute() or not Path(folder).is_dir():
            raise ApiError(f"path = {folder[:200]!r}: give an absolute folder that this machine has", param="path")
        self._folder = Path(folder)

    async def finish(self) -> Version:
        """The version of the new weights, once the engine uses them. ApiError or DataError if they do not fit."""
        if self._lock.locked():
            raise ApiError("another update is being finished: try again later", status=409, retry_after_s=1)
        async with self._lock:
            try:
                if self._folder is None and self._files is None:
                    raise ApiError("there are no new weights: call /update_weights first", status=409)
                values = await asyncio.to_thread(self._values)
                version = self.version()
                version = Version(version.lineage, version.step + 1)
                await asyncio.wrap_future(self._use(version, values))
            finally:
                self.discard()
            while self.version() != version:
                await asyncio.sleep(_POLL_S)
            return version

    def _values(self) -> Mapping[str, np.ndarray]:
        folder = self._folder
        if self._files is not None:
            parts = sorted(self._files.glob("part-*.safetensors"))
            held = {name: part.name for part in parts for name in folders.opened(part)}
            (self._files / folders.INDEX).write_text(json.dumps({"weight_map": held}), encoding="utf-8")
            folder = self._files
        assert folder is not None
        return dict(self._read(folder))


def routes(updates: WeightUpdates | None) -> list[Route]:
    """The endpoints of vLLM's weight transfer; without `updates` they are refused."""

    def needed() -> WeightUpdates:
        if updates is None:
            raise ApiError(
                "the learner of this run publishes its weights: use `jaxroll serve` for another trainer", status=409
            )
        return updates

    async def init(request: Request) -> Response:
        needed()
        body = requests.parsed((await json_body(request))[0], InitBody)
        if body.init_info:
            name = min(body.init_info)
            raise ApiError(
                f"init_info.{name}: this engine has no collective transfer; leave init_info empty and push "
                "a folder or tensors to /update_weights",
                param="init_info",
            )
        return json_response({"message": "Weight transfer initialized"})

    async def start(request: Request) -> Response:
        values = (await json_body(request))[0] if request.headers.get("content-length", "0") != "0" else {}
        if not requests.parsed(values, StartBody).is_checkpoint_format:
            raise ApiError(
                "is_checkpoint_format = false: this engine takes tensors under the names of the checkpoint",
                param="is_checkpoint_format",
            )
        needed().begin()
        return json_response({"message": "Weight update started"})

    async def update(request: Request) -> Response:
        held = needed()
        if request.headers.get("content-type", "").partition(";")[0].strip() == "application/octet-stream":
            await held.add_file(request)
            return json_response({"message": "Weights updated"})
        body = requests.parsed((await json_body(request))[0], UpdateBody)
        is_whole = not held.begun  # a folder alone needs neither start nor finish
        if (body.update_info is None) == (body.weight_dir is None):
            raise ApiError("one of update_info and weight_dir is needed", param="update_info")
        folder = body.weight_dir or requests.parsed(body.update_info, FolderInfo, "update_info").path
        held.add_folder(folder)
        if not is_whole:
            return json_response({"message": "Weights updated"})
        return json_response({"message": "Weights updated", "weight_version": str(await held.finish())})

    async def finish(request: Request) -> Response:
        version = await while_connected(request, needed().finish())
        return json_response({"message": "Weight update finished", "weight_version": str(version)})

    async def info(request: Request) -> Response:
        return json_response({"weight_version": str(needed().version())})

    async def world_size(request: Request) -> Response:
        return json_response({"world_size": 1})

    return [
        Route("/init_weight_transfer_engine", init, methods=["POST"]),
        Route("/start_weight_update", start, methods=["POST"]),
        Route("/update_weights", update, methods=["POST"]),
        Route("/finish_weight_update", finish, methods=["POST"]),
        Route("/weight_info", info),
        Route("/get_world_size", world_size),
    ]
