"""Compiled code in a cache that a power loss or a full disk has left incomplete.

    folder when a process joins its run --incomplete libraries, empty files--> removed, so that they are compiled again
    error of a compiler or loader later --code of earlier processes---------> folder emptied, LaunchError: start again

Loading an incomplete library does not always fail: it can also end the process, or compute something else.
"""

import logging
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from hlat.runtime.errors import LaunchError

_LOG = logging.getLogger(__name__)
_COMPILER_ERRORS = ("torch._inductor.exc", "torch._dynamo.exc", "torch._functorch", "triton.compiler")
_SHOWN = 300  # characters of the compiler's message
_ELF_HEADER, _SECTION_HEADER, _STRING_TABLE = struct.Struct("<4sB35xQ10xHHH"), struct.Struct("<II56x"), 3
_64_BITS = 2

_earlier: set[Path] = set()  # folders that had compiled code before this process joined its run


def remove_incomplete(folders: Iterable[Path]) -> None:
    """Remove what a compiler or a disk has not written to its end from folders of compiled code; say so.

    Other files in them were compiled before this process joins its run, which ``damaged_code_error`` asks for later.
    """
    _earlier.clear()
    for folder in folders:
        files = [path for path in folder.rglob("*") if path.suffix != ".lock" and path.is_file()]
        torn = [path for path in files if not path.stat().st_size or (path.suffix == ".so" and not _is_complete(path))]
        for path in torn:
            path.unlink(missing_ok=True)
        if torn:
            _LOG.warning("%s: compiled code that is incomplete is compiled again (%d files)", folder, len(torn))
        if len(files) > len(torn):
            _earlier.add(folder)


def _is_complete(path: Path) -> bool:
    """Return True if a library has the table at its end that its beginning announces; True for no library of Linux."""
    with path.open("rb") as file:
        head = file.read(_ELF_HEADER.size)
        if len(head) < _ELF_HEADER.size or head[:4] == bytes(4):
            return False
        magic, bits, table, size, count, names = _ELF_HEADER.unpack(head)
        if magic != b"\x7fELF" or bits != _64_BITS:
            return magic == b"\x7fELF"  # something else than a library has the name of one
        file.seek(table + names * size)
        section = file.read(_SECTION_HEADER.size)
        complete = path.stat().st_size >= table + count * size and len(section) == _SECTION_HEADER.size
        return complete and _SECTION_HEADER.unpack(section)[1] == _STRING_TABLE


def damaged_code_error(error: BaseException) -> LaunchError | None:
    """Empty the folders of compiled code if a compiler or loader failed and code of earlier processes may be why.

    Returns:
        The error to raise instead, after which the same command compiles everything again; None if that would not help.
    """
    if not _earlier or not any(type(each).__module__.startswith(_COMPILER_ERRORS) for each in _chain(error)):
        return None
    folders = ", ".join(map(str, sorted(_earlier)))
    for folder in _earlier:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    _earlier.clear()
    reason = " ".join(str(error).split())[:_SHOWN]
    found = LaunchError(
        f"{folders}: the compiler failed, perhaps because code that was compiled there before is damaged: {reason}. "
        "The folder has been emptied: the next start compiles again."
    )
    found.retryable = True
    return found


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
