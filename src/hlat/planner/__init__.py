"""Predict a run before it starts: memory, time, cost, and the layout that takes least.

    request, layouts (problem) -> bytes (memory), seconds (cost) of each -> the best (search) -> tables, pages (report)

Each folder is a wing with a door of its own. benchmarks/published_runs compares the cost model with published runs.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.planner.cost.operation_time import OperationTimes as OperationTimes
    from hlat.planner.cost.pipeline_sim import Timeline as Timeline
    from hlat.planner.memory.rank_memory import device_overhead as device_overhead
    from hlat.planner.memory.rank_memory import has_fused_kernels as has_fused_kernels
    from hlat.planner.problem.layouts import Candidate as Candidate
    from hlat.planner.problem.layouts import layout_violations as layout_violations
    from hlat.planner.problem.recipe_step import recipe_step as recipe_step
    from hlat.planner.problem.request import PlanRequest as PlanRequest
    from hlat.planner.problem.request import resolve_request as resolve_request
    from hlat.planner.problem.workload import RECOMPUTE_POLICIES as RECOMPUTE_POLICIES
    from hlat.planner.purchase.afford import afford as afford
    from hlat.planner.purchase.choice import Purchase as Purchase
    from hlat.planner.purchase.choice import choose_cluster as choose_cluster
    from hlat.planner.purchase.goal import parse_goal as parse_goal
    from hlat.planner.purchase.model_size import ModelSize as ModelSize
    from hlat.planner.purchase.model_size import RequestOf as RequestOf
    from hlat.planner.purchase.model_size import choose_model_size as choose_model_size
    from hlat.planner.purchase.offers import Offer as Offer
    from hlat.planner.purchase.scaling_law import CHINCHILLA as CHINCHILLA
    from hlat.planner.purchase.table import model_size_json as model_size_json
    from hlat.planner.purchase.table import model_size_lines as model_size_lines
    from hlat.planner.purchase.table import purchase_json as purchase_json
    from hlat.planner.purchase.table import purchase_lines as purchase_lines
    from hlat.planner.report.clusters import ClusterComparison as ClusterComparison
    from hlat.planner.report.clusters import compare_clusters as compare_clusters
    from hlat.planner.report.clusters import price_kind as price_kind
    from hlat.planner.report.comparison import comparison_lines as comparison_lines
    from hlat.planner.report.html_report import html_page as html_page
    from hlat.planner.report.plan_table import WIDE as WIDE
    from hlat.planner.report.plan_table import plan_lines as plan_lines
    from hlat.planner.report.plan_words import plan_words as plan_words
    from hlat.planner.report.text_table import command_lines as command_lines
    from hlat.planner.report.text_table import wrapped as wrapped
    from hlat.planner.report.trace import chrome_trace as chrome_trace
    from hlat.planner.search.determinism import run_determinism_cost as run_determinism_cost
    from hlat.planner.search.plan import TrainingPlan as TrainingPlan
    from hlat.planner.search.plan import fits as fits
    from hlat.planner.search.plan import format_number as format_number
    from hlat.planner.search.plan import make_plan as make_plan
    from hlat.planner.search.plan import recipe_fragment as recipe_fragment
    from hlat.planner.search.search import USABLE_MEMORY_SHARE as USABLE_MEMORY_SHARE
    from hlat.planner.search.search import LayoutPrediction as LayoutPrediction
    from hlat.planner.search.search import predict_layout as predict_layout
    from hlat.planner.search.search import timeline as timeline
    from hlat.planner.search.search import workload_columns as workload_columns

__getattr__ = lazily(
    __name__,
    {
        "cost.operation_time": "OperationTimes",
        "cost.pipeline_sim": "Timeline",
        "memory.rank_memory": "device_overhead has_fused_kernels",
        "problem.layouts": "Candidate layout_violations",
        "problem.recipe_step": "recipe_step",
        "problem.request": "PlanRequest resolve_request",
        "problem.workload": "RECOMPUTE_POLICIES",
        "purchase.afford": "afford",
        "purchase.choice": "Purchase choose_cluster",
        "purchase.goal": "parse_goal",
        "purchase.model_size": "ModelSize RequestOf choose_model_size",
        "purchase.offers": "Offer",
        "purchase.scaling_law": "CHINCHILLA",
        "purchase.table": "model_size_json model_size_lines purchase_json purchase_lines",
        "report.clusters": "ClusterComparison compare_clusters price_kind",
        "report.comparison": "comparison_lines",
        "report.html_report": "html_page",
        "report.plan_table": "WIDE plan_lines",
        "report.plan_words": "plan_words",
        "report.text_table": "command_lines wrapped",
        "report.trace": "chrome_trace",
        "search.determinism": "run_determinism_cost",
        "search.plan": "TrainingPlan fits format_number make_plan recipe_fragment",
        "search.search": "LayoutPrediction USABLE_MEMORY_SHARE predict_layout timeline workload_columns",
    },
)
