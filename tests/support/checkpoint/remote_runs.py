"""A run folder and its prefix in an object store, as tests of the remote tier use them."""

import shutil
from pathlib import Path

from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.object_store import ObjectStoreClient
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.checkpoint.remote_tier import RemoteTier
from hlat.checkpoint.run_id import RunId
from hlat.runtime.distributed.host_collectives import HostGroup
from tests.support.checkpoint.saved_states import assert_is_step, save
from tests.support.object_store import ObjectStore


def no_pause(seconds: float) -> None:
    """Do not wait between attempts."""


class Run:
    """A run folder and its prefix in the store."""

    def __init__(self, folder: Path, url: str, keep_last: int = 3, name: str = "tiny") -> None:
        self.folder, self.url, self.keep_last, self.name = folder, url, keep_last, name
        self.damaged: list[tuple[str, list[str]]] = []
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def root(self) -> Path:
        return self.folder / "checkpoints"

    def store(self, ranks: HostGroup | None = None) -> CheckpointStore:
        return CheckpointStore(self.root, self.keep_last, ranks=ranks)

    def remote(
        self, client: ObjectStoreClient | None = None, ranks: HostGroup | None = None, disk: Disk | None = None
    ) -> RemoteTier:
        def report(path: Path | str, problems: list[str]) -> None:
            self.damaged.append((str(path), problems))

        client = client or ObjectStoreClient(self.url, 0, no_pause)
        run_id = RunId(self.folder, self.name)
        return RemoteTier(client, ranks or HostGroup(), run_id, self.keep_last, on_damage=report, disk=disk)

    def save_and_upload(self, *steps: int) -> list[Path]:
        store, remote = self.store(), self.remote()
        folders = [save(store, step) for step in steps]
        for folder in folders:
            remote.upload(folder)
        return folders

    def on_new_machine(self, name: str = "elsewhere") -> "Run":
        """The same run on a machine without its files."""
        return Run(self.folder.with_name(name), self.url, self.keep_last)

    def fetch_on_new_machine(self, newer_than: int | None = None) -> int | None:
        """Fetch the newest checkpoint to a machine without files; check it and return its step."""
        other = self.on_new_machine("found")
        shutil.rmtree(other.folder, ignore_errors=True)
        store = other.store()
        step = other.remote().fetch_newest(store.root, newer_than)
        if step is not None:
            assert_is_step(store.newest(), step)
        return step


def objects_of(server: ObjectStore, url: str) -> Path:
    """Folder in which the server stores the objects of a prefix."""
    return server.folder / "objects" / url.removeprefix("s3://")
