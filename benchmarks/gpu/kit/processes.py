"""Processes of the kit: each in a session of its own, with a limit, its output in a file, and ended with its children.

command --start--> Started --wait--> "", or the reason why it has no result of its own
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_DUMP_SECONDS = 1.0  # for the stacks of a process that is killed at its limit, which faulthandler writes to its output
_TAIL = 4000  # characters of output that a result keeps
_STAT_PARENT, _STAT_SESSION = 1, 3  # fields of /proc/PID/stat after the name


class Started:
    """A process that runs, and the file that has its output.

    Args:
        command: program and arguments.
        output: file for standard output and error.
        environment: all environment variables.
        folder: working folder.
    """

    def __init__(self, command: Sequence[str], output: Path, environment: Mapping[str, str], folder: Path) -> None:
        self.output, self.began, self._is_over = output, time.monotonic(), False
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def has_ended(self) -> bool:
        """Return True if the process has ended."""
        return self._process.poll() is not None

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it has started."""
        for pid in {self.pid, *descendants(self.pid)} if not self.has_ended() else ():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def wait(self, limit: float) -> str:
        """Wait until the process has ended, or end it at its limit; return what went wrong, empty if nothing did."""
        try:
            code = self._process.wait(max(limit, 0.1))
        except subprocess.TimeoutExpired:
            self.end()
            return f"killed at its limit of {limit:.0f} s"
        self.end()  # children that it has left behind
        if code < 0:
            with suppress(ValueError):
                return f"ended by {signal.Signals(-code).name}"
        return f"exit code {code}" if code else ""

    def end(self) -> None:
        """End the process and all that it has started, also those that have a session of their own."""
        if self._is_over:
            return  # its number may be another process's by now
        family = descendants(self._process.pid)
        if self._process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                self._process.send_signal(signal.SIGUSR1)  # faulthandler writes the stacks of all threads
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_DUMP_SECONDS)
            family |= descendants(self._process.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in family:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)  # a process in the driver of a broken GPU may not end at all
        self._is_over = True

    def tail(self) -> str:
        """Return the end of the output."""
        return read_tail(self.output, _TAIL)


def read_tail(path: Path, characters: int) -> str:
    """Return the end of a text file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4 * characters))
            return file.read().decode(errors="replace")[-characters:]
    except OSError:
        return ""


def descendants(pid: int) -> set[int]:
    """Return the processes that a process has started, and theirs, as far as they are still its own.

    One whose parent has ended belongs to it by its session, unless it has made one of its own.
    """
    found, parents, sessions = {pid}, {}, {}
    for number, fields in _processes():
        parents[number], sessions[number] = int(fields[_STAT_PARENT]), int(fields[_STAT_SESSION])
    for _ in range(len(parents)):
        more = {
            child for child in parents if child not in found and (parents[child] in found or sessions[child] in found)
        }
        if not more:
            break
        found |= more
    return found - {pid, os.getpid()}


def _processes() -> Iterable[tuple[int, list[str]]]:
    """Yield the number and the fields of /proc/PID/stat of every process; nothing where there is no /proc."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            int(fields[_STAT_PARENT]), int(fields[_STAT_SESSION])
            yield int(folder.name), fields
