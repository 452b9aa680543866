"""One process of a learner whose mesh spans several: it trains on the claims of a file and writes the results.

python learner_host.py FOLDER INDEX PROCESSES COORDINATOR
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxroll import lifeline, sharding, wire
from jaxroll.config import Config, LearnerConfig, MeshConfig, ScheduleConfig
from jaxroll.learner import checkpoint_files
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.trainer import Trainer
from jaxroll.models import families, params
from jaxroll.models.folders import Converted, Index
from jaxroll.records import Claim, Version
from tests.harness.programs.weight_hosts import published

VOCAB = 24
KEPT = ("grpo on parameters", "critic on parameters", "lora on heads")  # the cases that write checkpoints


def config_of(options: dict) -> Config:
    """The config of the learner options in the folder."""
    mesh = MeshConfig(**options.pop("mesh"))
    fields = {"micro_batch_rows": 4, "row_tokens": 64, "learning_rate": 1e-2, "warmup_steps": 1}
    return Config(
        schedule=ScheduleConfig(alpha=1.0, groups_per_step=4, group_size=4),
        learner=dataclasses.replace(LearnerConfig(), mesh=mesh, **(fields | options)),
    )


class Counted(Converted):
    """Arrays of which the bytes of the slices that are read are counted."""

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        super().__init__(values, values.__getitem__, self._counted)
        self.values_by_name, self.read_bytes = values, 0

    def _counted(self, name: str, index: Index) -> np.ndarray:
        found = self.values_by_name[name][index]
        self.read_bytes += found.nbytes
        return found


def kept(trainer: Trainer, folder: Path) -> None:
    """Write the state in all processes and read it again; a single process reads the state that two wrote before."""
    checkpoints, first, count = Checkpoints(folder, kept=9), jax.process_index() == 0, jax.process_count()
    version, abstract, state = Version(0, count), trainer.abstract_state(), trainer.state
    if first:
        checkpoints.save(version, 7, state)
        assert checkpoints.finished(wait=True) == [version]
        assert checkpoint_files.damage(checkpoints.path(version), durable=True) == ""
    else:
        checkpoints.write(version, 7, state, "")
    multihost_utils.sync_global_devices("it is whole")
    for written in (version, *(each for each in checkpoints.versions() if count == 1)):
        again = checkpoints.restore(written, abstract)[0] if first else checkpoints.read(written, abstract)
        both = zip(*map(jax.tree.leaves, sharding.fetched((state, again))), strict=True)
        for mine, theirs in both:
            np.testing.assert_allclose(mine, theirs, atol=0 if written == version else 2e-5)
    checkpoints.close()


def trained(
    options: dict, claims: list[Claim], folder: Path | None, results: Path
) -> tuple[list[dict], dict[str, np.ndarray]]:
    """The rows of the steps, and all parameters after them, which are those that are published.

    With a `folder` checkpoints are written to it; `results` is for what is published.
    """
    config = config_of(options)
    spec = families.spec("nano", vocab_size=VOCAB)
    trainer = Trainer(config, spec, sharding.build(config.learner.mesh), sharding.LEARNER, key=jax.random.key(0))
    drawn = np.random.default_rng(5)
    shapes = {name: leaf.shape for name, leaf in params.abstract(spec).items()}
    values = {name: 0.1 * drawn.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    trainer.set_params(counted := Counted(values))
    whole = sum(value.nbytes for value in values.values())
    if jax.process_count() > 1 and config.learner.mesh.fsdp == config.learner.mesh.devices:
        assert 0.4 * whole < counted.read_bytes < 0.6 * whole, (
            f"this process read {counted.read_bytes} of {whole} bytes"
        )
    trainer.warmup()
    rows = [trainer.train(claim) for claim in claims]
    if folder is not None:
        kept(trainer, folder)
    held = sharding.fetched(trainer.params())
    for channel in ("tcp", "shm", "tensorstore"):
        for name, value in published(trainer.params(), channel, results).items():
            np.testing.assert_array_equal(value, held[name], err_msg=f"published over {channel}: {name}")
    return rows, held


def main() -> None:
    """Train and write rows and parameters."""
    folder, index, processes, coordinator = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    lifeline.bind_from_env()
    jax.distributed.initialize(coordinator, processes, index, initialization_timeout=60)
    claims = [wire.decode(path.read_bytes(), Claim) for path in sorted(folder.glob("claim-*"))]
    for name, options in json.loads((folder / "options.json").read_text()).items():
        checkpoints = folder.parent / f"checkpoints {name}"
        rows, held = trained(options, claims, checkpoints if name in KEPT else None, folder / f"published {name}")
        np.savez(folder / f"{name}-{index}.npz", allow_pickle=False, **held)
        (folder / f"{name}-{index}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
