"""Display of a run for people: the stages of its start, and its console, on terminals and in log files."""

from hlat.tracking.display.console import (
    Console,
    SilentConsole,
    make_console,
    prepare_streams,
    shows_a_line,
    shows_progress,
)
from hlat.tracking.display.data_progress import show_data_progress, show_progress
from hlat.tracking.display.start_display import show_stages

__all__ = [
    "Console",
    "SilentConsole",
    "make_console",
    "prepare_streams",
    "show_data_progress",
    "show_progress",
    "show_stages",
    "shows_a_line",
    "shows_progress",
]
