"""The parameters of a checkpoint on the host, one at a time, without the mesh and the devices they come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxroll.errors import CheckpointDamaged
from jaxroll.learner import checkpoint_files
from jaxroll.learner.checkpoint_files import STATE
from jaxroll.models.tensor_files import Converted


@contextmanager
def params(checkpoint: Path) -> Iterator[Converted]:
    """The parameters by flat name, each read when it is asked for.

    Every file is compared with its sum first: CheckpointDamaged when one is not what was written.
    """
    if wrong := checkpoint_files.damage(checkpoint):
        raise CheckpointDamaged(f"checkpoint {checkpoint} cannot be read ({wrong}); export another one")
    shapes = checkpoint_files.params(checkpoint_files.about(checkpoint))
    handler = ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler())
    with ocp.Checkpointer(handler) as reader:
        yield Converted(shapes, lambda name: _read(reader, checkpoint, name, *shapes[name]))


def _read(reader: ocp.Checkpointer, checkpoint: Path, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    key = f"params['{name}']"
    item = {key: jax.ShapeDtypeStruct(shape, np.dtype(dtype))}
    as_host_array = {key: ocp.RestoreArgs(restore_type=np.ndarray)}
    wanted = ocp.args.PyTreeRestore(item=item, restore_args=as_host_array, partial_restore=True)
    try:
        found = reader.restore(checkpoint, args=ocp.args.Composite(state=wanted))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointDamaged(f"{name} of checkpoint {checkpoint} cannot be read ({error})") from error
    return cast(np.ndarray, found[STATE][key])
