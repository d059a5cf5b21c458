"""Checks of a start: what would stop a run minutes after its command, or is odd, before anything has started.

    recipe, this machine --CHECKS (``table.py``)--> StartReport: every problem at once, and warnings

`hlat check` and `hlat train` both are this.
"""
