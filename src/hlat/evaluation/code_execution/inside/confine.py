"""Limits of the process that calls: resources, rights, files (Landlock) and system calls (seccomp).

They hold for its children too, and cannot be taken back. A limit that the kernel refuses raises OSError: nothing that a
model wrote runs after that.
"""

import ctypes
import os
import resource
import signal
import stat
import struct
from collections.abc import Sequence

_LIBRARY = ctypes.CDLL(None, use_errno=True)
NOBODY = 65534
"""Number of the user that programs run as, if hlat runs as root."""
_FILE_BYTES, _OPEN_FILES = 1 << 20, 32
_PDEATHSIG, _DUMPABLE, _SECCOMP, _NO_NEW_PRIVILEGES = 1, 4, 22, 38  # of prctl
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls: the same on every architecture
# Rights of Landlock. Each version of its interface knows more of them; those that it does not know, seccomp refuses.
_WRITE, _READ, _LIST, _REMOVE, _MAKE, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 14
_RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 5: 16}  # number of rights on files, from that version on
_ANY_TCP, _SIGNALS_AND_ABSTRACT_SOCKETS = 3, 3  # from versions 4 and 6 on


def limit_resources(seconds: int, memory: int) -> None:
    """Limit processor time, memory, size and number of files."""
    for what, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def end_with_parent(parent: int | None) -> None:
    """Be killed when the parent ends (Linux); ``parent`` is None where the end of a namespace does that."""
    if hasattr(_LIBRARY, "prctl"):
        # The kernel forgets this when the user changes, so it comes after drop_rights.
        _call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent not in (None, os.getppid()):  # it ended before
        os._exit(1)


def drop_rights() -> None:
    """Give up the rights of root, and every way to get rights; no other process of this user may look into this one."""
    # If nobody could not read Python's library, it stays the owner of root's files, without any of root's further
    # rights.
    if os.geteuid() == 0 and others_can_read(os.__file__):
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _call("capset", header, bytes(24))
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("prctl", _DUMPABLE, 0, 0, 0, 0)  # also: no core dump, wherever the kernel sends them


def others_can_read(path: str) -> bool:
    """Return True if every user can read a file."""
    if not os.stat(path).st_mode & stat.S_IROTH:  # noqa: PTH116  (nothing is imported that need not be)
        return False
    while (path := os.path.dirname(path)) != "/":  # noqa: PTH120
        if not os.stat(path).st_mode & stat.S_IXOTH:  # noqa: PTH116
            return False
    return True


def restrict_files(readable: Sequence[str], devices: Sequence[str], folder: str) -> None:
    """Allow no files but these, with Landlock: readable ones, devices, and all in a folder."""
    version = _call("syscall", _CREATE_RULESET, None, 0, 1)
    # A right that the kernel does not know makes it refuse the whole ruleset.
    known = (1 << next(count for since, count in reversed(_RIGHTS_BY_VERSION.items()) if since <= version)) - 1
    handled = struct.pack("QQQ", known, _ANY_TCP, _SIGNALS_AND_ABSTRACT_SOCKETS)
    # The structure has grown: older kernels refuse the bytes that they do not know.
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _call("syscall", _CREATE_RULESET, handled, size, 0)
    for paths, rights in (
        (readable, _READ | _LIST),
        (devices, _READ | _WRITE),
        ([folder], _READ | _WRITE | _LIST | _REMOVE | _MAKE | _TRUNCATE),
    ):
        for path in paths:
            try:
                place = os.open(path, os.O_PATH)
            except OSError:  # not on this machine, or out of this user's reach anyway
                continue
            allowed = rights if stat.S_ISDIR(os.fstat(place).st_mode) else rights & (_READ | _WRITE)
            _call("syscall", _ADD_RULE, rules, 1, struct.pack("=Qi", allowed & known, place), 0)
            os.close(place)
    _call("syscall", _RESTRICT_SELF, rules, 0)
    os.close(rules)


def restrict_calls(instructions: bytes) -> None:
    """Allow no system calls but those of a seccomp filter."""
    memory = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(memory))
    _call("prctl", _SECCOMP, 2, program, 0, 0)


def _call(function: str, *arguments: bytes | int | None) -> int:
    # Variadic functions: without a type ctypes passes an int as 32 bits, and the rest of the register is anything.
    typed = [each if isinstance(each, bytes) else ctypes.c_size_t(each or 0) for each in arguments]
    result: int = getattr(_LIBRARY, function)(*typed)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"the kernel refuses {function}{arguments[:1]}, so nothing is executed")
    return result
