"""Starting the processes of a run on this machine, supervising them, and saying in one voice how they ended.

What needs torch is imported when it is first asked for: the supervisor of one process does without.
"""

from typing import TYPE_CHECKING

from hlat.launch.forked import forked
from hlat.launch.supervisor import Start, Supervised, supervise
from hlat.launch.worker import working
from hlat.launch.workers import Workers
from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.launch.local import hlat_command, several

__getattr__ = lazily(__name__, {"local": ("hlat_command", "several")})


__all__ = ["Start", "Supervised", "Workers", "forked", "hlat_command", "several", "supervise", "working"]
