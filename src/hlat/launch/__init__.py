"""Starting the processes of a run on this machine, supervising them, and saying in one voice how they ended.

What needs torch is imported when it is first asked for: the supervisor of one process does without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hlat.launch.forked import forked
from hlat.launch.supervisor import GONE_ON, Start, Supervised, supervise
from hlat.launch.worker import working
from hlat.launch.workers import Workers

if TYPE_CHECKING:
    from hlat.launch.local import hlat_command, several

_MODULES = {"hlat_command": "local", "several": "local"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = ["GONE_ON", "Start", "Supervised", "Workers", "forked", "hlat_command", "several", "supervise", "working"]
