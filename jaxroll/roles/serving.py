"""A sampler's engine served to actors: where it listens, and when that ends.

RUN/sampler-0.addr holds the address. It waits for calls, and ends when the run is closed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from jaxroll.config.rules import episode_tokens
from jaxroll.roles.session import EngineSession
from jaxroll.rpc import auth, limits, tls
from jaxroll.rpc.server import RawServer
from jaxroll.serving import service

LOOK_S = 2.0  # between two looks whether the run is over
_GRACE_S = 0.5
_TOKEN_BYTES = 4  # of a prompt on the wire


def address_file(run_dir: Path, name: str) -> Path:
    """Where the address of the sampler `name` stands."""
    return run_dir / f"{name}.addr"


class Serving:
    """The service beside the engine of `session`."""

    def __init__(self, session: EngineSession) -> None:
        self._session, self._args, self._config = session, session.args, session.config
        self._service = service.Serving(
            session.proxy, session.parts.follower, run_id=session.store.welcome.run_id,
            config_digest=session.args.config_digest,
        )  # fmt: skip

    def loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """What is to run side by side until the run is over."""
        return (self._serve(), self._until_closed())

    def counts(self) -> dict[str, int]:
        """Requests of actors: held now, and answered since the start."""
        return {"open": self._service.open, "served": self._service.served}

    async def give_back(self) -> None:
        """Nothing is leased here."""

    async def _serve(self) -> None:
        args, kept = self._args, self._config.store
        server = RawServer(
            service.SERVICE, self._service.methods(), secret=auth.load_secret(args.run_dir),
            max_message_bytes=kept.max_message_mb * 2**20, tls=tls.load(args.run_dir), mutual_tls=kept.mutual_tls,
            calls_per_connection=limits.GENERATIONS_PER_CONNECTION,
            held_bytes=service.MAX_OPEN * _TOKEN_BYTES * episode_tokens(self._config),
        )  # fmt: skip
        port = server.bind(args.host, args.port, insecure=args.insecure)
        await server.start()
        try:
            address = limits.address(args.host, port)
            _write(address_file(args.run_dir, self._session.role), address)
            self._session.progress(f"serves actors on {address}")
            await asyncio.Event().wait()
        finally:
            await server.stop(_GRACE_S)

    async def _until_closed(self) -> None:
        while not (await self._session.store.status())["closed"]:
            await asyncio.sleep(LOOK_S)


def _write(path: Path, address: str) -> None:
    """Readers see the old address or the new one, never half of it."""
    draft = path.with_suffix(".addr.tmp")
    draft.write_text(address + "\n", encoding="utf-8")
    os.replace(draft, path)
