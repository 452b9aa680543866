"""The words about a disk that takes no more."""

import errno
import sqlite3
from pathlib import Path

import pytest

from jaxroll import disk
from jaxroll.control import cli, commands


@pytest.mark.parametrize(
    ("error", "remount"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), False),
        (sqlite3.OperationalError("database or disk is full"), False),
        (ValueError('RESOURCE_EXHAUSTED: Error writing "x": No space left on device [os_error_code=28]'), False),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (sqlite3.OperationalError("attempt to write a readonly database"), True),
        (sqlite3.OperationalError("disk I/O error"), True),
    ],
)
def test_the_disk_and_the_way_out_are_named(tmp_path: Path, error: Exception, remount: bool) -> None:
    said = disk.remedy(error, tmp_path / "not" / "made")
    assert f"MB are free at {tmp_path}: make room" in said and ("remount that disk" in said) == remount


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "No such file"), ValueError("1e400"), OSError("?")])
def test_other_errors_are_not_the_disk_s(tmp_path: Path, error: Exception) -> None:
    assert disk.remedy(error, tmp_path) == ""


def test_a_command_on_a_full_disk_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run.json"))

    monkeypatch.setitem(commands.COMMANDS, "doctor", full)
    assert cli.main(["doctor"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and str(tmp_path / "run.json") in line and "make room" in line


def test_another_error_of_the_system_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> int:
        raise OSError("as it happens")

    monkeypatch.setitem(commands.COMMANDS, "doctor", broken)
    with pytest.raises(OSError, match="as it happens"):
        cli.main(["doctor"])
