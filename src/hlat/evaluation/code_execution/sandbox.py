"""Execution of programs that a model wrote, each confined to two processes of its own, and pass@k.

    program, tests, limits -> process of the tests --calls--> process of the program              (folder ``inside``)
                           -> "passed" from the first, to which the second has no way but its answers
    n samples of a problem, c of which pass -> pass@k = 1 - C(n - c, k) / C(n, k)       arXiv 2107.03374, equation 1

    find_confinement:  bubblewrap (namespaces: own files, processes, network)
                   or  Landlock (rules on the files of this machine)
                 both  seccomp: table of system calls -> instructions of classic BPF -> inside/confine.py
                       and the limits of inside/confine.py

What is not in the table of system calls fails with EPERM: processes and threads, signals, sockets, memory of others,
namespaces, new kernel interfaces. Landlock leaves some calls on files free, which are missing here for that reason:
chmod, chown, utime, truncate, extended attributes. So are folders and links: what a program makes is easily counted and
removed. SECURITY.md says what is guaranteed.
"""

import math
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hlat.evaluation.code_execution.inside.confine import NOBODY, others_can_read
from hlat.evaluation.code_execution.inside.values import frame, to_bytes
from hlat.runtime.errors import DataError, LaunchError

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""By machine: AUDIT_ARCH of linux/audit.h, and the column of the tables."""

# name, number on x86_64, number on aarch64 ("-": it has none), of asm/unistd.h
_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, lseek 8 62, close 3 57,
close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, sendfile 40 71, fsync 74 82,
fdatasync 75 83, ftruncate 77 46, fadvise64 221 223, stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79, statx 332 291,
statfs 137 43, fstatfs 138 44, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78,
getcwd 79 17, chdir 80 49, fchdir 81 50, getdents64 217 61, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38,
renameat2 316 276, umask 95 166, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, brk 12 214,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133,
rt_sigtimedwait 128 137, sigaltstack 131 132, alarm 37 -, pause 34 -, setitimer 38 103, getitimer 36 102,
restart_syscall 219 128, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114,
gettimeofday 96 169, time 201 -, times 100 153, select 23 -, pselect6 270 72, poll 7 -, ppoll 271 73,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, sendto 44 206,
recvfrom 45 207, shutdown 48 210, futex 202 98, set_robust_list 273 99, rseq 334 293, sched_yield 24 124,
sched_getaffinity 204 123, getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175,
getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getrlimit 97 163,
setrlimit 160 164, getrusage 98 165, uname 63 160, getrandom 318 278, exit 60 93, exit_group 231 94
"""

# A system call as above, the index of an argument, the bits of it that count, and the values that they may have.
_TRUNCATE = 0o1000  # O_TRUNC
_OPENINGS = (0, 1, 2, _TRUNCATE | 1, _TRUNCATE | 2)  # O_RDONLY, O_WRONLY, O_RDWR
_CONDITIONAL: tuple[tuple[str, int, int, tuple[int, ...]], ...] = (
    # Files are not emptied through a descriptor for reading: early versions of Landlock let that pass.
    ("open 2 -", 1, _TRUNCATE | 3, _OPENINGS),
    ("openat 257 56", 2, _TRUNCATE | 3, _OPENINGS),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; F_SETOWN sends signals to others
    ("fcntl 72 25", 1, 0xFFFFFFFF, (0, 1, 2, 3, 4, 1030)),
    # TCGETS, FIONCLEX, FIOCLEX, FIONBIO; TIOCSTI types into the terminal
    ("ioctl 16 29", 1, 0xFFFFFFFF, (0x5401, 0x5450, 0x5451, 0x5421)),
    # of this process; a process of the same user could be given limits that kill it
    ("prlimit64 302 261", 0, 0xFFFFFFFF, (0,)),
    # A pair of stream sockets is connected to itself for ever; one of datagrams can send to any other. For asyncio.
    ("socketpair 53 199", 1, 0xF, (1,)),
)

_LOAD, _AND, _JUMP_IF_EQUAL, _JUMP_IF_ABOVE, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # of linux/bpf_common.h
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000 | 1, 0x7FFF0000  # of linux/seccomp.h; 1 is EPERM
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000  # numbers of x86_64 with pointers of 32 bits begin there


def seccomp_filter(machine: str) -> bytes:
    """Return the filter's instructions for a ``platform.machine()``; raises KeyError if it is not in the table."""
    architecture, column = _ARCHITECTURES[machine]
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        # First: numbers of another architecture mean other calls.
        _instruction(_JUMP_IF_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
        _instruction(_JUMP_IF_ABOVE, _X32, 0, 1),
        _instruction(_RETURN, _KILL),
    ]
    for entry in _ALLOWED.split(","):
        code += _if_number(entry, column, [_instruction(_RETURN, _ALLOW)])
    for entry, argument, bits, values in _CONDITIONAL:
        test = [_instruction(_LOAD, _ARGUMENTS + 8 * argument), _instruction(_AND, bits)]
        for value in values:
            test += [_instruction(_JUMP_IF_EQUAL, value, 0, 1), _instruction(_RETURN, _ALLOW)]
        code += _if_number(entry, column, [*test, _instruction(_RETURN, _REFUSE)])
    return b"".join([*code, _instruction(_RETURN, _REFUSE)])


def _if_number(entry: str, column: int, then: list[bytes]) -> list[bytes]:
    """Return instructions that run others if the loaded number is that of a system call."""
    number = entry.split()[1 + column]
    return [] if number == "-" else [_instruction(_JUMP_IF_EQUAL, int(number), 0, len(then)), *then]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


_INSIDE = Path(__file__).with_name("inside")
_FOLDER_BYTES = 16 << 20
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")


@dataclass(frozen=True)
class Confinement:
    """One way to confine a process: ``bubblewrap``, ``Landlock`` or ``none``."""

    name: str
    command: tuple[str, ...]  # starts the process that judges the program of its standard input
    calls: bytes | None  # the seccomp filter; None for no restriction
    # what Landlock lets it read, and the devices; None if files are confined otherwise, or not
    files: tuple[tuple[str, ...], tuple[str, ...]] | None
    writable: int | None  # most bytes in the folder of the program, which hlat watches; None if the kernel does


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
    installed = Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info))  # a virtual one may be a copy
    return str((installed if installed.is_file() else Path(sys.executable)).resolve())


def _readable() -> tuple[str, ...]:
    # What Python needs: itself, its library, shared libraries of the system.
    own = [_python(), sysconfig.get_path("stdlib"), str(Path(sys.base_prefix, "lib")), str(_INSIDE)]
    return tuple(dict.fromkeys([*_SYSTEM, *own]))


CodePermission = bool | Literal["unsafe"]
"""Permission to execute what a model wrote: no, in a sandbox, or also without one."""

_SECONDS_BETWEEN_LOOKS = 0.05
_UNCONFINED: ContextVar[bool] = ContextVar("_UNCONFINED", default=False)


@dataclass(frozen=True)
class Limits:
    """Time and address space that one program may take."""

    seconds: int = 10  # of wall time, and of processor time
    memory: int = 1 << 30  # bytes of address space, of each of its two processes


@contextmanager
def unconfined_execution() -> Iterator[None]:
    """Execute programs without a sandbox within this context."""
    token = _UNCONFINED.set(True)
    try:
        yield
    finally:
        _UNCONFINED.reset(token)


def find_confinement() -> Confinement:
    """Find the strongest confinement that works here, bubblewrap or else Landlock; raises LaunchError without any."""
    if _UNCONFINED.get():
        return unconfined()
    found = {"bubblewrap": bubblewrap(), "Landlock": landlock()}
    for way in found.values():
        if way is not None and _works(way):
            return way
    reasons = [f"{name}: {'it does not start here' if way else 'not there'}" for name, way in found.items()]
    raise LaunchError(
        f"this machine cannot confine programs that a model wrote ({'; '.join(reasons)}): they are not executed. "
        "Install bubblewrap and allow unprivileged user namespaces, or use Linux 5.13 or later with Landlock, on "
        "x86_64 or aarch64. In a container or virtual machine without network and secrets, "
        "--allow-code-execution=unsafe executes them without a sandbox."
    )


@cache
def _works(way: Confinement) -> bool:
    return _execute(way, "", "", Limits(seconds=60)) == "passed"  # a busy machine is no refusal


def run_program(program: str, limits: Limits | None = None, *, tests: str = "") -> bool:
    """Return True if a program ends without exception, exit or broken limit, and passes its tests."""
    return _judge(find_confinement(), program, tests, limits)


def run_programs(programs: Sequence[str], limits: Limits | None = None, *, tests: str = "") -> list[bool]:
    """Run programs with the same tests, several at the same time."""
    way = find_confinement()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda program: _judge(way, program, tests, limits), programs))


def _judge(way: Confinement, program: str, tests: str, limits: Limits | None) -> bool:
    # The tests run in another process: what the program returns is copied if it is plain (numbers, texts, bytes, and
    # collections of them). Without tests only the program itself says that it ended. Raises DataError if the tests pass
    # it a value that cannot be copied, such as a function.
    verdict = _execute(way, program, tests, limits or Limits())
    if verdict.startswith("cannot pass "):
        raise DataError(f"the tests of a program {verdict.replace('pass', 'pass it a value of type', 1)}.")
    return verdict == "passed"


def _execute(way: Confinement, program: str, tests: str, limits: Limits) -> str:
    """Run a program and its tests; return the verdict, which is empty for failures."""
    folder = Path(tempfile.mkdtemp(prefix="hlat-program-"))
    if os.geteuid() == 0 and others_can_read(os.__file__):
        os.chown(folder, NOBODY, NOBODY)
    files = (*way.files, ".") if way.files else None  # user nobody may be unable to enter the folders above
    order = {"seconds": limits.seconds, "memory": limits.memory, "calls": way.calls, "files": files}
    order |= {"parent": None if way.writable is None else os.getpid()}  # bubblewrap's processes have other numbers
    words = frame(to_bytes(order | {"program": program}, id)) + frame(to_bytes(tests, id))
    process = subprocess.Popen(
        way.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        # A program must not see secrets in the environment.
        env={},
        start_new_session=True,
    )
    try:
        return _wait(process, words, folder, limits.seconds + 2, way.writable).decode(errors="replace")
    finally:
        with suppress(ProcessLookupError, PermissionError):  # a program with another user's rights is out of reach
            os.killpg(process.pid, signal.SIGKILL)
        with process:  # waits for it and closes the pipes; without a sandbox, others can hold them open for ever
            pass
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except RecursionError:  # folders in folders, which a program can make without a sandbox only
            subprocess.run(["rm", "-rf", folder], check=False)


def _wait(process: "subprocess.Popen[bytes]", words: bytes, folder: Path, seconds: float, most: int | None) -> bytes:
    """Wait for the verdict; return nothing if it is late, or more was written into the folder than it may have."""
    until, sent = time.monotonic() + seconds, False
    while (left := until - time.monotonic()) > 0:
        try:
            wait = left if most is None else min(left, _SECONDS_BETWEEN_LOOKS)
            return process.communicate(None if sent else words, timeout=wait)[0]
        except subprocess.TimeoutExpired:
            sent = True
        if most is not None and _size(folder) > most:
            break
    return b""


def _size(folder: Path) -> int:
    # The program changes the folder meanwhile.
    sizes = 0
    with suppress(OSError):  # without a sandbox it can remove the folder, or close it to hlat
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                sizes += entry.stat(follow_symlinks=False).st_size
    return sizes


def complete_programs(responses: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Put the prompt of each document in front of its generated texts; a filter of lm-eval."""
    return [[doc["prompt"] + text for text in texts] for texts, doc in zip(responses, docs, strict=True)]


def pass_at_k(references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]) -> dict[str, float]:
    """Compute pass@k, the mean over problems by name as in ``pass@1``, from their tests; a metric of lm-eval."""
    passed = [run_programs(programs, tests=tests) for tests, programs in zip(references, predictions, strict=True)]
    return {
        f"pass@{count}": sum(estimate_pass(len(each), sum(each), count) for each in passed) / len(passed) for count in k
    }


def estimate_pass(samples: int, passing: int, k: int) -> float:
    """Estimate the probability that one of k samples passes, without bias (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(samples - passing, k) / math.comb(samples, k)
