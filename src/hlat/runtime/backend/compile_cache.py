"""Folders of compiled code: the compilers of a process are told theirs before they are first used.

    run.compile_cache, or variables that the user has set, or a folder of this user --> a folder for each compiler

On devices whose compilers disturb each other in a common folder, each rank has its own: ``BASE/rank-3/neff``.
"""

import os
import tempfile
from pathlib import Path

from hlat.runtime.backend.damaged_code import remove_incomplete
from hlat.runtime.backend.table import backend_of
from hlat.runtime.process import open_code_folder

_set_here: dict[str, str] = {}  # variables that this process has set, which the user may not have meant


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
    remove_incomplete(folders.values())
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
