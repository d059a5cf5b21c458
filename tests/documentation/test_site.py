"""The site is built without a warning and needs no network to be read, nor a server to be searched.

Needs the extra docs, and the search Chromium (extra browser); .ci/run has both.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

import pytest
import yaml

from tests.support.browser import DESKTOP, visit
from tests.support.pages import ROOT
from website.reference import PAGES

NAVIGATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]


def pages_of(navigation: object) -> Iterator[str]:
    """Paths of the pages in a navigation."""
    if isinstance(navigation, str):
        yield navigation
    for entry in (
        navigation.values() if isinstance(navigation, dict) else navigation if isinstance(navigation, list) else ()
    ):
        yield from pages_of(entry)


class Loaded(HTMLParser):
    """Collects what a browser loads for a page: scripts, styles, fonts, pictures and frames; not links to click."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"script": "src", "img": "src", "iframe": "src", "source": "src"}
        values = dict(attrs)
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(values.get("href") or "")
        elif tag in names:
            self.found.append(values.get(names[tag]) or "")


def test_the_navigation_is_short_and_leads_to_every_page_but_those_of_the_notebook() -> None:
    """A page is in the navigation, or one that is links to it."""
    named = list(pages_of(NAVIGATION))
    sections = [entry for entry in NAVIGATION if not isinstance(next(iter(entry.values())), str)]
    assert len(named) == len(set(named)) and len(named) + len(sections) < 45
    docs = ROOT / "docs"
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md") if path.parent.name != "notebook"}
    assert set(named) <= written | PAGES.keys()
    linked = set(named)
    for page in written & set(named):
        targets = re.findall(r"\]\(([^)\s#]+)", (docs / page).read_text(encoding="utf-8"))
        linked |= {os.path.normpath(PurePosixPath(page).parent / target) for target in targets}
    assert (written | PAGES.keys()) - linked == set()
    assert {"../CHANGELOG.md", "../CONTRIBUTING.md", "../SECURITY.md"} <= linked


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    pytest.importorskip("zensical", reason="needs Zensical (extra docs)")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "website.site", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    built = sorted(site.rglob("*.html"))
    assert len(built) > 80
    elsewhere = {}
    for file in built:
        parser = Loaded()
        parser.feed(file.read_text(encoding="utf-8"))
        elsewhere[file.name] = [one for one in parser.found if re.match(r"(https?:)?//", one)]
    assert {name: urls for name, urls in elsewhere.items() if urls} == {}
    styles = [file for file in site.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//", file.read_text())]
    assert styles == []


def test_the_search_finds_instructions_and_no_records(site: Path) -> None:
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("/")[0] for entry in index["items"]}
    assert (site / "notebook/speed.html").is_file()
    assert "reference" in found and "notebook" not in found


SEARCH = """
document.querySelector(".md-search__button").click()
const wait = () => new Promise(resolve => setTimeout(resolve, 200))
for (let tries = 0; tries < 300; tries++) {
  await wait()
  const dialog = [...document.querySelectorAll("*")].find(each => each.shadowRoot)?.shadowRoot
  const box = dialog?.querySelector("input")
  if (!box) continue
  if (!box.value) {
    box.value = "warmup_steps"
    box.dispatchEvent(new Event("input", {bubbles: true}))
  }
  const links = [...dialog.querySelectorAll("a")].map(link => link.href)
  if (links.length) return links
}
return []
"""


@pytest.mark.browser
def test_a_field_is_found_by_the_search_of_pages_that_are_opened_as_files(site: Path) -> None:
    seen = visit((site / "index.html").as_uri(), SEARCH, [DESKTOP], record=False)
    assert any("reference/recipe.html" in link and link.endswith("#schedule-warmup_steps") for link in seen.results[0])
    assert seen.console == []
