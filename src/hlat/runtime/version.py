"""The installation of hlat: its version, and commands that install extras of it, which is on no package index.

direct_url.json of the installation (PEP 610) -> folder, archive or git -> its path or URL with the extras
no such file, as from an index of one's own   -> the requirements of the extras, from hlat's metadata
"""

import json
import re
import shlex
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hlat.runtime.urls import redact

VERSION = "0.1.0"  # `hatch version minor` writes the next one

_PROJECT = Path(__file__).parents[3]


_OF_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")


def installed_version(package: str) -> str:
    """Return the version of a package, which is not imported; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def install_command(*extras: str) -> str:
    """Return the command that installs extras, as hlat itself was installed here."""
    names = ",".join(extras)
    try:
        found = distribution("hlat")
    except PackageNotFoundError:  # its folder is on the path, and nothing was installed
        return f"pip install -e {shlex.quote(f'{_PROJECT}[{names}]')}"
    origin = json.loads(found.read_text("direct_url.json") or "null")
    if origin is not None:
        return f"pip install {_same_again(origin, names)}"
    # More than one extra may need the same package.
    needed = dict.fromkeys(
        text.partition(";")[0].strip()
        for text in found.requires or ()
        if (extra := _OF_EXTRA.search(text)) is not None and extra[1] in extras
    )
    return f"pip install {' '.join(map(shlex.quote, needed))}"


def _same_again(origin: dict[str, Any], names: str) -> str:
    url = redact(str(origin["url"]))
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"{editable}{shlex.quote(f'{unquote(urlsplit(url).path)}[{names}]')}"
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return shlex.quote(f"hlat[{names}] @ {url}")
