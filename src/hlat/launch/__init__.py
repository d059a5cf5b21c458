"""Starting the processes of a run on this machine, supervising them, and saying in one voice how they ended.

What needs torch is imported when it is first asked for: the supervisor of one process does without.
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.launch.fork_launcher import forked
    from hlat.launch.multiprocess_launcher import hlat_command, several
    from hlat.launch.process_set import Workers
    from hlat.launch.supervisor import Supervised, supervise
    from hlat.launch.worker_main import working

__getattr__ = lazily(
    __name__,
    {
        "fork_launcher": ("forked",),
        "multiprocess_launcher": (
            "hlat_command",
            "several",
        ),
        "process_set": ("Workers",),
        "supervisor": (
            "Supervised",
            "supervise",
        ),
        "worker_main": ("working",),
    },
)

__all__ = ["Supervised", "Workers", "forked", "hlat_command", "several", "supervise", "working"]
