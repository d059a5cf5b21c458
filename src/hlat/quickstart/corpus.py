"""A corpus that every machine with Python has: the source text of the standard library."""

import sysconfig
from pathlib import Path

from hlat.runtime import LaunchError

# Not prose that a person wrote as a program: other people's packages, test data with deliberate
# encoding errors, and generated tables.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "pydoc_data", "encodings", "__pycache__"}


def standard_library() -> list[dict[str, str]]:
    """Sources (see ``data.sources``) that together are the standard library of this Python.

    Raises:
        LaunchError: this Python comes without source text.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    packages = sorted(d for d in root.iterdir() if d.is_dir() and d.name not in _LEFT_OUT) if root.is_dir() else []
    patterns = [root / "*.py", *(package / "**" / "*.py" for package in packages if any(package.rglob("*.py")))]
    if not any(root.glob("*.py")):
        message = f"{root}: holds no Python source text, which is the corpus of the quickstart."
        raise LaunchError(f"{message} Use a text of your own: hlat train quickstart data.path=FOLDER")
    return [{"path": str(pattern)} for pattern in patterns]
