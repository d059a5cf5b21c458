"""The question: a model, a cluster and a budget, and the layouts that could answer it."""

from hlat.planner.problem.devices import device_for, device_of
from hlat.planner.problem.layouts import Candidate, candidates, parse_layout
from hlat.planner.problem.request import Question, ask
from hlat.planner.problem.workload import (
    FAMILIES,
    FIRST_FLASH,
    FUSED_FLASH,
    MATERIALISED,
    RECOMPUTE,
    SECOND_FLASH,
    Column,
    Columns,
    Device,
    Recompute,
    Shape,
    Software,
    Split,
    Work,
    layer_weights,
    rank_weights,
)

__all__ = [
    "FAMILIES",
    "FIRST_FLASH",
    "FUSED_FLASH",
    "MATERIALISED",
    "RECOMPUTE",
    "SECOND_FLASH",
    "Candidate",
    "Column",
    "Columns",
    "Device",
    "Question",
    "Recompute",
    "Shape",
    "Software",
    "Split",
    "Work",
    "ask",
    "candidates",
    "device_for",
    "device_of",
    "layer_weights",
    "parse_layout",
    "rank_weights",
]
