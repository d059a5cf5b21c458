"""Read small files that people write (recipes, config.json, catalogs), with a size limit."""

import os
import stat
from pathlib import Path

from hlat.runtime.storage.file_content import recognize

_MIB = 1 << 20


def read_small_file(path: Path, limit: int = _MIB, kind: str = "such a file") -> str:
    """Return the text of a regular file of at most ``limit`` bytes of UTF-8.

    Args:
        path: the file. A device, a pipe or a socket is rejected without reading from it.
        limit: maximum size in bytes.
        kind: what the file is to be, for the message about its size.

    Raises:
        ValueError: the file cannot be used; the message continues a sentence that begins with the file's name.
        OSError: the file does not exist or may not be read.
    """
    with open(path, "rb", opener=_open_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is a device or a pipe; give a regular file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes, too many for {kind}")
    if found := recognize(content):
        raise ValueError(f"it is {found.what}. {found.remedy.rstrip('.')}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"it is not text in UTF-8: line {line} holds the byte {content[error.start]:#04x}; save it as UTF-8"
        ) from None


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe without a writer would block
