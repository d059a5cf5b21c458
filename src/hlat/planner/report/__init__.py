"""Reports of a plan: tables, sentences, an HTML page and a Chrome trace."""

from hlat.planner.report.clusters import ClusterComparison, compare_clusters, price_kind
from hlat.planner.report.comparison import (
    comparison_lines,
    pareto_front_of_plans,
)
from hlat.planner.report.explain import comparison_with, explain
from hlat.planner.report.html_report import html_page
from hlat.planner.report.trace import chrome_trace

__all__ = [
    "ClusterComparison",
    "chrome_trace",
    "compare_clusters",
    "comparison_lines",
    "comparison_with",
    "explain",
    "html_page",
    "pareto_front_of_plans",
    "price_kind",
]
