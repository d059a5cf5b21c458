"""Inputs of a plan: the request (model, cluster, training budget) and the candidate layouts."""

from hlat.planner.problem.devices import request_device
from hlat.planner.problem.execution import PlannedExecution, planned_execution
from hlat.planner.problem.families import CHIP_FAMILIES, FAMILIES, borrowed_constants
from hlat.planner.problem.layout_text import layout_text, parse_layout
from hlat.planner.problem.layouts import Candidate, candidates, layout_violations
from hlat.planner.problem.llama_class import llama_class, nearest_shape
from hlat.planner.problem.recipe_step import recipe_on_chip, recipe_step
from hlat.planner.problem.request import PlanRequest, resolve_request
from hlat.planner.problem.runnable import comparison_note, why_not_runnable
from hlat.planner.problem.workload import (
    FLASH_ATTENTION_1,
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
    FUSED_LOSS_BYTES,
    MATERIALIZED_SCORES,
    RECOMPUTE_POLICIES,
    Column,
    DeviceSpec,
    ModelShape,
    OptimizerCost,
    SoftwareProfile,
    StepLayout,
    Workload,
    WorkloadColumns,
    block_products,
    layer_weights,
    rank_weights,
)

__all__ = [
    "CHIP_FAMILIES",
    "FAMILIES",
    "FLASH_ATTENTION_1",
    "FLASH_ATTENTION_2",
    "FLASH_ATTENTION_3",
    "FUSED_LOSS_BYTES",
    "MATERIALIZED_SCORES",
    "RECOMPUTE_POLICIES",
    "Candidate",
    "Column",
    "DeviceSpec",
    "ModelShape",
    "OptimizerCost",
    "PlanRequest",
    "PlannedExecution",
    "SoftwareProfile",
    "StepLayout",
    "Workload",
    "WorkloadColumns",
    "block_products",
    "borrowed_constants",
    "candidates",
    "comparison_note",
    "layer_weights",
    "layout_text",
    "layout_violations",
    "llama_class",
    "nearest_shape",
    "parse_layout",
    "planned_execution",
    "rank_weights",
    "recipe_on_chip",
    "recipe_step",
    "request_device",
    "resolve_request",
    "why_not_runnable",
]
