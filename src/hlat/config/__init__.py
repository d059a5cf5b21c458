"""The recipe: its sections, how it is read, and everything that can be wrong with it."""

from hlat.config.data import (
    DataConfig,
    PhaseConfig,
    SourceConfig,
    TokenizerConfig,
    ValidationSplitConfig,
)
from hlat.config.data_rules import LONGEST_PERIOD, whole_weights
from hlat.config.errors import Fix, Problem, RecipeError
from hlat.config.hf import hf_to_model
from hlat.config.model import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig
from hlat.config.parallel import MemoryConfig, ParallelConfig
from hlat.config.parsing import load_recipe, parse_recipe
from hlat.config.presets import PRESETS
from hlat.config.recipe import Recipe
from hlat.config.schema import recipe_schema
from hlat.config.sections import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TrackingConfig,
    TrainingConfig,
)
from hlat.config.urls import is_url, secret_in, without_secrets
from hlat.runtime import CheckpointError, DataError, HlatError, LaunchError, NumericsError, StorageError

__all__ = [
    "LONGEST_PERIOD",
    "PRESETS",
    "BatchConfig",
    "CheckpointConfig",
    "CheckpointError",
    "DataConfig",
    "DataError",
    "EvaluationConfig",
    "Fix",
    "HlatError",
    "LaunchError",
    "LinearScaling",
    "Llama3Scaling",
    "MemoryConfig",
    "ModelConfig",
    "NumericsError",
    "OptimizerConfig",
    "ParallelConfig",
    "PhaseConfig",
    "PrecisionConfig",
    "Problem",
    "Recipe",
    "RecipeError",
    "RopeConfig",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "StorageError",
    "TokenizerConfig",
    "TrackingConfig",
    "TrainingConfig",
    "ValidationSplitConfig",
    "hf_to_model",
    "is_url",
    "load_recipe",
    "parse_recipe",
    "recipe_schema",
    "secret_in",
    "whole_weights",
    "without_secrets",
]
