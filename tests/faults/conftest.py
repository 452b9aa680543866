"""The table of faults, printed when the tests are over: fault, injected, survived, lost, trained twice, max age."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.harness.cluster.criteria import Row, _place, table

_ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[Row], None]:
    """Put a row into the table."""
    return request.config.stash.setdefault(_ROWS, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if rows:
        terminalreporter.section("faults")
        for line in table(sorted(rows, key=_place)):
            terminalreporter.line(line)
