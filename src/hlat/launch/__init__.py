"""Start the processes of a run on this machine, supervise and restart them, and report in one message why a run ended.

Modules that need torch are imported on first use: the supervisor of a single process does not import it.
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.launch.extension_check import check_extensions
    from hlat.launch.fork_launcher import launch_forked
    from hlat.launch.multiprocess_launcher import hlat_command, launch_multiprocess
    from hlat.launch.process_set import ProcessSet
    from hlat.launch.supervisor import SupervisedRun, supervise
    from hlat.launch.worker_main import worker_context

__getattr__ = lazily(
    __name__,
    {
        "extension_check": ("check_extensions",),
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
    "check_extensions",
    "hlat_command",
    "launch_forked",
    "launch_multiprocess",
    "supervise",
    "worker_context",
]
