"""The id of a run: a random number drawn when the run begins, so that files of another run are never taken for its own.

<run.dir>/.run-id  --> id --with the run folder's path--> folder name of its snapshots on a machine
                          --with the run's name---------> run.json of its prefix in an object store
"""

import hashlib
import json
import secrets
from contextlib import suppress
from pathlib import Path

from hlat.checkpoint.format.filesystem import Disk, storage_errors, write_file
from hlat.checkpoint.object_store import ObjectStoreClient
from hlat.runtime.errors import CheckpointError
from hlat.runtime.storage.run_folder import ID_NAME

RUN_NAME = "run.json"


class RunId:
    """The id of a run, stored in the run folder, which exists; ``name`` is ``run.name`` of the recipe."""

    def __init__(self, run_dir: Path, name: str, disk: Disk | None = None) -> None:
        self.run_dir, self.name = run_dir, name
        self._disk = disk or Disk()

    def stored(self) -> str | None:
        """Read the id; None without one. CheckpointError if the file is damaged, StorageError if unreadable."""
        path = self.run_dir / ID_NAME
        try:
            with storage_errors(f"cannot read {ID_NAME}", self.run_dir), suppress(FileNotFoundError):
                return path.read_text().strip() or None
        except UnicodeDecodeError as exc:
            raise CheckpointError(
                f"{path}: is damaged. It is the id by which the run finds its snapshots and its prefix in an object "
                "store. Without these, delete the file, and the run resumes from its checkpoints; otherwise restore it."
            ) from exc
        return None

    def ensure(self, adopted: str | None = None) -> str:
        """Read the id; if there is none, store ``adopted``, or a new random one. StorageError if the disk fails."""
        known = self.stored()
        if known is not None:
            return known
        run_id = adopted or secrets.token_hex(16)
        temporary = self.run_dir / f"{ID_NAME}.tmp"
        with storage_errors("cannot store the id of the run", self.run_dir):
            # Left by an interrupted attempt; ``write_file`` creates new files only.
            self._disk.remove_tree(temporary)
            write_file(self._disk, temporary, run_id.encode())
            self._disk.rename(temporary, self.run_dir / ID_NAME)
            # Durable before anything is stored under this id elsewhere.
            self._disk.sync_folder(self.run_dir)
        return run_id

    def snapshot_key(self) -> str:
        """Folder name of this run's snapshots on a machine: 16 hexadecimal digits."""
        # With the path: a copied run folder has the same id and is another run.
        return hashlib.sha256(f"{self.run_dir.resolve()}\0{self.ensure()}".encode()).hexdigest()[:16]


def claim(client: ObjectStoreClient, run_id: RunId) -> None:
    """Check that a prefix belongs to a run, and claim it if it belongs to none.

    A run without an id takes that of the prefix: its run folder was lost, and it resumes on a new machine.
    CheckpointError if the prefix belongs to another run; StorageError if the store or the run folder fails.
    """
    local_id = run_id.stored()
    found = client.read(RUN_NAME)
    if found is None:
        found = client.create(RUN_NAME, json.dumps({"run": run_id.ensure(), "name": run_id.name}).encode())
    try:
        content = json.loads(found)
        remote_id, name = str(content["run"]), str(content["name"])
    except (ValueError, KeyError, TypeError) as exc:
        where = client.url_of(RUN_NAME)
        raise CheckpointError(f"{where}: does not name a run. Use another checkpoint.remote.") from exc
    if name != run_id.name or (local_id is not None and local_id != remote_id):
        which = f"the run {name}" if name != run_id.name else f"another run with the same name, {name}"
        raise CheckpointError(
            f"{client.url}: contains the checkpoints of {which}. Give this run its own checkpoint.remote; to resume "
            "that run, use its run.name and a new run.dir."
        )
    if run_id.ensure(adopted=remote_id) != remote_id:
        raise CheckpointError(f"{client.url}: two runs start with this prefix at the same time. Give each its own.")
