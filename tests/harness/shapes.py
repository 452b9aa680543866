"""The type checker behind jaxtyping's import hook: it checks functions with arrays of named shapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_CHECK = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float
_SHAPED = re.compile(r"\b(Bool|Float|Int|Integer|Key|Shaped|UInt)\[")


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, checked at every call if an annotation names a shape.

    The fields of a dataclass are not checked: a pytree may hold shapes, shardings, or what a tracer needs.
    """
    hints = getattr(function, "__annotations__", {}).values()
    shaped = any(_SHAPED.search(hint if isinstance(hint, str) else repr(hint)) for hint in hints)
    return _CHECK(function) if shaped and function.__name__ != "__init__" else function
