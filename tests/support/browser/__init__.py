"""Visits of pages in headless Chromium, at the widths of a phone and of a desktop, also with axe-core.

axe-core is not a Python package: ``npm ci`` in this folder fetches the release of package-lock.json.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"


@dataclass(frozen=True)
class Visit:
    """Observations of a visit: one result of the script per view."""

    results: list[Any]
    requests: list[str]
    console: list[str]
    pdf_bytes: int = field(default=0)


def visit(
    url: str,
    script: str,
    views: Sequence[dict[str, int]] = (PHONE, DESKTOP),
    *,
    dark: bool = False,
    libraries: Sequence[Path] = (),
    screenshots: Sequence[Path] = (),
    pdf: bool = False,
    record: bool = True,
) -> Visit:
    """Visit a page; the body of an async function ``script`` is run at each view.

    ``record`` is False for a page in a folder that loads others: its requests are not recorded.
    """
    if find_spec("PySide6.QtWebEngineCore") is None:
        pytest.skip("needs Chromium: pip install -e '.[browser]'")
    request = {
        "url": url,
        "script": script,
        "views": list(views),
        "dark": dark,
        "libraries": [str(path) for path in libraries],
        "screenshots": [str(path) for path in screenshots],
        "pdf": pdf,
        "record": record,
    }
    command = [sys.executable, str(Path(__file__).parent / "chromium.py"), json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["ok"], f"{url} was not loaded"
    assert all("error" not in result for result in seen["results"]), seen["results"]
    return Visit([result["value"] for result in seen["results"]], seen["requests"], seen["console"], seen["pdf_bytes"])


def serious_problems(url: str) -> list[str]:
    """Return the serious and critical problems that axe-core finds on a page: phone, desktop, dark mode."""
    if not AXE.is_file():
        pytest.skip(f"needs axe-core: npm ci --prefix {Path(__file__).parent}")
    script = """
        const found = await axe.run(document, {resultTypes: ["violations"]});
        return found.violations.filter((each) => ["serious", "critical"].includes(each.impact))
            .map((each) => each.id + ": " + each.nodes.slice(0, 3).map((node) => node.html.slice(0, 200)).join(" | "));
    """
    visits = (visit(url, script, libraries=[AXE], dark=dark) for dark in (False, True))
    return [problem for seen in visits for result in seen.results for problem in result]
