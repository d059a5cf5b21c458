"""Version of hlat: of the installed distribution, or of the source tree that Python was pointed at."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def hlat_version() -> str:
    """Version of the installed distribution; without one, of the source tree's pyproject.toml."""
    try:
        return version("hlat")
    except PackageNotFoundError:  # PYTHONPATH=src
        import tomllib  # noqa: PLC0415

        return str(tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["version"])
