"""The search for the best layout, the tie rule, and suggestions when nothing fits."""

from hlat.planner.search.determinism import DeterminismCost, run_determinism_cost
from hlat.planner.search.plan import TrainingPlan, fits, format_number, layout_json, make_plan, recipe_fragment
from hlat.planner.search.quick_search import best_layout
from hlat.planner.search.search import (
    USABLE_MEMORY_SHARE,
    LayoutPrediction,
    predict_layout,
    timeline,
    workload_columns,
)
from hlat.planner.search.tie_break import TIE_TOLERANCE

__all__ = [
    "TIE_TOLERANCE",
    "USABLE_MEMORY_SHARE",
    "DeterminismCost",
    "LayoutPrediction",
    "TrainingPlan",
    "best_layout",
    "fits",
    "format_number",
    "layout_json",
    "make_plan",
    "predict_layout",
    "recipe_fragment",
    "run_determinism_cost",
    "timeline",
    "workload_columns",
]
