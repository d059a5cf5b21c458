"""Seccomp filter of the sandbox: a program for the kernel that says which system calls a process may make.

    table of names and numbers -> instructions of classic BPF, 8 bytes each -> inside/confine.py

What is not in the table fails with EPERM: processes and threads, signals, sockets, memory of others, namespaces, new
kernel interfaces. Landlock leaves some calls on files free, which are missing here for that reason: chmod, chown,
utime, truncate, extended attributes. So are folders and links: what a program makes is easily counted and removed.
"""

import struct

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

# As above, then the index of an argument, the bits of it that count, and the values that they may have.
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
    """Return the instructions of the filter.

    Args:
        machine: as ``platform.machine()`` names it.

    Raises:
        KeyError: the numbers of its system calls are not in the table.
    """
    architecture, column = _ARCHITECTURES[machine]
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
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
