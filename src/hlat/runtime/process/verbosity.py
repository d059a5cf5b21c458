"""Verbosity of the commands: HLAT_VERBOSE=1 in the environment, which the option -v sets, asks for all notes.

The processes of a run inherit the environment, so all of them know.
"""

import os

VERBOSE_ENV = "HLAT_VERBOSE"


def is_verbose() -> bool:
    """Return True if notes about what was decided are asked for, besides warnings and results."""
    return os.environ.get(VERBOSE_ENV, "0") not in ("", "0")


def be_verbose() -> None:
    """Ask for all notes, in this process and those that it starts."""
    os.environ[VERBOSE_ENV] = "1"
