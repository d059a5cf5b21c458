"""Style of the pages: light, dark and printed; one column on a phone; colours of series and parts."""

from colorsys import hls_to_rgb

_COLOURS = (
    "#3b7dd8", "#d9663a", "#3a9a5b", "#b0549b", "#a8872a", "#2c9aa8", "#d14b6a", "#7a6fd0",
    "#7f8c3a", "#9a6a4b", "#5b8aa0", "#c0519e", "#4f9a3a", "#8a7a9a", "#c07a2a", "#6a8f7a",
)  # fmt: skip
"""Colours that differ from each other, with a contrast of at least 3 to both backgrounds."""

_GOLDEN = 0.618033988749895

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
    """Return the colour of a series or part by its number, ``#rrggbb``; no two of the first hundreds are equal."""
    if index < len(_COLOURS):
        return _COLOURS[index]
    turn = (index * _GOLDEN) % 1
    lightness = 0.45 + 0.05 * (index % 3)
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(turn, lightness, 0.45))


def dashes(index: int) -> str:
    """Return the dash pattern of a series by its number, so that colour is not the only difference."""
    return ("", "6 3", "2 2", "8 3 2 3")[index % 4]
