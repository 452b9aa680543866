"""Bounds and descriptions of the schema's keys."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from jaxroll import config
from jaxroll.config.parsing import build, check_bounds
from jaxroll.config.schema import Config, ValueRange
from jaxroll.errors import ConfigError

PATH = Path(__file__).parents[2] / ".ci" / "config_keys.py"
_spec = importlib.util.spec_from_file_location("config_keys", PATH)
assert _spec is not None and _spec.loader is not None
config_keys = importlib.util.module_from_spec(_spec)
sys.modules["config_keys"] = config_keys
_spec.loader.exec_module(config_keys)


def bounded(kind: Any = Config, prefix: str = "") -> dict[str, tuple[type, ValueRange]]:
    """Type and bounds of every bounded key."""
    found: dict[str, tuple[type, ValueRange]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if is_dataclass(hint):
            found |= bounded(hint, f"{prefix}{name}.")
        for bounds in getattr(hint, "__metadata__", ()):
            found[f"{prefix}{name}"] = (hint.__origin__, bounds)
    return found


BOUNDED = bounded()


def test_the_page_of_keys_is_up_to_date() -> None:
    assert config_keys.PAGE.read_text(encoding="utf-8") == config_keys.page(), "run python .ci/config_keys.py"


def test_a_key_without_a_description_is_refused() -> None:
    source = "class RunConfig:\n    # Name.\n    name: str\n    seed: int\n"
    texts = config_keys.descriptions(source)
    assert texts == {("RunConfig", "name"): "Name.", ("RunConfig", "seed"): ""}
    with pytest.raises(SystemExit, match="seed"):
        config_keys.section("run", config.RunConfig, texts)


@pytest.mark.parametrize("key", BOUNDED)
def test_a_value_at_a_bound_is_accepted_and_one_beyond_it_is_refused(key: str) -> None:
    kind, bounds = BOUNDED[key]
    step = 1 if kind is int else 0.5
    assert (bounds.least is None) != (bounds.above is None) and bounds.most != math.inf
    beyond = [bounds.least - step] if bounds.least is not None else [bounds.above, (bounds.above or 0) - step]
    beyond += [bounds.most + step] if bounds.most is not None else []
    for value in beyond:
        with pytest.raises(ConfigError, match=f"^{key} = "):
            check_bounds(_with(key, value))
    for value in (bounds.least, bounds.most):
        if value is not None:
            check_bounds(_with(key, value))


def _with(key: str, value: float) -> Config:
    """The default config with another value, unchecked."""
    values = config.to_dict(Config())
    *path, last = key.split(".")
    here = values
    for name in path:
        here = here[name]
    here[last] = value
    return build(Config, json.loads(json.dumps(values)))
