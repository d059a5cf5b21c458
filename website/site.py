"""Build the documentation as a site: ``python -m website.site [FOLDER]``, by default ``site``.

docs/*.md                         --> pages, with links out of docs/ led to the following
README.md, CHANGELOG.md, ...      --> project/*.md
website/reference (code of hlat)  --> reference/*.md
any other file that a page links  --> source/PATH, as it is; a link to a folder becomes plain text

All of them are laid into one folder, from which Zensical builds the site. A link that leads nowhere is an error.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath

from website.reference import PAGES

ROOT = Path(__file__).resolve().parents[1]
PROJECT = {
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
_ORIGIN = {site: root for root, site in PROJECT.items()}
_SHIM = "https://unpkg.com/iframe-worker/shim"
"""Script that the plugin ``offline`` asks a server for, to search in pages that are opened as files."""
_WORKER = "assets/javascripts/frame_worker.js"
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")  # of a page or, behind "!", a picture
_RECORD = "---\nsearch: {exclude: true}\n---\n\n"  # the notebook: a search should find instructions


def build(site: Path) -> None:
    """Build the site into a new folder."""
    with tempfile.TemporaryDirectory() as name:
        staged = Path(name)
        _stage(staged / "docs")
        shutil.copy(ROOT / "mkdocs.yml", staged)
        subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=staged, check=True)
        built = staged / "site"
        shutil.copy(ROOT / "website/frame_worker.js", built / _WORKER)
        for page in built.rglob("*.html"):
            # The worker of the search comes from the site itself.
            worker = os.path.relpath(built / _WORKER, page.parent)
            text = page.read_text(encoding="utf-8").replace(_SHIM, worker)
            page.write_text(text, encoding="utf-8")
        shutil.copytree(built, site, dirs_exist_ok=True)


def _stage(docs: Path) -> None:
    shutil.copytree(ROOT / "docs", docs)
    pages = {uri: (ROOT / root).read_text(encoding="utf-8") for root, uri in PROJECT.items()}
    pages |= {str(path.relative_to(docs)): path.read_text(encoding="utf-8") for path in docs.rglob("*.md")}
    linked: set[str] = set()
    led = {uri: _with_links_led(uri, text, linked) for uri, text in pages.items()}
    led |= {uri: page() for uri, page in PAGES.items()}
    for uri, text in led.items():
        target = docs / uri
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((_RECORD if uri.startswith("notebook/") else "") + text, encoding="utf-8")
    for path in linked:
        target = docs / _source(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)


def _with_links_led(uri: str, markdown: str, linked: set[str]) -> str:
    """Lead the links of a page to their places on the site; add the files of the repository among them."""

    def lead(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = _repository_path(uri, target)
        if path is None:
            return match[0]
        if path.startswith("docs/"):
            place = path.removeprefix("docs/")
        elif path in PROJECT:
            place = PROJECT[path]
        elif (ROOT / path).is_file():
            linked.add(path)
            place = _source(path)
        else:
            return text
        heading = target.partition("#")[1] + target.partition("#")[2]
        return f"[{text}]({os.path.relpath(place, PurePosixPath(uri).parent)}{heading})"

    return _LINK.sub(lead, markdown)


def _source(path: str) -> str:
    """Place of a linked file on the site; Markdown is shown as text, not as a page that the navigation lacks."""
    return f"source/{path}.txt" if path.endswith(".md") else f"source/{path}"


def _repository_path(uri: str, target: str) -> str | None:
    """Path in the repository that a link of a page leads to; None for headings of the page and addresses."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    folder = PurePosixPath(_ORIGIN.get(uri, f"docs/{uri}")).parent
    return os.path.normpath(folder / path)


if __name__ == "__main__":
    if len(sys.argv) > 2 or (len(sys.argv) == 2 and sys.argv[1].startswith("-")):
        raise SystemExit(__doc__)
    build(Path(sys.argv[1] if len(sys.argv) == 2 else "site"))
