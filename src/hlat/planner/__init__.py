"""Predict a run before it starts: memory, time, cost, and the layout that takes least.

    question -> request, layouts (problem) -> bytes (memory), seconds (cost) of each -> the best (search)
        -> tables, pages (report)

benchmarks/published_runs compares the cost model with published runs.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.planner.cost.step_time import *
    from hlat.planner.defaults import *
    from hlat.planner.expected import *
    from hlat.planner.fit import *
    from hlat.planner.grid import *
    from hlat.planner.memory import *
    from hlat.planner.plan import *
    from hlat.planner.problem.layouts import *
    from hlat.planner.problem.question import *
    from hlat.planner.problem.request import *
    from hlat.planner.purchase import *
    from hlat.planner.purchase_table import *
    from hlat.planner.report.comparison import *
    from hlat.planner.report.explanation import *
    from hlat.planner.report.html_report import *
    from hlat.planner.report.terminal import *
    from hlat.planner.search import *

__getattr__ = lazily(
    __name__,
    {
        "cost.step_time": "OperationTimes Timeline",
        "defaults": (
            "LEAST_STEPS compute_batch held_tokens load_run_recipe peak_rate resolve_defaults save_every warmup_steps"
        ),
        "expected": "days_text likely usd_words whole_run",
        "fit": "MemoryRemedy fit_here predict_recipe recipe_fit remedies",
        "grid": "PlanGrid check_grid_options grid_lines grid_page plan_grid",
        "memory": "device_overhead",
        "plan": "TrainingPlan format_number make_plan run_determinism_cost",
        "problem.layouts": "machines_with recipe_step",
        "problem.question": "PlanQuestion check_options price_kind",
        "problem.request": "PlanRequest resolve_request",
        "purchase": "ModelSize Purchase choose_cluster choose_model_size",
        "purchase_table": "model_size_json model_size_lines purchase_json purchase_lines",
        "report.comparison": "ClusterComparison compare_clusters comparison_lines",
        "report.explanation": "plan_words",
        "report.html_report": "chrome_trace html_page",
        "report.terminal": "WIDE command_lines plan_lines",
        "search": "LayoutPrediction USABLE_MEMORY_SHARE predict_layout timeline workload_columns",
    },
)
