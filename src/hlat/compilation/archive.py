"""Compiled code of a run: an archive of it, and the cache on this machine that is filled from one.

    folder in which code was compiled --compiled_files--> path within a cache, such as inductor/ab/kernel.so or
                                                          rank-3/neff/... --place--> folder of a compiler
                                      --pack--> archive --unpack: checked, extracted, placed--> the cache of a run

    the archive, one tar file:
        manifest.json    device type, versions of compilers, processes, and path, hash and size of each file
        content/HASH     the files; equal ones, as several ranks compile them, are stored once

Reading takes nothing on trust: a path outside of the cache, a file that is not listed, another size or hash, a link or
a device refuse the whole archive. Nothing in it is executed here, but the compilers of a run load code from their
cache: an archive is as trustworthy as whoever made it.
"""

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from hlat.runtime.backend.code_folders import compile_cache_folders, open_compile_cache
from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import LaunchError, StorageError
from hlat.runtime.storage.local_files import atomic_file
from hlat.runtime.terminal import escape_name, plural

FORMAT = 1
_MANIFEST, _CONTENT = "manifest.json", "content/"
_LARGEST_MANIFEST = 64 << 20
_BLOCK_BYTES = 1 << 20


class PackedFile(NamedTuple):
    """Hash (SHA-256) and size of a file's content."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """Table of contents of an archive, and the devices and versions that it is for."""

    device_type: str  # of the devices that the code is for
    versions: Mapping[str, str]  # all that the code depends on (Backend.compiler_versions)
    world: int  # processes of the run
    files: Mapping[str, PackedFile]  # by path within the cache, as rank-0/neff/NAME


def check_archive_path(path: Path) -> None:
    """Check that an archive can be written, before hours of compilation; StorageError if not."""
    if path.is_dir():
        raise StorageError(f"{path}: this is a folder; name a file, such as {path / 'compiled.tar'}.")
    if not path.absolute().parent.is_dir():
        raise StorageError(f"{path}: the folder {path.absolute().parent} does not exist.")
    if not os.access(path.absolute().parent, os.W_OK):
        raise StorageError(f"{path}: the folder {path.absolute().parent} cannot be written.")


def pack(path: Path, device_type: str, versions: Mapping[str, str], world: int, files: Mapping[str, Path]) -> Manifest:
    """Write an archive of files by their path within the cache; one that exists is replaced.

    The file has its name only when it is complete. StorageError: the archive cannot be written.
    """
    try:
        packed = {name: _describe(file) for name, file in sorted(files.items())}
        manifest = Manifest(device_type, dict(versions), world, packed)
        with atomic_file(path) as file:
            _write(file, manifest, {packed[name].sha256: source for name, source in files.items()})
    except OSError as error:
        raise StorageError(f"{path}: the archive cannot be written: {error.strerror or error}.") from error
    return manifest


def _write(file: IO[bytes], manifest: Manifest, contents: Mapping[str, Path]) -> None:
    head = {
        "format": FORMAT,
        "device": manifest.device_type,
        "versions": dict(manifest.versions),
        "world": manifest.world,
        "files": {name: list(packed) for name, packed in manifest.files.items()},
    }
    text = json.dumps(head, indent=1).encode()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(_member(_MANIFEST, len(text)), io.BytesIO(text))
        # By hash: equal files of several ranks are stored once.
        for sha256, source in sorted(contents.items()):
            with source.open("rb") as content:
                archive.addfile(_member(_CONTENT + sha256, source.stat().st_size), content)


def _member(name: str, size: int) -> tarfile.TarInfo:
    """Member without owner and time: equal caches give equal archives."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member


def _describe(file: Path) -> PackedFile:
    with file.open("rb") as content:
        return PackedFile(hashlib.file_digest(content, "sha256").hexdigest(), file.stat().st_size)


@contextmanager
def opened(path: Path) -> Iterator[tuple[Manifest, tarfile.TarFile]]:
    """Open an archive for ``extract`` and read its manifest.

    Raises:
        LaunchError: this is no such archive, or it is damaged.
        StorageError: it cannot be read.
    """
    try:
        # "r:" takes no compression: pack writes none, and a small file cannot unpack to a large one.
        with tarfile.open(path, mode="r:") as archive:
            yield _read_manifest(path, archive), archive
    except (tarfile.TarError, EOFError) as error:
        raise LaunchError(f"{path}: no complete archive of compiled code: {error}. Copy or make it again.") from error
    except OSError as error:
        made = " `hlat compile RECIPE --to FILE` writes one." if isinstance(error, FileNotFoundError) else ""
        raise StorageError(f"{error.filename or path}: {error.strerror or error}.{made}") from error


def _read_manifest(path: Path, archive: tarfile.TarFile) -> Manifest:
    member = archive.next()
    # The manifest comes first, and is read before anything else is trusted.
    if member is None or member.name != _MANIFEST or not member.isreg() or member.size > _LARGEST_MANIFEST:
        raise LaunchError(f"{path}: no archive of compiled code. `hlat compile RECIPE --to FILE` writes one.")
    content = archive.extractfile(member)
    assert content is not None, "a regular file"
    try:
        head = json.loads(content.read())
        if head["format"] != FORMAT:
            raise LaunchError(
                f"{path}: format {escape_name(str(head['format']))} of another version of hlat; this one reads "
                f"{FORMAT}. Make it again here."
            )
        return _manifest_of(head)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LaunchError(f"{path}: its manifest is damaged. Copy or make it again.") from error


def _manifest_of(head: Any) -> Manifest:
    files = {str(name): PackedFile(str(sha256), int(size)) for name, (sha256, size) in head["files"].items()}
    for name in files:
        if not _is_inside(name):
            raise ValueError(name)
    versions = {str(name): str(value) for name, value in head["versions"].items()}
    return Manifest(str(head["device"]), versions, int(head["world"]), files)


def _is_inside(name: str) -> bool:
    """True if a path stays within the folder that it is relative to."""
    path = PurePosixPath(name)
    return (
        not path.is_absolute() and len(path.parts) > 1 and not {"..", "."} & set(name.split("/")) and "\0" not in name
    )


def extract(path: Path, manifest: Manifest, archive: tarfile.TarFile, folder: Path) -> dict[str, Path]:
    """Write the contents of an archive to an empty folder and check each of them; return a file for each hash.

    ``archive`` is open behind its manifest; ``path`` is for messages.

    Raises:
        LaunchError: something is missing, damaged, or not listed.
        OSError: a file cannot be read or written.
    """
    wanted = {_CONTENT + packed.sha256: packed for packed in manifest.files.values()}
    found: dict[str, Path] = {}
    while (member := archive.next()) is not None:
        packed = wanted.get(member.name)
        if packed is None or not member.isreg() or member.size != packed.size:
            raise LaunchError(f"{path}: {escape_name(member.name)} is not what its manifest lists. Make it again.")
        content = archive.extractfile(member)
        assert content is not None, "a regular file"
        # No name of the archive becomes a path.
        target = folder / str(len(found))
        if _copy(content, target) != packed.sha256:
            raise LaunchError(f"{path}: {escape_name(member.name)} is damaged. Copy the archive again.")
        found[packed.sha256] = target
    if missing := len(wanted) - len(found):
        raise LaunchError(f"{path}: missing: {missing} of {plural(len(wanted), 'file')}. Copy the archive again.")
    return found


def _copy(source: IO[bytes], target: Path) -> str:
    """Copy a file; return the hash of what was copied."""
    digest = hashlib.sha256()
    with target.open("xb") as file:
        while block := source.read(_BLOCK_BYTES):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


_RANK_FOLDER = re.compile(r"rank-(\d{1,7})")
_LOCK_SUFFIX = ".lock"


@dataclass(frozen=True)
class CompiledCache:
    """Compiled code of a run, counted."""

    device_type: str  # of the devices that it is for
    versions: Mapping[str, str]  # of compilers and the device, by name
    world: int  # processes of the run
    files: int  # number
    size: int  # bytes
    archive: Path | None  # the one that has them, if any


def compiled_files(folder: Path) -> dict[str, Path]:
    """Files of a cache in a folder by their path within it, without locks."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path for path in files if path.suffix != _LOCK_SUFFIX}


def place(files: Mapping[str, Path], device_type: str, base: str | None) -> None:
    """Copy files into the cache of a run; ``base`` is ``run.compile_cache`` of its recipe.

    Raises:
        LaunchError: a path belongs to no compiler of these devices.
        StorageError: the cache cannot be written.
    """
    # All are checked before the first is copied.
    targets = {name: _place_of(name, device_type, base) for name in files}
    try:
        with working_folder(device_type, base) as folder:
            copied = folder / "copied"
            for name, source in files.items():
                targets[name].parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copied)
                # A compiler that runs at the same time never sees a part of a file. Names are hashes of what was
                # compiled, so files of several recipes lie beside each other.
                copied.replace(targets[name])
    except OSError as error:
        raise StorageError(f"{error.filename}: the cache cannot be written: {error.strerror or error}.") from error


@contextmanager
def working_folder(device_type: str, base: str | None) -> Iterator[Path]:
    """Make a folder on the file system of a run's cache, and remove it at the end of the block.

    Raises:
        LaunchError: others can write to the cache.
        StorageError: the cache cannot be written.
    """
    root = next(iter(open_compile_cache(device_type, base, 0).values()))
    try:
        # On the cache's own file system: renames within one are atomic.
        folder = Path(tempfile.mkdtemp(prefix=".hlat-", dir=root))
    except OSError as error:
        raise StorageError(f"{root}: the cache of compiled code cannot be written: {error.strerror}.") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unpack(archive: Path, device_type: str, versions: Mapping[str, str], base: str | None) -> CompiledCache:
    """Fill the cache of a run from an archive. All of it is checked before any file is placed.

    ``versions`` are those here (``Backend.compiler_versions``); ``base`` is ``run.compile_cache`` of the recipe.

    Raises:
        LaunchError: the archive is damaged, or for other devices or versions.
        StorageError: it cannot be read, or the cache cannot be written.
    """
    with opened(archive) as (manifest, content), working_folder(device_type, base) as folder:
        _check_versions(archive, manifest, device_type, versions)
        # Refuse a path of no compiler before anything is extracted.
        for name in manifest.files:
            _place_of(name, device_type, base)
        extracted = extract(archive, manifest, content, folder)
        place({name: extracted[packed.sha256] for name, packed in manifest.files.items()}, device_type, base)
    size = sum(packed.size for packed in manifest.files.values())
    return CompiledCache(device_type, manifest.versions, manifest.world, len(manifest.files), size, archive)


def _check_versions(archive: Path, manifest: Manifest, device_type: str, here: Mapping[str, str]) -> None:
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
    remedy = "Nothing was unpacked. Compile on a machine like this one: `hlat compile RECIPE --to FILE`."
    raise LaunchError("\n".join([f"{archive}: compiled for something else:", *lines, remedy]))


def _place_of(name: str, device_type: str, base: str | None) -> Path:
    """Place of a file in the cache here; LaunchError if no compiler of these devices has such files."""
    backend = backend_of(device_type)
    parts = PurePosixPath(name).parts
    rank = _RANK_FOLDER.fullmatch(parts[0]) if backend.compile_cache_per_rank else None
    within = parts[1:] if rank is not None else parts
    folders = compile_cache_folders(device_type, base, int(rank[1]) if rank is not None else 0)
    by_name = {backend.compile_cache[variable]: folder for variable, folder in folders.items()}
    if len(within) < 2 or within[0] not in by_name or (rank is None and backend.compile_cache_per_rank):
        raise LaunchError(f"{escape_name(name)}: no compiler of {device_type} devices has such a file in its cache.")
    return by_name[within[0]].joinpath(*within[1:])
