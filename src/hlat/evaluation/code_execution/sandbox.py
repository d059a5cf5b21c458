"""Execute programs that a model wrote, each in a process with limits (``runner.py``).

    program, limits -> python -I -S runner.py in an empty folder, without the environment -> True if it ran to its end

The limits keep accidents small: endless loops, memory, large files, requests to the network, child processes. They are
no protection against a program that was written to break out: it can read what user ``nobody``, or this user, can read.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hlat.runtime import LaunchError

_RUNNER = Path(__file__).with_name("runner.py")


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        seconds: of wall time, and of processor time.
        memory: bytes of address space.
    """

    seconds: int = 10
    memory: int = 1 << 30


def run_program(program: str, limits: Limits | None = None) -> bool:
    """Run a program; return True if it ended without an exception, an exit or a broken limit.

    The program cannot report success by exiting early: it has succeeded when a random token arrives, which is written
    after its last statement.

    Raises:
        LaunchError: this is not Linux, whose kernel sets the limits. Without them the program is not executed.
    """
    if sys.platform != "linux":
        remedy = "Run these tasks on Linux (WSL 2 and containers are), or only tasks that execute no code."
        raise LaunchError(f"{sys.platform} cannot confine programs that a model wrote: they are not executed. {remedy}")
    limits, token = limits or Limits(), secrets.token_hex(16)
    reads, writes = os.pipe()
    words = [sys.executable, "-I", "-S", str(_RUNNER), str(limits.seconds), str(limits.memory), str(writes)]
    with tempfile.TemporaryDirectory(prefix="hlat-program-") as folder:
        Path(folder).chmod(0o777)  # for user nobody
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin"},
            pass_fds=[writes],
            start_new_session=True,
        )
        os.close(writes)
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            process.communicate(f"{token}\n{program}".encode(errors="surrogateescape"), timeout=limits.seconds + 2)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    os.set_blocking(reads, False)
    with open(reads, "rb") as answers:  # noqa: PTH123  (a file descriptor)
        return (answers.read() or b"") == token.encode()


def run_programs(programs: Sequence[str], limits: Limits | None = None) -> list[bool]:
    """Run programs, several at the same time; see ``run_program``."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda program: run_program(program, limits), programs))
