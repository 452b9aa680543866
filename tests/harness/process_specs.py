"""Process specs of example runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxroll.config import Config, LearnerConfig, MeshConfig, PlacementConfig, SamplerConfig
from jaxroll.config.rules import Inventory
from jaxroll.control import program

UNEQUAL = replace(
    Config(),
    learner=LearnerConfig(mesh=MeshConfig(fsdp=2)),
    sampler=SamplerConfig(count=2, mesh=MeshConfig(tensor=2)),
)
COLOCATED = replace(Config(), placement=PlacementConfig(colocated=True))
INVENTORIES = {
    "cpu": Inventory("cpu"),
    "tpu": Inventory("tpu", chips=8),
    "gpus": Inventory("gpu", gpus=8, gpu_memory_mb=80_000),
    "one_gpu": Inventory("gpu", gpus=1, gpu_memory_mb=80_000),
    "one_chip": Inventory("tpu", chips=1),
}


def built(name: str) -> tuple[program.ProcessSpec, ...]:
    settings = {"one_gpu": Config(), "one_chip": COLOCATED}.get(name, UNEQUAL)
    return program.build(settings, Path("/r/run"), INVENTORIES[name], python="python", cache_dir=Path("/r/cache"))
