"""Check of folders from which code is loaded: nobody else may be able to put code there.

    folder --every folder and link on the way--> owner, permissions --> LaunchError with the command that mends it
           --what is in it, unless it is closed to others-----------|

Compiled code runs with the rights of whoever loads it. So a folder of compiled code must belong to this user or to
root, like everything in it and every folder above it, and others must not be able to write there, by permissions or by
a POSIX access control list.
"""

import functools
import os
import shlex
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hlat.runtime.errors import LaunchError

_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MOST_LINKS = 40  # as Linux
_ACL, _ACL_VERSION_BYTES, _ACL_ENTRY, _ACL_WRITE = "system.posix_acl_access", 4, "<HHI", 2  # linux/posix_acl_xattr.h
_ACL_USER, _ACL_OWNING_GROUP, _ACL_GROUP = 2, 4, 8
_UID_MAP, _OVERFLOW_UID = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")


def open_code_folder(folder: Path) -> None:
    """Create a folder of code with its parents, for this user alone, and check it; existing ones stay as they are.

    A folder that cannot be created is left to whoever needs it.

    Raises:
        LaunchError: as ``check_code_folder``.
    """
    with suppress(OSError):
        for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)  # whatever the umask is: a group may not write there
    check_code_folder(folder)


def check_code_folder(folder: Path) -> None:
    """Check that only this user and root can change the files of a folder, or create it if it does not exist.

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
    """Yield every folder and symbolic link on the way to a path, and last the folder itself.

    Raises:
        OSError: something does not exist, or there are too many links.
    """
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
    """Check a folder that leads to code, or has it: others must not be able to exchange what is in it."""
    status = place.lstat()
    # Without a number for root, strangers' folders have the same one: only the system itself mounts something.
    is_system = status.st_uid == _unmapped_root() and os.path.ismount(place)
    if not (_is_trusted(status.st_uid) or is_system):
        raise LaunchError(_foreign(place, status.st_uid, folder))
    # The sticky bit, as of /tmp, lets only owners rename and remove entries.
    if not status.st_mode & stat.S_ISVTX and _is_writable_by_others(place, status):
        raise LaunchError(_writable(place, folder))


def _check_content(folder: Path) -> None:
    """Check a folder of code, and what is in it unless others cannot reach that."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise LaunchError(f"{folder}: code is loaded from there, but it is no folder. Name another one.")
    _check_own(folder, folder, status)
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
    """User id that root's folders show in a container without root, such as Apptainer's; None in all others."""
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
    """Return True if a group is that of this user alone, which many systems let write by default (umask 002)."""
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
