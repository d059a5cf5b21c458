"""Signals to the main thread of another process, not to any of its threads.

A signal sent to a process that is stopped is handled by the thread that wakes first when the process continues. By
then the main thread may have gone on, so that a dump of stacks does not show where it was stopped. A signal sent to the
main thread itself is handled before that thread does anything else.
"""

import ctypes
import os


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process; to the process where the C library cannot (no ``tgkill``).

    Linux has ``tgkill`` from glibc 2.30 on; macOS does not.

    Args:
        pid: id of the process, which on Linux is that of its main thread too.
        number: the signal.

    Raises:
        ProcessLookupError: there is no such process.
        PermissionError: it is another user's.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "tgkill"):
        os.kill(pid, number)
    elif library.tgkill(pid, pid, number) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
