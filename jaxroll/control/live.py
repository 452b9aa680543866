"""Shows a run while it goes: a live table on a terminal, plain lines elsewhere, never ten silent seconds.

Both views keep a `Status`; both also write TensorBoard events, since every metrics row passes here.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from jaxroll.control import run_dir as run_dirs
from jaxroll.control.status import HEADINGS, Status
from jaxroll.control.supervisor import ProcessView
from jaxroll.metrics import TensorBoardTracker

SILENCE_S = 8.0
EVENTS_SHOWN = 4
_TERMINALS_OF_LINES = ("", "dumb", "unknown")  # values of TERM


class View:
    """Common to both views: folds rows into the status, writes TensorBoard events and the devices into run.json."""

    def __init__(self, run_dir: Path, of_steps: int, *, now: Callable[[], float] = time.time) -> None:
        self._run_dir, self._now = run_dir, now
        self.status = Status(of_steps)
        self._events: TensorBoardTracker | None = None
        self.events_lost = 0  # metrics rows that could not be written as TensorBoard events

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """New metrics rows."""
        for row in rows:
            if row.get("kind") == "devices":
                run_dirs.note_devices(self._run_dir, str(row.get("role")), row)
            self._tensorboard(row)
            line = self.status.take(row)
            if line:
                self._line(line, row)

    def tick(self, processes: Sequence[ProcessView]) -> None:
        """Called about ten times a second."""

    def say(self, text: str) -> None:
        """A sentence worth keeping."""

    def close(self) -> None:
        """Let go of files and terminal."""
        if self._events is not None:
            self._events.close()

    def _tensorboard(self, row: dict[str, Any]) -> None:
        if row.get("kind") not in TensorBoardTracker.SHOWN:
            return
        try:
            if self._events is None:
                self._events = TensorBoardTracker(self._run_dir / "tb")
            self._events.log(row)
        except OSError as error:
            self.events_lost += 1
            if self.events_lost == 1:
                self.say(
                    f"{self._run_dir / 'tb'}: {error.strerror}. TensorBoard events are lost until they can be written."
                )

    def _line(self, line: str, row: dict[str, Any]) -> None:
        """Show what a row is worth."""


class PlainView(View):
    """Lines for a pipe, a notebook or a log; when nothing happens for a while, a line says what is being waited for."""

    def __init__(
        self, run_dir: Path, of_steps: int, *, out: TextIO | None = None, now: Callable[[], float] = time.time
    ):
        super().__init__(run_dir, of_steps, now=now)
        self._out = out or sys.stdout
        self._last_print_s = now()

    def tick(self, processes: Sequence[ProcessView]) -> None:
        """Break the silence."""
        if self._now() - self._last_print_s >= SILENCE_S:
            self.say(f"… {self.status.doing(self._now(), processes)}")

    def say(self, text: str) -> None:
        """One line."""
        print(text, file=self._out, flush=True)
        self._last_print_s = self._now()

    def _line(self, line: str, row: dict[str, Any]) -> None:
        self.say(line)


class TableView(View):
    """A table of the latest steps, the latest events, and a spinner that says what the run is at."""

    def __init__(self, run_dir: Path, of_steps: int, *, console: Console | None = None,
                 now: Callable[[], float] = time.time):  # fmt: skip
        super().__init__(run_dir, of_steps, now=now)
        self._console = console or Console()
        self._recent: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._spinner = Spinner("dots", "starting")
        self._live = Live(self._render(), console=self._console, refresh_per_second=4)
        self._live.start()

    def tick(self, processes: Sequence[ProcessView]) -> None:
        """Redraw."""
        self._spinner.update(text=self.status.doing(self._now(), processes))
        self._live.update(self._render())

    def say(self, text: str) -> None:
        """A sentence above the table, where it stays."""
        self._live.console.print(Text(text))

    def close(self) -> None:
        """Leave the last table standing."""
        self._spinner.update(text="")
        self._live.update(self._render())
        self._live.stop()
        super().close()

    def _line(self, line: str, row: dict[str, Any]) -> None:
        if row.get("kind") != "step":
            self._recent.append(line)

    def _render(self) -> Group:
        table = Table(expand=False, title=str(self._run_dir), title_style="dim", title_justify="left")
        for heading in HEADINGS:
            last = heading == HEADINGS[-1]
            table.add_column(heading, justify="left" if last else "right", no_wrap=True, overflow="ellipsis")
        for line in self.status.steps:
            table.add_row(*line.cells(self.status.of_steps))
        return Group(*([table] if self.status.steps else []), *(Text(text, style="dim") for text in self._recent),
                     self._spinner)  # fmt: skip


def open_view(run_dir: Path, of_steps: int) -> View:
    """The table on a terminal that can move its cursor, lines elsewhere."""
    table = sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in _TERMINALS_OF_LINES
    return TableView(run_dir, of_steps) if table else PlainView(run_dir, of_steps)
