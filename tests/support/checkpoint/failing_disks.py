"""Disks that fail: at one operation, from one operation on, or by losing power.

Every operation of ``Disk`` that changes something is counted, reads are not.
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

from hlat.checkpoint.format import Disk

Forgets = Literal["nothing", "everything", "all but removals"]


class PowerLoss(BaseException):
    """The machine is gone. Not an Exception: nothing may handle it."""


class CountingDisk(Disk):
    """Calls ``self.before(n, what)`` ahead of its n-th operation."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self._lock = threading.RLock()

    def before(self, number: int, what: str) -> None:
        """Hook; may raise."""

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

    def remove_file(self, path: Path) -> None:
        with self.operation(f"unlink {path.name}"):
            super().remove_file(path)

    def remove_folder(self, path: Path) -> None:
        with self.operation(f"rmdir {path.name}"):
            super().remove_folder(path)


class FailingDisk(CountingDisk):
    """Refuses operation number ``at`` with an OSError; if ``stays``, every later one that adds something too."""

    def __init__(self, at: int, code: int = errno.EIO, stays: bool = False) -> None:
        super().__init__()
        self.at, self.code, self.stays = at, code, stays

    def before(self, number: int, what: str) -> None:
        adds = what.split(maxsplit=1)[0] in ("mkdir", "create", "write", "fsync")
        if number == self.at or (self.stays and number > self.at and adds):
            raise OSError(self.code, os.strerror(self.code), what)


class PowerLossDisk(CountingDisk):
    """Ends before operation number ``at``; then the disk has forgotten what was not synced, as far as POSIX allows.

    forgets "nothing": the process alone died. "everything": bytes not fsynced are lost, and entries (creations,
    renames, removals) not followed by an fsync of their folder are as they were. "all but removals": the same, but
    files that were removed are gone. A real machine ends anywhere in between.
    """

    def __init__(self, at: int, shelter: Path, forgets: Forgets) -> None:
        super().__init__()
        self.at, self.forgets = at, forgets
        self._shelter = shelter  # removed files wait here until their removal is durable
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
        """What lies in a folder that moved has moved with it."""
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
    """Whether a folder was in one that has been removed from a folder whose entries are durable now."""
    return folder.is_relative_to(synced) and not (synced / folder.relative_to(synced).parts[0]).exists()


@dataclass
class _Entry:
    """A change of a folder that is not durable yet."""

    folder: Path
    undo: Callable[[Path], None]  # given the folder where it is now
