"""`jaxroll tinker-serve`: the processes of a Tinker server, each with its own devices, under the supervisor."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxroll.config import Config, RoleArgs
from jaxroll.control import program, run_dir, train
from jaxroll.control.program import ProcessSpec
from jaxroll.control.supervisor import ProcessView, Supervisor
from jaxroll.errors import EXIT_INTERRUPTED, ConfigError
from jaxroll.rpc import protocol

URL_FILE = "tinker.addr"  # URL, model and token file, once clients can connect
LEAST_S = 20.0  # of --session-timeout
PARTS = {"trainer": "learner", "sampler": "sampler-0"}  # with the names under which their devices are placed


class _Shown:
    """Prints the supervisor's sentences, and the URL once there is one."""

    def __init__(self, url_file: Path) -> None:
        self._url_file, self._shown = url_file, ""

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Ignore metrics rows: there are none."""

    def tick(self, processes: Sequence[ProcessView]) -> None:
        """Print how to connect, when that is known or has changed."""
        try:
            line = self._url_file.read_text(encoding="utf-8").strip()
        except OSError:
            return
        if line and line != self._shown:
            self._shown = line
            url, name, token_file = line.split("\t")
            print(
                f"serves {name} to clients of the Tinker API. To connect:\n"
                f"  export TINKER_BASE_URL={url} TINKER_API_KEY=tml-$(cat {token_file})",
                flush=True,
            )

    def say(self, text: str) -> None:
        """Print `text`."""
        print(text, flush=True)


def add_options(one: argparse.ArgumentParser) -> None:
    """The options of the command, in addition to those of every HTTP server."""
    one.usage = "jaxroll tinker-serve RUN|FOLDER [OPTIONS]"
    one.add_argument("--name", help="the name of the base model (default: that of its folder)")
    one.add_argument("--token-file", metavar="FILE", help="file of the clients' token (default: RUN/http.token)")
    one.add_argument(
        "--session-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="a client that is silent for this time ends, with its models (default: 120)",
    )
    one.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)  # in a child process


def run(config: Config, path: Path, options: argparse.Namespace, *, of_model: bool) -> int:
    """The whole server over the run folder `path`, or over the model's folder `path`; in a child one part of it.

    Weights saved from a model's folder are in runs/tinker-NAME.
    """
    if not options.session_timeout >= LEAST_S:
        raise ConfigError(
            "--session-timeout", options.session_timeout, "clients report every 10 seconds", f"Use {LEAST_S:g} or more."
        )
    if options.child:
        return child(config, path, options)
    if of_model:
        path = run_dir.shared(Path("runs") / f"tinker-{path.name}", config, options.words)
    return serve(config, path, options)


def serve(config: Config, path: Path, options: argparse.Namespace) -> int:
    """Serve from the run folder `path` until a stop signal; 0 then, otherwise the exit code of the failure."""
    inventory = train.find_inventory(config)
    devices = program.device_env(config, inventory, program.visible_gpus())
    common = program.common_env(str(program.default_cache_dir(path, os.environ)))
    command = (sys.executable, "-m", "jaxroll", "tinker-serve", f"--run={path}", *options.passed_on)
    specs = [
        ProcessSpec(part, name.partition("-")[0], (*command, f"--part={part}"), common | devices[name])
        for part, name in PARTS.items()
    ]
    with run_dir.locked(path):
        protocol.create(path)
        (path / URL_FILE).unlink(missing_ok=True)
        environ = {**os.environ, **run_dir.config_environment(path, config)}
        shown = _Shown(path / URL_FILE)
        print(f"starts a trainer and a sampler; their logs are in {path}/logs", flush=True)
        code = Supervisor(specs, path, config.supervisor, shown, leader="trainer", environ=environ).run()
    return 0 if code == EXIT_INTERRUPTED else code


def child(config: Config, path: Path, options: argparse.Namespace) -> int:
    """The trainer with its HTTP server, or the sampler, in this process."""
    if options.part == "sampler":
        from jaxroll.tinker import sampler

        return sampler.main(RoleArgs(config, path))
    from jaxroll.tinker import server

    return server.main(RoleArgs(config, path), options)
