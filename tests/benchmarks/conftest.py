"""Fixtures for the tests of the benchmarks."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import pytest


@pytest.fixture
def report() -> ModuleType:
    return importlib.import_module("benchmarks.lib.report")
