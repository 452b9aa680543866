"""Check that the arrays of a checkpoint can be opened, without JAX and without loading them.

Orbax writes the arrays of each process into a database of its own and then merges these into one. When it finds no
process's database (as under a path that its glob pattern does not match) it skips the merge and reports success.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_MANIFEST, _SHAPE = "manifest.ocdbt", ".zarray"


def problem(state: Path, arrays: Mapping[str, Iterable[Any]], *, every_byte: bool = False) -> str:
    """Why the arrays in the folder `state` cannot be opened; empty when they can.

    `arrays` holds dtype and shape by name, as the checkpoint describes itself. With `every_byte` all values are read.
    """
    import tensorstore  # 0.2 s, and only where a checkpoint is written or verified

    if not (state / _MANIFEST).is_file():
        return f"{state.name}/{_MANIFEST} is missing: the arrays cannot be opened"
    try:
        spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state}/"}}
        database = tensorstore.KvStore.open(spec).result()
        keys = {key.decode() for key in database.list().result()}
        found = Counter(key.rpartition("/")[0] for key in keys if not key.endswith(f"/{_SHAPE}"))
        for name, (_, *shape) in arrays.items():
            if f"{name}/{_SHAPE}" not in keys:
                return f"{state.name} does not hold {name}"
            described = json.loads(database[f"{name}/{_SHAPE}"])
            chunks = math.prod(math.ceil(size / part) for size, part in zip(shape, described["chunks"], strict=True))
            if list(shape) != described["shape"] or found[name] != chunks:
                return f"{state.name} does not hold all of {name}: {found[name]} of {chunks} parts of {shape}"
        for key in keys if every_byte else ():
            if not database.read(key).result().value:  # TensorStore reads a file that is gone as empty
                return f"{state.name} has lost the bytes of {key}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{state.name} cannot be opened ({type(error).__name__}: {error})"
    return ""
