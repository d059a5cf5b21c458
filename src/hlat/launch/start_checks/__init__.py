"""Checks of a start: what would stop a run minutes after its command, or is odd, before anything has started.

    recipe, this machine --CHECKS (``table.py``)--> StartReport: every problem at once, and warnings

`hlat check` and `hlat train` both are this.
"""

from hlat.launch.start_checks.examine import load_and_check
from hlat.launch.start_checks.place import Here

__all__ = ["Here", "load_and_check"]
