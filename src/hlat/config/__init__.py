"""The recipe: its sections, how it is read, and everything that can be wrong with it."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.config.batch_schedule import BatchSchedule as BatchSchedule
    from hlat.config.errors import Fix as Fix
    from hlat.config.errors import Problem as Problem
    from hlat.config.errors import RecipeError as RecipeError
    from hlat.config.errors import short as short
    from hlat.config.explanations import field_called as field_called
    from hlat.config.files.hf_import import hf_to_model as hf_to_model
    from hlat.config.files.yaml_loader import RECIPE_ENDINGS as RECIPE_ENDINGS
    from hlat.config.files.yaml_loader import find_recipe as find_recipe
    from hlat.config.files.yaml_text import load_yaml as load_yaml
    from hlat.config.load import load_recipe as load_recipe
    from hlat.config.load import model_section as model_section
    from hlat.config.load import numbers_with_units as numbers_with_units
    from hlat.config.load import parse_recipe as parse_recipe
    from hlat.config.model_base import model_differences as model_differences
    from hlat.config.nxdt.translate import recipe_from_nxdt as recipe_from_nxdt
    from hlat.config.presets import PRESETS as PRESETS
    from hlat.config.presets import preset_called as preset_called
    from hlat.config.recipe import Recipe as Recipe
    from hlat.config.rules.data_rules import LONGEST_PERIOD as LONGEST_PERIOD
    from hlat.config.rules.data_rules import whole_weights as whole_weights
    from hlat.config.rules.layout_checks import CHECKS as CHECKS
    from hlat.config.rules.notes import SettingNote as SettingNote
    from hlat.config.rules.notes import odd_settings as odd_settings
    from hlat.config.rules.notes import recipe_notes as recipe_notes
    from hlat.config.rules.recipe_rules import model_problems as model_problems
    from hlat.config.rules.rule_context import Check as Check
    from hlat.config.rules.rule_context import TracedValues as TracedValues
    from hlat.config.rules.rule_context import Values as Values
    from hlat.config.rules.rule_context import divisors as divisors
    from hlat.config.rules.rule_context import holds as holds
    from hlat.config.schema import recipe_schema as recipe_schema
    from hlat.config.sections.architectures import ARCHITECTURES as ARCHITECTURES
    from hlat.config.sections.architectures import exported_family as exported_family
    from hlat.config.sections.architectures import written_fields as written_fields
    from hlat.config.sections.base import Section as Section
    from hlat.config.sections.data import DataConfig as DataConfig
    from hlat.config.sections.model import LinearScaling as LinearScaling
    from hlat.config.sections.model import Llama3Scaling as Llama3Scaling
    from hlat.config.sections.model import ModelConfig as ModelConfig
    from hlat.config.sections.model import RopeConfig as RopeConfig
    from hlat.config.sections.optimizers import AdamWConfig as AdamWConfig
    from hlat.config.sections.optimizers import MuonConfig as MuonConfig
    from hlat.config.sections.parallel import INTERLEAVED as INTERLEAVED
    from hlat.config.sections.parallel import ZERO_BUBBLE as ZERO_BUBBLE
    from hlat.config.sections.parallel import ParallelConfig as ParallelConfig
    from hlat.config.sections.parallel import Schedule as Schedule
    from hlat.config.sections.parallel import compile_obstacle as compile_obstacle
    from hlat.config.sections.parallel import default_virtual_stages as default_virtual_stages
    from hlat.config.sections.recovery import AnomalyConfig as AnomalyConfig
    from hlat.config.sections.recovery import CheckpointConfig as CheckpointConfig
    from hlat.config.sections.recovery import FaultConfig as FaultConfig
    from hlat.config.sections.recovery import RecoveryConfig as RecoveryConfig
    from hlat.config.sections.recovery import refuse_faults as refuse_faults
    from hlat.config.sections.tracking import TrackingConfig as TrackingConfig
    from hlat.config.sections.training import OptimizerConfig as OptimizerConfig
    from hlat.config.sections.training import PrecisionConfig as PrecisionConfig
    from hlat.config.sections.training import RampStage as RampStage
    from hlat.config.sections.training import RunConfig as RunConfig
    from hlat.config.sections.training import ScheduleConfig as ScheduleConfig
    from hlat.config.value_checks import size_problem as size_problem

__getattr__ = lazily(
    __name__,
    {
        "batch_schedule": "BatchSchedule",
        "errors": "Fix Problem RecipeError short",
        "explanations": "field_called",
        "files.hf_import": "hf_to_model",
        "files.yaml_loader": "RECIPE_ENDINGS find_recipe",
        "files.yaml_text": "load_yaml",
        "load": "load_recipe model_section numbers_with_units parse_recipe",
        "model_base": "model_differences",
        "nxdt.translate": "recipe_from_nxdt",
        "presets": "PRESETS preset_called",
        "recipe": "Recipe",
        "rules.data_rules": "LONGEST_PERIOD whole_weights",
        "rules.layout_checks": "CHECKS",
        "rules.notes": "SettingNote odd_settings recipe_notes",
        "rules.recipe_rules": "model_problems",
        "rules.rule_context": "Check TracedValues Values divisors holds",
        "schema": "recipe_schema",
        "sections.architectures": "ARCHITECTURES exported_family written_fields",
        "sections.base": "Section",
        "sections.data": "DataConfig",
        "sections.model": "LinearScaling Llama3Scaling ModelConfig RopeConfig",
        "sections.optimizers": "AdamWConfig MuonConfig",
        "sections.parallel": "INTERLEAVED ParallelConfig Schedule ZERO_BUBBLE compile_obstacle default_virtual_stages",
        "sections.recovery": "AnomalyConfig CheckpointConfig FaultConfig RecoveryConfig refuse_faults",
        "sections.tracking": "TrackingConfig",
        "sections.training": "OptimizerConfig PrecisionConfig RampStage RunConfig ScheduleConfig",
        "value_checks": "size_problem",
    },
)
