"""Folders of compiled code: the compilers of a process are told theirs before they are first used.

    run.compile_cache, or variables that the user has set, or a folder of this user --> a folder for each compiler

On devices whose compilers disturb each other in a common folder, each rank has its own: ``BASE/rank-3/neff``.

A power loss or a full disk can leave code incomplete, and loading that does not always fail: it can also end the
process, or compute something else.

    folder when a process joins its run --incomplete libraries, empty files--> removed, so that they are compiled again
    error of a compiler or loader later --code of earlier processes---------> folder emptied, LaunchError: start again
"""

import logging
import os
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hlat.runtime.backend.table import backend_of
from hlat.runtime.compiled_code import open_code_folder
from hlat.runtime.errors import LaunchError

_LOG = logging.getLogger(__name__)
_COMPILER_ERRORS = ("torch._inductor.exc", "torch._dynamo.exc", "torch._functorch", "triton.compiler")
_SHOWN = 300  # characters of the compiler's message
_ELF_HEADER, _SECTION_HEADER, _STRING_TABLE = struct.Struct("<4sB35xQ10xHHH"), struct.Struct("<II56x"), 3
_64_BITS = 2
_BEING_WRITTEN = 2.0  # seconds: the compiler of another process may not be done with a younger file

_set_here: dict[str, str] = {}  # variables that this process has set, which the user may not have meant
_earlier: set[Path] = set()  # folders that had compiled code before this process joined its run


def compile_cache_folders(device_type: str, base: str | Path | None, rank: int) -> dict[str, Path]:
    """Return the folder of each compiler, by the environment variable that names it.

    Args:
        device_type: type of the devices of a run.
        base: ``run.compile_cache`` of its recipe; None for the folders that the user's environment names, or else
            one for everything that this user compiles on this machine.
        rank: global rank.
    """
    backend = backend_of(device_type)
    own = f"rank-{rank}" if backend.compile_cache_per_rank else ""
    folders: dict[str, Path] = {}
    for variable, name in backend.compile_cache.items():
        given = _from_user(variable)
        if base is None and given is not None:
            folders[variable] = Path(given).absolute() / own
        else:
            folders[variable] = (Path(base) if base is not None else _folder_of_user()).absolute() / own / name
    return folders


def open_compile_cache(device_type: str, base: str | Path | None, rank: int) -> dict[str, Path]:
    """Create the folders of ``compile_cache_folders`` and check them: the compilers execute what is there.

    Raises:
        LaunchError: somebody else owns a folder or can write there.
    """
    folders = compile_cache_folders(device_type, base, rank)
    for folder in folders.values():
        open_code_folder(folder)
    return folders


def use_compile_cache(device_type: str, base: str | Path | None, rank: int) -> None:
    """Tell the compilers of this process their folders; arguments and errors as for ``open_compile_cache``."""
    folders = open_compile_cache(device_type, base, rank)
    _remove_incomplete(folders.values())
    for variable, folder in folders.items():
        if _from_user(variable) != str(folder):
            os.environ[variable] = _set_here[variable] = str(folder)


def _from_user(variable: str) -> str | None:
    """Value of a variable; None if it is not set, or only by this process."""
    value = os.environ.get(variable) or None
    return None if value == _set_here.get(variable) else value


def _folder_of_user() -> Path:
    """Folder on this machine for what this user compiles."""
    return Path(tempfile.gettempdir()) / f"hlat-compiled-{os.getuid()}"


def _remove_incomplete(folders: Iterable[Path]) -> None:
    """Remove what a compiler or a disk has not written to its end from folders of compiled code; say so.

    Other files in them were compiled before this process joins its run, which ``damaged_code_error`` asks for later.
    """
    _earlier.clear()
    for folder in folders:
        files = [path for path in folder.rglob("*") if path.suffix != ".lock" and path.is_file()]
        torn = [path for path in files if _is_torn(path)]
        for path in torn:
            path.unlink(missing_ok=True)
        if torn:
            _LOG.warning("%s: compiled code that is incomplete is compiled again (%d files)", folder, len(torn))
        if len(files) > len(torn):
            _earlier.add(folder)


def _is_torn(path: Path) -> bool:
    with suppress(OSError):  # another rank has just removed it
        status = path.stat()
        if abs(time.time() - status.st_mtime) < _BEING_WRITTEN:
            return False
        return not status.st_size or (path.suffix == ".so" and not _is_complete(path))
    return False


def _is_complete(path: Path) -> bool:
    """Return True if a library has the table at its end that its beginning announces; True where they are not ELF."""
    if sys.platform != "linux":
        return True
    with path.open("rb") as file:
        head = file.read(_ELF_HEADER.size)
        if len(head) < _ELF_HEADER.size:
            return False
        magic, bits, table, size, count, names = _ELF_HEADER.unpack(head)
        if magic != b"\x7fELF" or bits != _64_BITS or not table:
            return bool(magic == b"\x7fELF")  # others may have no such table
        file.seek(table + names * size)
        section = file.read(_SECTION_HEADER.size)
        if path.stat().st_size < table + count * size or len(section) < _SECTION_HEADER.size:
            return False
        return bool(_SECTION_HEADER.unpack(section)[1] == _STRING_TABLE)


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
