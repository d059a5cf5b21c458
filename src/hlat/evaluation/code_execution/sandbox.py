"""Execute programs that a model wrote, each confined to two processes of its own (``confinement.py``, ``inside``).

    program, tests, limits -> process of the tests --calls--> process of the program
                           -> "passed" from the first, to which the second has no way but its answers

SECURITY.md says what is guaranteed.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from hlat.evaluation.code_execution.confinement import Confinement, bubblewrap, landlock, unconfined
from hlat.evaluation.code_execution.inside.confine import NOBODY, others_can_read
from hlat.evaluation.code_execution.inside.values import frame, to_bytes
from hlat.runtime.errors import DataError, LaunchError

CodePermission = bool | Literal["unsafe"]
"""Permission to execute what a model wrote: no, in a sandbox, or also without one."""

_SECONDS_BETWEEN_LOOKS = 0.05
_UNCONFINED: ContextVar[bool] = ContextVar("_UNCONFINED", default=False)


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        seconds: of wall time, and of processor time.
        memory: bytes of address space, of each of its two processes.
    """

    seconds: int = 10
    memory: int = 1 << 30


@contextmanager
def unconfined_execution() -> Iterator[None]:
    """Execute programs without a sandbox within this context."""
    token = _UNCONFINED.set(True)
    try:
        yield
    finally:
        _UNCONFINED.reset(token)


def find_confinement() -> Confinement:
    """Find the strongest confinement that works on this machine: bubblewrap, or else Landlock.

    Raises:
        LaunchError: there is none.
    """
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
    """Run a program; return True if it ended without an exception, an exit or a broken limit, and passes its tests.

    Args:
        program: source of the program.
        limits: its limits.
        tests: statements about the program, which is in another process. What it returns is copied if it is plain:
            numbers, texts, bytes, and collections of them. Without tests only the program itself says that it ended.

    Raises:
        LaunchError: this machine cannot confine the program.
        DataError: the tests pass a function of the program a value that cannot be copied, such as a function.
    """
    return _judge(find_confinement(), program, tests, limits)


def run_programs(programs: Sequence[str], limits: Limits | None = None, *, tests: str = "") -> list[bool]:
    """Run programs with the same tests, several at the same time; see ``run_program``."""
    way = find_confinement()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda program: _judge(way, program, tests, limits), programs))


def _judge(way: Confinement, program: str, tests: str, limits: Limits | None) -> bool:
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
    """Return the bytes of all files of a folder, which the program changes meanwhile."""
    sizes = 0
    with suppress(OSError):  # without a sandbox it can remove the folder, or close it to hlat
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                sizes += entry.stat(follow_symlinks=False).st_size
    return sizes
