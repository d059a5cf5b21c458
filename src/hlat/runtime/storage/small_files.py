"""Files that people write (recipes, config.json, catalogs), read without trusting that they are small files."""

import os
import stat
from pathlib import Path

_MIB = 1 << 20


def read_small_file(path: Path, limit: int = _MIB) -> str:
    """The text of a file, which has to be a regular one, of at most ``limit`` bytes of UTF-8.

    Args:
        path: of the file. A device, a pipe or a socket is refused without waiting for what it may send.
        limit: bytes.

    Raises:
        ValueError: says what is wrong with the file, as the end of a sentence that begins with its name.
        OSError: the file is not there or may not be read.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is a device or a pipe; name a file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes, which no such file needs")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"it is not text in UTF-8: line {line} holds the byte {content[error.start]:#04x}") from None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe that nobody writes to would be waited for
