"""The checkpoints of a run in an object store, copied from and to the checkpoints folder of the run.

    every rank   the files that it wrote   --hash compared--> <prefix>/step-00000040/...
    rank 0       manifest.json
                 COMMITTED                 created, never overwritten: the commit point

    COMMITTED, manifest --> files, hash compared --> <run.dir>/checkpoints/step-00000040, by the protocol of commit.py

A checkpoint in the store exists only if it has its marker. If its files do not match its manifest, the marker is
renamed to COMMITTED.bad. A prefix belongs to one run, which is named in its run.json.
"""

import functools
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hlat.checkpoint.format.filesystem import RUN_REMEDY, Disk, FileRecord, make_folders, storage_errors, write_file
from hlat.checkpoint.inventory import (
    BAD_MARKER_NAME,
    TRANSFERS,
    RemoteManifest,
    committed_steps,
    find_differences,
    list_remote_folders,
    read_remote_manifest,
    verify_remote,
)
from hlat.checkpoint.object_store import ObjectStoreClient
from hlat.checkpoint.protocol.commit import check_free_space, rename_into_place
from hlat.checkpoint.protocol.reader import (
    MANIFEST_NAME,
    MARKER_NAME,
    STAGING_PREFIX,
    STEP_FOLDER,
    CheckpointManifest,
    read_envelope,
    read_manifest,
    step_folder_name,
)
from hlat.checkpoint.protocol.store import DamageHandler, log_damage, prunable_steps
from hlat.checkpoint.run_id import RunId, claim
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import CheckpointError, CheckpointFormatError

_WRITTEN = re.compile(r"__(\d+)_\d+\.distcp")  # rank and number in the name of a tensor file

_writing = functools.partial(storage_errors, "cannot write a downloaded checkpoint", None)


class RemoteTier:
    """The checkpoints of one run below a URL, for its processes. All methods except ``url_of`` are collective."""

    def __init__(
        self,
        client: ObjectStoreClient,
        ranks: HostGroup,
        run_id: RunId,
        keep_last: int,
        keep_every_steps: int | None = None,
        *,
        on_damage: DamageHandler = log_damage,
        disk: Disk | None = None,
    ) -> None:
        self._client, self._ranks, self._run_id = client, ranks, run_id
        self._keep_last, self._keep_every_steps = keep_last, keep_every_steps
        self._on_damage, self._disk = on_damage, disk or Disk()
        self._claimed = False  # used on rank 0
        self._valid: set[int] = set()  # steps that this process has verified or uploaded; used on rank 0
        self._same: set[int] = set()  # steps known to equal the local checkpoints; used on rank 0

    def claim(self) -> None:
        """Check now, not at the first upload, that the prefix is this run's; see ``run_id.claim`` for errors."""
        self._ranks.run_on_rank0(self._claim)

    def url_of(self, name: str) -> str:
        return self._client.url_of(name)

    def upload(self, folder: Path) -> str:
        """Copy a committed checkpoint of the run to the store, unless the store has it, and return its URL.

        StorageError if the store fails; it does not have the checkpoint then. CheckpointError if the prefix belongs to
        another run, the store has a different checkpoint of that step, or the local one is damaged.
        """
        name = folder.name
        manifest = self._ranks.run_on_rank0(lambda: self._manifest_to_upload(folder))
        if manifest is not None:
            names = self._files_of_this_rank(manifest)
            self._ranks.run_on_all(lambda: self._send(folder, {file: manifest.files[file] for file in names}))
            # After all files of all ranks: the marker is the commit point.
            self._ranks.run_on_rank0(lambda: self._commit(folder, manifest))
        return self._client.url_of(name)

    def missing(self, root: Path) -> list[Path]:
        """Local checkpoints that the retention rule keeps and the store lacks or has differently, oldest first."""
        return self._ranks.run_on_rank0(lambda: self._missing(root))

    def prune(self) -> list[int]:
        """Remove interrupted uploads and what the retention rule does not keep; return the steps removed."""
        return self._ranks.run_on_rank0(self._prune)

    def fetch_newest(self, root: Path, newer_than: int | None) -> int | None:
        """Download the newest valid checkpoint, if newer than step ``newer_than``, to a folder that all ranks share.

        Return its step, or None. Damaged newer ones lose their marker and are reported.
        """
        steps = self._ranks.run_on_rank0(
            lambda: [step for step in self._committed() if newer_than is None or step > newer_than]
        )
        for step in reversed(steps):
            problems = self._fetch(root, step)
            if not problems:
                return step
            self._set_aside(step, problems)
        return None

    # --- upload ----------------------------------------------------------------------------------------------

    def _manifest_to_upload(self, folder: Path) -> CheckpointManifest | None:
        """Manifest of a checkpoint to be uploaded; None if the store has the checkpoint."""
        self._claim()
        stored = self._client.read(f"{folder.name}/{MARKER_NAME}")
        if stored is None:
            return read_manifest(folder)
        self._check_marker(folder, stored)
        return None

    def _check_marker(self, folder: Path, stored: bytes) -> None:
        if stored != read_envelope(folder, MARKER_NAME):
            raise CheckpointError(
                f"{self._client.url_of(folder.name)}: is a different checkpoint of that step than {folder} and is not "
                "overwritten. Two runs write to one prefix, or this run was moved back to an earlier step by hand: "
                "give each run its own checkpoint.remote, or remove the checkpoint from the store."
            )

    def _files_of_this_rank(self, manifest: CheckpointManifest) -> list[str]:
        # Files with this rank in their names; rank 0 has the rest.
        return [name for name in manifest.files if _writer(name) % self._ranks.world == self._ranks.rank]

    def _send(self, folder: Path, files: Mapping[str, FileRecord]) -> None:
        with ThreadPoolExecutor(TRANSFERS) as pool:
            # All are tried, also after one has failed: the next attempt has less to send.
            sent = [
                pool.submit(self._client.upload, folder / name, f"{folder.name}/{name}", record)
                for name, record in files.items()
            ]
        for each in sent:
            each.result()

    def _commit(self, folder: Path, manifest: CheckpointManifest) -> None:
        self._client.put(f"{folder.name}/{MANIFEST_NAME}", read_envelope(folder, MANIFEST_NAME))
        marker = read_envelope(folder, MARKER_NAME)
        self._check_marker(folder, self._client.create(f"{folder.name}/{MARKER_NAME}", marker))
        self._valid.add(manifest.step)
        self._same.add(manifest.step)

    def _missing(self, root: Path) -> list[Path]:
        remote = self._committed()
        local = {int(match[1]): path for path in root.iterdir() if (match := STEP_FOLDER.fullmatch(path.name))}
        steps = sorted({*remote, *local})
        pruned = prunable_steps(steps, self._keep_last, self._keep_every_steps, lambda step: True)
        kept = [step for step in sorted(local) if step not in pruned]
        return [local[step] for step in kept if step not in remote or not self._is_same(step, local[step])]

    def _is_same(self, step: int, folder: Path) -> bool:
        if step not in self._same:
            try:
                self._check_marker(folder, self._client.read(f"{folder.name}/{MARKER_NAME}") or b"")
            except CheckpointError:  # reported when it is uploaded
                return False
            self._same.add(step)
        return True

    # --- download --------------------------------------------------------------------------------------------

    def _fetch(self, root: Path, step: int) -> list[str]:
        """Download one checkpoint; return what is wrong with it, empty if nothing."""
        remote = self._ranks.run_on_rank0(lambda: self._read_manifest(step))
        if isinstance(remote, str):
            return [remote]
        name = step_folder_name(step)
        staging = root / f"{STAGING_PREFIX}{name}"
        self._ranks.run_on_rank0(lambda: self._stage(staging, remote.manifest))
        try:
            mine = self._ranks.run_on_all(lambda: self._receive(name, staging, remote.manifest))
            problems = [problem for of_rank in self._ranks.all_gather(mine) for problem in of_rank]
            if not problems:
                self._ranks.run_on_rank0(lambda: self._finish(staging, root / name, remote))
        finally:
            if self._ranks.is_first:
                self._disk.discard(staging)
        return problems

    def _set_aside(self, step: int, problems: list[str]) -> None:
        self._ranks.run_on_rank0(lambda: self._rename_marker(step))
        if self._ranks.is_first:
            self._on_damage(self._client.url_of(step_folder_name(step)), problems)

    def _read_manifest(self, step: int) -> RemoteManifest | str:
        try:
            return read_remote_manifest(self._client, step)
        except CheckpointFormatError:  # not damage: it must not be set aside
            raise
        except CheckpointError as error:
            return str(error)

    @_writing()
    def _stage(self, staging: Path, manifest: CheckpointManifest) -> None:
        disk, needed = self._disk, sum(manifest.file_bytes.values())
        disk.remove_tree(staging)
        failure = f"cannot download {self._client.url_of(staging.name.removeprefix(STAGING_PREFIX))}"
        check_free_space(disk, staging.parent, needed, failure, RUN_REMEDY)
        make_folders(disk, staging, inside=staging.parents[1])  # the run folder
        for folder in sorted({(staging / name).parent for name in manifest.files}):
            make_folders(disk, folder, inside=staging)

    def _receive(self, name: str, staging: Path, manifest: CheckpointManifest) -> list[str]:
        mine = self._files_of_this_rank(manifest)
        with ThreadPoolExecutor(TRANSFERS) as pool:
            found = [pool.submit(self._client.download, f"{name}/{file}", self._disk, staging / file) for file in mine]
        records = {file: each.result() for file, each in zip(mine, found, strict=True)}
        # Every rank syncs the folders that it wrote to; rank 0 renames afterwards.
        with _writing():
            for folder in {(staging / file).parent for file in mine}:
                self._disk.sync_folder(folder)
        return find_differences(manifest, records)

    @_writing()
    def _finish(self, staging: Path, final: Path, remote: RemoteManifest) -> None:
        write_file(self._disk, staging / MANIFEST_NAME, remote.text)
        write_file(self._disk, staging / MARKER_NAME, remote.marker)
        self._disk.sync_folder(staging)
        rename_into_place(self._disk, staging, final)
        self._valid.add(remote.manifest.step)

    # --- in the store; rank 0 only -------------------------------------------------------------------------

    def _claim(self) -> None:
        if not self._claimed:
            claim(self._client, self._run_id)
            self._claimed = True

    def _committed(self) -> list[int]:
        self._claim()
        return committed_steps(self._client)

    def _prune(self) -> list[int]:
        self._claim()
        folders = list_remote_folders(self._client)
        committed = [step for step, names in folders.items() if MARKER_NAME in names]
        removed = prunable_steps(committed, self._keep_last, self._keep_every_steps, self._is_valid)
        unmarked = [step for step, names in folders.items() if not {MARKER_NAME, BAD_MARKER_NAME} & names]
        # An unmarked folder after the newest checkpoint may be an upload in progress.
        interrupted = [step for step in unmarked if step < max(committed, default=0)]
        for step in [*removed, *interrupted]:
            # The marker first: an interrupted removal leaves no checkpoint that lacks files.
            self._client.remove(f"{step_folder_name(step)}/{MARKER_NAME}")
            self._client.remove(step_folder_name(step))
        return removed

    def _is_valid(self, step: int) -> bool:
        if step not in self._valid and not verify_remote(self._client, step):
            self._valid.add(step)
        return step in self._valid

    def _rename_marker(self, step: int) -> None:
        name = step_folder_name(step)
        marker = self._client.read(f"{name}/{MARKER_NAME}")
        if marker is not None:
            # Put before remove: without either marker it would be an interrupted upload, and be removed.
            self._client.put(f"{name}/{BAD_MARKER_NAME}", marker)
            self._client.remove(f"{name}/{MARKER_NAME}")


def _writer(name: str) -> int:
    match = _WRITTEN.search(name)
    return int(match[1]) if match else 0
