"""Folders of compiled code: who else could write there, which one each compiler uses, and what in it is damaged.

    folder --check_code_folder: every folder and link on the way--> owner, permissions
               --> LaunchError with the command that mends it
    run.compile_cache, or variables that the user has set, or a folder of this user
               --use_compile_cache, before a compiler is first used--> a folder for each compiler

    folder when a process joins its run --incomplete libraries, empty code--> removed, so that they are compiled again
    error of a compiler or loader later --code of earlier processes--------> folder emptied, LaunchError: start again

Compiled code runs with the rights of whoever loads it. So a folder of compiled code must belong to this user or to
root, like everything in it and every folder above it, and others must not be able to write there, by permissions or by
a POSIX access control list.

On devices whose compilers disturb each other in a common folder, each rank has its own: ``BASE/rank-3/neff``. A power
loss or a full disk can leave code incomplete, and loading that does not always fail: it can also end the process, or
compute something else. A folder that the user's environment names may hold other files, too. It is never emptied: the
error asks for that.
"""

import functools
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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import HlatError, LaunchError

_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MOST_LINKS = 40  # as Linux
_ACL, _ACL_VERSION_BYTES, _ACL_ENTRY, _ACL_WRITE = "system.posix_acl_access", 4, "<HHI", 2  # linux/posix_acl_xattr.h
_ACL_USER, _ACL_OWNING_GROUP, _ACL_GROUP = 2, 4, 8
_UID_MAP, _OVERFLOW_UID = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")


def open_code_folder(folder: Path) -> None:
    """Create a folder of code and its parents, for this user alone, and check it: errors of ``check_code_folder``."""
    with suppress(OSError):
        # A folder that cannot be created is left to whoever needs it.
        for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)  # whatever the umask is: a group may not write there
    check_code_folder(folder)


def check_code_folder(folder: Path) -> None:
    """Check that only this user and root can change the files of a folder, or create it.

    Raises:
        LaunchError: others can; the message has the path and the command that mends it.
    """
    try:
        place = folder
        for place in _path_to(folder.absolute()):
            _check_above(place, folder)
        _check_content(place)
    except FileNotFoundError:
        return  # nothing is there yet, and the folders above it are safe
    except OSError as error:
        raise LaunchError(f"{folder}: code is loaded from there, and it cannot be checked: {error}.") from error


def _path_to(path: Path) -> Iterator[Path]:
    """Yield every folder and link on the way to a path, then the folder itself; OSError for too many links."""
    here, rest, links = Path(path.anchor), [*reversed(path.parts[1:])], 0
    yield here
    while rest:
        step = here / rest.pop()
        yield step
        if step.is_symlink():
            if (links := links + 1) > _MOST_LINKS:
                raise OSError("too many symbolic links")
            target = step.readlink()
            rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            here = Path(target.anchor) if target.is_absolute() else here
            yield here
        else:
            here = here.parent if step.name == ".." else step
    yield here


def _check_above(place: Path, folder: Path) -> None:
    status = place.lstat()
    # Without a number for root, strangers' folders have the same one: only the system itself mounts something.
    # Whoever can write here could exchange what is below.
    is_system = status.st_uid == _unmapped_root() and os.path.ismount(place)
    if not (_is_trusted(status.st_uid) or is_system):
        raise LaunchError(_foreign(place, status.st_uid, folder))
    # The sticky bit, as of /tmp, lets only owners rename and remove entries.
    if not status.st_mode & stat.S_ISVTX and _is_writable_by_others(place, status):
        raise LaunchError(_writable(place, folder))


def _check_content(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise LaunchError(f"{folder}: code is loaded from there, but it is no folder. Name another one.")
    _check_own(folder, folder, status)
    # If the mode shuts others out, they cannot reach the content; listing it would take time.
    if not status.st_mode & _OPEN_TO_OTHERS:
        return
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # a compiler has just removed it
                    _check_own(Path(entry.path), folder, entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))


def _check_own(place: Path, folder: Path, status: os.stat_result) -> None:
    if not _is_trusted(status.st_uid):
        raise LaunchError(_foreign(place, status.st_uid, folder))
    if _is_writable_by_others(place, status):
        raise LaunchError(_writable(place, folder))


def _is_trusted(uid: int) -> bool:
    return uid in (os.geteuid(), 0)


def _unmapped_root() -> int | None:
    """User id that root's folders show in a container without root (Apptainer); else None."""
    with suppress(OSError, ValueError):
        first = [line.split()[0] for line in _UID_MAP.read_text(encoding="ascii").splitlines()]
        return None if "0" in first else int(_OVERFLOW_UID.read_text(encoding="ascii"))
    return None


def _is_writable_by_others(place: Path, status: os.stat_result) -> bool:
    if stat.S_ISLNK(status.st_mode):
        return False  # its mode means nothing
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:  # of a file with an access control list: nobody in it may write
        return False
    groups = {status.st_gid}
    with suppress(OSError, AttributeError):  # no list, a file system without them, or no Linux
        entries = struct.iter_unpack(_ACL_ENTRY, os.getxattr(place, _ACL)[_ACL_VERSION_BYTES:])
        writers = [(tag, number) for tag, rights, number in entries if rights & _ACL_WRITE]
        if not all(_is_trusted(number) for tag, number in writers if tag == _ACL_USER):
            return True
        groups = {number for tag, number in writers if tag == _ACL_GROUP}
        groups |= {status.st_gid for tag, _ in writers if tag == _ACL_OWNING_GROUP}
    return not all(map(_is_private_group, groups))


@functools.cache
def _is_private_group(gid: int) -> bool:
    """Return True if a group is this user's alone, which many systems let write by default (umask 002)."""
    import grp  # noqa: PLC0415  (grp and pwd are for umask 002: they may ask a server)
    import pwd  # noqa: PLC0415

    with suppress(KeyError):
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
        return group.gr_name == name and set(group.gr_mem) <= {name}
    return False


def _foreign(place: Path, uid: int, folder: Path) -> str:
    return (
        f"{folder}: code is loaded from there and runs with your rights, but {place} belongs to user {uid}. Name a "
        f"folder of your own. If you trust all that is in it: `chown -R {os.geteuid()} {shlex.quote(str(place))}`."
    )


def _writable(place: Path, folder: Path) -> str:
    is_above = folder.absolute().is_relative_to(place) and place != folder.absolute()
    mend = f"chmod go-w {shlex.quote(str(place))}" if is_above else f"chmod -R go-w {shlex.quote(str(folder))}"
    return (
        f"{folder}: code is loaded from there and runs with your rights, but others can write to {place}. `{mend}` "
        "mends it; what they may have put there stays, so remove it if in doubt."
    )


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
    """Return each compiler's folder by its environment variable.

    The base is ``run.compile_cache``; None for the folders of the environment, else one for this user on this machine.
    """
    backend = backend_of(device_type)
    own = f"rank-{rank}" if backend.compile_cache_per_rank else ""
    folders: dict[str, Path] = {}
    for variable, name in backend.compile_cache.items():
        given = _from_user(variable)
        if base is None and given is not None:
            folders[variable] = Path(given).absolute() / own
        else:
            chosen = base if base is not None else Path(tempfile.gettempdir()) / f"hlat-compiled-{os.getuid()}"
            folders[variable] = Path(chosen).absolute() / own / name
    return folders


def open_compile_cache(device_type: str, base: str | Path | None, rank: int) -> dict[str, Path]:
    """Create and check the folders of ``compile_cache_folders``: LaunchError if others own them or can write there."""
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


def _remove_incomplete(folder: Path) -> bool:
    """Remove what was not written to its end; True if other files stay, which earlier processes have compiled."""
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
    """Return True if a file is certainly compiled code, and incomplete."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or abs(time.time() - status.st_mtime) < _BEING_WRITTEN:
        return False
    if status.st_size:
        return path.suffix == ".so" and not _is_complete(path)
    # Other empty files may be there for a reason.
    is_named_by_hash = any(map(_HASH.search, path.relative_to(folder).parts))
    return path.suffix in _LIBRARIES or (path.suffix in _SOURCES and is_named_by_hash)


def _is_complete(path: Path) -> bool:
    """Return True if an ELF library has the table at its end that its beginning announces."""
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
    """Empty hlat's folders of compiled code if damaged code may be why; None if that would not help."""
    # After the error the same command compiles everything again.
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
