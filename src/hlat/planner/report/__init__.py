"""A plan as tables, sentences, an HTML page and a trace."""

from hlat.planner.report.comparison import RankBy, as_json, common_price, compared, front_of, ranked
from hlat.planner.report.explain import against, explain
from hlat.planner.report.html_report import page
from hlat.planner.report.trace import chrome_trace

__all__ = [
    "RankBy",
    "against",
    "as_json",
    "chrome_trace",
    "common_price",
    "compared",
    "explain",
    "front_of",
    "page",
    "ranked",
]
