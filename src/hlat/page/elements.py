"""HTML elements and the complete page. Every text from outside is escaped here, and in no other place.

text, tables, charts -> elements -> page: one file, without references to others
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from hlat.page.script import SCRIPT
from hlat.page.style import STYLE
from hlat.runtime.terminal_text import escape_controls

Html = str
"""Text of HTML, in which everything from outside has been escaped."""
_NUMBER = re.compile(r"^(-?[0-9][0-9,.e+-]*( of [0-9,]+)?[%]?( ?[A-Za-z]{1,7})?|nan|-?inf|unknown)$")


def text(value: object) -> Html:
    """Escape a text for HTML, also inside attributes; control and bidirectional characters become visible."""
    return escape(escape_controls(str(value)))


def paragraph(content: object) -> Html:
    """Make a paragraph of plain text."""
    return f"<p>{text(content)}</p>"


def section(title: str, contents: Iterable[Html], *, level: int = 2) -> Html:
    """Make a section with a heading; empty if it has no contents."""
    body = "\n".join(filter(None, contents))
    return f"<section><h{level}>{text(title)}</h{level}>\n{body}\n</section>" if body else ""


def table(names: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str, marked: int | None = None) -> Html:
    """Make a table whose first column holds the names of its rows.

    Args:
        names: names of the columns.
        rows: cells, as text.
        caption: title of the table, for everyone and for screen readers.
        marked: index of the row to emphasize; None for no row.
    """
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
    """Return the attribute of the cells of a column: numbers are aligned at the right."""
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
    """Write JSON for a script element; a text cannot end the element."""
    plain = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        plain = plain.replace(character, f"\\u{ord(character):04x}")
    return plain


def page(title: str, contents: Iterable[Html], *, version: str | None = None) -> Html:
    """Make the complete page. Its content security policy forbids every request and every foreign script.

    A page that has no chart to read values from, and does not come from a server, has no script at all.

    Args:
        title: title and main heading.
        contents: elements below the heading.
        version: version of the contents, if the page comes from a server that it may ask for a newer one.
    """
    body = "\n".join(filter(None, contents))
    script = SCRIPT if version is not None or '<figure class="chart"' in body else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connect = "'none'" if version is None else "'self'"
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f'<title>{text(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style>'
    )
    mark = "" if version is None else f' data-version="{text(version)}"'
    end = f"<script>{script}</script>\n" if script else ""
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body{mark}>\n<main>\n<h1>{text(title)}</h1>\n'
        f"{body}\n</main>\n{end}</body></html>\n"
    )
