"""HTML elements and the complete page, with its style and scripts. Every text from outside is escaped here, once.

    text, tables, charts --macros of elements.html (autoescape)--> Html -> page: one file, without references to others
                                       page.css, page.js, plotly.min.js --^
    value -> short text

The style is light, dark and printed, with one column on a phone; series and parts have colours and dash patterns by
number. Without the scripts everything is still there as text and tables.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from colorsys import hls_to_rgb
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from hlat.runtime.terminal import escape_controls

Html = Markup  # text of HTML: whatever is put into it is escaped, unless it is Html itself

_COLOURS = (
    "#3b7dd8", "#d9663a", "#3a9a5b", "#b0549b", "#a8872a", "#2c9aa8", "#d14b6a", "#7a6fd0",
    "#7f8c3a", "#9a6a4b", "#5b8aa0", "#c0519e", "#4f9a3a", "#8a7a9a", "#c07a2a", "#6a8f7a",
)  # fmt: skip
"""Colours that differ from each other, with a contrast of at least 3 to both backgrounds."""

_GOLDEN = 0.618033988749895  # golden ratio, less 1


def colour(index: int) -> str:
    """Return ``#rrggbb`` of a series or part; no two of the first hundreds are equal."""
    if index < len(_COLOURS):
        return _COLOURS[index]
    # Steps of the golden ratio keep hues apart, however many there are.
    turn = (index * _GOLDEN) % 1
    lightness = 0.45 + 0.05 * (index % 3)
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(turn, lightness, 0.45))


def format_value(value: float) -> str:
    """Format a number with four significant digits, and thousands separators; NaN and infinity by name."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit to write a time in, and its seconds."""
    units = (("days", 86400.0), ("h", 3600.0), ("min", 60.0))
    return next((unit for unit in units if seconds >= 2 * unit[1]), ("s", 1.0))


def duration(seconds: float) -> str:
    """Format seconds as ``12 s``, ``3.5 min``, ``7.2 h`` or ``4.1 days``."""
    name, size = time_unit(seconds)
    return f"{seconds:.3g} s" if size == 1 else f"{seconds / size:.1f} {name}"


def _visible(value: object) -> str:
    # Control and bidirectional characters of a text would be invisible, or turn what follows around.
    return value if isinstance(value, Html) else escape_controls(str(value))


@cache
def _macros() -> Any:
    room = Environment(autoescape=True, finalize=_visible, trim_blocks=True, lstrip_blocks=True)
    return room.from_string(_shipped("elements.html")).module


def paragraph(content: object) -> Html:
    """Make a paragraph of plain text."""
    return _element("paragraph", content)


def section(title: str, contents: Iterable[Html], *, level: int = 2) -> Html:
    """Make a section with a heading; empty if it has no contents."""
    body = joined(contents)
    return _element("section", title, body, level) if body else body


def table(names: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str, marked: int | None = None) -> Html:
    """Make a table to sort, whose first column holds the names of its rows; ``marked`` is the row to emphasize."""
    content = [[str(cell) for cell in row] for row in rows]
    # Numbers are aligned at the right; names such as 8b are none.
    numbers = [column > 0 and all(_starts_with_digit(row[column]) for row in content) for column in range(len(names))]
    return _element("table", names, content, numbers, caption, marked)


def _starts_with_digit(cell: str) -> bool:
    return cell.lstrip("-+$<~")[:1].isdigit() or cell in ("", "nan", "inf", "-inf", "unknown")


def details(summary: str, contents: Html, *, open: bool = False) -> Html:
    """Make a part that is folded until the reader opens it."""
    return _element("details", summary, contents, open) if contents else contents


def preformatted(content: object, label: str) -> Html:
    """Show a text with its line breaks, such as a generated sample."""
    return _element("preformatted", content, label)


def headline(facts: Iterable[tuple[str, str, str]]) -> Html:
    """Show the main numbers large: name, value, and a note that may be empty. Facts without a value are left out."""
    return _element("headline", [fact for fact in facts if fact[1]])


def tabs(parts: Iterable[tuple[str, Html]]) -> Html:
    """Show one of several parts at a time, below a row of their names; empty parts are left out."""
    return _element("tabs", [part for part in parts if part[1]])


def grid(parts: Iterable[Html]) -> Html:
    """Lay out parts in columns as wide as the screen allows; empty without parts."""
    found = joined(parts)
    return _element("grid", found) if found else found


def figure(title: str, summary: str, content: dict[str, Any], height: int, values: Html) -> Html:
    """Make the figure of a chart.

    Args:
        title: its caption.
        summary: what a screen reader says instead of the picture.
        content: ``data`` and ``layout`` of Plotly; ``axes`` are labels of horizontal axes to choose from, of which each
            trace has its ``places``.
        height: of the plot, in CSS pixels, so that nothing moves when it is drawn.
        values: the same as a table.
    """
    # Curves that are hidden at first are chosen from a list, which the script makes.
    legend = [trace for trace in content["data"] if trace.get("showlegend", True) and trace.get("visible", True)]
    return _element("figure", title, summary, Html(embedded_json(content)), height, legend, values)


def joined(parts: Iterable[Html]) -> Html:
    """Put parts one below the other."""
    return Html("\n").join(_visible(part) for part in parts if part)


def _element(name: str, *arguments: object) -> Html:
    return Html(getattr(_macros(), name)(*arguments))


def embedded_json(value: Any) -> str:
    """Write JSON for a script element, which no text in it can end."""
    plain = json.dumps(value, separators=(",", ":"), allow_nan=False)
    # "</script>" in a text would end the element.
    for character in "<>&\u2028\u2029":
        plain = plain.replace(character, f"\\u{ord(character):04x}")
    return plain


def page(title: str, contents: Iterable[Html], *, version: str | None = None) -> Html:
    """Make the complete page. Its content security policy forbids every request and every foreign script.

    Only a page from a server has a ``version`` of its contents: it asks for a newer one. Plotly is part of a page that
    has a chart: 4.8 MB.
    """
    body = joined(contents)
    scripts = [_shipped("page.js")]
    if "<figure" in body:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - many pages have no chart

        scripts.append(get_plotlyjs())
    # The browser runs these scripts only: text that gets through the escaping cannot run.
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    policy = "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(f"'sha256-{digest}'" for digest in digests),
            "style-src 'unsafe-inline'",  # Plotly adds rules to the page and styles to its shapes
            "img-src data: blob:",  # the PNG of a chart
            # The script of a served page asks its own server for a newer version.
            "connect-src " + ("'none'" if version is None else "'self'"),
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return _element("page", title, body, policy, Html(_shipped("page.css")), list(map(Html, scripts)), version)


@cache
def _shipped(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
