"""The sections of a recipe: one pydantic model each, one sentence per field."""

from hlat.config.sections.architectures import (
    ARCHITECTURES,
    OPTIONS,
    ArchitectureEntry,
    exported_family,
    with_fixed_options,
    written_fields,
)
from hlat.config.sections.base import ComponentSection, Section
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
    compile_obstacle,
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
from hlat.config.sections.tracking import TrackingConfig
from hlat.config.sections.training import (
    BatchConfig,
    EvaluationConfig,
    OptimizerConfig,
    PrecisionConfig,
    RampStage,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)

__all__ = [
    "ARCHITECTURES",
    "INTERLEAVED",
    "MOST_LAYERS",
    "MOST_TOKENS",
    "OPTIONS",
    "WIDEST",
    "ZERO_BUBBLE",
    "AnomalyConfig",
    "ArchitectureEntry",
    "BatchConfig",
    "CheckpointConfig",
    "ComponentSection",
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
    "compile_obstacle",
    "default_virtual_stages",
    "exported_family",
    "refuse_faults",
    "resolved_virtual_stages",
    "with_fixed_options",
    "written_fields",
]
