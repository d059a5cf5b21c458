"""Standard streams of a command that never raise: lines that cannot be written are counted, and told later.

    text --TextIOWrapper--> LossyOutput --> descriptor
                                 |  refused (full disk, closed pipe, hung-up terminal), or taken by nobody in time
                                 +--> lost lines --> the next line that is written, events of the run, exit code

A run must not end because of its log. So a command whose work is what counts (training, preparing) goes on without
the line, and does not wait for a reader. A command whose output is its result waits for its reader like any other
program, and its exit code tells whether the disk refused the result.
"""

import errno
import io
import os
import select
from typing import Any, TextIO
from weakref import WeakSet

from hlat.runtime.bottom_line import takes_output
from hlat.runtime.errors import StorageError
from hlat.runtime.terminal_text import plural

_PIECE = select.PIPE_BUF  # bytes that a pipe takes without blocking if it says that it takes any
_PATIENCE = 1.0  # seconds for a full pipe or a stopped terminal to take a line; no time after a line was lost
_UNWANTED = (errno.EPIPE, errno.EBADF)  # the reader has gone, as that of ``| head``: it has seen what it wanted

_outputs: "WeakSet[LossyOutput]" = WeakSet()
_waits = True


def let_output_be_lost() -> None:
    """Do not wait for readers in this process from now on, and do not count lost lines as a failure of the command."""
    global _waits  # noqa: PLW0603 - the process has one command
    _waits = False


def lost_output() -> tuple[int, str]:
    """Return how many lines this process could not print, and why the last of them was lost."""
    whys = [output.why for output in _outputs if output.why]
    return sum(output.lines for output in _outputs), whys[-1] if whys else ""


def check_result() -> None:
    """Raise if the output of this process is its result, and the disk refused a part of it.

    Raises:
        StorageError: standard output is not whole.
    """
    for output in _outputs:
        if _waits and output.descriptor == 1 and output.refused:
            raise StorageError(
                f"standard output is incomplete: {plural(output.lines, 'line')} lost: {output.why}. "
                "Free space, or send the output elsewhere, and run the same command again."
            )


class LossyOutput(io.RawIOBase):
    """Binary stream onto a descriptor that takes everything: what the descriptor refuses is lost.

    Args:
        descriptor: stays open when the stream is closed.

    Attributes:
        descriptor: the descriptor.
        why: reason of the last loss; empty if nothing was lost.
        refused: True if something was lost that a reader would have wanted.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.why, self.refused = descriptor, "", False
        self._told = self._untold = 0  # lines lost before and after the last notice
        self._is_losing = self._lost_a_beginning = self._within_line = False
        _outputs.add(self)

    @property
    def lines(self) -> int:
        """Lines lost so far."""
        return self._told + self._untold + self._lost_a_beginning

    def write(self, data: Any, /) -> int:
        """Write data or lose it; return its length. Signal handlers may call it within a call."""
        written = 0
        rest = memoryview(data).cast("B")
        try:
            if self._untold or self._lost_a_beginning:
                self._put(self._notice())
                self._told, self._untold, self._lost_a_beginning = self.lines, 0, False
            for begin in range(0, len(rest), _PIECE):
                written += self._put(rest[begin : begin + _PIECE])
        except OSError as error:
            self._lose(bytes(rest[written:]), error)
        return len(rest)

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self.descriptor

    def isatty(self) -> bool:
        """Return True if the descriptor is a terminal."""
        return os.isatty(self.descriptor)

    def _put(self, piece: memoryview | bytes) -> int:
        """Write at most ``_PIECE`` bytes; wait for the reader no longer than this process may."""
        rest = memoryview(piece)
        while rest:
            patience = None if _waits else 0.0 if self._is_losing else _PATIENCE
            if not takes_output(self.descriptor, patience):
                raise BlockingIOError(errno.EAGAIN, "nobody reads it")
            try:
                taken = os.write(self.descriptor, rest)
            except BlockingIOError:  # another process has set the pipe to non-blocking, and filled it
                if not _waits:
                    raise
                continue
            self._within_line = rest[taken - 1] != ord("\n")
            rest = rest[taken:]
        self._is_losing = False
        return len(piece)

    def _lose(self, data: bytes, error: OSError) -> None:
        self._untold += data.count(b"\n")
        self._lost_a_beginning = not data.endswith(b"\n")
        self._is_losing, self.why = True, error.strerror or str(error)
        self.refused = self.refused or error.errno not in _UNWANTED

    def _notice(self) -> bytes:
        begin = "\n" if self._within_line else ""
        lost = plural(self._untold + self._lost_a_beginning, "line")
        return f"{begin}({lost} of output lost: {self.why})\n".encode()


def lossy_stream(descriptor: int, encoding: str = "utf-8", *, by_line: bool = True) -> TextIO:
    """Return a text stream onto a descriptor, which never raises; characters that the encoding lacks become "?".

    Args:
        descriptor: stays open when the stream is closed.
        encoding: of the text.
        by_line: write each line at once; else when the stream is flushed.
    """
    # No BufferedWriter between them: its lock would make a signal handler fail that prints within a print.
    raw: Any = LossyOutput(descriptor)
    return io.TextIOWrapper(raw, encoding, "replace", line_buffering=by_line)
