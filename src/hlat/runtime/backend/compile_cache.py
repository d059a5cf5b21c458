"""Folders of compiled code: the compilers of a process are told theirs before they are first used.

    run.compile_cache, or variables that the user has set, or a folder of this user --> a folder for each compiler

On devices whose compilers disturb each other in a common folder, each rank has its own: ``BASE/rank-3/neff``.

A power loss or a full disk can leave code incomplete, and loading that does not always fail: it can also end the
process, or compute something else.

    folder when a process joins its run --incomplete libraries, empty code--> removed, so that they are compiled again
    error of a compiler or loader later --code of earlier processes--------> folder emptied, LaunchError: start again

A folder that the user's environment names may hold other files, too. It is never emptied: the error asks for that.
"""

import logging
import os
import re
import shlex
import shutil
import stat
import struct
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from hlat.runtime.backend.table import backend_of
from hlat.runtime.compiled_code.code_folder import open_code_folder
from hlat.runtime.errors import HlatError, LaunchError

_LOG = logging.getLogger(__name__)
_COMPILER_ERRORS = ("torch._inductor", "triton.compiler")  # modules; dynamo's other errors are about the model's code
_LIBRARIES = {".so", ".o", ".neff", ".cubin"}  # never empty
_SOURCES = {"", ".py", ".cpp", ".json"}  # never empty under the names that compilers give: hashes, in base 32
_HASH = re.compile(r"[a-z2-7]{40,}", re.IGNORECASE)
_COMPLETE = ("{}.done", "__grp__{}.json")  # by these files Neuron's compiler and Triton say that STEM.* is complete
_SHOWN = 300  # characters of the compiler's message
_ELF_HEADER, _SECTION_HEADER, _STRING_TABLE = struct.Struct("<4sB35xQ10xHHH"), struct.Struct("<II56x"), 3
_64_BITS = 2
_BEING_WRITTEN = 2.0  # seconds: the compiler of another process may not be done with a younger file

_set_here: dict[str, str] = {}  # variables that this process has set, which the user may not have meant
_earlier: dict[Path, bool] = {}  # folders that had code before this process joined its run; True if hlat named it


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
    _earlier.clear()
    for variable, folder in folders.items():
        if _remove_incomplete(folder):
            _earlier[folder] = base is not None or _from_user(variable) is None
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


def _remove_incomplete(folder: Path) -> bool:
    """Remove what a compiler or a disk has not written to its end from a folder of compiled code; say so.

    Returns:
        True if the folder has other files: earlier processes have compiled them.
    """
    torn = others = 0
    for place, _, names in os.walk(folder):  # passes over what another process removes meanwhile
        for name in names:
            if not name.endswith(".lock"):
                is_removed = _remove_if_torn(Path(place) / name, folder)
                torn, others = torn + is_removed, others + (not is_removed)
    if torn:
        _LOG.warning("%s: compiled code that is incomplete is compiled again (%d files)", folder, torn)
    return others > 0


def _remove_if_torn(path: Path, folder: Path) -> bool:
    with suppress(OSError):  # it has just been removed, or nothing can be written here
        if _is_torn(path, folder):
            for complete in _COMPLETE:
                path.with_name(complete.format(path.stem)).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            return True
    return False


def _is_torn(path: Path, folder: Path) -> bool:
    """Return True if a file is certainly compiled code, and incomplete; other empty files may be there for a reason."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or abs(time.time() - status.st_mtime) < _BEING_WRITTEN:
        return False
    if status.st_size:
        return path.suffix == ".so" and not _is_complete(path)
    is_named_by_hash = any(map(_HASH.search, path.relative_to(folder).parts))
    return path.suffix in _LIBRARIES or (path.suffix in _SOURCES and is_named_by_hash)


def _is_complete(path: Path) -> bool:
    """Return True if a library has the table at its end that its beginning announces; True where they are not ELF."""
    if sys.platform != "linux":
        return True
    with path.open("rb") as file:
        head = file.read(_ELF_HEADER.size)
        if not b"\x7fELF".startswith(head[:4]):
            return any(head)  # a script for the linker, not lost blocks of zeros
        if len(head) < _ELF_HEADER.size:
            return False
        _, bits, table, size, count, names = _ELF_HEADER.unpack(head)
        if bits != _64_BITS or not table:
            return True  # others may have no such table
        file.seek(table + names * size)
        section = file.read(_SECTION_HEADER.size)
        if path.stat().st_size < table + count * size or len(section) < _SECTION_HEADER.size:
            return False
        return bool(_SECTION_HEADER.unpack(section)[1] == _STRING_TABLE)


def damaged_code_error(error: BaseException) -> LaunchError | None:
    """Empty hlat's folders of compiled code if a compiler or loader failed and code of earlier processes may be why.

    Returns:
        The error to raise instead, after which the same command compiles everything again; None if that would not help.
    """
    if not _earlier or not _is_of_compiler(error):
        return None
    folders = ", ".join(map(str, sorted(_earlier)))
    kept = [folder for folder, is_own in _earlier.items() if not (is_own and os.access(folder, os.W_OK))]
    for folder in _earlier.keys() - kept:
        with suppress(OSError):
            for path in folder.iterdir():
                shutil.rmtree(path, ignore_errors=True)
                with suppress(OSError):  # a file, or a link
                    path.unlink(missing_ok=True)
    _earlier.clear()
    reason = " ".join(str(error).split())[:_SHOWN]
    remove = f"If nothing else is in it, remove it and start again: `rm -r {shlex.join(map(str, sorted(kept)))}`."
    found = LaunchError(
        f"{folders}: the compiler failed, perhaps because code that was compiled there before is damaged: {reason}. "
        + (remove if kept else "The folder has been emptied: the next start compiles again.")
    )
    found.retryable = not kept
    return found


def _is_of_compiler(error: BaseException | None) -> bool:
    """Return True if a compiler or loader of compiled code failed, and not for want of memory.

    What was being handled when the error was raised (``__context__``) is not its cause.
    """
    is_found = False
    while error is not None:
        kind, is_other = type(error), isinstance(error, (HlatError, MemoryError))
        if is_other or not isinstance(error, Exception) or "OutOfMemory" in kind.__name__:
            return False
        is_found |= kind.__module__.startswith(_COMPILER_ERRORS) or kind.__name__ == "BackendCompilerFailed"
        error = getattr(error, "inner_exception", None) or error.__cause__
    return is_found
