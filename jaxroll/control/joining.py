"""`jaxroll sampler --join`: a further sampler of a running run, started by hand on any machine.

The store gives the run's config and a number that no other sampler has. This process then becomes that sampler: it is
replaced, because a sampler starts its scoring pool before anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import msgspec

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.control import preflight, run_dir
from jaxroll.errors import ConfigError
from jaxroll.run_paths import RunPaths
from jaxroll.store import client
from jaxroll.store.messages import Joined


def join(options: argparse.Namespace, runs: Path) -> int:
    """Replace this process by a sampler of the run that `--join` names. ConfigError if it cannot work here.

    `--join` is the address of the run's store, or the run's folder on this machine. Without that folder the sampler
    gets one of its own, RUN or a new one in `runs`. Token and certificates are in the environment or in the folder.
    """
    for name, value in (("--config", options.config), ("--store", options.store), ("--index", options.index)):
        if value:
            raise ConfigError(name, value, "a sampler that joins gets it from the store", f"Leave {name} out.")
    shared = Path(os.path.abspath(options.join)) if os.path.isdir(options.join) else None
    if shared is not None and options.run:
        raise ConfigError("RUN", options.run, f"{options.join} is the folder of this sampler", "Leave RUN out.")
    address = options.join if shared is None else _address(shared)
    own = Path(os.path.abspath(options.run)) if options.run else None
    joined = asyncio.run(client.joined(address, shared or own))
    config = _config(joined)
    preflight.check(config)
    path = shared or _own_folder(own, config, joined, options.words, runs)
    words = ["sampler", f"--run={path}", f"--store={address}", f"--index={joined.index}", f"--drain={options.drain}"]
    words += [f"--host={options.host}", f"--port={options.port}", *(["--insecure"] if options.insecure else [])]
    print(f"sampler-{joined.index} joins run {joined.run_id} at {address}; its folder is {path}", flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "jaxroll", *words])


def _address(shared: Path) -> str:
    try:
        return RunPaths(shared).store_address.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError("--join", str(shared), "no store has written its address here",
                          "Start the run first, or give the address of its store.") from error  # fmt: skip


def _config(joined: Joined) -> Config:
    values = msgspec.json.decode(joined.config)
    try:
        return configs.parse(values)
    except ConfigError as error:
        remedy = "Install the same JaxRoll, and the files and modules that the config names."
        raise ConfigError("--join", joined.run_id, f"the run's config is refused here: {error}", remedy) from error


def _own_folder(own: Path | None, config: Config, joined: Joined, words: list[str], runs: Path) -> Path:
    if own is None:
        return run_dir.create_unique(runs, f"sampler-{joined.index}", config, words)
    return run_dir.shared(own, config, words)
