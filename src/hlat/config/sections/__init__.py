"""The sections of a recipe: one pydantic model each, one sentence per field."""

from hlat.config.sections.base import Section
from hlat.config.sections.data import DataConfig
from hlat.config.sections.model import (
    MOST_LAYERS,
    MOST_TOKENS,
    WIDEST,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
)
from hlat.config.sections.parallel import (
    INTERLEAVED,
    ZERO_BUBBLE,
    MemoryConfig,
    ParallelConfig,
    Schedule,
    default_virtual_stages,
    resolved_virtual_stages,
)
from hlat.config.sections.recovery import (
    AnomalyConfig,
    CheckpointConfig,
    FaultConfig,
    IntegrityConfig,
    RecoveryConfig,
    refuse_faults,
)
from hlat.config.sections.training import (
    BatchConfig,
    EvaluationConfig,
    OptimizerConfig,
    PrecisionConfig,
    RampStage,
    RunConfig,
    ScheduleConfig,
    TrackingConfig,
    TrainingConfig,
)

__all__ = [
    "INTERLEAVED",
    "MOST_LAYERS",
    "MOST_TOKENS",
    "WIDEST",
    "ZERO_BUBBLE",
    "AnomalyConfig",
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "FaultConfig",
    "IntegrityConfig",
    "LinearScaling",
    "Llama3Scaling",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RampStage",
    "RecoveryConfig",
    "RopeConfig",
    "RunConfig",
    "Schedule",
    "ScheduleConfig",
    "Section",
    "TrackingConfig",
    "TrainingConfig",
    "default_virtual_stages",
    "refuse_faults",
    "resolved_virtual_stages",
]
