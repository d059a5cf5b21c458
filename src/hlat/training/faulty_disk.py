"""A disk that fails on purpose, for rehearsing what happens to a run whose checkpoints cannot be written.

    storage faults of the recipe, the folder that is written --> the operation, its refusal, or other bytes than asked

A save belongs to the step in the name of its folder. A fault hits so many saves from a step on, each with its retries,
and is marked on disk: a run that is restarted and saves that step again meets a disk that works.
"""

import errno
import os
import time
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

from hlat.checkpoint.format import Disk
from hlat.checkpoint.protocol import step_of_path
from hlat.config import Recipe
from hlat.config.sections import FaultConfig
from hlat.resilience import STORAGE_FAULTS
from hlat.runtime.storage import OnceMarkers


def fault_folder(recipe: Recipe) -> Path:
    """Where a run keeps which of its faults have happened."""
    return recipe.run_dir / "faults"


def disk_of(recipe: Recipe, rank: int) -> Disk:
    """The disk that a rank writes checkpoints to, faulty where the recipe asks for it."""
    if any(fault.kind in STORAGE_FAULTS for fault in recipe.faults):
        return FaultyDisk(recipe.faults, rank, fault_folder(recipe))
    return Disk()


class FaultyDisk(Disk):
    """The disk of one rank.

    Args:
        faults: of the recipe.
        rank: this rank.
        folder: where it is kept which have happened.
        sleep: waits for seconds.
    """

    def __init__(
        self, faults: Sequence[FaultConfig], rank: int, folder: Path, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        numbered = list(enumerate(faults))
        self._faults = [(n, fault) for n, fault in numbered if fault.kind in STORAGE_FAULTS and fault.rank == rank]
        self._once, self._sleep = OnceMarkers(folder), sleep
        self._before = self._once.claimed()  # what an earlier process of this run met
        self._hit: set[tuple[int, int]] = set()
        self._spoiled: set[tuple[int, int]] = set()

    def make_folder(self, path: Path) -> None:
        """As a disk does, if it is there."""
        self._refuse(path, "unavailable", errno.ENOTCONN)
        super().make_folder(path)

    def create(self, path: Path) -> FileIO:
        """As a disk does, if it is there."""
        self._refuse(path, "unavailable", errno.ENOTCONN)
        for fault in self._at(path, "slow_disk"):
            self._sleep(fault.seconds)
        return super().create(path)

    def write(self, file: FileIO, data: memoryview) -> int:
        """As a disk does, or fewer bytes, or others, or none."""
        path = Path(os.fsdecode(file.name))
        self._refuse(path, "enospc", errno.ENOSPC)
        if data and self._spoils(path, "torn_write"):
            super().write(file, data[: len(data) // 2])
            return len(data)
        if data and self._spoils(path, "corrupt"):
            spoiled = bytearray(data)
            spoiled[len(spoiled) // 2] ^= 1
            return super().write(file, memoryview(spoiled))
        return super().write(file, data)

    def sync_file(self, file: FileIO) -> None:
        """As a disk does, or a failure of the device."""
        self._refuse(Path(os.fsdecode(file.name)), "eio", errno.EIO)
        super().sync_file(file)

    def _refuse(self, path: Path, kind: str, code: int) -> None:
        if self._at(path, kind):
            raise OSError(code, os.strerror(code), str(path))

    def _spoils(self, path: Path, kind: str) -> bool:
        """Whether this write is the one of its save that is spoiled; there is one."""
        step = step_of_path(path)
        if step is None or not self._at(path, kind) or (key := (step, len(kind))) in self._spoiled:
            return False
        self._spoiled.add(key)
        return True

    def _at(self, path: Path, kind: str) -> list[FaultConfig]:
        step = step_of_path(path)
        if step is None:
            return []
        return [fault for number, fault in self._faults if fault.kind == kind and self._hits(number, fault, step)]

    def _hits(self, number: int, fault: FaultConfig, step: int) -> bool:
        if (number, step) in self._hit:
            return True
        names = {f"{number}-{fault.kind}-{one}" for one in range(fault.steps)}
        met = len(names & self._before) + sum(hit == number for hit, _ in self._hit)
        if step < fault.at_step or met >= fault.steps:
            return False
        self._once.claim(f"{number}-{fault.kind}-{met}")
        self._hit.add((number, step))
        return True
