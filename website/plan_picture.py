"""Picture of a plan for README: the drawings of the page of ``hlat plan --to``, one below the other, as one SVG.

python -m website.plan_picture        writes docs/pictures/plan.svg
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

TARGET = Path(__file__).resolve().parents[1] / "docs/pictures/plan.svg"
COMMAND = ("plan", "--model", "llama-3.2-1b", "--tokens", "100B", "--cluster", "p5.48xlarge:2")
WIDTH, LINE, PAD, COLUMNS = 420, 18, 10, 2
_STYLE = """
svg { --back: #fff; --text: #1c1e21; --soft: #565b63; --line: #c9ced6; }
text { fill: var(--text); font: 12px system-ui, sans-serif; } svg svg text { fill: var(--soft); }
.axis { stroke: var(--soft); } .gridline { stroke: var(--line); stroke-width: .6; }
.frame { fill: none; stroke: var(--soft); } .edge { stroke: var(--back); stroke-width: .5; }
.halo { stroke: var(--text); fill: none; stroke-width: 2; } .glyph { fill: var(--text); }
.mark { stroke: var(--soft); stroke-dasharray: 2 3; } .cursor { visibility: hidden; } .title { font-weight: 600; }
"""


def picture(page: str) -> str:
    """Return the SVG made of the drawings of a page, each with its title and legend."""
    parts, y = [], PAD
    for figure in re.findall(r"<figure.*?</figure>", page, re.DOTALL):
        drawing = re.search(r'<svg viewBox="0 0 (\d+) (\d+)" role="img".*?</svg>', figure, re.DOTALL)
        caption = re.search(r"<figcaption[^>]*>(.*?)</figcaption>", figure, re.DOTALL)
        if drawing is None or caption is None:
            continue
        parts.append(f'<text class="title" x="{PAD}" y="{y + 14}">{_plain(caption[1])}</text>')
        y += LINE + 4
        width, height = int(drawing[1]), int(drawing[2])
        parts.append(drawing[0].replace("<svg ", f'<svg x="{PAD}" y="{y}" width="{width}" height="{height}" ', 1))
        y += height + 4
        entries = re.findall(r"<li>(<svg.*?</svg>)(.*?)</li>", figure, re.DOTALL)
        for place, (sign, text) in enumerate(entries):
            x, row = PAD + place % COLUMNS * WIDTH // COLUMNS, y + place // COLUMNS * LINE
            parts.append(sign.replace("<svg ", f'<svg x="{x}" y="{row + 5}" width="16" height="8" ', 1))
            parts.append(f'<text x="{x + 22}" y="{row + 13}">{_plain(text)}</text>')
        y += (len(entries) + COLUMNS - 1) // COLUMNS * LINE + PAD
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}">'
    back = f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", back, *parts, "</svg>", ""])


def _plain(html: str) -> str:
    text = re.sub(r"<[^>]*>", "", html)
    return escape(" ".join(re.sub(r"&amp;", "&", text).split()))


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        command = [sys.executable, "-m", "hlat", *COMMAND, "--to", str(page)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        TARGET.write_text(picture(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
