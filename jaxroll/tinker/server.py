"""HTTP server for clients of the Tinker API, over a trainer in this process and a sampler process.

Every call that computes returns a promise at once; the client fetches its result from `/api/v1/retrieve_future`, which
is held until the result is there.

Threads: the main thread runs JAX (`DeviceThread`); the rest runs on the loop thread.
Stops: on SIGTERM or SIGINT. Saved weights are in RUN/tinker; models that were not saved end with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxroll import disk, lifeline
from jaxroll.config import RoleArgs
from jaxroll.config.derived import max_message_bytes, model_folder
from jaxroll.errors import DataError
from jaxroll.loop_thread import DeviceThread, LoopThread
from jaxroll.models import folders
from jaxroll.rpc import http, protocol
from jaxroll.rpc.client import RawClient
from jaxroll.tinker.sampler import SERVICE
from jaxroll.tinker.service import RefusedRequest, Tinker
from jaxroll.tinker.trainer import Trainer
from jaxroll.transfer.ends import Publisher

MAX_BODY_BYTES = 64 << 20  # the SDK splits requests at 5 MB
PROTOBUF = "application/x-protobuf"
PATIENCE_S = 300.0  # for the sampler: its start compiles the engine


def app(tinker: Tinker, token: str) -> Starlette:
    """The endpoints of `tinker`, for clients that show `token`."""

    async def body(request: Request) -> bytes:
        read = bytearray()
        async for part in request.stream():
            read += part
            if len(read) > MAX_BODY_BYTES:
                raise RefusedRequest(f"the body is larger than {MAX_BODY_BYTES} bytes", 413)
        return bytes(read)

    async def values(request: Request) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(await body(request) or b"{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise RefusedRequest(f"the body is not JSON: {str(error)[:200]}") from error
        if not isinstance(found, dict):
            raise RefusedRequest("the body is not a JSON object")
        return found

    def route(path: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Route:
        async def handle(request: Request) -> Response:
            return _json(answer(await values(request)))

        return _guarded(path, handle, "POST")

    def _guarded(path: str, handle: Callable[[Request], Awaitable[Response]], method: str) -> Route:
        async def guarded(request: Request) -> Response:
            shown = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
            if path != "/healthz" and not hmac.compare_digest(shown.removeprefix("tml-").encode(), token.encode()):
                return _json(
                    {
                        "detail": "this server needs its key: TINKER_API_KEY=tml-TOKEN, with the content of the "
                        "token file that it names at its start"
                    },
                    401,
                )
            try:
                return await handle(request)
            except RefusedRequest as error:
                return _json({"detail": error.message}, error.status)
            except DataError as error:
                return _json({"detail": str(error)}, 400)
            except (TypeError, ValueError, AttributeError, KeyError) as error:  # a field of another type than expected
                return _json({"detail": f"the request cannot be read: {error!r}"}, 400)

        return Route(f"/api/v1{path}", guarded, methods=[method])

    async def forward_backward(request: Request) -> Response:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RefusedRequest("this server takes bodies without compression", 415)
        return _json(tinker.forward_backward(await body(request)))

    async def retrieve(request: Request) -> Response:
        key = str((await values(request)).get("request_id"))
        found = await tinker.fetch(key)
        if found is None:
            return _json({"type": "try_again", "request_id": key, "queue_state": "active"}, 408)
        return Response(found, media_type=PROTOBUF) if isinstance(found, bytes) else _json(found)

    async def finish(request: Request) -> Response:
        await tinker.end(request.path_params["id"])
        return _json({})

    async def sampler(request: Request) -> Response:
        id = request.path_params["id"]
        return _json({"sampler_id": id, "base_model": tinker.name, "model_path": tinker.sampler(id).path})

    async def healthz(_: Request) -> Response:
        return _json({"status": "ok"})

    async def capabilities(_: Request) -> Response:
        context = tinker.context
        one = {"model_name": tinker.name, "max_context_length": context, "trainable": True, "sampleable": True}
        return _json({"supported_models": [one]})

    def heartbeat(given: dict[str, Any]) -> dict[str, Any]:
        tinker.session(given.get("session_id"))
        return {"type": "session_heartbeat"}

    def get_info(given: dict[str, Any]) -> dict[str, Any]:
        model = tinker.model(given.get("model_id"))
        adapters = model.trained.lora if model.trained else None
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_name": tinker.name,
            "is_lora": adapters is not None,
            "lora_rank": adapters and adapters.rank,
            "model_data": tinker.described(),
        }

    def weights_info(given: dict[str, Any]) -> dict[str, Any]:
        about = tinker.about(given.get("tinker_path"))
        adapters = about["lora"] or {}
        return {
            "base_model": tinker.name,
            "is_lora": bool(adapters),
            "lora_rank": adapters.get("rank"),
            "train_unembed": False,
            "train_mlp": any("mlp" in name for name in adapters.get("targets", ())),
            "train_attn": any("attn" in name for name in adapters.get("targets", ())),
        }

    def cancel(given: dict[str, Any]) -> dict[str, Any]:
        tinker.cancel(str(given.get("request_id")))
        return {}

    def create_session(_: dict[str, Any]) -> dict[str, Any]:
        return {"type": "create_session", "session_id": tinker.begin(), "info_message": NOTICE}

    def create_sampling_session(given: dict[str, Any]) -> dict[str, Any]:
        return {"type": "create_sampling_session", "sampling_session_id": tinker.begin_sampling(given)}

    # The SDK's other transport would add nothing on one connection; without it, errors read the same everywhere.
    config = {"use_pyqwest_transport": False}
    return Starlette(
        routes=[
            _guarded("/healthz", healthz, "GET"),
            _guarded("/get_server_capabilities", capabilities, "GET"),
            route("/client/config", lambda _: config),
            route("/client/dynamic_config", lambda _: {"sample_cancel_enabled": True}),
            route("/telemetry", lambda _: {"status": "accepted"}),
            route("/create_session", create_session),
            route("/session_heartbeat", heartbeat),
            _guarded("/sessions/{id}/finish", finish, "POST"),
            route("/create_model", tinker.create),
            route("/unload_model", tinker.unload),
            route("/get_info", get_info),
            _guarded("/forward_backward", forward_backward, "POST"),
            route("/optim_step", tinker.step),
            route("/save_weights", tinker.save),
            route("/load_weights", tinker.load),
            route("/weights_info", weights_info),
            route("/save_weights_for_sampler", tinker.save_for_sampler),
            route("/create_sampling_session", create_sampling_session),
            _guarded("/samplers/{id}", sampler, "GET"),
            route("/asample", tinker.sample),
            route("/cancel_future", cancel),
            _guarded("/retrieve_future", retrieve, "POST"),
        ]
    )


NOTICE = (
    "JaxRoll adapts attention and MLP (never the unembedding). This loop is yours: no store bounds its staleness, and "
    "models that you do not save end with their session."
)


async def play(tinker: Tinker, listening: socket.socket, token: str, stop: asyncio.Event) -> None:
    """Serve `tinker` on `listening` until `stop`."""
    served = http.serve(app(tinker, token), listening)
    jobs = [asyncio.ensure_future(job) for job in (served, tinker.watch(), stop.wait())]
    try:
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        for job in jobs:
            if job.done():
                job.result()
    finally:
        for job in jobs:
            job.cancel()
        for session in list(tinker.sessions):
            tinker.forget(session)
        await asyncio.gather(*jobs, return_exceptions=True)


def main(args: RoleArgs, options: argparse.Namespace) -> int:
    """Run the server until a stop signal; return 0. RUN/tinker.addr then holds its URL."""
    config, run_dir, paths = folders.with_transfer_deadline(args.config), args.run_dir, args.paths
    secret = protocol.load_secret(run_dir)
    token_file = Path(options.token_file) if options.token_file else paths.http_token
    token = http.token(None if options.token_file else secret, token_file)
    listening = http.listen(options.host, options.port, insecure=options.insecure)
    device, loop = DeviceThread(), LoopThread("tinker")
    trainer = Trainer(config, run_dir)
    transfer = replace(config.transfer, channel="tcp", dtype="float32")  # adapters are small, and rounding would add up
    with Publisher(transfer, run_dir, token=protocol.bearer(secret, "sampler") if secret else "") as publisher:

        async def serve() -> None:
            sampler = RawClient(
                SERVICE,
                paths.tinker_sampler_address,
                role="learner",
                name="tinker",
                token=secret,
                patience_s=PATIENCE_S,
                max_message_bytes=max_message_bytes(config),
            )
            name = options.name or (model_folder(config) or run_dir).name
            tinker = Tinker(name, trainer, device, sampler, publisher, paths.tinker, options.session_timeout)
            connect = (http.address(options.host, listening), name, str(token_file))
            disk.replace_text(paths.tinker_url, "\t".join(connect) + "\n")
            try:
                await play(tinker, listening, token, stop)
            finally:
                await sampler.close()

        stop = asyncio.Event()
        serving = loop.start(serve())
        serving.add_done_callback(lambda _: device.stop())
        lifeline.on_stop_set(stop, loop.loop)
        device.run()
        serving.result(timeout=10)
        loop.close()
    return 0


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")
