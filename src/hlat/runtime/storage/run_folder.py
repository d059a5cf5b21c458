"""The folder of a run, held while the run writes to it: another folder in its place is noticed, never written to.

    first attempt     folder is made --> .lock is taken --> .run-id, a run_id drawn for this run
    before each save  .lock in the folder is the file that is held?  --no--> LostError, nothing is written
    next attempt      .run-id is the run_id that the attempt before told?  --no--> LostError

A file system that is unmounted leaves its mount point behind, an empty folder of the same name; a folder that was
removed is easily made again. What is written there is no part of the run, and a run that looks for its state there
finds none.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hlat.runtime.errors import StateLostError, StorageError

LOCK_NAME = ".lock"
ID_NAME = ".run-id"

EARLIER_ATTEMPT_ENV = "HLAT_GONE_ON"
"""The environment variable of an attempt after one that trained: what that one left (``EarlierAttempt``)."""


@dataclass(frozen=True)
class EarlierAttempt:
    """What is known of the attempt of a run before this one.

    Attributes:
        saved: the newest step whose state it knew to be durable, 0 for none.
        run_id: of the run's folder; empty where it was not told.
    """

    saved: int
    run_id: str

    def variable(self) -> str:
        """As the environment variable for the next attempt."""
        return f"{self.saved} {self.run_id}"

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """From the environment; None in a first attempt."""
        saved, _, run_id = environment.get(EARLIER_ATTEMPT_ENV, "").partition(" ")
        return cls(int(saved), run_id) if saved.isdigit() else None


def read_run_id(run_dir: Path) -> str | None:
    """The run_id of the run whose folder this is; None if it has none, or cannot be read."""
    try:
        return (run_dir / ID_NAME).read_text().strip() or None
    except (OSError, ValueError):
        return None


def open_run_folder(run_dir: Path, earlier: EarlierAttempt | None = None) -> None:
    """Make the folder of a run that begins, or see that it is still that of the run that goes on.

    Raises:
        LostError: the folder of the attempt before is gone.
        StorageError: the folder cannot be made, or does not answer now.
    """
    if earlier is not None and earlier.run_id:
        _see_that_it_is(run_dir, earlier.run_id)
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"run.dir {run_dir}: cannot be written: {error.strerror}. Give another run.dir.") from error


def _see_that_it_is(run_dir: Path, run_id: str) -> None:
    try:
        found = (run_dir / ID_NAME).read_bytes().strip()
    except (FileNotFoundError, NotADirectoryError):
        raise _lost(run_dir, run_id) from None
    except OSError as error:
        raise StorageError(
            f"run.dir {run_dir}: does not answer: {error.strerror}. See that the storage is there and healthy, then "
            "give the same command: the run goes on from the newest checkpoint."
        ) from error
    if found != run_id.encode():
        raise _lost(run_dir, run_id)


class RunFolder:
    """The folder of a run, held by its open lock file, whose inode is not given to another file meanwhile.

    Args:
        path: the folder.
        descriptor: of the lock file in it, open; on the first rank it holds the lock.
        run_id: of the run; None until it is known.
    """

    def __init__(self, path: Path, descriptor: int, run_id: str | None = None) -> None:
        self.path, self.descriptor, self.run_id = path, descriptor, run_id

    def check(self) -> None:
        """See that the folder is there, and the lock on it. One system call; nothing is said of a disk that is slow or
        away for a while: whoever writes hears that.

        Raises:
            LostError: the folder is gone, or another one lies in its place.
            StorageError: the same folder has come back by another way (mounted anew, copied): the lock is not on it.
        """
        held = os.fstat(self.descriptor)
        try:
            now = os.stat(self.path / LOCK_NAME)  # noqa: PTH116  (beside its twin above)
        except (FileNotFoundError, NotADirectoryError):
            raise _lost(self.path, self.run_id) from None
        except OSError:
            return
        if (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino):
            raise _lost(self.path, self.run_id)


@contextmanager
def hold_run_folder(path: Path, lock: int | None, rank: int) -> Iterator[RunFolder]:
    """Hold the folder of a run that rank 0 has locked.

    Args:
        path: the folder.
        lock: descriptor of the lock file, on the rank that has it.
        rank: this rank.

    Raises:
        StorageError: this rank does not see the folder.
    """
    if lock is not None:
        folder = RunFolder(path, lock)
        folder.check()  # the lock may have been waited for
        yield folder
        return
    try:
        descriptor = os.open(path / LOCK_NAME, os.O_RDONLY)
    except OSError as error:
        raise StorageError(
            f"run.dir {path}: rank {rank} on {socket.gethostname()} does not see the folder that rank 0 holds there "
            f"({error.strerror}). Set run.dir to one on a file system that all machines of the run share, under the "
            "same path."
        ) from error
    try:
        yield RunFolder(path, descriptor)
    finally:
        os.close(descriptor)


def _lost(path: Path, run_id: str | None) -> StorageError:
    found = read_run_id(path)
    if found is not None and found == run_id:
        return StorageError(
            f"run.dir {path}: the folder of this run was mounted anew or copied, and the run's lock is not on it. "
            "Nothing was written there. The same command goes on from the newest checkpoint."
        )
    if not os.path.isdir(path):  # noqa: PTH112  (which raises nothing where it may not be looked at)
        what = "the folder of this run is gone: removed, renamed or unmounted"
    elif found is None:
        what = "the folder of this run is gone; what lies there is no run, as in a mount point without its file system"
    else:
        what = "the folder of this run is gone; another run lies there"
    return StateLostError(
        f"run.dir {path}: {what}. Nothing was written there, and no new run is begun. Mount it, or bring it back to "
        "that place, then give the same command: the run goes on from the newest checkpoint. To begin anew, give "
        "another run.dir."
    )
