"""Hook of mkdocs: adds the generated reference and the pages of the repository's root, and resolves links to source.

docs/*.md                         --> pages, with links out of docs/ led to the following
README.md, CHANGELOG.md, ...      --> project/*.md
website/reference (code of hlat)  --> reference/*.md
any other file that a page links  --> source/PATH, as it is; a link to a folder becomes plain text
"""

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from website.reference import PAGES  # noqa: E402

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


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files that are not in docs/."""
    for root, site in PROJECT.items():
        files.append(File.generated(config, site, content=(ROOT / root).read_text(encoding="utf-8")))
    for site, page in PAGES.items():
        files.append(File.generated(config, site, content=page()))
    files.append(
        File.generated(config, _WORKER, content=(ROOT / "website/frame_worker.js").read_text(encoding="utf-8"))
    )
    linked = set()
    for file in files.documentation_pages():
        for _, target in _LINK.findall(file.content_string):
            path = _repository_path(file.src_uri, target)
            if path is not None and not path.startswith("docs/") and path not in PROJECT and (ROOT / path).is_file():
                linked.add(path)
    for path in sorted(linked):
        files.append(File.generated(config, _source(path), content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to the pages and files that ``on_files`` has added; keep the notebook out of the search."""
    uri = page.file.src_uri
    if uri in PAGES:
        return markdown
    if uri.startswith("notebook/"):
        page.meta["search"] = {"exclude": True}  # records, where a search should find instructions

    def lead(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = _repository_path(uri, target)
        if path is None:
            return match[0]
        heading = target.partition("#")[1] + target.partition("#")[2]
        if path.startswith("docs/"):
            site = path.removeprefix("docs/")
        elif path in PROJECT:
            site = PROJECT[path]
        elif (ROOT / path).is_file():
            site = _source(path)
        else:
            return text
        return f"[{text}]({os.path.relpath(site, PurePosixPath(uri).parent)}{heading})"

    return _LINK.sub(lead, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load the worker of the search from the site itself."""
    return output.replace(_SHIM, "../" * page.url.count("/") + _WORKER)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Do the same in the page of missing addresses."""
    return output_content.replace(_SHIM, f"/{_WORKER}")


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
