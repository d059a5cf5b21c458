"""Disks that fail: at one operation, from one operation on, or by a loss of power.

The operations of ``Disk`` that change something are counted.
"""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal

from hlat.checkpoint.format.filesystem import Disk

Forgets = Literal["nothing", "everything", "all but removals"]


class PowerLoss(BaseException):
    """Loss of power. Not an Exception, so that no code under test handles it."""


class CountingDisk(Disk):
    """Disk that calls ``self.before(n, what)`` before its n-th operation."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self._lock = threading.RLock()

    def before(self, number: int, what: str) -> None:
        """Hook that may raise an error."""

    @contextmanager
    def operation(self, what: str) -> Iterator[None]:
        with self._lock:  # files are written by several threads
            self.operations.append(what)
            self.before(len(self.operations), what)
            yield

    def make_folder(self, path: Path) -> None:
        with self.operation(f"mkdir {path.name}"):
            super().make_folder(path)

    def create(self, path: Path) -> FileIO:
        with self.operation(f"create {path.name}"):
            return super().create(path)

    def write(self, file: FileIO, data: memoryview) -> int:
        with self.operation(f"write {Path(file.name).name}"):
            return super().write(file, data)

    def sync_file(self, file: FileIO) -> None:
        with self.operation(f"fsync {Path(file.name).name}"):
            super().sync_file(file)

    def sync_folder(self, path: Path) -> None:
        with self.operation(f"fsync folder {path.name}"):
            super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        with self.operation(f"rename {source.name} {target.name}"):
            super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        with self.operation(f"link {target.name}"):
            super().link(source, target)

    def share(self, source: Path, file: FileIO) -> None:
        with self.operation(f"share {Path(file.name).name}"):
            super().share(source, file)

    def remove_file(self, path: Path) -> None:
        with self.operation(f"unlink {path.name}"):
            super().remove_file(path)

    def remove_folder(self, path: Path) -> None:
        with self.operation(f"rmdir {path.name}"):
            super().remove_folder(path)


class FailingDisk(CountingDisk):
    """Disk whose operation number ``at`` raises OSError; if ``stays``, later operations that add something do too."""

    def __init__(self, at: int, code: int = errno.EIO, stays: bool = False) -> None:
        super().__init__()
        self.at, self.code, self.stays = at, code, stays

    def before(self, number: int, what: str) -> None:
        adds = what.split(maxsplit=1)[0] in ("mkdir", "create", "write", "fsync")
        if number == self.at or (self.stays and number > self.at and adds):
            raise OSError(self.code, os.strerror(self.code), what)


class PowerLossDisk(CountingDisk):
    """Disk that loses power before operation number ``at``, with what POSIX allows to be lost without fsync.

    forgets "nothing": only the process died. "everything": bytes that were not fsynced are lost, and creations, renames
    and removals that were not followed by an fsync of their folder are undone. "all but removals": the same, but
    removals stay. Real machines lose something in between.
    """

    def __init__(self, at: int, shelter: Path, forgets: Forgets) -> None:
        super().__init__()
        self.at, self.forgets = at, forgets
        self._shelter = shelter  # removed files stay here until their removal is durable
        self._unsynced_bytes: set[int] = set()  # inodes
        self._undo: list[_Entry] = []
        self.dead = False

    def before(self, number: int, what: str) -> None:
        if self.dead:
            raise PowerLoss
        if number == self.at:
            self.dead = True
            if self.forgets != "nothing":
                self._lose()
            raise PowerLoss

    def _lose(self) -> None:
        for path in self._shelter.parent.rglob("*"):
            if path.is_file() and path.stat().st_ino in self._unsynced_bytes:
                os.truncate(path, 0)
        for entry in reversed(self._undo):
            entry.undo(entry.folder)

    def _remember(self, folder: Path, undo: Callable[[Path], None]) -> None:
        self._undo.append(_Entry(folder, undo))

    def make_folder(self, path: Path) -> None:
        existed = path.exists()
        super().make_folder(path)
        if not existed:
            self._remember(path.parent, lambda folder: shutil.rmtree(folder / path.name))

    def create(self, path: Path) -> FileIO:
        file = super().create(path)
        self._unsynced_bytes.add(os.fstat(file.fileno()).st_ino)
        self._remember(path.parent, lambda folder: (folder / path.name).unlink(missing_ok=True))
        return file

    def sync_file(self, file: FileIO) -> None:
        super().sync_file(file)
        self._unsynced_bytes.discard(os.fstat(file.fileno()).st_ino)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._undo = [entry for entry in self._undo if entry.folder != path and not _is_gone(path, entry.folder)]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._moved(source, target)

        def undo(folder: Path) -> None:
            (folder / target.name).rename(source)
            self._moved(folder / target.name, source)

        self._remember(target.parent, undo)

    def _moved(self, source: Path, target: Path) -> None:
        """Update the paths of entries in a folder that was renamed."""
        for entry in self._undo:
            if entry.folder.is_relative_to(source):
                entry.folder = target / entry.folder.relative_to(source)

    def remove_file(self, path: Path) -> None:
        with self.operation(f"unlink {path.name}"):
            kept = self._shelter / str(len(self.operations))
            path.rename(kept)
        if self.forgets == "everything":
            self._remember(path.parent, lambda folder: kept.rename(folder / path.name))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self._remember(path.parent, lambda folder: (folder / path.name).mkdir())


def _is_gone(synced: Path, folder: Path) -> bool:
    """True if a folder was inside a folder that has been removed, durably, from the synced one."""
    return folder.is_relative_to(synced) and not (synced / folder.relative_to(synced).parts[0]).exists()


@dataclass
class _Entry:
    """A change of a folder that is not durable yet, and the function that undoes it."""

    folder: Path
    undo: Callable[[Path], None]  # takes the present path of the folder
