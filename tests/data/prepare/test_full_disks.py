"""Preparation on a full disk fails without leaving half-written files and resumes later; its memory is bounded."""

import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hlat.data.prepare.preparation import prepare
from hlat.data.prepare.verification import verify_data
from hlat.data.prepared.shards import BoundaryWriter, ShardWriter
from hlat.data.source_file import sha256_of
from hlat.runtime.errors import StorageError
from tests.support.data.corpora import documents, prose, tree, write_jsonl
from tests.support.data.preparing import LARGE, data_config, start, workers

pytestmark = pytest.mark.usefixtures("small_units")


@pytest.mark.parametrize("limit", [1_000, 12_000, 60_000])
def test_a_preparation_resumes_after_a_file_size_limit(
    large: Path, tmp_path: Path, reference: dict[str, bytes], limit: int
) -> None:
    """The limit is hit while the tokenizer, a unit or a shard is written; EFBIG stands for every storage error."""
    out, config = tmp_path / "out", data_config(large, **LARGE)
    process = start(config, out, f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, -1))")
    message, trace = process.communicate(timeout=1200)
    assert process.returncode == StorageError.exit_code, trace
    assert f"{out}" in message and "File too large" in message and "data.prepared_dir" in message
    assert not [file for file in out.rglob("*.tmp") if file.is_file()]
    prepare(config, out, workers=2)
    assert tree(out) == reference


def test_abandoned_files_are_deleted_when_their_buffers_cannot_be_flushed(tmp_path: Path) -> None:
    """Closing a file flushes its buffer, which fails again on a full disk; the files are deleted all the same."""
    units, out = tmp_path / "units", tmp_path / "out"
    units.mkdir()
    out.mkdir()
    tokens = units / "0"
    tokens.write_bytes(bytes(40_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    shard, boundaries = ShardWriter(out, "train", 20_000, "uint16"), BoundaryWriter(out / "train-documents.bin")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
        with pytest.raises(OSError, match="File too large"):
            shard.append(tokens, np.full(20, 1_000), np.ones(20, dtype=np.bool_), sha256_of(tokens))
        boundaries.append(np.ones(500, dtype=np.int64))  # 4,000 bytes, all of them still in the buffer
        for writer in (shard, boundaries):
            writer.abandon()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(out.iterdir())


def test_a_full_disk_is_a_storage_error_without_half_written_files(large: Path, tmp_path: Path) -> None:
    """A file system of 200 kB, where the system allows mounting one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], check=False).returncode == 0
    )
    if not mounted:
        pytest.skip("mounting a small file system needs root")
    try:
        with pytest.raises(StorageError, match=r"No space left on device.*finished work is kept"):
            prepare(data_config(large, **LARGE), disk / "out", workers=2)
        assert not list(disk.rglob("*.tmp")) and not list(disk.rglob("manifest.json"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    "megabytes", [pytest.param(4, id="4 MB"), pytest.param(100, id="100 MB", marks=pytest.mark.slow)]
)
def test_a_long_document_is_tokenized_in_bounded_memory(tmp_path: Path, megabytes: int) -> None:
    """Encoded in one call, a document takes about 120 bytes of memory per byte of text, in pieces its text and tokens.

    The bound on a worker: 100 MB for Python and the libraries, 80 MB for the pieces in work, and 16 bytes per byte of
    text: 4 for the text (bytes, string, and its pieces), 12 for the tokens, at most one per byte (two copies of 4
    bytes, then two of 2).
    """
    file = tmp_path / "long.jsonl"
    block = prose(1, 1_000_000).encode()
    text = (block * (megabytes * 1_000_000 // len(block) + 1))[: megabytes * 1_000_000].decode(errors="ignore")
    write_jsonl(file, [text, *documents(20, 500)])
    peaks: list[int] = []

    def record_memory(stage: str, done: int, total: int) -> None:
        if stage == "tokenize":
            peaks.extend(_peak_memory(child.pid) for child in workers())

    config = data_config(file, tokenizer={"vocab_size": 400, "train_bytes": 100_000}, shard_tokens=10**9)
    prepare(config, tmp_path / "out", workers=1, progress=record_memory)
    assert 0 < max(peaks) < 180e6 + 16 * megabytes * 1e6
    prepared = verify_data(tmp_path / "out")
    assert sum(split.documents for split in prepared.manifest.splits.values()) == 21


def _peak_memory(pid: int) -> int:
    """Return a process's peak resident memory in bytes, as Linux counts it for its current program; 0 once ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
