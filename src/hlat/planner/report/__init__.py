"""Reports of a plan: tables, sentences, an HTML page and a Chrome trace."""

from hlat.planner.report.clusters import ClusterComparison, compare_clusters, price_kind
from hlat.planner.report.comparison import comparison_lines
from hlat.planner.report.energy import energy_sentence, energy_text
from hlat.planner.report.explain import comparison_with, expectation, explain, interval_text
from hlat.planner.report.html_report import html_page
from hlat.planner.report.plan_table import WIDE, plan_lines
from hlat.planner.report.plan_words import plan_words
from hlat.planner.report.saves import storage_sentence
from hlat.planner.report.text_table import command_lines, table_lines, wrapped
from hlat.planner.report.trace import chrome_trace

__all__ = [
    "WIDE",
    "ClusterComparison",
    "chrome_trace",
    "command_lines",
    "compare_clusters",
    "comparison_lines",
    "comparison_with",
    "energy_sentence",
    "energy_text",
    "expectation",
    "explain",
    "html_page",
    "interval_text",
    "plan_lines",
    "plan_words",
    "price_kind",
    "storage_sentence",
    "table_lines",
    "wrapped",
]
