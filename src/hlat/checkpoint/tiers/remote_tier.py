"""The checkpoints of a run in an object store, by the protocol of its own folder, which they are made from.

    every rank   the files that it wrote   --hash compared--> <prefix>/step-00000040/...
    rank 0       manifest.json
                 COMMITTED                 created, never overwritten: the instant

    COMMITTED, manifest --> files, hash compared --> <run.dir>/checkpoints/step-00000040, by the protocol of commit.py

Without its marker a checkpoint does not exist there. One whose files are not what its manifest says loses its marker,
which is kept as COMMITTED.bad. A prefix belongs to one run, which run.json in it names.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from hlat.checkpoint.format import RUN_REMEDY, Disk, FileRecord, make_folders, storage_error, write_file
from hlat.checkpoint.protocol import (
    MANIFEST_NAME,
    MARKER_NAME,
    STAGING_PREFIX,
    STEP_FOLDER,
    CheckpointManifest,
    DamageHandler,
    check_free_space,
    log_damage,
    prunable_steps,
    read_manifest,
    rename_into_place,
    step_folder_name,
)
from hlat.checkpoint.tiers.object_store import ObjectStoreClient
from hlat.checkpoint.tiers.remote_reader import (
    BAD_MARKER_NAME,
    TRANSFERS,
    RemoteManifest,
    committed_steps,
    find_differences,
    list_remote_folders,
    read_remote_manifest,
    verify_remote,
)
from hlat.checkpoint.tiers.run_id import RunId, claim
from hlat.runtime import CheckpointError
from hlat.runtime.distributed import HostGroup

_WRITTEN = re.compile(r"__(\d+)_\d+\.distcp")  # rank and number of a file of tensors

T = TypeVar("T")


class RemoteTier:
    """The checkpoints of one run below a URL, for its processes. Its methods are collective.

    Args:
        objects: what is below the URL.
        ranks: the processes of the run.
        owner: the run; that of rank 0 counts.
        keep_last: as for ``CheckpointStore``, which has the same rule.
        keep_every_steps: the same.
        on_damage: told, on rank 0, of each damaged checkpoint, and what is wrong with it.
        disk: the local file system's operations.
    """

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
        self._claimed = False  # known on rank 0
        self._whole: set[int] = set()  # steps of which this process has seen every byte; known on rank 0
        self._same: set[int] = set()  # steps that are known to be what the local folder has; known on rank 0

    def claim(self) -> None:
        """See that the URL is this run's, now rather than at the first upload; see ``owner.claim`` for errors."""
        self._ranks.run_on_rank0(self._claim)

    def url_of(self, name: str) -> str:
        """The URL of something in the store; not collective."""
        return self._client.url_of(name)

    def upload(self, folder: Path) -> str:
        """Copy a committed checkpoint of the run to the store; nothing happens if it is there.

        Returns:
            Its URL.

        Raises:
            StorageError: the store does not answer, or refuses. The checkpoint does not exist there.
            CheckpointError: the prefix is another run's, there is another checkpoint of that step, or the local one is
                damaged.
        """
        name = folder.name
        manifest = self._ranks.run_on_rank0(lambda: self._to_upload(folder))
        if manifest is not None:
            names = self._share(manifest)
            self._ranks.run_on_all(lambda: self._send(folder, {file: manifest.files[file] for file in names}))
            self._ranks.run_on_rank0(lambda: self._vouch(folder, manifest))
        return self._client.url_of(name)

    def missing(self, root: Path) -> list[Path]:
        """The checkpoints of a local folder that the store should have and does not, or not the same; oldest first.

        Raises:
            StorageError: the store does not answer, or refuses.
        """
        return self._ranks.run_on_rank0(lambda: self._missing(root))

    def prune(self) -> list[int]:
        """Remove the checkpoints that the retention rule does not keep, and uploads that were broken off.

        Returns:
            The steps removed.

        Raises:
            StorageError: the store refused; what was not removed stays whole.
        """
        return self._ranks.run_on_rank0(self._prune)

    def fetch_newest(self, root: Path, newer_than: int | None) -> int | None:
        """Bring the newest checkpoint that is whole into a local folder, if it is of a later step.

        Each newer one that is damaged loses its marker and is reported.

        Args:
            root: the folder of checkpoints that all ranks share.
            than: the step of the newest local checkpoint; None if there is none.

        Returns:
            The step of what came; None if nothing did.

        Raises:
            CheckpointError: the prefix is another run's.
            StorageError: the store does not answer, or the disk refused.
        """
        steps = self._ranks.run_on_rank0(lambda: [step for step in self._committed() if newer_than is None or step > newer_than])
        for step in reversed(steps):
            problems = self._fetch(root, step)
            if not problems:
                return step
            self._set_aside(step, problems)
        return None

    # --- to the store ----------------------------------------------------------------------------------------------

    def _to_upload(self, folder: Path) -> CheckpointManifest | None:
        """What is to be uploaded; None if it is there already."""
        self._claim()
        there = self._client.read(f"{folder.name}/{MARKER_NAME}")
        if there is None:
            return read_manifest(folder)
        self._check_marker(folder, there)
        return None

    def _check_marker(self, folder: Path, there: bytes) -> None:
        if there != _bytes(folder / MARKER_NAME):
            raise CheckpointError(
                f"{self._client.url_of(folder.name)}: is another checkpoint of that step than {folder}; it is left as "
                "it is. Two runs write to one prefix, or this one went back to an earlier step by hand: give each run "
                "a checkpoint.remote of its own, or remove what is there."
            )

    def _share(self, manifest: CheckpointManifest) -> list[str]:
        """The files that this rank sends: those it wrote, whose names end in its number; others are rank 0's."""
        return [name for name in manifest.files if _writer(name) % self._ranks.world == self._ranks.rank]

    def _send(self, folder: Path, files: Mapping[str, FileRecord]) -> None:
        with ThreadPoolExecutor(TRANSFERS) as pool:
            tasks = [
                pool.submit(self._client.upload, folder / name, f"{folder.name}/{name}", record)
                for name, record in files.items()
            ]
            for task in tasks:
                task.result()

    def _vouch(self, folder: Path, manifest: CheckpointManifest) -> None:
        self._client.put(f"{folder.name}/{MANIFEST_NAME}", _bytes(folder / MANIFEST_NAME))
        marker = _bytes(folder / MARKER_NAME)
        self._check_marker(folder, self._client.create(f"{folder.name}/{MARKER_NAME}", marker))
        self._whole.add(manifest.step)
        self._same.add(manifest.step)

    def _missing(self, root: Path) -> list[Path]:
        there = self._committed()
        here = {int(match[1]): path for path in root.iterdir() if (match := STEP_FOLDER.fullmatch(path.name))}
        steps = sorted({*there, *here})
        gone = prunable_steps(steps, self._keep_last, self._keep_every_steps, lambda step: True)
        kept = [step for step in sorted(here) if step not in gone]
        return [here[step] for step in kept if step not in there or not self._is_same(step, here[step])]

    def _is_same(self, step: int, folder: Path) -> bool:
        if step not in self._same:
            try:
                self._check_marker(folder, self._client.read(f"{folder.name}/{MARKER_NAME}") or b"")
            except CheckpointError:  # which is said when it is to be uploaded
                return False
            self._same.add(step)
        return True

    # --- from the store --------------------------------------------------------------------------------------------

    def _fetch(self, root: Path, step: int) -> list[str]:
        """Bring one checkpoint; what is wrong with it, if anything."""
        vouched = self._ranks.run_on_rank0(lambda: self._vouched(step))
        if isinstance(vouched, str):
            return [vouched]
        name = step_folder_name(step)
        staging = root / f"{STAGING_PREFIX}{name}"
        self._ranks.run_on_rank0(lambda: self._local(lambda: self._stage(staging, vouched.manifest)))
        try:
            mine = self._ranks.run_on_all(lambda: self._receive(name, staging, vouched.manifest))
            problems = [problem for told in self._ranks.all_gather(mine) for problem in told]
            if not problems:
                self._ranks.run_on_rank0(lambda: self._local(lambda: self._finish(staging, root / name, vouched)))
        finally:
            if self._ranks.is_first:
                self._disk.discard(staging)
        return problems

    def _set_aside(self, step: int, problems: list[str]) -> None:
        self._ranks.run_on_rank0(lambda: self._take_marker_away(step))
        if self._ranks.is_first:
            self._on_damage(self._client.url_of(step_folder_name(step)), problems)

    def _vouched(self, step: int) -> RemoteManifest | str:
        try:
            return read_remote_manifest(self._client, step)
        except CheckpointError as error:
            return str(error)

    def _stage(self, staging: Path, manifest: CheckpointManifest) -> None:
        disk, needed = self._disk, sum(manifest.file_bytes.values())
        disk.remove_tree(staging)
        doing = f"cannot fetch {self._client.url_of(staging.name.removeprefix(STAGING_PREFIX))}"
        check_free_space(disk, staging.parent, needed, doing, RUN_REMEDY)
        make_folders(disk, staging, inside=staging.parents[1])  # the run's folder
        for folder in sorted({(staging / name).parent for name in manifest.files}):
            make_folders(disk, folder, inside=staging)

    def _receive(self, name: str, staging: Path, manifest: CheckpointManifest) -> list[str]:
        mine = self._share(manifest)
        with ThreadPoolExecutor(TRANSFERS) as pool:
            tasks = [pool.submit(self._client.download, f"{name}/{it}", self._disk, staging / it) for it in mine]
            found = {file: task.result() for file, task in zip(mine, tasks, strict=True)}
        self._local(lambda: self._sync({(staging / it).parent for it in mine}))
        return find_differences(manifest, found)

    def _sync(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            self._disk.sync_folder(folder)

    def _finish(self, staging: Path, final: Path, vouched: RemoteManifest) -> None:
        write_file(self._disk, staging / MANIFEST_NAME, vouched.text)
        write_file(self._disk, staging / MARKER_NAME, vouched.marker)
        self._disk.sync_folder(staging)
        rename_into_place(self._disk, staging, final)
        self._whole.add(vouched.manifest.step)

    def _local(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except OSError as exc:
            raise storage_error(exc, "cannot keep a checkpoint that was fetched", Path(exc.filename or ".")) from exc

    # --- in the store; all of it on rank 0 -------------------------------------------------------------------------

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
        removed = prunable_steps(committed, self._keep_last, self._keep_every_steps, self._is_whole)
        unmarked = [step for step, names in folders.items() if not {MARKER_NAME, BAD_MARKER_NAME} & names]
        broken_off = [step for step in unmarked if step < max(committed, default=0)]
        for step in [*removed, *broken_off]:
            self._client.remove(f"{step_folder_name(step)}/{MARKER_NAME}")
            self._client.remove(step_folder_name(step))
        return removed

    def _is_whole(self, step: int) -> bool:
        if step not in self._whole and not verify_remote(self._client, step):
            self._whole.add(step)
        return step in self._whole

    def _take_marker_away(self, step: int) -> None:
        name = step_folder_name(step)
        marker = self._client.read(f"{name}/{MARKER_NAME}")
        if marker is not None:
            self._client.put(f"{name}/{BAD_MARKER_NAME}", marker)
            self._client.remove(f"{name}/{MARKER_NAME}")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise CheckpointError(f"{path.parent}: not a checkpoint that can be read ({exc.strerror})") from exc


def _writer(name: str) -> int:
    match = _WRITTEN.search(name)
    return int(match[1]) if match else 0
