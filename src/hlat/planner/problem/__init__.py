"""Inputs of a plan: the request (model, cluster, training budget) and the candidate layouts."""

from hlat.planner.problem.devices import instance_device, request_device
from hlat.planner.problem.layouts import Candidate, candidates, parse_layout
from hlat.planner.problem.request import PlanRequest, resolve_request
from hlat.planner.problem.workload import (
    FAMILIES,
    FLASH_ATTENTION_1,
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
    MATERIALIZED_SCORES,
    RECOMPUTE_POLICIES,
    Column,
    DeviceSpec,
    ModelShape,
    OptimizerCost,
    RecomputePolicy,
    SoftwareProfile,
    StepLayout,
    Workload,
    WorkloadColumns,
    block_products,
    layer_weights,
    rank_weights,
)

__all__ = [
    "FAMILIES",
    "FLASH_ATTENTION_1",
    "FLASH_ATTENTION_2",
    "FLASH_ATTENTION_3",
    "MATERIALIZED_SCORES",
    "RECOMPUTE_POLICIES",
    "Candidate",
    "Column",
    "DeviceSpec",
    "ModelShape",
    "OptimizerCost",
    "PlanRequest",
    "RecomputePolicy",
    "SoftwareProfile",
    "StepLayout",
    "Workload",
    "WorkloadColumns",
    "block_products",
    "candidates",
    "instance_device",
    "layer_weights",
    "parse_layout",
    "rank_weights",
    "request_device",
    "resolve_request",
]
