"""Corpus of the quickstart: the source text of Python's standard library, which every machine has."""

import sysconfig
from pathlib import Path

from hlat.runtime.errors import LaunchError

# No standard-library source written by hand: installed packages, test data with deliberate encoding errors, and
# generated tables.
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "pydoc_data", "encodings", "__pycache__"}


def standard_library() -> list[dict[str, str]]:
    """Entries of ``data.sources`` for this Python's standard library. LaunchError: it has no source text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    packages = sorted(d for d in root.iterdir() if d.is_dir() and d.name not in _EXCLUDED) if root.is_dir() else []
    patterns = [root / "*.py", *(package / "**" / "*.py" for package in packages if any(package.rglob("*.py")))]
    if not any(root.glob("*.py")):
        message = f"{root}: contains no Python source text, which is the corpus of the quickstart."
        raise LaunchError(f"{message} Use a text of your own: hlat train quickstart data.path=FOLDER")
    return [{"path": str(pattern)} for pattern in patterns]
