"""The cache of a run on this machine: files come from a folder in which its code was compiled, or from an archive.

    folder, archive --> path within a cache, such as inductor/ab/kernel.so or rank-3/neff/... --> folder of a compiler

Files are copied into a folder beside their place and renamed: a compiler that runs at the same time never sees a part
of one. Names are hashes of what was compiled, so that files of several recipes lie beside each other.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hlat.compilation.archive import Manifest, extract, opened
from hlat.runtime.backend.compile_cache import compile_cache_folders, open_compile_cache
from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import LaunchError, StorageError
from hlat.runtime.terminal_text import escape_name

_RANK = re.compile(r"rank-(\d{1,7})")
_LOCK = ".lock"


@dataclass(frozen=True)
class CompiledCache:
    """Compiled code of a run.

    Attributes:
        device_type: type of the devices that it is for.
        versions: versions of compilers and the device that it is for, by name.
        world: processes of the run.
        files: number of files.
        size: their bytes.
        archive: the archive that has them; None if there is none.
    """

    device_type: str
    versions: Mapping[str, str]
    world: int
    files: int
    size: int
    archive: Path | None


def compiled_files(folder: Path) -> dict[str, Path]:
    """List the files of a cache in a folder by their path within it, without locks."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path for path in files if path.suffix != _LOCK}


def place(files: Mapping[str, Path], device_type: str, base: str | None) -> None:
    """Copy files into the cache of a run on this machine.

    Args:
        files: files by their path within a cache.
        device_type: type of the run's devices.
        base: ``run.compile_cache`` of its recipe.

    Raises:
        LaunchError: a path belongs to no compiler of these devices.
        StorageError: the cache cannot be written.
    """
    targets = {name: _target(name, device_type, base) for name in files}
    try:
        with working_folder(device_type, base) as folder:
            copied = folder / "copied"
            for name, source in files.items():
                targets[name].parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copied)
                copied.replace(targets[name])
    except OSError as error:
        raise StorageError(f"{error.filename}: the cache cannot be written: {error.strerror or error}.") from error


@contextmanager
def working_folder(device_type: str, base: str | None) -> Iterator[Path]:
    """Make a folder on the file system of a run's cache, and remove it at the end of the block.

    Args:
        device_type: type of the run's devices.
        base: ``run.compile_cache`` of its recipe.

    Yields:
        The folder.

    Raises:
        LaunchError: others can write to the cache.
        StorageError: the cache cannot be written.
    """
    root = next(iter(open_compile_cache(device_type, base, 0).values()))
    try:
        folder = Path(tempfile.mkdtemp(prefix=".hlat-", dir=root))
    except OSError as error:
        raise StorageError(f"{root}: the cache of compiled code cannot be written: {error.strerror}.") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unpack(archive: Path, device_type: str, versions: Mapping[str, str], base: str | None) -> CompiledCache:
    """Fill the cache of a run on this machine from an archive. All of it is checked before any file is placed.

    Args:
        archive: the archive.
        device_type: type of the run's devices.
        versions: versions of compilers and the device here (``Backend.compiler_versions``).
        base: ``run.compile_cache`` of the recipe.

    Raises:
        LaunchError: the archive is damaged, or for other devices or versions.
        StorageError: it cannot be read, or the cache cannot be written.
    """
    with opened(archive) as (manifest, content), working_folder(device_type, base) as folder:
        _check_versions(archive, manifest, device_type, versions)
        for name in manifest.files:
            _target(name, device_type, base)
        extracted = extract(archive, manifest, content, folder)
        place({name: extracted[packed.sha256] for name, packed in manifest.files.items()}, device_type, base)
    size = sum(packed.size for packed in manifest.files.values())
    return CompiledCache(device_type, manifest.versions, manifest.world, len(manifest.files), size, archive)


def _check_versions(archive: Path, manifest: Manifest, device_type: str, here: Mapping[str, str]) -> None:
    """Refuse an archive of another device type, or of other versions of anything that compiled code depends on."""
    theirs = {"device type": manifest.device_type, **manifest.versions}
    ours = {"device type": device_type, **here}
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    if not names:
        return
    lines = [
        f"  {escape_name(name)}: {escape_name(theirs.get(name) or 'none')} in the archive, "
        f"{ours.get(name) or 'none'} here"
        for name in names
    ]
    remedy = "Nothing was unpacked. Compile on a machine like this one: `hlat compile RECIPE --out FILE`."
    raise LaunchError("\n".join([f"{archive}: compiled for something else:", *lines, remedy]))


def _target(name: str, device_type: str, base: str | None) -> Path:
    """Place of a file in the cache of this machine.

    Raises:
        LaunchError: no compiler of these devices has such files.
    """
    backend = backend_of(device_type)
    parts = PurePosixPath(name).parts
    rank = _RANK.fullmatch(parts[0]) if backend.compile_cache_per_rank else None
    within = parts[1:] if rank is not None else parts
    folders = compile_cache_folders(device_type, base, int(rank[1]) if rank is not None else 0)
    by_name = {backend.compile_cache[variable]: folder for variable, folder in folders.items()}
    if len(within) < 2 or within[0] not in by_name or (rank is None and backend.compile_cache_per_rank):
        raise LaunchError(f"{escape_name(name)}: no compiler of {device_type} devices has such a file in its cache.")
    return by_name[within[0]].joinpath(*within[1:])
