"""Content of the shards that a run reads: compared by page as tokens are read, and with their checksums.

    tokens of a row --pages of 64 KiB--> ContentRecord --> the same as before, or a DataError with the shard
    shards that are not compared before training --a process of low priority--> checksums of the manifest

The process is started by rank 0 (``python -m hlat.data.prepared.shard_content``), because a thread would take the
interpreter from the training step. It ends with its parent, and does not read again what an earlier start compared.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hlat.data.manifest.manifest import DataManifest
from hlat.data.manifest.manifest_file import read_data_manifest
from hlat.data.sources.split import SPLITS, Split
from hlat.data.stores.content_record import ContentRecord
from hlat.runtime.errors import DataError

_FILE = "shards.content"
_PAGE = 1 << 16  # what a memory map reads at once anyway
_REMEDY = "Restore the file, or delete its folder and prepare again: the same corpus and settings give the same data."


class ShardContent:
    """Content of the shards of both splits.

    Args:
        folder: folder of the shards.
        manifest: its manifest.
        folders: folders with a record each; what one of them knows is compared with.
    """

    def __init__(self, folder: Path, manifest: DataManifest, folders: Sequence[Path]) -> None:
        self._folder, self._folders = folder, folders
        self._shards = [shard for split in SPLITS for shard in manifest.splits[split].shards]
        self._first = {"train": 0, "validation": len(manifest.splits["train"].shards)}
        self._paths = [folder / shard.file for shard in self._shards]
        files = [(str(path), shard.bytes) for path, shard in zip(self._paths, self._shards, strict=True)]
        self._record = ContentRecord([each / _FILE for each in folders], files, _PAGE, manifest.fingerprint, _REMEDY)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._problem, self._unfinished = threading.Lock(), "", ""

    def check(self, split: Split, shard: int, start: int, stop: int) -> None:
        """Compare or record the pages that overlap the bytes ``start <= byte < stop`` of a shard.

        Raises:
            DataError: the content differs; or the process that compares checksums has found a difference.
        """
        if self._process is not None or self._problem:
            self.look_at_process()
        number = self._first[split] + shard
        self._record.check(number, self._paths[number], start, stop)

    def look_at_process(self) -> str:
        """Return why the process has not compared all checksums; empty if it has, or was not started.

        Raises:
            DataError: it has found a difference.
        """
        with self._lock:  # training and evaluation read in threads of their own
            if self._process is not None and self._process.poll() is not None:
                output, _ = self._process.communicate()
                code, self._process = self._process.returncode, None
                self._problem = output.decode(errors="replace").strip() if code else ""
                self._unfinished = f"the process that compares them ended with code {code}" if code else ""
        if self._problem:
            raise DataError(self._problem)
        return self._unfinished

    def wait(self) -> None:
        """Wait until the process that compares checksums has ended."""
        if self._process is not None:
            self._process.wait()

    def compare_all(self, splits: Sequence[Split]) -> None:
        """Start the process that compares the shards of some splits with their checksums."""
        if splits:
            self._unfinished = "the run has ended before"
            command = [sys.executable, "-P", "-m", __name__, str(self._folder), ",".join(splits)]
            self._process = subprocess.Popen(
                [*command, *map(str, self._folders)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C must reach only the parent, with which it ends
            )

    def compare(self, splits: Sequence[Split]) -> None:
        """Compare the shards of some splits with their checksums, unless that was done since they were written.

        Raises:
            DataError: a shard differs, or cannot be read.
        """
        for number, shard in enumerate(self._shards):
            if ("train" if number < self._first["validation"] else "validation") in splits:
                self._record.complete(number, self._paths[number], shard.sha256)


def main() -> None:
    """Compare the shards of a folder; print the first difference and end with exit code 1."""
    folder, splits, *folders = sys.argv[1:]
    os.nice(19)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    manifest = read_data_manifest(Path(folder))
    assert manifest is not None, "the folder was opened"
    try:
        ShardContent(Path(folder), manifest, [Path(each) for each in folders]).compare(
            [split for split in SPLITS if split in splits.split(",")]
        )
    except DataError as error:
        sys.stdout.write(str(error))
        sys.exit(1)


def _end_with_parent() -> None:
    while os.read(0, 1):  # not by sys.stdin: Python aborts if a thread is reading from that when it ends
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
