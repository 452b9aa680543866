"""The configuration: what can be set (`schema`), how text becomes typed values (`parsing`), what must not run together
(`rules`), and how files are read (`files`). Other packages import from here.
"""

from jaxroll.config.files import RoleArgs, canonical_json, defaults, digest, load, override, parse, read, to_dict
from jaxroll.config.rules import check
from jaxroll.config.schema import (
    MODEL_SIZES,
    Config,
    EvaluatorConfig,
    LearnerConfig,
    MeshConfig,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SamplerConfig,
    SamplingConfig,
    ScheduleConfig,
    SftConfig,
    StoreConfig,
    SupervisorConfig,
    TaskConfig,
    TokenizerConfig,
    TransferConfig,
    WeightSwap,
)

__all__ = [
    "MODEL_SIZES",
    "Config",
    "EvaluatorConfig",
    "LearnerConfig",
    "MeshConfig",
    "ModelConfig",
    "PlacementConfig",
    "RoleArgs",
    "RunConfig",
    "SamplerConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "SftConfig",
    "StoreConfig",
    "SupervisorConfig",
    "TaskConfig",
    "TokenizerConfig",
    "TransferConfig",
    "WeightSwap",
    "canonical_json",
    "check",
    "defaults",
    "digest",
    "load",
    "override",
    "parse",
    "read",
    "to_dict",
]
