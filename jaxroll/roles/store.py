"""Store role: the trajectory server, with a prompt feeder as its child process.

Threads: the main thread runs the asyncio loop that serves all calls; a writer thread commits the log (`jaxroll.store`).
Tasks: serve calls; read prompts ahead from the feeder; expire leases and report metrics by the clock.
Waits for: prompts from the feeder; every other role connects to it.
Stops: on SIGTERM, SIGINT or SIGHUP, or some time after the run is closed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from jaxroll import lifeline
from jaxroll.config import Config, RoleArgs
from jaxroll.config.derived import model_folder, tokenizer_folder
from jaxroll.errors import ConfigError
from jaxroll.models import folders
from jaxroll.roles.feeder import FeederProcess
from jaxroll.store.server.server import serve
from jaxroll.text import tokenizers


def main(args: RoleArgs) -> None:
    """Serve the run in `args.run_dir` until a stop signal arrives or the run is closed."""
    asyncio.run(_serve(args))


async def _serve(args: RoleArgs) -> None:
    feeder = FeederProcess(args.run_dir)
    host, _, port = (args.store_address or "127.0.0.1:0").rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError("--store", args.store_address, "not HOST:PORT", "Write for example --store=127.0.0.1:7077.")
    serving = asyncio.ensure_future(
        serve(
            args.config,
            args.run_dir,
            feeder,
            host=host,
            port=int(port),
            ready=_announce,
            insecure=args.insecure,
            vocab_size=Vocabulary(args.config, args.run_dir),
        )
    )
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:  # a second cancellation would interrupt the orderly shutdown
            stopping = True
            serving.cancel()

    loop = asyncio.get_running_loop()
    for signum in lifeline.stop_signals():
        loop.add_signal_handler(signum, stop)
    try:
        await serving
    except asyncio.CancelledError:
        print("store: stopped", flush=True)
    finally:
        await feeder.close()


class Vocabulary:
    """Vocabulary size of the model, as far as it is known without JAX and the task's data."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config, self._run_dir, self._size = config, run_dir, 0

    def __call__(self) -> int:
        """The number of token ids; 0 if it is not known (yet).

        A `char` tokenizer is known before the first result is stored: the feeder writes its alphabet before the first
        prompt. For a model given by its size with an `hf` tokenizer it stays unknown: the store loads no tokenizer.
        """
        if not self._size:
            try:
                self._size = self._found()
            except ConfigError:  # the folder may be on other hosts; roles that need it report what is wrong
                return 0
        return self._size

    def _found(self) -> int:
        if folder := model_folder(self._config):
            return folders.described(folder).vocab_size
        text = None if tokenizer_folder(self._config) else tokenizers.of_run(self._run_dir, self._config.tokenizer)
        return folders.spec(self._config.model, text.vocab_size).vocab_size if text else 0


def _announce(address: str) -> None:
    print(f"store: serving on {address}", flush=True)
