"""The words about a disk that takes no more."""

import errno
import os
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


# --- files that are replaced at once

PACKAGE = Path(disk.__file__).parent


@pytest.mark.parametrize("synced", [False, True])
def test_a_replaced_file_holds_the_new_text_and_no_draft_is_left(tmp_path: Path, synced: bool) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    disk.replace_text(path, "neu: ü\n", synced=synced)
    assert path.read_text(encoding="utf-8") == "neu: ü\n" and os.listdir(tmp_path) == ["run.json"]


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with disk.replaced(path) as draft:
        draft.write_text("half")
        assert path.read_text() == "old"
        draft.write_text("whole")
    assert path.read_text() == "whole"


def test_an_error_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="half"), disk.replaced(path) as draft:
        draft.write_text("half")
        raise ValueError("half")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["run.json"]


def test_files_are_replaced_by_one_function() -> None:
    """Folders are renamed by `learner.weights.written_whole`, which needs no `os.replace`."""
    users = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "os.replace" in path.read_text()]
    assert users == ["disk.py"]


def test_a_file_for_which_the_disk_has_no_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a write has no file name; `remedy` would name the current folder's disk."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left") as raised:
        disk.replace_text(tmp_path / "report.html", "x")
    assert raised.value.filename == str(tmp_path / "report.html")
    disk.name_file(raised.value, tmp_path)
    assert raised.value.filename == str(tmp_path / "report.html"), "a name that is there stays"
