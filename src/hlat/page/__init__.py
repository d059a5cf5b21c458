"""HTML pages in one file, without references to others: elements, charts as SVG, style, and a small script.

    values, texts -> charts, tables (escaped) -> page -> a file that any browser opens offline

The report of runs and the page of a plan are made of these parts. They are readable on a phone, in dark mode, printed,
with the keyboard alone and with a screen reader.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.page.charts import Dot as Dot
    from hlat.page.charts import Mark as Mark
    from hlat.page.charts import Series as Series
    from hlat.page.charts import bar_chart as bar_chart
    from hlat.page.charts import format_tick as format_tick
    from hlat.page.charts import line_chart as line_chart
    from hlat.page.charts import make_axis as make_axis
    from hlat.page.charts import scatter_chart as scatter_chart
    from hlat.page.elements import Html as Html
    from hlat.page.elements import colour as colour
    from hlat.page.elements import details as details
    from hlat.page.elements import duration as duration
    from hlat.page.elements import format_value as format_value
    from hlat.page.elements import grid as grid
    from hlat.page.elements import page as page
    from hlat.page.elements import paragraph as paragraph
    from hlat.page.elements import preformatted as preformatted
    from hlat.page.elements import section as section
    from hlat.page.elements import table as table
    from hlat.page.elements import text as text
    from hlat.page.elements import time_unit as time_unit

__getattr__ = lazily(
    __name__,
    {
        "charts": "Dot Mark Series bar_chart format_tick line_chart make_axis scatter_chart",
        "elements": (
            "Html colour details duration format_value grid page paragraph preformatted section table text time_unit"
        ),
    },
)
