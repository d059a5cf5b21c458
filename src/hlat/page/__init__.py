"""HTML pages in one file, without references to others: elements, charts drawn by Plotly, style, and a small script.

    values, texts -> charts, tables (escaped) -> page -> a file that any browser opens offline

The report of runs and the page of a plan are made of these parts. They are readable on a phone, in dark mode, printed,
with the keyboard alone and with a screen reader.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.page.charts import *
    from hlat.page.elements import *

__getattr__ = lazily(
    __name__,
    {
        "charts": "Band Dot Mark Series Span bar_chart heat_map line_chart scatter_chart timeline_chart",
        "elements": (
            "Html details duration format_value grid headline joined page paragraph preformatted section table "
            "tabs time_unit"
        ),
    },
)
