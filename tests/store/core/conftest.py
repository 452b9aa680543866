"""Fixtures for the tests of the store's state machine."""

from __future__ import annotations

import pytest

from tests.harness.store.machine import Machine


@pytest.fixture
def machine() -> Machine:
    m = Machine()
    m.start()
    return m
