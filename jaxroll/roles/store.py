"""The store role: the trajectory server, fed by a prompt feeder child.

One event loop serves everything; one writer thread commits the log (see `jaxroll.store`). It waits for nobody: every
other role connects to it. It ends on SIGTERM, SIGINT or SIGHUP, or when the run is closed and the supervisor stops it.
"""

from __future__ import annotations

import asyncio

from jaxroll import lifeline
from jaxroll.config import RoleArgs
from jaxroll.errors import ConfigError
from jaxroll.roles.feeder import FeederProcess
from jaxroll.store.server.server import serve


def main(args: RoleArgs) -> None:
    """Serve the run in `args.run_dir` until told to stop."""
    asyncio.run(_serve(args))


async def _serve(args: RoleArgs) -> None:
    feeder = FeederProcess(args.run_dir)
    host, _, port = (args.store_address or "127.0.0.1:0").rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError("--store", args.store_address, "not HOST:PORT", "Write --store=127.0.0.1:7077, say.")
    serving = asyncio.ensure_future(
        serve(args.config, args.run_dir, feeder, host=host, port=int(port), ready=_announce, insecure=args.insecure)
    )
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


def _announce(address: str) -> None:
    print(f"store: serving on {address}", flush=True)
