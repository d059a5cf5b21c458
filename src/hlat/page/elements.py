"""HTML elements and the complete page, with its style and script. Every text from outside is escaped here only.

    text, tables, charts -> elements (escaped) -> page: one file, without references to others
                                STYLE, SCRIPT --^

The style is light, dark and printed, with one column on a phone; series and parts have colours and dash patterns by
number. The script reads values of a chart with a slider, pointer or finger, and reloads a served page when it changes.
Without it everything on a page is still shown. It puts text into the page as text, never as HTML.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from colorsys import hls_to_rgb
from html import escape
from typing import Any

from hlat.runtime.terminal import escape_controls

_COLOURS = (
    "#3b7dd8", "#d9663a", "#3a9a5b", "#b0549b", "#a8872a", "#2c9aa8", "#d14b6a", "#7a6fd0",
    "#7f8c3a", "#9a6a4b", "#5b8aa0", "#c0519e", "#4f9a3a", "#8a7a9a", "#c07a2a", "#6a8f7a",
)  # fmt: skip
"""Colours that differ from each other, with a contrast of at least 3 to both backgrounds."""

_GOLDEN = 0.618033988749895  # golden ratio, less 1

STYLE = """
:root { --back: #ffffff; --text: #1c1e21; --soft: #565b63; --line: #c9ced6; --band: #f2f4f7; --link: #1a56b0; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15171a; --text: #e8eaed; --soft: #a9b0ba; --line: #434a54; --band: #1f2328; --link: #8ab4f8; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; } h2 { font-size: 1.25rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 1.2rem 0 .3rem; overflow-wrap: anywhere; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
a { color: var(--link); }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .6rem; border: 1px solid var(--line); border-radius: .4rem; min-width: 0; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .axis { stroke: var(--soft); } svg .gridline { stroke: var(--line); stroke-width: .6; }
svg .mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
svg.wide { min-width: 44rem; }
svg .glyph { fill: var(--text); } svg .cursor { stroke: var(--text); stroke-width: 1; visibility: hidden; }
svg .frame { fill: none; stroke: var(--soft); } svg .edge { stroke: var(--back); stroke-width: .5; }
svg .halo { stroke: var(--text); fill: none; stroke-width: 2; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .2rem 0; padding: 0; list-style: none;
  font-size: .875rem; }
.legend li { overflow-wrap: anywhere; } .legend svg { display: inline-block; width: 1.6em; height: .8em; }
input[type=range] { width: 100%; margin: .2rem 0; min-height: 24px; display: none; }
.live input[type=range] { display: block; }
output { display: block; min-height: 1.5em; font-size: .875rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; margin: .5rem 0; font-size: .9rem; }
caption { text-align: left; color: var(--soft); padding: .2rem 0; }
td, th { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid var(--line); font-weight: 400;
  vertical-align: top; }
thead th { font-weight: 600; } td.number, th.number { text-align: right; }
td { overflow-wrap: break-word; max-width: 32rem; }
.marked th, .marked td { font-weight: 700; background: var(--band); }
pre { background: var(--band); padding: .6rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; min-height: 24px; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
@media print {
  :root { --back: #ffffff; --text: #000000; --soft: #333333; --line: #999999; --band: #eeeeee; }
  body { font-size: 11px; } figure, tr { break-inside: avoid; } .grid { grid-template-columns: 1fr 1fr; }
  input[type=range], output { display: none !important; }
}
"""


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


SCRIPT = """
"use strict";
(() => {
  const show = (value) => Number.isInteger(value) && Math.abs(value) < 1e15
    ? value.toLocaleString("en") : String(Number(value.toPrecision(5)));
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
    return x - xs[low] <= xs[high] - x ? low : high;
  };
  for (const figure of document.querySelectorAll("figure.chart")) {
    const holder = figure.querySelector("script"), slider = figure.querySelector("input");
    if (!holder || !slider) continue;
    let data = null;
    const svg = figure.querySelector("svg"), output = figure.querySelector("output");
    const cursor = figure.querySelector(".cursor");
    figure.classList.add("live");
    const read = () => {
      data = data || JSON.parse(holder.textContent);
      const share = slider.value / slider.max;
      const x = data.log ? data.from * Math.pow(data.to / data.from, share) : data.from + share * (data.to - data.from);
      const words = data.series.filter((series) => series.x.length).map((series) => {
        const index = nearest(series.x, x);
        return series.name + " " + show(series.y[index]) + " at " + show(series.x[index]);
      });
      cursor.setAttribute("transform", "translate(" + (data.left + share * data.width) + " 0)");
      cursor.style.visibility = "visible";
      output.textContent = words.join("; ") + " " + data.unit;
      slider.setAttribute("aria-valuetext", output.textContent);
    };
    slider.addEventListener("input", read);
    svg.addEventListener("pointermove", (event) => {
      data = data || JSON.parse(holder.textContent);
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const share = ((event.clientX - box.left) * scale - data.left) / data.width;
      slider.value = Math.round(Math.min(1, Math.max(0, share)) * slider.max);
      read();
    });
  }
  const version = document.body.dataset.version;
  if (version !== undefined) {
    const ask = async () => {
      try {
        const answer = await fetch("version", {cache: "no-store"});
        if (answer.ok && (await answer.text()) !== version && !document.querySelector("input:focus")) location.reload();
      } catch (error) { /* the server has ended: the page stays as it is */ }
    };
    setInterval(ask, 5000);
  }
})();
"""


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
    script = SCRIPT if version is not None or '<figure class="chart"' in body else ""
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
        f'<title>{text(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style>'
    )
    mark = "" if version is None else f' data-version="{text(version)}"'
    end = f"<script>{script}</script>\n" if script else ""
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body{mark}>\n<main>\n<h1>{text(title)}</h1>\n'
        f"{body}\n</main>\n{end}</body></html>\n"
    )
