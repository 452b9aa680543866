"""Digests of the arrays in the learner's newest checkpoint."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.harness.cluster.real_roles import World


def digests(run: World) -> dict[str, str]:
    """A digest of every array of the newest checkpoint, by name: parameters, optimizer moments, counters.

    Parameters have the checksum of `jaxroll.transfer.manifest`, which samplers verify; the others a digest of their
    bytes.
    """
    import jax

    from jaxroll import sharding as layouts
    from jaxroll.learner import state
    from jaxroll.learner.checkpoint import Checkpoints
    from jaxroll.roles import build
    from jaxroll.transfer import manifest as manifests

    config = run.config
    layout = layouts.Layout(layouts.build(config.learner.mesh), layouts.LEARNER)
    spec = build.model_spec(config, build.tokenizer(config))
    abstract = state.abstract(spec, layout, state.build(config.learner).transform)
    checkpoints = Checkpoints(run.run_dir / "checkpoints", 1)
    newest = checkpoints.latest()
    assert newest is not None and newest.step == config.schedule.steps, f"the newest checkpoint is {newest}"
    restored, _ = checkpoints.restore(newest, abstract)
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(restored)[0]:
        host, name = np.asarray(leaf), jax.tree_util.keystr(path)
        if name.startswith(".params"):
            found[name] = f"{manifests.of_box(host, manifests.whole(host.shape)):016x}"
        else:
            found[name] = hashlib.blake2b(host.tobytes(), digest_size=16).hexdigest()
    return found
