"""Checks of the preflight: one file per group, listed in ``table.py``."""

from hlat.launch.preflight.checks.base import Case, Evidence, Facts, HealthCheck, Stage, Symptom
from hlat.launch.preflight.checks.collectives import axis_groups
from hlat.launch.preflight.checks.table import CHECKS, checks_of, modules_of

__all__ = [
    "CHECKS",
    "Case",
    "Evidence",
    "Facts",
    "HealthCheck",
    "Stage",
    "Symptom",
    "axis_groups",
    "checks_of",
    "modules_of",
]
