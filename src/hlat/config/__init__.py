"""The recipe: its sections, how it is read, and everything that can be wrong with it."""

from hlat.config.batch_schedule import BatchSchedule
from hlat.config.errors import Fix, Problem, RecipeError, short
from hlat.config.explanations import field_called
from hlat.config.load import load_recipe, model_section, numbers_with_units, parse_recipe
from hlat.config.model_base import model_differences
from hlat.config.presets import PRESETS, preset_called
from hlat.config.recipe import Recipe
from hlat.config.schema import recipe_schema
from hlat.config.value_checks import size_problem

__all__ = [
    "PRESETS",
    "BatchSchedule",
    "Fix",
    "Problem",
    "Recipe",
    "RecipeError",
    "field_called",
    "load_recipe",
    "model_differences",
    "model_section",
    "numbers_with_units",
    "parse_recipe",
    "preset_called",
    "recipe_schema",
    "short",
    "size_problem",
]
