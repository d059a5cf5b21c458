"""HTML elements and the complete page, with its style and script. Every text from outside is escaped here only.

    text, tables, charts -> elements (escaped) -> page: one file, without references to others
                         page.css, page.js --^
    value -> short text

The style is light, dark and printed, with one column on a phone; series and parts have colours and dash patterns by
number. The script reads values of a chart with a slider, pointer or finger, and reloads a served page when it changes.
Without it everything on a page is still shown. It puts text into the page as text, never as HTML.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from colorsys import hls_to_rgb
from html import escape
from pathlib import Path
from typing import Any

from hlat.runtime.terminal import escape_controls

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


def dashes(index: int) -> str:
    """Return the dash pattern of a series, so that colour is not the only difference."""
    return ("", "6 3", "2 2", "8 3 2 3")[index % 4]


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


Html = str  # text of HTML, in which everything from outside has been escaped
_NUMBER = re.compile(r"^(-?[0-9][0-9,.e+-]*( of [0-9,]+)?[%]?( ?[A-Za-z]{1,7})?|nan|-?inf|unknown)$")


def text(value: object) -> Html:
    """Escape a text for HTML, also inside attributes; control and bidirectional characters become visible."""
    return escape(escape_controls(str(value)))


def paragraph(content: object) -> Html:
    """Make a paragraph of plain text, which is escaped."""
    return f"<p>{text(content)}</p>"


def section(title: str, contents: Iterable[Html], *, level: int = 2) -> Html:
    """Make a section with a heading; empty if it has no contents."""
    body = "\n".join(filter(None, contents))
    return f"<section><h{level}>{text(title)}</h{level}>\n{body}\n</section>" if body else ""


def table(names: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str, marked: int | None = None) -> Html:
    """Make a table whose first column holds the names of its rows; ``marked`` is the row to emphasize."""
    content = [[str(cell) for cell in row] for row in rows]
    kinds = [_alignment([row[column] for row in content]) for column in range(len(names))]
    head = "".join(f'<th scope="col"{kind}>{text(name)}</th>' for name, kind in zip(names, kinds, strict=True))
    body = []
    for index, (first, *rest) in enumerate(content):
        emphasis = ' class="marked"' if index == marked else ""
        cells = "".join(f"<td{kind}>{text(cell)}</td>" for cell, kind in zip(rest, kinds[1:], strict=True))
        body.append(f'<tr{emphasis}><th scope="row"{kinds[0]}>{text(first)}</th>{cells}</tr>')
    label = text(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table><caption>{label}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(body)}</tbody></table></div>"
    )


def _alignment(cells: Sequence[str]) -> Html:
    # Numbers are aligned at the right.
    written = [cell for cell in cells if cell]
    return ' class="number"' if written and all(_NUMBER.match(cell) for cell in written) else ""


def details(summary: str, contents: Html) -> Html:
    """Make a part that is folded until the reader opens it."""
    return f"<details><summary>{text(summary)}</summary>\n{contents}\n</details>"


def preformatted(content: object, label: str) -> Html:
    """Show a text with its line breaks, such as a generated sample."""
    return f'<pre tabindex="0" role="region" aria-label="{text(label)}">{text(content)}</pre>'


def grid(charts: Iterable[Html]) -> Html:
    """Lay out charts in columns as wide as the screen allows; empty without charts."""
    found = "\n".join(filter(None, charts))
    return f'<div class="grid">\n{found}\n</div>' if found else ""


def embedded_json(value: Any) -> Html:
    """Write JSON for a script element, which no text in it can end."""
    plain = json.dumps(value, separators=(",", ":"), allow_nan=False)
    # "</script>" in a text would end the element.
    for character in "<>&\u2028\u2029":
        plain = plain.replace(character, f"\\u{ord(character):04x}")
    return plain


def page(title: str, contents: Iterable[Html], *, version: str | None = None) -> Html:
    """Make the complete page. Its content security policy forbids every request and every foreign script.

    Only a page from a server has a ``version`` of its contents: it asks for a newer one. Another page has a script only
    if it has a chart to read values from.
    """
    body = "\n".join(filter(None, contents))
    has_script = version is not None or '<figure class="chart"' in body
    style, script = _shipped("page.css"), _shipped("page.js") if has_script else ""
    # The browser runs this script only: text that gets through the escaping cannot run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The script of a served page asks its own server for a newer version.
    connect = "'none'" if version is None else "'self'"
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f'<title>{text(title)}</title><link rel="icon" href="data:,"><style>{style}</style>'
    )
    mark = "" if version is None else f' data-version="{text(version)}"'
    end = f"<script>{script}</script>\n" if script else ""
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body{mark}>\n<main>\n<h1>{text(title)}</h1>\n'
        f"{body}\n</main>\n{end}</body></html>\n"
    )


def _shipped(name: str) -> str:
    return "\n" + Path(__file__).with_name(name).read_text(encoding="utf-8")
