"""The reference model: a frozen copy of the parameters that a run starts from, on the learner's own mesh.

It lies beside the parameters, or in the host's memory and on the devices only while it is used. No checkpoint holds it:
a run that goes on makes it again from what it started with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from jaxroll.config import LearnerConfig
from jaxroll.learner.state import Params

HOST_MEMORY = "pinned_host"


class Reference:
    """The frozen parameters; `params()` lends them."""

    def __init__(self, params: Params, *, offload: bool) -> None:
        self._shardings = {name: value.sharding for name, value in params.items()}
        # Copied: a step donates the parameters that it replaces.
        self._kept = _on_host(params) if offload else jax.tree.map(jnp.copy, params)
        self.offload = offload

    @classmethod
    def of(cls, learner: LearnerConfig, params: Params) -> Reference | None:
        """The reference that the config asks for, made of `params`; None for none."""
        return None if learner.reference == "none" else cls(params, offload=learner.reference_offload)

    @property
    def memory_kinds(self) -> set[str]:
        """Where the parameters lie between two uses."""
        return {str(value.sharding.memory_kind) for value in self._kept.values()}

    @contextmanager
    def params(self) -> Iterator[Params]:
        """The parameters on the devices, until the block ends. Programs dispatched inside it keep what they need."""
        if not self.offload:
            yield self._kept
            return
        yield {name: jax.device_put(value, self._shardings[name]) for name, value in self._kept.items()}


def _on_host(params: Params) -> Params:
    """Copies in the memory of the hosts, each device's part beside it."""
    return {
        name: jax.device_put(value, value.sharding.with_memory_kind(HOST_MEMORY), may_alias=False)
        for name, value in params.items()
    }
