"""Predict a run before it starts: memory, time, cost, and the layout that takes least.

    question -> request, layouts (problem) -> bytes (memory), seconds (cost) of each -> the best (search)
        -> tables, pages (report)

benchmarks/published_runs compares the cost model with published runs.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.planner.cost.step_time import OperationTimes as OperationTimes
    from hlat.planner.cost.step_time import Timeline as Timeline
    from hlat.planner.memory import device_overhead as device_overhead
    from hlat.planner.memory import has_fused_kernels as has_fused_kernels
    from hlat.planner.plan import TrainingPlan as TrainingPlan
    from hlat.planner.plan import fits as fits
    from hlat.planner.plan import format_number as format_number
    from hlat.planner.plan import make_plan as make_plan
    from hlat.planner.plan import recipe_fragment as recipe_fragment
    from hlat.planner.plan import run_determinism_cost as run_determinism_cost
    from hlat.planner.problem.layouts import Candidate as Candidate
    from hlat.planner.problem.layouts import layout_violations as layout_violations
    from hlat.planner.problem.layouts import recipe_step as recipe_step
    from hlat.planner.problem.question import PlanQuestion as PlanQuestion
    from hlat.planner.problem.question import check_options as check_options
    from hlat.planner.problem.question import price_kind as price_kind
    from hlat.planner.problem.request import PlanRequest as PlanRequest
    from hlat.planner.problem.request import resolve_request as resolve_request
    from hlat.planner.problem.workload import RECOMPUTE_POLICIES as RECOMPUTE_POLICIES
    from hlat.planner.purchase import CHINCHILLA as CHINCHILLA
    from hlat.planner.purchase import ModelSize as ModelSize
    from hlat.planner.purchase import Purchase as Purchase
    from hlat.planner.purchase import choose_cluster as choose_cluster
    from hlat.planner.purchase import choose_model_size as choose_model_size
    from hlat.planner.purchase_table import model_size_json as model_size_json
    from hlat.planner.purchase_table import model_size_lines as model_size_lines
    from hlat.planner.purchase_table import purchase_json as purchase_json
    from hlat.planner.purchase_table import purchase_lines as purchase_lines
    from hlat.planner.report.comparison import ClusterComparison as ClusterComparison
    from hlat.planner.report.comparison import compare_clusters as compare_clusters
    from hlat.planner.report.comparison import comparison_lines as comparison_lines
    from hlat.planner.report.explanation import plan_words as plan_words
    from hlat.planner.report.html_report import chrome_trace as chrome_trace
    from hlat.planner.report.html_report import html_page as html_page
    from hlat.planner.report.terminal import WIDE as WIDE
    from hlat.planner.report.terminal import command_lines as command_lines
    from hlat.planner.report.terminal import plan_lines as plan_lines
    from hlat.planner.report.terminal import wrapped as wrapped
    from hlat.planner.search import USABLE_MEMORY_SHARE as USABLE_MEMORY_SHARE
    from hlat.planner.search import LayoutPrediction as LayoutPrediction
    from hlat.planner.search import predict_layout as predict_layout
    from hlat.planner.search import timeline as timeline
    from hlat.planner.search import workload_columns as workload_columns

__getattr__ = lazily(
    __name__,
    {
        "cost.step_time": "OperationTimes Timeline",
        "memory": "device_overhead has_fused_kernels",
        "plan": "TrainingPlan fits format_number make_plan recipe_fragment run_determinism_cost",
        "problem.layouts": "Candidate layout_violations recipe_step",
        "problem.question": "PlanQuestion check_options price_kind",
        "problem.request": "PlanRequest resolve_request",
        "problem.workload": "RECOMPUTE_POLICIES",
        "purchase": "CHINCHILLA ModelSize Purchase choose_cluster choose_model_size",
        "purchase_table": "model_size_json model_size_lines purchase_json purchase_lines",
        "report.comparison": "ClusterComparison compare_clusters comparison_lines",
        "report.explanation": "plan_words",
        "report.html_report": "chrome_trace html_page",
        "report.terminal": "WIDE command_lines plan_lines wrapped",
        "search": "LayoutPrediction USABLE_MEMORY_SHARE predict_layout timeline workload_columns",
    },
)
