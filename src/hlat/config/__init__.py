"""The recipe: its sections, how it is read, and everything that can be wrong with it."""

from hlat.config.content import size_problem
from hlat.config.data import (
    DataConfig,
    PhaseConfig,
    SourceConfig,
    TokenizerConfig,
    ValidationSplitConfig,
)
from hlat.config.data_rules import LONGEST_PERIOD, whole_weights
from hlat.config.errors import Fix, Problem, RecipeError, short
from hlat.config.hf import hf_to_model
from hlat.config.hf_file import read_config_json
from hlat.config.layout_checks import CHECKS as LAYOUT_CHECKS
from hlat.config.model import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig
from hlat.config.notes import recipe_notes
from hlat.config.parallel import (
    INTERLEAVED,
    ZERO_BUBBLE,
    MemoryConfig,
    ParallelConfig,
    Schedule,
    default_virtual_stages,
)
from hlat.config.parsing import load_recipe, parse_recipe
from hlat.config.presets import PRESETS
from hlat.config.recipe import Recipe
from hlat.config.recovery import (
    AnomalyConfig,
    CheckpointConfig,
    FaultConfig,
    IntegrityConfig,
    LocalSnapshotsConfig,
    RecoveryConfig,
    refuse_faults,
)
from hlat.config.rules import model_problems
from hlat.config.schema import recipe_schema
from hlat.config.sections import (
    BatchConfig,
    EvaluationConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TrackingConfig,
    TrainingConfig,
)
from hlat.config.values import Check, Values, divisors, holds
from hlat.config.yamltext import YamlError, load_yaml
from hlat.runtime import (
    CheckpointError,
    CorruptionError,
    DataError,
    HlatError,
    LaunchError,
    LostError,
    NumericsError,
    PersistentCorruptionError,
    StorageError,
    is_url,
    secret_in,
    without_secrets,
)

__all__ = [
    "INTERLEAVED",
    "LAYOUT_CHECKS",
    "LONGEST_PERIOD",
    "PRESETS",
    "ZERO_BUBBLE",
    "AnomalyConfig",
    "BatchConfig",
    "Check",
    "CheckpointConfig",
    "CheckpointError",
    "CorruptionError",
    "DataConfig",
    "DataError",
    "EvaluationConfig",
    "FaultConfig",
    "Fix",
    "HlatError",
    "IntegrityConfig",
    "LaunchError",
    "LinearScaling",
    "Llama3Scaling",
    "LocalSnapshotsConfig",
    "LostError",
    "MemoryConfig",
    "ModelConfig",
    "NumericsError",
    "OptimizerConfig",
    "ParallelConfig",
    "PersistentCorruptionError",
    "PhaseConfig",
    "PrecisionConfig",
    "Problem",
    "Recipe",
    "RecipeError",
    "RecoveryConfig",
    "RopeConfig",
    "RunConfig",
    "Schedule",
    "ScheduleConfig",
    "SourceConfig",
    "StorageError",
    "TokenizerConfig",
    "TrackingConfig",
    "TrainingConfig",
    "ValidationSplitConfig",
    "Values",
    "YamlError",
    "default_virtual_stages",
    "divisors",
    "hf_to_model",
    "holds",
    "is_url",
    "load_recipe",
    "load_yaml",
    "model_problems",
    "parse_recipe",
    "read_config_json",
    "recipe_notes",
    "recipe_schema",
    "refuse_faults",
    "secret_in",
    "short",
    "size_problem",
    "whole_weights",
    "without_secrets",
]
