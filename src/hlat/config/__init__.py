"""The recipe: its sections, how it is read, and everything that can be wrong with it."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.config.errors import *
    from hlat.config.explanations import *
    from hlat.config.layout_checks import *
    from hlat.config.load import *
    from hlat.config.model_base import *
    from hlat.config.model_files import *
    from hlat.config.notes import *
    from hlat.config.nxdt.recipes import *
    from hlat.config.recipe import *
    from hlat.config.recipe_rules import *
    from hlat.config.sections.base import *
    from hlat.config.sections.data import *
    from hlat.config.sections.model import *
    from hlat.config.sections.operation import *
    from hlat.config.sections.rope import *
    from hlat.config.sections.training import *
    from hlat.config.stages import *
    from hlat.config.yaml_files import *

__getattr__ = lazily(
    __name__,
    {
        "errors": "Fix Problem RecipeError short size_problem",
        "explanations": "field_called",
        "layout_checks": "CHECKS Values divisors holds",
        "load": "load_recipe model_section numbers_with_units parse_recipe",
        "model_base": "PRESETS model_differences near_presets preset_called",
        "model_files": "hf_to_model",
        "notes": "SettingNote odd_settings",
        "nxdt.recipes": "recipe_from_nxdt",
        "recipe": "BatchSchedule Recipe recipe_schema",
        "stages": "StagePlace changeable in_stage",
        "recipe_rules": "LONGEST_PERIOD model_problems whole_weights",
        "sections.base": "OwnPart Section",
        "sections.data": "DataConfig",
        "sections.model": (
            "ARCHITECTURES FULL_ATTENTION HF_NAMES ModelConfig OwnModelConfig RopeConfig SLIDING_ATTENTION "
            "architecture_entry exported_family written_fields"
        ),
        "sections.operation": "AnomalyConfig CheckpointConfig FaultConfig RecoveryConfig TrackingConfig refuse_faults",
        "sections.rope": "DynamicScaling LinearScaling Llama3Scaling SCALINGS YarnScaling",
        "sections.training": (
            "AdamWConfig AdamWFields INTERLEAVED MuonConfig OptimizerConfig OwnOptimizerConfig OwnScheduleConfig "
            "ParallelConfig PrecisionConfig RampStage RunConfig Schedule ScheduleConfig StageConfig ZERO_BUBBLE "
            "compile_obstacle default_virtual_stages"
        ),
        "yaml_files": "RECIPE_ENDINGS apply_overrides find_recipe load_yaml",
    },
)
