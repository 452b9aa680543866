"""The store role: the trajectory server, fed by a prompt feeder child.

One event loop serves everything; one writer thread commits the log (see `jaxroll.store`). It waits for nobody: every
other role connects to it. It ends on SIGTERM, SIGINT or SIGHUP, or when the run is closed and the supervisor stops it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from jaxroll import lifeline
from jaxroll.config import Config, RoleArgs
from jaxroll.errors import ConfigError
from jaxroll.models import folders
from jaxroll.roles.feeder import FeederProcess
from jaxroll.store.server.server import serve
from jaxroll.text import tokenizers


def main(args: RoleArgs) -> None:
    """Serve the run in `args.run_dir` until told to stop."""
    asyncio.run(_serve(args))


async def _serve(args: RoleArgs) -> None:
    feeder = FeederProcess(args.run_dir)
    host, _, port = (args.store_address or "127.0.0.1:0").rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError("--store", args.store_address, "not HOST:PORT", "Write --store=127.0.0.1:7077, say.")
    serving = asyncio.ensure_future(
        serve(args.config, args.run_dir, feeder, host=host, port=int(port), ready=_announce, insecure=args.insecure,
              vocab_size=Vocabulary(args.config, args.run_dir))
    )  # fmt: skip
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:  # a second cancellation would interrupt the orderly end that the first one began
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
    """The number of the model's token ids, as far as it can be known here without JAX and the task's data."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config, self._run_dir, self._size = config, run_dir, 0

    def __call__(self) -> int:
        """That number; 0 where it is not known (yet).

        A `char` tokenizer is known before the first member is put: the feeder notes its alphabet before its first
        prompt. Of a model by its size with a tokenizer of kind `hf` the number stays unknown: the store loads none.
        """
        if not self._size:
            try:
                self._size = self._found()
            except ConfigError:  # the folder stands on other hosts, say; who needs it names what is wrong with it
                return 0
        return self._size

    def _found(self) -> int:
        model, kind = self._config.model, self._config.tokenizer
        if model.path:
            return folders.described(Path(model.path)).vocab_size
        text = tokenizers.of_run(self._run_dir, kind) if kind.kind == "char" else None
        return folders.spec(model, text.vocab_size).vocab_size if text else 0


def _announce(address: str) -> None:
    print(f"store: serving on {address}", flush=True)
