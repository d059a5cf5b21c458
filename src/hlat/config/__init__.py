"""The recipe: its sections, how it is read, and everything that can be wrong with it."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.config.errors import Fix as Fix
    from hlat.config.errors import Problem as Problem
    from hlat.config.errors import RecipeError as RecipeError
    from hlat.config.errors import short as short
    from hlat.config.errors import size_problem as size_problem
    from hlat.config.explanations import field_called as field_called
    from hlat.config.layout_checks import CHECKS as CHECKS
    from hlat.config.layout_checks import Check as Check
    from hlat.config.layout_checks import TracedValues as TracedValues
    from hlat.config.layout_checks import Values as Values
    from hlat.config.layout_checks import divisors as divisors
    from hlat.config.layout_checks import holds as holds
    from hlat.config.load import load_recipe as load_recipe
    from hlat.config.load import model_section as model_section
    from hlat.config.load import numbers_with_units as numbers_with_units
    from hlat.config.load import parse_recipe as parse_recipe
    from hlat.config.model_base import PRESETS as PRESETS
    from hlat.config.model_base import model_differences as model_differences
    from hlat.config.model_base import preset_called as preset_called
    from hlat.config.model_files import hf_to_model as hf_to_model
    from hlat.config.notes import SettingNote as SettingNote
    from hlat.config.notes import odd_settings as odd_settings
    from hlat.config.notes import recipe_notes as recipe_notes
    from hlat.config.nxdt import recipe_from_nxdt as recipe_from_nxdt
    from hlat.config.recipe import BatchSchedule as BatchSchedule
    from hlat.config.recipe import Recipe as Recipe
    from hlat.config.recipe import recipe_schema as recipe_schema
    from hlat.config.recipe_rules import LONGEST_PERIOD as LONGEST_PERIOD
    from hlat.config.recipe_rules import model_problems as model_problems
    from hlat.config.recipe_rules import whole_weights as whole_weights
    from hlat.config.sections.base import Section as Section
    from hlat.config.sections.data import DataConfig as DataConfig
    from hlat.config.sections.model import ARCHITECTURES as ARCHITECTURES
    from hlat.config.sections.model import LinearScaling as LinearScaling
    from hlat.config.sections.model import Llama3Scaling as Llama3Scaling
    from hlat.config.sections.model import ModelConfig as ModelConfig
    from hlat.config.sections.model import RopeConfig as RopeConfig
    from hlat.config.sections.model import exported_family as exported_family
    from hlat.config.sections.model import written_fields as written_fields
    from hlat.config.sections.operation import AnomalyConfig as AnomalyConfig
    from hlat.config.sections.operation import CheckpointConfig as CheckpointConfig
    from hlat.config.sections.operation import FaultConfig as FaultConfig
    from hlat.config.sections.operation import RecoveryConfig as RecoveryConfig
    from hlat.config.sections.operation import TrackingConfig as TrackingConfig
    from hlat.config.sections.operation import refuse_faults as refuse_faults
    from hlat.config.sections.training import INTERLEAVED as INTERLEAVED
    from hlat.config.sections.training import ZERO_BUBBLE as ZERO_BUBBLE
    from hlat.config.sections.training import AdamWConfig as AdamWConfig
    from hlat.config.sections.training import MuonConfig as MuonConfig
    from hlat.config.sections.training import OptimizerConfig as OptimizerConfig
    from hlat.config.sections.training import ParallelConfig as ParallelConfig
    from hlat.config.sections.training import PrecisionConfig as PrecisionConfig
    from hlat.config.sections.training import RampStage as RampStage
    from hlat.config.sections.training import RunConfig as RunConfig
    from hlat.config.sections.training import Schedule as Schedule
    from hlat.config.sections.training import ScheduleConfig as ScheduleConfig
    from hlat.config.sections.training import compile_obstacle as compile_obstacle
    from hlat.config.sections.training import default_virtual_stages as default_virtual_stages
    from hlat.config.yaml_files import RECIPE_ENDINGS as RECIPE_ENDINGS
    from hlat.config.yaml_files import find_recipe as find_recipe
    from hlat.config.yaml_files import load_yaml as load_yaml

__getattr__ = lazily(
    __name__,
    {
        "errors": "Fix Problem RecipeError short size_problem",
        "explanations": "field_called",
        "layout_checks": "CHECKS Check TracedValues Values divisors holds",
        "load": "load_recipe model_section numbers_with_units parse_recipe",
        "model_base": "PRESETS model_differences preset_called",
        "model_files": "hf_to_model",
        "notes": "SettingNote odd_settings recipe_notes",
        "nxdt": "recipe_from_nxdt",
        "recipe": "BatchSchedule Recipe recipe_schema",
        "recipe_rules": "LONGEST_PERIOD model_problems whole_weights",
        "sections.base": "Section",
        "sections.data": "DataConfig",
        "sections.model": (
            "ARCHITECTURES LinearScaling Llama3Scaling ModelConfig RopeConfig exported_family written_fields"
        ),
        "sections.operation": "AnomalyConfig CheckpointConfig FaultConfig RecoveryConfig TrackingConfig refuse_faults",
        "sections.training": (
            "AdamWConfig INTERLEAVED MuonConfig OptimizerConfig ParallelConfig PrecisionConfig RampStage RunConfig "
            "Schedule ScheduleConfig ZERO_BUBBLE compile_obstacle default_virtual_stages"
        ),
        "yaml_files": "RECIPE_ENDINGS find_recipe load_yaml",
    },
)
