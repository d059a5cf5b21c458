"""Checks between the fields of a recipe, and the nearest values that would pass them."""

from hlat.config.rules.data_rules import LONGEST_PERIOD, whole_weights
from hlat.config.rules.layout_checks import CHECKS as LAYOUT_CHECKS
from hlat.config.rules.notes import SettingNote, odd_settings, recipe_notes
from hlat.config.rules.recipe_rules import broken_rules, model_problems
from hlat.config.rules.rule_context import Check, TracedValues, Values, divisors, holds

__all__ = [
    "LAYOUT_CHECKS",
    "LONGEST_PERIOD",
    "Check",
    "SettingNote",
    "TracedValues",
    "Values",
    "broken_rules",
    "divisors",
    "holds",
    "model_problems",
    "odd_settings",
    "recipe_notes",
    "whole_weights",
]
