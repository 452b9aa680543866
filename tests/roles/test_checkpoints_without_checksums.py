"""A learner restores a checkpoint. Without checksums it is damaged if it was durable; otherwise they are computed now.
With them, they are compared with what the disk holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.config import Config, RoleArgs
from jaxroll.errors import StaleClient
from jaxroll.learner import checkpoint_files
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.state import TrainState
from jaxroll.records import Version
from jaxroll.roles.learner import LearnerSession
from jaxroll.store.core.state import Lineage

SIZE = 4


def state_of(step: int) -> TrainState:
    return TrainState({"embed": jnp.full(SIZE, step, jnp.float32)}, (), jnp.int32(step))


class Bare:
    """As much of a trainer as a restored state needs."""

    lora = reference = None
    state: TrainState | None = state_of(9)

    def abstract_state(self) -> TrainState:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), state_of(0))

    def release(self) -> None:
        self.state = None

    def base_digest(self) -> str:
        return ""


def session_of(tmp_path: Path, steps: tuple[int, ...], said: list[str]) -> LearnerSession:
    """A session before it opens a store, with checkpoints of these steps."""
    session = LearnerSession.__new__(LearnerSession)
    session.args, session.config = RoleArgs(Config(), tmp_path), Config()
    session.checkpoints = Checkpoints(tmp_path / "checkpoints", kept=9)
    for step in steps:
        session.checkpoints.save(Version(0, step), step, state_of(step))
        session.checkpoints.wait()
    session.store = SimpleNamespace(  # type: ignore[assignment]
        welcome=SimpleNamespace(lineages=(Lineage(),))
    )
    session.progress = said.append  # type: ignore[assignment]
    return session


def test_bytes_that_the_disk_lost_are_not_restored_from_the_memory_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last writer received the error of the disk. A sync succeeds then, and only the disk shows the loss."""
    said: list[str] = []
    session = session_of(tmp_path, (2, 4), said)
    files = (path for path in session.checkpoints.path(Version(0, 4)).glob("state/**/*") if path.is_file())
    lost = max(files, key=lambda path: path.stat().st_size)

    def dropped(handle: int, start: int, size: int, advice: int) -> None:
        assert (start, size, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        if os.path.sameopenfile(handle, reader.fileno()):
            lost.write_bytes(bytes(lost.stat().st_size))

    monkeypatch.setattr(os, "posix_fadvise", dropped)
    with lost.open("rb") as reader:
        assert session._restore(Bare(), {"durable": 0, "claims": 6}) == Version(0, 2)  # type: ignore[arg-type]
    assert any("0000.00000004 cannot be read (state/" in text and "is not what was written" in text for text in said)
    session.checkpoints.close()


@pytest.mark.parametrize(("durable_steps", "restored"), [(0, 4), (2, 4), (4, 2), (6, 2)], ids=str)
def test_a_checkpoint_without_checksums_is_restored_unless_it_was_durable(
    tmp_path: Path, durable_steps: int, restored: int
) -> None:
    """Checkpoint 0.4 has no checksums: only the store knows if it was durable."""
    said: list[str] = []
    session = session_of(tmp_path, (2, 4), said)
    checkpoints = session.checkpoints
    newest = checkpoints.path(Version(0, 4))
    (newest / checkpoint_files.SUMS).unlink()
    trainer, restore = Bare(), checkpoints.restore

    def restored_into_nothing(*given, **named):
        assert trainer.state is None, "two states are in memory at once"
        return restore(*given, **named)

    checkpoints.restore = restored_into_nothing  # type: ignore[method-assign]
    status = {"durable": durable_steps, "claims": 6}
    assert session._restore(trainer, status) == Version(0, restored)  # type: ignore[arg-type]
    assert isinstance(trainer.state, TrainState)
    np.testing.assert_array_equal(trainer.state.params["embed"], np.full(SIZE, restored))
    assert any("0000.00000004 cannot be read (sums.json is gone" in text for text in said) == (restored == 2)
    assert (newest / checkpoint_files.SUMS).exists() == (restored == 4), "it counts from now on"
    assert restored == 2 or not checkpoint_files.damage(newest, durable=True)
    checkpoints.close()


def test_a_learner_that_was_replaced_removes_no_checkpoint(tmp_path: Path) -> None:
    """It was suspended in a write, and wakes after another one began from the checkpoint before."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", kept=1)
    session = LearnerSession.__new__(LearnerSession)
    session.config, session.checkpoints = Config(), checkpoints

    async def on_device(job: Callable[[], Any]) -> Any:
        return job()

    async def accepted(version: Version) -> None: ...

    async def refused(version: Version) -> None:
        raise StaleClient("another learner began after this one")

    session._on_device = on_device
    for step, durable in ((2, accepted), (4, refused)):
        session.store = SimpleNamespace(durable=durable)  # type: ignore[assignment]
        checkpoints.save(Version(0, step), step, state_of(step))
        with contextlib.suppress(StaleClient):
            asyncio.run(session._settle_durable(wait=True))
    assert Version(0, 2) in checkpoints.versions(), "its successor restores this one if it is killed"
    checkpoints.close()
