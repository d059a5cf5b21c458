"""Follow what the processes of a run print into files, line by line.

files --read every tenth of a second by a thread--> lines --> show
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TextIO

_EVERY = 0.1  # seconds


@contextmanager
def follow_output(files: Sequence[Path], show: Callable[[str], None] | None) -> Iterator[None]:
    """Show the lines that are appended to files within the block, those of its end included.

    Args:
        files: existing files.
        show: called on a thread with each line; None does nothing.
    """
    if show is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(files, show, ended), name="hlat-output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(files: Sequence[Path], show: Callable[[str], None], ended: threading.Event) -> None:
    streams: dict[Path, TextIO] = {}
    rests = dict.fromkeys(files, "")
    last = False
    while True:
        for path in files:
            with suppress(OSError):  # not there yet, or removed with the folder of the attempt
                stream = streams.get(path) or streams.setdefault(path, path.open(encoding="utf-8", errors="replace"))
                *lines, rests[path] = (rests[path] + stream.read()).split("\n")
                for line in lines:
                    show(line)
        if last:
            break
        last = ended.wait(_EVERY)
    for path, rest in rests.items():
        if rest:
            show(rest)
        if path in streams:
            streams[path].close()


def copy_lines(stream: IO[bytes], head: str, show: Callable[[str], None]) -> None:
    """Show each line of a stream until it ends.

    Args:
        stream: output of a process.
        head: text in front of each line.
        show: called with each line.
    """
    for line in stream:
        show(head + line.decode("utf-8", "replace").rstrip("\r\n"))
