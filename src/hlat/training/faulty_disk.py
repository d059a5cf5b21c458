"""Injected storage faults: a disk that fails on purpose, to test a run whose checkpoints cannot be written.

    storage faults of the recipe, path of a checkpoint file --> the operation, an OSError, or corrupted bytes

A save is identified by the step in the name of its folder. A fault hits ``steps`` saves from ``at_step`` on, including
their retries. Each hit is recorded on disk: a restarted run that saves the step again finds a working disk.
"""

import errno
import os
import time
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

from hlat.checkpoint import Disk, step_of_path
from hlat.config import FaultConfig, Recipe
from hlat.resilience import STORAGE_FAULTS
from hlat.runtime.progress import blocking_call
from hlat.runtime.storage.run_folder import OnceMarkers


def fault_folder(recipe: Recipe) -> Path:
    """Folder of a run that records which faults have happened."""
    return recipe.run_dir / "faults"


def checkpoint_disk(recipe: Recipe, rank: int) -> Disk:
    """Return the disk that a rank writes checkpoints to; a ``FaultyDisk`` if the recipe has storage faults."""
    if any(fault.kind in STORAGE_FAULTS for fault in recipe.faults):
        return FaultyDisk(recipe.faults, rank, fault_folder(recipe))
    return Disk()


class FaultyDisk(Disk):
    """Disk of one rank with injected faults; ``folder`` records those that have happened."""

    def __init__(
        self, faults: Sequence[FaultConfig], rank: int, folder: Path, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        numbered = list(enumerate(faults))
        self._faults = [(n, fault) for n, fault in numbered if fault.kind in STORAGE_FAULTS and fault.rank == rank]
        self._once, self._sleep = OnceMarkers(folder), sleep
        self._before = self._once.claimed()  # hits of earlier processes of this run
        self._hit: set[tuple[int, int]] = set()
        self._corrupted: set[tuple[int, int]] = set()

    def make_folder(self, path: Path) -> None:
        self._raise_if_hit(path, "unavailable", errno.ENOTCONN)
        super().make_folder(path)

    def create(self, path: Path) -> FileIO:
        self._raise_if_hit(path, "unavailable", errno.ENOTCONN)
        for fault in self._hits(path, "slow_disk"):
            with blocking_call():
                self._sleep(fault.seconds)
        return super().create(path)

    def write(self, file: FileIO, data: memoryview) -> int:
        """Write all bytes; half of them if ``torn_write``, with a flipped bit if ``corrupt``, none if ``enospc``."""
        path = Path(os.fsdecode(file.name))
        self._raise_if_hit(path, "enospc", errno.ENOSPC)
        if data and self._corrupts(path, "torn_write"):
            super().write(file, data[: len(data) // 2])
            # A torn write reports success: only reading the file again tells.
            return len(data)
        if data and self._corrupts(path, "corrupt"):
            corrupted = bytearray(data)
            corrupted[len(corrupted) // 2] ^= 1
            return super().write(file, memoryview(corrupted))
        return super().write(file, data)

    def sync_file(self, file: FileIO) -> None:
        self._raise_if_hit(Path(os.fsdecode(file.name)), "eio", errno.EIO)
        super().sync_file(file)

    def _raise_if_hit(self, path: Path, kind: str, code: int) -> None:
        if self._hits(path, kind):
            raise OSError(code, os.strerror(code), str(path))

    def _corrupts(self, path: Path, kind: str) -> bool:
        step = step_of_path(path)
        # Only the first write of each save that is hit.
        if step is None or not self._hits(path, kind) or (key := (step, len(kind))) in self._corrupted:
            return False
        self._corrupted.add(key)
        return True

    def _hits(self, path: Path, kind: str) -> list[FaultConfig]:
        step = step_of_path(path)
        if step is None:
            return []
        return [fault for number, fault in self._faults if fault.kind == kind and self._is_hit(number, fault, step)]

    def _is_hit(self, number: int, fault: FaultConfig, step: int) -> bool:
        if (number, step) in self._hit:
            return True
        marks = {f"{number}-{fault.kind}-{index}" for index in range(fault.steps)}
        hits = len(marks & self._before) + sum(hit == number for hit, _ in self._hit)
        if step < fault.at_step or hits >= fault.steps:
            return False
        # On disk: a restarted run that saves the step again finds a working disk.
        self._once.claim(f"{number}-{fault.kind}-{hits}")
        self._hit.add((number, step))
        return True
