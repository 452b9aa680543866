"""`jaxroll serve`: the newest weights of a run, or a model's folder, behind OpenAI's HTTP interface."""

from __future__ import annotations

import argparse
import asyncio
from concurrent.futures import Future
from pathlib import Path

from jaxroll import lifeline
from jaxroll.config import RoleArgs
from jaxroll.config.derived import longest_prompt, request_tokens
from jaxroll.errors import ConfigError
from jaxroll.records import Version
from jaxroll.rpc import http, protocol
from jaxroll.serving import http_answers, http_requests, http_server, weight_updates
from jaxroll.serving.engine_thread import EngineProxy
from jaxroll.tools import generate


def main(args: RoleArgs, options: argparse.Namespace) -> int:
    """Serve until a stop signal and return 0. `options` are those of the command line."""
    config, paths = args.config, args.paths
    listening = http.listen(options.host, options.port, insecure=options.insecure)
    of_run = paths.run_file.exists()
    secret = protocol.load_secret(args.run_dir) if of_run else None
    token_file = (
        Path(options.token_file)
        if options.token_file
        else (paths.http_token if of_run else http.user_token_file(paths.http_token.name))
    )
    token = http.token(None if options.token_file else secret, token_file)
    longest = longest_prompt(config)
    context = request_tokens(config) if options.context is None else options.context
    if context <= longest:
        reason = f"the config's longest prompt has {longest} tokens, and an answer needs one more"
        raise ConfigError("--context", context, reason, "Give a larger number, or leave it out.")
    model = generate.load(config, args.run_dir, slots=options.slots, max_tokens=context - longest)
    engine = model.host.engine
    url = http.address(options.host, listening)
    name = options.name or args.run_dir.name

    stop = Future[None]()
    lifeline.on_stop(lambda: stop.done() or stop.set_result(None))

    def version() -> Version:
        return engine.version or model.version

    async def play(proxy: EngineProxy) -> None:
        updates = weight_updates.WeightUpdates(model.read, model.use, version, 2 * model.size_bytes)
        room = http_requests.Room(context, model.tokenizer)
        served = http_answers.Served(
            name, proxy, room, version, engine.stats, engine.latencies.percentiles, options.slots + options.queue,
            options.slots,
        )  # fmt: skip
        front = http_server.FrontEnd(served, token, weight_updates.routes(updates))
        serving = asyncio.ensure_future(http.serve(front.app, listening))
        print(f"weights: {model.source}")
        print(f"serves {name} on {url}/v1, token in {token_file}", flush=True)
        await asyncio.wait([serving, asyncio.wrap_future(stop)], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        updates.discard()

    generate.ask(model, play, limit_s=None)
    return 0
