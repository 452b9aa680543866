"""What the command line hands to a role."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxroll.config.files import digest
from jaxroll.config.schema import Config


@dataclass(frozen=True)
class RoleArgs:
    """What a role's `main` is given. Without `store_address` the address stands in `run_dir/store.addr`.

    For the store itself `store_address` is where it listens (default: any free port of the loopback). `index` is which
    of several samplers, actors or hosts of the learner; `coordinator` is where those hosts meet, HOST:PORT (None: JAX
    finds that out; port 0: any, which stands in `run_dir/learner.addr`). `host` is the name under which samplers reach
    the learner, or actors a sampler, which listens for them on `port` (0: any). `samplers` are their addresses, for an
    actor that does not find them in `run_dir`. What goes beyond the loopback takes certificates (`jaxroll.rpc.tls`), or
    `insecure`: plain text. `fork` is for the learner: the checkpoint to fork the run at, as STEP@NAME (see
    `jaxroll.roles.restoring`); None resumes.
    `rest` holds the words of the command line that are not options of the command itself (the prompt of `generate`).
    """

    config: Config
    run_dir: Path
    store_address: str | None = None
    index: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    samplers: tuple[str, ...] = ()
    insecure: bool = False
    fork: str | None = None
    coordinator: str | None = None
    rest: tuple[str, ...] = ()

    @property
    def config_digest(self) -> str:
        """The digest every role shows to the store."""
        return digest(self.config)
