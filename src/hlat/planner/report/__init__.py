"""Reports of a plan: tables, sentences, an HTML page and a Chrome trace."""

from hlat.planner.report.comparison import (
    RankBy,
    common_price_kind,
    comparison_lines,
    pareto_front_of_plans,
    plans_as_json,
    rank_plans,
)
from hlat.planner.report.explain import comparison_with, explain
from hlat.planner.report.html_report import html_page
from hlat.planner.report.trace import chrome_trace

__all__ = [
    "RankBy",
    "chrome_trace",
    "common_price_kind",
    "comparison_lines",
    "comparison_with",
    "explain",
    "html_page",
    "pareto_front_of_plans",
    "plans_as_json",
    "rank_plans",
]
