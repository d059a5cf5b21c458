"""Complete verification of prepared data: every byte against the manifest, and the manifest against itself.

Nothing is changed. All problems are reported at once: a damaged disk rarely damages only one file.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from hlat.config import DataConfig
from hlat.data.prepare.corpus import ProgressCallback
from hlat.data.prepared.consistency import content_problems, manifest_problems, size_problems, tokenizer_problems
from hlat.data.prepared.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    DataManifest,
    QuarantineRecord,
    ShardRecord,
    SplitRecord,
    read_data_manifest,
)
from hlat.data.prepared.prepared_folder import PreparedData, open_prepared, setting_problems
from hlat.data.stores.remote import local_path
from hlat.data.tokenizers.load import load_saved
from hlat.runtime.errors import DataError
from hlat.runtime.terminal import plural

_CHUNK = 1 << 23  # bytes read at a time; a multiple of the sizes of a token and of a boundary
_CHANGED = "the checksum differs from the manifest's: restore the file, or prepare again"


def verify_data(
    dir: str | Path, config: DataConfig | None = None, progress: ProgressCallback | None = None
) -> PreparedData:
    """Open prepared data and check all of its content: checksums, token range, document boundaries, counts.

    With ``config``, the settings that decide the content are compared too. ``progress`` gets "verify_data" and bytes.
    DataError lists every problem found, one per line.
    """
    folder = Path(local_path(dir))
    manifest = read_data_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: no prepared data here (no {MANIFEST_FILE}). Run hlat data prepare first.")
    contradictions, sizes = list(manifest_problems(manifest)), list(size_problems(folder, manifest))
    found = [
        *([] if config is None else setting_problems(folder, manifest, config)),
        *contradictions,
        *_tokenizer_problems(folder, manifest),
        *sizes,
        # These checks map files by the sizes in the manifest.
        *([] if contradictions or sizes else _run_check("", lambda: list(content_problems(folder, manifest)))),
        *_file_problems(folder, manifest, {problem.partition(":")[0] for problem in sizes}, progress),
    ]
    if found:
        listed = "".join(f"\n  {problem}" for problem in found)
        raise DataError(f"{folder}: {plural(len(found), 'problem')}:{listed}")
    return open_prepared(folder)


def _tokenizer_problems(folder: Path, manifest: DataManifest) -> Iterator[str]:
    try:
        tokenizer = load_saved(folder / TOKENIZER_FOLDER)
    except DataError as error:
        yield str(error)
        return
    yield from tokenizer_problems(manifest, tokenizer)


def _file_problems(
    folder: Path, manifest: DataManifest, broken: set[str], progress: ProgressCallback | None
) -> Iterator[str]:
    """Yield the problems inside files that have their full size; files are read in parallel."""
    checks: list[tuple[str, int, Callable[[], list[str]]]] = []
    for record in manifest.splits.values():
        checks += ((each.file, each.bytes, partial(_shard_problems, folder, each, manifest)) for each in record.shards)
        size = 8 * (record.documents + 1)
        checks.append((record.documents_file, size, partial(_boundary_problems, folder, record)))
    if manifest.quarantine is not None:
        checks.append((manifest.quarantine.file, 0, partial(_bad_row_list_problems, folder, manifest.quarantine)))
    checks = [check for check in checks if check[0] not in broken]
    done, total = 0, sum(size for _, size, _ in checks)
    with ThreadPoolExecutor(min(len(checks), os.cpu_count() or 1) or 1) as pool:
        results = pool.map(lambda check: _run_check(check[0], check[2]), checks)
        for (_, size, _), found in zip(checks, results, strict=True):
            yield from found
            done += size
            if progress is not None:
                progress("verify_data", done, total)


def _run_check(name: str, check: Callable[[], list[str]]) -> list[str]:
    try:
        return check()
    except OSError as error:  # a problem like any other: the remaining files are still checked
        return [f"{name or error.filename}: cannot be read: {error.strerror}"]


def _shard_problems(folder: Path, shard: ShardRecord, manifest: DataManifest) -> list[str]:
    """Compare a shard's checksum, and check that its tokens are in the vocabulary."""
    digest, little = hashlib.sha256(), np.dtype(manifest.dtype).newbyteorder("<")
    outside: list[str] = []
    position = 0
    for chunk in _chunks(folder / shard.file):
        digest.update(chunk)
        # A damaged file may end within a token.
        tokens = np.frombuffer(chunk[: len(chunk) // little.itemsize * little.itemsize], dtype=little)
        if not outside and int(tokens.max(initial=0)) >= manifest.vocab_size:
            first = int(np.argmax(tokens >= manifest.vocab_size))
            where = f"token {tokens[first]} at {position + first}"
            outside = [f"{shard.file}: {where} is outside the vocabulary of {manifest.vocab_size}"]
        position += len(tokens)
    changed = [] if digest.hexdigest() == shard.sha256 else [f"{shard.file}: {_CHANGED}"]
    return changed + outside


def _boundary_problems(folder: Path, record: SplitRecord) -> list[str]:
    """Compare the checksum of document boundaries, and check that they ascend from 0 to the number of tokens."""
    digest = hashlib.sha256()
    before, sorted_from_zero = 0, True
    for number, chunk in enumerate(_chunks(folder / record.documents_file)):
        digest.update(chunk)
        starts = np.frombuffer(chunk, dtype="<u8")
        sorted_from_zero &= int(starts[0]) >= before and bool((starts[1:] >= starts[:-1]).all())
        sorted_from_zero &= number > 0 or int(starts[0]) == 0
        before = int(starts[-1])
    changed = [] if digest.hexdigest() == record.documents_sha256 else [f"{record.documents_file}: {_CHANGED}"]
    if not sorted_from_zero or before != record.tokens:
        changed.append(f"{record.documents_file}: not the boundaries of {record.tokens} tokens")
    return changed


def _bad_row_list_problems(folder: Path, record: QuarantineRecord) -> list[str]:
    try:
        content = (folder / record.file).read_bytes()
    except FileNotFoundError:
        return [f"{record.file}: is missing, should list {record.rows} rows"]
    return [] if hashlib.sha256(content).hexdigest() == record.sha256 else [f"{record.file}: {_CHANGED}"]


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
