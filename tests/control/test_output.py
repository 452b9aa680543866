"""Output and observers: when showing fails, a run continues and a command ends with one line."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxroll import lifeline, metrics
from jaxroll.config import SupervisorConfig
from jaxroll.control import live
from jaxroll.control.child import last_error, out_of_memory, tail
from jaxroll.control.live import PlainView
from jaxroll.control.program import ProcessSpec
from jaxroll.control.supervisor import Guarded, Supervisor
from jaxroll.report import inspect, sections
from tests.harness.cluster import disks

PATIENCE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
OTHER_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # ASCII, as far as Python knows


# --- observers


class Broken:
    """An observer that raises at every call except for rows of the kind `fine`."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def rows(self, rows) -> None:
        if any(row.get("kind") != "fine" for row in rows):
            raise ValueError("no such row")
        self.seen += rows

    def tick(self, processes) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def say(self, text: str) -> None:
        raise UnicodeEncodeError("latin-1", "…", 0, 1, "ordinal not in range(256)")


def test_an_observer_that_raises_is_reported_once_and_costs_the_row_alone() -> None:
    broken, reports = Broken(), []
    guarded = Guarded(broken, reports.append)
    guarded.rows([{"kind": "bad"}, {"kind": "fine"}, {"kind": "bad"}, {"kind": "fine"}])
    for _ in range(3):
        guarded.tick([])
        guarded.say("hello")
    assert broken.seen == [{"kind": "fine"}] * 2
    assert guarded.failures == {"rows": 2, "tick": 3, "say": 3}
    assert len(reports) == 3 and all(name in text for name, text in zip(("rows", "tick", "say"), reports, strict=True))


def supervised(run_dir: Path, code: str, observer) -> int:
    """Supervise a run whose learner is the Python program `code`; return the exit code."""
    spec = ProcessSpec("learner", "learner", (sys.executable, "-c", code), {})
    return Supervisor([spec], run_dir, SupervisorConfig(backoff_s=0.05, max_restarts=0, stop_s=20.0), observer).run()


@pytest.mark.process
def test_a_run_completes_though_its_view_fails(tmp_path: Path) -> None:
    lines = b'{"kind":"step","step":null}\n{"kind":[]}\n\xff\xfe\n{"t":1e400}\n{"kind":"fine","t":1}\n'
    code = f"open({str(tmp_path / 'metrics.jsonl')!r}, 'ab').write({lines!r})"
    broken = Broken()
    assert supervised(tmp_path, code, broken) == 0
    assert broken.seen == [{"kind": "fine", "t": 1}]
    events = [row["text"] for row in metrics.read(tmp_path / "metrics.jsonl") if row.get("kind") == "event"]
    assert sum("`tick`" in text for text in events) == 1


@pytest.mark.process
def test_a_run_completes_though_its_metrics_file_is_replaced_by_a_folder(tmp_path: Path, capsys) -> None:
    file = tmp_path / "metrics.jsonl"
    code = f"import os; os.unlink({str(file)!r}); os.mkdir({str(file)!r}); import time; time.sleep(0.5)"
    assert supervised(tmp_path, code, PlainView(tmp_path, 5)) == 0
    assert capsys.readouterr().out.count("goes on without showing steps") == 1


@pytest.mark.process
def test_much_output_of_a_child_goes_to_its_log_and_its_end_is_shown_in_short(tmp_path: Path, capsys) -> None:
    code = (
        "import sys\nfor i in range(10_000): print('line', i, file=sys.stderr)\n"
        "print('x' * 50_000_000, file=sys.stderr)\nprint('\\x1b[2J the end', file=sys.stderr)\nsys.exit(3)"
    )
    assert supervised(tmp_path, code, PlainView(tmp_path, 5)) == 1
    log, shown = tmp_path / "logs" / "learner.log", capsys.readouterr().out
    assert log.stat().st_size > 50_000_000 and b"line 9999\n" in log.read_bytes()[:200_000]
    assert "\\x1b[2J the end" in shown and "\x1b" not in shown and len(shown) < 5000


@pytest.mark.process
def test_a_run_completes_though_there_is_no_room_for_its_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner.log").symlink_to("/dev/full")
    assert supervised(tmp_path, "pass", PlainView(tmp_path, 5)) == 0
    assert tail(tmp_path / "logs") == tail(tmp_path / "none") == ""


def test_tensorboard_on_a_full_disk_is_reported_once_and_the_run_continues(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "tb").write_text("in the way")
    view = PlainView(tmp_path, 5)
    row = {"kind": "stats", "role": "sampler-0", "t": 1.0, "tokens_per_s": 1.0}
    view.rows([row, row])
    assert view.events_lost == 2 and capsys.readouterr().out.count("TensorBoard") == 1
    (tmp_path / "tb").unlink()
    view.rows([row])
    assert view.events_lost == 2
    (file,) = (tmp_path / "tb").iterdir()
    size = file.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(view._events, "_file", Stuffed(view._events._file))
        view.rows([row])
    assert view.events_lost == 3 and file.stat().st_size == size  # no part of the record that did not fit
    view.rows([row])
    view.close()
    assert file.stat().st_size > size


def test_tensorboard_events_on_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    """As many rows are lost as are reported, and the file holds whole records only."""
    row = {"kind": "stats", "role": "sampler-0", "t": 1.0, "tokens_per_s": 1.0}
    view, rows = PlainView(tmp_path, 5), 0
    with disks.small_disk(tmp_path / "tb", 1) as disk:
        for fill, count in ((True, 3), (False, 3), (True, 200), (False, 3)):
            disk.fill() if fill else disk.free()
            view.rows([row] * count)
            rows += count
        view.close()
        (file,) = disk.path.iterdir()
        data, at, records = file.read_bytes(), 0, 0
    while at < len(data):
        at, records = at + 16 + int.from_bytes(data[at : at + 8], "little"), records + 1
    assert at == len(data) and 3 < view.events_lost < 203
    assert records == 1 + rows - view.events_lost


class Stuffed:
    """A file with room for three more bytes."""

    def __init__(self, file) -> None:
        self._file, self._left, self.truncate = file, 3, file.truncate

    def write(self, data) -> int:
        if not self._left:
            raise OSError(errno.ENOSPC, "No space left on device")
        written, self._left = self._file.write(data[: self._left]), 0
        return written


# --- metrics


def test_rows_that_cannot_be_written_are_dropped_counted_and_reported_once(tmp_path: Path, monkeypatch) -> None:
    path, lines = tmp_path / "metrics.jsonl", []
    tracker = metrics.JsonlTracker(path, lines.append)
    tracker.log({"a": 1})
    room, write = [5], os.write

    def full(fd: int, data) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written, room[0] = write(fd, bytes(data[: room[0]])), 0
        return written

    with monkeypatch.context() as patch:
        patch.setattr(metrics.os, "write", full)
        tracker.log({"a": 2})  # torn after five bytes
        tracker.log_all([{"a": 3}, {"a": 4}])
    tracker.log({"a": 5})
    tracker.log({"a": 6})
    tracker.close()
    follower = metrics.RowReader(path)
    rows = follower.rows()
    assert [row.get("a") for row in rows] == [1, None, 5, 6] and follower.skipped == 1
    assert rows[1]["kind"] == "event" and rows[1]["text"].startswith("3 ")
    assert len(lines) == 1 and "No space left" in lines[0]


def test_long_lines_are_skipped_without_being_held(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a":1}\n{"a":"')
        for _ in range(100):
            file.write(b"x" * 2**20)
        file.write(b'"}\n{"a":2}\n')
    follower = metrics.RowReader(path)
    tracemalloc.start()
    rows = [row for _ in range(30) for row in follower.rows()]  # a call does not read all of it
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == [{"a": 1}, {"a": 2}] == metrics.read(path)
    assert follower.skipped == 1 and peak < 6 * metrics.MAX_LINE_BYTES
    with path.open("ab") as file:
        file.write(b"y" * (2 * metrics.MAX_LINE_BYTES))  # and no newline
    assert metrics.read(path) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_metrics_path_that_is_not_a_file_is_an_error_of_the_run(tmp_path: Path, make) -> None:
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(metrics.ConfigError, match="unreadable"):
        metrics.read(tmp_path / "metrics.jsonl")


# --- streams


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        try:
            os.close(fd)
        except OSError:
            assert fd == ends[0]  # closed by the test


def test_an_outlet_discards_what_a_reader_that_left_does_not_take(pipe) -> None:
    reader, writer = pipe
    outlet = lifeline.Outlet(writer)
    assert outlet.write(b"abc") == 3 and os.read(reader, 9) == b"abc"
    os.close(reader)
    assert outlet.write(b"x" * 100) == 100 and outlet.write(b"y") == 1
    assert outlet.error is not None and outlet.lost is None


def test_an_outlet_with_patience_discards_what_a_stalled_reader_does_not_take(pipe) -> None:
    reader, writer = pipe
    outlet = lifeline.Outlet(writer)
    outlet.patience_s = 0.05
    for _ in range(64):
        left = memoryview(b"x" * 4096)
        while left:
            left = left[outlet.write(left) :]
    taken = os.read(reader, 2**20)
    assert 0 < len(taken) < 64 * 4096
    assert outlet.write(b"again") == 5 and os.read(reader, 99) == b"again"
    assert outlet.error is None


@pytest.mark.parametrize("line", [b"x" * 79 + b"\n", b"\n"])
def test_an_outlet_discards_what_a_terminal_that_is_not_read_does_not_take(line: bytes) -> None:
    master, terminal = os.openpty()
    outlet = lifeline.Outlet(terminal)
    outlet.patience_s = 0.05
    data = line * (400_000 // len(line))

    def write() -> None:
        left = memoryview(data)
        while left:
            left = left[outlet.write(left) :]

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and outlet.error is None and os.get_blocking(terminal)
    shown = 0
    while select.select([master], [], [], 0.2)[0]:
        shown += len(os.read(master, 2**16))
    assert 0 < shown < len(data)
    assert outlet.write(b"again") == 5 and os.read(master, 99) == b"again"
    os.close(master)
    assert outlet.write(b"gone") == 4 and outlet.error is not None and outlet.lost is None
    outlet.close()
    os.close(terminal)


def test_an_outlet_keeps_the_error_of_a_full_disk() -> None:
    with open("/dev/full", "wb") as file:
        outlet = lifeline.Outlet(file.fileno())
        assert outlet.write(b"abc") == 3
        assert outlet.lost is not None and outlet.lost.errno == errno.ENOSPC


def shell(line: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command line with `pipefail`, in which `$J` is jaxroll."""
    given = os.environ | {"J": f"{sys.executable} -m jaxroll", "PYTHONPATH": str(ROOT)} | env
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        capture_output=True,
        env=given,
        timeout=PATIENCE_S,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        ("$J config --config=configs/demo.py | head -1", 0, b"{\n", b"reward: "),
        ("$J --help | true", 0, b"", b""),
        ("$J list /etc > /dev/full", 1, b"", b"error: stdout: No space left on device"),
        ("$J list /etc >&-", 0, b"", b""),
        ("$J list /etc >&- 2>&- <&-", 0, b"", b""),
        ("$J report /nowhere 2>/dev/full", 64, b"", b""),
    ],
)
def test_commands_end_quietly_whatever_their_output_is(line: str, code: int, out: bytes, err: bytes) -> None:
    done = shell(line)
    assert done.returncode == code and done.stdout == out
    assert done.stderr.startswith(err) and b"Traceback" not in done.stderr and b"ignored" not in done.stderr
    assert done.stderr.count(b"\n") == bool(err)


@pytest.mark.process
def test_a_command_in_another_locale_reads_and_writes_utf8(tmp_path: Path) -> None:
    folder = tmp_path / "läufe"
    folder.mkdir()
    done = shell(f"$J list '{folder}' && {sys.executable} -c 'import sys; print(sys.flags.utf8_mode)'", **OTHER_LOCALE)
    assert done.returncode == 0 and done.stderr == b""
    assert done.stdout.decode().splitlines() == [f"No runs in {folder}/.", "0"]


def test_the_program_is_restarted_at_most_once(monkeypatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(lifeline.locale, "getencoding", lambda: "ISO-8859-1")
    monkeypatch.setattr(lifeline.os, "execv", lambda _, argv: started.append(argv))
    monkeypatch.setenv(lifeline.UTF8_ENV, "0")
    if not sys.flags.utf8_mode:
        lifeline.ensure_utf8()
        assert len(started) == 1 and os.environ[lifeline.UTF8_ENV] == "1"
    lifeline.ensure_utf8()  # as the restarted program would if the interpreter had ignored the variable
    assert len(started) <= 1


def test_the_view_of_a_run_writes_to_any_terminal(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    outlet = lifeline.Outlet(writer)
    stream = lifeline._stream(None, outlet)
    stream.reconfigure(encoding="iso-8859-1", errors=stream.errors)  # as for a terminal of that locale
    view = live.PlainView(tmp_path, 5, out=stream)
    view.say("… α")
    assert os.read(reader, 99) == b"\\u2026 \\u03b1\n"
    os.close(reader)
    view.say("the reader has left")
    assert outlet.error is not None
    os.close(writer)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("Traceback:\n  File x\nMemoryError: 12 bytes\nended", "out of memory: MemoryError: 12 bytes"),
        ("terminate called\n  what():  std::bad_alloc", "out of memory: what():  std::bad_alloc"),
        ("JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes.",
         "out of memory: JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes."),
        ("OSError: [Errno 12] Cannot allocate memory", "out of memory: OSError: [Errno 12] Cannot allocate memory"),
        ("RESOURCE_EXHAUSTED: too many calls", ""),
    ],
)  # fmt: skip
def test_the_log_says_that_memory_was_missing(words: str, cause: str) -> None:
    assert out_of_memory(words) == cause


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("error: a: 1.\nerror: b: 2.\nbye", "error: b: 2."),
        ("Traceback (most recent call last):\n  File x\n    call()\n    ^^^\nKeyError: 1\nbye", "KeyError: 1"),
        ("error: a\nTraceback (most recent call last):\n  File x\nOSError\n\nDuring\n\n"
         "Traceback (most recent call last):\n  File y\nValueError: b\n  c", "ValueError: b"),
        ("  + Exception Group Traceback (most recent call last):\n  |   File x\n"
         "  | ExceptionGroup: two (1 sub-exception)\n  +-+---------------- 1 ----------------\n"
         "    | Traceback (most recent call last):\n    |   File y\n"
         "    | ValueError: of mine\n    +------------------------------------\n", "ValueError: of mine"),
        ("Fatal Python error: Segmentation fault\n\nThread 1:\n  File x", "Fatal Python error: Segmentation fault"),
        ("error: of the last process\n=== started now\nall is well", ""),
        ("error: \x1b[2J" + "x" * 10_000, "error: \\x1b[2J" + "x" * 186),
        ("an error: no", ""),
        ("error: a | b", "error: a | b"),
        ("Traceback (most recent call last):\n  File x\nTypeError: int | str", "TypeError: int | str"),
    ],
)  # fmt: skip
def test_the_last_error_of_a_log(tmp_path: Path, words: str, error: str) -> None:
    (tmp_path / "log").write_text(words)
    assert last_error(tmp_path / "log") == error


@pytest.mark.process
def test_a_restart_has_the_last_error_of_the_log(tmp_path: Path) -> None:
    code = "if not os.path.exists('again'): open('again', 'w'), sys.exit('error: the disk is full.')"
    line = f"import os, sys\nos.chdir({str(tmp_path)!r})\n{code}"
    spec = ProcessSpec("learner", "learner", (sys.executable, "-c", line))
    config = SupervisorConfig(max_restarts=1, backoff_s=0.05)
    assert Supervisor([spec], tmp_path, config, PlainView(tmp_path, 5), leader="learner").run() == 0
    (row,) = rows = [row for row in metrics.read(tmp_path / "metrics.jsonl") if row["kind"] == "restart"]
    assert row["error"] == "error: the disk is full." and "cause" not in row
    (shown,) = inspect._joins_and_leaves(rows, row["t"])
    assert shown["what"] == "ended with 1, started again; its last error: error: the disk is full."
    assert sections.EVENT_WORDS["restart"](row).startswith(f"learner (pid {row['pid']}) ended with 1")


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "cause"),
    [("bytes(1 << 60)", "out of memory: MemoryError"), ("os.abort()", "a library aborted it, as gRPC does")],
)
def test_a_process_without_memory_is_reported_with_that_cause(tmp_path: Path, end: str, cause: str) -> None:
    code = f"if not os.path.exists('again'): open('again', 'w'), {end}"
    spec = ProcessSpec("learner", "learner", (sys.executable, "-c", f"import os\nos.chdir({str(tmp_path)!r})\n{code}"))
    config = SupervisorConfig(max_restarts=1, backoff_s=0.05)
    assert Supervisor([spec], tmp_path, config, PlainView(tmp_path, 5), leader="learner").run() == 0
    (row,) = [row for row in metrics.read(tmp_path / "metrics.jsonl") if row["kind"] == "restart"]
    assert row["cause"].startswith(cause)
