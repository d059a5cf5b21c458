"""Starting the processes of a run on this machine, supervising them, and saying in one voice how they ended.

What needs torch is imported when it is first asked for: the supervisor of one process does without.
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.launch.fork_launcher import launch_forked
    from hlat.launch.multiprocess_launcher import hlat_command, launch_multiprocess
    from hlat.launch.process_set import ProcessSet
    from hlat.launch.supervisor import SupervisedRun, supervise
    from hlat.launch.worker_main import worker_context

__getattr__ = lazily(
    __name__,
    {
        "fork_launcher": ("launch_forked",),
        "multiprocess_launcher": (
            "hlat_command",
            "launch_multiprocess",
        ),
        "process_set": ("ProcessSet",),
        "supervisor": (
            "SupervisedRun",
            "supervise",
        ),
        "worker_main": ("worker_context",),
    },
)

__all__ = [
    "ProcessSet",
    "SupervisedRun",
    "hlat_command",
    "launch_forked",
    "launch_multiprocess",
    "supervise",
    "worker_context",
]
