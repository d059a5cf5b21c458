"""Which run a folder belongs to: a number drawn when it begins, so that nothing of another run is taken for its own.

<run.dir>/.run-id  --> the run's number --with its folder--> the name of its snapshots on a machine
                                        --with its name----> run.json of its prefix in an object store
"""

import hashlib
import json
import secrets
from pathlib import Path

from hlat.checkpoint.format import Disk, storage_error, write_file
from hlat.checkpoint.tiers.object_store import ObjectStoreClient
from hlat.runtime import CheckpointError
from hlat.runtime.storage import ID_NAME

RUN_NAME = "run.json"


class RunId:
    """A run.

    Args:
        run_dir: its folder, which exists.
        name: what its recipe calls it.
        disk: where its number is written.
    """

    def __init__(self, run_dir: Path, name: str, disk: Disk | None = None) -> None:
        self.run_dir, self.name = run_dir, name
        self._disk = disk or Disk()

    def stored(self) -> str | None:
        """The number of the run; None if it has none yet.

        Raises:
            StorageError: it is there and cannot be read.
        """
        path = self.run_dir / ID_NAME
        try:
            return path.read_text().strip() or None
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise storage_error(exc, f"cannot read {ID_NAME}", self.run_dir) from exc

    def ensure(self, adopted: str | None = None) -> str:
        """The number of the run, written down if it had none: the one that is given, or a new one.

        Raises:
            StorageError: the folder cannot be written.
        """
        known = self.stored()
        if known is not None:
            return known
        number = adopted or secrets.token_hex(16)
        temporary = self.run_dir / f"{ID_NAME}.tmp"
        try:
            self._disk.remove_tree(temporary)
            write_file(self._disk, temporary, number.encode())
            self._disk.rename(temporary, self.run_dir / ID_NAME)
            self._disk.sync_folder(self.run_dir)
        except OSError as exc:
            raise storage_error(exc, "cannot begin a run", self.run_dir) from exc
        return number

    def snapshot_key(self) -> str:
        """The name of the run's folder among the snapshots on a machine."""
        return hashlib.sha256(f"{self.run_dir.resolve()}\0{self.ensure()}".encode()).hexdigest()[:16]


def claim(client: ObjectStoreClient, run_id: RunId) -> None:
    """See that a prefix is a run's. A run without a number takes that of the prefix: its folder is on a new machine.

    Raises:
        CheckpointError: it is another run's.
        StorageError: the store does not answer, or the folder cannot be written.
    """
    known = run_id.stored()
    found = client.read(RUN_NAME)
    if found is None:
        found = client.create(RUN_NAME, json.dumps({"run": run_id.ensure(), "name": run_id.name}).encode())
    try:
        there = json.loads(found)
        number, name = str(there["run"]), str(there["name"])
    except (ValueError, KeyError, TypeError) as exc:
        where = client.url_of(RUN_NAME)
        raise CheckpointError(f"{where}: names no run. Use another checkpoint.remote.") from exc
    if name != run_id.name or (known is not None and known != number):
        which = f"the run {name}" if name != run_id.name else f"another run that is called {name} too"
        raise CheckpointError(
            f"{client.url}: holds the checkpoints of {which}. Give this one a checkpoint.remote of its own; to go on "
            "with that run, use its run.name and a new run.dir."
        )
    if run_id.ensure(adopted=number) != number:
        raise CheckpointError(f"{client.url}: two runs begin there at the same time. Give each a prefix of its own.")
