"""Ways to confine a process, and the command that starts Python in each.

bubblewrap (namespaces: own files, processes, network) or Landlock (rules on the files of this machine);
in both the system calls of seccomp.py and the limits of inside/confine.py
"""

import platform
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from hlat.evaluation.code_execution.inside.confine import NOBODY
from hlat.evaluation.code_execution.seccomp import seccomp_filter

_INSIDE = Path(__file__).with_name("inside")
_FOLDER_BYTES = 16 << 20
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")


@dataclass(frozen=True)
class Confinement:
    """One way to confine a process.

    Attributes:
        name: ``bubblewrap``, ``Landlock`` or ``none``.
        command: starts the process that judges the program of its standard input.
        calls: the seccomp filter; None for no restriction.
        files: what Landlock lets it read, and the devices; None if files are confined otherwise, or not.
        writable: most bytes in the folder of the program, which hlat watches; None if the kernel does.
    """

    name: str
    command: tuple[str, ...]
    calls: bytes | None
    files: tuple[tuple[str, ...], tuple[str, ...]] | None
    writable: int | None


def unconfined() -> Confinement:
    """Return no confinement: limits of time and memory only."""
    return Confinement("none", _command(), None, None, _FOLDER_BYTES)


def bubblewrap() -> Confinement | None:
    """Return the confinement by bubblewrap; None where it or the seccomp filter is missing."""
    program, calls = shutil.which("bwrap"), _calls()
    if program is None or calls is None:
        return None
    words = [program, "--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    words += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    for path in _readable():
        words += ["--ro-bind-try", path, path]
    for path in _DEVICES:
        words += ["--dev-bind", path, path]
    # The root is a file system in memory too: unless it is read-only, it could be filled. The folder is a place that no
    # Python is installed in, as it may be below /tmp.
    words += ["--size", str(_FOLDER_BYTES), "--tmpfs", "/program", "--remount-ro", "/", "--chdir", "/program"]
    return Confinement("bubblewrap", (*words, *_command()), calls, None, None)


def landlock() -> Confinement | None:
    """Return the confinement by Landlock, which the kernel may lack; None where there is no seccomp filter."""
    calls = _calls()
    return None if calls is None else Confinement("Landlock", _command(), calls, (_readable(), _DEVICES), _FOLDER_BYTES)


def _command() -> tuple[str, ...]:
    start = f"import sys; sys.path.insert(0, {str(_INSIDE.parent)!r}); from inside.judge import main; main()"
    return (_python(), "-I", "-S", "-c", start)


def _calls() -> bytes | None:
    try:
        return seccomp_filter(platform.machine()) if sys.platform == "linux" else None
    except KeyError:
        return None


def _python() -> str:
    """Return the program of Python itself, not the link to it in a virtual environment."""
    installed = Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info))  # a virtual one may be a copy
    return str((installed if installed.is_file() else Path(sys.executable)).resolve())


def _readable() -> tuple[str, ...]:
    """Files and folders that Python needs: itself, its library, shared libraries of the system."""
    own = [_python(), sysconfig.get_path("stdlib"), str(Path(sys.base_prefix, "lib")), str(_INSIDE)]
    return tuple(dict.fromkeys([*_SYSTEM, *own]))
