"""HTML pages in one file, without references to others: elements, charts as SVG, style, and a small script.

    values, texts -> charts, tables (escaped) -> page -> a file that any browser opens offline

The report of runs and the page of a plan are made of these parts. They are readable on a phone, in dark mode, printed,
with the keyboard alone and with a screen reader.
"""

from hlat.page.bar_chart import bar_chart
from hlat.page.elements import Html, details, grid, page, paragraph, preformatted, section, table, text
from hlat.page.line_chart import Mark, Series, line_chart
from hlat.page.numbers import duration, format_tick, format_value, make_axis, time_unit
from hlat.page.style import colour

__all__ = [
    "Html",
    "Mark",
    "Series",
    "bar_chart",
    "colour",
    "details",
    "duration",
    "format_tick",
    "format_value",
    "grid",
    "line_chart",
    "make_axis",
    "page",
    "paragraph",
    "preformatted",
    "section",
    "table",
    "text",
    "time_unit",
]
