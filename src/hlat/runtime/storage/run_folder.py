"""The folder of a run, identified by its lock file: if another folder takes its place, nothing is written to that one.

    first attempt     create the folder --> take .lock --> write .run-id, a random number
    before each save  is .lock in the folder the file that is open here?  --no--> StateLostError, nothing is written
    next attempt      does .run-id equal the id of the previous attempt?  --no--> StateLostError
    once in a run     name --OnceMarkers.claim--> an empty file, durable before the event --> False ever after

An unmounted file system leaves its mount point behind, an empty folder of the same name; a removed folder may be
created again by another program. Files written there would not belong to the run, and a restarted run would not find
its state there.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hlat.runtime.errors import StateLostError, StorageError
from hlat.runtime.progress import blocking_call
from hlat.runtime.storage.local_files import broken_link, sync_to_disk, write_atomic
from hlat.runtime.urls import redact_json

LOCK_NAME = ".lock"
RECIPE_NAME = "recipe.yaml"  # resolved recipe of the run, as of its last start
RECIPE_HEAD = "# The resolved recipe of this run."
"""How that file begins: one that begins otherwise is the user's."""
ATTEMPTS_NAME = "attempts.jsonl"  # A line per start of the run
ID_NAME = ".run-id"
KEPT_PREFIX = "KEPT-"
"""Files in a checkpoint, each with the folder of a fork that was made from it: such a checkpoint is never pruned."""

ATTEMPT_ENV = "HLAT_ATTEMPT"
"""Environment variable with the launch and the number of this attempt, as LAUNCH/NUMBER, on several hosts."""

EARLIER_ATTEMPT_ENV = "HLAT_GONE_ON"
"""Environment variable that describes the previous attempt to a restarted one (see ``EarlierAttempt``)."""


@dataclass(frozen=True)
class EarlierAttempt:
    """Facts about the previous attempt of this run."""

    saved: int  # newest step whose checkpoint is known to be durable; 0 for none
    run_id: str  # id in the run's folder; empty if it was not reported

    def variable(self) -> str:
        return f"{self.saved} {self.run_id}"

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Read from the environment; None in a first attempt."""
        saved, _, run_id = environment.get(EARLIER_ATTEMPT_ENV, "").partition(" ")
        return cls(int(saved), run_id) if saved.isdigit() else None


def is_foreign_recipe(run_dir: Path) -> bool:
    """True if a folder has a recipe.yaml that no run has written: a run in this folder would replace it."""
    try:
        with (run_dir / RECIPE_NAME).open(encoding="utf-8", errors="replace") as file:
            # such as a temporary failure of the disk: the code that writes will see it
            return not file.read(len(RECIPE_HEAD)).startswith(RECIPE_HEAD)
    except OSError:
        return False


def write_recipe(folder: Path, recipe: Mapping[str, Any], run_dir: Path) -> None:
    """Write the resolved recipe of the run in ``run_dir`` to a folder, without credentials in URLs; OSError."""
    import yaml  # noqa: PLC0415  (lists of runs, which start fast, write none)

    head = f"{RECIPE_HEAD} The same run: hlat train {run_dir}/{RECIPE_NAME}\n"
    text = yaml.safe_dump(redact_json(dict(recipe)), sort_keys=False, allow_unicode=True)
    write_atomic(folder / RECIPE_NAME, (head + text).encode())


def read_resolved(folder: Path) -> dict[str, Any]:
    """Read the resolved recipe of a run; empty if there is none that can be read."""
    import yaml  # noqa: PLC0415  (as above)

    try:
        found = yaml.safe_load((folder / RECIPE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def kept_marks(checkpoint: Path) -> list[Path]:
    """List the marks in a checkpoint of the forks that were made from it."""
    return sorted(checkpoint.glob(f"{KEPT_PREFIX}*"))


def is_kept(checkpoint: Path) -> bool:
    """True if a fork was made from a checkpoint."""
    return bool(kept_marks(checkpoint))


def forks_of(run_dir: Path) -> list[tuple[int, Path]]:
    """List the forks of a run, as step and folder, by step; those that no longer exist are left out."""
    found = set()
    for mark in run_dir.glob(f"checkpoints/step-*/{KEPT_PREFIX}*"):
        with suppress(OSError, ValueError):  # a checkpoint that is being removed
            folder = Path(mark.read_text(encoding="utf-8").strip())
            if folder.name and folder.is_dir():
                found.add((int(mark.parent.name.removeprefix("step-")), folder))
    return sorted(found)


def read_run_id(run_dir: Path) -> str | None:
    """Read the run id in a folder; None if it has none, or cannot be read."""
    try:
        return (run_dir / ID_NAME).read_text().strip() or None
    except (OSError, ValueError):
        return None


def open_run_folder(run_dir: Path, earlier: EarlierAttempt | None = None) -> None:
    """Create the folder of a new run, or check that it still belongs to the run that resumes.

    Raises:
        StateLostError: the folder of the previous attempt is gone.
        StorageError: the folder cannot be created, or cannot be read now.
    """
    if earlier is not None and earlier.run_id:
        _check_run_id(run_dir, earlier.run_id)
        return
    if link := broken_link(run_dir):
        raise StorageError(f"run.dir {run_dir}: {link}. Make that folder, mount its disk, or give another run.dir.")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"run.dir {run_dir}: cannot be written: {error.strerror}. Give another run.dir.") from error


def _check_run_id(run_dir: Path, run_id: str) -> None:
    try:
        found = (run_dir / ID_NAME).read_bytes().strip()
    except (FileNotFoundError, NotADirectoryError):
        raise _lost(run_dir, run_id) from None
    except OSError as error:
        raise StorageError(
            f"run.dir {run_dir}: cannot be read: {error.strerror}. Check that the storage is mounted and healthy, then "
            "run the same command: the run resumes from the newest checkpoint."
        ) from error
    if found != run_id.encode():
        raise _lost(run_dir, run_id)


class RunFolder:
    """The folder of a run, identified by an open lock file: the inode of an open file is not reused."""

    def __init__(self, path: Path, descriptor: int, run_id: str | None = None) -> None:
        # descriptor: of the lock file, which rank 0 locks; run_id: None until it is known
        self.path, self.descriptor, self.run_id = path, descriptor, run_id

    @blocking_call()
    def check(self) -> None:
        """Check, with one system call, that the folder exists and contains the lock file that is open here.

        Raises:
            StateLostError: the folder is gone, or another one is in its place.
            StorageError: the same folder was mounted again or copied, so the lock is not on it.
        """
        held = os.fstat(self.descriptor)
        try:
            now = os.stat(self.path / LOCK_NAME)  # noqa: PTH116  (like os.fstat above)
        except (FileNotFoundError, NotADirectoryError):
            raise _lost(self.path, self.run_id) from None
        except OSError:
            return
        if (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino):
            raise _lost(self.path, self.run_id)


@contextmanager
def hold_run_folder(path: Path, lock: int | None, rank: int) -> Iterator[RunFolder]:
    """Keep the lock file open within the block; ``lock`` is rank 0's descriptor, which holds the lock.

    Raises:
        StorageError: this rank does not see the folder.
    """
    if lock is not None:
        folder = RunFolder(path, lock)
        folder.check()  # the folder may have changed while this process waited for the lock
        yield folder
        return
    try:
        descriptor = os.open(path / LOCK_NAME, os.O_RDONLY)
    except OSError as error:
        raise StorageError(
            f"run.dir {path}: rank {rank} on {socket.gethostname()} does not see the folder that rank 0 has locked "
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
            f"run.dir {path}: the folder of this run was mounted again or copied, and the run's lock is not on it. "
            "Nothing was written there. The same command resumes from the newest checkpoint."
        )
    if not os.path.isdir(path):  # noqa: PTH112  (Path.is_dir would raise without permission)
        reason = "the folder of this run is gone: removed, renamed or unmounted"
    elif found is None:
        reason = "the folder of this run is gone; the folder now at this path has no run in it, like a mount point"
    else:
        reason = "the folder of this run is gone; another run's folder is at this path"
    return StateLostError(
        f"run.dir {path}: {reason}. Nothing was written there, and no new run is begun. Mount the folder, or move it "
        "back to this path, then run the same command: it resumes from the newest checkpoint. To begin a new run, set "
        "another run.dir."
    )


class OnceMarkers:
    """Claimed names, stored as empty files of a folder, which the first claim creates below its parent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def claimed(self) -> set[str]:
        try:
            return {path.name for path in self._folder.iterdir()}
        except FileNotFoundError:
            return set()

    def claim(self, name: str) -> bool:
        """Claim a name; return True the first time, and False ever after.

        Raises:
            StorageError: the folder cannot be written.
        """
        try:
            self._folder.mkdir(exist_ok=True)
            os.close(os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            # Durable before the event: a process that is killed, or a power failure, must not repeat it.
            sync_to_disk(self._folder)
        except FileExistsError:
            return False
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot be written: {error.strerror}. Give another run.dir.") from error
        return True
