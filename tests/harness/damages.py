"""Damages of one file in a folder, for tests of bad input, and the outcome of a command."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxroll.control import cli, run_dir

Damage = Callable[[Path], object]
DEEP = b'{"config":' + b"[" * 100_000
LARGE_BYTES = run_dir.RUN_FILE_BYTES + 1


def writes(name: str, data: bytes) -> Damage:
    """Replace the run's file `name` by `data`."""

    def damage(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)

    return damage


def folder(name: str) -> Damage:
    """Replace the run's file `name` by a folder."""

    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return damage


def loop(name: str) -> Damage:
    """Replace the run's file `name` by a link to itself."""

    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(name)

    return damage


def pipe(name: str) -> Damage:
    """Replace the run's file `name` by a named pipe, which gives a reader nothing and no end."""

    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return damage


def too_large(name: str) -> Damage:
    """Make the run's file `name` larger than any that JaxRoll writes or reads as text."""

    def damage(run: Path) -> None:
        (run / name).touch(0o600)
        with (run / name).open("ab") as file:
            file.truncate(LARGE_BYTES)

    return damage


def outcome(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and stderr of a command that must not raise."""
    capsys.readouterr()
    try:
        code = cli.main(words)
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    return code, capsys.readouterr().err


async def stop_the_store(address: asyncio.Future[str], *_: object) -> None:
    """Send the stop signal as soon as the store serves; in place of the store's own watch."""
    await address
    signal.raise_signal(signal.SIGTERM)
