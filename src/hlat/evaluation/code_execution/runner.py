"""Program that runs one generated program: started by ``sandbox.py`` in a process of its own, never imported by hlat.

    argv: seconds of processor time, bytes of memory, file descriptor    stdin: the token, a line, and the program
        -> no network -> limits -> not root -> run -> the token is written to the file descriptor

It only uses the standard library, and runs with ``python -I -S``.
"""

import ctypes
import os
import resource
import signal
import stat
import sys

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # of sched.h
_NOBODY = 65534
_FILE_BYTES = 1 << 20


def _drop_rights() -> None:
    """Leave the network and the rights of root, if the kernel lets this user.

    Root becomes user nobody. If nobody could not read Python's library, it stays the owner of root's files, but in a
    user namespace, where it has no further rights outside.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0 and _others_can_read(os.__file__):
        library.unshare(_NEW_NETWORK)
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    else:
        library.unshare(_NEW_USER | _NEW_NETWORK)


def _others_can_read(path: str) -> bool:
    """Return True if every user can read a file."""
    if not os.stat(path).st_mode & stat.S_IROTH:  # noqa: PTH116  (nothing is imported that need not be)
        return False
    while (path := os.path.dirname(path)) != "/":  # noqa: PTH120
        if not os.stat(path).st_mode & stat.S_IXOTH:  # noqa: PTH116
            return False
    return True


def _limit(seconds: int, memory: int) -> None:
    for what, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))
    library = ctypes.CDLL(None)
    library.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: setuid programs gain nothing
    library.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: dies with hlat
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # no child processes, no threads; the kernel exempts root


def main() -> None:
    """Run the program of standard input; write the token if it ends without an exception."""
    seconds, memory, answer = (int(word) for word in sys.argv[1:4])
    token, _, program = sys.stdin.read().partition("\n")
    _drop_rights()
    _limit(seconds, memory)
    code = compile(program, "<generated>", "exec")
    exec(code, {"__name__": "__main__"})
    os.write(answer, token.encode())


if __name__ == "__main__":
    main()
